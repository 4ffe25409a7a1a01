"""The simulated device with a drafter whose state is captured: it checks that every draft is made with the
right knowledge of the past.

Draft K/V and captured rows are kept as the lineages they were computed from, like the target's K/V. Drafting
for a sequence checks that its draft K/V hold its own lineage at every position before the anchor; restoring
copies what the store really holds. Any mistake of the ledger, the cache or the tables surfaces there.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from typing import Any

from paceline.runtime.plan import DraftUpdates, Span, SpanResult, StepPlan
from support.simulated_device import Pending, SimulatedDevice, Slot, draw, extend, lineages


class DraftingDevice(SimulatedDevice):
    """Drafts ``num_drafts`` tokens per round, of which a share is right.

    Attributes:
        errors: what was found wrong.
        num_restored: blocks restored.
        num_proposed: blocks drafted.
    """

    def __init__(self, block_size: int, vocab_size: int, num_drafts: int, **options: Any) -> None:
        super().__init__(block_size, vocab_size, **options)
        self.num_drafts = num_drafts
        self.errors: list[str] = []
        self._limits: dict[int, int] = {}
        self.num_restored = 0
        self.num_proposed = 0
        self._drafts: dict[int, list[int]] = {}
        self._draft_tables: dict[int, dict[int, int]] = defaultdict(dict)
        self._capture_tables: dict[int, dict[int, int]] = defaultdict(dict)
        self._draft_cells: dict[tuple[int, int], int] = {}
        self._captured: dict[tuple[int, int], int] = {}

    def prepare(self) -> bool:
        """See :class:`paceline.runtime.plan.StepRunner`."""
        return False

    def launch(self, plan: StepPlan) -> Pending:
        """See :class:`paceline.runtime.plan.StepRunner`."""
        try:
            return self._launch(plan)
        except AssertionError as error:  # the engine would take it for one request's failure
            self.errors.append(str(error))
            raise

    def _launch(self, plan: StepPlan) -> Pending:
        if self._fail is not None:
            self._fail(plan)
        self.plans.append(plan)
        for init in plan.inits:
            self.slots[init.slot] = Slot(list(init.tokens), init.computed, init.seed)
            self._drafts[init.slot] = []
            assert init.params.max_tokens is not None
            self._limits[init.slot] = init.prompt_len + init.params.max_tokens
        for update in plan.table:
            self.slots[update.slot].table.update(enumerate(update.ids, update.first))
        self._update(plan.draft)
        rows = [(span.slot, *self._forward(span)) for span in plan.spans]
        results = [self._sample(span) for span in plan.spans]
        for slot, start, known in rows:
            self._keep(slot, start, known)
        for span in plan.spans:
            if span.propose:
                self._propose(span.slot)
        return Pending(results)

    def _update(self, updates: DraftUpdates) -> None:
        for slot in updates.resets:
            self._draft_tables[slot].clear()
            self._capture_tables[slot].clear()
        for update in updates.draft_tables:
            self._draft_tables[update.slot].update(enumerate(update.ids, update.first))
        for update in updates.capture_tables:
            self._capture_tables[update.slot].update(enumerate(update.ids, update.first))
        for item in updates.restores:
            for index, (capture, block) in enumerate(zip(item.capture_slots, item.draft_blocks, strict=True)):
                known = lineages(self.slots[item.slot].tokens)
                for row in range(self.block_size):
                    found = self._captured.get((capture, row))
                    assert found == known[index * self.block_size + row], "a wrong capture was restored"
                    self._draft_cells[block, row] = found
                self.num_restored += 1

    def _forward(self, span: Span) -> tuple[int, list[int]]:
        """Write and check the target's K/V; returns the first position and all lineages."""
        slot = self.slots[span.slot]
        known = lineages(slot.tokens + self._drafts[span.slot][: span.drafts])
        self._write(span.slot, span.rows, known)
        return slot.computed, known[: slot.computed + span.rows]

    def _sample(self, span: Span) -> SpanResult:
        slot = self.slots[span.slot]
        if not span.sample:
            slot.computed += span.rows
            return SpanResult([])
        assert slot.computed + span.rows - span.drafts == len(slot.tokens), "sampled at a wrong position"
        current, tokens = lineages(slot.tokens)[-1], []
        for draft in [*self._drafts[span.slot][: span.drafts], -1]:
            tokens.append(draw(current, slot.seed, self.vocab_size))
            current = extend(current, tokens[-1])
            if tokens[-1] != draft:
                break
        slot.computed += span.rows - span.drafts + len(tokens) - 1
        slot.tokens += tokens
        return SpanResult(tokens, verified=span.drafts)

    def _keep(self, slot: int, start: int, known: list[int]) -> None:
        """Draft K/V and captures of the rows from ``start`` on, wherever the tables point; 0 is the sink."""
        for position in range(start, len(known)):
            block, row = divmod(position, self.block_size)
            self._draft_cells[self._draft_tables[slot].get(block, 0), row] = known[position]
            self._captured[self._capture_tables[slot].get(block, 0), row] = known[position]

    def _propose(self, slot_id: int) -> None:
        slot = self.slots[slot_id]
        if len(slot.tokens) >= self._limits[slot_id]:
            return  # the host does not know yet that it has ended; nobody will see these drafts
        known, table = lineages(slot.tokens), self._draft_tables[slot_id]
        for position in range(slot.computed):
            block, row = divmod(position, self.block_size)
            assert table.get(block, 0) != 0, "drafting without draft state"
            assert self._draft_cells.get((table[block], row)) == known[position], (
                f"slot {slot_id} drafts with wrong draft K/V at {position}"
            )
        last = slot.computed + self.num_drafts
        assert table.get(last // self.block_size, 0) != 0, "the drafter's block has no place"
        current, drafts = known[-1], []
        for _ in range(self.num_drafts):
            token = draw(current, slot.seed, self.vocab_size)
            if zlib.crc32(b"wrong", current) % 4 == 0:
                token = (token + 1) % self.vocab_size
            drafts.append(token)
            current = extend(current, token)
        self._drafts[slot_id] = drafts
        self.num_proposed += 1
