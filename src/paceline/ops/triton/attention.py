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

from dataclasses import replace
from functools import lru_cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.errors import ConfigError
from paceline.ops.layout import RowLayout
from paceline.ops.triton.arrival import MAX_COUNTERS, arrive, counters
from paceline.ops.triton.attention_config import (
    AttentionConfig,
    choose_config,
    common_config,
    fixed_config,
    num_tiles,
)
from paceline.ops.triton.dependent import EARLY_ROWS, await_previous, dependent_launch
from paceline.ops.triton.prompt_attention import prompt_attention
from paceline.ops.triton.tiles import sequence_of

HEAD_DIMS = (32, 64, 128)
_LOG2_E = 1.4426950408889634

ALONE, COMMON, REST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What a launch does: all keys of every row; keys common to neighbours; the others, after those."""


@triton.jit
def _normed(peak, total, acc):
    """What a running softmax comes to: the weighted mean, and log2 of the sum of exponentials."""
    any_key = total > 0.0
    total = tl.where(any_key, total, 1.0)
    return acc / total[:, None], tl.where(any_key, peak + tl.log2(total), float("-inf"))


@triton.jit
def _blocks(
    table_ptr, first_key, end, shared, BRANCHES: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Block ids of the keys from first_key on that are in the table."""
    key = first_key + tl.arange(0, BLOCK_N)
    in_table = key < end
    if BRANCHES:
        in_table = in_table & (key < shared)
    return tl.load(table_ptr + key // P, mask=in_table, other=0)


@triton.jit
def _add_keys(
    peak, total, acc, first_key, end, block,
    q, k_cache_ptr, v_cache_ptr, shared, own_slot, kv_head, query_position, scale_log2,
    WHOLE: tl.constexpr, BRANCHES: tl.constexpr, NUM_KV_HEADS: tl.constexpr, D: tl.constexpr,
    P: tl.constexpr, WINDOW: tl.constexpr, BIDIRECTIONAL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Take the keys first_key … first_key + BLOCK_N - 1, those before ``end``, into a running softmax. Of a
    WHOLE block every row sees every key, and nothing is masked.
    """
    column = tl.arange(0, D)
    key = first_key + tl.arange(0, BLOCK_N)
    exists = key < end
    cache_slot = block.to(tl.int64) * P + key % P  # int64: a cache may exceed 2^31 elements
    if BRANCHES and not WHOLE:
        cache_slot = tl.where(key < shared, cache_slot, own_slot + key - shared)
    address = ((cache_slot * NUM_KV_HEADS + kv_head) * D)[:, None] + column[None, :]
    if WHOLE:
        k = tl.load(k_cache_ptr + address)
    else:
        k = tl.load(k_cache_ptr + address, mask=exists[:, None], other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2  # [BLOCK_M, BLOCK_N]
    if not WHOLE:
        visible = exists[None, :]
        if not BIDIRECTIONAL:
            visible = visible & (key[None, :] <= query_position[:, None])
        if WINDOW > 0:
            visible = visible & (key[None, :] > query_position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    shift = new_peak
    if not WHOLE:
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # -inf - -inf is NaN: nothing seen yet
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(peak - shift)
    total = total * decay + tl.sum(weights, axis=1)
    if WHOLE:
        v = tl.load(v_cache_ptr + address)
    else:
        v = tl.load(v_cache_ptr + address, mask=exists[:, None], other=0.0)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return new_peak, total, acc


@triton.jit
def _attend(
    q, k_cache_ptr, v_cache_ptr, table_ptr, shared, own_slot, kv_head, query_position, begin, whole, end,
    scale_log2, WHOLE: tl.constexpr, BRANCHES: tl.constexpr, NUM_KV_HEADS: tl.constexpr, D: tl.constexpr,
    P: tl.constexpr, WINDOW: tl.constexpr, BIDIRECTIONAL: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention of the tile over the keys begin … end - 1: (result [BLOCK_M, D], log2 of the sum of the
    scores' exponentials [BLOCK_M], -inf where no key is seen). Keys before ``whole`` are seen by every row,
    which WHOLE makes use of.
    """
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    # Block ids are loaded one turn ahead: where loads wait for a load of the same turn, Triton deals its
    # stages out among the two, and fewer keys are under way.
    block = _blocks(table_ptr, begin, end, shared, BRANCHES, P, BLOCK_N)
    if WHOLE:
        first_mixed = begin + tl.maximum(tl.minimum(whole, end) - begin, 0) // BLOCK_N * BLOCK_N
        for first_key in range(begin, first_mixed, BLOCK_N):
            peak, total, acc = _add_keys(
                peak, total, acc, first_key, end, block,
                q, k_cache_ptr, v_cache_ptr, shared, own_slot, kv_head, query_position, scale_log2,
                True, BRANCHES, NUM_KV_HEADS, D, P, WINDOW, BIDIRECTIONAL, BLOCK_N,
            )  # fmt: skip
            block = _blocks(table_ptr, first_key + BLOCK_N, end, shared, BRANCHES, P, BLOCK_N)
        begin = first_mixed
    for first_key in range(begin, end, BLOCK_N):
        peak, total, acc = _add_keys(
            peak, total, acc, first_key, end, block,
            q, k_cache_ptr, v_cache_ptr, shared, own_slot, kv_head, query_position, scale_log2,
            False, BRANCHES, NUM_KV_HEADS, D, P, WINDOW, BIDIRECTIONAL, BLOCK_N,
        )  # fmt: skip
        block = _blocks(table_ptr, first_key + BLOCK_N, end, shared, BRANCHES, P, BLOCK_N)
    return _normed(peak, total, acc)


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
        "prefix_ptr",
        "block_tables_ptr",
        "num_seqs",
        "table_stride",
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
    prefix_ptr,  # in the roles COMMON and REST: [B] int32, keys of each sequence that are common
    prefix_out_ptr,  # and what COMMON leaves to REST: [R, H, D] fp32
    prefix_lse_ptr,  # [R, H] fp32
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
    ROLE: tl.constexpr,
    WHOLE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SEARCH: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,  # 0: none
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_previous(DEPENDENT)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    # a prompt's last rows see the most keys: where tiles wait for each other, they come first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)

    # the tile's sequence and first row in it; see RowLayout
    seq = sequence_of(tile, row_start_ptr, num_seqs, TILE_ROWS) if SEARCH else tile
    # loads that need nothing but ``seq`` come together: each that waits for another costs half a microsecond
    first_row = tl.load(row_start_ptr + seq)
    num_rows = tl.load(row_start_ptr + seq + 1) - first_row
    slot = tl.load(slots_ptr + seq).to(tl.int64)
    prefix = 0
    if ROLE != ALONE:
        prefix = tl.load(prefix_ptr + seq)
    if BRANCHES:
        computed = tl.load(num_computed_ptr + seq)
        own_slot = tl.load(own_slots_ptr + seq)
        shared = tl.where(own_slot < 0, 2147483647, computed)  # keys before this position are in the table
    else:
        computed = tl.load(num_computed_ptr + slot)
        own_slot = computed  # neither is used
        shared = 2147483647
    tile_row = (tile - first_row // TILE_ROWS - seq) * TILE_ROWS if SEARCH else 0
    if tile_row >= num_rows:
        return

    begin = 0
    end = computed + (num_rows if BIDIRECTIONAL else tl.minimum(tile_row + TILE_ROWS, num_rows))
    whole = (
        end if BIDIRECTIONAL else computed + tile_row + 1
    )  # before it every row of the tile sees every key
    if ROLE == COMMON:
        end = prefix
        whole = prefix
        if prefix == 0:
            return
    if ROLE == REST:
        begin = prefix
    if BRANCHES:
        whole = tl.minimum(whole, shared)
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
                tl.maximum(begin, chunk * CHUNK), whole, tl.minimum(end, chunk * CHUNK + CHUNK), scale_log2,
                WHOLE, BRANCHES, NUM_KV_HEADS, D, P, WINDOW, BIDIRECTIONAL, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            peak, total, acc = _merge(peak, total, acc, part, lse)
        out, lse = _normed(peak, total, acc)
    else:
        if CHUNK > 0:
            start = (first_chunk + split) * CHUNK
            end = tl.minimum(end, start + CHUNK)
            begin = tl.maximum(begin, start)
        elif SPLIT:
            begin += split * split_keys
            end = tl.minimum(end, begin + split_keys)
        out, lse = _attend(
            q, k_cache_ptr, v_cache_ptr, table_ptr, shared, own_slot, kv_head, query_position, begin, whole,
            end, scale_log2, WHOLE, BRANCHES, NUM_KV_HEADS, D, P, WINDOW, BIDIRECTIONAL, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    if SPLIT:
        result = tile * NUM_KV_HEADS + kv_head
        last = active == 1
        m_at = result.to(tl.int64) * num_splits * BLOCK_M + m
        if active > 1:
            mine = m_at + split * BLOCK_M
            tl.store(lse_ptr + mine, lse, mask=served)
            tl.store(partial_ptr + mine[:, None] * D + column[None, :], out, mask=served[:, None])
            last = arrive(counter_ptr + result, active)
        if not last:
            return
        if active > 1:
            peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            acc = tl.zeros((BLOCK_M, D), tl.float32)
            for first in range(0, active, 4):
                for i in tl.static_range(4):  # loads that do not wait for each other's
                    other = m_at + (first + i) * BLOCK_M
                    there = served & (other < m_at + active * BLOCK_M)
                    part_lse = tl.load(lse_ptr + other, mask=there, other=float("-inf"), cache_modifier=".cg")
                    part_at = partial_ptr + other[:, None] * D + column[None, :]
                    part = tl.load(part_at, mask=there[:, None], other=0.0, cache_modifier=".cg")
                    peak, total, acc = _merge(peak, total, acc, part, part_lse)
            out, lse = _normed(peak, total, acc)
    lse_at = prefix_lse_ptr + out_row
    if ROLE == COMMON:
        tl.store(lse_at, lse, mask=served)
        tl.store(prefix_out_ptr + at, out, mask=served[:, None])
        return
    if ROLE == REST:  # noqa: SIM102 - settled when it is compiled
        if prefix > 0:
            part_lse = tl.load(lse_at, mask=served, other=float("-inf"))
            part = tl.load(prefix_out_ptr + at, mask=served[:, None], other=0.0)
            one = tl.where(lse == float("-inf"), 0.0, 1.0)
            peak, total, acc = _merge(lse, one, out, part, part_lse)
            out, lse = _normed(peak, total, acc)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=served[:, None])


@lru_cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    layout: RowLayout,
    scale: float,
    window: int | None = None,
    bidirectional: bool = False,
    *,
    own: Tensor | None = None,
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
    num_rows, _, head_dim = q.shape
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
    rest = out
    if own is not None and layout.num_fresh:
        assert not (window or bidirectional or deterministic)
        others = len(layout.host_rows) - layout.num_fresh
        first_row = sum(layout.host_rows[:others])
        prompt_attention(q, own, out, layout.row_start[others:], first_row, scale)
        if others == 0:
            return out
        layout = replace(layout, host_rows=layout.host_rows[:others])
        q, rest = q[:first_row], out[:first_row]
    attend = partial(
        _launch, q, k_cache, v_cache, layout, scale, window or 0, bidirectional, deterministic, config
    )
    if layout.common is None or deterministic or window:
        attend(rest)
        return out
    prefix = (
        torch.empty(q.shape, dtype=torch.float32, device=q.device),
        torch.empty(q.shape[:2], dtype=torch.float32, device=q.device),
    )
    attend(rest, prefix, role=COMMON)
    attend(rest, prefix, role=REST)
    return out


def _launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    layout: RowLayout,
    scale: float,
    window: int,
    bidirectional: bool,
    deterministic: bool,
    config: AttentionConfig | None,
    out: Tensor,
    prefix: tuple[Tensor, Tensor] | None = None,
    role: tl.constexpr = ALONE,
) -> None:
    num_rows, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    common, branches = layout.common, layout.branches
    if config is None:
        shape = (layout, num_rows, group, num_kv_heads, q.dtype)
        if deterministic:
            config = fixed_config(*shape)
        elif role is COMMON:
            config = common_config(*shape[1:], _num_processors(q.device))
        else:
            config = choose_config(*shape, _num_processors(q.device))
    splits, tile_rows = config.num_splits, config.block_m // group
    num_seqs = len(layout.host_rows)
    slots, row_start, starts = layout.slots, layout.row_start, layout.num_computed
    own_slots, prefix_lens = slots, slots
    if branches is not None:
        starts, own_slots = branches
    search = max(layout.host_rows) > tile_rows
    tiles = num_tiles(layout, num_rows, tile_rows)
    if common is not None:
        prefix_lens = common.of_seqs
        if role is COMMON:
            slots, row_start, prefix_lens = common.slots, common.row_start, common.lens
            num_seqs = len(slots)
            search, tiles = True, num_rows // tile_rows + num_seqs
    partial_out = lse = out
    if splits > 1:
        shape = (tiles, num_kv_heads, splits, config.block_m)
        assert tiles * num_kv_heads <= MAX_COUNTERS
        partial_out = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    _attention_kernel[(tiles, num_kv_heads, splits)](
        q,
        k_cache,
        v_cache,
        out,
        partial_out,
        lse,
        counters(q.device),
        slots,
        row_start,
        starts,
        own_slots,
        prefix_lens,
        *(prefix or (out, out)),
        layout.block_tables,
        layout.block_tables.stride(0),
        num_seqs,
        splits,
        config.split_keys,
        scale * _LOG2_E,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        D=head_dim,
        P=block_size,
        WINDOW=window,
        BIDIRECTIONAL=bidirectional or role is COMMON,
        BRANCHES=branches is not None and role is not COMMON,
        ROLE=role,
        WHOLE=config.whole and not window,
        TILE_ROWS=tile_rows,
        SEARCH=search,
        SPLIT=splits > 1,
        CHUNK=config.chunk_keys,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **dependent_launch(q.device, num_rows <= EARLY_ROWS),
    )
