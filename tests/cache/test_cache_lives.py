"""Random request lives against a simulated device, and proof that the wrong caches are found out.

The device keeps, for every row of every block, the text it was computed from: what K/V are a function of. The
engine's side runs up to two steps behind it, as the real one does. After every step of a life the pool proves
its own invariants and the device's memory is compared with what the index promises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from paceline.cache import BlockEvent, BlockPool, BlockRemoved, BlockStored, SequenceBlocks
from paceline.cache.lineage import Lineage
from paceline.errors import InvariantError

Text = tuple[
    bytes, tuple[int, ...]
]  # salt and tokens: all that the K/V of the last of these tokens depend on

MAX_DEPTH = 2  # reservations in flight
SALTS = (b"", b"other")
picks = st.integers(0, 1 << 16)
bits = st.lists(st.integers(0, 1), min_size=9, max_size=9)
suffixes = st.lists(st.integers(0, 1), min_size=1, max_size=6)
salts = st.sampled_from((*[SALTS[0]] * 3, SALTS[1]))


class Router:
    """What a router can know of the cache: its events, in order."""

    def __init__(self) -> None:
        self.stored: dict[bytes, BlockStored] = {}
        self.roots: dict[bytes, bytes] = {}  # root hash -> salt

    def hear(self, event: BlockEvent) -> None:
        if isinstance(event, BlockStored):
            assert event.parent_hash in self.stored or event.parent_hash in self.roots
            known = self.stored.get(event.hash)
            assert known is None or (known.parent_hash, known.tokens) == (event.parent_hash, event.tokens)
            self.stored[event.hash] = event
        elif isinstance(event, BlockRemoved):
            assert self.stored.pop(event.hash).block_id == event.block_id
            orphans = [e for e in self.stored.values() if e.parent_hash == event.hash]
            assert not orphans, "a parent was evicted before its children"
        else:
            self.stored.clear()

    def text(self, hash_: bytes) -> Text:
        """Everything up to and including this block."""
        if hash_ in self.roots:
            return self.roots[hash_], ()
        salt, before = self.text(self.stored[hash_].parent_hash)
        return salt, before + self.stored[hash_].tokens


@dataclass(eq=False)
class Life:
    """One sequence. ``device_*`` is the truth; ``tokens`` is what the host has heard of it."""

    salt: bytes
    tokens: list[int]
    blocks: SequenceBlocks
    device_tokens: list[int] = field(default_factory=list)
    device_computed: int = 0
    prefill_until: int = 0
    in_flight: deque[tuple[int, int, list[int]]] = field(
        default_factory=deque
    )  # rows, rows that stand, tokens added

    def start(self, computed: int) -> None:
        self.device_tokens, self.device_computed = list(self.tokens), computed
        self.prefill_until = len(self.tokens)


class CacheLives(RuleBasedStateMachine):
    pool: BlockPool

    @initialize(
        num_blocks=st.sampled_from((8, 12, 16, 24, 4)),
        block_size=st.sampled_from((2, 4, 1)),
        enable_caching=st.sampled_from((True, True, False)),
    )
    def build(self, num_blocks: int, block_size: int, enable_caching: bool) -> None:
        self.router = Router()
        self.pool = BlockPool(
            num_blocks, block_size, enable_caching=enable_caching, on_event=self.router.hear
        )
        self.router.roots = {self.pool.chain(salt).root: salt for salt in SALTS}
        self.memory: dict[tuple[int, int], Text] = {}
        self.waiting: list[Life] = []
        self.running: list[Life] = []
        self.texts = [[0] * 12, [0, 1] * 6]  # shared prefixes; conversations that finished join them

    # ---- the device ----

    def write(self, life: Life, fed: Sequence[int]) -> None:
        start, block_size = life.device_computed, self.pool.block_size
        text = life.device_tokens[:start] + list(fed)
        registered = {event.block_id for event in self.router.stored.values()}
        for position in range(start, start + len(fed)):
            block = life.blocks.ids[position // block_size]
            assert block not in registered, "a matchable block was written"
            assert not any(block in other.blocks.ids for other in self.running if other is not life)
            self.memory[block, position % block_size] = (life.salt, tuple(text[: position + 1]))

    def rows_are(self, ids: Sequence[int], num_rows: int, text: Text) -> bool:
        salt, tokens = text
        size = self.pool.block_size
        return all(
            self.memory.get((ids[p // size], p % size)) == (salt, tokens[: p + 1]) for p in range(num_rows)
        )

    # ---- lives ----

    @rule(pick=picks, keep=st.integers(0, 16), suffix=suffixes, salt=salts)
    def arrive(self, pick: int, keep: int, suffix: list[int], salt: bytes) -> None:
        tokens = self.texts[pick % len(self.texts)][:keep] + suffix
        self.waiting.append(Life(salt, tokens, SequenceBlocks(self.pool, salt=salt)))

    @rule(
        pick=picks,
        keep=st.integers(4, 16),
        suffix=suffixes,
        salt=salts,
        match=st.booleans(),
        leave=st.booleans(),
    )
    def arrive_and_prefill(
        self, pick: int, keep: int, suffix: list[int], salt: bytes, match: bool, leave: bool
    ) -> None:
        """A short cut through several rules, so that most of a random life meets a filled cache."""
        self.arrive(pick, keep, suffix, salt)
        life = self.waiting[-1]
        self.admit(len(self.waiting) - 1, match, len(life.tokens))
        if life.in_flight:
            self.settle_oldest(life)
        if leave:
            self.finish(len(self.running) - 1, 0)

    @precondition(lambda self: self.waiting)
    @rule(pick=picks)
    def peek(self, pick: int) -> None:
        life = self.waiting[pick % len(self.waiting)]
        limit = (len(life.tokens) - 1) // self.pool.block_size
        cached = {self.router.text(hash_) for hash_ in self.router.stored}
        expected = 0
        while expected < limit:
            end = (expected + 1) * self.pool.block_size
            if (life.salt, tuple(life.tokens[:end])) not in cached:
                break
            expected += 1
        before = self.pool.num_queried_tokens, self.pool.num_free
        assert life.blocks.match_length(life.tokens) == expected * self.pool.block_size
        assert (self.pool.num_queried_tokens, self.pool.num_free) == before

    @precondition(lambda self: self.waiting)
    @rule(pick=picks, match=st.sampled_from((True, True, True, False)), rows=st.integers(1, 8))
    def admit(self, pick: int, match: bool, rows: int) -> None:
        life = self.waiting.pop(pick % len(self.waiting))
        expected = life.blocks.match_length(life.tokens) if match else 0
        rows = min(rows, len(life.tokens) - expected)
        cost, free = life.blocks.admission_cost(life.tokens, rows), self.pool.num_free
        cached = life.blocks.match(life.tokens) if match else 0
        assert cached == expected == life.blocks.computed < len(life.tokens)
        assert self.rows_are(life.blocks.ids, cached, (life.salt, tuple(life.tokens)))
        life.start(cached)
        self.running.append(life)
        launched = self.launch(life, rows, 0, [])
        if match:
            assert launched == (cost <= free)
            assert not launched or free - self.pool.num_free == cost

    @precondition(lambda self: self.running)
    @rule(
        pick=picks,
        spans=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8), bits), min_size=1, max_size=4),
    )
    def step(self, pick: int, spans: list[tuple[int, int, list[int]]]) -> None:
        """Launch a step ahead of what was heard, as the engine does; short of memory, somebody yields."""
        life = self.running[pick % len(self.running)]
        for rows, accepted, sampled in spans:
            if len(life.in_flight) == MAX_DEPTH:
                self.settle_oldest(life)
            if not self.launch(life, rows, accepted, sampled) and self.running[-1] is not life:
                self.preempt(len(self.running) - 1)

    def launch(self, life: Life, rows: int, accepted: int, sampled: list[int]) -> bool:
        """A prefill chunk while there is one left, else a span whose first ``accepted`` drafts are right."""
        left = life.prefill_until - life.device_computed
        rows = min(rows, left) if left > 0 else rows
        before = (list(life.blocks.ids), life.blocks.reserved, self.pool.num_free, self.pool.num_cached)
        new = life.blocks.reserve(rows)
        if new is None:
            assert before == (life.blocks.ids, life.blocks.reserved, self.pool.num_free, self.pool.num_cached)
            return False
        assert life.blocks.ids == before[0] + new
        start = life.device_computed
        if left > 0:
            fed, stand = life.device_tokens[start : start + rows], rows
            added = sampled[:1] or [0] if rows == left else []
        else:
            accepted = min(accepted, rows - 1)
            fed, stand = [life.device_tokens[-1], *sampled[: rows - 1]], accepted + 1
            added = [*sampled[:accepted], sampled[-1]]
        self.write(life, fed)
        life.device_computed += stand
        life.device_tokens += added
        life.in_flight.append((rows, stand, added))
        return True

    @precondition(lambda self: any(life.in_flight for life in self.running))
    @rule(pick=picks)
    def settle(self, pick: int) -> None:
        busy = [life for life in self.running if life.in_flight]
        self.settle_oldest(busy[pick % len(busy)])

    def settle_oldest(self, life: Life) -> None:
        rows, stand, added = life.in_flight.popleft()
        life.tokens += added
        life.blocks.commit(rows, stand, life.tokens)
        if life.blocks.computed >= life.prefill_until:
            assert len(life.tokens) == life.blocks.computed + 1

    @precondition(lambda self: any(not life.in_flight for life in self.running))
    @rule(pick=picks, rows=st.integers(1, 8))
    def step_is_discarded(self, pick: int, rows: int) -> None:
        """Drafts were written, then the step did not count."""
        idle = [life for life in self.running if not life.in_flight]
        life = idle[pick % len(idle)]
        before = list(life.blocks.ids)
        if life.blocks.reserve(rows) is not None:
            self.write(life, [7] * rows)
            life.blocks.commit(rows, 0, life.tokens)
            assert life.blocks.ids == before

    @precondition(lambda self: self.running)
    @rule(pick=picks, num_tokens=picks)
    def fork(self, pick: int, num_tokens: int) -> None:
        parent = self.running[pick % len(self.running)]
        num_tokens = 1 + num_tokens % len(parent.tokens)
        child = Life(parent.salt, parent.tokens[:num_tokens], SequenceBlocks(self.pool, salt=parent.salt))
        shared = child.blocks.fork(parent.blocks, num_tokens - 1)
        size = self.pool.block_size
        assert shared == min(num_tokens - 1, parent.blocks.computed) // size * size
        assert child.blocks.ids == parent.blocks.ids[: shared // size]
        child.start(shared)
        self.running.append(child)

    @precondition(lambda self: self.running)
    @rule(pick=picks, keep=st.integers(0, 8))
    def finish(self, pick: int, keep: int) -> None:
        """A stop cuts the oldest step short; what is in flight behind it is forgotten."""
        life = self.running.pop(pick % len(self.running))
        if life.in_flight:
            rows, stand, added = life.in_flight.popleft()
            stand = min(stand, keep)
            life.tokens = (life.tokens + added)[: max(len(life.tokens), life.blocks.computed + stand)]
            life.blocks.commit(rows, stand, life.tokens)
        self.texts.append(life.tokens)
        life.blocks.release()

    @precondition(lambda self: self.running)
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        life = self.running.pop(pick % len(self.running))
        life.blocks.release()
        with pytest.raises(InvariantError):
            life.blocks.release()

    @precondition(lambda self: self.running)
    @rule(pick=picks)
    def preempt(self, pick: int) -> None:
        life = self.running.pop(pick % len(self.running))
        life.blocks.release()
        self.waiting.append(Life(life.salt, life.tokens, SequenceBlocks(self.pool, salt=life.salt)))

    @precondition(lambda self: len(self.running) > 3)
    @rule(keep=st.integers(0, 8))
    def drain(self, keep: int) -> None:
        """Everyone finishes: room for newcomers, and a cache full of what they said."""
        while self.running:
            self.finish(0, keep)

    @rule(chance=st.integers(0, 9))
    def reset(self, chance: int) -> None:
        if chance != 7:  # seldom: it ends what makes a life interesting
            return
        in_use = any(life.blocks.ids for life in self.running)
        assert self.pool.reset() == (not in_use)

    # ---- what always holds ----

    @invariant()
    def pool_is_sound(self) -> None:
        self.pool.check()
        held = {block for life in self.running for block in life.blocks.ids}
        assert self.pool.num_free == self.pool.num_blocks - len(held)
        assert self.pool.usage == pytest.approx(len(held) / self.pool.num_blocks)

    @invariant()
    def matchable_blocks_hold_their_lineage(self) -> None:
        """Every row that a match could hand out is what a fresh prefill of that text would write."""
        size = self.pool.block_size
        assert (
            len(self.router.stored)
            == self.pool.num_cached
            <= (self.pool.num_blocks if self.pool.enable_caching else 0)
        )
        for event in self.router.stored.values():
            salt, tokens = self.router.text(event.hash)
            first = len(tokens) - size
            for offset in range(size):
                assert self.memory.get((event.block_id, offset)) == (salt, tokens[: first + offset + 1])

    @invariant()
    def every_sequence_keeps_its_rows(self) -> None:
        for life in self.running:
            assert self.rows_are(life.blocks.ids, life.blocks.computed, (life.salt, tuple(life.tokens)))
            assert life.blocks.reserved == sum(rows for rows, _, _ in life.in_flight)
            assert life.device_computed == life.blocks.computed + sum(stand for _, stand, _ in life.in_flight)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for life in self.running:
            life.blocks.release()
        self.running.clear()
        self.pool.check()
        assert self.pool.num_free == self.pool.num_blocks
        assert self.pool.usage == 0
        assert self.pool.reset()
        assert not self.router.stored


def live(max_examples: int, steps: int = 40, **options: Any) -> None:
    run_state_machine_as_test(
        CacheLives,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            **options,
        ),
    )


def test_random_lives() -> None:
    live(max_examples=300)


# ---- wrong caches ----


def bonus_registered(patch: pytest.MonkeyPatch) -> None:
    """A block counts as full when the dangling token completes it."""
    patch.setattr(SequenceBlocks, "_num_full", lambda self: (self.computed + 1) // self._pool.block_size)


def bonus_registered_and_pool_deceived(patch: pytest.MonkeyPatch) -> None:
    """The same, and the pool is told one row more than was forwarded: `check` and the device must tell."""
    bonus_registered(patch)
    register = BlockPool.register

    def deceived(self: BlockPool, block: int, lineage: Lineage, computed: int) -> None:
        register(self, block, lineage, computed + 1)

    patch.setattr(BlockPool, "register", deceived)


def parents_evicted_first(patch: pytest.MonkeyPatch) -> None:
    give_back = BlockPool.give_back
    patch.setattr(BlockPool, "give_back", lambda self, ids: give_back(self, ids[::-1]))


def copies_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A registered block keeps its place in the index although another copy is still in use."""

    def keeps_content(self: BlockPool, block: int) -> bool:
        lineage = self._lineages[block]
        return lineage is not None and self._index[lineage.hash] == block

    patch.setattr(BlockPool, "_keeps_content", keeps_content)


def tail_given_back_too_early(patch: pytest.MonkeyPatch) -> None:
    """Spare blocks are counted without the rows still in flight."""

    def settle(self: SequenceBlocks) -> None:
        self.reserved -= self._in_flight.popleft()
        covered = -(-self.computed // self._pool.block_size)
        self._pool.give_back(self.ids[covered:])
        del self.ids[covered:]

    patch.setattr(SequenceBlocks, "_settle", settle)


def lookahead_not_covered(patch: pytest.MonkeyPatch) -> None:
    """Rows in flight are not counted when new blocks are reserved."""
    reserve = SequenceBlocks.reserve

    def short(self: SequenceBlocks, rows: int) -> list[int] | None:
        held, self.reserved = self.reserved, 0
        try:
            return reserve(self, rows)
        finally:
            self.reserved += held

    patch.setattr(SequenceBlocks, "reserve", short)


def salt_ignored(patch: pytest.MonkeyPatch) -> None:
    chain = BlockPool.chain
    patch.setattr(BlockPool, "chain", lambda self, salt=b"": chain(self))


def revived_block_stays_free(patch: pytest.MonkeyPatch) -> None:
    def share(self: BlockPool, ids: Sequence[int]) -> None:
        for block in ids:
            self._refs[block] += 1

    patch.setattr(BlockPool, "share", share)


def evicted_block_stays_in_the_index(patch: pytest.MonkeyPatch) -> None:
    def take(self: BlockPool, count: int) -> list[int] | None:
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._refs[block], self._lineages[block] = 1, None
        return taken

    patch.setattr(BlockPool, "take", take)


@pytest.mark.parametrize(
    "mutate",
    [
        bonus_registered,
        bonus_registered_and_pool_deceived,
        parents_evicted_first,
        copies_forgotten,
        tail_given_back_too_early,
        lookahead_not_covered,
        salt_ignored,
        revived_block_stays_free,
        evicted_block_stays_in_the_index,
    ],
)
def test_random_lives_find_a_wrong_cache(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        live(
            max_examples=150,
            derandomize=True,
            phases=[Phase.generate],
            report_multiple_bugs=False,
            database=None,
        )


def test_the_pool_itself_refuses_the_bonus(monkeypatch: pytest.MonkeyPatch) -> None:
    bonus_registered(monkeypatch)
    blocks = SequenceBlocks(BlockPool(4, 4))
    blocks.reserve(4)
    with pytest.raises(InvariantError, match="3 rows forwarded; it is full at 4"):
        blocks.commit(4, 3, [1, 2, 3, 4])


def test_the_checker_finds_the_bonus(monkeypatch: pytest.MonkeyPatch) -> None:
    bonus_registered_and_pool_deceived(monkeypatch)
    pool = BlockPool(4, 4)
    blocks = SequenceBlocks(pool)
    blocks.reserve(4)
    blocks.commit(4, 3, [1, 2, 3, 4])
    with pytest.raises(InvariantError, match="before all its rows were forwarded"):
        pool.check()


def test_the_checker_finds_parents_ahead_of_children(monkeypatch: pytest.MonkeyPatch) -> None:
    parents_evicted_first(monkeypatch)
    pool = BlockPool(4, 4)
    blocks = SequenceBlocks(pool)
    blocks.reserve(8)
    blocks.commit(8, 8, range(8))
    blocks.release()
    with pytest.raises(InvariantError, match="would be evicted before its child"):
        pool.check()
