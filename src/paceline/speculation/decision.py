"""What the verify planner is asked and what it answers: plain data."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Reason = Literal["all", "drafts pay", "plain is faster", "exploring"]


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences a round decodes, aligned, and the work beside them.

    Attributes:
        slots: who they are.
        available: drafts in place for each.
        can_draft: whether its draft state is there.
        context: tokens whose keys a round reads, on average of a sequence.
        row_limit: drafts the step has rows for, over all sequences.
        left: most tokens each may still commit.
        coming: the same of sequences that are about to decode beside them.
        refilled: whether whoever ends is replaced, because others wait or come; ``left`` and ``coming`` do
            not count then.
        hedged: sequences that may have hedge chains beside all their drafts, in rows nobody else needs.
        chains: chains of each of them.
    """

    slots: Sequence[int]
    available: Sequence[int]
    can_draft: Sequence[bool]
    context: float
    row_limit: int
    left: Sequence[int] = ()
    coming: Sequence[int] = ()
    refilled: bool = True
    hedged: int = 0
    chains: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """What a step does about drafts.

    Attributes:
        depth: drafts of a sequence, on average, that there are rows for; whose drafts these verify is for the
            device to choose among what each may verify.
        drafts: most drafts verified by slot; None for all that are in place.
        propose: whether the next block is drafted.
        reason: why.
        expected: tokens the round should commit.
        baseline: of these, those an exploring round was not paid to find out about.
        worth: tokens that a second is worth, where a trial must pay for itself.
        context: of the sequences, as in :class:`Batch`.
        hedge: whether hedge chains may run; which do is chosen elsewhere.
    """

    depth: int
    drafts: Mapping[int, int] | None
    propose: bool
    reason: Reason
    expected: float = 0.0
    baseline: float = 0.0
    worth: float = 1.0
    context: float = 0.0
    hedge: bool = True

    def limit(self, slot: int) -> int:
        """Most drafts ``slot`` may verify."""
        if self.drafts is None:
            return sys.maxsize if self.depth else 0
        return self.drafts.get(slot, 0)


EVERYTHING = Decision(sys.maxsize, None, True, "all")
"""Without a planner: all drafts are verified, and the next block is always drafted."""
