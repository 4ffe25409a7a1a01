# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# (Triton kernels are a language of their own inside Python's syntax.)
"""From a row's slot and position to where it lies in a paged cache: one launch instead of eight."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


@triton.jit(do_not_specialize=["tables_ptr", "slots_ptr", "positions_ptr", "num_rows", "table_stride"])
def _cache_slots_kernel(
    tables_ptr,  # [S, M] int32
    slots_ptr,  # [R]
    positions_ptr,  # [R]
    out_ptr,  # [R] int64
    num_rows,
    table_stride,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    slot = tl.load(slots_ptr + row, mask=inside, other=0).to(tl.int64)
    position = tl.load(positions_ptr + row, mask=inside, other=0).to(tl.int64)
    block = tl.load(tables_ptr + slot * table_stride + position // P, mask=inside, other=0).to(tl.int64)
    tl.store(out_ptr + row, block * P + position % P, mask=inside)


def cache_slots(tables: Tensor, block_size: int, slots: Tensor, positions: Tensor) -> Tensor:
    """See :func:`paceline.ops.cache_slots`."""
    assert tables.is_contiguous() and slots.is_contiguous() and positions.is_contiguous()
    num_rows = positions.numel()
    out = torch.empty(positions.shape, dtype=torch.int64, device=positions.device)
    if num_rows:
        _cache_slots_kernel[(triton.cdiv(num_rows, BLOCK),)](
            tables, slots, positions, out, num_rows, tables.stride(0), P=block_size, BLOCK=BLOCK
        )
    return out
