"""The verify planner's choice, its costs and its survival estimates, one rule at a time."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.speculation.costs import OFFSET_DRIFT, Measured, Round, RoundCosts, fewer_drafts
from paceline.speculation.decision import Batch
from paceline.speculation.horizon import long_run_rates
from paceline.speculation.planner import UNIT, Planner, allot, expected_tokens
from paceline.speculation.survival import Survival
from support.round_world import CONTEXT, NUM_DRAFTS, TIERS, World


def grid(context: int = 100, factor: float = 1.0) -> list[Measured]:
    """Rounds of 1 and 8 sequences with up to 4 drafts: a millisecond per row, 2 for drafting."""
    return [
        Measured(Round(size, drafts, propose), context, factor * (size * (drafts + 1) + 2 * propose) / 1e3)
        for size in (1, 8)
        for drafts, propose in ((0, False), (0, True), (4, True))
    ]


# ---------------------------------------------------------------------- costs


def test_costs_between_and_beyond_measured_rounds() -> None:
    costs = RoundCosts(grid(), 4)
    assert costs.seconds(Round(1, 0, False), 100) == pytest.approx(0.001)
    assert costs.seconds(Round(4, 2, True), 100) == pytest.approx(0.014)
    assert costs.seconds(Round(4, 2, False), 100) == pytest.approx(0.012)
    assert costs.seconds(Round(16, 4, True), 100) == pytest.approx(0.082)
    assert costs.counts(3) == (3, 4)


def test_a_tier_costs_what_its_fixed_size_costs() -> None:
    costs = RoundCosts(grid(), 4, {1: (4,), 8: (2, 4)})
    assert costs.seconds(Round(3, 0, False), 100) == pytest.approx(0.008)
    assert costs.seconds(Round(3, 1, True), 100) == pytest.approx(0.026)
    assert costs.seconds(Round(3, 1, False), 100) == pytest.approx(0.026), "it drafts, whoever asked"
    assert list(costs.counts(3)) == [2, 4]


def test_context_costs_per_sequence() -> None:
    longer = [Measured(Round(8, 0, False), 1100, 0.016), Measured(Round(8, 4, True), 1100, 0.058)]
    costs = RoundCosts(grid() + longer, 4)
    assert costs.seconds(Round(1, 0, False), 2100) == pytest.approx(0.001 + 0.002)
    assert costs.seconds(Round(1, 4, True), 2100) == pytest.approx(0.007 + 0.004)
    assert costs.seconds(Round(1, 0, False), 5) == pytest.approx(0.001), "shorter is not assumed to be free"


def test_what_always_runs_moves_all_costs_alike() -> None:
    costs = RoundCosts(grid(), 4)
    for _ in range(200):
        costs.observe(Round(8, 4, True), 100, 0.063)  # half as long again
    assert costs.seconds(Round(8, 4, True), 100) == pytest.approx(0.063, rel=0.01)
    assert costs.seconds(Round(8, 0, False), 100) == pytest.approx(0.012, rel=0.06), "all but its own doubt"


def test_what_runs_among_others_moves_its_own_cost() -> None:
    costs = RoundCosts(grid(), 4)
    for i in range(600):
        costs.observe(*((Round(8, 4, True), 100, 0.063) if i % 20 == 0 else (Round(8, 0, False), 100, 0.008)))
    assert costs.seconds(Round(8, 4, True), 100) == pytest.approx(0.063, rel=0.05)
    assert costs.seconds(Round(8, 0, False), 100) == pytest.approx(0.008, rel=0.05)


def test_a_machine_that_was_slow_at_start_says_nothing_of_one_kind() -> None:
    """Plain decoding does not look dear because what runs takes less than was measured."""
    costs = RoundCosts(grid(factor=1.5), 4)
    for _ in range(3):
        costs.observe(Round(8, 4, True), 100, 0.042)
    assert costs.seconds(Round(8, 0, False), 100) == pytest.approx(0.008, rel=0.07)


def test_a_kind_that_runs_for_the_first_time_corrects_itself() -> None:
    """Plain rounds were measured half as long again as they are; what else is known stays as it was."""
    plain, full = Round(8, 0, False), Round(8, 4, True)
    costs = RoundCosts([Measured(i.round, 100, i.seconds * (1 + i.round.propose / 2)) for i in grid()], 4)
    for _ in range(10):
        costs.observe(full, 100, 0.063)
    assert costs.seconds(plain, 100) == pytest.approx(0.008) and not costs.seen(plain)
    costs.observe(plain, 100, 0.008 / 1.5)
    assert costs.seconds(plain, 100) < 0.0063 and costs.seen(plain)
    costs.observe(plain, 100, 0.008 / 1.5)
    assert costs.seconds(plain, 100) == pytest.approx(0.008 / 1.5, rel=0.1)
    assert costs.seconds(full, 100) == pytest.approx(0.063, rel=0.03)


def test_doubt_about_a_kind_that_does_not_run_has_a_limit() -> None:
    """After a day of other rounds it is what it was at start: one pause still counts as one."""
    costs = RoundCosts(grid(), 4)
    for _ in range(10):
        costs.observe(Round(8, 0, False), 100, 0.008)
    for _ in range(50000):
        costs.observe(Round(8, 4, True), 100, 0.042)
    costs.observe(Round(8, 0, False), 100, 3.0)
    assert costs.seconds(Round(8, 0, False), 100) < 0.008 * math.exp(0.4)


def test_doubt_falls_when_a_kind_runs_and_comes_back_with_time() -> None:
    costs = RoundCosts(grid(), 4)
    plain, full = Round(8, 0, False), Round(8, 4, True)
    kinds = costs.kind(plain), costs.kind(full)

    def run(round_: Round, seconds: float, times: int) -> float:
        for _ in range(times):
            costs.observe(round_, 100, seconds)
        return costs.doubt(*kinds)

    unseen = costs.doubt(*kinds)
    settled = run(full, 0.042, 300)
    assert settled < 1.2 * unseen
    once = run(plain, 0.008, 1)
    assert once < 0.7 * settled
    assert run(plain, 0.008, 10) < 0.6 * once
    assert costs.doubt(*kinds) == pytest.approx(costs.doubt(*reversed(kinds)))
    later = [run(full, 0.042, 1000) for _ in range(40)]
    assert once < later[1] < later[4] < settled < later[-1]
    assert later[-1] == pytest.approx(OFFSET_DRIFT * math.sqrt(40000), rel=0.1), "no limit here"


def test_where_rounds_are_captured_the_first_of_a_kind_tells_nothing() -> None:
    costs = RoundCosts(grid(), 4, {1: (4,), 8: (2, 4)})
    for seconds, expected in (3.0, 0.008), (0.009, 0.00878):
        costs.observe(Round(8, 0, False), 100, seconds)
        assert costs.seconds(Round(8, 0, False), 100) == pytest.approx(expected, rel=0.03)


def test_one_pause_is_no_trend() -> None:
    costs = RoundCosts(grid(), 4)
    costs.observe(Round(8, 0, False), 100, 0.008)
    costs.observe(Round(8, 0, False), 100, 3.0)
    assert costs.seconds(Round(8, 0, False), 100) < 0.0095


# ---------------------------------------------------------------------- survival


def test_survival_is_learnt_by_position() -> None:
    survival = Survival(4, 3)
    for _ in range(400):
        survival.observe([0, 1], [3, 3], [3, 1])
    assert survival.overall() == pytest.approx([1.0, 0.5, 0.5], abs=0.05)
    first, second = survival.of([0, 1])
    assert first[1] > 0.7 > 0.3 > second[1], "each sequence has its own"
    survival.reset(1)
    assert survival.of([1])[0] == pytest.approx(survival.overall()), "who is new has that of all"


def test_drafts_that_were_not_verified_say_nothing() -> None:
    survival = Survival(1, 4)
    before = survival.overall()
    survival.observe([0], [0], [0])
    survival.observe([], [], [])
    assert survival.overall() == pytest.approx(before)
    for _ in range(100):
        survival.observe([0], [2], [2])
    known = survival._trials.copy()
    assert known[0] > 50 and known[2] < 10


def test_many_sequences_count_as_one_after_the_other() -> None:
    together, apart = Survival(600, 2), Survival(600, 2)
    together.observe(list(range(600)), [2] * 600, [1] * 600)
    for slot in range(600):
        apart.observe([slot], [2], [1])
    assert together.overall() == pytest.approx(apart.overall(), rel=1e-6)


def taught(told: float, rounds: int = 400, *, depth: int | None = None) -> Survival:
    """After rounds of eight whose drafts stand with chances that differ from block to block, of which the
    drafter knows a share; with rows for ``depth`` drafts of each, given to those it thinks well of.
    """
    rng, survival = np.random.default_rng(3), Survival(8, 4)
    for _ in range(rounds):
        true = np.repeat(rng.uniform(0.3, 0.9, (8, 1)), 4, axis=1)
        said = np.cumprod(told * true + (1 - told) * rng.uniform(0.3, 0.9, (8, 4)), axis=1)
        drafts = [4] * 8
        if depth is not None:
            drafts = allot((said * UNIT).astype(np.int64), range(8), drafts, 8 * depth)
        stood = np.cumprod(rng.random((8, 4)) < true, axis=1).sum(1)
        survival.observe(range(8), drafts, np.minimum(stood, drafts).tolist(), said.tolist())
    return survival


def test_what_a_drafter_says_is_believed_as_far_as_it_is_right() -> None:
    assert taught(1.0).slope == pytest.approx(1.0, abs=0.1) and taught(1.0).trusted
    assert taught(0.0).slope < 0.1 and not taught(0.0).trusted
    assert not Survival(8, 4).trusted, "not before it was"


def test_chances_are_those_of_all_drafts_where_only_good_ones_are_verified() -> None:
    """Of the last positions one sees hardly any but those that were thought well of."""
    everything, some = taught(1.0, 3000), taught(1.0, 3000, depth=2)
    assert some.overall() == pytest.approx(everything.overall(), abs=0.06)
    seen = np.array([0.75, 0.6, 0.5, 0.4])  # what counts alone would make of it
    assert some.overall()[3] < seen[3] - 0.1


def test_a_block_that_is_thought_well_of_stands_further_now_than_on_average() -> None:
    survival = taught(1.0)
    survival.observe([0, 1], [4, 4], [2, 2], [[0.9, 0.8, 0.7, 0.6], [0.3, 0.1, 0.03, 0.01]])
    good, bad = survival.of([0, 1], now=True)
    assert (good > survival.of([0])[0]).all() and (bad < survival.of([1])[0]).all()
    survival.reset(0)
    assert survival.of([0], now=True)[0] == pytest.approx(survival.overall()), "nobody's block"


def test_rows_for_the_likeliest_are_expected_to_bring_more() -> None:
    survival = taught(1.0)
    rounds = [Round(8, 0, False), Round(8, 0, True), Round(8, 2, True), Round(8, 4, True)]
    costs = RoundCosts([Measured(round_, 64, 0.01) for round_ in rounds], 4)
    batch = Batch(list(range(8)), [4] * 8, [True] * 8, 64.0, 10**6)
    tokens = 0.01 * long_run_rates(batch, (0, 2, 4), costs, survival)[2] / 8
    even = 1.0 + float(survival.of(list(range(8)))[:, :2].sum()) / 8
    assert 1.02 * even < tokens < 3.0


# ---------------------------------------------------------------------- the choice


def settled(num_seqs: int, accept_length: float) -> World:
    """A world whose planner has learnt."""
    world = World()
    world.run(num_seqs, accept_length, 300)
    return world


@given(st.permutations(range(9)), st.sampled_from([1.3, 2.0, 3.5]), st.integers(0, 40))
def test_choice_does_not_depend_on_batch_order(order: list[int], accept_length: float, rows: int) -> None:
    def decide(slots: list[int]) -> tuple[object, ...]:
        world = World(noise=0.0)
        rng = np.random.default_rng(5)
        for _ in range(20):
            accepted = rng.integers(0, NUM_DRAFTS + 1, 9)
            world.planner.survival.observe(range(9), [NUM_DRAFTS] * 9, accepted.tolist())
        batch = Batch(slots, [s % 8 for s in slots], [s != 4 for s in slots], CONTEXT, rows)
        decision = world.planner.decide(batch)
        drafts = [decision.limit(slot) for slot in range(9)]
        return decision.depth, drafts, decision.propose, decision.reason, decision.expected

    assert decide(order) == decide(list(range(9)))


@given(
    st.lists(st.lists(st.integers(0, UNIT), min_size=3, max_size=3), min_size=1, max_size=6),
    st.integers(0, 20),
    st.data(),
)
def test_allotted_rows_are_the_likeliest(chances: list[list[int]], rows: int, data: st.DataObject) -> None:
    falling = np.array([sorted(row, reverse=True) for row in chances], dtype=np.int64)
    limits = data.draw(st.lists(st.integers(0, 3), min_size=len(chances), max_size=len(chances)))
    given_ = allot(falling, range(len(limits)), limits, rows)
    assert all(count <= limit for count, limit in zip(given_, limits, strict=True))
    assert sum(given_) == min(rows, sum(limits))
    taken = [falling[i, j] for i, count in enumerate(given_) for j in range(count)]
    left = [falling[i, j] for i, count in enumerate(given_) for j in range(count, limits[i])]
    assert not left or not taken or min(taken) >= max(left)


def test_expected_tokens_counts_anchors_and_drafts() -> None:
    half = np.array([[UNIT, UNIT // 2], [UNIT // 2, UNIT // 4]], dtype=np.int64)
    assert expected_tokens(half, [2, 1], [0, 1, 2, 3, 9]) == [2.0, 3.0, 3.5, 4.0, 4.0]
    assert expected_tokens(half, [0, 2], [0, 1, 2, 3]) == [2.0, 2.5, 2.75, 2.75]
    assert expected_tokens(half, [0, 0], [0, 4]) == [2.0, 2.0]


def test_who_cannot_draft_does_not_decide_for_others() -> None:
    world = settled(1, 3.5)
    alone = world.planner.decide(Batch([7], [0], [False], CONTEXT, 100))
    assert (alone.depth, alone.propose) == (0, True)
    assert world.planner.decide(Batch([0], [7], [True], CONTEXT, 100)).depth == 7


def test_prefill_drafts_as_the_last_round_did() -> None:
    for accept_length, drafts in ((6.0, True), (1.0, False)):
        planner = settled(4, accept_length).planner
        assert planner.decide(Batch([], [], [], 0.0, 100)).propose is drafts


def test_drafts_in_place_are_used_when_no_more_are_made() -> None:
    """Drafting does not pay for 64 sequences at this accept length; verifying drafts already made does."""
    world = World(
        lambda round_: 0.003 + 0.00001 * round_.num_seqs * round_.num_drafts + 0.02 * round_.propose
    )
    world.run(64, 2.5, 100)
    planner = world.planner
    planner._bank = -math.inf  # no exploring
    decision = planner.decide(Batch(list(range(64)), [7] * 64, [True] * 64, CONTEXT, 10**6))
    assert not decision.propose and decision.reason == "plain is faster"
    untiered = World(world._seconds, tiers=None)
    untiered.run(64, 2.5, 100)
    untiered.planner._bank = -math.inf
    decision = untiered.planner.decide(Batch(list(range(64)), [7] * 64, [True] * 64, CONTEXT, 10**6))
    assert decision.depth == 3 and not decision.propose, "those behind them bring less than they cost"


def test_expected_and_realised_tokens_agree() -> None:
    planner = settled(32, 3.5).planner
    assert planner.realised_tokens == pytest.approx(planner.expected_tokens, rel=0.05)
    assert sum(planner.rounds.values()) == 300


def test_a_debug_line_tells_of_every_round(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "paceline.speculation.planner"):
        World().run(8, 3.5, 20)
    lines = [record.message for record in caplog.records if "a round of" in record.message]
    assert len(lines) == 20
    told = r"8 sequences had rows for \d drafts each \((drafts pay|exploring)\), [\d.]+ tokens expected, \d+ "
    assert all(re.search(told, line) for line in lines[3:])


def test_every_depth_is_tried_now_and_then() -> None:
    world = World()
    world.run(32, 2.0, 3000)
    explored = {depth for depth, reason in world.planner.rounds if reason == "exploring"}
    assert explored >= {0, *TIERS[32]} - {3}, "3 is what pays"


def test_counts_worth_a_choice() -> None:
    assert [fewer_drafts(count) for count in (1, 3, 4, 5, 7)] == [[], [], [3], [3], [3, 5]]
    assert fewer_drafts(15) == [3, 5, 7, 11]


def test_a_planner_without_counts_in_between() -> None:
    costs = RoundCosts([*grid()], 4, {1: (4,), 8: (4,)})
    planner = Planner(costs, Survival(8, 4))
    assert planner.decide(Batch([0], [4], [True], 100, 100)).depth in (0, 4)
