"""SwiGLU's elementwise half."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.triton.dependent import await_previous, dependent_launch

BLOCK = 1024


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, row_stride, width, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    await_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up_ptr + row * row_stride + column, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * row_stride + width + column, mask=inside, other=0.0)
    gate32 = gate.to(tl.float32)
    # silu is rounded to the tensor's dtype before the product, as the unfused pair does
    silu = (gate32 / (1.0 + tl.exp(-gate32))).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * width + column, (silu * up.to(tl.float32)).to(gate.dtype), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See :func:`paceline.ops.silu_mul`."""
    width = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * width)
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    if rows.shape[0]:
        grid = (rows.shape[0], triton.cdiv(width, BLOCK))
        options = dependent_launch(rows.device)
        _silu_mul_kernel[grid](rows, out, rows.stride(0), width, BLOCK=BLOCK, num_warps=4, **options)
    return out
