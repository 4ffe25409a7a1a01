"""Lineage hashes: keyed, chained, salted, and computed once per block."""

from __future__ import annotations

import hashlib

import pytest

from paceline.cache import BlockPool, LineageChain, SequenceBlocks
from paceline.cache.lineage import LineageHasher
from paceline.errors import ConfigError

KEY = bytes(range(32))


def hashes(hasher: LineageHasher, tokens: list[int], salt: bytes = b"") -> list[bytes]:
    chain = LineageChain(hasher, salt)
    chain.extend(tokens, len(tokens) // hasher.block_size)
    return chain.hashes


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


def test_a_growing_sequence_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    child = LineageHasher.child

    def counting(self: LineageHasher, parent: bytes, packed: bytes) -> bytes:
        calls.append(parent + packed)
        return child(self, parent, packed)

    monkeypatch.setattr(LineageHasher, "child", counting)
    pool = BlockPool(32, 4)
    tokens = list(range(40))
    blocks = SequenceBlocks(pool)
    for _ in range(5):  # waiting: asked about at each step
        blocks.match_length(tokens)
    blocks.match(tokens)
    assert len(calls) == 1, "the first block missed: nothing behind it was hashed"
    blocks.reserve(38)
    blocks.commit(38, 38, tokens)
    for i in range(50):
        blocks.reserve(1)
        tokens.append(i)
        blocks.commit(1, 1, tokens)
    assert len(calls) == len(set(calls)) == 88 // 4


def test_match_does_not_trust_the_hash_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if two lineages collided, nobody is served another prompt's K/V."""
    monkeypatch.setattr(LineageHasher, "child", lambda self, parent, packed: b"collision" + parent[:7])
    pool = BlockPool(8, 4)
    blocks = SequenceBlocks(pool)
    blocks.reserve(4)
    blocks.commit(4, 4, [1, 2, 3, 4])
    assert SequenceBlocks(pool).match([1, 2, 3, 4, 0]) == 4
    assert SequenceBlocks(pool).match([4, 3, 2, 1, 0]) == 0
