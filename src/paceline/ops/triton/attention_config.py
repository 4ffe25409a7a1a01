"""How attention is cut up among programs: tiles, splits of the keys, stages. Pure logic.

Chosen on the host from row counts and bounds, never from lengths, so that a launch can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from paceline.ops.layout import RowLayout

MAX_SPLITS = 16
MIN_SPLIT_KEYS = 320
"""Fewest keys worth a split: below, leaving and reading partial results costs as much as the keys."""

CHUNK_KEYS = 512
"""Keys of a chunk in deterministic attention."""

CHUNK_PROGRAMS = 8192
"""Deterministic attention gives each chunk its own program while there are no more of them than this: each
leaves 32 KiB of partial results.
"""


@dataclass(frozen=True)
class AttentionConfig:
    """How a launch is cut up.

    Attributes:
        block_m: rows of the score tile, a power of two, at least 16: tile_rows * (H / KV) of them are used.
        block_n: keys per iteration, a power of two, at least 16.
        num_splits: programs that share the keys of one tile, at most.
        num_warps, num_stages: of the kernel.
        split_keys: fewest keys of a split.
        chunk_keys: keys are summed in chunks of so many, counted from position 0, one for each split when
            there are splits; 0: as it comes. A multiple of block_n.
        whole: blocks of keys that all rows of a tile see run in a loop of their own, without masks.
    """

    block_m: int
    block_n: int
    num_splits: int
    num_warps: int
    num_stages: int
    split_keys: int = MIN_SPLIT_KEYS
    chunk_keys: int = 0
    whole: bool = False


def choose_config(
    layout: RowLayout, num_rows: int, group: int, num_kv_heads: int, dtype: torch.dtype, num_processors: int
) -> AttentionConfig:
    """Tile sizes and splits from what the host knows: row counts, bounds and the device; never lengths.

    Splits fill the device when there are few tiles: a decode row of Qwen3-4B is 8 programs, an H200 has 132
    processors. Where they do not, the tensor core's own 64 rows are best even half filled. A third stage in
    shared memory pays as long as all programs still fit on the device at once. (One H200, 1 to 128 sequences
    of 1, 8 and 16 rows at 200 to 4,000 tokens.)

    Args:
        num_rows: R.
        group: query heads per key head.
        num_processors: streaming multiprocessors of the device.
    """
    wide = dtype == torch.float32  # no tensor cores: larger tiles only spill registers
    packed = (layout.host_span or max(layout.host_rows)) * group
    largest = max(64 if wide or packed <= 64 else 128, group)
    block_m = triton.next_power_of_2(max(16, min(packed, largest)))
    # Of spans that are bounded for the sake of a few, most are one tile, and rows that are nobody's none.
    bounded = layout.host_span is not None
    tiles = len(layout.host_rows) if bounded else num_tiles(layout, num_rows, block_m // group)
    programs = tiles * num_kv_heads
    fill = 2 * num_processors // max(programs, 1)
    enough = -(-layout.host_max_context // MIN_SPLIT_KEYS)
    num_splits = max(1, min(fill, enough, MAX_SPLITS))
    if block_m == 32 and fill <= 1 and not wide:
        block_m = 64
    crowded = block_m == 16 and programs > 3 * num_processors
    return AttentionConfig(
        block_m=block_m,
        block_n=32 if wide else 64,
        num_splits=num_splits,
        num_warps=4 if block_m <= 64 else 8,
        num_stages=2 if wide or crowded else 3,
        whole=block_m > 64,
    )


def common_config(
    num_rows: int, group: int, num_kv_heads: int, dtype: torch.dtype, num_processors: int
) -> AttentionConfig:
    """How attention over common keys is cut: tiles that the rows of many sequences fill, and splits that make
    the device run full, two programs on a processor, until the last are done.
    """
    wide = dtype == torch.float32
    block_m = max(64, triton.next_power_of_2(group))
    programs = -(-num_rows * group // block_m) * num_kv_heads

    def cost(splits: int) -> float:
        turns = -(-programs * splits // (2 * num_processors))
        return turns / splits * (1 + 0.03 * splits)  # what a split costs itself

    return AttentionConfig(
        block_m=block_m,
        block_n=32 if wide else 64,
        num_splits=min(range(1, 9), key=cost),
        num_warps=4,
        num_stages=2 if wide else 3,
        whole=True,
    )


def fixed_config(
    layout: RowLayout, num_rows: int, group: int, num_kv_heads: int, dtype: torch.dtype
) -> AttentionConfig:
    """How deterministic attention cuts the work: tiles and chunks of one size. Chunks share a program where
    there are many tiles, which fill the device without it.
    """
    block_m = max(64, triton.next_power_of_2(group))
    block_n = 32 if dtype == torch.float32 else 64
    tiles = num_tiles(layout, num_rows, block_m // group) * num_kv_heads
    chunks = -(-layout.host_max_context // CHUNK_KEYS)
    return AttentionConfig(
        block_m=block_m,
        block_n=block_n,
        num_splits=1 if tiles * chunks > CHUNK_PROGRAMS else chunks,
        num_warps=4,
        num_stages=2,
        chunk_keys=CHUNK_KEYS,
    )


def num_tiles(layout: RowLayout, num_rows: int, tile_rows: int) -> int:
    """Programs along the first axis of the grid: an upper bound of the tiles of a layout; see RowLayout."""
    num_seqs = len(layout.host_rows)
    if max(layout.host_rows) <= tile_rows:
        return num_seqs
    return num_rows // tile_rows + num_seqs
