"""Which sequences are hedged: a function of who is there, in rows nobody else needs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.sampling.params import SamplingParams
from paceline.speculation.config import SpeculativeConfig
from paceline.speculation.controller import HedgeController, HedgeTuning
from paceline.speculation.decision import Batch, Decision
from paceline.speculation.hedging import HedgeCandidate, HedgeLimits, Hedger
from support.engines import complete, golden_core, golden_prompts, tokens_of
from support.round_world import World


def hedger(max_seqs: int = 4, positions: tuple[int, ...] = (0, 2), num_drafts: int = 5) -> Hedger:
    return Hedger(HedgeLimits(max_seqs, positions, num_drafts, (len(positions),)))


candidates = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(1, 12)), max_size=9, unique_by=lambda c: c[1]
).map(
    lambda found: [
        HedgeCandidate((priority, arrival, 0), 99 - arrival, budget) for priority, arrival, budget in found
    ]
)


@given(found=candidates, spare=st.integers(0, 60), first=st.integers(0, 4), shuffled=st.randoms())
def test_the_choice_does_not_depend_on_the_order_of_the_batch(
    found: list[HedgeCandidate], spare: int, first: int, shuffled: Any
) -> None:
    one = hedger(positions=(first,))
    chosen = one.choose(found, spare)
    shuffled.shuffle(found)
    assert one.choose(found, spare) == chosen
    assert len(chosen) * (5 - first) <= spare and len(chosen) <= 4
    eligible = {item.slot for item in found if item.budget >= 2 and first < min(5, item.budget - 1)}
    assert set(chosen) <= eligible
    assert len(chosen) == min(4, spare // (5 - first), len(eligible))


def test_the_most_important_are_hedged_and_stay_so() -> None:
    found = [
        HedgeCandidate((1, 0, 0), 0, 9),
        HedgeCandidate((0, 7, 0), 1, 9),
        HedgeCandidate((0, 3, 1), 2, 9),
    ]
    assert hedger(max_seqs=2).choose(found, 1000) == [2, 1]


def test_rows_that_others_need_are_left_to_them() -> None:
    found = [HedgeCandidate((0, i, 0), i, 9) for i in range(4)]
    assert [len(hedger().choose(found, spare)) for spare in (-3, 0, 9, 10, 19, 20, 1000)] == [
        0,
        0,
        0,
        1,
        1,
        2,
        4,
    ]


def test_wins_and_losses_are_counted_after_truncation() -> None:
    one = hedger()
    for spans in ([(2, 3), (2, 0)], [], [(1, 0)]):
        one.verified(spans)
    assert (one.num_rounds, one.num_chains, one.num_wins, one.num_losses, one.num_tokens) == (2, 5, 1, 2, 3)


def test_with_a_controller_it_says_how_many_chains() -> None:
    limits = HedgeLimits(4, (0, 1), 5, (1, 2))
    one = Hedger(limits, HedgeController(2))
    found = [HedgeCandidate((0, 0, 0), 0, 9)]
    assert one.chains == 0 and one.choose(found, 1000) == []
    assert one.controller is not None
    one.controller.chains = 1
    assert one.chains == 1 and one.choose(found, 5) == [0] and one.choose(found, 4) == []


GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def hedged_core(**options: Any) -> Any:
    speculative = {"hedge": 8, **options.pop("speculative", {})}
    return golden_core("qwen3_tiny", drafter="dspark_tiny_b7", speculative_config=speculative, **options)


def test_near_the_row_limit_nothing_is_made_to_be_thrown_away() -> None:
    core = hedged_core(max_num_seqs=8, max_num_batched_tokens=64)  # eight sequences of eight rows
    runner = core.runner
    seen = []
    run = runner.rounds.run

    def watched(spans: Any, kind: Any, depth: Any) -> Any:
        seen.append((sum(span.rows for span in spans), [span.chains for span in spans]))
        return run(spans, kind, depth)

    runner.rounds.run = watched
    complete(core, golden_prompts(8, seed=2), [GREEDY] * 8)
    assert any(rows > 64 - 21 for rows, _ in seen)
    for rows, chains in seen:
        assert rows + sum(count * 7 for count in chains) <= 64
        if rows > 64 - 21:
            assert not any(chains)
    assert any(any(chains) for _, chains in seen)


def test_the_controller_hears_of_every_round() -> None:
    core = hedged_core(speculative={"hedge_auto": True})
    controller = core.scheduler.hedger.controller
    heard: list[tuple[int, int]] = []
    controller.round_done = lambda began_s, now_s, tokens, executed: heard.append((tokens, executed))
    controller.chains = 2
    outputs = complete(core, golden_prompts(4, seed=2), [GREEDY] * 4)
    num_first = sum(1 for group in outputs for _ in group)  # tokens that prefill drew, and as many last ones
    assert sum(tokens for tokens, _ in heard) <= 4 * 24
    assert sum(tokens for tokens, _ in heard) >= 4 * 24 - 2 * num_first
    executed = [chains for _, chains in heard]
    assert executed[0] == 0, "chains are made in one round and verified in the next"
    assert set(executed) <= {0, 1, 2} and executed.count(2) > len(executed) / 2, "near an end there are fewer"
    stats = core.stats().hedging
    assert stats.chains == 2 and 0 < stats.num_chains <= 2 * (stats.num_wins + stats.num_losses)


def test_chains_that_could_not_run_are_not_booked() -> None:
    """On a CPU one request with penalties takes everybody's step out of rounds."""
    core = hedged_core(speculative={"hedge_auto": True})
    controller = core.scheduler.hedger.controller
    heard: list[int] = []
    controller.round_done = lambda began_s, now_s, tokens, executed: heard.append(executed)
    controller.chains = 2
    penalised = SamplingParams(temperature=0.0, max_tokens=99, ignore_eos=True, presence_penalty=0.5)
    complete(core, golden_prompts(4, seed=2), [GREEDY, GREEDY, GREEDY, penalised])
    assert core.stats().hedging.num_chains == 0
    assert heard and not any(heard)


def test_rows_of_chains_are_counted() -> None:
    core = hedged_core()
    runner = core.runner
    forward, rows = runner.model.forward, 0

    def counted(tokens: Any, *args: Any, **options: Any) -> Any:
        nonlocal rows
        rows += len(tokens)
        return forward(tokens, *args, **options)

    runner.model.forward = counted
    before = core.stats().num_rows
    complete(core, golden_prompts(4, seed=2), [GREEDY] * 4)
    stats = core.stats()
    assert stats.hedging.num_chains > 0
    # Some chains are made for sequences that end, and their places forwarded all the same.
    assert 0.8 * rows <= stats.num_rows - before <= rows


def test_the_controller_tries_chains_while_serving_and_the_tokens_stay() -> None:
    prompts = golden_prompts(8, seed=2)
    want = tokens_of(complete(golden_core("qwen3_tiny"), prompts, [GREEDY] * 8))
    core = hedged_core(speculative={"hedge_auto": True})
    tuning = HedgeTuning(window_rounds=2, explore_windows=2, max_gap_s=60.0)
    core.scheduler.hedger.controller = controller = HedgeController(3, tuning)
    for _ in range(4):
        assert tokens_of(complete(core, prompts, [GREEDY] * 8)) == want
    assert {0, 1} <= set(controller.speeds), "both were timed"
    stats = core.stats().hedging
    assert stats.num_chains > 0


def test_the_controller_hears_nothing_of_rounds_that_leave_no_place_for_chains() -> None:
    core = hedged_core(speculative={"hedge_auto": True})
    scheduler = core.scheduler
    scheduler.planner = planner = World(seed=1).planner  # it knows other rounds, and decides all the same
    controller = scheduler.hedger.controller
    controller.chains = 2
    heard: list[bool] = []
    controller.round_done = lambda began_s, now_s, tokens, executed: heard.append(True)
    controller.interrupted = lambda now_s: heard.append(False)
    decided: list[Decision] = []
    decide = planner.decide

    def seen(batch: Batch) -> Decision:
        decided.append(decide(batch))
        return decided[-1]

    planner.decide = seen  # type: ignore[method-assign]
    complete(core, golden_prompts(4, seed=2), [GREEDY] * 4)
    stats = core.stats().hedging
    rounds = [decision for decision in decided if decision.expected]
    assert len(heard) == len(rounds), "one word for each round that decodes"
    assert not any(word and not decision.hedge for word, decision in zip(heard, rounds, strict=True))
    assert all(decision.depth < 7 or not decision.propose for decision in rounds if not decision.hedge)
    assert False in heard and True in heard and stats.num_chains > 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hedge": -1}, "hedge is -1; it must be 0"),
        ({"hedge_auto": True}, "hedge_auto is set, but hedge is 0"),
        ({"hedge_positions": [0]}, "hedge_positions is set, but hedge is 0"),
        ({"hedge": 1, "hedge_positions": []}, "at least one position"),
        ({"hedge": 1, "hedge_positions": [1, 0]}, r"hedge_positions is \[1, 0\]; .* ascending"),
        ({"hedge": 1, "hedge_positions": [1, 1]}, "each once"),
        ({"hedge": 1, "hedge_positions": [-1]}, "from 0 on"),
        ({"hedge": 1, "synthetic_accept_length": 2.0}, "exclude each other"),
    ],
)
def test_bad_options_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.of(config)


def test_positions_must_be_drafts_and_rounds_must_be_there() -> None:
    with pytest.raises(ConfigError, match=r"names draft 7, but rounds have 7 drafts. Name positions in 0..6"):
        hedged_core(speculative={"hedge_positions": [0, 7]})
    with pytest.raises(ConfigError, match="enforce_eager has none"):
        hedged_core(enforce_eager=True)
    core = hedged_core(speculative={"num_speculative_tokens": 2})
    assert core.scheduler.hedger.limits.positions == (0, 1)


def test_chains_have_their_own_blocks_behind_the_pool() -> None:
    core = hedged_core(max_num_seqs=4, num_blocks=50)  # 4 sequences, 3 chains each, 7 rows: 84 slots
    assert core.runner.cache.k.shape[1] == core.runner.drafting.cache.k.shape[1] == 50 + 6 + 1
