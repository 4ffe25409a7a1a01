"""Block pool, lineage hashes, prefix index and the per-sequence block transaction. Pure Python."""

from paceline.cache.events import BlockEvent, BlockRemoved, BlockStored, CacheCleared
from paceline.cache.lineage import LineageChain
from paceline.cache.pool import BlockPool
from paceline.cache.sequence import SequenceBlocks

__all__ = [
    "BlockEvent",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "CacheCleared",
    "LineageChain",
    "SequenceBlocks",
]
