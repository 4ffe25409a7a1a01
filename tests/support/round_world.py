"""A world the planner can be tried in: rounds cost what a table says, drafts stand with a given chance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from paceline.speculation.costs import Measured, Round, RoundCosts
from paceline.speculation.decision import EVERYTHING, Batch, Decision
from paceline.speculation.planner import Planner
from paceline.speculation.survival import Survival

NUM_DRAFTS = 7
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
TIERS = {size: (7,) if size < 16 else (3, 5, 7) for size in SIZES}
CONTEXT = 256


def gpu_seconds(round_: Round) -> float:
    """Like a 4B model on an H200, with little context (fitted to measured rounds)."""
    size, rows = round_.num_seqs, round_.num_seqs * round_.num_drafts
    plain = 2.9 + 0.0157 * size
    drafts = 0.0065 * rows + 0.0072 * max(0, rows - 250)
    return (plain + drafts + (0.75 + 0.0197 * size) * round_.propose) / 1e3


H200_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
H200_PLAIN = (2.45, 2.55, 2.65, 2.83, 3.08, 3.32, 3.9, 5.05, 7.8)
H200_DRAFTING = (3.15, 3.9, 4.1, 4.2, 4.4, 4.6, 5.75, 8.1, 12.9)
H200_FULL = (3.25, 3.92, 4.15, 4.25, 5.0, 6.3, 10.3, 19.5, 37.2)
"""Milliseconds of plain rounds, of those that only draft, and of those with seven drafts."""


def h200_seconds(round_: Round) -> float:
    """As measured at 4B with some 250 tokens of context (``benchmarks/planner_grid.py``). Up to eight rows
    take the persistent kernel, so for two to eight sequences drafting means leaving it.
    """
    if not round_.propose and not round_.num_drafts:
        return float(np.interp(round_.num_seqs, H200_SIZES, H200_PLAIN)) / 1e3
    none, full = (np.interp(round_.num_seqs, H200_SIZES, times) for times in (H200_DRAFTING, H200_FULL))
    return float(none + (full - none) * round_.num_drafts / NUM_DRAFTS) / 1e3


def cpu_seconds(round_: Round) -> float:
    """Like the bundled pair on two cores: rows cost from the start, and drafting costs as much."""
    rows = round_.num_seqs * (round_.num_drafts + 1)
    return (6.4 + 0.16 * rows + (3.0 + 0.85 * round_.num_seqs) * round_.propose) / 1e3


def chance_for(accept_length: float) -> float:
    """The chance p of each draft, given those before it stand, for which 1 + p + p² + ... + p⁷ is so long."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        shorter = sum(middle**j for j in range(NUM_DRAFTS + 1)) < accept_length
        low, high = (middle, high) if shorter else (low, middle)
    return low


class World:
    """Runs a planner.

    Args:
        seconds: true cost of a round.
        tiers: draft counts by size; None for rounds of any size.
        misjudged: what the planner's table has of a round, as a factor of the truth.
        noise: standard deviation of a step's time, as a share of it.

    Attributes:
        planner: what is tried.
    """

    def __init__(
        self,
        seconds: Callable[[Round], float] = gpu_seconds,
        tiers: Mapping[int, Sequence[int]] | None = TIERS,
        misjudged: Callable[[Round], float] = lambda round_: 1.0,
        noise: float = 0.03,
        seed: int = 0,
    ) -> None:
        self._seconds, self._tiers, self._noise = seconds, tiers, noise
        self._rng = np.random.default_rng(seed)
        measured: list[Measured] = []
        for size in SIZES if tiers is not None else (1, 8, 64, 256):
            counts = (NUM_DRAFTS,) if tiers is None else tiers[size]
            rounds = (Round(size, 0, False), *(Round(size, count, True) for count in (0, *counts)))
            measured += [Measured(round_, CONTEXT, seconds(round_) * misjudged(round_)) for round_ in rounds]
        self.planner = Planner(RoundCosts(measured, NUM_DRAFTS, tiers), Survival(SIZES[-1], NUM_DRAFTS))
        self._drafted = False

    def true_seconds(self, round_: Round) -> float:
        """What a round costs in this world, padded to its tier."""
        if self._tiers is None:
            return self._seconds(round_)
        size = next(size for size in self._tiers if size >= round_.num_seqs)
        if round_.num_drafts == 0:
            return self._seconds(Round(size, 0, round_.propose))
        count = next(count for count in self._tiers[size] if count >= round_.num_drafts)
        return self._seconds(Round(size, count, True))

    def best(self, num_seqs: int, accept_length: float) -> float:
        """Tokens per second of plain decoding or of always drafting, whichever is more."""
        plain = num_seqs / self.true_seconds(Round(num_seqs, 0, False))
        return max(plain, num_seqs * accept_length / self.true_seconds(Round(num_seqs, NUM_DRAFTS, True)))

    def run(self, num_seqs: int, accept_length: float, num_rounds: int, slowdown: float = 1.0) -> float:
        """Expected tokens per second over ``num_rounds``, what each round committed being its mean."""
        chance, slots = chance_for(accept_length), list(range(num_seqs))
        means = np.cumsum([1.0, *(chance ** np.arange(1, NUM_DRAFTS + 1))])
        seconds = tokens = 0.0
        for _ in range(num_rounds):
            available = [NUM_DRAFTS * self._drafted] * num_seqs
            decision = self.planner.decide(Batch(slots, available, [True] * num_seqs, CONTEXT, 10**6))
            verified = _verified(decision, slots, available)
            stood = np.cumprod(self._rng.random((num_seqs, NUM_DRAFTS)) < chance, axis=1).sum(1)
            self.planner.committed(decision, slots, verified, np.minimum(stood, verified).tolist())
            round_ = Round(num_seqs, min(decision.depth, available[0]), decision.propose)
            took = slowdown * self.true_seconds(round_)
            self.planner.costs.observe(round_, CONTEXT, took * self._rng.normal(1.0, self._noise))
            self._drafted = decision.propose
            seconds += took
            tokens += float(means[verified].sum())
        return tokens / seconds

    def serve(
        self,
        accept_lengths: Sequence[float],
        num_tokens: int,
        num_batches: int,
        decide: Callable[[Batch], Decision] | None = None,
    ) -> float:
        """Tokens per second of closed batches: all sequences of one start together, and the next begins when
        the last of them has ended.

        Args:
            accept_lengths: of each sequence of a batch, in turn: the order changes from batch to batch.
            num_tokens: of each sequence.
            decide: instead of the planner.
        """
        num_seqs, total, seconds = len(accept_lengths), 0, 0.0
        slots, texts = list(range(num_seqs)), np.random.default_rng(num_batches)
        for _ in range(num_batches):
            for slot in slots:
                self.planner.survival.reset(slot)
            chances = np.array([chance_for(a) for a in texts.permutation(accept_lengths)])
            right = (
                texts.random((num_seqs, num_tokens)) < chances[:, None]
            )  # whether a draft there would stand
            left = [num_tokens - 1] * num_seqs  # prefill draws the first
            nobody = Batch([], [], [], 0.0, 10**6, coming=[num_tokens] * num_seqs, refilled=False)
            drafted = (decide or self.planner.decide)(nobody).propose
            seconds += self.true_seconds(Round(num_seqs, 0, drafted))
            drafts = [NUM_DRAFTS * drafted] * num_seqs
            while any(left):
                alive = [slot for slot in slots if left[slot]]
                available = [min(drafts[slot], left[slot] - 1) for slot in alive]
                batch = Batch(
                    alive,
                    available,
                    [True] * len(alive),
                    CONTEXT,
                    10**6,
                    left=[left[slot] for slot in alive],
                    refilled=False,
                )
                decision = (decide or self.planner.decide)(batch)
                verified = _verified(decision, alive, available)
                accepted = [
                    int(np.cumprod(right[slot, num_tokens - left[slot] :][:count]).sum())
                    for slot, count in zip(alive, verified, strict=True)
                ]
                propose = [decision.propose and left[slot] - 1 >= 2 for slot in alive]
                round_ = Round(len(alive), min(decision.depth, max(verified)), any(propose))
                took = self.true_seconds(round_)
                if decide is None:
                    self.planner.committed(decision, alive, verified, accepted)
                    self.planner.costs.observe(round_, CONTEXT, took * self._rng.normal(1.0, self._noise))
                seconds += took
                for i, slot in enumerate(alive):
                    total += min(accepted[i] + 1, left[slot])
                    left[slot] -= min(accepted[i] + 1, left[slot])
                    drafts[slot] = NUM_DRAFTS * propose[i]
            total += num_seqs
        return total / seconds


def _verified(decision: Decision, slots: Sequence[int], available: Sequence[int]) -> list[int]:
    """Drafts of each sequence that get rows."""
    return [min(decision.limit(slot), count) for slot, count in zip(slots, available, strict=True)]


def plain(batch: Batch) -> Decision:
    """Never drafts."""
    return Decision(0, None, False, "plain is faster")


def fixed(batch: Batch) -> Decision:
    """Always drafts."""
    return EVERYTHING
