"""The phases in torch: what the kernel must equal, to its roundings, and what runs where there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.ops import kv_norm_rope_write, paged_attention, qk_norm_rope_write
from paceline.ops.layout import RowLayout
from paceline.ops.persistent.phases import Attend, Phase, Product
from paceline.ops.reference import rms_norm, silu_mul


def run(phases: Sequence[Phase], layout: RowLayout, *, eps: float, cos_sin: Tensor) -> None:
    """Run phases one after the other on ``layout``'s rows.

    Args:
        phases: in order; what they write is written in place.
        layout: the rows.
        eps: of all norms.
        cos_sin: [positions, D] fp32, of the rotations in attention.
    """
    for phase in phases:
        if isinstance(phase, Product):
            _multiply(phase, eps)
        elif isinstance(phase, Attend):
            _attend(phase, layout, eps, cos_sin)
        else:
            heads, head_dim = phase.k_cache.shape[2:]
            kv = phase.kv.reshape(1, -1, 2 * heads * head_dim).contiguous()
            caches = phase.k_cache[None], phase.v_cache[None]
            kv_norm_rope_write(
                kv, phase.k_norm[None], eps, phase.cos_sin, layout.positions, layout.kv_slots, *caches
            )


def _multiply(phase: Product, eps: float) -> None:
    source = phase.source if phase.norm is None else rms_norm(phase.source, phase.norm, eps)
    result = source @ phase.weight.T
    if phase.epilogue == "swiglu":
        result = silu_mul(result)
    elif phase.epilogue == "add":
        assert phase.before is not None
        result = phase.before + result
    phase.out.copy_(result)
    if phase.tap is not None:
        phase.tap.copy_(result)
    for tensor in phase.forgets:
        tensor.fill_(float("nan"))  # who reads it all the same will be seen


def _attend(phase: Attend, layout: RowLayout, eps: float, cos_sin: Tensor) -> None:
    caches = phase.k_cache, phase.v_cache
    q = qk_norm_rope_write(
        phase.qkv, phase.q_norm, phase.k_norm, eps, cos_sin, layout.positions, layout.kv_slots, *caches
    )
    scale = float(q.shape[-1] ** -0.5)
    out = paged_attention(q, *caches, layout, scale, None, phase.bidirectional)
    phase.out.copy_(out.view_as(phase.out))
