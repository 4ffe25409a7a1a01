"""Attention of a drafter's block over its context, dense: for checks.

A drafter attends from the rows of a block to two sets of keys: the context rows (what the target's taps say
about every position before the anchor) and the block itself. The paged version, whose context lives in the
target's blocks, is the runtime's; the one that training uses is in ``training/blocks.py``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline import ops
from paceline.models.attention import AttentionSpec, split_heads
from paceline.models.rope import apply_rope


class DenseDraftContext:
    """Many blocks per sequence over one dense context; autograd works.

    Context row p stands at position p. A block whose anchor stands at ``start`` sees context rows p < start,
    and its own rows; blocks never see each other (anchored-block training, DFlash and DSpark papers).

    Args:
        k, v: [layers, B, C, KV, D], from :meth:`Drafter.context_kv`.
        starts: int [B, A], position of each block's anchor; context rows from there on are masked.
    """

    def __init__(self, k: Tensor, v: Tensor, starts: Tensor) -> None:
        self.k, self.v = k, v
        self.starts = starts
        self._masks: dict[tuple[int, int | None, bool], Tensor] = {}

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
        batch, num_blocks, width = qkv.shape[:3]
        q, k, v = split_heads(qkv, spec)  # [B, A, W, heads, D]
        angles = cos_sin[positions]  # [B, A, W, D]
        q = apply_rope(ops.rms_norm(q, q_norm, spec.eps), angles).flatten(1, 2)
        k = apply_rope(ops.rms_norm(k, k_norm, spec.eps), angles).flatten(1, 2)
        keys = torch.cat((self.k[layer].to(k.dtype), k), dim=1)  # [B, C + A * W, KV, D]
        values = torch.cat((self.v[layer], v.flatten(1, 2)), dim=1).to(k.dtype)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=self._mask(width, spec),
            scale=spec.scale,
            enable_gqa=spec.num_heads != spec.num_kv_heads,
        )  # [B, H, A * W, D]
        return out.transpose(1, 2).reshape(batch, num_blocks, width, -1)

    def _mask(self, width: int, spec: AttentionSpec) -> Tensor:
        """bool [B, 1, A * W, C + A * W], the same for all layers of one kind."""
        kind = (width, spec.window, spec.bidirectional)
        if kind not in self._masks:
            self._masks[kind] = block_mask(self.starts, self.k.shape[2], *kind)
        return self._masks[kind]


def block_mask(
    starts: Tensor, num_context: int, width: int, window: int | None, bidirectional: bool
) -> Tensor:
    """Which keys the rows of each block see, bool [B, 1, A * W, C + A * W]; keys are context, then blocks.

    Args:
        starts: [B, A], positions of the anchors.
        window: keys further back than this many positions (own included) are hidden; None = no limit.
        bidirectional: whether rows of one block see later rows of it.
    """
    batch, num_blocks = starts.shape
    slot = torch.arange(width, device=starts.device)
    position = (starts[..., None] + slot).flatten(1)  # [B, A * W]
    block = torch.arange(num_blocks, device=starts.device).repeat_interleave(width)  # [A * W]
    context = torch.arange(num_context, device=starts.device)
    before = context < starts.repeat_interleave(width, dim=1)[..., None]  # [B, A * W, C]
    same = (block[:, None] == block[None, :]).expand(batch, -1, -1)  # [B, A * W, A * W]
    ahead = position[:, None, :] - position[:, :, None]  # key's position minus query's
    if not bidirectional:
        same = same & (ahead <= 0)
    if window is not None:
        same = same & (ahead > -window)
        before = before & (context > position[..., None] - window)
    return torch.cat((before, same), dim=-1)[:, None]
