"""Many blocks of one sequence in one pass: anchored-block training (DFlash, section 3; DSpark, section 3).

A training row is a sequence whose target hidden states are known. Any of its tokens can play the anchor: the
block there sees context rows before it and its own rows, nothing else. Draft j of a block stands for the
token at ``start + 1 + j`` in both layouts; the drafter's config knows which slot makes it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline import ops
from paceline.models.attention import AttentionSpec, split_heads
from paceline.models.rope import apply_rope


class BlockContext:
    """Attention of many blocks per sequence over one dense context; autograd works.

    Scores against the context and against the own block are computed apart: blocks never meet, so of the
    [rows, context + all blocks] scores a masked attention would compute, most of the second part is skipped.

    Args:
        k, v: [layers, B, C, KV, D], from :meth:`Drafter.context_kv`; row p stands at position p.
        starts: int [B, A], positions of the anchors; a block sees context rows before its own.
    """

    def __init__(self, k: Tensor, v: Tensor, starts: Tensor) -> None:
        self.k, self.v, self.starts = k, v, starts
        self._masks: dict[tuple[int, int | None, bool], tuple[Tensor, Tensor | None]] = {}

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
        """See :meth:`AttentionContext.attend`; rows are [B, A, W]."""
        B, A, W = qkv.shape[:3]
        KV, D = spec.num_kv_heads, spec.head_dim
        G = spec.num_heads // KV
        q, k, v = split_heads(qkv, spec)  # [B, A, W, heads, D]
        angles = cos_sin[positions]  # [B, A, W, D]
        q = apply_rope(ops.rms_norm(q, q_norm, spec.eps), angles)
        k = apply_rope(ops.rms_norm(k, k_norm, spec.eps), angles)
        past_k = self.k[layer].to(q.dtype).permute(0, 2, 3, 1)  # [B, KV, D, C]
        past_v = self.v[layer].to(q.dtype).transpose(1, 2)  # [B, KV, C, D]
        q = q.unflatten(3, (KV, G)).permute(0, 3, 4, 1, 2, 5)  # [B, KV, G, A, W, D]
        k = k.permute(0, 3, 1, 4, 2)[:, :, None]  # [B, KV, 1, A, D, W]
        v = v.to(q.dtype).permute(0, 3, 1, 2, 4)[:, :, None]  # [B, KV, 1, A, W, D]
        hide_past, hide_own = self._mask(W, spec)
        past = (q.reshape(B, KV, G * A * W, D) @ past_k).view(B, KV, G, A, W, -1)
        own = q @ k  # [B, KV, G, A, W, W]
        past = past.masked_fill(hide_past, float("-inf"))
        if hide_own is not None:
            own = own.masked_fill(hide_own, float("-inf"))
        scores = torch.cat((past, own), dim=-1)
        weights = torch.softmax(scores.float() * spec.scale, dim=-1).to(q.dtype)
        to_past, to_own = weights.split((past.shape[-1], W), dim=-1)
        mixed = (to_past.reshape(B, KV, G * A * W, -1) @ past_v).view(B, KV, G, A, W, D) + to_own @ v
        out: Tensor = mixed.permute(0, 3, 4, 1, 2, 5).reshape(B, A, W, KV * G * D)
        return out

    def _mask(self, width: int, spec: AttentionSpec) -> tuple[Tensor, Tensor | None]:
        """What is hidden: context [B, 1, 1, A, 1 or W, C], own block [W, W] or None; per kind of layer."""
        kind = (width, spec.window, spec.bidirectional)
        if kind not in self._masks:
            row = torch.arange(self.k.shape[2], device=self.starts.device)  # [C]
            slot = torch.arange(width, device=self.starts.device)
            start = self.starts[:, None, None, :, None, None]  # [B, 1, 1, A, 1, 1]
            past = row >= start
            ahead = slot[None, :] - slot[:, None]  # key's slot minus query's
            own = torch.zeros_like(ahead, dtype=torch.bool)
            if not spec.bidirectional:
                own = own | (ahead > 0)
            if spec.window is not None:
                past = past | (row <= start + slot[:, None] - spec.window)
                own = own | (ahead <= -spec.window)
            # decided without looking at the tensor, which would wait for the device
            all_seen = spec.bidirectional and (spec.window is None or spec.window >= width)
            self._masks[kind] = past, None if all_seen else own
        return self._masks[kind]


class BlockLabels(NamedTuple):
    """What the drafts of anchored blocks should be.

    Attributes:
        anchors: int64 [B, A], the token at each block's start.
        previous: int64 [B, A, g], the token before each draft (teacher forcing).
        labels: int64 [B, A, g], the token each draft stands for.
        supervised: bool [B, A, g], a leading run of drafts: labels that exist in the answer.
        rows: int64 [B, A, g], the row whose target output predicts the label.
    """

    anchors: Tensor
    previous: Tensor
    labels: Tensor
    supervised: Tensor
    rows: Tensor


def block_labels(
    tokens: Tensor, lengths: Tensor, starts: Tensor, valid: Tensor, num_drafts: int
) -> BlockLabels:
    """Labels of blocks.

    Args:
        tokens: int64 [B, S], padded at the end.
        lengths: int [B], tokens that count.
        starts: int [B, A], anchors; their whole answer up to ``lengths`` is supervised.
        valid: bool [B, A], false for dummies that fill a row's share.
        num_drafts: g.
    """
    offsets = torch.arange(num_drafts, device=tokens.device)
    rows = starts[..., None] + offsets  # [B, A, g]
    at = rows + 1
    supervised = (at < lengths[:, None, None]) & valid[..., None]
    last = tokens.shape[1] - 1
    flat_rows, flat_at = rows.clamp_max(last).flatten(1), at.clamp_max(last).flatten(1)
    return BlockLabels(
        tokens.gather(1, starts),
        tokens.gather(1, flat_rows).view_as(rows),
        tokens.gather(1, flat_at).view_as(rows),
        supervised,
        flat_rows.view_as(rows),
    )


def slot_weights(num_drafts: int, decay: float, device: torch.device) -> Tensor:
    """exp(-j / decay) for draft j, [g]: an early miss costs every draft after it (DFlash, section 3)."""
    return torch.exp(-torch.arange(num_drafts, device=device, dtype=torch.float32) / decay)
