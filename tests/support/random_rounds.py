"""Random decode rounds for two runners in step: whatever one does with them, the other must do too."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.models.attention import KVCache
from paceline.models.config import Qwen3Config
from paceline.models.drafter import Drafter
from paceline.models.qwen3 import Qwen3ForCausalLM
from paceline.runtime.plan import SlotInit, Span, SpanResult, StepPlan, TableUpdate
from paceline.runtime.runner import Runner
from paceline.sampling.params import SamplingParams
from paceline.speculation.hedging import HedgeLimits

BLOCK = 16
HEDGED = 2
"""Sequences that may have chains, in runners with ``hedge``."""
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.7, "frequency_penalty": 0.5, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 0, "logit_bias": {11: 3.0}},
]


@dataclass
class Shape:
    """What both runners are made with.

    Attributes:
        slots: sequences at most.
        length: longest sequence in tokens.
        hedge: whether rounds may have chains.
    """

    slots: int
    length: int
    hedge: bool = False

    @property
    def columns(self) -> int:
        """Blocks of a sequence, with room for a block of drafts behind the longest."""
        return -(-(self.length + 16) // BLOCK)


def make_runner(
    model: Qwen3ForCausalLM,
    drafter: Drafter,
    shape: Shape,
    rounds: Literal["none", "eager", "captured"],
) -> Runner:
    """A runner whose caches hold noise, the same in each. Its eager rounds have the captured ones' sizes."""
    hedging = None
    if shape.hedge:
        hedging = HedgeLimits(HEDGED, (0, 1), drafter.config.max_drafts, (2,))
    device = model.embed_tokens.weight.device
    runner = Runner(
        model,
        _noise(model.config, shape, hedging, model.embed_tokens.weight),
        max_num_seqs=shape.slots,
        max_model_len=shape.length,
        device=device,
        drafter=drafter,
        num_drafts=drafter.config.max_drafts,
        draft_cache=_noise(drafter.config.layers, shape, hedging, model.embed_tokens.weight),
        rounds=rounds,
        hedging=hedging,
    )
    if runner.rounds is not None and rounds == "eager":
        runner.rounds.shapes.captured = True
        runner.passes = runner.make_passes(shape.length, 512)
    return runner


def _noise(config: Qwen3Config, shape: Shape, hedging: HedgeLimits | None, like: Tensor) -> KVCache:
    chain_blocks = 0 if hedging is None else -(-hedging.max_rows // BLOCK)
    cache = KVCache.allocate(
        config.num_hidden_layers,
        shape.slots * shape.columns + chain_blocks + 1,
        BLOCK,
        config.num_key_value_heads,
        config.head_dim,
        dtype=like.dtype,
        device=like.device,
    )
    generator = torch.Generator(like.device).manual_seed(0)
    for values in (cache.k, cache.v):
        values.normal_(generator=generator)
    return cache


def kept(runner: Runner, shape: Shape) -> dict[str, Tensor]:
    """All that a runner keeps of its sequences, their K/V included."""
    assert runner.drafting is not None
    own = slice(0, shape.slots * shape.columns)
    return {
        "tables": runner.state.block_tables[: shape.slots],
        "tokens": runner.state.tokens[: shape.slots],
        "num_computed": runner.state.num_computed[: shape.slots],
        "k": runner.cache.k[:, own],
        "v": runner.cache.v[:, own],
        "draft k": runner.drafting.cache.k[:, own],
        "draft v": runner.drafting.cache.v[:, own],
        "chances": runner.drafting.chances[: shape.slots],
    }


def differing(first: Runner, second: Runner, shape: Shape) -> list[str]:
    """What two runners keep differently, and where it first differs."""
    ours, theirs = kept(first, shape), kept(second, shape)
    return [
        f"{name} at {(ours[name] != theirs[name]).nonzero()[0].tolist()}"
        for name in ours
        if not torch.equal(ours[name], theirs[name])
    ]


class RandomRounds:
    """Makes plans: some of the sequences, with all their drafts, some of them, or none, drafting again or
    not. Sequences end and others take their slots, short ones after long ones, most of them just before a
    multiple of a power of two; some begin with rows of their prompts.

    Args:
        shape: of the runners.
        num_drafts: of their drafter.
        vocab_size: of their model.
        seed: of all choices.
        depths: drafts of a sequence, on average, that plans may have rows for.

    Attributes:
        shape: the same.
    """

    def __init__(
        self,
        shape: Shape,
        num_drafts: int,
        vocab_size: int,
        seed: int,
        depths: Sequence[int | None] = (None,),
    ) -> None:
        self.shape, self._num_drafts, self._vocab_size = shape, num_drafts, vocab_size
        self._depths = depths
        self._rng = random.Random(seed)
        blocks = list(range(shape.slots * shape.columns))
        self._rng.shuffle(blocks)
        self._tables = [blocks[i :: shape.slots] for i in range(shape.slots)]
        self._known = [0] * shape.slots  # tokens up to the anchor; 0: nobody is there
        self._drafted = [False] * shape.slots
        self._top = [0] * shape.slots
        self._num_plans = 0

    def plan(self) -> StepPlan:
        """The next round."""
        rng, shape = self._rng, self.shape
        plan = StepPlan(self._num_plans, max_context=shape.length, depth=rng.choice(self._depths))
        self._num_plans += 1
        for slot in rng.sample(range(shape.slots), rng.randint(1, shape.slots)):
            room = shape.length - self._known[slot] - self._num_drafts - 1
            lead = 0
            if self._known[slot] == 0 or room < 0 or rng.random() < 0.1:
                lead = self._begin(plan, slot)
            drafts = 0
            if self._drafted[slot] and rng.random() < 0.9:
                drafts = self._num_drafts if rng.random() < 0.6 else rng.randint(1, self._num_drafts)
            chains = HEDGED if shape.hedge and rng.random() < 0.6 else 0
            propose = rng.random() < 0.8
            top = self._top[slot]
            rows = lead + 1 + drafts
            plan.spans.append(Span(slot, rows, drafts, propose, top=top, chains=0 if lead else chains))
        return plan

    def _begin(self, plan: StepPlan, slot: int) -> int:
        """A new tenant of a slot; returns its rows before the anchor."""
        rng, shape = self._rng, self.shape
        longest = shape.length - self._num_drafts - 1
        edge = 2 ** rng.randint(0, longest.bit_length())
        length = rng.randint(1, longest)
        if rng.random() < 0.7:
            length = max(1, min(longest, edge * rng.randint(1, 4) - rng.randint(0, self._num_drafts)))
        tokens = [rng.randrange(self._vocab_size) for _ in range(length)]
        params = SamplingParams(max_tokens=None, ignore_eos=True, **rng.choice(WAYS))
        lead = rng.randint(0, min(length - 1, 40)) if rng.random() < 0.5 else 0
        plan.inits.append(SlotInit(slot, tokens, length - 1 - lead, length, params, rng.getrandbits(40)))
        plan.table.append(TableUpdate(slot, 0, self._tables[slot]))
        self._known[slot], self._drafted[slot], self._top[slot] = length, False, params.logprobs or 0
        return lead

    def learn(self, plan: StepPlan, results: Sequence[SpanResult]) -> None:
        """What became of a plan."""
        for span, result in zip(plan.spans, results, strict=True):
            assert result.error is None
            self._known[span.slot] += len(result.tokens)
            self._drafted[span.slot] = span.propose


def run_both(
    first: Runner, second: Runner, rounds: RandomRounds, count: int, *, exact: bool
) -> tuple[int, int]:
    """Run the same rounds on both, which must report the same: log-probabilities bit for bit when ``exact``,
    else about, and then the state they keep as well. Of many rounds some must have run rows of prompts.
    Returns how many rounds had spans with fewer drafts beside others with more, and how many did not verify
    all that there were.
    """
    mixed = packed = prompts = 0
    assert first.rounds is not None
    for _ in range(count):
        plan = rounds.plan()
        ours, theirs = (runner.launch(plan).result() for runner in (first, second))
        where = f"round {plan.step}: {plan.spans}"
        if exact:
            assert differing(first, second, rounds.shape) == [], where
            assert ours == theirs, where
        for a, b in zip(ours, theirs, strict=True):
            assert a.tokens == b.tokens, where
            for got, want in zip(a.logprobs or (), b.logprobs or (), strict=True):
                assert {i: entry.rank for i, entry in got.items()} == {i: e.rank for i, e in want.items()}
                assert all(abs(entry.logprob - want[i].logprob) < 1e-4 for i, entry in got.items()), where
        rounds.learn(plan, ours)
        kinds = [first.rounds.kind(span) for span in plan.spans]
        prompts += None not in first.rounds.with_prompts(plan.spans, kinds, plan.depth) and None in kinds
        mixed += len({span.drafts for span in plan.spans if span.drafts}) > 1
        packed += any(span.drafts > done.verified for span, done in zip(plan.spans, ours, strict=True))
    assert prompts > 0 or count < 1000, "prompts beside sequences that decode"
    return mixed, packed
