"""A decode round with nothing left to the host: its only inputs are which slots take part and how far.

The generic step (``runner.py``) lays out whatever rows a plan asks for. Most steps of a server are simpler:
every sequence runs its anchor and its drafts, is sampled, accepted, and drafts again. This is that round with
fixed shapes: R rows of N sequences with up to K drafts. Because every launch, shape and address is the same
each time, the round can be captured as one CUDA graph (``graphs.py``); on a CPU it runs as it stands, which
is how its logic is tested there.

Where there are rows for all drafts of everyone, each sequence has K + 1 of them; one with fewer drafts, or
none at all, wastes rows, whose K/V go to a scratch block. Where there are not, the round is *packed*: spans
of different lengths lie side by side, and rows go to the drafts that are most likely to stand, which only the
device knows (``DraftStage.chances``). A packed round also takes the last rows of prompts: a prompt's span is
one with a *lead*, rows of known tokens before its anchor, which need no luck to stand. Some of the sequences
may have hedge chains beside their drafts (``hedging.py``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline import ops
from paceline.models.attention import KVCache, PagedContext
from paceline.models.qwen3 import Qwen3ForCausalLM
from paceline.ops import RowLayout
from paceline.runtime.acceptance import Verified, count_accepted
from paceline.runtime.drafting import DraftStage, Hedging
from paceline.runtime.few_rows import FewRows, TargetPass
from paceline.runtime.hedging import HedgedVerify, HedgeShape
from paceline.runtime.shapes import RoundShape
from paceline.runtime.sharing import NUM_VALUES, Groups
from paceline.runtime.state import SlotState
from paceline.sampling.fixed import sample_fixed
from paceline.sampling.sampler import SampleRows


class DecodeRound:
    """One round, ready to be called as often as wanted.

    Args:
        shape: what is fixed.
        model: the target.
        cache: its K/V; the last block is scratch.
        state: the slots; the spare one stands in where there is no sequence.
        drafting: the drafter, when there is one.
        max_model_len: longest sequence in tokens.
        few_rows: runs the target's pass where it fits; None never.
        choosy_from: sequences from which on there are rounds with rows for some drafts only, so that it
            matters which.

    Attributes:
        inputs: [4, N + 1] int32 on the device, to be filled before each call: slot; most drafts, -1 where
            there is no sequence; whether the sequence may propose (its blocks for the drafter are reserved);
            rows before its anchor, none unless the round is packed. The last column is nobody's, as it is
            made.
        hedge_inputs: [2, places] int32 on the device: which of the sequences has chains to verify; which
            gets chains for the next round; -1 for none.
        group_inputs: int32 on the device, see ``sharing.group_values``; where the shape is ``together``.
    """

    def __init__(
        self,
        shape: RoundShape,
        model: Qwen3ForCausalLM,
        cache: KVCache,
        state: SlotState,
        drafting: DraftStage | None,
        max_model_len: int,
        few_rows: FewRows | None = None,
        choosy_from: int = 1,
    ) -> None:
        device = state.device
        n, width = shape.num_seqs, shape.num_drafts + 1
        self.shape = shape
        self.inputs = torch.zeros(4, n + 1, dtype=torch.int32, device=device)
        self.inputs[0] = state.spare
        self.inputs[1] = -1
        self._model, self._cache, self._state, self._drafting = model, cache, state, drafting
        self.hedge_inputs = torch.full((2, shape.places), -1, dtype=torch.int32, device=device)
        count = NUM_VALUES + n if shape.together else 0
        self.group_inputs = torch.zeros(count, dtype=torch.int32, device=device)
        self._hedged: HedgedVerify | None = None
        if shape.places:
            assert drafting is not None
            chains = HedgeShape(shape.places, shape.hedges, n, shape.num_drafts)
            last = max_model_len - 1
            self._hedged = HedgedVerify(chains, shape.kind, model, cache, state, drafting, last)
        self._defers = shape.defers and drafting is not None and drafting.defers
        fits = not shape.places and not shape.packed
        self._few_rows: TargetPass | None = None
        if few_rows is not None and fits:
            self._few_rows = few_rows.target(n, width, writes_context=not self._defers)
        self._row_start = torch.arange(0, n * width + 1, width, dtype=torch.int32, device=device)
        self._row_seq = torch.arange(n, dtype=torch.int32, device=device).repeat_interleave(width)
        self._column = torch.arange(width, dtype=torch.int32, device=device)
        self._width = width
        self._chooses = shape.packed and shape.num_drafts > 0
        self._predict = n >= choosy_from
        self._scratch = (cache.k.shape[1] - 1) * state.block_size
        self._last = max_model_len - 1
        self._max_context = max_model_len + width

    def __call__(self) -> Verified:
        """Run the round on ``inputs``."""
        slots, limits, propose, leads = self.inputs[:, :-1].unbind(0)
        state, drafting = self._state, self._drafting
        drafts = limits
        if self._chooses:
            assert drafting is not None
            drafts = ops.allot_drafts(slots, limits, leads, drafting.chances, self.shape.num_rows)
        layout, tokens, row_slots = self._rows(slots, drafts, leads)
        if self._hedged is None:
            output = self._verify(slots, drafts, leads, layout, tokens, row_slots)
        else:
            output = self._hedged(slots, drafts, self.hedge_inputs[0], layout, tokens)
        if drafting is not None and drafting.predicts and self._predict and self.shape.num_drafts:
            output = output._replace(predicted=drafting.chances[slots])
        verified = slots, drafts, output.sampled, output.accepted
        standing = leads if self.shape.packed else None
        ops.advance(*verified, state.num_computed, state.tokens, standing)
        if self.shape.propose and drafting is not None:
            drafting.propose(
                slots,
                self.shape.num_seqs,
                self._max_context,
                noise=self.shape.kind != "greedy",
                reserved=propose,
                groups=self._groups,
                predict=self._predict,
                hedging=Hedging(self.hedge_inputs[1], self.shape.hedges) if self.shape.places else None,
            )
        return output

    def _verify(
        self,
        slots: Tensor,
        drafts: Tensor,
        leads: Tensor,
        layout: RowLayout,
        tokens: Tensor,
        row_slots: Tensor,
    ) -> Verified:
        """Forward, draw and accept, without chains."""
        state, drafting = self._state, self._drafting
        logits = self._forward(tokens, layout)  # [R, V]
        rows = SampleRows(row_slots, layout.positions, state.tokens, state.tokens.shape[1])
        spans = tokens.view(-1, 1 if self.shape.packed else self._width)
        drawn = sample_fixed(logits, rows, spans, state.sampling, self.shape.kind)
        by_span = self._by_span(layout, drafts, leads)
        sampled, fed = by_span(drawn.tokens), by_span(tokens)
        accepted = count_accepted(sampled, fed[:, 1:], drafts)
        if drafting is not None:  # spans with a lead have no drafts
            anchors = state.num_computed[slots] if self.shape.packed else layout.positions[:: self._width]
            accepted = drafting.override(accepted, slots, anchors, drafts)
        return Verified(sampled, accepted, drawn.logprobs, drafts if self._chooses else None)

    def _by_span(self, layout: RowLayout, drafts: Tensor, leads: Tensor) -> Callable[[Tensor], Tensor]:
        """Turns values of the rows [R] into those of each span from its anchor on, [N, K + 1]; beyond a
        span's own rows the last of them is repeated.
        """
        if not self.shape.packed:
            return lambda values: values.view(-1, self._width)
        anchors = (layout.row_start[:-1] + leads)[:, None]
        row = anchors + torch.minimum(self._column, drafts[:, None]).clamp(min=0)
        row = row.clamp(max=self.shape.num_rows - 1)
        return lambda values: values[row]

    def _forward(self, tokens: Tensor, layout: RowLayout) -> Tensor:
        """Logits of the rows; the drafter's context is written on the way, or its tap rows are kept."""
        drafting, few_rows = self._drafting, self._few_rows
        if few_rows is not None:
            logits = few_rows(tokens, layout)
            if few_rows.taps is not None and not few_rows.writes_context:
                self._take(few_rows.taps, layout)
            return logits
        taps = () if drafting is None else drafting.taps
        hidden, tapped = self._model(tokens, layout.positions, PagedContext(self._cache, layout), taps)
        if tapped is not None:
            self._take(tapped, layout)
        return self._model.logits(hidden)

    def _take(self, taps: Tensor, layout: RowLayout) -> None:
        """Give the drafter the tap rows [R, n * d]."""
        assert self._drafting is not None
        take = self._drafting.keep_context if self._defers else self._drafting.write_context
        take(taps, layout)

    def _rows(self, slots: Tensor, drafts: Tensor, leads: Tensor) -> tuple[RowLayout, Tensor, Tensor]:
        """The rows' layout, the tokens they are fed and their slots, [R]."""
        state, packed = self._state, self.shape.packed
        tables = state.num_computed, state.tokens, state.block_tables
        if packed:
            row_start, row_seq, positions, tokens, kv_slots, row_slots = ops.packed_rows(
                slots,
                drafts,
                leads,
                *tables,
                self.shape.num_rows,
                state.block_size,
                state.spare,
                self._last,
                self._scratch,
            )
        else:
            row_start, row_seq = self._row_start, self._row_seq
            positions, tokens, kv_slots, row_slots = ops.span_rows(
                slots, drafts, *tables, self._width, state.block_size, self._last, self._scratch
            )
        layout = RowLayout(
            slots=self.inputs[0] if packed else slots,
            row_start=row_start,
            row_seq=row_seq,
            positions=positions,
            kv_slots=kv_slots,
            block_tables=state.block_tables,
            num_computed=state.num_computed,
            host_rows=(self.shape.num_rows if packed else self._width,) * self.shape.num_seqs,
            host_max_context=self._max_context,
            host_span=self._width if packed else None,
            common=None if self._groups is None else self._groups.keys(row_start),
        )
        return layout, tokens, row_slots

    @property
    def _groups(self) -> Groups | None:
        return Groups.of(self.group_inputs) if self.shape.together else None
