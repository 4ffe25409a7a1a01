"""From a plan's spans to the rows of a step: which rows exist, which are sampled, which are tentative."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from torch import Tensor

from paceline.ops import RowLayout
from paceline.runtime.plan import Span
from paceline.runtime.staging import Staging
from paceline.runtime.state import SlotState


@dataclass(slots=True)
class StepRows:
    """The rows of one step on the device, and what the host knows of them.

    B spans, R rows, N sampled spans, Q sampled rows, K the most drafts of any span.

    Attributes:
        layout: the rows as attention sees them.
        tokens: [R] int32, what each row is fed.
        span_rows: [B] int32, rows of each span.
        sampled_spans: [N] int32, which spans draw tokens.
        sample_rows: [Q] int32, rows whose logits are drawn from: the anchor and its drafts, span by span.
        sample_slots, sample_positions: [Q] int32, slot and position of those rows.
        first_sample: [N] int32, index in 0..Q-1 of each sampled span's anchor.
        num_drafts: [N] int32.
        max_drafts: K.
        host_sampled: indices of the sampled spans.
        proposing: int32, slots to draft for after this step; ``host_proposing`` the same for the host.
    """

    layout: RowLayout
    tokens: Tensor
    span_rows: Tensor
    sampled_spans: Tensor
    sample_rows: Tensor
    sample_slots: Tensor
    sample_positions: Tensor
    first_sample: Tensor
    num_drafts: Tensor
    max_drafts: int
    host_sampled: list[int]
    proposing: Tensor
    host_proposing: list[int]


def build_rows(spans: Sequence[Span], state: SlotState, staging: Staging, max_context: int) -> StepRows:
    """Lay out the rows of ``spans``. One upload; everything that depends on lengths is computed on the
    device.

    Args:
        spans: the plan's spans.
        state: slot arrays the rows' positions, tokens and cache slots are read from.
        staging: upload buffers.
        max_context: an upper bound of the largest position + 1.
    """
    rows = np.array([span.rows for span in spans], dtype=np.int32)
    slots = np.array([span.slot for span in spans], dtype=np.int32)
    row_start = np.zeros(len(spans) + 1, dtype=np.int32)
    np.cumsum(rows, out=row_start[1:])
    row_seq = np.repeat(np.arange(len(spans), dtype=np.int32), rows)
    row_offset = np.arange(row_start[-1], dtype=np.int32) - np.repeat(row_start[:-1], rows)

    sampled = [i for i, span in enumerate(spans) if span.sample]
    drafts = np.array([spans[i].drafts for i in sampled], dtype=np.int32)
    drawn = drafts + 1
    first_sample = np.zeros(len(sampled), dtype=np.int32)
    if sampled:
        np.cumsum(drawn[:-1], out=first_sample[1:])
    last_row = row_start[1:][sampled]  # one past each sampled span's last row
    sample_rows = np.arange(drawn.sum(), dtype=np.int32) + np.repeat(last_row - drawn - first_sample, drawn)

    proposing = [span.slot for span in spans if span.propose]
    sent = staging.send(
        [
            rows,
            slots,
            row_start,
            row_seq,
            row_offset,
            np.array(sampled, dtype=np.int32),
            sample_rows.astype(np.int32),
            first_sample,
            drafts,
            np.array(proposing, dtype=np.int32),
        ]
    )
    rows_d, slots_d, row_start_d, row_seq_d, row_offset_d, sampled_d, sample_rows_d, first_d, drafts_d = sent[
        :9
    ]
    row_slot = slots_d[row_seq_d]  # [R]
    positions = state.num_computed[row_slot] + row_offset_d  # [R]
    tokens = state.tokens.view(-1)[row_slot.long() * state.tokens.shape[1] + positions]
    layout = RowLayout(
        slots=slots_d,
        row_start=row_start_d,
        row_seq=row_seq_d,
        positions=positions,
        kv_slots=state.kv_slots(row_slot, positions),
        block_tables=state.block_tables,
        num_computed=state.num_computed,
        host_rows=tuple(span.rows for span in spans),
        host_max_context=max_context,
        num_fresh=sum(1 for _ in takewhile(lambda span: span.fresh, reversed(spans))),
    )
    return StepRows(
        layout=layout,
        tokens=tokens,
        span_rows=rows_d,
        sampled_spans=sampled_d,
        sample_rows=sample_rows_d,
        sample_slots=row_slot[sample_rows_d],
        sample_positions=positions[sample_rows_d],
        first_sample=first_d,
        num_drafts=drafts_d,
        max_drafts=int(drafts.max(initial=0)),
        host_sampled=sampled,
        proposing=sent[9],
        host_proposing=proposing,
    )
