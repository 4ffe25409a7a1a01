"""The capture cache: heads before tails, children first, within the budget."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.errors import InvariantError
from paceline.speculation.capture_cache import SINK, CaptureCache


def lineage(*path: int) -> list[bytes]:
    """Hashes of the blocks along a path of a tree."""
    return [bytes(path[: i + 1]) for i in range(len(path))]


def publish(cache: CaptureCache, hashes: list[bytes]) -> int:
    """Publish a lineage as a sequence does, block by block; returns how much of it is published."""
    last: bytes | None = None
    for count, hash_ in enumerate(hashes):
        slot = cache.take(last)
        if slot is None or not cache.publish(hash_, last, slot):
            return count
        last = hash_
    return len(hashes)


def test_a_prefix_longer_than_the_store_keeps_its_head() -> None:
    cache = CaptureCache(num_slots=5, num_open=2)
    other = lineage(9, 9)
    publish(cache, other)
    assert publish(cache, lineage(*range(8))) == 5
    assert len(cache.head(lineage(*range(8)))) == 5
    assert cache.head(other) == [] and cache.num_evictions == 2
    # Once more: nothing moves, nobody else is left to be evicted.
    assert publish(cache, lineage(*range(8))) == 5
    assert cache.num_evictions == 2 and cache.num_publishes == 7
    cache.check()


def test_tails_go_before_heads_and_old_ones_before_new_ones() -> None:
    cache = CaptureCache(num_slots=6, num_open=1)
    first, second, third = lineage(1, 1, 1), lineage(2, 2, 2), lineage(3, 3)
    publish(cache, first)
    publish(cache, second)
    cache.touch(first[-1])
    publish(cache, third)
    assert [len(cache.head(item)) for item in (first, second, third)] == [3, 1, 2]


def test_what_is_published_again_counts_as_used() -> None:
    cache = CaptureCache(num_slots=3, num_open=1)
    for start in (1, 2, 3):
        publish(cache, lineage(start))
    assert publish(cache, lineage(1)) == 1
    publish(cache, lineage(4))
    assert [len(cache.head(lineage(start))) for start in (1, 2, 3, 4)] == [1, 0, 1, 1]


def test_a_second_copy_is_given_back() -> None:
    cache = CaptureCache(num_slots=3, num_open=3)
    publish(cache, lineage(1, 2))
    held = cache.head(lineage(1, 2))
    assert publish(cache, lineage(1, 2)) == 2
    assert cache.head(lineage(1, 2)) == held and cache.num_in_progress == 0


def test_nothing_is_held_without_slots() -> None:
    cache = CaptureCache(num_slots=0, num_open=8)
    assert cache.num_physical == 0 and cache.take(None) is None
    cache.check()


def test_misuse_is_noticed() -> None:
    cache = CaptureCache(num_slots=2, num_open=1)
    with pytest.raises(InvariantError, match="not open"):
        cache.give_back([1])
    slot = cache.take(None)
    assert slot is not None and slot != SINK
    cache.give_back([slot])
    with pytest.raises(InvariantError, match="not open"):
        cache.give_back([slot])


BLOCKS = st.integers(0, 2)


class Captures(RuleBasedStateMachine):
    """Sequences that grow along a small tree, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = CaptureCache(num_slots=4, num_open=3)
        self.growing: list[tuple[list[int], int]] = []  # path up to the open block, its slot
        self.content: dict[int, bytes] = {}  # what each slot was last written with

    @rule(path=st.lists(BLOCKS, min_size=1, max_size=6))
    def begin(self, path: list[int]) -> None:
        """Continue the published head of a path by one open block."""
        hashes = lineage(*path)
        kept = len(self.cache.head(hashes))
        if kept == len(path):
            return
        last = hashes[kept - 1] if kept else None
        slot = self.cache.take(last)
        assert last is None or len(self.cache.head(hashes)) == kept, "it evicted the head of whom it serves"
        if slot is None:
            return
        assert all(slot != other for _, other in self.growing)
        self.content[slot] = hashes[kept]
        self.growing.append((path[: kept + 1], slot))

    @precondition(lambda self: self.growing)
    @rule(data=st.data(), stands=st.booleans())
    def end(self, data: st.DataObject, stands: bool) -> None:
        """Publish or abandon an open block."""
        path, slot = self.growing.pop(data.draw(st.integers(0, len(self.growing) - 1)))
        hashes = lineage(*path)
        if not stands:
            self.cache.give_back([slot])
            return
        head = len(self.cache.head(hashes[:-1]))
        parent = hashes[-2] if len(hashes) > 1 else None
        published = self.cache.publish(hashes[-1], parent, slot)
        if published:
            assert len(self.cache.head(hashes)) == len(path)
        else:
            assert len(self.cache.head(hashes)) == head

    @rule(path=st.lists(BLOCKS, min_size=1, max_size=6))
    def restore(self, path: list[int]) -> None:
        """What is restored is what was captured, in order."""
        hashes = lineage(*path)
        slots = self.cache.head(hashes)
        assert [self.content[slot] for slot in slots] == hashes[: len(slots)]
        if slots:
            self.cache.touch(hashes[len(slots) - 1])

    @rule()
    def reset(self) -> None:
        """New weights: only what is being filled remains."""
        self.cache.reset()
        assert self.cache.num_published == 0 and self.cache.num_in_progress == len(self.growing)

    @invariant()
    def holds(self) -> None:
        """The cache proves itself, and knows whose slots are open."""
        self.cache.check()
        assert self.cache.num_published <= self.cache.num_slots
        assert self.cache.num_in_progress == len(self.growing)


TestCaptures = Captures.TestCase
