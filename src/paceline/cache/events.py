"""What the prefix cache tells a router: enough to know, from outside, which prefixes a replica holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A full block became matchable, or the lineage it holds moved to another block.

    Attributes:
        hash: 16-byte lineage hash. Seen before and not removed since: only ``block_id`` is new.
        parent_hash: hash of the block before it; the salt's root hash for the first block.
        tokens: the block's own token ids, ``block_size`` of them.
        block_id: where its K/V lie.
    """

    hash: bytes
    parent_hash: bytes
    tokens: tuple[int, ...]
    block_id: int


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A block was reused: its lineage can no longer be matched. Children are removed before their parents.

    Attributes:
        hash: 16-byte lineage hash.
        block_id: where its K/V lay.
    """

    hash: bytes
    block_id: int


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """All cached content was dropped at once."""


BlockEvent = BlockStored | BlockRemoved | CacheCleared
