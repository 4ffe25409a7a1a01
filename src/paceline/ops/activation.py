"""SwiGLU's elementwise half."""

from __future__ import annotations

from torch import Tensor

from paceline.ops import reference
from paceline.ops.dispatch import differentiated, kernels


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` where ``gate_up`` [*, 2I] holds gate, then up. Returns [*, I]."""
    if gate_up.is_cuda and not differentiated(gate_up):
        return kernels().silu_mul(gate_up)  # type: ignore[no-any-return]
    return reference.silu_mul(gate_up)
