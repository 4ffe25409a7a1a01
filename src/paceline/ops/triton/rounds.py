# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# (Triton kernels are a language of their own inside Python's syntax.)
"""The rows of a decode round: which there are, what they are fed, where they stand and are written to; whose
drafts get some; and where drafts go when they are made.

A few integers each, but some forty launches as tensor arithmetic, of which each costs as much as reading four
megabytes of weights. What becomes of the rows is in ``acceptance.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


@triton.jit
def _cache_slot(tables_ptr, table_stride, slot, position, inside, owned, scratch, P: tl.constexpr):
    """Where a row's K and V go (int64): its own place where it is ``owned``, else one that is nobody's."""
    block = tl.load(tables_ptr + slot * table_stride + position // P, mask=inside, other=0)
    own = block.to(tl.int64) * P + position % P
    nobodys = tl.zeros_like(own) + scratch + position % P
    return tl.where(owned, own, nobodys)


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
    real = offset <= drafts
    kv_slot = _cache_slot(block_tables_ptr, table_stride, slot, position, inside, real, scratch, P)
    tl.store(positions_ptr + row, position, mask=inside)
    tl.store(tokens_ptr + row, token, mask=inside)
    tl.store(kv_slots_ptr + row, kv_slot, mask=inside)
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
    kv_slot = _cache_slot(block_tables_ptr, table_stride, slot, position, inside, owned, scratch, P)
    tl.store(row_seq_ptr + row, owner, mask=inside)
    tl.store(positions_ptr + row, position, mask=inside)
    tl.store(tokens_ptr + row, token, mask=inside)
    tl.store(kv_slots_ptr + row, kv_slot, mask=inside)
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
    kv_slot = _cache_slot(tables_ptr, table_stride, slot, position, inside, reserved != 0, scratch, P)
    tl.store(starts_ptr + seq, start, mask=is_anchor)
    tl.store(positions_ptr + row, position, mask=inside)
    tl.store(tokens_ptr + row, tl.where(offset == 0, anchor, mask_id), mask=inside)
    tl.store(kv_slots_ptr + row, kv_slot, mask=inside)


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
