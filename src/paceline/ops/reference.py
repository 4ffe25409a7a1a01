"""Torch versions of the ops: what the kernels must equal, and what runs on CPU and in training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.ops.layout import RowLayout


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang & Sennrich, arXiv:1910.07467)."""
    x32 = x.float()
    inv_rms = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (x32 * inv_rms).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``residual + x`` and its norm."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` (SwiGLU, Shazeer, arXiv:2002.05202)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al., arXiv:2104.09864) of the pairs (i, i + D/2), in fp32, cast back to x's dtype."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def qk_norm_rope_write(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """Norm and rotate the heads of q and k, write k and v to the cache; returns q."""
    _, _, num_kv_heads, head_dim = k_cache.shape
    heads = qkv.view(qkv.shape[0], -1, head_dim)  # [R, H + 2 KV, D]
    num_heads = heads.shape[1] - 2 * num_kv_heads
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [R, 1, D/2]
    q = rotate(rms_norm(q, q_norm, eps), cos, sin)
    k = rotate(rms_norm(k, k_norm, eps), cos, sin)
    if bool((kv_slots < 0).any()):
        kept = kv_slots >= 0
        kv_slots, k, v = kv_slots[kept], k[kept], v[kept]
    # view, not reshape: writing to a silent copy of a non-contiguous cache would lose the rows
    k_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, kv_slots.long(), k.to(k_cache.dtype))
    v_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, kv_slots.long(), v.to(v_cache.dtype))
    return q


@dataclass(frozen=True)
class SequencePlan:
    """What attention needs to know of one sequence of a layout; derived once per step, used by every layer.

    Attributes:
        first_row, end_row: its rows.
        blocks: [n] int64, ids of the blocks that hold positions ``first_key .. end - 1``.
        num_keys: keys read from those blocks.
        mask: [rows, num_keys] additive mask, or None when every row sees every key or ``causal`` says it all.
        causal: rows and keys are the same positions, so the plain triangle is the mask.
    """

    first_row: int
    end_row: int
    blocks: Tensor
    num_keys: int
    mask: Tensor | None
    causal: bool


def _plan(layout: RowLayout, block_size: int, window: int | None, dtype: torch.dtype) -> list[SequencePlan]:
    slots = layout.slots.tolist()
    starts = layout.row_start.tolist()
    plans = []
    for b, slot in enumerate(slots):
        first_row, end_row = starts[b], starts[b + 1]
        rows = end_row - first_row
        if rows == 0:
            continue
        computed = int(layout.num_computed[slot])
        end = computed + rows
        first_block = 0 if window is None else max(0, computed - window + 1) // block_size
        blocks = layout.block_tables[slot, first_block : -(-end // block_size)].long()
        first_key = first_block * block_size
        num_keys = end - first_key
        windowed = window is not None and end - 1 - first_key >= window
        causal = rows == num_keys and not windowed
        mask = None
        if windowed or (rows > 1 and not causal):
            query = torch.arange(computed, end).unsqueeze(1)
            key = torch.arange(first_key, end)
            hidden = key > query
            if window is not None:
                hidden |= key <= query - window
            mask = torch.zeros(rows, num_keys, dtype=dtype).masked_fill_(hidden, float("-inf"))
        plans.append(SequencePlan(first_row, end_row, blocks, num_keys, mask, causal and rows > 1))
    return plans


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, layout: RowLayout, scale: float, window: int | None = None
) -> Tensor:
    """Causal attention of every row over its sequence's paged keys."""
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    num_heads = q.shape[1]
    group = num_heads // num_kv_heads
    plan = layout.plans.get(window)
    if plan is None:
        plan = layout.plans[window] = _plan(layout, block_size, window, q.dtype)
    out = torch.zeros_like(q)
    for seq in plan:
        rows = seq.end_row - seq.first_row
        shape = (num_kv_heads, group, seq.num_keys, head_dim)
        k = k_cache.index_select(0, seq.blocks).view(-1, num_kv_heads, head_dim)[: seq.num_keys]
        v = v_cache.index_select(0, seq.blocks).view(-1, num_kv_heads, head_dim)[: seq.num_keys]
        # KV heads are the batch, so that the keys of a group are expanded without a copy: [KV, G, rows, D]
        queries = q[seq.first_row : seq.end_row].view(rows, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
        result = F.scaled_dot_product_attention(
            queries,
            k.transpose(0, 1).unsqueeze(1).expand(shape).to(q.dtype),
            v.transpose(0, 1).unsqueeze(1).expand(shape).to(q.dtype),
            attn_mask=seq.mask,
            is_causal=seq.causal,
            scale=scale,
        )
        out[seq.first_row : seq.end_row] = result.permute(2, 0, 1, 3).reshape(rows, num_heads, head_dim)
    return out
