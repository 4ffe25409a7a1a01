"""What the drafter knows of the past: two strategies behind one interface. Pure logic.

The scheduler asks the strategy at four moments of a sequence's stay in a slot: before admission (how much of
a cached prefix to take, and whether the sequence can draft), when rows are reserved, when rows stand, and
when it leaves, however it leaves. The strategy answers with table updates and copies for the step plan.

* *paged*: the drafter's K/V lie under the target's block ids. Blocks carry their draft state through sharing,
  reuse and eviction, so there is nothing to decide.
* *capture*: each drafting sequence has draft K/V of its own, charged to a reserve; the tap rows of full
  blocks are kept in a cache, so that a later prefix hit can rebuild them. See decision 002.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.errors import InvariantError
from paceline.runtime.plan import DraftUpdates, Restore, TableUpdate
from paceline.speculation.capture_cache import SINK, CaptureCache
from paceline.speculation.counters import SpeculationCounters
from paceline.speculation.draft_reserve import DraftReserve, max_cache_len

logger = logging.getLogger(__name__)

ROWS_PER_TOKEN = 8
"""Prefill rows that drafting is worth per output token. A decode step costs as much as some hundred prefill
rows at batch 1 and a few in a full batch; a drafter saves about half a step per token."""
EXPECTED_TOKENS = 512
"""Output tokens counted on at most: max_tokens is a limit, not a forecast."""
MIN_OUTPUT = 3
"""Output tokens from which a draft can stand: the prefill draws the first, a round commits two more."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence that asks for admission.

    Attributes:
        hashes: lineage hashes of its matched blocks, as far as they are known.
        num_matched: leading full blocks whose target K/V it could share.
        prompt_len: tokens of its prompt.
        max_tokens: most output tokens.
        tokens_left: most output tokens still to come.
    """

    hashes: Sequence[bytes]
    num_matched: int
    prompt_len: int
    max_tokens: int
    tokens_left: int


@dataclass(frozen=True, slots=True)
class Offer:
    """How a candidate may be admitted.

    Attributes:
        num_blocks: matched blocks to share; the rows of the others are forwarded again.
        drafts: whether it can draft.
        candidate: whom it was made to.
        restorable: capture slots of the shared blocks' head.
        refusal: why it cannot draft though it would profit; None otherwise.
    """

    num_blocks: int
    drafts: bool
    candidate: Candidate
    restorable: Sequence[int] = ()
    refusal: str | None = None


class DraftState(Protocol):
    """Keeps what the drafter needs of the past.

    Attributes:
        counters: what speculation did; the scheduler counts in them too.
    """

    counters: SpeculationCounters

    def offer(self, candidate: Candidate) -> Offer:
        """Decide about an admission. Changes nothing and counts nothing."""

    def admit(self, slot: int, offer: Offer, updates: DraftUpdates) -> None:
        """Carry out an offer made just before for the sequence that takes ``slot``."""

    def cover(self, slot: int, num_rows: int, updates: DraftUpdates) -> None:
        """Rows of ``slot`` up to position ``num_rows`` may be written by the step being planned."""

    def commit(self, slot: int, computed: int, hashes: Sequence[bytes]) -> None:
        """``computed`` rows of ``slot`` stand; ``hashes`` are its full blocks', if they are cached at all."""

    def release(self, slot: int) -> None:
        """The sequence in ``slot`` leaves it: finished, aborted or preempted."""

    def reset(self) -> None:
        """Forget what is kept for sequences to come. Only while none is running."""

    def check(self) -> None:
        """Raise InvariantError unless what is held agrees with itself."""


class PagedDraftState:
    """The target's blocks carry the draft state: every admission can draft, and there is nothing to keep.

    Args:
        counters: see :class:`DraftState`.
    """

    def __init__(self, counters: SpeculationCounters) -> None:
        self.counters = counters

    def offer(self, candidate: Candidate) -> Offer:
        """See :class:`DraftState`."""
        return Offer(candidate.num_matched, True, candidate)

    def admit(self, slot: int, offer: Offer, updates: DraftUpdates) -> None:
        """See :class:`DraftState`."""

    def cover(self, slot: int, num_rows: int, updates: DraftUpdates) -> None:
        """See :class:`DraftState`."""

    def commit(self, slot: int, computed: int, hashes: Sequence[bytes]) -> None:
        """See :class:`DraftState`."""

    def release(self, slot: int) -> None:
        """See :class:`DraftState`."""

    def reset(self) -> None:
        """See :class:`DraftState`."""

    def check(self) -> None:
        """See :class:`DraftState`."""


def plan_restore(num_matched: int, num_restorable: int, block_size: int, tokens_left: int) -> int | None:
    """How many matched blocks to share so that the sequence can draft: the joint cap.

    The drafter must know every past position, so a block whose draft state is gone is of use to the target
    only. Either the hit is shortened to what can be restored and the rest is forwarded again, which also
    captures it again for those who come after; or the whole hit is kept and the sequence decodes plainly.

    Args:
        num_matched: leading blocks with target K/V.
        num_restorable: leading blocks of those with captured tap rows.
        block_size: tokens per block.
        tokens_left: most output tokens still to come.

    Returns:
        Blocks to share; None to share all of them without drafting.
    """
    rows = (num_matched - num_restorable) * block_size
    return num_restorable if rows <= ROWS_PER_TOKEN * min(tokens_left, EXPECTED_TOKENS) else None


@dataclass(slots=True)
class _Seat:
    """What a running sequence holds.

    Attributes:
        draft_blocks: its draft K/V, charged to the reserve; empty when it does not draft.
        num_kept: leading blocks that are captured and published.
        open: capture slots of the blocks behind them, in order.
        end: blocks from here on are not captured.
        cut: first block and number of blocks whose open slots were given back, to be told to the device.
        last: hash of the last published block.
    """

    draft_blocks: list[int]
    num_kept: int
    end: int
    last: bytes | None
    open: deque[int] = field(default_factory=deque)
    cut: tuple[int, int] | None = None


class CaptureDraftState:
    """Draft K/V per sequence, tap rows of full blocks in a cache.

    Args:
        reserve: draft K/V blocks.
        captures: the cache of tap rows.
        draft_block: positions a drafter's block touches from the anchor on.
        max_positions: most positions the drafter can hold.
        counters: where hits, misses and publishes are counted.
    """

    def __init__(
        self,
        reserve: DraftReserve,
        captures: CaptureCache,
        *,
        draft_block: int,
        max_positions: int,
        counters: SpeculationCounters,
    ) -> None:
        self.reserve = reserve
        self.captures = captures
        self._draft_block = draft_block
        self._max_positions = max_positions
        self.counters = counters
        self._seats: dict[int, _Seat] = {}

    def offer(self, candidate: Candidate) -> Offer:
        """See :class:`DraftState`."""
        slots = self.captures.head(candidate.hashes[: candidate.num_matched])
        matched, left = candidate.num_matched, candidate.tokens_left
        if left < MIN_OUTPUT:
            return Offer(matched, False, candidate, slots)
        if not self.reserve.fits(self._positions(candidate)):
            return Offer(matched, False, candidate, slots, "draft_reserve")
        blocks = plan_restore(matched, len(slots), self.reserve.block_size, left)
        if blocks is None:
            return Offer(matched, False, candidate, slots, "capture_miss")
        return Offer(blocks, True, candidate, slots)

    def _positions(self, candidate: Candidate) -> int:
        return max_cache_len(
            candidate.prompt_len, candidate.max_tokens, self._draft_block, self._max_positions
        )

    def admit(self, slot: int, offer: Offer, updates: DraftUpdates) -> None:
        """See :class:`DraftState`."""
        if slot in self._seats:
            raise InvariantError(f"slot {slot} has draft state of an earlier sequence")
        candidate, kept = offer.candidate, len(offer.restorable)
        whole = kept >= offer.num_blocks
        last = candidate.hashes[kept - 1] if kept else None
        # Without the captures of its head a sequence has nothing to hang later ones on.
        end = self.captures.num_slots if whole else 0
        seat = self._seats[slot] = _Seat([], kept, end, last)
        updates.resets.append(slot)
        if last is not None:
            self.captures.touch(last)
        if offer.refusal is not None:
            self.counters.refused[offer.refusal] += 1
        if offer.refusal == "capture_miss":
            self.counters.draft_state["misses"] += 1
        if offer.drafts:
            seat.draft_blocks = self.reserve.charge(self._positions(candidate))
            updates.draft_tables.append(TableUpdate(slot, 0, seat.draft_blocks))
            self._restore(slot, offer, seat, updates)

    def _restore(self, slot: int, offer: Offer, seat: _Seat, updates: DraftUpdates) -> None:
        counters, matched = self.counters.draft_state, offer.candidate.num_matched
        if len(offer.restorable) != offer.num_blocks:
            raise InvariantError(
                f"{offer.num_blocks} blocks are shared, {len(offer.restorable)} of them can be restored"
            )
        if not matched:
            return
        block_size = self.reserve.block_size
        counters["hits" if offer.num_blocks == matched else "misses"] += 1
        counters["restored_tokens"] += offer.num_blocks * block_size
        counters["reforwarded_tokens"] += (matched - offer.num_blocks) * block_size
        if offer.num_blocks:
            updates.restores.append(
                Restore(slot, list(offer.restorable), seat.draft_blocks[: offer.num_blocks])
            )

    def cover(self, slot: int, num_rows: int, updates: DraftUpdates) -> None:
        """See :class:`DraftState`."""
        seat = self._seats[slot]
        if seat.cut is not None:
            first, count = seat.cut
            updates.capture_tables.append(TableUpdate(slot, first, [SINK] * count))
            seat.cut = None
        first = seat.num_kept + len(seat.open)
        stop = min(-(-num_rows // self.reserve.block_size), seat.end)
        new: list[int] = []
        while first + len(new) < stop:
            taken = self.captures.take(seat.last)
            if taken is None:
                seat.end = first + len(new)
                break
            new.append(taken)
        if new:
            seat.open.extend(new)
            updates.capture_tables.append(TableUpdate(slot, first, new))

    def commit(self, slot: int, computed: int, hashes: Sequence[bytes]) -> None:
        """See :class:`DraftState`."""
        seat = self._seats[slot]
        full = computed // self.reserve.block_size
        before = seat.num_kept
        while seat.open and seat.num_kept < full:
            hash_ = hashes[seat.num_kept]
            if not self.captures.publish(hash_, seat.last, seat.open.popleft()):
                self._stop_capturing(seat)
                break
            seat.last = hash_
            seat.num_kept += 1
        if seat.num_kept > before:
            self._note_publish(slot, computed, seat, before)

    def _stop_capturing(self, seat: _Seat) -> None:
        """The block after the kept ones could not be published, so no later one can be."""
        if seat.open:
            # The device still writes rows into these; it must be told before anyone else gets them.
            seat.cut = (seat.num_kept + 1, len(seat.open))
            self.captures.give_back(seat.open)
            seat.open.clear()
        seat.end = 0

    def _note_publish(self, slot: int, computed: int, seat: _Seat, before: int) -> None:
        counters = self.counters.draft_state
        counters["publishes"] = self.captures.num_publishes
        counters["evictions"] = self.captures.num_evictions
        logger.debug(
            "Captured slot %d: blocks %d..%d of %d full, %d open; %d of %d slots published, %d evictions",
            slot,
            before,
            seat.num_kept - 1,
            computed // self.reserve.block_size,
            len(seat.open),
            self.captures.num_published,
            self.captures.num_slots,
            self.captures.num_evictions,
        )

    def release(self, slot: int) -> None:
        """See :class:`DraftState`."""
        seat = self._seats.pop(slot)
        self.captures.give_back(seat.open)
        self.reserve.refund(seat.draft_blocks)

    def reset(self) -> None:
        """See :class:`DraftState`."""
        self.captures.reset()

    def check(self) -> None:
        """See :class:`DraftState`."""
        self.reserve.check()
        self.captures.check()
        charged = sum(len(seat.draft_blocks) for seat in self._seats.values())
        if charged != self.reserve.num_blocks - self.reserve.num_free:
            raise InvariantError(f"running sequences hold {charged} draft blocks; the reserve disagrees")
        slots = sum(len(seat.open) for seat in self._seats.values())
        if slots != self.captures.num_in_progress:
            raise InvariantError(f"running sequences hold {slots} open captures; the cache disagrees")
