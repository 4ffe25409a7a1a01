"""The block pool: which blocks are free, who holds the others, and which of them can be matched.

Three facts hold between calls, and `BlockPool.check` proves them:

* *Forwarded only.* A block is registered (matchable) only if every row in it was forwarded by the target over
  exactly the tokens of its lineage: ``block_size * (b + 1) <= computed`` for block b of the sequence that
  registered it. The dangling token of a sequence, bonus or not, never completes a block.
* *Held if anyone holds it.* Two sequences that computed the same tokens side by side hold two blocks of one
  lineage. Only one of them is registered, and it is one in use as long as any of them is. Hence a registered
  block in use always has a registered parent in use.
* *Children first.* Free registered blocks wait in least-recently-used order, a child always ahead of its
  parent. So no block is ever evicted while a longer prefix through it could still be matched.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from paceline.cache.common import common_length
from paceline.cache.events import BlockEvent, BlockRemoved, BlockStored, CacheCleared
from paceline.cache.lineage import Lineage, LineageChain, LineageHasher, RecentChains
from paceline.errors import ConfigError, InvariantError

if TYPE_CHECKING:
    from paceline.cache.sequence import SequenceBlocks


class BlockPool:
    """Fixed set of ``num_blocks`` blocks of ``block_size`` tokens with a prefix index.

    Every operation is O(1) per block it concerns. Sequences use it through `SequenceBlocks`. Not thread-safe:
    it belongs to the engine loop.

    Args:
        num_blocks: blocks in the device's K/V tensors; ids are 0 to num_blocks - 1.
        block_size: tokens per block.
        enable_caching: False registers nothing; blocks are then shared by fork only.
        hash_key: 16 to 64 bytes, if several processes shall agree on hashes; None draws a per-process secret.
        on_event: called for every change of the set of matchable blocks, after it was made. It must not call
            back into the pool.

    Raises:
        ConfigError: a size below 1, or a hash key of a wrong length.

    Attributes:
        num_queried_tokens: tokens that ``match`` was asked about since the start.
        num_hit_tokens: those it found cached.
        version: changes whenever another set of blocks can be matched.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_caching: bool = True,
        hash_key: bytes | None = None,
        on_event: Callable[[BlockEvent], None] | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"a block pool needs at least one block of at least one token, got {num_blocks} blocks of "
                f"{block_size} tokens. Raise the memory given to the KV cache."
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.version = 0
        self.hasher = LineageHasher(block_size, hash_key)
        self._recent = RecentChains(block_size)
        self._on_event = on_event
        self._refs = [0] * num_blocks
        # What each block is known to hold: its lineage once full, registered or duplicate; None otherwise.
        self._lineages: list[Lineage | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}  # lineage hash -> the registered block
        self._duplicates: dict[bytes, dict[int, None]] = {}  # lineage hash -> other copies, all in use
        # Next to be handed out first: blocks without content, then registered ones, least recently used first
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._tables: set[SequenceBlocks] = set()  # every sequence that holds blocks; what `check` counts

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, whether or not they still hold cached content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that can be matched, in use or free."""
        return len(self._index)

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return 1.0 - len(self._free) / self.num_blocks

    def chain(self, salt: bytes = b"") -> LineageChain:
        """Root of a lineage, to hash a sequence's full blocks as it grows."""
        return LineageChain(self.hasher, self._recent, salt)

    def reset(self) -> bool:
        """Drop all cached content, say after new weights were loaded.

        False, and nothing done, while blocks are in use.
        """
        if len(self._free) != self.num_blocks:
            return False
        self._index.clear()
        self.version += 1
        self._lineages = [None] * self.num_blocks
        if self.enable_caching and self._on_event is not None:
            self._on_event(CacheCleared())
        return True

    # ---- for SequenceBlocks ----

    def attach(self, table: SequenceBlocks) -> None:
        """Count ``table`` among the holders of blocks."""
        self._tables.add(table)

    def detach(self, table: SequenceBlocks) -> None:
        """Forget a holder that gave everything back."""
        self._tables.discard(table)

    def find(self, chain: LineageChain, tokens: Sequence[int]) -> list[int]:
        """Ids of the longest registered prefix of ``tokens``, leaving at least one token to forward."""
        found: list[int] = []
        limit = (len(tokens) - 1) // self.block_size if self.enable_caching else 0
        while len(found) < limit:
            start = len(found)
            # Hash about as far as there are hits, not the whole prompt.
            chain.extend(tokens, min(start + max(1, start), limit))
            lineages = chain.lineages[start:limit]
            blocks = [b for b in map(self._index.get, chain.hashes[start:limit]) if b is not None]
            held = list(map(self._lineages.__getitem__, blocks))
            # 128 keyed bits collide neither by chance nor on purpose, but comparing the tokens is cheaper
            # than having to believe that.
            agree = len(held) if held == lineages else common_length(held, lineages)
            found += blocks[:agree]
            if agree < len(lineages):
                break
        return found

    def is_registered(self, hash_: bytes) -> bool:
        """Whether a block of this lineage can be matched."""
        return hash_ in self._index

    def count_free(self, ids: Sequence[int]) -> int:
        """How many blocks of a registered prefix nobody holds: those behind the ones in use."""
        return len(ids) - bisect_left(ids, True, key=lambda block: self._refs[block] == 0)

    def share(self, ids: Sequence[int]) -> None:
        """Add one holder to each block; one that was free keeps its content and leaves the LRU."""
        refs = self._refs
        for block in ids[len(ids) - self.count_free(ids) :]:
            del self._free[block]
        for block in ids:
            refs[block] += 1

    def take(self, count: int) -> list[int] | None:
        """``count`` blocks to write into, evicting cached content as needed.

        None, and nothing done, if there are too few.
        """
        if count > len(self._free):
            return None
        taken = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            lineage = self._lineages[block]
            if lineage is not None:
                del self._index[lineage.hash]
                self.version += 1
                self._lineages[block] = None
                if self._on_event is not None:
                    self._on_event(BlockRemoved(lineage.hash, block))
            self._refs[block] = 1
            taken.append(block)
        return taken

    def give_back(self, ids: Sequence[int]) -> None:
        """Remove one holder from each block of a table or of its tail, given in table order.

        The last goes first: children come to lie before their parents in the LRU order, and blocks without
        content are handed out again in the order they had.
        """
        refs = self._refs
        for block in reversed(ids):
            left = refs[block] - 1
            if left < 0:
                raise InvariantError(f"block {block} was given back but nobody holds it")
            refs[block] = left
            if left == 0:
                self._free[block] = None
                if not self._keeps_content(block):
                    self._lineages[block] = None
                    self._free.move_to_end(block, last=False)

    def check_writable(self, ids: Sequence[int]) -> None:
        """Raise InvariantError unless each block is held once and is not known to be full."""
        for block in ids:
            if self._refs[block] != 1 or self._lineages[block] is not None:
                raise InvariantError(
                    f"rows would be written into block {block}, which has {self._refs[block]} holders and is "
                    f"{'full' if self._lineages[block] is not None else 'not full'}; only a block with one "
                    "holder that is not full may be written"
                )

    def register(self, block: int, lineage: Lineage, computed: int) -> None:
        """Make ``block`` matchable as ``lineage``, by a sequence with ``computed`` rows forwarded.

        If another block in use holds the same lineage this one stays a duplicate. It is not swapped for the
        other: steps in flight read and write through the device's block table, where it is already listed.

        Raises:
            InvariantError: ``computed`` does not reach the block's last row, or the block is already known.
        """
        needed = self.block_size * (lineage.depth + 1)
        if needed > computed:
            raise InvariantError(
                f"block {lineage.depth} of a sequence would be registered with {computed} rows forwarded; "
                f"it is full at {needed}"
            )
        if self._refs[block] < 1 or self._lineages[block] is not None:
            raise InvariantError(f"block {block} is registered twice or while nobody holds it")
        other = self._index.get(lineage.hash)
        self._lineages[block] = lineage
        if other is not None and self._lineages[other] != lineage:
            raise InvariantError(f"two different blocks hash to {lineage.hash.hex()}")
        if other is not None and self._refs[other]:
            self._duplicates.setdefault(lineage.hash, {})[block] = None
            return
        if other is not None:
            # Nobody holds the old copy: it becomes a block without content, to be handed out next.
            self._lineages[other] = None
            self._free.move_to_end(other, last=False)
        self._publish(block, lineage)

    # ---- inside ----

    def _keeps_content(self, block: int) -> bool:
        """Whether a block that has just lost its last holder is to stay matchable."""
        lineage = self._lineages[block]
        if lineage is None:
            return False
        copies = self._duplicates.get(lineage.hash)
        if copies is None:
            return True
        if self._index[lineage.hash] == block:
            heir, _none = copies.popitem()
            self._publish(heir, lineage)  # somebody still holds it: that one is matched from now on
        else:
            del copies[block]
        if not copies:
            del self._duplicates[lineage.hash]
        return False

    def _publish(self, block: int, lineage: Lineage) -> None:
        self._index[lineage.hash] = block
        self.version += 1
        if self._on_event is not None:  # unpacking tokens is not free
            self._on_event(
                BlockStored(lineage.hash, lineage.parent, self.hasher.unpack(lineage.packed), block)
            )

    # ---- the invariant checker ----

    def check(self) -> None:
        """Prove the pool's invariants from scratch. O(blocks + table entries): for idle moments and tests.

        Raises:
            InvariantError: naming the first block or sequence that breaks one.
        """
        self._check_holders()
        self._check_tables()
        self._check_index()
        self._check_order()

    def _check_holders(self) -> None:
        holders = Counter(block for table in self._tables for block in table.ids)
        for block, refs in enumerate(self._refs):
            _require(
                refs == holders[block],
                f"block {block} counts {refs} holders, {holders[block]} tables list it",
            )
            _require(
                (refs == 0) == (block in self._free),
                f"block {block} with {refs} holders: free list disagrees",
            )
        _require(len(self._free) + len(holders) == self.num_blocks, "blocks were lost or invented")

    def _check_tables(self) -> None:
        for table in self._tables:
            _require(len(set(table.ids)) == len(table.ids), f"a table lists a block twice: {table.ids}")
            rows = table.computed + table.reserved
            covered = -(-rows // self.block_size)
            _require(
                len(table.ids) == covered, f"{rows} rows are covered by blocks {table.ids}, not {covered}"
            )
            num_full = table.computed // self.block_size
            for index, block in enumerate(table.ids):
                lineage = self._lineages[block]
                if index >= num_full or not self.enable_caching:
                    _require(
                        lineage is None, f"block {block} is matchable before all its rows were forwarded"
                    )
                    _require(
                        index < num_full or self._refs[block] == 1, f"unfinished block {block} is shared"
                    )
                else:
                    expected = table.chain.hashes[index]
                    _require(
                        lineage is not None and lineage.hash == expected, f"block {block} has a wrong lineage"
                    )

    def _check_index(self) -> None:
        for hash_, block in self._index.items():
            lineage = self._lineages[block]
            if lineage is None or lineage.hash != hash_:
                raise InvariantError(f"the index points to block {block}, which holds something else")
            _require(
                self.hasher.child(lineage.parent, lineage.packed) == hash_,
                f"block {block}: the hash is not that of its tokens",
            )
        for hash_, copies in self._duplicates.items():
            held = [*copies, self._index[hash_]]
            _require(len(set(held)) == len(held) > 1, f"the copies of a lineage are {held}")
            _require(all(self._refs[block] for block in held), f"a copy among {held} is free")
        known = sum(lineage is not None for lineage in self._lineages)
        copies_total = sum(map(len, self._duplicates.values()))
        _require(known == len(self._index) + copies_total, "a block knows its lineage but cannot be found")

    def _check_order(self) -> None:
        age = {block: position for position, block in enumerate(self._free)}
        content_seen = False
        for block in self._free:
            content_seen = content_seen or self._lineages[block] is not None
            _require(
                not content_seen or self._lineages[block] is not None,
                f"empty block {block} waits behind content",
            )
        for block in self._index.values():
            lineage = self._lineages[block]
            parent = None if lineage is None else self._index.get(lineage.parent)
            if lineage is None or lineage.depth == 0:
                continue
            if parent is None:
                raise InvariantError(f"block {block} can be matched, its parent was evicted")
            if block not in age:
                _require(parent not in age, f"block {block} is in use, its parent {parent} could be evicted")
            elif parent in age:
                _require(
                    age[block] < age[parent], f"block {parent} would be evicted before its child {block}"
                )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantError(message)
