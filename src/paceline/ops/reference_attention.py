"""Paged attention in torch: decode rows and spans in padded batches, prefill chunks one by one.

What a row computes must not depend on its company, or greedy tokens would change with the batch. Scores and
weighted sums are therefore plain batched products over keys padded to whole blocks: a decode row's result
is then the same, bit for bit, alone or in a batch, whatever the padding (observed with MKL; the fused
attention of torch splits its work by the batch and does not have this property).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.ops.layout import RowLayout

PACKED_ROWS = 16
"""Sequences of up to this many rows are batched; longer ones use the fused attention of torch, which skips
the upper triangle and never stores the scores."""

GATHERED_KEYS = 2048
"""Most keys copied out of the cache at once, for more than one sequence: about what a core's cache holds."""


@dataclass(frozen=True)
class AttentionGroup:
    """B sequences of n rows each, attended together. Derived once per step, used by all layers.

    Attributes:
        rows: [B * n] int64, their rows, sequence by sequence.
        num_rows: n.
        keys: [B * KV * N] int64, their keys as indices into the cache seen as [num_blocks * P * KV, D],
            head by head; N is the largest number of keys, in whole blocks.
        mask: packed: [B * KV, n * G or 1, N] fp32, added to the scores. Otherwise (B = 1): [n, N], or None
            for the plain causal triangle.
        packed: which of the two ways computes it.
    """

    rows: Tensor
    num_rows: int
    keys: Tensor
    mask: Tensor | None
    packed: bool


@dataclass(frozen=True)
class AttentionPlan:
    """The groups of a layout, and room for the keys and values of the largest of them.

    The room is shared by groups and layers: memory fresh from the allocator costs a page fault every 4 KiB,
    which was measured at several times the price of the copy itself.
    """

    groups: list[AttentionGroup]
    k: Tensor  # [most keys, D]
    v: Tensor


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
) -> Tensor:
    """Attention of every row over its sequence's paged keys; see :func:`paceline.ops.paged_attention`."""
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    # a target and its drafter may share a layout
    key = (window, bidirectional, deterministic, q.shape[1], k_cache.shape[1:], k_cache.dtype)
    plan = layout.derived.get(key)
    if plan is None:
        groups = plan_groups(
            layout,
            block_size,
            q.shape[1],
            num_kv_heads,
            window,
            bidirectional,
            deterministic=deterministic,
        )
        room = (max((group.keys.numel() for group in groups), default=0), head_dim)
        plan = layout.derived[key] = AttentionPlan(groups, k_cache.new_empty(room), v_cache.new_empty(room))
    out = torch.zeros_like(q)
    for group in plan.groups:
        queries = q.index_select(0, group.rows)
        num_keys = group.keys.numel()
        k = torch.index_select(k_cache.view(-1, head_dim), 0, group.keys, out=plan.k[:num_keys])
        v = torch.index_select(v_cache.view(-1, head_dim), 0, group.keys, out=plan.v[:num_keys])
        attend = _attend_packed if group.packed else _attend_chunk
        result = attend(queries, k, v, group, num_kv_heads, scale)
        out.index_copy_(0, group.rows, result.to(q.dtype))
    return out


def _attend_packed(
    q: Tensor, k: Tensor, v: Tensor, group: AttentionGroup, num_kv_heads: int, scale: float
) -> Tensor:
    """Rows, and the heads sharing a key head, are the rows of one matrix per (sequence, key head)."""
    _, num_heads, head_dim = q.shape
    n, share = group.num_rows, num_heads // num_kv_heads
    assert group.mask is not None
    batch, _, num_keys = group.mask.shape  # batch = B * KV
    q = q.view(-1, n, num_kv_heads, share, head_dim).transpose(1, 2).reshape(batch, n * share, head_dim)
    k = k.view(batch, num_keys, head_dim)
    v = v.view(batch, num_keys, head_dim)
    scores = torch.baddbmm(group.mask, q.float(), k.float().transpose(1, 2), alpha=scale)  # [B KV, n G, N]
    out = torch.bmm(torch.softmax(scores, dim=-1), v.float())  # [B KV, n G, D]
    return out.view(-1, num_kv_heads, n, share, head_dim).transpose(1, 2).reshape(-1, num_heads, head_dim)


def _attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, group: AttentionGroup, num_kv_heads: int, scale: float
) -> Tensor:
    """One prefill chunk. Key heads are the batch, so that sharing them among heads copies nothing."""
    n, num_heads, head_dim = q.shape
    shape = (num_kv_heads, num_heads // num_kv_heads, -1, head_dim)
    out = F.scaled_dot_product_attention(
        q.view(n, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3),  # [KV, G, n, D]
        k.to(q.dtype).view(num_kv_heads, 1, -1, head_dim).expand(shape),
        v.to(q.dtype).view(num_kv_heads, 1, -1, head_dim).expand(shape),
        attn_mask=None if group.mask is None else group.mask.to(q.dtype),
        is_causal=group.mask is None,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3).reshape(n, num_heads, head_dim)


class _Span(NamedTuple):
    """One sequence's rows; the order of the fields is the order spans are sorted in."""

    num_rows: int
    num_blocks: int  # read, without those wholly below the window
    first_row: int
    first_block: int
    slot: int
    computed: int
    shared: int  # keys at positions from here on are the sequence's own
    own_slot: int  # where the first of them lies; negative: there are none


def plan_groups(
    layout: RowLayout,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    bidirectional: bool,
    *,
    deterministic: bool = False,
) -> list[AttentionGroup]:
    """Split a layout into groups alike in rows, near in length, and small enough to gather at once.

    ``deterministic`` takes every row for a sequence of its own, as if it were decoded.
    """
    slots, starts, branches = layout.slots.tolist(), layout.row_start.tolist(), layout.branches
    assert not (deterministic and bidirectional)
    if branches is None:
        firsts, own_slots = layout.num_computed[layout.slots].tolist(), [-1] * len(slots)
    else:
        firsts, own_slots = branches.starts.tolist(), branches.own_slots.tolist()
    spans = []
    for slot, start, stop, before, own_slot in zip(
        slots, starts, starts[1:], firsts, own_slots, strict=False
    ):
        step = 1 if deterministic else max(1, stop - start)
        for first in range(start, stop, step):
            computed = before + first - start
            first_block = 0 if window is None else max(0, computed - window + 1) // block_size
            num_blocks = -(-(computed + step) // block_size) - first_block
            spans.append(_Span(step, num_blocks, first, first_block, slot, computed, before, own_slot))
    spans.sort()
    groups: list[AttentionGroup] = []
    begin = 0
    for i, span in enumerate(spans):
        following = spans[i + 1] if i + 1 < len(spans) else None
        if following and following.num_rows == span.num_rows <= PACKED_ROWS:
            gathered = (i + 2 - begin) * following.num_blocks * block_size * num_kv_heads
            if gathered <= GATHERED_KEYS:
                continue
        group = spans[begin : i + 1]
        groups.append(_group(group, layout, block_size, num_heads, num_kv_heads, window, bidirectional))
        begin = i + 1
    return groups


def _group(
    spans: list[_Span],
    layout: RowLayout,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    bidirectional: bool,
) -> AttentionGroup:
    # numpy: a tenth of torch's cost for arrays this small
    n, max_blocks = spans[0].num_rows, spans[-1].num_blocks
    columns = np.array(spans, dtype=np.int64).T[:, :, None]  # [fields, B, 1]
    _, _, first_row, first_block, slot, computed, shared, own_slot = columns
    query = computed + np.arange(n)  # [B, n] positions
    position = first_block * block_size + np.arange(max_blocks * block_size)  # [B, N]

    # Keys beyond a sequence's end point at its first key: its own and finite. A masked key still meets a
    # zero weight, and 0 * NaN is NaN, so what an unused block holds must never be read.
    column = first_block + np.arange(max_blocks)  # [B, blocks]
    column = np.where(column * block_size < computed + n, column, first_block)
    tables = layout.block_tables.numpy()
    block = tables[slot, np.minimum(column, tables.shape[1] - 1)].astype(np.int64)
    key = (block[:, :, None] * block_size + np.arange(block_size)).reshape(len(spans), -1)  # [B, N]
    key = np.where((own_slot >= 0) & (position >= shared), own_slot + position - shared, key)
    key = np.where(position < computed + n, key, key[:, :1])

    last = query[:, -1:] if bidirectional else query  # position of the last key a row sees
    hidden = np.broadcast_to(position[:, None] > last[:, :, None], (len(spans), n, position.shape[1]))
    if window is not None:
        hidden = hidden | (position[:, None] <= query[:, :, None] - window)
    mask = np.where(hidden, np.float32("-inf"), np.float32(0))
    causal = False
    packed = n <= PACKED_ROWS
    if packed:
        if n > 1:  # the heads of a single row share its mask by broadcasting
            mask = mask.repeat(num_heads // num_kv_heads, axis=1)
        mask = mask.repeat(num_kv_heads, axis=0)
    else:
        num_keys = spans[0].computed + n - spans[0].first_block * block_size
        key, mask = key[:, :num_keys], mask[0, :, :num_keys]
        causal = num_keys == n and (window is None or window >= n) and not bidirectional
    keys = key[:, None] * num_kv_heads + np.arange(num_kv_heads)[:, None]  # [B, KV, N]
    return AttentionGroup(
        rows=torch.from_numpy((first_row + np.arange(n)).reshape(-1)),
        num_rows=n,
        keys=torch.from_numpy(keys.reshape(-1)),
        mask=None if causal else torch.from_numpy(mask),
        packed=packed,
    )
