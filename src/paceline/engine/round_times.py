"""Time decode rounds of a device that serves nobody yet: what the verify planner starts from.

The rounds are ordinary steps of made-up sequences, so that whatever a step costs is in the figure. Nothing is
left behind but K/V that no sequence looks at: slots and tables are written anew for whoever takes them.

What decisions hang on is how the times compare, so all rounds of a size are timed in turn, and again while
there is time: a busy moment hits them alike, and the median of a few forgets it. The cheap ones, which it
would change most, are timed most often.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median_low

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
SECOND_SIZE = 2
"""How many times the budget a second size may take: one alone says nothing of how rounds grow."""
MAX_SAMPLES = 5
ENOUGH_S = 0.06
"""Samples of a round that are enough, and seconds of them."""


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
    What is left of it goes to timing again.

    Args:
        runner: the device.
        limits: what fits.
        counts: draft counts to time at a number of sequences, ascending up to all drafts.
        budget_s: seconds to measure for.
        repeats: launches per sample, without a wait in between; their mean counts.
        warm_up: run each round once before: where kernels are compiled or graphs captured when they are
            first needed.
        clock: seconds.

    Returns:
        Rounds as :class:`paceline.speculation.costs.RoundCosts` wants them; none when sequences are too short
        to run any.
    """
    grid = {
        size: [Round(size, 0, False), *(Round(size, count, True) for count in (0, *counts(size)))]
        for size in _sizes(limits.max_num_seqs)
    }
    timing = _Timing(runner, limits, repeats, max(map(_rows, grid.values())), clock)
    if timing.longest < 0:
        return []
    context, longer = timing.context(CONTEXT), timing.context(LONG_CONTEXT)
    turns: list[_Turn] = []
    spent_s = last_s = 0.0
    for size, rounds in grid.items():
        room_s = budget_s * (SECOND_SIZE if len(turns) == 1 else 1)
        if turns and (not timing.fits(size) or spent_s + GROWTH * last_s > room_s):
            break
        turns.append(_Turn(rounds, context))
        last_s = timing.first(turns[-1], warm_up)
        spent_s += last_s
    if longer >= MIN_LENGTHENING * context:
        size = turns[:2][-1].rounds[0].num_seqs
        turns.append(_Turn([Round(size, 0, False), Round(size, limits.num_drafts, True)], longer))
        spent_s += timing.first(turns[-1], warm_up)
    for _ in range(1, MAX_SAMPLES):
        for turn in turns:
            if spent_s + turn.next_s <= budget_s:
                spent_s += timing.run(turn)
    return [Measured(round_, turn.context, turn.seconds(round_)) for turn in turns for round_ in turn.rounds]


@dataclass
class _Turn:
    """Rounds of one size, timed in turn.

    Attributes:
        rounds: what is timed, plain decoding first.
        context: tokens each sequence begins with.
        samples: seconds of each round so far.
    """

    rounds: list[Round]
    context: int
    samples: dict[Round, list[float]] = field(default_factory=dict)

    def seconds(self, round_: Round) -> float:
        """What a round takes; of two samples the smaller."""
        return median_low(self.samples[round_])

    @property
    def wanted(self) -> list[Round]:
        """Rounds that have not been timed enough: at least twice, as the first may have been disturbed."""
        taken = {round_: self.samples.get(round_, []) for round_ in self.rounds}
        return [round_ for round_, found in taken.items() if len(found) < 2 or sum(found) < ENOUGH_S]

    @property
    def next_s(self) -> float:
        """What they are expected to take, and the round that begins."""
        return sum(map(self.seconds, self.wanted)) + self.seconds(self.rounds[0])


def _rows(rounds: Sequence[Round]) -> int:
    """Rows of a sequence in one of each."""
    return sum(round_.num_drafts + 1 for round_ in rounds)


def _sizes(max_num_seqs: int) -> list[int]:
    """Numbers of sequences that span what may run, a factor of eight apart; sizes that are captured, too."""
    sizes = [1]
    while sizes[-1] * 8 < max_num_seqs:
        sizes.append(sizes[-1] * 8)
    return sizes if max_num_seqs == 1 else [*sizes, max_num_seqs]


class _Timing:
    def __init__(
        self, runner: StepRunner, limits: TimingLimits, repeats: int, rows: int, clock: Callable[[], float]
    ) -> None:
        self._runner, self._limits, self._clock = runner, limits, clock
        self._repeats = repeats
        self._params = SamplingParams(temperature=0.0, max_tokens=1)
        # Rows a sequence can gain in a turn, and as many again for a drafter's block behind them.
        self._growth = repeats * rows + 1
        self.longest = min(limits.max_model_len, limits.num_blocks * limits.block_size) - 2 * self._growth
        self._step = 0

    def context(self, wanted: int) -> int:
        """``wanted`` tokens, or the most a sequence can have and still be timed."""
        return min(wanted, self.longest)

    def fits(self, size: int) -> bool:
        """Whether a round of so many sequences with all drafts is one step."""
        return size * (self._limits.num_drafts + 1) <= self._limits.max_num_batched_tokens

    def first(self, turn: _Turn, warm_up: bool) -> float:
        """Time rounds for the first time. Returns the seconds it takes once nothing is compiled any more."""
        if warm_up:
            self.run(turn)
            turn.samples.clear()
        return (1 + warm_up) * self.run(turn)

    def run(self, turn: _Turn) -> float:
        """Time the rounds that want it, one after the other. Returns the seconds it took."""
        began_s = self._clock()
        wanted = turn.wanted
        if wanted:
            self._launch(turn.rounds[0], turn.context, begin=True).result()
        for round_ in wanted:
            start_s = self._clock()
            for step in [self._launch(round_, turn.context) for _ in range(self._repeats)]:
                step.result()
            turn.samples.setdefault(round_, []).append((self._clock() - start_s) / self._repeats)
        return self._clock() - began_s

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
