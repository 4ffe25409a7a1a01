"""Identity of cached blocks: keyed 128-bit hashes over a block's whole lineage."""

from __future__ import annotations

import hashlib
import secrets
import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from paceline.cache.common import common_length
from paceline.errors import ConfigError, InvariantError

HASH_BYTES = 16
MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 64  # above 64, BLAKE2b takes no key
MAX_RECENT = 16
"""Chains kept for others that begin alike: about as many system prompts are in use at a time."""


class LineageHasher:
    """Hashes blocks as ``H(parent hash, the block's tokens)``, starting from ``H(salt)``.

    H is BLAKE2b (RFC 7693) with a key. Without the key nobody can build two prompts that collide, nor learn
    from a hash what somebody else's prompt was.

    Args:
        block_size: tokens per block.
        key: 16 to 64 secret bytes, the same in every process that shall agree on hashes; None draws a fresh
            secret, so that hashes mean nothing outside this process.

    Raises:
        ConfigError: a key of any other length.
    """

    def __init__(self, block_size: int, key: bytes | None = None) -> None:
        if key is None:
            key = secrets.token_bytes(32)
        elif not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
            raise ConfigError(
                f"the cache's hash_key has {len(key)} bytes; {MIN_KEY_BYTES} to {MAX_KEY_BYTES} are allowed. "
                "Give every process that shares hashes the same random key, or leave it unset."
            )
        self.block_size = block_size
        # Copying a keyed state is cheaper than building one: the key's compression round is done once, here.
        self._root_state = hashlib.blake2b(digest_size=HASH_BYTES, key=key, person=b"paceline.root")
        self._block_state = hashlib.blake2b(digest_size=HASH_BYTES, key=key, person=b"paceline.block")
        self._packer = struct.Struct(f"<{block_size}I")

    def root(self, salt: bytes) -> bytes:
        """The hash every lineage under ``salt`` starts from. The block size is part of it."""
        state = self._root_state.copy()
        state.update(self.block_size.to_bytes(4, "little") + salt)
        return state.digest()

    def child(self, parent: bytes, packed: bytes) -> bytes:
        """The hash of a block holding ``packed`` tokens after the lineage ``parent``."""
        state = self._block_state.copy()
        state.update(parent + packed)
        return state.digest()

    def pack_blocks(self, tokens: Sequence[int], start: int, stop: int) -> bytes:
        """Blocks ``start`` to ``stop`` of ``tokens``, packed one after the other; at once if they are an
        array of uint32.

        Raises:
            InvariantError: a block is not full, or holds something that is no token id.
        """
        wanted = tokens[start * self.block_size : stop * self.block_size]
        if isinstance(wanted, array) and len(wanted) == (stop - start) * self.block_size:
            return wanted.tobytes()
        try:
            return struct.pack(f"<{(stop - start) * self.block_size}I", *wanted)
        except struct.error:
            return b"".join(self.pack(tokens, index) for index in range(start, stop))  # names the block

    def pack(self, tokens: Sequence[int], index: int) -> bytes:
        """Block ``index`` of ``tokens`` as little-endian uint32.

        Raises:
            InvariantError: the block is not full, or holds something that is no token id.
        """
        start = index * self.block_size
        try:
            return self._packer.pack(*tokens[start : start + self.block_size])
        except struct.error as error:
            block = list(tokens[start : start + self.block_size])
            raise InvariantError(
                f"block {index} needs {self.block_size} token ids in [0, 2**32), got {block}"
            ) from error

    def unpack(self, packed: bytes) -> tuple[int, ...]:
        """The token ids of one packed block."""
        return self._packer.unpack(packed)


class Lineage(NamedTuple):
    """What a full block holds.

    Attributes:
        depth: blocks before it.
        hash: its 16-byte identity.
        parent: identity of the one before it, or the salt's root hash.
        packed: its tokens, packed.
    """

    depth: int
    hash: bytes
    parent: bytes
    packed: bytes


class LineageChain:
    """The lineages of one growing sequence's full blocks. Each block is hashed once, or taken from a chain
    that was hashed before from the same tokens under the same salt.

    The chain remembers what it has hashed, so every call must be given the tokens of the same sequence, from
    its start; ``verify`` says whether that was so.

    Args:
        hasher: what hashes.
        recent: chains to take from.
        salt: what the lineages start from.

    Attributes:
        root: the salt's hash, parent of block 0.
        hashes: hash of each block that is known, in order.
        lineages: the same blocks.
        packed: their tokens, packed.
    """

    __slots__ = ("_hasher", "_recent", "hashes", "lineages", "packed", "root")

    def __init__(self, hasher: LineageHasher, recent: RecentChains, salt: bytes = b"") -> None:
        self._hasher = hasher
        self._recent = recent
        self.root = hasher.root(salt)
        self.hashes: list[bytes] = []
        self.lineages: list[Lineage] = []
        self.packed = bytearray()

    def extend(self, tokens: Sequence[int], num_blocks: int) -> None:
        """See to it that at least the first ``num_blocks`` blocks of ``tokens`` are known."""
        missing = num_blocks - len(self.hashes)
        if missing > 1:  # one more block is hashed faster than looked for
            self._recent.take_over(self, self._hasher.pack_blocks(tokens, 0, num_blocks))
        if num_blocks > len(self.hashes):
            self._hash(tokens, num_blocks)
            if missing > 1:
                self._recent.add(self)

    def _hash(self, tokens: Sequence[int], num_blocks: int) -> None:
        hasher, hashes, lineages = self._hasher, self.hashes, self.lineages
        known, size = len(hashes), 4 * hasher.block_size
        content = hasher.pack_blocks(tokens, known, num_blocks)
        parent = self.parent(known)
        for index in range(known, num_blocks):
            first = (index - known) * size
            packed = content[first : first + size]
            hash_ = hasher.child(parent, packed)
            hashes.append(hash_)
            lineages.append(Lineage(index, hash_, parent, packed))
            parent = hash_
        self.packed += content

    def parent(self, index: int) -> bytes:
        """Hash of the block before block ``index``."""
        return self.hashes[index - 1] if index else self.root

    def verify(self, tokens: Sequence[int], start: int, stop: int) -> None:
        """Raise InvariantError unless blocks ``start`` to ``stop`` were hashed from these very tokens."""
        hasher, size = self._hasher, 4 * self._hasher.block_size
        if self.packed[start * size : stop * size] == hasher.pack_blocks(tokens, start, stop):
            return
        for lineage in self.lineages[start:stop]:
            packed = hasher.pack(tokens, lineage.depth)
            if packed != lineage.packed:
                before, now = hasher.unpack(lineage.packed), hasher.unpack(packed)
                raise InvariantError(
                    f"the tokens of block {lineage.depth} changed after it was hashed: {before} became {now}"
                )

    def inherit(self, other: LineageChain, num_blocks: int) -> None:
        """Know what ``other`` knows of its first ``num_blocks`` blocks, in place of what is known so far."""
        self.hashes = other.hashes[:num_blocks]
        self.lineages = other.lineages[:num_blocks]
        self.packed = other.packed[: num_blocks * 4 * self._hasher.block_size]


class RecentChains:
    """The chains that were hashed last, for prompts that begin like one of them: finding out how far two
    prompts agree is far cheaper than hashing them.

    Of prompts that are alike the last is kept, so that a few suffice.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._size = 4 * block_size
        self._chains: list[LineageChain] = []  # the oldest first

    def take_over(self, chain: LineageChain, packed: bytes) -> None:
        """Let ``chain``, whose tokens begin with ``packed``, inherit as many blocks as any chain has of them,
        if it does not know as many.

        A chain that has them all is kept: it may have what comes next as well. One that has some of them is
        dropped if ``chain`` is alike, which is to be added once the others are hashed.
        """
        best, most = None, len(chain.hashes)
        for other in reversed(self._chains):
            more = slice((most + 1) * self._size)
            if other.root == chain.root and other.packed[more] == packed[more]:
                best, most = other, common_length(other.packed, packed) // self._size
        if best is not None:
            chain.inherit(best, most)
            if most * self._size == len(packed):
                self.add(best)
            elif 2 * most >= len(best.hashes):
                self._chains.remove(best)

    def add(self, chain: LineageChain) -> None:
        """Keep a chain as the newest, at the cost of the oldest."""
        if chain in self._chains:
            self._chains.remove(chain)
        self._chains.append(chain)
        del self._chains[:-MAX_RECENT]
