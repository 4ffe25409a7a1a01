"""RMS norm, with and without the residual add before it. One program per row; the row stays in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    x_stride,
    residual_stride,
    dim,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < dim
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
        # rounded to the residual stream's dtype before the norm reads it, as the unfused pair does
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * dim + column, x, mask=inside)
    value = x.to(tl.float32)
    inv_rms = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / dim + eps)
    normed = (value * inv_rms).to(x.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * dim + column, (normed * weight).to(x.dtype), mask=inside)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dim = x.shape[-1]
    rows = x.reshape(-1, dim)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if residual is None:
        added, total = rows, out
    else:
        added, total = residual.reshape(-1, dim), torch.empty_like(out)
    assert rows.stride(1) == added.stride(1) == 1
    if rows.shape[0]:
        block = triton.next_power_of_2(dim)
        _rms_norm_kernel[(rows.shape[0],)](
            rows,
            added,
            weight,
            out,
            total,
            rows.stride(0),
            added.stride(0),
            dim,
            eps,
            ADD=residual is not None,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )
    return out, total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See :func:`paceline.ops.rms_norm`."""
    return _launch(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See :func:`paceline.ops.add_rms_norm`."""
    return _launch(x, residual, weight, eps)
