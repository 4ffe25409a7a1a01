"""L2: where rounding differs from mode to mode (half precision, a GPU), every token is held against plain
decoding's own distribution at its position, and sampled tokens are tested for their law as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config import EngineConfig
from paceline.engine.core import EngineCore
from paceline.proving.distribution import Draw, Verdict, judge
from paceline.proving.drive import RoundRecorder, complete, runner_of, tokens_of
from paceline.proving.gates import Violation, accepted_as_coupled, nothing_held
from paceline.proving.lossless import (
    GREEDY,
    PLAIN,
    Mode,
    ModeResult,
    Sampling,
    count_differing,
)
from paceline.proving.redraft import Redrafted, redraft
from paceline.proving.rescore import Produced, Scores, rescore

MAX_REGRET_NATS = 0.20
"""Rounding in half precision moves log-probabilities by hundredths of a nat; a wrong token costs more."""


def closeness_modes() -> list[Mode]:
    """Modes whose output is scored; the first says what rounding alone does."""
    return [
        Mode("plain", speculative=None, lookahead=1),
        Mode("drafts", lookahead=1),
        Mode("drafts, cached", lookahead=1, passes=2),
        Mode("drafts, 64-row chunks", {"max_num_seqs": 16, "max_num_batched_tokens": 64}, lookahead=1),
        Mode("drafts, captured state", speculative={"draft_state": "capture"}, lookahead=1, passes=2),
        Mode("drafts, hedged", speculative={"hedge": 8}, lookahead=1, passes=2),
        Mode("drafts, planned", speculative={"verify_planner": "auto"}, lookahead=1),
        Mode("drafts, hedged, planned", speculative={"hedge": 8, "verify_planner": "auto"}, lookahead=1),
    ]


@dataclass(slots=True)
class ScoredResult(ModeResult):
    """A row of the proof: what a mode produced, and what plain decoding thinks of it.

    ``num_differing`` counts against the first mode's output, in the first pass; it is no violation here.

    Attributes:
        max_regret, mean_regret: over all output positions, in nats.
        verdict: of the distribution tests, when sampled.
    """

    max_regret: float = 0.0
    mean_regret: float = 0.0
    verdict: Verdict | None = None


class ClosenessProof:
    """Runs prompts in a mode and scores what came out.

    Args:
        target: engine options that name the model.
        drafter: fields of the speculative config that name the drafter.
        prompts: token ids.
        max_tokens: tokens to generate for each.
    """

    def __init__(
        self, target: EngineConfig, drafter: Mapping[str, Any], prompts: Sequence[list[int]], max_tokens: int
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._plain: dict[str, list[list[int]]] = {}

    def run(self, mode: Mode) -> list[ScoredResult]:
        """Greedy and temperature 1, on one engine whose cache is emptied in between."""
        core = mode.core(self._target, self._drafter)
        return [self._run(core, mode, sampling) for sampling in (GREEDY, PLAIN)]

    def _run(self, core: EngineCore, mode: Mode, sampling: Sampling) -> ScoredResult:
        core.reset_prefix_cache()
        result = ScoredResult(mode.name, sampling.name, len(self._prompts))
        recorder = RoundRecorder.on(core)
        hedging = core.stats().hedging
        items: list[Produced] = []
        for number in range(mode.passes):
            # Other seeds each time: the tests of sampled tokens need draws that are independent.
            params = sampling.params(len(self._prompts), self._max_tokens, number)
            outputs = complete(core, self._prompts, params)
            result.violations += nothing_held(core)
            if number:
                result.num_cached_tokens += sum(group[0].num_cached_tokens for group in outputs)
            got = tokens_of(outputs)
            for prompt, tokens, chosen in zip(self._prompts, got, params, strict=True):
                items.append(Produced(prompt, tokens, None if sampling is GREEDY else chosen.seed))
            if number == 0:
                reference = self._plain.setdefault(sampling.name, got)
                result.num_differing = count_differing(reference, got)
        result.num_tokens = sum(len(item.tokens) for item in items)
        result.count_hedges(hedging, core.stats().hedging)
        rounds = recorder.rounds
        if rounds:
            result.accept_length = 1 + sum(item.num_accepted for item in rounds) / len(rounds)
        stage = runner_of(core).drafting
        redrafted = redraft(stage.drafter, rounds) if rounds and stage is not None else []
        self._score(core, result, items, redrafted)
        if sampling is PLAIN:
            result.violations += accepted_as_coupled(redrafted)
        return result

    @staticmethod
    def _score(
        core: EngineCore, result: ScoredResult, items: list[Produced], redrafted: Sequence[Redrafted]
    ) -> None:
        positions, favourites = _favourites(items, redrafted)
        scores = rescore(runner_of(core).model, items, favourites)
        regrets = [value for item in scores for value in item.regret]
        result.max_regret, result.mean_regret = max(regrets), sum(regrets) / len(regrets)
        for i, item in enumerate(scores):
            worst = max(range(len(item.regret)), key=item.regret.__getitem__)
            if item.regret[worst] > MAX_REGRET_NATS:
                where = f"sequence {i}, token {worst}"
                message = f"{item.regret[worst]:.3f} nat, more than {MAX_REGRET_NATS}"
                result.violations.append(Violation("regret", where, message))
        if items[0].seed is not None:
            result.verdict = judge(_draws(items, scores, positions, favourites))
            result.violations += _violations(result.verdict)


def _violations(verdict: Verdict) -> list[Violation]:
    found = [
        Violation("distribution", item.name, f"p = {item.p_value:.1e} over {item.count} tokens")
        for item in verdict.failed
    ]
    if verdict.planted_found is False:
        message = "a planted bias was not noticed: too few tokens to prove anything. Use more prompts."
        found.append(Violation("distribution", "power", message))
    return found


def _favourites(
    items: Sequence[Produced], redrafted: Sequence[Redrafted]
) -> tuple[list[list[int]], list[list[int]]]:
    """Per output position: which draft it verified (0: none), and the drafter's favourite there (-1: none).

    Rounds are matched to texts by what they continue and committed: a favourite is a function of the text
    before it.
    """
    by_context: dict[tuple[int, ...], Redrafted] = {tuple(r.round.context): r for r in redrafted}
    positions, favourites = [], []
    for item in items:
        text = [*item.prompt, *item.tokens]
        position, favourite = [0] * len(item.tokens), [-1] * len(item.tokens)
        for anchor in range(len(item.prompt), len(text)):
            found = by_context.get(tuple(text[: anchor + 1]))
            if found is None:
                continue
            for k, token in enumerate(found.favourites):
                at = anchor + 1 + k
                if at >= len(text) or text[anchor + 1 : at] != found.round.tokens[:k]:
                    break
                position[at - len(item.prompt)], favourite[at - len(item.prompt)] = k + 1, token
        positions.append(position)
        favourites.append(favourite)
    return positions, favourites


def _draws(
    items: Sequence[Produced],
    scores: Sequence[Scores],
    positions: Sequence[Sequence[int]],
    favourites: Sequence[Sequence[int]],
) -> list[Draw]:
    draws = []
    for item, score, position, favourite in zip(items, scores, positions, favourites, strict=True):
        for t, token in enumerate(item.tokens):
            verified = favourite[t] >= 0
            draws.append(
                Draw(
                    score.probability[t],
                    score.above[t],
                    score.top[t],
                    score.is_top[t],
                    position[t] if verified else 0,
                    score.watched[t] if verified else 0.0,
                    score.watched_above[t] if verified else 0.0,
                    verified and favourite[t] == token,
                )
            )
    return draws
