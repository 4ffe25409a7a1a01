"""Tokens do not depend on what the planner decides, however badly it does."""

from __future__ import annotations

import random
from typing import Any

import pytest
from torch import Tensor

from paceline.engine.core import EngineCore
from paceline.engine.messages import EngineRequest
from paceline.proving.drive import runner_of
from paceline.sampling.params import SamplingParams
from paceline.speculation.decision import Batch, Decision
from paceline.speculation.planner import Planner
from support.engines import complete, golden_core, golden_prompts, tokens_of

PROMPTS = golden_prompts(12)


def params() -> list[SamplingParams]:
    """Greedy and sampled requests, by turns."""
    return [
        SamplingParams(temperature=0.0 if i % 2 else 0.9, seed=i, max_tokens=16 + i, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]


class Erratic(Planner):
    """Decides at random: depth, rows of each sequence, whether to draft, and whether chains run.

    Args:
        planner: whose place it takes.
        seed: of its decisions.
        whole: share of rounds that verify and draft all there is, where chains have a place.
    """

    def __init__(self, planner: Planner, seed: int, whole: float = 0.0) -> None:
        super().__init__(planner.costs, planner.survival)
        self._rng = random.Random(seed)
        self._whole = whole
        self.seen: list[Decision] = []

    def decide(self, batch: Batch) -> Decision:
        if self._rng.random() < self._whole:
            self.seen.append(Decision(7, None, True, "exploring", hedge=self._rng.random() < 0.8))
            return self.seen[-1]
        depth = self._rng.choice((0, 0, 1, 3, 7))
        each = {slot: self._rng.randint(0, depth) for slot in sorted(batch.slots)}
        drafts = self._rng.choice((None, each))
        self.seen.append(Decision(depth, drafts, self._rng.random() < 0.6, "exploring"))
        return self.seen[-1]


def planned_core(
    lookahead: int, options: dict[str, int], hedge: int = 0, draft_state: str = "paged"
) -> EngineCore:
    """A golden engine with a planner."""
    speculative = {"verify_planner": "auto", "hedge": hedge, "draft_state": draft_state}
    return golden_core(
        "qwen3_tiny", drafter="dspark_tiny_b7", lookahead=lookahead, speculative_config=speculative, **options
    )


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return tokens_of(complete(golden_core("qwen3_tiny"), PROMPTS, params()))


@pytest.mark.parametrize("lookahead", (0, 1))
@pytest.mark.parametrize("options", ({}, {"max_num_seqs": 4, "num_blocks": 14}), ids=["plenty", "scarce"])
def test_any_decisions_give_the_same_tokens(
    lookahead: int, options: dict[str, int], expected: list[list[int]]
) -> None:
    core = planned_core(lookahead, options)
    planner = core.scheduler.planner
    assert planner is not None
    core.scheduler.planner = erratic = Erratic(planner, seed=lookahead)
    assert tokens_of(complete(core, PROMPTS, params())) == expected
    stats = core.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert len({decision.depth for decision in erratic.seen}) > 2


@pytest.mark.parametrize("lookahead", (0, 1))
@pytest.mark.parametrize("draft_state", ("paged", "capture"))
@pytest.mark.parametrize("options", ({}, {"max_num_seqs": 4, "num_blocks": 14}), ids=["plenty", "scarce"])
def test_any_decisions_beside_hedges_give_the_same_tokens(
    lookahead: int, draft_state: str, options: dict[str, int], expected: list[list[int]]
) -> None:
    core = planned_core(lookahead, options, hedge=6, draft_state=draft_state)
    planner = core.scheduler.planner
    assert planner is not None
    core.scheduler.planner = erratic = Erratic(planner, seed=lookahead, whole=0.8)
    for _ in range(3):
        assert tokens_of(complete(core, PROMPTS, params())) == expected
    stats = core.stats().hedging
    assert stats is not None and stats.num_wins > 0 and stats.num_losses > 0
    assert len({decision.depth for decision in erratic.seen}) > 2


@pytest.mark.parametrize("lookahead", (0, 1))
def test_the_planner_itself_gives_the_same_tokens(lookahead: int, expected: list[list[int]]) -> None:
    core = planned_core(lookahead, {})
    planner = core.scheduler.planner
    assert planner is not None
    assert tokens_of(complete(core, PROMPTS, params())) == expected
    assert planner.realised_tokens > 0 and sum(planner.rounds.values()) > 0
    assert planner.survival.overall()[0] < 0.95, "it has learnt something"


def test_off_plans_nothing() -> None:
    core = golden_core("qwen3_tiny", drafter="dspark_tiny_b7")
    assert core.scheduler.planner is None


class Steady(Planner):
    """The same depth in every round, drafting again.

    Args:
        planner: whose place it takes.
        depth: drafts of a sequence on average.
    """

    def __init__(self, planner: Planner, depth: int) -> None:
        super().__init__(planner.costs, planner.survival)
        self._steady = Decision(depth, None, True, "drafts pay")

    def decide(self, batch: Batch) -> Decision:
        return self._steady


def steady_core(depth: int, options: dict[str, int]) -> EngineCore:
    """A golden engine whose rounds have rows for ``depth`` drafts of each sequence."""
    core = planned_core(0, options)
    assert core.scheduler.planner is not None
    core.scheduler.planner = Steady(core.scheduler.planner, depth)
    return core


def test_rows_that_drafts_will_not_have_are_left_to_prompts() -> None:
    """Three sequences may verify all their drafts, but there are rows for less than half of them."""
    core = steady_core(3, {"max_num_seqs": 4, "max_num_batched_tokens": 24})
    greedy = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    for name in "abc":
        core.add(EngineRequest(request_id=name, prompt_token_ids=[5, 6, 7, ord(name)], params=greedy))
    for _ in range(4):
        core.step()
    core.add(EngineRequest(request_id="new", prompt_token_ids=list(range(10, 46)), params=greedy))
    first = [output.request_id for _ in range(4) for output in core.step()]
    assert "new" in first, "36 rows in steps that have 12 to spare"


def test_rows_are_counted_that_ran() -> None:
    core = steady_core(3, {})
    ran = 0

    def count(_: object, operands: tuple[Tensor, ...]) -> None:
        nonlocal ran
        ran += len(operands[0])

    runner_of(core).model.register_forward_pre_hook(count)
    complete(core, PROMPTS, params())
    assert core.stats().num_rows == ran


def test_what_was_said_of_other_drafts_is_not_learnt() -> None:
    """Rounds in which some have drafts in place and some have none: all that are there are verified."""
    core = steady_core(7, {"max_num_seqs": 4})
    learnt: list[tuple[int, list[float] | None]] = []

    def committed(_decision: object, _slots: object, drafts: list[int], *results: list[Any]) -> None:
        learnt.extend(zip(drafts, results[-1], strict=True))

    core.scheduler.planner.committed = committed  # type: ignore[union-attr, method-assign]
    complete(core, PROMPTS, params())
    assert any(drafts and said for drafts, said in learnt)
    assert not any(said for drafts, said in learnt if not drafts)


def test_the_planner_is_told_of_steady_traffic() -> None:
    """One request comes whenever one ends; then a batch runs empty."""
    core = planned_core(1, {"max_num_seqs": 8})
    planner = core.scheduler.planner
    assert planner is not None
    decide, seen = planner.decide, list[bool]()

    def watched(batch: Batch) -> Decision:
        seen.append(batch.refilled)
        return decide(batch)

    planner.decide = watched  # type: ignore[method-assign]
    scheduler = core.scheduler
    for count in range(48):
        params = SamplingParams(temperature=0.0, max_tokens=4 + count % 7, ignore_eos=True)
        prompt = PROMPTS[count % len(PROMPTS)]
        core.add(EngineRequest(request_id=str(count), prompt_token_ids=prompt, params=params))
        while scheduler.num_running + scheduler.num_waiting >= 4:
            core.step()
    assert not seen[0] and seen[-1]
    while core.has_work:
        core.step()
    for _ in range(16):
        complete(core, PROMPTS[:4], params_of(4))
    assert not seen[-1]


def params_of(count: int) -> list[SamplingParams]:
    """Greedy requests of different lengths."""
    return [SamplingParams(temperature=0.0, max_tokens=8 + 2 * i, ignore_eos=True) for i in range(count)]


@pytest.mark.parametrize("planner", ("auto", "off"))
def test_a_drafter_is_asked_for_its_word_where_somebody_listens(planner: str) -> None:
    core = golden_core("qwen3_tiny", drafter="dspark_tiny_b7", speculative_config={"verify_planner": planner})
    stage = runner_of(core).drafting
    assert stage is not None and stage.predicts == (planner == "auto")
    complete(core, PROMPTS, params())
    assert bool((stage.chances == 1.0).all()) == (planner == "off")
