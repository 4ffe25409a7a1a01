# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# (Triton kernels are a language of their own inside Python's syntax.)
"""Which sequence a tile of a layout's rows belongs to."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sequence_of(tile, row_start_ptr, num_seqs, TILE_ROWS: tl.constexpr):
    """The sequence of a tile, as :class:`paceline.ops.RowLayout` numbers tiles, by bisection."""
    seq = tl.full((), 0, tl.int32)
    above = tl.full((), 1, tl.int32) * num_seqs
    while above - seq > 1:
        middle = (seq + above) // 2
        starts_before = tl.load(row_start_ptr + middle) // TILE_ROWS + middle <= tile
        seq = tl.where(starts_before, middle, seq)
        above = tl.where(starts_before, above, middle)
    return seq
