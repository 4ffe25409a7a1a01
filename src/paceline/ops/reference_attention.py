"""Paged attention in torch: decode rows and spans in padded batches, prefill chunks one by one.

What a row computes must not depend on its company, or greedy tokens would change with the batch. Scores and
weighted sums are therefore plain batched products over keys padded to whole blocks: a decode row's result
is then the same, bit for bit, alone or in a batch, whatever the padding (observed with MKL; the fused
attention of torch splits its work by the batch and does not have this property).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.ops.layout import RowLayout

PACKED_ROWS = 16
"""Sequences of up to this many rows are batched; longer ones use the fused attention of torch, which skips
the upper triangle and never stores the scores."""

GATHERED_KEYS = 4096
"""Most keys copied out of the cache at once: what a core's cache holds. Larger gathers were measured to be
several times slower, because each allocates, and page-faults, fresh memory."""


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


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, layout: RowLayout, scale: float, window: int | None = None
) -> Tensor:
    """Causal attention of every row over its sequence's paged keys."""
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    num_heads = q.shape[1]
    groups = layout.derived.get(window)
    if groups is None:
        groups = plan_groups(layout, block_size, num_heads, num_kv_heads, window)
        layout.derived[window] = groups
    out = torch.zeros_like(q)
    for group in groups:
        queries = q.index_select(0, group.rows)
        k = k_cache.view(-1, head_dim).index_select(0, group.keys)
        v = v_cache.view(-1, head_dim).index_select(0, group.keys)
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


def plan_groups(
    layout: RowLayout, block_size: int, num_heads: int, num_kv_heads: int, window: int | None
) -> list[AttentionGroup]:
    """Split a layout into groups alike in rows, near in length, and small enough to gather at once."""
    slots, starts = layout.slots.tolist(), layout.row_start.tolist()
    spans = []
    for slot, first, end, computed in zip(
        slots, starts, starts[1:], layout.num_computed[layout.slots].tolist(), strict=False
    ):
        if end > first:
            first_block = 0 if window is None else max(0, computed - window + 1) // block_size
            num_blocks = -(-(computed + end - first) // block_size) - first_block
            spans.append(_Span(end - first, num_blocks, first, first_block, slot, computed))
    spans.sort()
    groups: list[AttentionGroup] = []
    begin = 0
    for i, span in enumerate(spans):
        following = spans[i + 1] if i + 1 < len(spans) else None
        if following and following.num_rows == span.num_rows <= PACKED_ROWS:
            gathered = (i + 2 - begin) * following.num_blocks * block_size * num_kv_heads
            if gathered <= GATHERED_KEYS:
                continue
        groups.append(_group(spans[begin : i + 1], layout, block_size, num_heads, num_kv_heads, window))
        begin = i + 1
    return groups


def _group(
    spans: list[_Span],
    layout: RowLayout,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
) -> AttentionGroup:
    n, max_blocks = spans[0].num_rows, spans[-1].num_blocks
    _, _, first_row, first_block, slot, computed = torch.tensor(spans).unsqueeze(2).unbind(1)  # [B, 1] each
    query = computed + torch.arange(n)  # [B, n] positions
    position = first_block * block_size + torch.arange(max_blocks * block_size)  # [B, N]

    # Keys beyond a sequence's end point at its first key: its own and finite. A masked key still meets a
    # zero weight, and 0 * NaN is NaN, so what an unused block holds must never be read.
    column = first_block + torch.arange(max_blocks)  # [B, blocks]
    column = torch.where(column * block_size < computed + n, column, first_block)
    block = layout.block_tables[slot, column].long()
    key = (block.unsqueeze(2) * block_size + torch.arange(block_size)).flatten(1)  # [B, N]
    key = torch.where(position < computed + n, key, key[:, :1])

    hidden = position.unsqueeze(1) > query.unsqueeze(2)  # [B, n, N]
    if window is not None:
        hidden |= position.unsqueeze(1) <= query.unsqueeze(2) - window
    bias = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
    mask: Tensor | None
    packed = n <= PACKED_ROWS
    if packed:
        if n > 1:  # the heads of a single row share its mask by broadcasting
            bias = bias.repeat_interleave(num_heads // num_kv_heads, dim=1)
        mask = bias.repeat_interleave(num_kv_heads, dim=0)
    else:
        num_keys = spans[0].computed + n - spans[0].first_block * block_size
        key = key[:, :num_keys]
        mask = None if num_keys == n and (window is None or window >= n) else bias[0, :, :num_keys]
    keys = (key.unsqueeze(1) * num_kv_heads + torch.arange(num_kv_heads).unsqueeze(1)).flatten()  # [B, KV, N]
    return AttentionGroup((first_row + torch.arange(n)).flatten(), n, keys, mask, packed)
