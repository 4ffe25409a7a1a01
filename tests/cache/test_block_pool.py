"""The pool's rules one at a time, on examples small enough to follow by hand."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import pytest

from paceline.cache import (
    BlockEvent,
    BlockPool,
    BlockRemoved,
    BlockStored,
    CacheCleared,
    SequenceBlocks,
)
from paceline.cache.lineage import Lineage
from paceline.errors import ConfigError, InvariantError

P = 4


def forwarded(
    pool: BlockPool, tokens: Sequence[int], *, salt: bytes = b"", match: bool = True
) -> SequenceBlocks:
    """A sequence whose tokens were all forwarded, through the cache as far as it goes."""
    blocks = SequenceBlocks(pool, salt=salt)
    rows = len(tokens) - (blocks.match(tokens) if match else 0)
    assert blocks.reserve(rows) is not None
    blocks.commit(rows, rows, tokens)
    return blocks


def test_second_prompt_takes_the_cached_blocks() -> None:
    pool = BlockPool(8, P)
    first = forwarded(pool, range(10))
    second = SequenceBlocks(pool)
    assert second.match([*range(8), 90, 91]) == 8
    assert second.ids == first.ids[:2]
    assert second.computed == 8
    pool.check()


@pytest.mark.parametrize(("prompt_len", "cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (40, 8)])
def test_match_always_leaves_a_token_to_forward(prompt_len: int, cached: int) -> None:
    pool = BlockPool(8, P)
    forwarded(pool, range(8))
    blocks = SequenceBlocks(pool)
    assert blocks.match_length(range(prompt_len)) == cached
    assert blocks.match(range(prompt_len)) == cached


def test_no_token_at_all_matches_nothing() -> None:
    assert SequenceBlocks(BlockPool(2, P)).match([]) == 0


@pytest.mark.parametrize("boundary", [16, 304])
def test_bonus_that_lands_on_a_boundary_does_not_complete_the_block(boundary: int) -> None:
    """A verify step commits drafts up to position boundary - 2, and behind them a bonus no row forwarded."""
    block_size = 16
    pool = BlockPool(32, block_size)
    tokens = list(range(boundary))
    turn = SequenceBlocks(pool)
    prompt_len = boundary - 4
    turn.reserve(prompt_len)
    turn.commit(prompt_len, prompt_len, tokens[: prompt_len + 1])  # the last row sampled the anchor
    turn.reserve(8)
    turn.commit(8, 3, tokens)  # the anchor and 2 drafts stand, the bonus is dangling
    assert turn.computed == boundary - 1
    pool.check()
    turn.release()
    next_turn = SequenceBlocks(pool)
    assert next_turn.match([*tokens, 7, 7, 7]) == boundary - block_size
    # Contrast: once a later step forwards it, the block is matchable.
    next_turn.reserve(block_size)
    next_turn.commit(block_size, block_size, tokens)
    assert SequenceBlocks(pool).match_length([*tokens, 7]) == boundary


def test_blocks_are_told_apart_by_salt_and_by_everything_before_them() -> None:
    pool = BlockPool(16, P)
    forwarded(pool, [*range(8), 0], salt=b"a")
    assert SequenceBlocks(pool, salt=b"a").match_length(range(9)) == 8
    assert SequenceBlocks(pool).match_length(range(9)) == 0
    assert SequenceBlocks(pool, salt=b"b").match_length(range(9)) == 0
    assert SequenceBlocks(pool, salt=b"a").match_length([4, 5, 6, 7, 0]) == 0
    assert SequenceBlocks(pool, salt=b"a").match_length([9, 1, 2, 3, 4, 5, 6, 7, 0]) == 0


def test_overlapping_reservations_cover_the_upper_bound_and_give_spares_back() -> None:
    pool = BlockPool(8, P)
    blocks = SequenceBlocks(pool)
    assert blocks.reserve(3) == [0]
    assert blocks.reserve(3) == [1]
    assert blocks.reserve(4) == [2]
    assert blocks.reserved == 10
    blocks.commit(3, 1, [5, 6])
    assert (blocks.computed, blocks.reserved, blocks.ids) == (1, 7, [0, 1])
    blocks.commit(3, 0, [5, 6])
    assert (blocks.computed, blocks.reserved, blocks.ids) == (1, 4, [0, 1])
    blocks.commit(4, 3, [5, 6, 7, 8])
    assert (blocks.computed, blocks.reserved, blocks.ids) == (4, 0, [0])
    assert blocks.reserve(6) == [1, 2], "spare blocks went back in reverse order"
    pool.check()


def test_a_reservation_too_large_changes_nothing() -> None:
    pool = BlockPool(4, P)
    other = forwarded(pool, range(5))
    other.release()
    blocks = SequenceBlocks(pool)
    assert blocks.reserve(17) is None
    assert (blocks.ids, blocks.reserved, pool.num_free, pool.num_cached) == ([], 0, 4, 1)
    pool.check()
    assert blocks.reserve(16) == [1, 2, 3, 0]


def test_least_recently_used_goes_first_and_children_before_parents() -> None:
    pool = BlockPool(6, P)
    old, new = [*range(12)], [*range(100, 112)]
    first, second = forwarded(pool, old), forwarded(pool, new)
    first.release()
    second.release()
    pool.check()
    lengths = []
    for _ in range(6):
        SequenceBlocks(pool).reserve(P)
        pool.check()
        lengths.append(tuple(SequenceBlocks(pool).match_length([*tokens, 0]) for tokens in (old, new)))
    assert lengths == [(8, 12), (4, 12), (0, 12), (0, 8), (0, 4), (0, 0)]


def test_a_match_revives_free_blocks_and_makes_them_recent() -> None:
    pool = BlockPool(4, P)
    forwarded(pool, range(8)).release()
    forwarded(pool, range(100, 108)).release()
    assert pool.num_free == 4
    held = SequenceBlocks(pool)
    assert held.admission_cost(range(9), 1) == 3
    assert held.match(range(9)) == 8
    assert pool.num_free == 2
    held.release()
    filler = SequenceBlocks(pool)
    filler.reserve(2 * P)
    assert SequenceBlocks(pool).match_length(range(9)) == 8
    pool.check()


def test_admission_cost_counts_what_match_and_reserve_take() -> None:
    pool = BlockPool(8, P)
    holder = forwarded(pool, range(8))
    assert holder.computed == 8
    blocks = SequenceBlocks(pool)
    for tokens, rows in (([*range(8), 9], 1), (list(range(30, 40)), 10), ([*range(4), 9, 9], 2)):
        blocks = SequenceBlocks(pool)
        cost, before = blocks.admission_cost(tokens, rows), pool.num_free
        blocks.match(tokens)
        blocks.reserve(rows)
        assert before - pool.num_free == cost
        blocks.release()


def test_the_same_tokens_computed_twice_are_registered_once() -> None:
    events: list[BlockEvent] = []
    pool = BlockPool(8, P, on_event=events.append)
    first = forwarded(pool, range(8))
    second = forwarded(pool, range(8), match=False)
    assert pool.num_cached == 2
    assert len(events) == 2
    pool.check()
    # The registered copy goes first: the one still held takes its place, so no prefix is lost on the way.
    kept = second.ids[:]
    first.release()
    pool.check()
    probe = SequenceBlocks(pool)
    assert probe.match([*range(8), 0]) == 8
    assert probe.ids == kept
    assert pool.num_cached == 2
    assert [e.block_id for e in events if isinstance(e, BlockStored)] == [*[0, 1], *kept[::-1]]
    second.release()
    probe.release()
    pool.check()
    assert (pool.num_cached, pool.num_free) == (2, 8)


def test_a_copy_given_back_first_leaves_the_registered_block() -> None:
    pool = BlockPool(8, P)
    first = forwarded(pool, range(8))
    forwarded(pool, range(8), match=False).release()
    pool.check()
    assert pool.num_cached == 2
    probe = SequenceBlocks(pool)
    probe.match([*range(8), 0])
    assert probe.ids == first.ids


def test_recomputed_blocks_replace_copies_that_nobody_holds() -> None:
    """Prompt logprobs skip the match. The new blocks take over, or children could outlive their parents."""
    pool = BlockPool(4, P)
    forwarded(pool, range(8)).release()
    blocks = forwarded(pool, range(12), match=False)
    pool.check()
    assert (pool.num_cached, pool.num_free) == (3, 1)
    filler = SequenceBlocks(pool)
    filler.reserve(P)
    assert SequenceBlocks(pool).match_length(range(13)) == 12, "an emptied block is reused before any content"
    blocks.release()
    pool.check()


def test_children_of_a_copy_are_matchable_and_never_outlive_it() -> None:
    pool = BlockPool(6, P)
    first = forwarded(pool, range(4))
    second = forwarded(
        pool, [*range(4), 7, 7, 7, 7], match=False
    )  # block 0 a copy, block 1 registered on top
    probe = SequenceBlocks(pool)
    assert probe.match_length([*range(4), 7, 7, 7, 7, 0]) == 8
    first.release()
    pool.check()
    SequenceBlocks(pool).reserve(4 * P)  # everything that can be evicted is
    pool.check()
    assert probe.match_length([*range(4), 7, 7, 7, 7, 0]) == 8
    assert second.computed == 8


@pytest.mark.parametrize("enable_caching", [True, False])
def test_fork_shares_full_blocks(enable_caching: bool) -> None:
    pool = BlockPool(8, P, enable_caching=enable_caching)
    parent = forwarded(pool, range(10))
    children = [SequenceBlocks(pool) for _ in range(3)]
    for i, child in enumerate(children):
        assert child.fork(parent, 9) == 8
        assert child.ids == parent.ids[:2]
        new = child.reserve(2)
        assert new is not None and len(new) == 1
        child.commit(2, 2, range(10))
        child.reserve(2)
        child.commit(2, 2, [*range(10), i, i])
    assert pool.num_free == 8 - 3 - 3
    pool.check()
    parent.release()
    pool.check()
    for child in children:
        child.release()
        pool.check()
    assert pool.num_free == 8
    assert pool.num_cached == (5 if enable_caching else 0)


@pytest.mark.parametrize(("num_tokens", "shared"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (100, 8)])
def test_fork_shares_no_more_than_was_forwarded(num_tokens: int, shared: int) -> None:
    pool = BlockPool(8, P)
    parent = forwarded(pool, range(9))
    parent.reserve(20)  # in flight: not forwarded yet as far as the host knows
    child = SequenceBlocks(pool)
    assert child.fork(parent, num_tokens) == shared
    pool.check()


def test_fork_stays_within_pool_and_salt() -> None:
    pool = BlockPool(8, P)
    parent = forwarded(pool, range(9), salt=b"a")
    with pytest.raises(InvariantError, match="salt"):
        SequenceBlocks(pool, salt=b"b").fork(parent, 8)
    with pytest.raises(InvariantError, match="pool"):
        SequenceBlocks(BlockPool(8, P), salt=b"a").fork(parent, 8)


def test_without_caching_nothing_is_registered() -> None:
    events: list[BlockEvent] = []
    pool = BlockPool(8, P, enable_caching=False, on_event=events.append)
    forwarded(pool, range(12)).release()
    assert (pool.num_cached, pool.num_queried_tokens, events) == (0, 0, [])
    assert SequenceBlocks(pool).match(range(12)) == 0
    assert pool.reset()
    assert events == []
    pool.check()


def test_release_with_rows_in_flight_keeps_what_was_forwarded() -> None:
    pool = BlockPool(8, P)
    blocks = SequenceBlocks(pool)
    blocks.reserve(6)
    blocks.reserve(4)
    blocks.commit(6, 6, range(6))
    blocks.release()
    pool.check()
    assert (pool.num_free, pool.num_cached) == (8, 1)
    assert SequenceBlocks(pool).match_length(range(9)) == 4


def test_events_name_hash_parent_tokens_and_block() -> None:
    events: list[BlockEvent] = []
    pool = BlockPool(2, P, on_event=events.append)
    blocks = forwarded(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    root = pool.chain().root
    first, second = events
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert (first.parent_hash, first.tokens, first.block_id) == (root, (1, 2, 3, 4), blocks.ids[0])
    assert (second.parent_hash, second.tokens, second.block_id) == (first.hash, (5, 6, 7, 8), blocks.ids[1])
    blocks.release()
    filler = SequenceBlocks(pool)
    filler.reserve(2 * P)
    assert events[2:] == [BlockRemoved(second.hash, 1), BlockRemoved(first.hash, 0)]
    filler.release()
    assert pool.reset()
    assert events[4:] == [CacheCleared()]


def test_reset_waits_until_nothing_is_in_use() -> None:
    pool = BlockPool(4, P)
    blocks = forwarded(pool, range(8))
    assert not pool.reset()
    assert pool.num_cached == 2
    blocks.release()
    assert pool.reset()
    assert pool.num_cached == 0
    assert SequenceBlocks(pool).match_length(range(9)) == 0
    pool.check()


def test_counters_count_matches_and_not_peeks() -> None:
    pool = BlockPool(8, P)
    forwarded(pool, range(9)).release()
    blocks = SequenceBlocks(pool)
    blocks.match_length(range(9))
    blocks.admission_cost(range(9), 1)
    assert (pool.num_queried_tokens, pool.num_hit_tokens) == (9, 0)
    blocks.match(range(9))
    assert (pool.num_queried_tokens, pool.num_hit_tokens) == (18, 8)


def test_usage_is_the_share_in_use() -> None:
    pool = BlockPool(8, P)
    assert pool.usage == 0.0
    blocks = forwarded(pool, range(8))
    assert pool.usage == 0.25
    blocks.release()
    assert pool.usage == 0.0


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (-1, 16), (4, 0)])
def test_sizes_below_one_are_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ConfigError, match="at least one block"):
        BlockPool(num_blocks, block_size)


def test_wrong_use_is_named() -> None:
    pool = BlockPool(8, P)
    blocks = SequenceBlocks(pool)
    with pytest.raises(InvariantError, match="at least one row"):
        blocks.reserve(0)
    with pytest.raises(InvariantError, match="oldest first"):
        blocks.commit(1, 1, [1])
    blocks.reserve(2)
    blocks.reserve(3)
    with pytest.raises(InvariantError, match="oldest first"):
        blocks.commit(3, 0, [])
    with pytest.raises(InvariantError, match="cannot stand"):
        blocks.commit(2, 3, [1, 2, 3])
    with pytest.raises(InvariantError, match="cannot stand"):
        blocks.commit(2, -1, [1, 2, 3])
    with pytest.raises(InvariantError, match="pass all of them"):
        blocks.commit(2, 2, [1])
    with pytest.raises(InvariantError, match="already holds"):
        blocks.match([1, 2, 3, 4, 5])
    with pytest.raises(InvariantError, match="already holds"):
        blocks.fork(SequenceBlocks(pool), 4)
    assert (blocks.reserved, blocks.computed) == (5, 0)
    pool.check()
    blocks.release()
    for call in (
        blocks.release,
        lambda: blocks.reserve(1),
        lambda: blocks.commit(2, 2, [1, 2]),
        lambda: blocks.match([1]),
    ):
        with pytest.raises(InvariantError, match="released"):
            call()
    assert pool.num_free == 8


def test_a_failing_commit_of_changed_tokens_is_named() -> None:
    pool = BlockPool(8, P)
    blocks = SequenceBlocks(pool)
    blocks.match_length(range(9))
    blocks.reserve(8)
    with pytest.raises(InvariantError, match="changed after it was hashed"):
        blocks.commit(8, 8, [9, *range(1, 9)])


def test_match_of_changed_tokens_is_named() -> None:
    pool = BlockPool(8, P)
    forwarded(pool, range(9))
    blocks = SequenceBlocks(pool)
    blocks.match_length(range(9))
    with pytest.raises(InvariantError, match="changed after it was hashed"):
        blocks.match([9, *range(1, 9)])


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_placeholder_token_is_never_hashed(token: int) -> None:
    pool = BlockPool(8, P)
    blocks = SequenceBlocks(pool)
    blocks.reserve(4)
    with pytest.raises(InvariantError, match="token ids"):
        blocks.commit(4, 4, [1, 2, 3, token])


def test_a_full_or_shared_block_is_never_written() -> None:
    pool = BlockPool(8, P)
    blocks = forwarded(pool, range(8))
    blocks.computed -= 1  # what a wrong rollback would do
    with pytest.raises(InvariantError, match="is full"):
        blocks.reserve(1)
    uncached = BlockPool(8, P, enable_caching=False)
    parent = forwarded(uncached, range(8))
    child = SequenceBlocks(uncached)
    child.fork(parent, 8)
    child.computed -= 1
    with pytest.raises(InvariantError, match="2 holders"):
        child.reserve(1)


def test_a_block_is_given_back_and_registered_once() -> None:
    pool = BlockPool(8, P)
    blocks = forwarded(pool, range(8))
    lineage = Lineage(0, b"h" * 16, pool.chain().root, b"t" * 16)
    with pytest.raises(InvariantError, match="registered twice"):
        pool.register(blocks.ids[0], lineage, 8)
    with pytest.raises(InvariantError, match="nobody holds it"):
        pool.register(7, lineage, 8)
    with pytest.raises(InvariantError, match="block 7 was given back but nobody holds it"):
        pool.give_back([7])
    pool.check()


def test_the_pool_forgets_sequences_that_released() -> None:
    pool = BlockPool(8, P)
    blocks = forwarded(pool, range(8))
    gone = weakref.ref(blocks)
    blocks.release()
    del blocks
    assert gone() is None


def test_the_checker_finds_a_table_that_was_tampered_with() -> None:
    pool = BlockPool(8, P)
    blocks = forwarded(pool, range(9))
    blocks.ids.pop()
    with pytest.raises(InvariantError, match="counts 1 holders, 0 tables list it"):
        pool.check()
