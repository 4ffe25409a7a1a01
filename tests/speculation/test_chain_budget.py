"""Hedge chains in the planner's budget: bought where they pay, tried where they might, and never near the row
limit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.sampling.params import SamplingParams
from paceline.speculation.costs import Measured, Round, RoundCosts
from paceline.speculation.decision import Batch, Decision
from paceline.speculation.hedging import HedgeLimits
from paceline.speculation.odds import PRIOR_GAIN, ChainOdds
from paceline.speculation.planner import Planner, _Trial
from paceline.speculation.survival import Survival
from support.engines import complete, golden_core, golden_prompts, tokens_of

LIMITS = HedgeLimits(4, (0, 1), 4, (2,))


def planner(row_s: float) -> Planner:
    """Four drafts and up to four hedged sequences; a round is a second, and what its rows take."""
    measured = [
        Measured(Round(size, drafts, propose), 0, 1.0 + row_s * size * drafts + 0.1 * propose)
        for size in (1, 8)
        for drafts, propose in ((0, False), (0, True), (4, True))
    ]
    return Planner(RoundCosts(measured, 4, None, LIMITS), Survival(8, 4), ChainOdds(LIMITS.positions))


def batch(hedged: int = 4) -> Batch:
    return Batch(range(8), [4] * 8, [True] * 8, 0.0, 99, hedged=hedged, chains=2)


def run(made: Planner, rounds: int, stood: int, won: int, hedged: int = 4) -> list[Decision]:
    """Rounds of eight sequences; ``stood`` drafts of every other one stand, and with chains ``won`` more."""
    decisions = []
    for _ in range(rounds):
        decision = made.decide(batch(hedged))
        decisions.append(decision)
        drafts = min(decision.depth, 4)
        run_chains = decision.hedge and drafts == 4
        chains = [2 * (run_chains and slot < hedged) for slot in range(8)]
        accepted = [min(4 if slot % 2 else stood, drafts) for slot in range(8)]
        wins = [won * (count > 0 and slot % 2 == 0) for slot, count in enumerate(chains)]
        made.committed(decision, range(8), [drafts] * 8, accepted, chains, wins)
    return decisions


# ---------------------------------------------------------------------- odds


def test_a_chain_is_judged_by_the_falls_at_its_position() -> None:
    odds = ChainOdds((0, 2))
    for _ in range(2000):
        odds.observe([0, 1, 2, 3, 0], [4, 4, 4, 3, 4], [2, 2, 2, 2, 0], [3, 0, 0, 0, 0])
    survival = np.array([0.6, 0.5, 0.4, 0.3])
    assert odds.gain(survival, 1) == pytest.approx(0.4 * 3, rel=0.01), "four in ten fall at the first"
    assert odds.gain(survival, 2) == pytest.approx(0.4 * 3, abs=0.01), "the other chain never won"


def test_odds_begin_hopeful_and_forget() -> None:
    odds, survival = ChainOdds((0,)), np.array([0.5, 0.4])
    assert odds.gain(survival, 1) == 0.5 * PRIOR_GAIN
    for won in (0, 4):
        for _ in range(1500):
            odds.observe([0], [2], [1], [won])
        assert odds.gain(survival, 1) == pytest.approx(0.5 * won, abs=0.03)


def test_drafts_that_were_not_verified_are_no_falls() -> None:
    odds, survival = ChainOdds((1,)), np.array([0.5, 0.25])
    before = odds.gain(survival, 1)
    odds.observe([1, 1, 0], [1, 4, 4], [1, 0, 1], [0, 0, 0])
    assert odds.gain(survival, 1) == before


# ---------------------------------------------------------------------- the budget


def test_rows_that_cost_nothing_are_bought_and_dear_ones_are_not() -> None:
    assert all(
        decision.hedge for decision in run(planner(0.0), 50, stood=0, won=2)[5:] if decision.depth == 4
    )
    dear = run(planner(0.05), 400, stood=4, won=0)
    assert sum(decision.hedge for decision in dear) <= 12
    assert sum(decision.depth == 4 for decision in dear) > 300


def test_chains_that_never_win_are_given_up_and_tried_again() -> None:
    made = planner(0.0005)
    run(made, 600, stood=1, won=0)
    later = [decision.hedge for decision in run(made, 600, stood=1, won=0)]
    assert 0 < sum(later) < 300, "two rounds in which they cost a little, for every six in a thousand seconds"
    pairs = [i for i in range(1, 599) if later[i] and not later[i - 1]]
    assert all(later[i + 1] for i in pairs), "made in one round, verified in the next"
    run(made, 3000, stood=1, won=3)
    assert sum(decision.hedge for decision in run(made, 100, stood=1, won=3)) > 80, "the text has changed"


@pytest.mark.parametrize("stop", ["no sequence may have them", "fewer drafts", "no drafts"])
def test_a_trial_that_is_cut_short_stops_no_other(stop: str) -> None:
    """Chains are made in one round and verified in the next; a next round without a place for them gives the
    trial up, and exploring goes on.
    """
    made = planner(0.0005)
    run(made, 600, stood=1, won=0)
    while not made._chain_trial:
        run(made, 1, stood=1, won=0)
    if stop == "no sequence may have them":
        run(made, 1, stood=1, won=0, hedged=0)
    else:
        made._hedge(batch(), _Trial(2 if stop == "fewer drafts" else 0, True, 8.0), 1.0)
    assert made._chain_trial == 0


def test_no_trial_of_chains_begins_where_fewer_drafts_pay() -> None:
    made = planner(0.0005)
    run(made, 600, stood=1, won=0)
    made._depth, made._unhedged_s, made._chain_trial = 2, 1e9, 0
    made._hedge(batch(), _Trial(4, True, 8.0), 1e9)  # an exploring round of all drafts
    assert not made._hedges and not made._chain_trial


def test_what_is_expected_of_chains_comes() -> None:
    made = planner(0.0)
    run(made, 400, stood=1, won=2)
    expected, realised = made.expected_tokens, made.realised_tokens
    run(made, 200, stood=1, won=2)
    assert made.realised_tokens - realised == pytest.approx(made.expected_tokens - expected, rel=0.05)


def test_survival_is_learnt_from_drafts_alone() -> None:
    made = planner(0.0)
    run(made, 300, stood=1, won=2)
    assert made.survival.overall()[1] == pytest.approx(0.5, abs=0.1)


def test_near_capacity_there_is_nothing_to_buy() -> None:
    assert not any(decision.hedge for decision in run(planner(0.0), 50, stood=0, won=2, hedged=0))


# ---------------------------------------------------------------------- in the engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def hedged(**options: Any) -> Any:
    speculative = {"hedge": 8, "verify_planner": "auto"}
    return golden_core(
        "qwen3_tiny", drafter="dspark_tiny_b7", speculative_config=speculative, max_num_seqs=8, **options
    )


def seen_by(core: Any) -> list[Batch]:
    found, decide = [], core.scheduler.planner.decide

    def watched(batch: Batch) -> Decision:
        found.append(batch)
        return decide(batch)  # type: ignore[no-any-return]

    core.scheduler.planner.decide = watched
    return found


@pytest.mark.parametrize("hedge", [True, False])
def test_the_engine_hedges_when_the_planner_says_so(hedge: bool) -> None:
    prompts = golden_prompts(8, seed=2)
    want = tokens_of(complete(golden_core("qwen3_tiny"), prompts, [GREEDY] * 8))
    core = hedged()
    made = core.scheduler.planner
    made.decide = lambda batch: Decision(7, None, True, "drafts pay", hedge=hedge)
    heard: list[tuple[int, int]] = []
    learn = made.committed

    def committed(
        decision: Decision, slots: Any, drafts: Any, stood: Any, chains: Any, won: Any, *predicted: Any
    ) -> None:
        heard.extend(zip(stood, won, strict=True))
        learn(decision, slots, drafts, stood, chains, won, *predicted)

    made.committed = committed
    assert tokens_of(complete(core, prompts, [GREEDY] * 8)) == want
    assert (core.stats().hedging.num_chains > 0) is hedge
    wins = [stood for stood, won in heard if won]
    assert bool(wins) is hedge and set(wins) <= {0, 1, 2}, (
        "of a span's own drafts those before the branch stood"
    )


def test_what_the_planner_is_offered() -> None:
    core = hedged()
    found = seen_by(core)
    complete(core, golden_prompts(8, seed=2), [GREEDY] * 8)
    assert max(batch.hedged for batch in found) == 8 and {batch.chains for batch in found} == {3}
    assert all(batch.hedged <= len(batch.slots) for batch in found)
    tight = hedged(
        max_num_batched_tokens=64 + 21
    )  # room for one sequence's chains beside eight of eight rows
    found = seen_by(tight)
    complete(tight, golden_prompts(8, seed=2), [GREEDY] * 8)
    assert {batch.hedged for batch in found if len(batch.slots) == 8} == {1}
