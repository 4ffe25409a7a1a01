"""A device without a model: it obeys plans like the real one and checks that every row could have read the
right K/V.

Each physical cache slot stores the lineage of the tokens it was computed from. A row first checks that all
slots before it, read through the device's block table, hold the lineage of its own sequence: any mistake of
the scheduler or the cache (a block reused too early, registered too soon, shared wrongly, missing from the
table) surfaces as an error at the row that would have read it. The "model" draws the next token from a hash
of (lineage, seed), so output is a function of prefix and seed alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.runtime.plan import SpanResult, StepPlan


def extend(lineage: int, token: int) -> int:
    """Lineage of a prefix with one more token."""
    return zlib.crc32(token.to_bytes(4, "little"), lineage)


def lineages(tokens: list[int]) -> list[int]:
    """Lineage of every prefix of ``tokens``."""
    result, current = [], 0
    for token in tokens:
        current = extend(current, token)
        result.append(current)
    return result


def draw(lineage: int, seed: int, vocab_size: int) -> int:
    """The token the simulated model samples after a prefix."""
    return zlib.crc32(seed.to_bytes(8, "little", signed=True), lineage) % vocab_size


def expected_output(prompt: list[int], seed: int, num_tokens: int, vocab_size: int) -> list[int]:
    """What a sequence must produce whatever happens around it."""
    current = lineages(prompt)[-1]
    output = []
    for _ in range(num_tokens):
        output.append(draw(current, seed, vocab_size))
        current = extend(current, output[-1])
    return output


@dataclass
class Slot:
    """Device state of one slot."""

    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    seed: int = 0
    table: dict[int, int] = field(default_factory=dict)


class SimulatedDevice:
    """Implements ``StepRunner``; ``clock_s`` advances by ``step_s + rows * row_s`` per step."""

    num_draft_failures = 0

    def __init__(
        self,
        block_size: int,
        vocab_size: int = 97,
        *,
        step_s: float = 1.0,
        row_s: float = 0.0,
        fail: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.slots: dict[int, Slot] = {}
        self.cells: dict[tuple[int, int], int] = {}
        self.plans: list[StepPlan] = []
        self.clock_s = 0.0
        self._step_s, self._row_s = step_s, row_s
        self._fail = fail

    def prepare(self) -> bool:
        return False

    def launch(self, plan: StepPlan) -> Pending:
        if self._fail is not None:
            self._fail(plan)
        self.plans.append(plan)
        self.clock_s += self._step_s + plan.num_rows * self._row_s
        for init in plan.inits:
            self.slots[init.slot] = Slot(list(init.tokens), init.computed, init.seed)
        for update in plan.table:
            table = self.slots[update.slot].table
            for i, block in enumerate(update.ids):
                table[update.first + i] = block
        self._check_order(plan)
        return Pending([self._run(span.slot, span.rows, span.sample) for span in plan.spans])

    def _check_order(self, plan: StepPlan) -> None:
        """Prompts that begin stand last; spans of a group side by side, and what they are said to have in
        common they have.
        """
        assert [s.fresh for s in plan.spans] == sorted(self.slots[s.slot].computed == 0 for s in plan.spans)
        assert all(self.slots[span.slot].computed == 0 for span in plan.spans if span.fresh)
        order = [span.group for span in plan.spans if span.group]
        assert sorted(order) == order
        for group in set(order):
            members = [self.slots[span.slot] for span in plan.spans if span.group == group]
            (common,) = {span.common for span in plan.spans if span.group == group}
            assert common > 0 and all(member.computed >= common for member in members)
            heads = {tuple(member.table[i] for i in range(common // self.block_size)) for member in members}
            assert len(heads) == 1

    def _run(self, slot_id: int, rows: int, sample: bool) -> SpanResult:
        slot = self.slots[slot_id]
        known = lineages(slot.tokens)
        self._write(slot_id, rows, known)
        slot.computed += rows
        if not sample:
            return SpanResult([])
        assert slot.computed == len(slot.tokens), "sampled before the last known token"
        token = draw(known[-1], slot.seed, self.vocab_size)
        slot.tokens.append(token)
        return SpanResult([token])

    def _write(self, slot_id: int, rows: int, known: list[int]) -> None:
        """Write K/V of the next rows of a text with these lineages, and check what they would read."""
        slot = self.slots[slot_id]
        for position in range(slot.computed, slot.computed + rows):
            assert position < len(known), "a row was planned for a token that cannot exist"
            self.cells[self._cell(slot, position)] = known[position]
            for before in range(position):
                assert self.cells.get(self._cell(slot, before)) == known[before], (
                    f"slot {slot_id}: row {position} would read wrong K/V at {before}"
                )

    def _cell(self, slot: Slot, position: int) -> tuple[int, int]:
        return slot.table[position // self.block_size], position % self.block_size


class Pending:
    """Results that are there at once."""

    def __init__(self, results: list[SpanResult]) -> None:
        self._results = results

    def result(self) -> list[SpanResult]:
        return self._results
