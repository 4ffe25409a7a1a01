"""Lineage hashes: keyed, chained, salted, and computed once per block."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cache import BlockPool, LineageChain, SequenceBlocks
from paceline.cache.lineage import MAX_RECENT, LineageHasher, RecentChains
from paceline.errors import ConfigError

KEY = bytes(range(32))


def hashes(
    hasher: LineageHasher, tokens: list[int], salt: bytes = b"", recent: RecentChains | None = None
) -> list[bytes]:
    chain = LineageChain(hasher, recent or RecentChains(hasher.block_size), salt)
    chain.extend(tokens, len(tokens) // hasher.block_size)
    chain.verify(tokens, 0, len(chain.hashes))
    return chain.hashes


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What is hashed while the test runs."""
    calls: list[bytes] = []
    child = LineageHasher.child

    def counting(self: LineageHasher, parent: bytes, packed: bytes) -> bytes:
        calls.append(parent + packed)
        return child(self, parent, packed)

    monkeypatch.setattr(LineageHasher, "child", counting)
    return calls


def test_hash_is_keyed_blake2b_of_parent_and_tokens() -> None:
    root = hashlib.blake2b(b"\x02\0\0\0salt", digest_size=16, key=KEY, person=b"paceline.root").digest()
    block = b"\x01\0\0\0\x00\x01\0\0"
    first = hashlib.blake2b(root + block, digest_size=16, key=KEY, person=b"paceline.block").digest()
    assert hashes(LineageHasher(2, KEY), [1, 256], b"salt") == [first]


def test_processes_agree_only_when_they_share_a_key() -> None:
    tokens = list(range(32))
    shared = hashes(LineageHasher(4, KEY), tokens)
    assert shared == hashes(LineageHasher(4, KEY), tokens)
    assert not set(shared) & set(hashes(LineageHasher(4, b"k" * 32), tokens))
    assert not set(hashes(LineageHasher(4), tokens)) & set(hashes(LineageHasher(4), tokens))


def test_hash_depends_on_everything_before_the_block() -> None:
    hasher = LineageHasher(4, KEY)
    seen = [
        hashes(hasher, [1, 2, 3, 4, 5, 6, 7, 8])[1],
        hashes(hasher, [0, 2, 3, 4, 5, 6, 7, 8])[1],
        hashes(hasher, [5, 6, 7, 8])[0],
        hashes(hasher, [1, 2, 3, 4, 5, 6, 7, 8], b"other")[1],
        hashes(LineageHasher(8, KEY), [1, 2, 3, 4, 5, 6, 7, 8])[0],
    ]
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("length", [0, 1, 15, 65])
def test_key_of_a_wrong_length_is_refused(length: int) -> None:
    with pytest.raises(ConfigError, match=f"has {length} bytes; 16 to 64 are allowed"):
        BlockPool(4, 4, hash_key=b"x" * length)


def test_a_growing_sequence_is_hashed_once(hashed: list[bytes]) -> None:
    pool = BlockPool(32, 4)
    tokens = list(range(40))
    blocks = SequenceBlocks(pool)
    for _ in range(5):  # waiting: asked about at each step
        blocks.match_length(tokens)
    blocks.match(tokens)
    assert len(hashed) == 1, "the first block missed: nothing behind it was hashed"
    blocks.reserve(38)
    blocks.commit(38, 38, tokens)
    for i in range(50):
        blocks.reserve(1)
        tokens.append(i)
        blocks.commit(1, 1, tokens)
    assert len(hashed) == len(set(hashed)) == 88 // 4


def test_match_does_not_trust_the_hash_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if two lineages collided, nobody is served another prompt's K/V."""
    monkeypatch.setattr(LineageHasher, "child", lambda self, parent, packed: b"collision" + parent[:7])
    pool = BlockPool(8, 4)
    blocks = SequenceBlocks(pool)
    blocks.reserve(4)
    blocks.commit(4, 4, [1, 2, 3, 4])
    assert SequenceBlocks(pool).match([1, 2, 3, 4, 0]) == 4
    assert SequenceBlocks(pool).match([4, 3, 2, 1, 0]) == 0


def test_prompts_that_begin_alike_are_hashed_once(hashed: list[bytes]) -> None:
    pool, prefix = BlockPool(400, 4), list(range(400))
    for tail in range(5):
        tokens = [*prefix, tail, 1, 2, 3, 4]
        SequenceBlocks(pool).hash_prefix(tokens)
    assert len(hashed) == 100 + 5
    SequenceBlocks(pool).hash_prefix([*prefix[:200], *prefix])
    assert len(hashed) == 105 + 99


def test_a_prompt_that_is_cached_is_not_hashed_again(hashed: list[bytes]) -> None:
    """It is looked up in steps that double: what the last one needs must not be dropped before it."""
    pool, tokens = BlockPool(400, 4), list(range(401))
    for turn in range(3):
        blocks = SequenceBlocks(pool)
        rows = len(tokens) - blocks.match(tokens)
        blocks.reserve(rows)
        blocks.commit(rows, rows, tokens)
        blocks.release()
        assert rows == (1 if turn else 401)
    assert len(set(hashed)) == 100
    assert len(hashed) <= 100 + 2 * 2  # the first two, which are hashed faster than looked for


def test_each_of_many_beginnings_is_hashed_once(hashed: list[bytes]) -> None:
    """Agents whose prompts have a first block in common, coming in turn."""
    pool = BlockPool(400, 4)
    for turn in range(4):
        for agent in range(MAX_RECENT):
            SequenceBlocks(pool).hash_prefix([1, 2, 3, 4, *[agent] * 80, turn, turn, turn, turn, 0])
    assert len(set(hashed)) == 1 + 24 * MAX_RECENT
    assert len(hashed) <= len(set(hashed)) + MAX_RECENT  # the first block at worst once for each


def test_nothing_is_taken_from_another_salt(hashed: list[bytes]) -> None:
    pool, tokens = BlockPool(400, 4), list(range(41))
    SequenceBlocks(pool, salt=b"a").hash_prefix(tokens)
    SequenceBlocks(pool, salt=b"b").hash_prefix(tokens)
    assert len(set(hashed)) == 20


def test_few_chains_are_kept(hashed: list[bytes]) -> None:
    pool = BlockPool(400, 4)
    prompts = [[number] * 9 for number in range(MAX_RECENT + 1)]
    for tokens in (*prompts, prompts[-1], prompts[1]):
        SequenceBlocks(pool).hash_prefix(tokens)
    assert len(hashed) == 2 * len(prompts)
    SequenceBlocks(pool).hash_prefix(prompts[0])
    assert len(hashed) == 2 * len(prompts) + 2


@given(st.data())
def test_hashes_are_the_same_whatever_was_hashed_before(data: st.DataObject) -> None:
    hasher, recent = LineageHasher(2, KEY), RecentChains(2)
    block = st.sampled_from([[0, 0], [0, 1], [1, 0]])
    for _ in range(data.draw(st.integers(2, 20))):
        tokens = sum(data.draw(st.lists(block, max_size=8)), [data.draw(st.integers(0, 1))])
        salt = data.draw(st.sampled_from([b"", b"salt"]))
        chain = LineageChain(hasher, recent, salt)
        for stop in sorted(data.draw(st.lists(st.integers(0, len(tokens) // 2), max_size=3))):
            chain.extend(tokens, stop)
            chain.verify(tokens, 0, stop)
        known = len(chain.hashes)
        assert chain.hashes == hashes(hasher, tokens, salt)[:known]
        assert chain.packed == hasher.pack_blocks(tokens, 0, known)
        for depth, lineage in enumerate(chain.lineages):
            packed = hasher.pack(tokens, depth)
            assert lineage == (depth, chain.hashes[depth], chain.parent(depth), packed)
