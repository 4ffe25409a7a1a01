"""Rotary position embedding tables: default, linear interpolation and YaRN.

Sources: RoFormer (Su et al. 2021, arXiv:2104.09864); position interpolation (Chen et al. 2023,
arXiv:2306.15595); YaRN (Peng et al. 2023, arXiv:2309.00071, section 3.2 "NTK-by-parts" and 3.4).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from paceline.models.config import RopeConfig
from paceline.ops.reference import rotate


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each rotated pair, [head_dim / 2] float64 on the CPU."""
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    frequencies = rope.theta**-pairs
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "yarn":
        kept = _yarn_kept_share(rope, head_dim)
        return frequencies * kept + frequencies / rope.factor * (1 - kept)
    return frequencies


def _yarn_kept_share(rope: RopeConfig, head_dim: int) -> Tensor:
    """1 where a frequency is kept, 0 where it is interpolated, a linear ramp between; [D/2]."""

    def dimension_of(rotations: float) -> float:
        # The pair index whose wavelength turns `rotations` times within the original context.
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    index = torch.arange(head_dim // 2, dtype=torch.float64, device="cpu")
    return 1 - ((index - low) / (high - low)).clamp(0, 1)


def attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: YaRN's temperature on the logits, through q and k."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int) -> Tensor:
    """cat(cos, sin) of every position, [num_positions, head_dim] fp32 on the CPU; computed in float64.

    Columns [0, D/2) are cosines and [D/2, D) sines; pair i rotates dimensions i and i + D/2.
    """
    positions = torch.arange(num_positions, dtype=torch.float64, device="cpu")
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))  # [positions, D/2]
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor(rope)).float()


def apply_rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate heads by their positions' angles.

    x [..., heads, D]; cos_sin [..., D] fp32; result in x's dtype.
    """
    cos, sin = cos_sin.unsqueeze(-2).chunk(2, dim=-1)  # [..., 1, D/2]
    return rotate(x, cos, sin)


class RopeTable(nn.Module):
    """Holds the table of a model.

    Follows the module's device but stays fp32 when weights are cast: bf16 angles are noise.
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device | None
    ) -> None:
        super().__init__()
        self.cos_sin: Tensor
        self.register_buffer(
            "cos_sin", rope_table(rope, head_dim, num_positions).to(device=device), persistent=False
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RopeTable:
        table = self.cos_sin
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.cos_sin.dtype != torch.float32:
            self.cos_sin = table.to(device=self.cos_sin.device)
        return self

    def forward(self) -> Tensor:
        """The table, [num_positions, D] fp32."""
        return self.cos_sin
