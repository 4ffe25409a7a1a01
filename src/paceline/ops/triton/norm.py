"""RMS norm, with and without the residual add before it, and the last sum of a product split by its depth.

One program per row; the row stays in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.triton.dependent import await_previous, dependent_launch


# Not specialised: a new batch size must not compile a new kernel while serving.
@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    x_stride,
    residual_stride,
    num_rows,
    dim,
    eps,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,  # x is [PARTS, R, dim] fp32, contiguous; 0: it is [R, dim]
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < dim
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    if PARTS > 0:
        for part in tl.static_range(1, PARTS):
            part_row = part * num_rows + row  # times dim, from which it is seen that it is aligned
            x += tl.load(x_ptr + part_row * dim + column, mask=inside, other=0.0)
        x = x.to(out_ptr.dtype.element_ty)  # rounded as the product would be
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
    like = x if residual is None else residual
    num_parts = x.shape[0] if x.dim() > like.dim() else 0
    rows = x.reshape(-1, dim)  # [R, d], or [S * R, d] fp32
    added = like.reshape(-1, dim)
    out = torch.empty(like.shape, dtype=like.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    assert rows.stride(1) == added.stride(1) == 1 and (num_parts == 0 or rows.is_contiguous())
    if added.shape[0]:
        block = triton.next_power_of_2(dim)
        _rms_norm_kernel[(added.shape[0],)](
            rows,
            added,
            weight,
            out,
            total,
            rows.stride(0),
            added.stride(0),
            added.shape[0],
            dim,
            eps,
            ADD=residual is not None,
            PARTS=num_parts,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
            **dependent_launch(x.device),
        )
    return out, total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See :func:`paceline.ops.rms_norm`."""
    return _launch(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See :func:`paceline.ops.add_rms_norm`."""
    return _launch(x, residual, weight, eps)
