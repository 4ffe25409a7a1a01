"""What a decode round costs in seconds: measured at start-up, and kept true by the step times seen since.
Pure logic.

A step's time depends on how many sequences run, on the rows each of them has, on whether the next block is
drafted, and on how much context they read. The first three are measured as a grid and interpolated, the last
is a slope. What was measured on an idle machine with an empty cache drifts away from what is true later, so
two corrections follow the step times:

* a *level* for all rounds alike, which follows whatever runs now (a noisy neighbour, a slower clock);
* an *offset* per kind of round: what it costs beside the others. Without this split the kind that runs would
  look slow, and the ones that do not run fast, whenever the machine is slow.

Both are estimated together, as logarithms (Kalman 1960, A New Approach to Linear Filtering and Prediction
Problems): a step tells their sum, and how far each of the two is still in doubt says how its surprise is
divided. So a kind that runs for the first time corrects itself at once, and what all kinds have had in common
since start goes to the level.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.speculation.hedging import HedgeLimits

START_LEVEL = 0.4
START_OFFSET = 0.15
"""Standard deviations of what start-up figures are wrong by, all alike and each beside the others."""
STEP_NOISE = 0.1
"""The same of a step's time."""
LEVEL_DRIFT = 0.01
OFFSET_DRIFT = 0.002
"""And of what the corrections change by from one step to the next."""
KEPT = math.sqrt(1.0 - (OFFSET_DRIFT / START_OFFSET) ** 2)
"""Share of an offset's doubt that is left a step later, beside the drift: however long a kind has not run, it
is in no more doubt than at start. What was learnt of it stays."""
MAX_SURPRISE = 2.0
"""A step further from what was expected than so many standard deviations counts as so far: one pause must not
look like a trend."""

LEAST_DRAFTS = 3
"""Fewest drafts that a choice offers beside none and all."""


class Round(NamedTuple):
    """A decode step, as far as its cost is concerned.

    Attributes:
        num_seqs: sequences.
        num_drafts: drafts verified for each of them.
        propose: whether the next block is drafted.
        chains: hedge chains of each hedged sequence; they run beside all drafts only.
    """

    num_seqs: int
    num_drafts: int
    propose: bool
    chains: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """A round that was timed.

    Attributes:
        round: what ran.
        context: tokens each sequence had in the cache.
        seconds: how long it took.
    """

    round: Round
    context: int
    seconds: float


class _Facts(NamedTuple):
    """What start-up figures say of a round."""

    kind: Round
    seconds: float
    """At the context that was measured."""
    per_token: float
    """Seconds more for each token of context beyond it, of one sequence."""


def fewer_drafts(num_drafts: int) -> list[int]:
    """Counts below ``num_drafts`` that are worth a choice, ascending: three quarters, a half, and so on.
    Where fewer than three pay, none do: drafting them costs as much as drafting all.
    """
    counts, least = set(), num_drafts
    while least > LEAST_DRAFTS:
        counts.add(3 * least // 4)
        least = max(least // 2, LEAST_DRAFTS)
        counts.add(least)
    return sorted(counts)


class RoundCosts:
    """Seconds of a round, for any number of sequences.

    Args:
        measured: rounds timed at one context length, and any of them again at a longer one. At each number of
            sequences plain rounds (no drafts, no proposal) and proposing rounds with none and with
            ``num_drafts`` drafts are needed; counts in between are taken if they are there.
        num_drafts: most drafts per sequence.
        tiers: where rounds exist in fixed sizes only: draft counts by size, ascending; a round takes the
            smallest size and count that hold it. None where a round is of exactly the size needed.
        hedging: what there may be of hedge chains. Their rows are taken to cost what rows of drafts do, until
            rounds that have some are seen.
        shares_keys: whether rounds read keys that many sequences have in common only once. Those with chains
            or the rarer sampling parameters do not, which is learnt from what they take.
    """

    def __init__(
        self,
        measured: Iterable[Measured],
        num_drafts: int,
        tiers: Mapping[int, Sequence[int]] | None = None,
        hedging: HedgeLimits | None = None,
        *,
        shares_keys: bool = False,
    ) -> None:
        self._hedging = hedging
        self.shares_keys = shares_keys
        self.num_drafts = num_drafts
        self._tiers = None if tiers is None else {size: tuple(tiers[size]) for size in sorted(tiers)}
        self._tier_sizes = () if self._tiers is None else tuple(self._tiers)
        self._counts = (*fewer_drafts(num_drafts), num_drafts)
        items = list(measured)
        self._context = min(item.context for item in items)
        base = {item.round: item.seconds for item in items if item.context == self._context}
        self._sizes = sorted({round_.num_seqs for round_ in base})
        self._plain = np.array([base[Round(size, 0, False)] for size in self._sizes])
        self._drafting = np.array([self._by_count(base, size) for size in self._sizes])  # [sizes, g + 1]
        self._slopes = self._context_slopes(items, base)
        self._facts: dict[Round, _Facts] = {}
        self._seen: dict[Round, int] = {}  # where a kind's offset is
        self._corrections = np.zeros(1)  # the level, then offsets
        self._doubt = np.full((1, 1), START_LEVEL**2)  # their covariances
        self._kept, self._drift = np.ones(1), np.full(1, LEVEL_DRIFT**2)  # from one step to the next
        self._steps, self._ran = 0, [0]  # seen, and the last of them for each correction
        self._captured: set[Round] = set()
        self._choices: dict[int, dict[int, Round]] = {}

    def _by_count(self, base: Mapping[Round, float], size: int) -> NDArray[np.float64]:
        """Seconds of proposing rounds with 0..g drafts."""
        counts = sorted(r.num_drafts for r in base if r.num_seqs == size and r.propose)
        if counts[:1] != [0] or counts[-1] != self.num_drafts:
            raise ValueError(f"rounds of {size} sequences were timed with {counts} drafts only")
        times = [base[Round(size, count, True)] for count in counts]
        # A count that came out faster than a smaller one was a disturbance: more rows never cost less.
        return np.interp(np.arange(self.num_drafts + 1), counts, np.maximum.accumulate(times))

    def _context_slopes(self, items: Sequence[Measured], base: Mapping[Round, float]) -> tuple[float, float]:
        """Seconds per sequence and token of context: of a plain row, and with all drafts."""
        slopes = [0.0, 0.0]
        for item in items:
            if item.context > self._context and item.round in base:
                tokens = (item.context - self._context) * item.round.num_seqs
                slopes[item.round.num_drafts > 0] = max(0.0, (item.seconds - base[item.round]) / tokens)
        return slopes[0], max(slopes)

    def counts(self, num_seqs: int) -> Sequence[int]:
        """Draft counts worth a choice for so many sequences, ascending; 0 is left out.

        Where any count could run these are a few: finer steps gain little and each has to be tried now and
        then.
        """
        if self._tiers is None:
            return self._counts
        return self._tiers[self._tier(num_seqs)]

    def room(self, num_seqs: int, depth: int) -> int:
        """Drafts that a round of so many sequences and ``depth`` drafts of each has rows for: rows that a
        captured round has for nobody are there for more.
        """
        size = num_seqs if self._tiers is None else max(self._tier(num_seqs), num_seqs)
        return size * (depth + 1) - num_seqs if depth else 0

    def seconds(self, round_: Round, context: float) -> float:
        """What a round takes.

        Args:
            round_: at least one sequence.
            context: mean tokens of context per sequence.
        """
        facts = self._facts_of(round_)
        place, level = self._seen.get(facts.kind), float(self._corrections[0])
        correction = level if place is None else level + float(self._corrections[place])
        return self._uncorrected(facts, context) * math.exp(correction)

    def seen(self, round_: Round) -> bool:
        """Whether a round of this kind has run since start."""
        return self.kind(round_) in self._seen

    def doubt(self, kind: Round, other: Round) -> float:
        """How far what rounds of one kind take may be from what they seem to, beside those of another: a
        standard deviation of the logarithm. It grows for as long as they do not run.
        """
        one, two = self._seen.get(kind), self._seen.get(other)
        variance = self._variance(one) + self._variance(two)
        if one is not None and two is not None:
            variance -= 2.0 * float(self._doubt[one, two])
        return math.sqrt(max(variance, 0.0))

    def _variance(self, place: int | None) -> float:
        """Of an offset. Here its doubt has no limit: no kind is given up for good."""
        if place is None:
            return START_OFFSET**2
        return max(float(self._doubt[place, place]), OFFSET_DRIFT**2 * (self._steps - self._ran[place]))

    def observe(self, round_: Round, context: float, seconds: float) -> None:
        """Learn from a round that took ``seconds``. Where rounds are captured, the first of a kind may just
        have been, and tells nothing.
        """
        facts = self._facts_of(round_)
        kind = facts.kind
        place = self._seen.get(kind)
        if place is None:
            if self._tiers is not None and kind not in self._captured:
                self._captured.add(kind)
                return
            place = self._admit(kind)
        self._steps += 1
        self._ran[place] = self._steps
        surprise = math.log(max(seconds, 1e-9) / self._uncorrected(facts, context))
        surprise -= float(self._corrections[0] + self._corrections[place])
        common = self._doubt[0] + self._doubt[place]  # with the sum of the two
        variance = float(common[0] + common[place]) + STEP_NOISE**2
        most = MAX_SURPRISE * math.sqrt(variance)
        self._corrections += common * (max(-most, min(most, surprise)) / variance)
        self._doubt -= np.outer(common, common) / variance
        self._doubt *= np.outer(self._kept, self._kept)
        self._doubt.flat[:: len(self._kept) + 1] += self._drift

    # ---- inside ----

    def _admit(self, kind: Round) -> int:
        """Make room for the offset of a kind that has not been seen."""
        place = self._seen[kind] = len(self._corrections)
        self._corrections = np.append(self._corrections, 0.0)
        self._ran.append(self._steps)
        self._doubt = np.pad(self._doubt, (0, 1))
        self._doubt[place, place] = START_OFFSET**2
        self._kept = np.append(self._kept, KEPT)
        self._drift = np.append(self._drift, OFFSET_DRIFT**2)
        return place

    def _tier(self, num_seqs: int) -> int:
        index = bisect_left(self._tier_sizes, num_seqs)
        return self._tier_sizes[min(index, len(self._tier_sizes) - 1)]

    def _shape(self, round_: Round) -> Round:
        """What really runs."""
        chains = round_.chains if round_.num_drafts == self.num_drafts else 0
        if self._tiers is None:
            return round_._replace(chains=chains)
        size, drafts = self._tier(round_.num_seqs), round_.num_drafts
        if drafts == 0:
            return Round(size, 0, round_.propose)
        # Rounds that verify always draft as well: who does not propose is left out of it, but not its time.
        return Round(size, next(count for count in self._tiers[size] if count >= drafts), True, chains)

    def kind(self, round_: Round) -> Round:
        """What rounds of the same kind have in common: their size is the same tier, or nearest to the same
        measured size.
        """
        return self._facts_of(round_).kind

    def kinds(self, num_seqs: int) -> Mapping[int, Round]:
        """The kind of every depth worth a choice: plain decoding, then from all drafts down."""
        found = self._choices.get(num_seqs)
        if found is None:
            depths = (0, *reversed(self.counts(num_seqs)))
            found = self._choices[num_seqs] = {k: self.kind(Round(num_seqs, k, k > 0)) for k in depths}
        return found

    def _facts_of(self, round_: Round) -> _Facts:
        facts = self._facts.get(round_)
        if facts is None:
            shape = self._shape(round_)
            plain, full = self._slopes
            slope = plain + (full - plain) * shape.num_drafts / self.num_drafts
            facts = _Facts(self._group(shape), self._interpolate(shape), slope * shape.num_seqs)
            self._facts[round_] = facts
        return facts

    def _group(self, shape: Round) -> Round:
        # What verifying costs is the same whether or not drafting follows, and is seldom seen without.
        kind = shape._replace(propose=True) if shape.num_drafts else shape
        if self._tiers is not None:
            return kind
        near = min(self._sizes, key=lambda size: abs(math.log(size / shape.num_seqs)))
        return kind._replace(num_seqs=near)

    def _uncorrected(self, facts: _Facts, context: float) -> float:
        return facts.seconds + facts.per_token * max(0.0, context - self._context)

    def _interpolate(self, shape: Round) -> float:
        if not shape.propose and shape.num_drafts == 0:
            return self._over_sizes(self._plain, shape.num_seqs)
        drafting = self._over_sizes(self._drafting[:, shape.num_drafts], shape.num_seqs)
        start = self._over_sizes(self._drafting[:, 0], shape.num_seqs)
        if shape.chains and self._hedging is not None:
            rows = self._hedging.rows(shape.num_seqs, shape.chains)
            drafting += (drafting - start) * rows / (shape.num_seqs * shape.num_drafts)
        if shape.propose:
            return drafting
        plain = self._over_sizes(self._plain, shape.num_seqs)
        return max(plain, drafting - max(0.0, start - plain))

    def _over_sizes(self, values: NDArray[np.float64], num_seqs: int) -> float:
        """Straight lines between measured sizes; beyond the last, on along the last line."""
        last = self._sizes[-1]
        if num_seqs <= last or len(self._sizes) == 1:
            inside = float(np.interp(num_seqs, self._sizes, values))
            return inside if num_seqs <= last else inside * num_seqs / last
        slope = (values[-1] - values[-2]) / (last - self._sizes[-2])
        return float(values[-1] + max(0.0, slope) * (num_seqs - last))
