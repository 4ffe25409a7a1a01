"""Which sequences of a round get hedge chains, and how many. Pure logic.

A chain is a bet on one draft that may not stand (``runtime/hedging.py``). It costs rows in a round that runs
anyway, so the rule is short: the most important sequences that could gain, as many as may be hedged, and only
in rows that nobody else needs. A sequence keeps its place from round to round: the chains made for it in one
are verified in the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from paceline.speculation.controller import HedgeController

DEFAULT_POSITIONS = (0, 1, 2)
"""Drafts that are hedged unless the options name others."""


@dataclass(frozen=True, slots=True)
class HedgeLimits:
    """What the device was prepared for.

    Attributes:
        max_seqs: sequences of a round that may have chains.
        positions: drafts that a sequence's chains replace, ascending, all below ``num_drafts``; with fewer
            chains than positions the first ones.
        num_drafts: drafts of a sequence and round.
        counts: numbers of chains that may be asked for, ascending.
    """

    max_seqs: int
    positions: tuple[int, ...]
    num_drafts: int
    counts: tuple[int, ...]

    @property
    def width(self) -> int:
        """Rows of a chain."""
        return self.num_drafts - self.positions[0]

    @property
    def max_rows(self) -> int:
        """Rows of all chains of a round."""
        return self.rows(self.max_seqs, len(self.positions))

    def rows(self, num_seqs: int, chains: int) -> int:
        """Rows of the chains in a round of so many sequences."""
        return min(num_seqs, self.max_seqs) * chains * self.width


class HedgeCandidate(NamedTuple):
    """A sequence that decodes in a round.

    Attributes:
        order: importance; smaller is served first. No two are equal.
        slot: who it is.
        budget: most tokens it may still commit, this round's included.
    """

    order: tuple[int, int, int]
    slot: int
    budget: int


class Hedger:
    """Chooses, and counts what came of it.

    Args:
        limits: what the device was prepared for.
        controller: how many chains pay; None for one at each position, always.

    Attributes:
        num_rounds: rounds in which chains were verified.
        num_chains: chains verified.
        num_wins, num_losses: hedged spans in which a chain won, or none did.
        num_tokens: tokens committed because a chain won, after truncation.
    """

    def __init__(self, limits: HedgeLimits, controller: HedgeController | None = None) -> None:
        self.limits = limits
        self.controller = controller
        self.num_rounds = self.num_chains = self.num_wins = self.num_losses = self.num_tokens = 0

    @property
    def chains(self) -> int:
        """Chains each hedged sequence is to have in the next round."""
        return len(self.limits.positions) if self.controller is None else self.controller.chains

    def eligible(self, budget: int) -> bool:
        """Whether the first chain of a sequence could commit a token more."""
        limits = self.limits
        return budget >= 2 and limits.positions[0] < min(limits.num_drafts, budget - 1)

    def choose(self, candidates: Iterable[HedgeCandidate], spare_rows: int) -> list[int]:
        """Slots to hedge in a round: a function of the set of candidates, never of their order.

        Args:
            candidates: sequences that decode in it.
            spare_rows: rows of the step that nothing else uses.
        """
        wanting = sorted(item for item in candidates if self.eligible(item.budget))
        return [item.slot for item in wanting][: self.places(spare_rows)]

    def places(self, spare_rows: int) -> int:
        """Sequences that may be hedged in so many rows."""
        if not self.chains:
            return 0
        return max(0, min(self.limits.max_seqs, spare_rows // (self.chains * self.limits.width)))

    def verified(self, spans: Iterable[tuple[int, int]]) -> None:
        """Count a round.

        Args:
            spans: of each span with chains how many it had, and how many tokens it committed because of one.
        """
        found = list(spans)
        self.num_rounds += bool(found)
        self.num_chains += sum(chains for chains, _ in found)
        self.num_wins += sum(tokens > 0 for _, tokens in found)
        self.num_losses += sum(tokens == 0 for _, tokens in found)
        self.num_tokens += sum(tokens for _, tokens in found)
