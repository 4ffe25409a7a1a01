"""How long known work takes at each depth: small cases worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cache import sharing
from paceline.engine.core import EngineCore
from paceline.engine.messages import EngineRequest
from paceline.sampling.params import SamplingParams
from paceline.speculation.costs import Measured, Round, RoundCosts
from paceline.speculation.decision import Batch
from paceline.speculation.horizon import FloatArray, finish_seconds, long_run_rates
from paceline.speculation.survival import LIVES, PRIOR_SPREAD, Survival
from support.engines import complete, golden_core, golden_prompts
from support.round_world import h200_seconds

FLAT = np.array([[1.0] * 4, [2.0] * 4])
"""Plain and drafted rounds of up to four sequences: a second and two, whatever their number."""


def total(paces: FloatArray, left: FloatArray, seconds: FloatArray, spread: float) -> FloatArray:
    """Until the first ends, and from there on."""
    first, rest = finish_seconds(paces, left, seconds, spread)
    assert (first > 0).all() and (rest >= 0).all()
    return first + rest


def finish(pace: list[float], left: list[float], spread: float = 0.0) -> tuple[float, float]:
    """Seconds plainly, and with drafts that commit ``pace`` tokens a round."""
    paces = np.array([[1.0] * len(pace), pace])
    plain, drafted = total(paces, np.array(left), FLAT[:, : len(pace)], spread)
    return float(plain), float(drafted)


def test_one_sequence_takes_its_rounds() -> None:
    plain, drafted = finish([3.0], [80.0])
    assert plain == 80.0
    assert drafted == pytest.approx(2 * 81 / 3), "the last round commits a token too many on average"
    assert finish([7.0], [1.0])[1] == 2.0, "no less than a round"


def test_equal_sequences_end_together_unless_they_are_known_to_differ() -> None:
    assert finish([3.0] * 4, [80.0] * 4) == pytest.approx(finish([3.0], [80.0]))
    plain, drafted = finish([3.0] * 4, [80.0] * 4, spread=0.3)
    assert plain == 80.0, "plain ones do not"
    assert drafted == pytest.approx(1.3 * 54, rel=0.03), "the slowest of four is a standard deviation slow"


def test_a_batch_waits_for_its_slowest() -> None:
    """Drafting gains half on the whole, and loses because one sequence gains nothing."""
    paces = np.array([[1.0] * 4, [4.0, 4.0, 4.0, 1.2]])
    seconds = np.array([[1.0] * 4, [2.0] * 4])
    plain, drafted = total(paces, np.array([100.0] * 4), seconds, 0.0)
    assert paces[1].sum() / 2.0 > 1.5 * paces[0].sum() / 1.0
    assert drafted > plain == 100.0


def test_a_long_sequence_among_short_ones_does_not_decide_for_them() -> None:
    """Three short ones are faster plainly; the long one is drafted for when they are done."""
    seconds = np.array([[1.0, 1.0, 1.0, 1.0], [1.0, 4.0, 4.0, 4.0]])
    paces = np.array([[1.0] * 4, [3.0] * 4])
    plain, drafted = total(paces, np.array([30.0, 30.0, 30.0, 1000.0]), seconds, 0.0)
    assert plain == pytest.approx(30 + 970 / 3, rel=0.01)
    assert drafted > plain


def test_going_on_plainly_draws_nothing_out() -> None:
    """Drafting pays for three, plain decoding for the two that are left; these have as much to do."""
    seconds = np.array([[1.0, 1.0, 9.0], [2.0, 2.0, 2.0]])
    paces = np.array([[1.0] * 3, [1.9] * 3])
    left = np.array([30.0, 300.0, 300.0])
    even, uneven = (total(paces, left, seconds, spread) for spread in (0.0, 0.3))
    assert uneven[1] == pytest.approx(even[1])


@given(st.permutations(range(6)), st.floats(0.0, 0.4))
def test_the_order_of_sequences_does_not_matter(order: list[int], spread: float) -> None:
    paces = np.array([[1.0] * 6, [2.0, 2.5, 3.0, 1.5, 2.0, 2.0]])
    left = np.array([5.0, 90.0, 20.0, 20.0, 60.0, 1.0])
    seconds = np.array([np.linspace(1.0, 1.5, 6), np.linspace(1.2, 3.0, 6)])
    one = total(paces, left, seconds, spread)
    assert total(paces[:, order], left[order], seconds, spread) == pytest.approx(one)


def costs() -> RoundCosts:
    """A second a round, and one more for drafting."""
    rounds = [
        Round(size, drafts, propose)
        for size in (1, 8)
        for drafts, propose in ((0, False), (0, True), (2, True))
    ]
    return RoundCosts([Measured(r, 0, 1.0 + r.propose) for r in rounds], 2)


def test_rates_of_a_full_batch_are_those_of_a_round() -> None:
    survival = Survival(4, 2)
    chances = survival.overall()
    rates = long_run_rates(Batch([0, 1], [2, 2], [True, False], 0.0, 99), (0, 2), costs(), survival)
    assert rates[0] == pytest.approx(2.0)
    assert rates[2] == pytest.approx((2 + chances.sum()) / 2), "one of them has no drafts"


def test_starting_to_draft_costs_a_round_and_pays_in_long_answers_alone() -> None:
    survival = Survival(4, 2)

    def gain(left: int, in_place: int) -> float:
        batch = Batch([0], [in_place], [True], 0.0, 99, left=[left], refilled=False)
        rates = long_run_rates(batch, (0, 2), costs(), survival)
        return rates[2] / rates[0]

    assert gain(400, 0) > 1.0 > gain(5, 0)
    assert gain(5, 2) > gain(5, 0)


def test_who_comes_counts() -> None:
    survival = Survival(8, 2)
    coming = Batch([], [], [], 0.0, 99, coming=[30] * 3, refilled=False)
    there = Batch([0, 1, 2], [2] * 3, [True] * 3, 0.0, 99, left=[30] * 3, refilled=False)
    assert long_run_rates(coming, (0, 2), costs(), survival) == pytest.approx(
        long_run_rates(there, (0, 2), costs(), survival)
    )


def test_spread_is_learnt_from_sequences_that_end() -> None:
    def learnt(slow: int) -> float:
        survival = Survival(2, 3)
        for _ in range(60):
            for _ in range(30):
                survival.observe([0, 1], [3, 3], [3, slow])
            for _ in range(20):  # plain rounds say nothing
                survival.observe([0, 1], [0, 0], [0, 0])
            survival.reset(0)
            survival.reset(1)
        return survival.spread

    assert Survival(2, 3).spread == PRIOR_SPREAD
    assert learnt(3) < 0.1
    assert learnt(1) > 0.35, "4 tokens a round and 2, where 3 are expected"


def test_four_that_stayed_plain_on_an_h200() -> None:
    """Costs and chances as trials had found them there; a closed batch was drafted a quarter faster."""
    sizes = {1: (7,), 4: (7,), 8: (7,)}
    measured = [
        Measured(round_, 256, h200_seconds(round_))
        for size in sizes
        for round_ in (Round(size, 0, False), Round(size, 0, True), Round(size, 7, True))
    ]
    survival = Survival(4, 7)
    survival.overall = lambda: np.array([0.46, 0.23, 0.1, 0.05, 0.025, 0.015, 0.009])  # type: ignore[method-assign]
    everyone = np.tile(survival.overall(), (4, 1))
    survival.of = lambda slots, *, now=False: everyone  # type: ignore[method-assign]
    batch = Batch([0, 1, 2, 3], [0] * 4, [True] * 4, 256.0, 10**6, left=[255] * 4, refilled=False)
    rates = long_run_rates(batch, (0, 7), RoundCosts(measured, 7, sizes), survival)
    assert rates[7] > 1.05 * rates[0]


def test_only_the_time_until_the_first_end_is_compared() -> None:
    """Drafting pays half as much as it costs, for all that are left; of these one ends at once, and what then
    follows is the same either way.
    """
    survival = Survival(4, 2)
    for _ in range(300):
        survival.observe([0, 1, 2, 3], [2] * 4, [0] * 4)
    batch = Batch([0, 1, 2, 3], [2] * 4, [True] * 4, 0.0, 10**6, left=[2, 400, 400, 400], refilled=False)
    rates = long_run_rates(batch, (0, 2), costs(), survival)
    assert rates[0] > 1.5 * rates[2], "not one per cent more, as beside all that follows"


def test_what_was_learnt_of_spread_grows_old_while_nobody_drafts() -> None:
    survival = Survival(2, 3)
    for _ in range(20):
        for _ in range(30):
            survival.observe([0, 1], [3, 3], [3, 1])
        survival.reset(0)
        survival.reset(1)
    wide = survival.spread
    for _ in range(4 * LIVES):
        survival.observe([0, 1], [0, 0], [0, 0])
        survival.reset(0)
    assert wide > 0.35 and survival.spread == pytest.approx(PRIOR_SPREAD, rel=0.2)


def watched(**options: Any) -> tuple[EngineCore, list[Batch]]:
    """An engine, and what its planner is asked."""
    speculative = {"verify_planner": "auto"}
    core = golden_core("qwen3_tiny", drafter="dspark_tiny_b7", speculative_config=speculative, **options)
    planner, seen = core.scheduler.planner, []
    assert planner is not None
    decide = planner.decide
    planner.decide = lambda batch: seen.append(batch) or decide(batch)  # type: ignore
    return core, seen


@pytest.mark.parametrize("shares_keys", [False, True])
def test_keys_that_a_round_reads_once_count_once(shares_keys: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sequences behind one prefix of two blocks, and one without; then only two are left."""
    monkeypatch.setattr(sharing, "MIN_SAVED_TOKENS", 2 * 32)
    core, seen = watched(max_num_seqs=8)
    assert core.scheduler.planner is not None
    core.scheduler.planner.costs.shares_keys = shares_keys
    prefix = list(range(1, 33))
    complete(core, [[*prefix, 5]], SamplingParams(temperature=0.0, max_tokens=1))
    seen.clear()
    prompts = [[*prefix, 40, 41, 42], [*prefix, 50, 51, 52], [*prefix, 60, 61, 62], [7, 8, 9]]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (40, 40, 8, 40)]
    complete(core, prompts, params)
    whole, fewer = ([batch for batch in seen if len(batch.slots) == n] for n in (4, 3))
    assert whole[0].context == (3 * 35 + 3 - (2 * 32 if shares_keys else 0)) / 4
    assert fewer[1].context > (2 * 35 + 3) / 3, "two save too little"


def test_keys_of_who_does_not_decode_yet_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences decode behind a prefix, two more prefill behind it."""
    monkeypatch.setattr(sharing, "MIN_SAVED_TOKENS", 32)
    core, seen = watched(max_num_seqs=8, max_num_batched_tokens=40)
    scheduler = core.scheduler
    assert scheduler.planner is not None
    scheduler.planner.costs.shares_keys = True
    prefix = list(range(1, 33))
    complete(core, [[*prefix, 5]], SamplingParams(temperature=0.0, max_tokens=1))
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    tails: list[list[int]] = [[40, 41], [50, 51], [60] * 120, [70] * 120]
    for i, tail in enumerate(tails):
        core.add(EngineRequest(request_id=str(i), prompt_token_ids=[*prefix, *tail], params=params))
        core.step()
    prefilling = 0
    for _ in range(20):
        running = {s.slot: s.scheduled for s in scheduler._running}
        seen.clear()
        core.step()
        slots = seen[0].slots
        if len(slots) == 2:
            prefilling += len(running) > 2
            assert seen[0].context == (sum(running[slot] for slot in slots) - 32) / 2
    assert prefilling > 1


def test_who_waits_though_there_are_slots_is_a_queue() -> None:
    core, seen = watched(max_num_seqs=8, max_num_batched_tokens=64)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for i in range(3):
        core.add(EngineRequest(request_id=str(i), prompt_token_ids=[1 + i] * 60, params=params))
    core.step()
    core.step()
    assert [batch.refilled for batch in seen] == [False, True], "the third had no rows in the first step"


def test_who_waits_for_a_prefix_is_no_queue() -> None:
    """Continuations of one prompt, and another request that begins like it: all have their slots."""
    core, seen = watched(max_num_seqs=8, max_num_batched_tokens=64)
    prompt = list(range(1, 41))
    for name, n, tail in ("a", 3, []), ("b", 1, [99]):
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, n=n)
        core.add(EngineRequest(request_id=name, prompt_token_ids=[*prompt, *tail], params=params))
    core.step()
    core.step()
    assert not any(batch.refilled for batch in seen)
    assert [list(batch.coming) for batch in seen] == [[12] * 4, [12] * 3]


def test_what_the_engine_tells_of_its_work() -> None:
    core, seen = watched(max_num_seqs=4)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for i, prompt in enumerate(golden_prompts(6, seed=2)):
        core.add(EngineRequest(request_id=str(i), prompt_token_ids=prompt, params=params))
        if i == 2:
            core.step()
    while core.has_work:
        core.step()
    assert (list(seen[0].slots), list(seen[0].coming), seen[0].refilled) == ([], [12] * 3, False)
    assert (len(seen[1].slots), list(seen[1].left)) == (3, [11] * 3)
    assert seen[1].refilled, "three more came for one slot"
    assert seen[2].refilled, "and two of them still wait"
    assert not seen[-1].refilled and max(seen[-1].left) < 11
