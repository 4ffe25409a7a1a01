# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# (Triton kernels are a language of their own inside Python's syntax.)
"""What becomes of a round's rows: how many drafts stand, and where lengths move to. A few integers each, in
one launch each, as in ``rounds.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.sampling.triton_sampler import row_key


@triton.jit(do_not_specialize=["left_ptr", "right_ptr", "limits_ptr", "left_stride", "right_stride"])
def _leading_matches_kernel(
    left_ptr,  # [N, at least K] int32, rows left_stride apart
    right_ptr,  # [N, K] int32, rows right_stride apart
    limits_ptr,  # [N]
    found_ptr,  # [N] int32
    left_stride,
    right_stride,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    limit = tl.maximum(tl.minimum(tl.load(limits_ptr + seq), K), 0)
    asked = column < limit
    left = tl.load(left_ptr + seq * left_stride + column, mask=asked, other=0)
    right = tl.load(right_ptr + seq * right_stride + column, mask=asked, other=0)
    # the first column that differs, or the end of those asked for
    first = tl.min(tl.where(asked & (left == right), BLOCK, column), axis=0)
    tl.store(found_ptr + seq, tl.minimum(first, limit))


def leading_matches(left: Tensor, right: Tensor, limits: Tensor) -> Tensor:
    """See :func:`paceline.ops.leading_matches`."""
    num_seqs, num_columns = right.shape
    assert left.stride(1) == 1 and (num_columns <= 1 or right.stride(1) == 1)
    found = torch.empty((num_seqs,), dtype=torch.int32, device=left.device)
    if num_seqs:
        _leading_matches_kernel[(num_seqs,)](
            left,
            right,
            limits,
            found,
            left.stride(0),
            right.stride(0),
            K=num_columns,
            BLOCK=max(triton.next_power_of_2(num_columns + 1), 2),
        )
    return found


@triton.jit(
    do_not_specialize=[
        "slots_ptr",
        "drafts_ptr",
        "leads_ptr",
        "num_computed_ptr",
        "token_table_ptr",
        "token_stride",
    ]
)
def _advance_kernel(
    slots_ptr,  # [N]
    drafts_ptr,  # [N]
    leads_ptr,  # [N], if LEADS
    sampled_ptr,  # [N, W] int32
    accepted_ptr,  # [N] int32
    num_computed_ptr,  # [S]
    token_table_ptr,  # [S, L]
    token_stride,
    LEADS: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < W
    slot = tl.load(slots_ptr + seq).to(tl.int64)
    if tl.load(drafts_ptr + seq) >= 0:
        anchor = tl.load(num_computed_ptr + slot)
        if LEADS:
            anchor += tl.load(leads_ptr + seq)
        drawn = tl.load(sampled_ptr + seq * W + column, mask=inside, other=0)
        tl.store(token_table_ptr + slot * token_stride + anchor + 1 + column, drawn, mask=inside)
        tl.store(num_computed_ptr + slot, anchor + tl.load(accepted_ptr + seq) + 1)


def advance(
    slots: Tensor,
    drafts: Tensor,
    sampled: Tensor,
    accepted: Tensor,
    num_computed: Tensor,
    tokens: Tensor,
    leads: Tensor | None = None,
) -> None:
    """See :func:`paceline.ops.advance`."""
    assert sampled.is_contiguous() and tokens.is_contiguous() and num_computed.is_contiguous()
    assert leads is None or leads.is_contiguous()
    num_seqs, width = sampled.shape
    _advance_kernel[(num_seqs,)](
        slots,
        drafts,
        drafts if leads is None else leads,
        sampled,
        accepted,
        num_computed,
        tokens,
        tokens.stride(0),
        LEADS=leads is not None,
        W=width,
        BLOCK=max(triton.next_power_of_2(width), 2),
    )


@triton.jit(
    do_not_specialize=[
        "seed_keys_ptr",
        "slots_ptr",
        "anchors_ptr",
        "limits_ptr",
        "seed_stride",
        "anchor_stride",
        "bound_ptr",
    ]
)
def _synthetic_matches_kernel(
    seed_keys_ptr,  # [S] int64, seed_stride apart
    slots_ptr,  # [N]
    anchors_ptr,  # [N], anchor_stride apart
    limits_ptr,  # [N]
    found_ptr,  # [N] int32
    seed_stride,
    anchor_stride,
    bound_ptr,  # [1] int64
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    limit = tl.maximum(tl.minimum(tl.load(limits_ptr + seq), K), 0)
    slot = tl.load(slots_ptr + seq).to(tl.int64)
    position = tl.load(anchors_ptr + seq * anchor_stride).to(tl.int64) + 1 + column
    key = row_key(tl.load(seed_keys_ptr + slot * seed_stride), position)
    uniform = ((key >> 32) & 0x7FFFFFFF).to(tl.int64)
    first = tl.min(tl.where((uniform < tl.load(bound_ptr)) & (column < limit), BLOCK, column), axis=0)
    tl.store(found_ptr + seq, tl.minimum(first, limit))


def synthetic_matches(
    seed_keys: Tensor, slots: Tensor, anchors: Tensor, limits: Tensor, num_columns: int, bound: Tensor
) -> Tensor:
    """See :func:`paceline.ops.synthetic_matches`."""
    assert slots.is_contiguous() and limits.is_contiguous()
    found = torch.empty((len(slots),), dtype=torch.int32, device=slots.device)
    _synthetic_matches_kernel[(len(slots),)](
        seed_keys,
        slots,
        anchors,
        limits,
        found,
        seed_keys.stride(0),
        anchors.stride(0),
        bound,
        K=num_columns,
        BLOCK=max(triton.next_power_of_2(num_columns + 1), 2),
    )
    return found
