"""Paged attention for prefill chunks, decode rows and spans alike.

One program serves a tile of rows of one sequence, all query heads that share one key head, and (with splits)
one range of keys. Rows and heads together are the rows of the matrix products, so that a decode row of
Qwen3-4B fills 4 rows instead of 1. Softmax is online (Milakov & Gimelshein, arXiv:1805.02867;
FlashAttention-2, Dao, arXiv:2307.08691), in base 2 and fp32; keys are split among programs as in
Flash-Decoding (Dao et al., 2023), and the program that finishes last merges what the others left.

The host chooses tile sizes and the number of splits from row counts and bounds; every length is read from
device memory. Nothing waits for the device, and the grid of a layout's shape never changes, so that a launch
can be captured. How many of the splits have work is the device's matter: a short context in a grid made for
long ones is shared by few programs, and the others leave at once.

*Deterministic* attention cuts the keys in chunks at fixed positions, merged in order, whether by one program
or by many; tiles are always of one size. A row then gets the same bits in a prefill chunk, a span, or alone:
blocks and chunks in which it sees no key change nothing, exactly.

A *chain* (``layout.Branches``) finds its keys through the block table of the sequence it branches off, and
from its first position on in consecutive slots of its own; all else is as for any sequence.
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
from paceline.ops.triton.arrival import MAX_COUNTERS, arrive, counters

HEAD_DIMS = (32, 64, 128)
MAX_SPLITS = 64
MIN_SPLIT_KEYS = 128
"""Fewest keys worth a split: below, reading the partial results costs as much as the keys."""

CHUNK_KEYS = 512
"""Keys of a chunk in deterministic attention."""

CHUNK_PROGRAMS = 8192
"""Deterministic attention gives each chunk its own program while there are no more of them than this: each
leaves 32 KiB of partial results.
"""

_LOG2_E = 1.4426950408889634


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
    """

    block_m: int
    block_n: int
    num_splits: int
    num_warps: int
    num_stages: int
    split_keys: int = MIN_SPLIT_KEYS
    chunk_keys: int = 0


@triton.jit
def _attend(
    q, k_cache_ptr, v_cache_ptr, table_ptr, shared, own_slot, kv_head, query_position, begin, end,
    scale_log2, BRANCHES: tl.constexpr, NUM_KV_HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    WINDOW: tl.constexpr, BIDIRECTIONAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention of the tile over the keys begin … end - 1: (result [BLOCK_M, D], log2 of the sum of the
    scores' exponentials [BLOCK_M], -inf where no key is seen).
    """
    column = tl.arange(0, D)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    for first_key in range(begin, end, BLOCK_N):
        key = first_key + tl.arange(0, BLOCK_N)
        exists = key < end
        in_table = exists
        if BRANCHES:
            in_table = exists & (key < shared)
        block = tl.load(table_ptr + key // P, mask=in_table, other=0).to(tl.int64)  # int64: 2^31 elements
        cache_slot = block * P + key % P
        if BRANCHES:
            cache_slot = tl.where(in_table, cache_slot, own_slot + key - shared)
        offset = (cache_slot * NUM_KV_HEADS + kv_head) * D
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
    total = tl.where(any_key, total, 1.0)
    return acc / total[:, None], tl.where(any_key, peak + tl.log2(total), float("-inf"))


@triton.jit
def _merge(peak, total, acc, part, lse):
    """Take one more range's result into a running one. The sums are spelled as fused multiply-adds: wherever
    this is compiled, the bits are the same.
    """
    new_peak = tl.maximum(peak, lse)
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    keep = tl.exp2(peak - shift)
    weight = tl.exp2(lse - shift)
    total = tl.fma(total, keep, weight)
    acc = tl.fma(part, tl.broadcast_to(weight[:, None], part.shape), acc * keep[:, None])
    return new_peak, total, acc


# Not specialised: a new batch size, or a buffer's new alignment, must not compile a new kernel while serving.
@triton.jit(
    do_not_specialize=[
        "slots_ptr",
        "row_start_ptr",
        "num_computed_ptr",
        "own_slots_ptr",
        "block_tables_ptr",
        "num_seqs",
        "num_splits",
        "split_keys",
    ]
)
def _attention_kernel(
    q_ptr,  # [R, H, D]
    k_cache_ptr,  # [num_blocks, P, KV, D]
    v_cache_ptr,
    out_ptr,  # [R, H, D]
    partial_ptr,  # with SPLIT [tiles, KV, splits, BLOCK_M, D] fp32
    lse_ptr,  # with SPLIT [tiles, KV, splits, BLOCK_M] fp32
    counter_ptr,  # with SPLIT [tiles, KV]
    slots_ptr,
    row_start_ptr,
    num_computed_ptr,  # of each slot; with BRANCHES the sequences' own starts, [B]
    own_slots_ptr,  # with BRANCHES [B] int64
    block_tables_ptr,
    table_stride,
    num_seqs,
    num_splits,
    split_keys,
    scale_log2,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    BIDIRECTIONAL: tl.constexpr,
    BRANCHES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SEARCH: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,  # 0: none
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
    if BRANCHES:
        computed = tl.load(num_computed_ptr + seq)
        own_slot = tl.load(own_slots_ptr + seq)
        shared = tl.where(own_slot < 0, 2147483647, computed)  # keys before this position are in the table
    else:
        computed = tl.load(num_computed_ptr + slot)
        own_slot = computed  # neither is used
        shared = computed

    begin = 0
    end = computed + (num_rows if BIDIRECTIONAL else tl.minimum(tile_row + TILE_ROWS, num_rows))
    if WINDOW > 0:
        begin = tl.maximum(computed + tile_row - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    active = 1  # splits that have work
    first_chunk = 0
    if CHUNK > 0:
        first_chunk = begin // CHUNK
    if SPLIT:
        if CHUNK > 0:
            active = tl.cdiv(end, CHUNK) - first_chunk
        else:
            # a whole number of blocks
            split_keys = tl.maximum(tl.cdiv(end - begin, num_splits), split_keys)
            split_keys = tl.cdiv(split_keys, BLOCK_N) * BLOCK_N
            active = tl.cdiv(end - begin, split_keys)
        if split >= active:
            return

    m = tl.arange(0, BLOCK_M)
    row = tile_row + m // GROUP
    head = kv_head * GROUP + m % GROUP
    served = (m < TILE_ROWS * GROUP) & (row < num_rows)
    query_position = computed + row
    column = tl.arange(0, D)
    out_row = (first_row + row).to(tl.int64) * NUM_HEADS + head
    at = out_row[:, None] * D + column[None, :]
    q = tl.load(q_ptr + at, mask=served[:, None], other=0.0)
    table_ptr = block_tables_ptr + slot * table_stride

    if CHUNK > 0 and not SPLIT:
        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, D), tl.float32)
        for chunk in range(first_chunk, tl.cdiv(end, CHUNK)):
            part, lse = _attend(
                q, k_cache_ptr, v_cache_ptr, table_ptr, shared, own_slot, kv_head, query_position,
                tl.maximum(begin, chunk * CHUNK), tl.minimum(end, chunk * CHUNK + CHUNK), scale_log2,
                BRANCHES, NUM_KV_HEADS, D, P, WINDOW, BIDIRECTIONAL, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            peak, total, acc = _merge(peak, total, acc, part, lse)
        out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    else:
        if CHUNK > 0:
            start = (first_chunk + split) * CHUNK
            end = tl.minimum(end, start + CHUNK)
            begin = tl.maximum(begin, start)
        elif SPLIT:
            begin += split * split_keys
            end = tl.minimum(end, begin + split_keys)
        out, lse = _attend(
            q, k_cache_ptr, v_cache_ptr, table_ptr, shared, own_slot, kv_head, query_position, begin, end,
            scale_log2, BRANCHES, NUM_KV_HEADS, D, P, WINDOW, BIDIRECTIONAL, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    if SPLIT:
        result = tile * NUM_KV_HEADS + kv_head
        last = active == 1
        m_at = result.to(tl.int64) * num_splits * BLOCK_M + m
        if active > 1:
            mine = m_at + split * BLOCK_M
            tl.store(lse_ptr + mine, lse)
            tl.store(partial_ptr + mine[:, None] * D + column[None, :], out)
            last = arrive(counter_ptr + result, active)
        if not last:
            return
        if active > 1:
            peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            acc = tl.zeros((BLOCK_M, D), tl.float32)
            for i in range(active):
                other = m_at + i * BLOCK_M
                part_lse = tl.load(lse_ptr + other, cache_modifier=".cg")
                part = tl.load(partial_ptr + other[:, None] * D + column[None, :], cache_modifier=".cg")
                peak, total, acc = _merge(peak, total, acc, part, part_lse)
            out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=served[:, None])


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


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    layout: RowLayout,
    scale: float,
    window: int | None = None,
    bidirectional: bool = False,
    *,
    deterministic: bool = False,
    config: AttentionConfig | None = None,
) -> Tensor:
    """See :func:`paceline.ops.paged_attention`.

    With splits, fp32 partial results take tiles * KV * splits * block_m * (D + 1) * 4 bytes for the time of
    the call.

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
        if deterministic:
            config = fixed_config(layout, num_rows, group, num_kv_heads, q.dtype)
        else:
            config = choose_config(layout, num_rows, group, num_kv_heads, q.dtype, _num_processors(q.device))
    splits, tile_rows, branches = config.num_splits, config.block_m // group, layout.branches
    tiles = num_tiles(layout, num_rows, tile_rows)
    partial = lse = out
    if splits > 1:
        shape = (tiles, num_kv_heads, splits, config.block_m)
        assert tiles * num_kv_heads <= MAX_COUNTERS
        partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    _attention_kernel[(tiles, num_kv_heads, splits)](
        q,
        k_cache,
        v_cache,
        out,
        partial,
        lse,
        counters(q.device),
        layout.slots,
        layout.row_start,
        layout.num_computed if branches is None else branches.starts,
        layout.slots if branches is None else branches.own_slots,
        layout.block_tables,
        layout.block_tables.stride(0),
        len(layout.host_rows),
        splits,
        config.split_keys,
        scale * _LOG2_E,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        D=head_dim,
        P=block_size,
        WINDOW=window or 0,
        BIDIRECTIONAL=bidirectional,
        BRANCHES=branches is not None,
        TILE_ROWS=tile_rows,
        SEARCH=max(layout.host_rows) > tile_rows,
        SPLIT=splits > 1,
        CHUNK=config.chunk_keys,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out
