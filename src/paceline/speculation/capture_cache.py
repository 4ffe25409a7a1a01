"""Which slot of the capture store holds the tap rows of which full block. Pure logic.

A *capture* is one block of the target's tap rows, keyed by the block's lineage hash. Its slot goes through
two states: *open* while a sequence still writes its rows, *published* once all of them stand.

Three facts hold between calls, and `CaptureCache.check` proves them:

* *Heads before tails.* A published capture's parent is published. So what is published of a lineage is always
  its head, which is the part that can be restored.
* *Children first.* Only captures without published children are evicted, the least recently used first. A
  prefix longer than the store keeps its head and never evicts itself.
* *Within the budget.* At most ``num_slots`` captures are published, however many slots are open.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.errors import InvariantError

SINK = 0
"""The slot of rows that nobody keeps: it is written and never read."""


@dataclass(slots=True)
class _Entry:
    slot: int
    parent: bytes | None
    used: int
    children: int = 0


class CaptureCache:
    """Least-recently-used cache of captures under a fixed number of slots.

    Every operation is O(log entries) per block it concerns.

    Args:
        num_slots: most captures published at once.
        num_open: slots beside them, so that sequences which fill a block need not evict a capture first.

    Attributes:
        num_publishes: captures published since the start.
        num_evictions: captures evicted since the start.
    """

    def __init__(self, num_slots: int, num_open: int) -> None:
        self.num_slots = num_slots
        self.num_open = num_open if num_slots else 0
        self.num_publishes = 0
        self.num_evictions = 0
        self._free = list(range(1, self.num_physical))[::-1]
        self._open: set[int] = set()
        self._entries: dict[bytes, _Entry] = {}
        self._leaves: list[tuple[int, bytes]] = []  # heap; an item is stale unless it is its leaf's last use
        self._tick = 0

    @property
    def num_physical(self) -> int:
        """Slots the store must have, the sink included; 0 when nothing is ever captured."""
        return self.num_slots + self.num_open + 1 if self.num_slots else 0

    @property
    def num_published(self) -> int:
        """Captures that can be restored."""
        return len(self._entries)

    @property
    def num_in_progress(self) -> int:
        """Open slots: sequences still write their rows."""
        return len(self._open)

    def head(self, hashes: Sequence[bytes]) -> list[int]:
        """Slots of the longest published head of a lineage. Changes nothing."""
        slots = []
        for hash_ in hashes:
            entry = self._entries.get(hash_)
            if entry is None:
                break
            slots.append(entry.slot)
        return slots

    def touch(self, hash_: bytes) -> None:
        """Note that a lineage was used up to this published capture.

        Its ancestors need no mark: they outlive it anyway.
        """
        self._tick += 1
        entry = self._entries[hash_]
        entry.used = self._tick
        if entry.children == 0:
            self._push_leaf(hash_, entry)

    def take(self, keep: bytes | None) -> int | None:
        """An open slot to write rows into, evicting a capture if need be; None when there is none to be had.

        Args:
            keep: newest published capture of the asking sequence; neither it nor its ancestors are evicted.
        """
        if not self._free and not self._evict(keep):
            return None
        slot = self._free.pop()
        self._open.add(slot)
        return slot

    def give_back(self, slots: Iterable[int]) -> None:
        """Return open slots whose rows nobody will publish."""
        for slot in slots:
            if slot not in self._open:
                raise InvariantError(f"capture slot {slot} was given back but is not open")
            self._open.remove(slot)
            self._free.append(slot)

    def publish(self, hash_: bytes, parent: bytes | None, slot: int) -> bool:
        """Make an open slot, all of whose rows stand, the capture of ``hash_``.

        Args:
            hash_: lineage hash of the block.
            parent: that of the block before it; None for the first block.
            slot: consumed whatever comes of it.

        Returns:
            Whether ``hash_`` is published now, by this slot or by an earlier one. False when its parent is
            not, or when only the lineage itself could be evicted to make room.
        """
        if hash_ in self._entries:
            self.give_back((slot,))
            self.touch(hash_)
            return True
        orphan = parent is not None and parent not in self._entries
        if orphan or (len(self._entries) >= self.num_slots and not self._evict(parent)):
            self.give_back((slot,))
            return False
        self._open.remove(slot)
        self.num_publishes += 1
        self._tick += 1
        entry = self._entries[hash_] = _Entry(slot, parent, self._tick)
        self._push_leaf(hash_, entry)
        if parent is not None:
            self._entries[parent].children += 1
        return True

    def reset(self) -> None:
        """Forget all captures, say after new weights were loaded. Open slots stay open."""
        self._free.extend(entry.slot for entry in self._entries.values())
        self._entries.clear()
        self._leaves.clear()

    # ---- inside ----

    def _push_leaf(self, hash_: bytes, entry: _Entry) -> None:
        heapq.heappush(self._leaves, (entry.used, hash_))
        if len(self._leaves) > 4 * self.num_slots + 16:
            self._leaves = [(e.used, h) for h, e in self._entries.items() if e.children == 0]
            heapq.heapify(self._leaves)

    def _evict(self, keep: bytes | None) -> bool:
        """Free the slot of the least recently used capture that has no children and is not ``keep``."""
        spared: tuple[int, bytes] | None = None
        while self._leaves:
            used, hash_ = heapq.heappop(self._leaves)
            entry = self._entries.get(hash_)
            if entry is None or entry.children or entry.used != used:
                continue
            if hash_ == keep:
                spared = (used, hash_)
                continue
            self._remove(hash_, entry)
            break
        else:
            entry = None
        if spared is not None:
            heapq.heappush(self._leaves, spared)
        return entry is not None

    def _remove(self, hash_: bytes, entry: _Entry) -> None:
        del self._entries[hash_]
        self._free.append(entry.slot)
        self.num_evictions += 1
        if entry.parent is None:
            return
        parent = self._entries[entry.parent]
        parent.children -= 1
        if parent.children == 0:
            self._push_leaf(entry.parent, parent)

    def check(self) -> None:
        """Prove the invariants from scratch.

        Raises:
            InvariantError: naming the first that does not hold.
        """
        published = [entry.slot for entry in self._entries.values()]
        slots = sorted([*self._free, *self._open, *published])
        if slots != list(range(1, self.num_physical)):
            raise InvariantError(f"capture slots are not a partition: {slots}")
        if len(published) > self.num_slots:
            raise InvariantError(f"{len(published)} captures are published in {self.num_slots} slots")
        children: dict[bytes, int] = dict.fromkeys(self._entries, 0)
        for hash_, entry in self._entries.items():
            if entry.parent is not None:
                if entry.parent not in children:
                    raise InvariantError(f"capture {hash_.hex()} is published but its parent is not")
                children[entry.parent] += 1
        leaves = set(self._leaves)
        for hash_, entry in self._entries.items():
            if entry.children != children[hash_]:
                raise InvariantError(f"capture {hash_.hex()} counts {entry.children} children")
            if not entry.children and (entry.used, hash_) not in leaves:
                raise InvariantError(f"capture {hash_.hex()} could never be evicted")
