"""Timing rounds of a device nobody uses yet."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest

from paceline.engine.round_times import CONTEXT, LONG_CONTEXT, TimingLimits, time_rounds
from paceline.proving.drive import runner_of
from paceline.runtime.plan import SpanResult, StepPlan
from paceline.sampling.params import SamplingParams
from paceline.speculation.costs import Measured, Round, RoundCosts
from support.engines import complete, golden_core, golden_prompts, tokens_of
from support.simulated_device import Pending

LIMITS = TimingLimits(
    max_num_seqs=32,
    max_model_len=4096,
    max_num_batched_tokens=512,
    num_blocks=64,
    block_size=16,
    num_drafts=7,
)


class Device:
    """Takes ``seconds`` per row, three times as long for 20 ms from ``busy_s`` on, and checks that plans are
    what the engine itself could have sent.
    """

    num_draft_failures = 0

    def __init__(self, seconds: float, busy_s: float = math.inf) -> None:
        self.clock_s = 0.0
        self._busy_s = busy_s
        self.plans: list[StepPlan] = []
        self._seconds = seconds
        self._positions: dict[int, int] = {}
        self._tables: dict[int, int] = {}

    def launch(self, plan: StepPlan) -> Pending:
        self.plans.append(plan)
        self._positions.update({init.slot: init.computed for init in plan.inits})
        for update in plan.table:
            assert all(0 <= block < LIMITS.num_blocks for block in update.ids)
            self._tables[update.slot] = len(update.ids) * LIMITS.block_size
        for span in plan.spans:
            self._positions[span.slot] += span.rows  # as if every draft stood
            ahead = self._positions[span.slot] + LIMITS.num_drafts + 1
            assert ahead <= min(self._tables[span.slot], LIMITS.max_model_len, plan.max_context + 16)
        busy = self._busy_s <= self.clock_s < self._busy_s + 0.02
        self.clock_s += self._seconds * plan.num_rows * (3 if busy else 1)
        return Pending([SpanResult([1]) for _ in plan.spans])

    def prepare(self) -> bool:
        return False


def counts(size: int) -> tuple[int, ...]:
    return (7,) if size < 8 else (3, 7)


def timed(device: Device, limits: TimingLimits = LIMITS, budget_s: float = 1.0) -> list[tuple[Round, int]]:
    found = time_rounds(
        device, limits, counts, budget_s=budget_s, repeats=2, warm_up=True, clock=lambda: device.clock_s
    )
    for item in found:
        expected = device._seconds * item.round.num_seqs * (item.round.num_drafts + 1)
        assert abs(item.seconds - expected) < 1e-9
    return [(item.round, item.context) for item in found]


def test_grid() -> None:
    context = LIMITS.num_blocks * LIMITS.block_size - 2 * (1 + 2 * (1 + 1 + 4 + 8))
    assert LONG_CONTEXT > context > CONTEXT
    expected = [
        (Round(size, drafts, propose), CONTEXT)
        for size in (1, 8, 32)
        for drafts, propose in [(0, False), *((k, True) for k in (0, *counts(size)))]
    ]
    slope = [(Round(8, 0, False), context), (Round(8, 7, True), context)]
    assert timed(Device(1e-5)) == expected + slope


def test_sizes_beyond_the_budget_are_left_out() -> None:
    sizes = {round_.num_seqs for round_, _ in timed(Device(6e-3))}
    assert sizes == {1, 8}, "a second one may take longer: one alone says nothing of how rounds grow"
    sizes = {round_.num_seqs for round_, _ in timed(Device(1e-2))}
    assert sizes == {1}, "the next would have taken another second"
    assert {round_.num_seqs for round_, _ in timed(Device(1e-2), budget_s=30.0)} == {1, 8, 32}


def test_rounds_that_no_step_could_hold_are_left_out() -> None:
    small = TimingLimits(32, 4096, 64, 64, 16, 7)
    assert {round_.num_seqs for round_, _ in timed(Device(1e-5), small)} == {1, 8}


def test_sequences_too_short_to_time() -> None:
    assert timed(Device(1e-5), TimingLimits(32, 40, 512, 64, 16, 7)) == []


def again(device: Device, budget_s: float = 1.0) -> list[Measured]:
    """Times as a CPU's are taken."""
    return time_rounds(
        device, LIMITS, counts, budget_s=budget_s, repeats=1, warm_up=True, clock=lambda: device.clock_s
    )


@pytest.mark.parametrize("busy_ms", range(0, 1000, 10))
def test_a_busy_moment_is_forgotten(busy_ms: int) -> None:
    """Whenever it comes: what counts is how rounds compare."""
    device = Device(2e-4, busy_ms / 1000)
    found = again(device)
    for size in (1, 8, 32):
        at = {item.round: item.seconds for item in found if item.round.num_seqs == size}
        plain = at[Round(size, 0, False)]
        assert at[Round(size, 0, True)] == pytest.approx(plain, rel=0.1)
        assert at[Round(size, 7, True)] == pytest.approx(8 * plain, rel=0.3 if size == 32 else 0.1)


def test_the_first_round_of_a_shape_does_not_count() -> None:
    """It compiles: neither is that what it takes, nor is there less time for others."""

    class Compiling(Device):
        def launch(self, plan: StepPlan) -> Pending:
            shape = len(plan.spans), plan.num_rows
            if shape not in {(len(other.spans), other.num_rows) for other in self.plans}:
                self.clock_s += 2.0
            return super().launch(plan)

    assert timed(Compiling(1e-5)) == timed(Device(1e-5))


def test_timing_again_takes_what_is_left() -> None:
    device, more = Device(4e-4), Device(4e-4)
    again(device, 0.7)
    again(more, 9.0)
    assert 0.6 < device.clock_s < 0.75 and more.clock_s > 0.9


def test_what_is_cheap_is_timed_more_often() -> None:
    device = Device(4e-4)
    again(device)
    times = Counter((len(plan.spans), plan.num_rows // len(plan.spans)) for plan in device.plans)
    assert times[1, 8] == 6 > times[32, 8] >= 2, "one of each does not count"


def test_costs_come_from_a_real_engine_and_leave_it_as_it_was() -> None:
    """The golden engine draws the same tokens after it was timed, whatever lies in its slots and blocks."""
    prompts, params = golden_prompts(6), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    expected = tokens_of(complete(golden_core("qwen3_tiny"), prompts, params))
    core = golden_core("qwen3_tiny", drafter="dspark_tiny_b7", max_num_seqs=8, num_blocks=64)
    limits = TimingLimits(8, core.info.max_model_len, 512, 64, 16, 7)
    clock = itertools.count()
    found = time_rounds(
        runner_of(core),
        limits,
        lambda _: (7,),
        budget_s=1e9,
        repeats=2,
        warm_up=True,
        clock=lambda: float(next(clock)),
    )
    assert RoundCosts(found, 7).seconds(Round(3, 2, True), 10) > 0
    assert tokens_of(complete(core, prompts, params)) == expected
