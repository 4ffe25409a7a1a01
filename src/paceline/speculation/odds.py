"""What hedge chains bring, learnt from drafts that fell. Pure logic.

A chain at position p gains something only where the drafts before p stand and draft p falls; how many tokens
it commits then, none included, is averaged for each position, over counts that fade.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MEMORY = 256
"""Falls at a position after which older ones weigh 1/e."""
PRIOR_GAIN = 1.5
PRIOR_FALLS = 8
"""Tokens a chain is believed to commit at a fall before any was seen, and for how many falls that counts: it
is worth a try."""


class ChainOdds:
    """Tokens that chains commit.

    Args:
        positions: drafts that a sequence's chains replace, ascending.
    """

    def __init__(self, positions: Sequence[int]) -> None:
        self._positions = {position: i for i, position in enumerate(positions)}
        self._falls = np.full(len(positions), float(PRIOR_FALLS))
        self._tokens = self._falls * PRIOR_GAIN

    def observe(
        self, stood: Sequence[int], drafts: Sequence[int], chains: Sequence[int], won: Sequence[int]
    ) -> None:
        """Learn from one round.

        Args:
            stood: drafts of each span that stood, its chains left aside.
            drafts: drafts verified.
            chains: chains verified beside them.
            won: tokens committed because of one.
        """
        for place, count, num_chains, tokens in zip(stood, drafts, chains, won, strict=True):
            i = self._positions.get(place, num_chains)
            if i < num_chains and place < count:
                self._falls[i] += 1.0 - self._falls[i] / MEMORY
                self._tokens[i] += tokens - self._tokens[i] / MEMORY

    def gain(self, survival: NDArray[np.float64], chains: int) -> float:
        """Tokens that so many chains add to a round of one sequence.

        Args:
            survival: [g] chance that draft 1, 2, ... and all before it stand.
        """
        falls = -np.diff(survival, prepend=1.0)[list(self._positions)]
        return float((falls * self._tokens / self._falls)[:chains].sum())
