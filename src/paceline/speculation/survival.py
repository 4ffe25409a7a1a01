"""How likely drafts are to stand, learnt from those that did and did not. Pure logic.

For each position the chance that its draft stands given that all before it did is estimated from counts that
fade, so that what is drafted now weighs more than what was drafted before: over all sequences, and for each
sequence, drawn towards the former while there is little to go by. Position by position, because late drafts
stand less often than their predecessors promise; but where few got so far, the position before says most.

A drafter may say itself how likely each draft is to stand (DSpark's confidence head). How much that is worth
is learnt too: by how much the chance rises where it says more than on average (the slope of a regression
through the means, between not at all and as much as it says). Counts are taken as if it had said what it says
on average, so that they tell of all drafts even where only those it thinks well of are verified. Nothing else
is assumed about the drafter, and no confidence head is needed.

Beside the chances, how far sequences differ is learnt from those that ended: the planner needs to know how
far apart sequences end that start together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

MEMORY = 512
"""Drafts verified at a position after which older ones weigh 1/e, over all sequences: some seconds of
traffic."""
SLOT_MEMORY = 64
"""The same for one sequence."""
SHRINKAGE = 64
"""Trials the estimate over all sequences counts for in that of one sequence."""
NEIGHBOUR = 16
"""Trials the position before counts for."""
PRIOR_SPREAD = 0.1
PRIOR_LIVES = 4
"""How far sequences are believed to differ before any have ended, and for how many ended ones that counts.
Less than texts often do: of too much nothing would ever be learnt, since no drafted sequence would end.
"""
LIVES = 64
"""Sequences that ended after which older ones weigh 1/e. Those that were not drafted count too: they say
nothing, but what was learnt before grows old, and the prior returns.
"""
MIN_LIFE = 24.0
"""Tokens expected of a sequence's drafted rounds from which on it tells how sequences differ."""
TRUSTED = 0.3
"""Slope from which on what the drafter says decides whose drafts are verified."""
SLOPE_MEMORY = 4096
SLOPE_PRIOR = 1.0
"""Drafts after which older ones weigh 1/e in the slope, and the squared differences that it takes to believe
half of one.
"""
PRIOR_CHANCE = 0.85
PRIOR_TRIALS = 2
"""What is believed before anything was drafted: drafting is worth a try wherever it could pay at all."""


class Survival:
    """Chances that drafts stand.

    Args:
        num_slots: running sequences are known by their slot.
        num_positions: drafts per round.
    """

    def __init__(self, num_slots: int, num_positions: int) -> None:
        self.num_positions = num_positions
        self._trials = np.full(num_positions, float(PRIOR_TRIALS))
        self._stood = self._trials * PRIOR_CHANCE
        self._slot_trials = np.zeros((num_slots, num_positions))
        self._slot_stood = np.zeros((num_slots, num_positions))
        self._slot_got = np.zeros(num_slots)  # tokens that drafted rounds committed
        self._slot_due = np.zeros(num_slots)  # and those that were expected of them
        self._said = np.full(num_positions, PRIOR_CHANCE)  # by the drafter, on average
        self._slot_said = np.zeros((num_slots, num_positions))  # of the last block, beyond that
        self._products = self._squares = 0.0  # of what is said and what comes, beyond the averages
        self._variance = PRIOR_SPREAD**2
        self._lives = 0
        self._position = np.arange(num_positions)
        # By how many sequences verified a position: what its counts keep, and what each of the new ones
        # weighs, as if they had come one by one, all alike.
        every = np.arange(num_slots + 1)
        self._keep = (1.0 - 1.0 / MEMORY) ** every
        self._weight = MEMORY * (1.0 - self._keep) / np.maximum(every, 1)
        self._conclude()

    def reset(self, slot: int) -> None:
        """Another sequence takes ``slot``: it starts with the estimate over all."""
        if self._slot_due[slot] >= MIN_LIFE:
            self._lives += 1
            found = (self._slot_due[slot] / self._slot_got[slot] - 1.0) ** 2
            self._variance += (found - self._variance) / min(PRIOR_LIVES + self._lives, LIVES)
        else:
            self._variance += (PRIOR_SPREAD**2 - self._variance) / LIVES
        self._slot_got[slot] = self._slot_due[slot] = 0.0
        self._slot_trials[slot] = 0.0
        self._slot_stood[slot] = 0.0
        self._slot_said[slot] = 0.0

    def observe(
        self,
        slots: Sequence[int],
        drafts: Sequence[int],
        accepted: Sequence[int],
        predicted: Sequence[Sequence[float] | None] = (),
    ) -> None:
        """Learn from one round: of each sequence, the drafts verified and how many of them stood; and how
        likely the drafter held its drafts and all before each to stand, if it said.
        """
        if not any(drafts):
            return  # nothing to learn from
        position, index = self._position, np.asarray(slots)
        stands, count = np.asarray(accepted)[:, None], np.asarray(drafts)[:, None]  # [N, 1]
        stood = (position < stands).astype(np.float64)
        # The first draft that falls is a trial as well; those behind it tell nothing, but time passes for
        # them too: what is known of a position nobody reaches any more is old.
        trials = position <= np.minimum(stands, count - 1)
        verified = position < count
        beyond = self._beyond(index, predicted)  # [N, g], or 0
        chance = np.cumprod(np.clip(self._chances + self.slope * beyond, 0.0, 1.0), axis=-1)
        due = np.where(verified, chance, 0.0).sum(1)
        self._slot_due[index] += np.where(count[:, 0] > 0, 1.0 + due, 0.0)
        self._slot_got[index] += np.where(count > 0, 1.0 + stands, 0.0)[:, 0]
        if predicted:
            kept = (1.0 - 1.0 / SLOPE_MEMORY) ** int(trials.sum())
            told = np.where(trials, beyond, 0.0)
            self._products = self._products * kept + float((told * (stood - self._chances)).sum())
            self._squares = self._squares * kept + float((told**2).sum())
            stood -= self.slope * told
        keep = np.where(verified, 1.0 - 1.0 / SLOT_MEMORY, 1.0)
        self._slot_trials[index] = self._slot_trials[index] * keep + trials
        self._slot_stood[index] = self._slot_stood[index] * keep + stood
        num = verified.sum(0)
        keep, weight = self._keep[num], self._weight[num]
        self._trials = self._trials * keep + trials.sum(0) * weight
        self._stood = self._stood * keep + stood.sum(0) * weight
        self._conclude()

    def _beyond(
        self, index: NDArray[np.int64], predicted: Sequence[Sequence[float] | None]
    ) -> FloatArray | float:
        """By how much the drafter held each draft likelier than on average, given that those before it stand,
        [N, g]; 0 where it did not say.
        """
        told = [i for i, row in enumerate(predicted) if row is not None and row[-1] < 1.0]
        if not told:
            return 0.0
        rows = np.maximum(np.array([predicted[i] for i in told], dtype=np.float64), 1e-9)
        rows[:, 1:] = np.minimum(rows[:, 1:] / rows[:, :-1], 1.0)
        self._said += (rows.mean(0) - self._said) * (1.0 - (1.0 - 1.0 / MEMORY) ** len(told))
        beyond = np.zeros((len(index), self.num_positions))
        beyond[told] = rows - self._said
        self._slot_said[index] = beyond
        return beyond

    @property
    def slope(self) -> float:
        """By how much a draft is likelier to stand, as a share of what the drafter says."""
        return max(0.0, min(1.0, self._products / (self._squares + SLOPE_PRIOR)))

    @property
    def trusted(self) -> bool:
        """Whether the drafter knows which of its drafts stand."""
        return self.slope >= TRUSTED

    @property
    def spread(self) -> float:
        """Standard deviation of the rounds that sequences took, as a share of what was expected of them."""
        return math.sqrt(self._variance)

    def overall(self) -> FloatArray:
        """Chance that draft 1, 2, ... and all before it stand, over all sequences: [g]."""
        return self._overall

    def of(self, slots: Sequence[int], *, now: bool = False) -> FloatArray:
        """The same for each of some sequences: [N, g].

        Args:
            slots: the sequences.
            now: of blocks as they differ from round to round, where the drafter tells by how much: as its
                last ones did. Otherwise over many rounds.
        """
        index = np.asarray(slots, dtype=np.int64)
        chance = (self._prior + self._slot_stood[index]) / (SHRINKAGE + self._slot_trials[index])
        if now and self.trusted:
            chance = chance + self.slope * self._slot_said[index]
        return cast(FloatArray, np.cumprod(np.clip(chance, 0.0, 1.0), axis=1))

    def _conclude(self) -> None:
        """Work out chances over all sequences from the counts."""
        chances = []
        before, weight = PRIOR_CHANCE, 0
        for stood, trials in zip(self._stood.tolist(), self._trials.tolist(), strict=True):
            before = (stood + weight * before) / (trials + weight)
            chances.append(before)
            weight = NEIGHBOUR
        self._chances = np.clip(chances, 0.0, 1.0)
        self._prior = SHRINKAGE * self._chances
        self._overall = np.cumprod(self._chances)
