"""One sequence's block table, and the transaction by which rows are added to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from paceline.cache.pool import BlockPool
from paceline.errors import InvariantError


class SequenceBlocks:
    """One sequence's block table: ``match`` or ``fork``, then ``reserve`` and ``commit``, then ``release``.

    Reservations may overlap: with one step in flight a sequence holds two. They are settled in the order they
    were made. A reservation's rows follow those of earlier ones that will stand, so its first row lands
    anywhere between ``computed`` and ``computed + reserved``; the blocks cover the upper bound.

    Wherever ``tokens`` is asked for, it is the sequence's token ids from its start: they may only grow.

    Args:
        pool: where the blocks come from.
        salt: separates lineages that must not share blocks: model, adapter, the request's ``cache_salt``.

    Attributes:
        ids: block ids in order. To be read only.
        computed: rows committed as forwarded by the target.
        reserved: rows in flight, not yet committed.
        chain: the lineage hashes of the full blocks, as far as they were needed.
    """

    def __init__(self, pool: BlockPool, *, salt: bytes = b"") -> None:
        self.ids: list[int] = []
        self.computed = 0
        self.reserved = 0
        self.chain = pool.chain(salt)
        self._pool = pool
        self._in_flight: deque[int] = deque()
        self._num_known = 0  # leading blocks that are shared, registered or known duplicates
        self._released = False
        self._found: tuple[tuple[int, int], list[int]] | None = None  # and when it was found

    def match_length(self, tokens: Sequence[int]) -> int:
        """Tokens ``match`` would find cached now. Takes nothing and counts nothing: for admission."""
        return len(self._find(tokens)) * self._pool.block_size

    def missing(self, tokens: Sequence[int]) -> bytes | None:
        """Identity of the first block that ``match`` would not find; None if it finds all it may."""
        found = len(self._find(tokens))
        hashed = self.chain.hashes[: (len(tokens) - 1) // self._pool.block_size]
        return hashed[found] if found < len(hashed) else None

    def coming(self, tokens: Sequence[int]) -> bytes | None:
        """Identity of the block this sequence will register next; None while its tokens are not known, or if
        another sequence has registered it before.
        """
        if not self._pool.enable_caching or len(tokens) < (self._num_known + 1) * self._pool.block_size:
            return None
        self.chain.extend(tokens, self._num_known + 1)
        block = self.chain.hashes[self._num_known]
        return None if self._pool.is_registered(block) else block

    def hash_prefix(self, tokens: Sequence[int]) -> None:
        """Hash all blocks that ``match`` may look up, ahead of it."""
        self.chain.extend(tokens, (len(tokens) - 1) // self._pool.block_size)

    def admission_cost(self, tokens: Sequence[int], rows: int, max_blocks: int | None = None) -> int:
        """Free blocks that ``match(tokens, max_blocks)`` and then ``reserve(rows)`` would take.

        Matched blocks that nobody holds are among them: taking one lowers ``num_free`` like any other.
        """
        found = self._find(tokens)[:max_blocks]
        return -(-rows // self._pool.block_size) + self._pool.count_free(found)

    def match(self, tokens: Sequence[int], max_blocks: int | None = None) -> int:
        """Take the longest cached prefix of full blocks, at most ``max_blocks`` of them if given, and return
        its length in tokens.

        At most ``(len(tokens) - 1) // block_size`` blocks, so that one row is left whose logits can be
        sampled. A request that needs every prompt row forwarded (prompt logprobs) just does not call this.

        Raises:
            InvariantError: the sequence already holds blocks, or was released.
        """
        self._require_empty("match")
        known = len(self.chain.hashes)
        found = self._find(tokens)[:max_blocks]
        self.chain.verify(tokens, 0, min(known, len(found)))  # those hashed when it was asked about before
        self._adopt(found)
        self._pool.num_queried_tokens += len(tokens) if self._pool.enable_caching else 0
        self._pool.num_hit_tokens += self.computed
        return self.computed

    def fork(self, parent: SequenceBlocks, num_tokens: int) -> int:
        """Share the blocks of ``parent`` that are full below ``num_tokens``; return how many tokens that is.

        Works with caching disabled too. For samples of one prompt pass its length minus one, so that a row is
        left to forward.

        Raises:
            InvariantError: this sequence already holds blocks, or the two differ in pool or salt.
        """
        self._require_empty("fork")
        if parent._pool is not self._pool or parent.chain.root != self.chain.root:
            raise InvariantError("a sequence can only be forked within its pool and under its salt")
        shared = min(num_tokens, parent.computed) // self._pool.block_size
        self.chain.inherit(parent.chain, shared)
        self._adopt(parent.ids[:shared])
        return self.computed

    def reserve(self, rows: int) -> list[int] | None:
        """Cover ``rows`` more rows.

        Returns:
            The ids appended to the table, maybe none; or None, with nothing changed, if the pool has too few.

        Raises:
            InvariantError: ``rows`` < 1, released, or a row could land in a full or shared block.
        """
        self._require_live("reserve")
        if rows < 1:
            raise InvariantError(f"a reservation needs at least one row, got {rows}")
        pool = self._pool
        # The rows before this one may all be rejected: `computed` is the first position it can write.
        pool.check_writable(self.ids[self.computed // pool.block_size :])
        needed = -(-(self.computed + self.reserved + rows) // pool.block_size) - len(self.ids)
        new = pool.take(needed) if needed else []
        if new is None:
            return None
        pool.attach(self)
        self.ids += new
        self._in_flight.append(rows)
        self.reserved += rows
        return new

    def commit(self, rows: int, n: int, tokens: Sequence[int]) -> None:
        """Settle the oldest reservation: the first ``n`` of its ``rows`` rows stand.

        Registers the blocks this fills and gives back the tail blocks that no row in flight can reach.

        Args:
            rows: what was reserved.
            n: rows forwarded over tokens that became part of the sequence, 0 to ``rows``. For a span: the
                anchor and the accepted drafts, not the bonus, whose row comes in a later step.
            tokens: the whole sequence, at least ``computed + n`` of it.

        Raises:
            InvariantError: not the oldest reservation, ``n`` out of range, or tokens too few or changed.
        """
        if not self._in_flight or self._in_flight[0] != rows:
            self._require_live("commit")
            raise InvariantError(
                f"commit of {rows} rows, but in flight, oldest first, are {list(self._in_flight)}"
            )
        if not 0 <= n <= rows:
            raise InvariantError(f"{n} of {rows} reserved rows cannot stand")
        if len(tokens) < self.computed + n:
            raise InvariantError(
                f"{self.computed} + {n} rows stand, but the sequence has only {len(tokens)} tokens: "
                "pass all of them, with what this step added"
            )
        self.computed += n
        num_full = self._num_full()
        if num_full > self._num_known and self._pool.enable_caching:
            self._register(num_full, tokens)
        self._settle()

    def release(self) -> None:
        """Give everything back, once: on finish, abort and preemption. Registered blocks stay matchable.

        Rows may still be in flight. They write at or after ``computed``, so only into blocks that are not
        registered and that nobody shares; whoever gets these blocks next writes them in a later launch, and
        the device runs launches in order.

        Raises:
            InvariantError: called a second time.
        """
        self._require_live("release")
        self._released = True
        self._pool.detach(self)
        self._pool.give_back(self.ids)
        self.ids = []
        self.computed = self.reserved = 0
        self._in_flight.clear()

    def _find(self, tokens: Sequence[int]) -> list[int]:
        """Blocks that match now. Admission asks several times in a row."""
        now = self._pool.version, len(tokens)
        if self._found is None or self._found[0] != now:
            self._found = now, self._pool.find(self.chain, tokens)
        return self._found[1]

    def _settle(self) -> None:
        """Forget the oldest reservation and give back the tail blocks that no row in flight can reach."""
        self.reserved -= self._in_flight.popleft()
        covered = -(-(self.computed + self.reserved) // self._pool.block_size)
        if covered < len(self.ids):
            self._pool.give_back(self.ids[covered:])
            del self.ids[covered:]

    def _num_full(self) -> int:
        """Blocks full of forwarded rows: block b counts once ``block_size * (b + 1) <= computed``."""
        return self.computed // self._pool.block_size

    def _register(self, num_full: int, tokens: Sequence[int]) -> None:
        chain, start = self.chain, self._num_known
        known = len(chain.hashes)
        chain.extend(tokens, num_full)
        chain.verify(tokens, start, min(known, num_full))  # those hashed at admission
        for lineage in chain.lineages[start:num_full]:
            self._pool.register(self.ids[lineage.depth], lineage, self.computed)
        self._num_known = num_full

    def _adopt(self, ids: list[int]) -> None:
        """Become one more holder of full blocks."""
        if ids:
            self._pool.share(ids)
            self._pool.attach(self)
        self.ids = list(ids)
        self.computed = len(ids) * self._pool.block_size
        self._num_known = len(ids)

    def _require_live(self, action: str) -> None:
        if self._released:
            raise InvariantError(f"{action} on a sequence whose blocks were released")

    def _require_empty(self, action: str) -> None:
        self._require_live(action)
        if self.ids or self.reserved or self.computed:
            raise InvariantError(f"{action} on a sequence that already holds {len(self.ids)} blocks")
