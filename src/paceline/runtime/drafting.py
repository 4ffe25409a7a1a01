"""The draft half of a round: keep what the drafter knows of the past, and propose the next block.

The drafter's K/V of a token lie in tensors of their own, and are written after every target forward for
every row, or a little later while nothing is drafted (``deferred.py``). *Paged* draft state puts them under
the block ids of the target: whatever shares, reuses or frees a target block does the same for the draft
state, and a prefix hit needs no work. *Captured* draft state gives each sequence blocks of its own, and keeps
the tap rows of full blocks to rebuild them from.

Nothing that goes wrong with a drafter ends a request: whatever then stands in the places of its drafts is
verified like any drafts, and refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from paceline import ops
from paceline.models.attention import KVCache, PagedContext
from paceline.models.drafter import Drafter, DraftSlots
from paceline.ops import BlockNoise, RowLayout
from paceline.runtime.captures import CaptureStore
from paceline.runtime.failures import FailureLog
from paceline.runtime.few_rows import FewRows
from paceline.runtime.plan import DraftUpdates
from paceline.runtime.sharing import Groups
from paceline.runtime.state import SlotState
from paceline.sampling.state import SEED_KEY

logger = logging.getLogger(__name__)

KEPT_ROWS = 16
"""Tap rows kept of each slot while its context waits: writing them costs little more than writing one, and
they take 0.4 MB a slot (Qwen3-4B)."""


class Hedging(NamedTuple):
    """Which sequences of a proposal get hedge chains.

    Attributes:
        places: [places] int32, their indices; -1 for nobody.
        positions: drafts the chains replace, the first of the stage's.
    """

    places: Tensor
    positions: tuple[int, ...]


class DraftStage:
    """A drafter with its state.

    Args:
        drafter: bound to the target.
        cache: its K/V, addressed by the target's block ids, or by draft blocks when rows are captured.
        state: the slots.
        num_drafts: drafts per round, at most the drafter's block holds.
        window: the drafter attends to so many last tokens only; None for no limit.
        captures: the store of tap rows, [capture slots, P, n * d]; None for paged draft state.
        synthetic_rate: accept each draft with this chance instead of by the rule; None for the rule.
        few_rows: runs the drafter's pass where it fits; None never.
        hedge_positions: drafts that hedge chains may replace, ascending.
        predict: whether anyone asks how likely drafts are to stand.

    Attributes:
        capture_rows: the store of tap rows.
        hedges: [S + 1, positions, num_drafts] int32, the hedge chains of each slot beside its drafts, as far
            as they were made with them.
        predicts: whether the drafter has a confidence head, and is asked.
        chances: [S + 1, g] fp32, by slot, what it last said: that each draft and all before it stand; 1 where
            it said nothing so far.
        failure: what went wrong last, in words; None for nothing so far.
    """

    def __init__(
        self,
        drafter: Drafter,
        cache: KVCache,
        state: SlotState,
        *,
        num_drafts: int,
        window: int | None = None,
        captures: Tensor | None = None,
        synthetic_rate: float | None = None,
        few_rows: FewRows | None = None,
        hedge_positions: Sequence[int] = (),
        predict: bool = True,
    ) -> None:
        self.failure: str | None = None
        self._log_failure = FailureLog(logger, "Drafting failed; its drafts are lost.")
        self._few_rows = few_rows
        self.drafter = drafter
        self.cache = cache
        self.num_drafts = num_drafts
        self._synthetic: Tensor | None = None
        if synthetic_rate is not None:
            self._synthetic = torch.empty((), dtype=torch.int64, device=state.device)
            self.change_synthetic_rate(synthetic_rate)
        self.capture_rows = captures
        shape = (state.spare + 1, len(hedge_positions), num_drafts)
        self.hedges = torch.zeros(shape, dtype=torch.int32, device=state.device)
        self.predicts = predict and drafter.confidence_head is not None
        self.chances = torch.ones(shape[0], num_drafts, device=state.device)
        self._state = state
        self._width = drafter.config.block_size
        # Of as many blocks as there can be: those of fewer are their beginnings.
        step = torch.arange(state.spare + 1, device=state.device, dtype=torch.int32)
        self._row_start, self._row_seq = step * self._width, step[:-1].repeat_interleave(self._width)
        self._token_ids = None if drafter.target_ids is None else drafter.target_ids.to(torch.int32)
        self._captures = None if captures is None else CaptureStore(captures, cache.k.shape[1], state)
        self._tables = state.block_tables if self._captures is None else self._captures.draft_tables
        if window is not None:
            for layer in drafter.draft_layers():
                own = layer.spec.window
                layer.spec = replace(layer.spec, window=window if own is None else min(own, window))

    def make_places(self) -> None:
        """Make places for tap rows that are kept, addressed like a paged cache in which all blocks of a slot
        are the same one.
        """
        state, config = self._state, self.drafter.config
        count, blocks = state.spare + 1, -(-state.tokens.shape[1] // KEPT_ROWS)
        width = len(config.tap_layer_ids) * config.layers.hidden_size
        self._kept = self.cache.k.new_zeros(count * KEPT_ROWS, width)
        slots = torch.arange(count, dtype=torch.int32, device=state.device)
        self._kept_tables = slots[:, None].repeat(1, blocks)

    @property
    def defers(self) -> bool:
        """Whether context may be written late. Captured rows are not: nothing would be saved."""
        return self._captures is None

    @property
    def num_failures(self) -> int:
        """How often something went wrong."""
        return self._log_failure.count

    @property
    def taps(self) -> Sequence[int]:
        """Target layers whose outputs ``write_context`` needs."""
        return self.drafter.config.tap_layer_ids

    def begin(self, updates: DraftUpdates) -> None:
        """Before the rows of a step: new tenants of slots, their tables, and the draft K/V of the prefixes
        they share, rebuilt from captured rows.
        """
        if self._captures is None:
            return
        with self.forgiven():
            self._captures.apply(updates)
            for taps, positions, kv_slots in self._captures.restored(updates.restores):
                self._write(taps, positions, kv_slots)

    def write_context(self, taps: Tensor, layout: RowLayout) -> None:
        """Write the draft K/V of the step's rows, and capture them.

        Rows of drafts that do not stand are written too: they are overwritten when their positions are
        forwarded again, exactly like the target's K/V.

        Args:
            taps: [R, n * d].
            layout: whose rows these are.
        """
        captures = self._captures
        with self.forgiven():
            if captures is not None:
                captures.capture(taps, layout)
            kv_slots = layout.kv_slots if captures is None else captures.kv_slots(layout)
            self._write(taps, layout.positions, kv_slots)

    def keep_context(self, taps: Tensor, layout: RowLayout) -> None:
        """Keep the tap rows [N, n * d] of N sequences' single rows, whose draft K/V is written later."""
        with self.forgiven():
            self._kept.index_copy_(0, self._kept_places(layout.slots, layout.positions), taps)

    def write_kept(self, slots: Tensor, behind: Tensor) -> None:
        """Write the draft K/V of kept rows.

        Args:
            slots: [R] int32 contiguous; the spare one for no row.
            behind: [R] int32, how many rows from its slot's end each lies, 1 for the last.
        """
        state = self._state
        positions = (state.num_computed[slots] - behind).clamp(min=0)
        kv_slots = ops.cache_slots(self._tables, state.block_size, slots, positions)
        taps = self._kept[self._kept_places(slots, positions)]
        self._write(taps, positions, kv_slots.masked_fill(slots == state.spare, -1))

    def _kept_places(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Where rows are kept: [R] int64."""
        return ops.cache_slots(self._kept_tables, KEPT_ROWS, slots, positions)

    def _write(self, taps: Tensor, positions: Tensor, kv_slots: Tensor) -> None:
        """Draft K/V of tap rows [R, n * d] into cache slots [R]."""
        self.drafter.write_context(taps, positions, kv_slots, self.cache)

    def override(self, accepted: Tensor, slots: Tensor, anchors: Tensor, num_drafts: Tensor) -> Tensor:
        """How many drafts stand, given how many do by the rule: as many, unless acceptance is synthetic.

        Args:
            accepted, slots, anchors, num_drafts: [N] int32; anchors are positions.
        """
        if self._synthetic is None:
            return accepted
        seed_keys = self._state.sampling.ints[:, SEED_KEY]
        return ops.synthetic_matches(seed_keys, slots, anchors, num_drafts, self.num_drafts, self._synthetic)

    @torch.inference_mode()
    def change_synthetic_rate(self, rate: float) -> None:
        """Accept each draft with this chance from now on, where acceptance is synthetic."""
        assert self._synthetic is not None
        self._synthetic.fill_(round(rate * 2**31))

    def propose(
        self,
        slots: Tensor,
        count: int,
        max_context: int,
        *,
        noise: bool,
        reserved: Tensor | None = None,
        hedging: Hedging | None = None,
        groups: Groups | None = None,
        predict: bool = True,
    ) -> None:
        """Draft for sequences whose newest token is in place, and write the drafts behind it.

        Args:
            slots: [N] int32.
            count: N.
            max_context: upper bound of the anchors' positions + 1.
            noise: whether any of the slots draws at random.
            reserved: [N] int32, 0 for sequences without blocks for a proposal: what is drafted for them is
                not used, and their K/V is written to the scratch block. None: all have theirs.
            hedging: which of them get hedge chains beside their drafts; None for none.
            groups: which of them have keys in common that are attended to once; None for none.
            predict: whether it is of interest how likely the drafts are to stand.
        """
        with self.forgiven():
            self._propose(slots, count, max_context, noise, reserved, hedging, groups, predict)

    @contextmanager
    def forgiven(self) -> Iterator[None]:
        """What goes wrong here is logged, now and then, and costs drafts. Unless a graph is captured: half of
        one would be replayed for ever.
        """
        try:
            yield
        except Exception as error:
            if self._state.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise
            self.failure = f"{type(error).__name__}: {error}"
            self._log_failure()

    def _propose(
        self,
        slots: Tensor,
        count: int,
        max_context: int,
        noise: bool,
        reserved: Tensor | None,
        hedging: Hedging | None,
        groups: Groups | None,
        predict: bool,
    ) -> None:
        state = self._state
        layout, starts, tokens = self._rows(slots, count, max_context, reserved)
        if groups is not None and self._captures is None:  # captured draft state is shared by nobody
            layout.common = groups.keys(layout.row_start)
        slots_out = self._draft_slots(tokens, count, layout)
        anchors = tokens[:, 0]
        row_noise = self._noise(slots, starts) if noise else None
        best = self.drafter.draft(slots_out, anchors, row_noise, count=1 if hedging is None else 2)
        if hedging is not None:
            self._hedge(hedging, slots, slots_out, anchors, best, row_noise)
        ops.place_drafts(slots, best[..., 0], state.num_computed, state.tokens)
        if self.predicts and predict:
            self._predict(slots, slots_out, anchors, best[..., 0])

    def _predict(self, slots: Tensor, slots_out: DraftSlots, anchors: Tensor, drafts: Tensor) -> None:
        """Say how likely the drafts [N, g] just made are to stand."""
        before = torch.cat((anchors[:, None].long(), drafts[:, :-1]), dim=1)
        confidence = self.drafter.confidence_logits(slots_out.hidden, before)
        assert confidence is not None
        self.chances.index_copy_(0, slots.long(), self.drafter.survival(confidence))

    def _hedge(
        self,
        hedging: Hedging,
        slots: Tensor,
        slots_out: DraftSlots,
        anchors: Tensor,
        best: Tensor,
        noise: BlockNoise | None,
    ) -> None:
        """Make the hedge chains of some of the sequences that were just drafted for."""
        picked = hedging.places.clamp(min=0).long()  # [places]
        chains = self.drafter.branch_off(slots_out, anchors, best, hedging.positions, picked, noise)
        owners = torch.where(hedging.places >= 0, slots[picked], self._state.spare).long()
        self.hedges[:, : chains.shape[1]].index_copy_(0, owners, chains.to(torch.int32))

    def _draft_slots(self, tokens: Tensor, count: int, layout: RowLayout) -> DraftSlots:
        """The parallel pass over blocks [N, W] of tokens: their slots that are drafts."""
        few_rows = None if self._few_rows is None else self._few_rows.draft(count)
        if few_rows is None:
            context = PagedContext(self.cache, layout)
            hidden = self.drafter.forward_rows(tokens, layout.positions.view_as(tokens), context)
            return self.drafter.slots(hidden, self.num_drafts)
        hidden, logits = few_rows(tokens.view(-1), layout)
        first = self.drafter.config.first_slot
        last = first + self.num_drafts
        return DraftSlots(
            hidden.view(count, self._width, -1)[:, first:last],
            logits.view(count, self._width, -1)[:, first:last],
        )

    def _rows(
        self, slots: Tensor, count: int, max_context: int, reserved: Tensor | None
    ) -> tuple[RowLayout, Tensor, Tensor]:
        """Rows of N blocks, at positions start … start + W - 1 of each slot; the starts [N], and what the
        blocks are fed [N, W].
        """
        state, width = self._state, self._width
        # Block 0 is nobody's when rows are captured; with paged draft state the last one is.
        scratch_block = self.cache.k.shape[1] - 1 if self._captures is None else 0
        starts, positions, tokens, kv_slots = ops.block_rows(
            slots,
            torch.ones_like(slots) if reserved is None else reserved,
            state.num_computed,
            state.tokens,
            self._tables,
            width,
            state.block_size,
            self.drafter.config.mask_token_id,
            scratch_block * state.block_size,
        )
        layout = RowLayout(
            slots=slots,
            row_start=self._row_start[: count + 1],
            row_seq=self._row_seq[: count * width],
            positions=positions,
            kv_slots=kv_slots,
            block_tables=self._tables,
            num_computed=state.num_computed,
            host_rows=(width,) * count,
            host_max_context=max_context + width,
        )
        return layout, starts, tokens.view(count, width)

    def _noise(self, slots: Tensor, starts: Tensor) -> BlockNoise:
        """The sampler's own noise on the drafts' logits.

        The token at a position is drawn with noise keyed by (seed, position). A drafter that adds the same
        noise to its own logits proposes what the target will draw whenever the two distributions are close,
        at any temperature (coupling by common random numbers; Daliri, Musco and Suresh 2024,
        arXiv:2408.07978). What is accepted is exact either way.
        """
        sampling, ids = self._state.sampling, self._token_ids
        token_ids = sampling.token_ids if ids is None else ids
        return BlockNoise(slots, starts, sampling.floats, sampling.ints, token_ids)
