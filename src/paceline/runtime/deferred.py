"""Draft context that is written late.

While nothing is drafted nobody reads the drafter's K/V, and writing them for one row of each sequence reads
the drafter's projections in every step: 1 to 2 % of plain decoding at Qwen3-4B's size, 4 % of the bundled
model's. So rounds that neither verify nor draft only keep their tap rows, and the K/V of many are written at
once: when a slot's places are full, and before anything that may read them, forwards a slot's rows in another
way, or changes whose blocks they lie in.

The rows that are owed are always the last of their slot: its length on the device says where they belong.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
import torch

from paceline.runtime.cuda_graph import CapturedSet, CaptureStream
from paceline.runtime.drafting import KEPT_ROWS, DraftStage
from paceline.runtime.plan import StepPlan
from paceline.runtime.staging import Staging
from paceline.runtime.state import SlotState


class KeptRows:
    """The draft K/V of up to R kept rows, ready to be written as often as wanted.

    Args:
        num_rows: R.
        drafting: who keeps them.
        state: the slots; the spare one stands in where there is no row.

    Attributes:
        inputs: [2, R] int32 on the device, to be filled before each call: the slot of each row, and how many
            rows from its slot's end it lies.
    """

    def __init__(self, num_rows: int, drafting: DraftStage, state: SlotState) -> None:
        self.inputs = torch.ones(2, num_rows, dtype=torch.int32, device=state.device)
        self.inputs[0] = state.spare
        self._drafting = drafting

    def __call__(self) -> None:
        """Write what ``inputs`` name."""
        self._drafting.write_kept(*self.inputs.unbind(0))


class DeferredContext:
    """What is owed, and the passes that write it.

    Args:
        drafting: keeps the rows.
        state: the slots.
        where: where passes are captured; None runs them as they are.

    Attributes:
        graphs: the passes by their rows.
    """

    def __init__(self, drafting: DraftStage, state: SlotState, where: CaptureStream | None) -> None:
        drafting.make_places()
        self._drafting, self._state = drafting, state
        self._owed: dict[int, int] = {}  # by slot, its last rows
        self._sizes = pass_sizes(state.spare)
        self._staging = Staging(2 * KEPT_ROWS * state.spare, state.device)
        self.graphs = CapturedSet[int, KeptRows, None](
            partial(KeptRows, drafting=drafting, state=state), where, () if where is None else self._sizes
        )

    def note(self, slots: Iterable[int]) -> None:
        """One more row of each of these is kept and not written."""
        for slot in slots:
            self._owed[slot] = self._owed.get(slot, 0) + 1

    def write_before(self, plan: StepPlan) -> None:
        """Write what must not wait until ``plan`` has run; to be called before it changes any slot."""
        if not self._owed:
            return
        stay = self._owed.keys() <= {span.slot for span in plan.spans}
        if plan.inits or not stay or max(self._owed.values()) == KEPT_ROWS:
            self.write()

    def write(self) -> None:
        """Write all that is owed. What goes wrong costs drafts."""
        owed, self._owed = self._owed, {}
        if owed:
            with self._drafting.forgiven():
                self._write(np.array([*owed]), np.array([*owed.values()]))

    def _write(self, slots: np.ndarray, counts: np.ndarray) -> None:
        num_rows = int(counts.sum())
        ends = np.cumsum(counts)
        kept, run = self.graphs.get(next(size for size in self._sizes if size >= num_rows))
        values = np.ones(kept.inputs.shape, dtype=np.int32)
        values[0] = self._state.spare
        values[:, :num_rows] = np.repeat(slots, counts), np.repeat(ends, counts) - np.arange(num_rows)
        kept.inputs.view(-1).copy_(self._staging.send([values.reshape(-1)])[0])
        run()

    def capture_largest(self) -> None:
        """Capture the pass that needs most memory: all others then find room in what it leaves."""
        self.graphs.get(self._sizes[-1])


def pass_sizes(num_slots: int) -> list[int]:
    """Rows of the passes to capture, ascending: powers of two, and all that so many slots can owe."""
    most = KEPT_ROWS * num_slots
    return [size for size in (KEPT_ROWS << i for i in range(num_slots.bit_length())) if size < most] + [most]
