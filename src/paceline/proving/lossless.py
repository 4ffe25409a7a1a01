"""L1: the same tokens, one for one, however they are computed. Exact arithmetic differences aside, which is
why it is asked for in fp32 on a CPU, where no result depends on how rows are batched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from paceline.config import EngineConfig
from paceline.engine.core import EngineCore
from paceline.engine.factory import make_core
from paceline.engine.messages import HedgeStats, SequenceOutput
from paceline.proving.drive import complete, tokens_of
from paceline.proving.gates import Violation, first_difference, nothing_held, same_tokens
from paceline.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Sampling:
    """A way to sample; every request gets a seed of its own.

    Attributes:
        name: in tables.
        fields: of ``SamplingParams``.
    """

    name: str
    fields: Mapping[str, Any]

    def params(self, count: int, max_tokens: int, series: int = 0) -> list[SamplingParams]:
        """Parameters of ``count`` requests; every series has other seeds."""
        return [
            SamplingParams(
                seed=1000 + i + series * 1_000_000, max_tokens=max_tokens, ignore_eos=True, **self.fields
            )
            for i in range(count)
        ]


GREEDY = Sampling("greedy", {"temperature": 0.0})
PLAIN = Sampling("T = 1", {"temperature": 1.0})
SAMPLINGS = (
    GREEDY,
    PLAIN,
    Sampling("top-k, top-p", {"temperature": 0.8, "top_k": 40, "top_p": 0.9}),
    Sampling(
        "penalties, bias, min-p",
        {
            "temperature": 0.9,
            "min_p": 0.02,
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.3,
            "presence_penalty": 0.2,
            "logit_bias": {5: 2.0, 17: -3.0},
        },
    ),
)


ALL_DRAFTS = {"verify_planner": "off"}
"""A proof wants to see drafts, whether or not they pay."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to run the engine.

    Attributes:
        name: in tables.
        options: engine options that differ.
        speculative: fields of the speculative config that differ; None switches speculation off.
        lookahead: steps in flight.
        passes: how often the prompts are run; from the second on they are in the prefix cache.
        share: only every so many-th prompt is run: for modes of many small steps.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    speculative: Mapping[str, Any] | None = field(default_factory=dict)
    lookahead: int = 0
    passes: int = 1
    share: int = 1

    def core(self, target: EngineConfig, drafter: Mapping[str, Any]) -> EngineCore:
        """An engine in this mode.

        Args:
            target: engine options that name the model.
            drafter: fields of the speculative config that name the drafter.
        """
        speculative = {} if self.speculative is None else {**ALL_DRAFTS, **drafter, **self.speculative}
        options = {**msgspec.structs.asdict(target), **self.options, "speculative_config": speculative}
        return make_core(EngineConfig.of(**options), lookahead=self.lookahead)


def all_modes(prompts: Sequence[list[int]], max_tokens: int, block_size: int = 16) -> list[Mode]:
    """Every mode, sized for these prompts."""
    longest = max(len(prompt) for prompt in prompts) + max_tokens
    # The longest sequence and little more fits: with eight running, somebody has to go.
    scarce = -(-longest // block_size) + 4
    return [
        Mode("plain, one at a time", {"max_num_seqs": 1}, speculative=None, share=4),
        Mode("drafts"),
        Mode("drafts, cached", passes=2),
        Mode("drafts, one at a time", {"max_num_seqs": 1}, share=4),
        Mode("drafts, 11-row chunks", {"max_num_seqs": 8, "max_num_batched_tokens": 11}, share=4),
        Mode("drafts, preempted", {"max_num_seqs": 8, "num_blocks": scarce}),
        Mode("drafts, lookahead", lookahead=1, passes=2),
        Mode("drafts, lookahead, preempted", {"max_num_seqs": 8, "num_blocks": scarce}, lookahead=1),
        Mode("drafts, planned", speculative={"verify_planner": "auto"}, lookahead=1, passes=2),
        Mode("drafts, 2 per round", speculative={"num_speculative_tokens": 2}),
        Mode("drafts, window of 24", speculative={"draft_window": 24}, passes=2),
        Mode("drafts, blocks of 64", {"block_size": 64}),
        Mode("drafts, hedged", speculative={"hedge": 8}, passes=2),
        Mode(
            "drafts, hedged, lookahead, preempted",
            {"max_num_seqs": 8, "num_blocks": scarce},
            {"hedge": 4},
            lookahead=1,
            share=2,
        ),
        Mode(
            "drafts, hedged, planned",
            speculative={"hedge": 8, "verify_planner": "auto"},
            lookahead=1,
            passes=2,
        ),
        Mode("drafts, hedged, captured state", speculative={"hedge": 8, "draft_state": "capture"}, share=2),
        Mode("drafts, captured state", speculative={"draft_state": "capture"}, passes=2),
        Mode(
            "drafts, captured, preempted",
            {"max_num_seqs": 8, "num_blocks": scarce},
            {"draft_state": "capture"},
        ),
    ]


@dataclass(slots=True)
class ModeResult:
    """One row of the proof.

    Attributes:
        num_differing: tokens at or after the first difference of their sequence.
        accept_length: mean tokens per verify step; None when nothing was drafted.
        hedge_wins, hedge_losses: hedged spans in which a chain won, or none did.
    """

    mode: str
    sampling: str
    num_prompts: int = 0
    num_tokens: int = 0
    num_differing: int = 0
    accept_length: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    hedge_wins: int = 0
    hedge_losses: int = 0
    violations: list[Violation] = field(default_factory=list)

    def count_hedges(self, before: HedgeStats | None, after: HedgeStats | None) -> None:
        """Add what came of chains between two looks at the counters."""
        if before is not None and after is not None:
            self.hedge_wins += after.num_wins - before.num_wins
            self.hedge_losses += after.num_losses - before.num_losses


Reference = dict[str, list[list[int]]]
"""Plain output of every prompt, by sampling."""


class LosslessProof:
    """Plain output of prompts, and what each mode makes of them.

    Args:
        target: engine options that name the model.
        drafter: fields of the speculative config that name the drafter.
        prompts: token ids.
        max_tokens: tokens to generate for each.
        reference: plain output, when it is known from another proof of the same prompts.
    """

    def __init__(
        self,
        target: EngineConfig,
        drafter: Mapping[str, Any],
        prompts: Sequence[list[int]],
        max_tokens: int,
        reference: Reference | None = None,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._prompts = prompts
        self._max_tokens = max_tokens
        self.reference = self._plain() if reference is None else reference

    def _plain(self) -> Reference:
        """What each prompt gives without drafts and cache."""
        mode = Mode("plain", {"enable_prefix_caching": False}, speculative=None)
        core = mode.core(self._target, self._drafter)
        return {sampling.name: tokens_of(self._complete(core, sampling, 1)) for sampling in SAMPLINGS}

    def _complete(self, core: EngineCore, sampling: Sampling, share: int) -> list[list[SequenceOutput]]:
        params = sampling.params(len(self._prompts), self._max_tokens)
        return complete(core, self._prompts[::share], params[::share])

    def run(self, mode: Mode, share: int = 1) -> list[ModeResult]:
        """All samplings in a mode, on one engine whose cache is emptied in between.

        Args:
            mode: how to run.
            share: only every so many-th prompt, on top of the mode's own share.
        """
        share *= mode.share
        core = mode.core(self._target, self._drafter)
        results = []
        for sampling in SAMPLINGS:
            core.reset_prefix_cache()
            result = ModeResult(mode.name, sampling.name)
            before = msgspec.structs.replace(core.stats())
            for number in range(mode.passes):
                outputs = self._complete(core, sampling, share)
                result.num_prompts = len(outputs)
                self._compare(result, tokens_of(outputs), self.reference[sampling.name][::share])
                result.violations += nothing_held(core)
                if number:
                    result.num_cached_tokens += sum(group[0].num_cached_tokens for group in outputs)
            stats = core.stats()
            rounds = stats.num_drafts - before.num_drafts
            accepted = stats.num_accepted_tokens - before.num_accepted_tokens
            result.accept_length = 1 + accepted / rounds if rounds else None
            result.num_preemptions = stats.num_preemptions - before.num_preemptions
            result.count_hedges(before.hedging, stats.hedging)
            results.append(result)
        return results

    @staticmethod
    def _compare(result: ModeResult, got: list[list[int]], expected: list[list[int]]) -> None:
        result.num_tokens += sum(len(tokens) for tokens in expected)
        result.violations += same_tokens(expected, got)
        result.num_differing += count_differing(expected, got)


def count_differing(expected: Sequence[Sequence[int]], got: Sequence[Sequence[int]]) -> int:
    """Tokens at or after the first difference of their sequence."""
    differences = (first_difference(want, have) for want, have in zip(expected, got, strict=True))
    return sum(
        max(len(want) - at, 1) for want, at in zip(expected, differences, strict=True) if at is not None
    )
