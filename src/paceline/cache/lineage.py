"""Identity of cached blocks: keyed 128-bit hashes over a block's whole lineage."""

from __future__ import annotations

import hashlib
import secrets
import struct
from array import array
from collections.abc import Sequence

from paceline.errors import ConfigError, InvariantError

HASH_BYTES = 16
MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 64  # above 64, BLAKE2b takes no key


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


class LineageChain:
    """The hashes of one growing sequence's full blocks. Each block is hashed once.

    The chain remembers what it has hashed, so every call must be given the tokens of the same sequence, from
    its start; ``verify`` says whether that was so.

    Attributes:
        root: the salt's hash, parent of block 0.
        hashes: hash of each hashed block, in order.
        packed: its tokens, packed.
    """

    __slots__ = ("_hasher", "hashes", "packed", "root")

    def __init__(self, hasher: LineageHasher, salt: bytes = b"") -> None:
        self._hasher = hasher
        self.root = hasher.root(salt)
        self.hashes: list[bytes] = []
        self.packed: list[bytes] = []

    def extend(self, tokens: Sequence[int], num_blocks: int) -> None:
        """Hash what is missing so that the first ``num_blocks`` blocks of ``tokens`` are covered."""
        hasher, hashes = self._hasher, self.hashes
        if len(hashes) >= num_blocks:
            return
        parent = hashes[-1] if hashes else self.root
        content, size = hasher.pack_blocks(tokens, len(hashes), num_blocks), 4 * hasher.block_size
        for first in range(0, len(content), size):
            packed = content[first : first + size]
            parent = hasher.child(parent, packed)
            hashes.append(parent)
            self.packed.append(packed)

    def parent(self, index: int) -> bytes:
        """Hash of the block before block ``index``."""
        return self.hashes[index - 1] if index else self.root

    def verify(self, tokens: Sequence[int], start: int, stop: int) -> None:
        """Raise InvariantError unless blocks ``start`` to ``stop`` were hashed from these very tokens."""
        hashed = b"".join(self.packed[start:stop])
        if not hashed or self._hasher.pack_blocks(tokens, start, stop) == hashed:
            return
        for index in range(start, stop):
            packed = self._hasher.pack(tokens, index)
            if packed != self.packed[index]:
                before, now = self._hasher.unpack(self.packed[index]), self._hasher.unpack(packed)
                raise InvariantError(
                    f"the tokens of block {index} changed after it was hashed: {before} became {now}"
                )

    def inherit(self, parent: LineageChain, num_blocks: int) -> None:
        """Take over the first ``num_blocks`` hashes of ``parent``, as far as it has them."""
        self.hashes = parent.hashes[:num_blocks]
        self.packed = parent.packed[:num_blocks]
