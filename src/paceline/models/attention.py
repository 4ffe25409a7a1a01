"""Attention contexts: who owns K and V while a model runs.

A model owns weights and the rope table and knows nothing of caches. Serving hands it a :class:`PagedContext`,
training and checks a :class:`DenseCausalContext`; the model file is the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline import ops
from paceline.models.rope import apply_rope


@dataclass(frozen=True)
class AttentionSpec:
    """What one layer's attention computes, apart from weights.

    Attributes:
        eps: epsilon of the q and k norms.
        window: keys a query sees, its own included; None = all before it.
        bidirectional: whether rows of a drafter's block also see the block's later rows; a target's never do.
        deterministic: a row's result depends on that row and its keys alone, bit for bit; for serving only.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    window: int | None = None
    bidirectional: bool = False
    deterministic: bool = False

    @property
    def scale(self) -> float:
        """Factor on the attention scores: head_dim ** -0.5."""
        return float(self.head_dim**-0.5)


class AttentionContext(Protocol):
    """Norm of q and k, rotation, the K/V write and attention: everything between qkv_proj and o_proj."""

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        spec: AttentionSpec,
    ) -> Tensor:
        """Attention output of one layer.

        Args:
            layer: index of the layer, 0-based.
            qkv: [*rows, (H + 2 KV) * D], the projections side by side: q, k, v.
            q_norm, k_norm: [D] RMSNorm weights, applied per head.
            positions: int [*rows], absolute positions.
            cos_sin: [max positions, D] fp32, see :func:`paceline.models.rope.rope_table`.
            spec: geometry of the layer.

        Returns:
            [*rows, H * D] in qkv's dtype.
        """
        ...


class DenseCausalContext:
    """Causal attention within whole sequences, without a cache: training, scoring, checks. Autograd works.

    Rows are [B, S] (or [S] for one sequence), row s of a sequence attends to rows 0..s. ``positions`` only
    feed the rotation. Under ``torch.compile`` this is one graph.
    """

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        spec: AttentionSpec,
    ) -> Tensor:
        """See :meth:`AttentionContext.attend`."""
        q, k, v = split_heads(qkv, spec)  # [*rows, heads, D]
        angles = cos_sin[positions]  # [*rows, D]
        q = apply_rope(ops.rms_norm(q, q_norm, spec.eps), angles)
        k = apply_rope(ops.rms_norm(k, k_norm, spec.eps), angles)
        q, k, v = (x.transpose(-2, -3) for x in (q, k, v.to(q.dtype)))  # [..., heads, S, D]
        if q.dim() == 3:
            q, k, v = q[None], k[None], v[None]
        mask = window_mask(q.shape[-2], spec.window, q.device) if spec.window is not None else None
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=spec.scale,
            enable_gqa=spec.num_heads != spec.num_kv_heads,
        )
        return out.transpose(1, 2).reshape(*qkv.shape[:-1], spec.num_heads * spec.head_dim)


class PagedContext:
    """Serving: K and V live in blocks shared by all sequences; rows of many sequences are packed into one
    [R].

    Args:
        cache: the target's K/V blocks.
        layout: which row belongs to which sequence and block; see :class:`paceline.ops.RowLayout`.
    """

    def __init__(self, cache: KVCache, layout: ops.RowLayout) -> None:
        self.cache = cache
        self.layout = layout

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        spec: AttentionSpec,
    ) -> Tensor:
        """See :meth:`AttentionContext.attend`; rows are [R], or [N, W] for N drafter's blocks. Writes the
        rows' K and V before attending.
        """
        k_cache, v_cache = self.cache.k[layer], self.cache.v[layer]
        rows = qkv.flatten(0, -2)
        plain = not (spec.window or spec.bidirectional or spec.deterministic)
        fresh = self.layout.num_fresh > 0 and plain and ops.reads_own_keys(rows)
        q = ops.qk_norm_rope_write(
            rows,
            q_norm,
            k_norm,
            spec.eps,
            cos_sin,
            self.layout.positions,
            self.layout.kv_slots,
            k_cache,
            v_cache,
            keep_keys=fresh,
        )  # [R, H, D]
        out = ops.paged_attention(
            q,
            k_cache,
            v_cache,
            self.layout,
            spec.scale,
            spec.window,
            spec.bidirectional,
            own=rows if fresh else None,
            deterministic=spec.deterministic,
        )
        return out.view(*qkv.shape[:-1], -1)


@dataclass(frozen=True)
class KVCache:
    """K and V of every layer: k, v [layers, num_blocks, P, KV, D]."""

    k: Tensor
    v: Tensor

    @staticmethod
    def allocate(
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> KVCache:
        """A zeroed cache. Zeros, because a masked key still meets a zero weight, and 0 * NaN is NaN."""
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        return KVCache(_zeros(shape, dtype, device), _zeros(shape, dtype, device))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros; on a CPU in pages the system hands out on first touch, so that an idle cache takes no memory."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)


def split_heads(qkv: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    """[*rows, (H + 2 KV) * D] -> q [*rows, H, D], k and v [*rows, KV, D] (views)."""
    heads = qkv.view(*qkv.shape[:-1], spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
    q, k, v = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=-2)
    return q, k, v


def window_mask(num_rows: int, window: int, device: torch.device) -> Tensor:
    """Causal sliding window, bool [rows, rows], true where the query (first axis) sees the key."""
    row = torch.arange(num_rows, device=device)
    distance = row[:, None] - row[None, :]
    return (distance >= 0) & (distance < window)
