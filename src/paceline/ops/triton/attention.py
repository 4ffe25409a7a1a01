"""Paged attention for prefill chunks, decode rows and spans alike.

One program serves a tile of rows of one sequence, all query heads that share one key head, and (with splits)
one range of keys. Rows and heads together are the rows of the matrix products, so that a decode row of
Qwen3-4B fills 4 rows instead of 1. Softmax is online (Milakov & Gimelshein, arXiv:1805.02867;
FlashAttention-2, Dao, arXiv:2307.08691), in base 2 and fp32; keys are split among programs as in
Flash-Decoding (Dao et al., 2023).

The host chooses tile sizes and the number of splits from row counts and bounds; every length is read from
device memory. Nothing waits for the device, and the grid of a layout's shape never changes, so that a launch
can be captured.

Seam: a row tree's ancestor mask would be one more term of ``visible``, for keys at or above the sequence's
``num_computed``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.errors import ConfigError
from paceline.ops.layout import RowLayout

HEAD_DIMS = (32, 64, 128)
MAX_SPLITS = 64
MIN_SPLIT_KEYS = 128
"""Fewest keys worth a split: below, reading the partial results costs as much as the keys."""

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class AttentionConfig:
    """How a launch is cut up.

    Attributes:
        block_m: rows of the score tile, a power of two, at least 16: tile_rows * (H / KV) of them are used.
        block_n: keys per iteration, a power of two, at least 16.
        num_splits: programs that share the keys of one tile.
        num_warps, num_stages: of the main kernel.
    """

    block_m: int
    block_n: int
    num_splits: int
    num_warps: int
    num_stages: int


# Not specialised: a new batch size, or a buffer's new alignment, must not compile a new kernel while serving.
@triton.jit(
    do_not_specialize=[
        "slots_ptr",
        "row_start_ptr",
        "num_computed_ptr",
        "block_tables_ptr",
        "num_seqs",
        "num_splits",
    ]
)
def _attention_kernel(
    q_ptr,  # [R, H, D]
    k_cache_ptr,  # [num_blocks, P, KV, D]
    v_cache_ptr,
    out_ptr,  # [R, H, D], or with SPLIT [R, H, splits, D] fp32
    lse_ptr,  # with SPLIT [R, H, splits] fp32, base 2; -inf where a split holds no visible key
    slots_ptr,
    row_start_ptr,
    num_computed_ptr,
    block_tables_ptr,
    table_stride,
    num_seqs,
    num_splits,
    scale_log2,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    BIDIRECTIONAL: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SEARCH: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)

    # the tile's sequence and first row in it; see RowLayout
    if SEARCH:
        seq = tl.full((), 0, tl.int32)
        above = tl.full((), 1, tl.int32) * num_seqs
        while above - seq > 1:
            middle = (seq + above) // 2
            starts_before = tl.load(row_start_ptr + middle) // TILE_ROWS + middle <= tile
            seq = tl.where(starts_before, middle, seq)
            above = tl.where(starts_before, above, middle)
        first_row = tl.load(row_start_ptr + seq)
        tile_row = (tile - first_row // TILE_ROWS - seq) * TILE_ROWS
    else:
        seq = tile
        first_row = tl.load(row_start_ptr + seq)
        tile_row = 0
    num_rows = tl.load(row_start_ptr + seq + 1) - first_row
    if tile_row >= num_rows:
        return
    slot = tl.load(slots_ptr + seq).to(tl.int64)
    computed = tl.load(num_computed_ptr + slot)

    m = tl.arange(0, BLOCK_M)
    row = tile_row + m // GROUP
    head = kv_head * GROUP + m % GROUP
    served = (m < TILE_ROWS * GROUP) & (row < num_rows)
    query_position = computed + row
    column = tl.arange(0, D)
    out_row = (first_row + row).to(tl.int64) * NUM_HEADS + head
    q = tl.load(q_ptr + out_row[:, None] * D + column[None, :], mask=served[:, None], other=0.0)

    begin = 0
    end = computed + (num_rows if BIDIRECTIONAL else tl.minimum(tile_row + TILE_ROWS, num_rows))
    if WINDOW > 0:
        begin = tl.maximum(computed + tile_row - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    if SPLIT:
        split_keys = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), num_splits) * BLOCK_N
        begin += split * split_keys
        end = tl.minimum(end, begin + split_keys)

    table_ptr = block_tables_ptr + slot * table_stride
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    for first_key in range(begin, end, BLOCK_N):
        key = first_key + tl.arange(0, BLOCK_N)
        exists = key < end
        block = tl.load(table_ptr + key // P, mask=exists, other=0).to(tl.int64)  # int64: 2^31 elements
        offset = ((block * P + key % P) * NUM_KV_HEADS + kv_head) * D
        address = offset[:, None] + column[None, :]
        k = tl.load(k_cache_ptr + address, mask=exists[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2  # [BLOCK_M, BLOCK_N]
        visible = exists[None, :]
        if not BIDIRECTIONAL:
            visible = visible & (key[None, :] <= query_position[:, None])
        if WINDOW > 0:
            visible = visible & (key[None, :] > query_position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # -inf - -inf is NaN: nothing seen yet
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(weights, axis=1)
        v = tl.load(v_cache_ptr + address, mask=exists[:, None], other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        peak = new_peak

    any_key = total > 0.0
    acc = acc / tl.where(any_key, total, 1.0)[:, None]
    if SPLIT:
        out_row = out_row * num_splits + split
        lse = tl.where(any_key, peak + tl.log2(tl.where(any_key, total, 1.0)), float("-inf"))
        tl.store(lse_ptr + out_row, lse, mask=served)
        # what holds no key is not stored: the combine never reads it
        served = served & any_key
    tl.store(
        out_ptr + out_row[:, None] * D + column[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=served[:, None],
    )


@triton.jit(do_not_specialize=["row_start_ptr", "num_seqs", "num_splits"])
def _combine_kernel(
    partial_ptr,  # [R * H, splits, D] fp32
    lse_ptr,  # [R * H, splits]
    out_ptr,  # [R * H, D]
    row_start_ptr,
    num_seqs,
    num_splits,
    NUM_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(row_start_ptr + num_seqs) * NUM_HEADS:  # padding: no partial results were written
        return
    split = tl.arange(0, BLOCK_SPLITS)
    column = tl.arange(0, D)
    lse = tl.load(lse_ptr + row * num_splits + split, mask=split < num_splits, other=float("-inf"))
    weight = tl.exp2(lse - tl.max(lse, axis=0))
    weight = weight / tl.sum(weight, axis=0)
    holds_keys = (lse > float("-inf"))[:, None]
    partial_at = (row * num_splits + split)[:, None] * D + column[None, :]
    partial = tl.load(partial_ptr + partial_at, mask=holds_keys, other=0.0)
    out = tl.sum(partial * weight[:, None], axis=0)
    tl.store(out_ptr + row * D + column, out.to(out_ptr.dtype.element_ty))


@lru_cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def choose_config(
    layout: RowLayout, num_rows: int, group: int, num_kv_heads: int, dtype: torch.dtype, num_processors: int
) -> AttentionConfig:
    """Tile sizes and splits from what the host knows: row counts, bounds and the device; never lengths.

    Splits fill the device when there are few tiles: a decode row of Qwen3-4B is 8 programs, an H200 has 132
    processors.

    Args:
        num_rows: R.
        group: query heads per key head.
        num_processors: streaming multiprocessors of the device.
    """
    wide = dtype == torch.float32  # no tensor cores: larger tiles only spill registers
    packed = max(layout.host_rows) * group
    largest = max(64 if wide or packed <= 64 else 128, group)
    block_m = triton.next_power_of_2(max(16, min(packed, largest)))
    block_n = 32 if wide else 64
    tiles = num_tiles(layout, num_rows, block_m // group) * num_kv_heads
    fill = 2 * num_processors // max(tiles, 1)
    enough = -(-layout.host_max_context // MIN_SPLIT_KEYS)
    return AttentionConfig(
        block_m=block_m,
        block_n=block_n,
        num_splits=max(1, min(fill, enough, MAX_SPLITS)),
        num_warps=4 if block_m <= 64 else 8,
        num_stages=2 if wide else 3,
    )


def num_tiles(layout: RowLayout, num_rows: int, tile_rows: int) -> int:
    """Programs along the first axis of the grid: an upper bound of the tiles of a layout; see RowLayout."""
    num_seqs = len(layout.host_rows)
    if max(layout.host_rows) <= tile_rows:
        return num_seqs
    return num_rows // tile_rows + num_seqs


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    layout: RowLayout,
    scale: float,
    window: int | None = None,
    bidirectional: bool = False,
    config: AttentionConfig | None = None,
) -> Tensor:
    """See :func:`paceline.ops.paged_attention`.

    With splits, fp32 partial results take R * H * splits * (D + 1) * 4 bytes for the time of the call.

    Args:
        config: how to cut the work up; chosen by :func:`choose_config` when None.

    Raises:
        ConfigError: the head size or the mix of dtypes has no kernel.
    """
    num_rows, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    if head_dim not in HEAD_DIMS:
        raise ConfigError(
            f"head_dim {head_dim} has no GPU attention kernel; allowed: {', '.join(map(str, HEAD_DIMS))}. "
            "Run this model on the CPU instead."
        )
    if not q.dtype == k_cache.dtype == v_cache.dtype:
        raise ConfigError(
            f"GPU attention needs the KV cache in the model's dtype: q is {q.dtype}, the cache is "
            f"{k_cache.dtype} and {v_cache.dtype}. Allocate the cache as {q.dtype}."
        )
    assert q.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()
    out = torch.empty_like(q)
    if num_rows == 0 or not layout.host_rows:
        return out
    group = num_heads // num_kv_heads
    if config is None:
        config = choose_config(layout, num_rows, group, num_kv_heads, q.dtype, _num_processors(q.device))
    splits, tile_rows = config.num_splits, config.block_m // group
    if splits > 1:
        partial = torch.empty((num_rows, num_heads, splits, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((num_rows, num_heads, splits), dtype=torch.float32, device=q.device)
    else:
        partial = lse = out
    _attention_kernel[(num_tiles(layout, num_rows, tile_rows), num_kv_heads, splits)](
        q,
        k_cache,
        v_cache,
        partial,
        lse,
        layout.slots,
        layout.row_start,
        layout.num_computed,
        layout.block_tables,
        layout.block_tables.stride(0),
        len(layout.host_rows),
        splits,
        scale * _LOG2_E,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        D=head_dim,
        P=block_size,
        WINDOW=window or 0,
        BIDIRECTIONAL=bidirectional,
        TILE_ROWS=tile_rows,
        SEARCH=max(layout.host_rows) > tile_rows,
        SPLIT=splits > 1,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if splits > 1:
        _combine_kernel[(num_rows * num_heads,)](
            partial,
            lse,
            out,
            layout.row_start,
            len(layout.host_rows),
            splits,
            NUM_HEADS=num_heads,
            D=head_dim,
            BLOCK_SPLITS=triton.next_power_of_2(splits),
            num_warps=4,
        )
    return out
