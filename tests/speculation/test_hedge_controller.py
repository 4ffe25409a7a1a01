"""The hedge controller, replayed from made-up rounds. No clock runs here."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.speculation.controller import HedgeController, HedgeTuning

TUNING = HedgeTuning(window_rounds=8, explore_windows=3, settle_rounds=100)
CLIMB = 3 * 8
"""Rounds at each number of chains before it is judged."""


class Traffic:
    """Rounds of 10 ms that commit ``tokens(chains)``.

    Args:
        tokens: committed by a round, by chains executed.
        guard: chains executed of those asked for.
    """

    def __init__(
        self,
        tokens: Callable[[int], int],
        max_chains: int = 3,
        guard: Callable[[int], int] = lambda chains: chains,
    ) -> None:
        self.controller = HedgeController(max_chains, TUNING)
        self.tokens, self.guard = tokens, guard
        self.now_s = 100.0
        self.asked: list[int] = []
        self.controller.round_done(self.now_s, self.now_s, 1, 0)  # from here on time is known

    def run(self, rounds: int, seconds: float = 0.01) -> HedgeController:
        for _ in range(rounds):
            asked = self.controller.chains
            self.asked.append(asked)
            executed = self.guard(asked)
            began_s, self.now_s = self.now_s, self.now_s + seconds
            self.controller.round_done(began_s, self.now_s, self.tokens(executed), executed)
        return self.controller


def test_flat_traffic_settles_at_no_chains() -> None:
    traffic = Traffic(lambda chains: 100)
    controller = traffic.run(2 * CLIMB)
    assert controller.settled and controller.chains == 0
    assert set(traffic.asked) == {0, 1}, "one chain was tried, no more"


def test_a_gain_below_the_margin_is_no_gain() -> None:
    assert Traffic(lambda chains: 100 + 2 * chains).run(2 * CLIMB).chains == 0
    assert Traffic(lambda chains: 100 + 4 * chains).run(2 * CLIMB).chains == 2


def test_climbs_while_a_chain_more_pays() -> None:
    controller = Traffic(lambda chains: (100, 110, 120, 119)[chains]).run(4 * CLIMB)
    assert controller.settled and controller.chains == 2
    assert list(controller.speeds) == [0, 1, 2, 3]
    controller = Traffic(lambda chains: 100 + 10 * chains).run(4 * CLIMB)
    assert controller.settled and controller.chains == 3, "there are no more"


def test_rounds_without_a_place_for_chains_are_no_measurement() -> None:
    traffic = Traffic(lambda chains: 100)
    for _ in range(2 * CLIMB):  # plain rounds of a planner, as many and as fast as they may be
        traffic.run(TUNING.window_rounds - 1)
        traffic.now_s += 0.001
        traffic.controller.interrupted(traffic.now_s)
    assert not traffic.controller.speeds and traffic.controller.chains == 0
    controller = traffic.run(TUNING.window_rounds)
    assert controller.speeds == {0: pytest.approx(100 / 0.01)}, "timed from the interruption on"


def test_looks_again_after_a_while() -> None:
    traffic = Traffic(lambda chains: 100 + 10 * chains)
    traffic.run(4 * CLIMB)
    traffic.tokens = lambda chains: 100
    controller = traffic.run(TUNING.settle_rounds + 8 + 2 * CLIMB)
    assert controller.settled and controller.chains == 0
    assert max(controller.speeds.values()) == pytest.approx(10_000), "old traffic is forgotten"


def test_a_pause_discards_the_partial_window() -> None:
    """Seven fast rounds, a pause, slow ones: no window may hold both."""
    traffic = Traffic(lambda chains: 100, max_chains=1)
    traffic.run(7)
    traffic.now_s += 0.6
    traffic.controller.round_done(traffic.now_s, traffic.now_s, 10**9, 0)
    traffic.run(8, seconds=0.1)
    assert traffic.controller.speeds == {0: pytest.approx(1_000)}


def test_the_median_ignores_a_disturbed_window() -> None:
    traffic = Traffic(lambda chains: 100, max_chains=1)
    traffic.run(16)
    controller = traffic.run(8, seconds=0.4)
    assert controller.speeds[0] == pytest.approx(10_000)


def test_rounds_are_booked_to_what_they_executed() -> None:
    """Rows are short: chains are asked for and none runs. That says nothing about one chain."""
    traffic = Traffic(lambda chains: 100, guard=lambda chains: 0)
    controller = traffic.run(2 * CLIMB)
    assert list(controller.speeds) == [0]
    assert controller.settled and controller.chains == 0


def test_a_mixed_window_does_not_count() -> None:
    """Every fifth round runs without its chain: no eight rounds in a row are alike."""
    count = iter(range(10**6))
    traffic = Traffic(lambda chains: 100, guard=lambda chains: chains and int(next(count) % 5 > 0))
    controller = traffic.run(6 * CLIMB)
    assert list(controller.speeds) == [0]
    assert controller.settled and controller.chains == 0


def test_pauses_do_not_decide() -> None:
    """Every window is cut short: there is nothing to compare with, so nothing is chosen."""
    traffic = Traffic(lambda chains: 100 + 10 * chains)
    for _ in range(3 * CLIMB):
        traffic.run(1)
        traffic.now_s += 0.6
    assert not traffic.controller.settled and traffic.controller.chains == 0


def test_slow_rounds_are_no_pauses() -> None:
    controller = Traffic(lambda chains: 100 + 50 * chains).run(4 * CLIMB, seconds=3.0)
    assert controller.settled and controller.chains == 3


def test_no_chains_to_choose_from() -> None:
    controller = Traffic(lambda chains: 100, max_chains=0).run(500)
    assert controller.chains == 0 and controller.settled


def test_replay() -> None:
    """The same events give the same choices."""
    first, second = (Traffic(lambda chains: 100 + 7 * chains) for _ in range(2))
    first.run(400)
    second.run(400)
    assert first.asked == second.asked


def test_constants_are_those_of_the_design() -> None:
    tuning = HedgeTuning()
    assert (tuning.margin, tuning.max_gap_s, tuning.window_rounds) == (0.03, 0.5, 64)
