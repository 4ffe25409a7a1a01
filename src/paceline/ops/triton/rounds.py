# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# (Triton kernels are a language of their own inside Python's syntax.)
"""The small change of a decode round: which rows there are, how many drafts stand, where lengths move to.

A few integers each, but some forty launches as tensor arithmetic, of which each costs as much as reading four
megabytes of weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.sampling.triton_sampler import row_key

BLOCK = 256


@triton.jit(
    do_not_specialize=[
        "slots_ptr",
        "drafts_ptr",
        "num_computed_ptr",
        "token_table_ptr",
        "block_tables_ptr",
        "num_rows",
        "last",
        "scratch",
        "token_stride",
        "table_stride",
    ]
)
def _span_rows_kernel(
    slots_ptr,  # [N]
    drafts_ptr,  # [N]
    num_computed_ptr,  # [S]
    token_table_ptr,  # [S, L]
    block_tables_ptr,  # [S, M]
    positions_ptr,  # [N * W] int32
    tokens_ptr,  # [N * W] int32
    kv_slots_ptr,  # [N * W] int64
    row_slots_ptr,  # [N * W] int32
    num_rows,
    last,
    scratch,
    token_stride,
    table_stride,
    W: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    seq = row // W
    offset = row % W
    slot = tl.load(slots_ptr + seq, mask=inside, other=0).to(tl.int64)
    drafts = tl.load(drafts_ptr + seq, mask=inside, other=0)
    position = tl.minimum(tl.load(num_computed_ptr + slot, mask=inside, other=0) + offset, last)
    token = tl.load(token_table_ptr + slot * token_stride + position, mask=inside, other=0)
    block = tl.load(block_tables_ptr + slot * table_stride + position // P, mask=inside, other=0)
    own = block.to(tl.int64) * P + position % P
    nobodys = tl.full((BLOCK,), 0, tl.int64) + scratch + position % P
    tl.store(positions_ptr + row, position, mask=inside)
    tl.store(tokens_ptr + row, token, mask=inside)
    tl.store(kv_slots_ptr + row, tl.where(offset <= drafts, own, nobodys), mask=inside)
    tl.store(row_slots_ptr + row, slot.to(tl.int32), mask=inside)


def span_rows(
    slots: Tensor,
    drafts: Tensor,
    num_computed: Tensor,
    tokens: Tensor,
    block_tables: Tensor,
    width: int,
    block_size: int,
    last: int,
    scratch: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`paceline.ops.span_rows`."""
    assert tokens.is_contiguous() and block_tables.is_contiguous() and num_computed.is_contiguous()
    assert slots.is_contiguous() and drafts.is_contiguous()
    num_rows = len(slots) * width
    device = slots.device
    positions = torch.empty((num_rows,), dtype=torch.int32, device=device)
    fed = torch.empty((num_rows,), dtype=torch.int32, device=device)
    kv_slots = torch.empty((num_rows,), dtype=torch.int64, device=device)
    row_slots = torch.empty((num_rows,), dtype=torch.int32, device=device)
    _span_rows_kernel[(triton.cdiv(num_rows, BLOCK),)](
        slots,
        drafts,
        num_computed,
        tokens,
        block_tables,
        positions,
        fed,
        kv_slots,
        row_slots,
        num_rows,
        last,
        scratch,
        tokens.stride(0),
        block_tables.stride(0),
        W=width,
        P=block_size,
        BLOCK=BLOCK,
    )
    return positions, fed, kv_slots, row_slots


@triton.jit(
    do_not_specialize=[
        "slots_ptr",
        "limits_ptr",
        "leads_ptr",
        "chances_ptr",
        "num_seqs",
        "num_rows",
        "stride",
    ]
)
def _allot_drafts_kernel(
    slots_ptr,  # [N]
    limits_ptr,  # [N]
    leads_ptr,  # [N]
    chances_ptr,  # [S, G] fp32
    drafts_ptr,  # [N] int32
    num_seqs,
    num_rows,
    stride,
    G: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    limit = tl.load(limits_ptr + seq)
    slot = tl.load(slots_ptr + seq).to(tl.int64)
    own = _rank_key(tl.load(chances_ptr + slot * stride + column, mask=column < G, other=0.0), column, slot)
    before = tl.zeros((COLUMNS,), tl.int32)  # drafts that come before each of this sequence's
    given = tl.zeros((), tl.int32)  # rows that are no drafts'
    for first in range(0, num_seqs, BLOCK):
        other = first + tl.arange(0, BLOCK)
        inside = other < num_seqs
        limits = tl.load(limits_ptr + other, mask=inside, other=-1)
        slots = tl.load(slots_ptr + other, mask=inside, other=0).to(tl.int64)
        leads = tl.load(leads_ptr + other, mask=inside, other=0)
        given += tl.sum(tl.where(limits >= 0, leads + 1, 0), axis=0)
        for draft in tl.static_range(G):
            chance = tl.load(chances_ptr + slots * stride + draft, mask=inside, other=0.0)
            key = tl.where(draft < limits, _rank_key(chance, draft, slots), -1)
            before += tl.sum((key[:, None] > own[None, :]).to(tl.int32), axis=0)
    taken = (column < tl.minimum(limit, G)) & (before < num_rows - given)
    tl.store(drafts_ptr + seq, tl.where(limit < 0, limit, tl.sum(taken.to(tl.int32), axis=0)))


@triton.jit
def _rank_key(chance, draft, slot):
    """Larger for the more likely; then for the earlier draft, then for the smaller slot."""
    return ((chance * 16777216.0).to(tl.int64) << 25) + ((31 - draft) << 20) + (1048575 - slot)


def allot_drafts(slots: Tensor, limits: Tensor, leads: Tensor, chances: Tensor, num_rows: int) -> Tensor:
    """See :func:`paceline.ops.allot_drafts`."""
    assert slots.is_contiguous() and limits.is_contiguous() and leads.is_contiguous()
    assert chances.stride(1) == 1
    num_drafts = chances.shape[1]
    drafts = torch.empty((len(slots),), dtype=torch.int32, device=slots.device)
    _allot_drafts_kernel[(len(slots),)](
        slots,
        limits,
        leads,
        chances,
        drafts,
        len(slots),
        num_rows,
        chances.stride(0),
        G=num_drafts,
        COLUMNS=max(triton.next_power_of_2(num_drafts), 2),
        BLOCK=64,
    )
    return drafts


@triton.jit(
    do_not_specialize=[
        "slots_ptr",
        "drafts_ptr",
        "leads_ptr",
        "num_computed_ptr",
        "token_table_ptr",
        "block_tables_ptr",
        "num_seqs",
        "num_rows",
        "spare",
        "last",
        "scratch",
        "token_stride",
        "table_stride",
    ]
)
def _packed_rows_kernel(
    slots_ptr,  # [N]
    drafts_ptr,  # [N]
    leads_ptr,  # [N]
    num_computed_ptr,  # [S]
    token_table_ptr,  # [S, L]
    block_tables_ptr,  # [S, M]
    row_start_ptr,  # [N + 1] int32
    row_seq_ptr,  # [R] int32
    positions_ptr,  # [R] int32
    tokens_ptr,  # [R] int32
    kv_slots_ptr,  # [R] int64
    row_slots_ptr,  # [R] int32
    num_seqs,
    num_rows,
    spare,
    last,
    scratch,
    token_stride,
    table_stride,
    P: tl.constexpr,
    SEQS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq = tl.arange(0, SEQS)
    drafts = tl.load(drafts_ptr + seq, mask=seq < num_seqs, other=-1)
    leads = tl.load(leads_ptr + seq, mask=seq < num_seqs, other=0)
    counts = tl.where(drafts < 0, 0, leads + 1 + drafts)  # rows of each sequence
    ends = tl.cumsum(counts, axis=0)
    if tl.program_id(0) == 0:
        tl.store(row_start_ptr + seq, ends - counts, mask=seq < num_seqs)
        tl.store(row_start_ptr + num_seqs, tl.sum(counts, axis=0))
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    behind = (ends[None, :] <= row[:, None]) & (seq < num_seqs)[None, :]
    owner = tl.sum(behind.to(tl.int32), axis=1)  # N for rows that are nobody's
    offset = row - tl.sum(tl.where(behind, counts[None, :], 0), axis=1)
    owned = owner < num_seqs
    slot = tl.load(slots_ptr + owner, mask=inside & owned, other=0)
    slot = tl.where(owned, slot, spare).to(tl.int64)
    position = tl.minimum(tl.load(num_computed_ptr + slot, mask=inside, other=0) + offset, last)
    token = tl.load(token_table_ptr + slot * token_stride + position, mask=inside, other=0)
    block = tl.load(block_tables_ptr + slot * table_stride + position // P, mask=inside, other=0)
    own = block.to(tl.int64) * P + position % P
    nobodys = tl.full((BLOCK,), 0, tl.int64) + scratch + position % P
    tl.store(row_seq_ptr + row, owner, mask=inside)
    tl.store(positions_ptr + row, position, mask=inside)
    tl.store(tokens_ptr + row, token, mask=inside)
    tl.store(kv_slots_ptr + row, tl.where(owned, own, nobodys), mask=inside)
    tl.store(row_slots_ptr + row, slot.to(tl.int32), mask=inside)


def packed_rows(
    slots: Tensor,
    drafts: Tensor,
    leads: Tensor,
    num_computed: Tensor,
    tokens: Tensor,
    block_tables: Tensor,
    num_rows: int,
    block_size: int,
    spare: int,
    last: int,
    scratch: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :func:`paceline.ops.packed_rows`."""
    assert tokens.is_contiguous() and block_tables.is_contiguous() and num_computed.is_contiguous()
    assert slots.is_contiguous() and drafts.is_contiguous() and leads.is_contiguous()
    device, num_seqs, block = slots.device, len(slots), 32
    ints = torch.empty((4, num_rows), dtype=torch.int32, device=device)
    row_seq, positions, fed, row_slots = ints.unbind(0)
    row_start = torch.empty((num_seqs + 1,), dtype=torch.int32, device=device)
    kv_slots = torch.empty((num_rows,), dtype=torch.int64, device=device)
    _packed_rows_kernel[(triton.cdiv(num_rows, block),)](
        slots,
        drafts,
        leads,
        num_computed,
        tokens,
        block_tables,
        row_start,
        row_seq,
        positions,
        fed,
        kv_slots,
        row_slots,
        num_seqs,
        num_rows,
        spare,
        last,
        scratch,
        tokens.stride(0),
        block_tables.stride(0),
        P=block_size,
        SEQS=max(triton.next_power_of_2(num_seqs), 2),
        BLOCK=block,
    )
    return row_start, row_seq, positions, fed, kv_slots, row_slots


@triton.jit(
    do_not_specialize=[
        "slots_ptr",
        "reserved_ptr",
        "num_computed_ptr",
        "token_table_ptr",
        "tables_ptr",
        "num_rows",
        "mask_id",
        "scratch",
        "token_stride",
        "table_stride",
    ]
)
def _block_rows_kernel(
    slots_ptr,  # [N]
    reserved_ptr,  # [N]
    num_computed_ptr,  # [S]
    token_table_ptr,  # [S, L]
    tables_ptr,  # [S, M]
    starts_ptr,  # [N] int32
    positions_ptr,  # [N * W] int32
    tokens_ptr,  # [N * W] int32
    kv_slots_ptr,  # [N * W] int64
    num_rows,
    mask_id,
    scratch,
    token_stride,
    table_stride,
    W: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    seq = row // W
    offset = row % W
    is_anchor = inside & (offset == 0)
    slot = tl.load(slots_ptr + seq, mask=inside, other=0).to(tl.int64)
    reserved = tl.load(reserved_ptr + seq, mask=inside, other=0)
    start = tl.load(num_computed_ptr + slot, mask=inside, other=0)
    position = start + offset
    anchor = tl.load(token_table_ptr + slot * token_stride + start, mask=is_anchor, other=0)
    block = tl.load(tables_ptr + slot * table_stride + position // P, mask=inside, other=0)
    own = block.to(tl.int64) * P + position % P
    nobodys = tl.full((BLOCK,), 0, tl.int64) + scratch + position % P
    tl.store(starts_ptr + seq, start, mask=is_anchor)
    tl.store(positions_ptr + row, position, mask=inside)
    tl.store(tokens_ptr + row, tl.where(offset == 0, anchor, mask_id), mask=inside)
    tl.store(kv_slots_ptr + row, tl.where(reserved != 0, own, nobodys), mask=inside)


def block_rows(
    slots: Tensor,
    reserved: Tensor,
    num_computed: Tensor,
    tokens: Tensor,
    tables: Tensor,
    width: int,
    block_size: int,
    mask_id: int,
    scratch: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`paceline.ops.block_rows`."""
    assert tokens.is_contiguous() and tables.is_contiguous() and num_computed.is_contiguous()
    assert slots.is_contiguous() and reserved.is_contiguous()
    num_rows = len(slots) * width
    device = slots.device
    starts = torch.empty((len(slots),), dtype=torch.int32, device=device)
    positions = torch.empty((num_rows,), dtype=torch.int32, device=device)
    fed = torch.empty((num_rows,), dtype=torch.int32, device=device)
    kv_slots = torch.empty((num_rows,), dtype=torch.int64, device=device)
    _block_rows_kernel[(triton.cdiv(num_rows, BLOCK),)](
        slots,
        reserved,
        num_computed,
        tokens,
        tables,
        starts,
        positions,
        fed,
        kv_slots,
        num_rows,
        mask_id,
        scratch,
        tokens.stride(0),
        tables.stride(0),
        W=width,
        P=block_size,
        BLOCK=BLOCK,
    )
    return starts, positions, fed, kv_slots


@triton.jit(
    do_not_specialize=[
        "slots_ptr",
        "num_computed_ptr",
        "token_table_ptr",
        "token_stride",
        "draft_stride",
        "column_stride",
    ]
)
def _place_drafts_kernel(
    slots_ptr,  # [N]
    drafts_ptr,  # [N, G] int64, rows draft_stride and columns column_stride apart
    num_computed_ptr,  # [S]
    token_table_ptr,  # [S, L]
    token_stride,
    draft_stride,
    column_stride,
    G: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < G
    slot = tl.load(slots_ptr + seq).to(tl.int64)
    first = slot * token_stride + tl.load(num_computed_ptr + slot) + 1
    draft = tl.load(drafts_ptr + seq * draft_stride + column * column_stride, mask=inside, other=0)
    tl.store(token_table_ptr + first + column, draft.to(tl.int32), mask=inside)


def place_drafts(slots: Tensor, drafts: Tensor, num_computed: Tensor, tokens: Tensor) -> None:
    """See :func:`paceline.ops.place_drafts`."""
    assert tokens.is_contiguous() and num_computed.is_contiguous() and slots.is_contiguous()
    _place_drafts_kernel[(len(slots),)](
        slots,
        drafts,
        num_computed,
        tokens,
        tokens.stride(0),
        drafts.stride(0),
        drafts.stride(1),
        G=drafts.shape[1],
        BLOCK=max(triton.next_power_of_2(drafts.shape[1]), 2),
    )


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
