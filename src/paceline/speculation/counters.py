"""What speculation did, in numbers."""

from __future__ import annotations

from collections import Counter


class SpeculationCounters:
    """Totals since start.

    Attributes:
        num_drafts: verify spans, one per sequence and round.
        num_draft_tokens: drafts verified.
        num_accepted_tokens: drafts that became part of an output, after truncation.
        accepted_per_position: how often the draft at each position stood.
        accept_lengths: how many spans committed 1, 2, ... tokens, the bonus included if the text went on.
        refused: drafts that were not made though they would have paid, by reason: ``memory`` counts rounds
            (no room for the drafter's block), ``draft_reserve`` and ``capture_miss`` admissions.
        draft_state: what became of draft state kept apart from the target's blocks: ``hits`` and ``misses``
            (admissions with a prefix hit that could, or could not, be restored whole), ``restored_tokens``,
            ``reforwarded_tokens``, and ``publishes`` and ``evictions`` of captured blocks.
    """

    def __init__(self, num_positions: int) -> None:
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.accepted_per_position = [0] * num_positions
        self.accept_lengths = [0] * (num_positions + 1)
        self.refused: Counter[str] = Counter()
        self.draft_state: Counter[str] = Counter()

    def add(self, num_drafts: int, num_accepted: int, num_tokens: int) -> None:
        """Count one verify span: its drafts, those that stood, and the tokens it committed."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1
        self.accept_lengths[num_tokens - 1] += 1
