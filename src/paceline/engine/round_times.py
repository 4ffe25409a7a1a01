"""Time decode rounds of a device that serves nobody yet: what the verify planner starts from.

The rounds are ordinary steps of made-up sequences, so that whatever a step costs is in the figure. Nothing is
left behind but K/V that no sequence looks at: slots and tables are written anew for whoever takes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.runtime.plan import PendingStep, SlotInit, Span, StepPlan, StepRunner, TableUpdate
from paceline.sampling.params import SamplingParams
from paceline.speculation.costs import Measured, Round

CONTEXT = 256
"""Tokens of context the grid is timed at, where sequences may get so long."""
LONG_CONTEXT = 2048
"""The same for the slope; a second length needs to be this much longer to tell anything."""
MIN_LENGTHENING = 2
GROWTH = 4
"""How much longer the next size is expected to take than the last: it has more sequences than that, but until
rows fill the device they are cheaper together."""


@dataclass(frozen=True, slots=True)
class TimingLimits:
    """What made-up sequences must fit into.

    Attributes:
        max_num_seqs: slots.
        max_model_len: longest sequence in tokens.
        max_num_batched_tokens: rows per step.
        num_blocks: blocks of ``block_size`` tokens in the pool.
        num_drafts: drafts per round.
    """

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    num_drafts: int


def time_rounds(
    runner: StepRunner,
    limits: TimingLimits,
    counts: Callable[[int], Sequence[int]],
    *,
    budget_s: float,
    repeats: int,
    warm_up: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Measured]:
    """Time a grid of rounds, from one sequence up; sizes that would take longer than the budget are left out.

    Args:
        runner: the device.
        limits: what fits.
        counts: draft counts to time at a number of sequences, ascending up to all drafts.
        budget_s: seconds to measure for.
        repeats: launches per round, without a wait in between; their mean counts.
        warm_up: launch each round once before: where kernels are compiled or graphs captured when they are
            first needed.
        clock: seconds.

    Returns:
        Rounds as :class:`paceline.speculation.costs.RoundCosts` wants them; none when sequences are too short
        to run any.
    """
    timing = _Timing(runner, limits, repeats, warm_up, clock)
    if timing.longest < 0:
        return []
    context, longer = timing.context(CONTEXT), timing.context(LONG_CONTEXT)
    found: list[Measured] = []
    sizes: list[int] = []
    spent_s = last_s = 0.0
    for size in _sizes(limits.max_num_seqs):
        if sizes and (not timing.fits(size) or spent_s + GROWTH * last_s > budget_s):
            break
        rounds = [Round(size, 0, False), *(Round(size, count, True) for count in (0, *counts(size)))]
        times = timing.measure(rounds, context)
        found += times
        sizes.append(size)
        last_s = (repeats + warm_up) * sum(item.seconds for item in times)
        spent_s += last_s
    if longer >= MIN_LENGTHENING * context:
        size = sizes[:2][-1]
        found += timing.measure([Round(size, 0, False), Round(size, limits.num_drafts, True)], longer)
    return found


def _sizes(max_num_seqs: int) -> list[int]:
    """Numbers of sequences that span what may run, a factor of eight apart; sizes that are captured, too."""
    sizes = [1]
    while sizes[-1] * 8 < max_num_seqs:
        sizes.append(sizes[-1] * 8)
    return sizes if max_num_seqs == 1 else [*sizes, max_num_seqs]


class _Timing:
    def __init__(
        self,
        runner: StepRunner,
        limits: TimingLimits,
        repeats: int,
        warm_up: bool,
        clock: Callable[[], float],
    ) -> None:
        self._runner, self._limits, self._clock = runner, limits, clock
        self._repeats, self._warm_up = repeats, warm_up
        self._params = SamplingParams(temperature=0.0, max_tokens=1)
        # Rows a sequence can gain while it is timed, and as many again for a drafter's block behind them.
        self._growth = (repeats + 1) * (limits.num_drafts + 1)
        self.longest = min(limits.max_model_len, limits.num_blocks * limits.block_size) - 2 * self._growth
        self._step = 0

    def context(self, wanted: int) -> int:
        """``wanted`` tokens, or the most a sequence can have and still be timed."""
        return min(wanted, self.longest)

    def fits(self, size: int) -> bool:
        """Whether a round of so many sequences with all drafts is one step."""
        return size * (self._limits.num_drafts + 1) <= self._limits.max_num_batched_tokens

    def measure(self, rounds: Sequence[Round], context: int) -> list[Measured]:
        """Time rounds of one size."""
        return [Measured(round_, context, self._seconds(round_, context)) for round_ in rounds]

    def _seconds(self, round_: Round, context: int) -> float:
        if self._warm_up:
            self._launch(round_, context, begin=True).result()
        start = self._clock()
        pending = [self._launch(round_, context, begin=not self._warm_up) for _ in range(self._repeats)]
        for step in pending:
            step.result()
        return (self._clock() - start) / self._repeats

    def _launch(self, round_: Round, context: int, *, begin: bool = False) -> PendingStep:
        """Start a round; ``begin`` makes up its sequences first, each with blocks of its own while there are
        enough.
        """
        slots, limits = range(round_.num_seqs), self._limits
        rows = round_.num_drafts + 1
        plan = StepPlan(
            self._step,
            spans=[Span(slot, rows, round_.num_drafts, round_.propose) for slot in slots],
            max_context=context + self._growth,
        )
        self._step += 1
        if begin:
            tokens = [0] * (context + 1)
            plan.inits = [SlotInit(slot, tokens, context, context, self._params, 0) for slot in slots]
            count = -(-(context + 2 * self._growth) // limits.block_size)
            plan.table = [
                TableUpdate(slot, 0, [(slot * count + i) % limits.num_blocks for i in range(count)])
                for slot in slots
            ]
        return self._runner.launch(plan)
