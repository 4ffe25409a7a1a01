"""Short passes over rows as CUDA graphs: the layers of the target, for steps that are no rounds.

A prompt's last rows behind a cached prefix, or a short prompt, take less time to compute than their layers
take to launch. Rows of any spans up to a few hundred are therefore padded to one of a few sizes and go
through the layers in one replay; what comes before (which rows) and after (sampling, drafting) differs from
step to step and stays a matter of ordinary launches. Rows of padding are written nowhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.models.attention import KVCache, PagedContext
from paceline.models.qwen3 import ForwardOutput, Qwen3ForCausalLM
from paceline.ops import RowLayout
from paceline.runtime.graphs import Captured, CaptureStream
from paceline.runtime.rows import StepRows
from paceline.runtime.state import SlotState

PASS_ROWS = (32, 64, 128, 256, 512)
"""More rows than the last take longer to compute than to launch."""

PASS_SEQS = (1, 4)
"""Few, because attention hands out tiles for every sequence that could be there."""


class RowPass:
    """The layers for up to R rows of up to B sequences, ready to be called as often as wanted.

    Args:
        num_rows, num_seqs: R and B.
        model: the target.
        cache: its K/V.
        state: the slots; the spare one stands in where there is no sequence.
        taps: layers whose outputs are wanted.
        max_model_len: longest sequence in tokens.
    """

    def __init__(
        self,
        num_rows: int,
        num_seqs: int,
        model: Qwen3ForCausalLM,
        cache: KVCache,
        state: SlotState,
        taps: tuple[int, ...],
        max_model_len: int,
    ) -> None:
        def ints(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=state.device)

        self.num_rows, self.num_seqs = num_rows, num_seqs
        self._model, self._cache, self._state, self._taps = model, cache, state, taps
        self._max_context = max_model_len
        self._tokens, self._positions, self._row_seq = ints(num_rows), ints(num_rows), ints(num_rows)
        self._kv_slots = ints(num_rows, torch.int64) - 1
        self._slots, self._row_start = ints(num_seqs) + state.spare, ints(num_seqs + 1)

    def fill(self, rows: StepRows) -> None:
        """Take the rows of a step, which must fit. Padding keeps tokens and positions of other steps."""
        layout = rows.layout
        self._kv_slots.fill_(-1)
        self._slots.fill_(self._state.spare)
        self._row_start.fill_(len(rows.tokens))
        for target, values in (
            (self._tokens, rows.tokens),
            (self._positions, layout.positions),
            (self._row_seq, layout.row_seq),
            (self._kv_slots, layout.kv_slots),
            (self._slots, layout.slots),
            (self._row_start, layout.row_start),
        ):
            target[: len(values)].copy_(values)

    def __call__(self) -> ForwardOutput:
        """Run the layers on the rows filled in; see :meth:`Qwen3ForCausalLM.forward`."""
        layout = RowLayout(
            slots=self._slots,
            row_start=self._row_start,
            row_seq=self._row_seq,
            positions=self._positions,
            kv_slots=self._kv_slots,
            block_tables=self._state.block_tables,
            num_computed=self._state.num_computed,
            host_rows=(self.num_rows,) * self.num_seqs,
            host_max_context=self._max_context,
        )
        context = PagedContext(self._cache, layout)
        return self._model(self._tokens, self._positions, context, self._taps)  # type: ignore[no-any-return]


class PassSet:
    """All captured passes.

    Args:
        make: a pass of so many rows and sequences.
        where: where to capture; None runs the passes as they are, which is how they are tested on a CPU.

    Attributes:
        missing: sizes (rows, sequences) that are still to be captured, the next one last.
    """

    def __init__(self, make: Callable[[int, int], RowPass], where: CaptureStream | None) -> None:
        self._make, self._where = make, where
        self._passes: dict[tuple[int, int], tuple[RowPass, Callable[[], ForwardOutput]]] = {}
        self.missing = [(rows, seqs) for seqs in PASS_SEQS for rows in PASS_ROWS][::-1]

    def forward(self, rows: StepRows) -> ForwardOutput | None:
        """The layers' output for a step's rows, overwritten by the next call; None when they do not fit."""
        num_rows, num_seqs = len(rows.tokens), len(rows.layout.host_rows)
        size = smallest_pass(num_rows, num_seqs)
        if size is None:
            return None
        row_pass, run = self._get(size)
        row_pass.fill(rows)
        hidden, tapped = run()
        return ForwardOutput(hidden[:num_rows], None if tapped is None else tapped[:num_rows])

    def capture_first(self) -> None:
        """Capture the passes of one sequence: what a server with little to do needs at once."""
        while self.missing and self.missing[-1][1] == 1:
            self.prepare()

    def prepare(self) -> bool:
        """Capture the next pass; False when all are there. One that fails is not tried again before a step
        needs it.
        """
        if not self.missing:
            return False
        self._get(self.missing.pop())
        return True

    def capture_largest(self) -> None:
        """Capture the pass that needs most memory."""
        self._get((PASS_ROWS[-1], PASS_SEQS[-1]))

    def _get(self, size: tuple[int, int]) -> tuple[RowPass, Callable[[], ForwardOutput]]:
        if size not in self._passes:
            made = self._make(*size)
            self._passes[size] = made, made if self._where is None else Captured(made, self._where)
            if size in self.missing:
                self.missing.remove(size)
        return self._passes[size]


def smallest_pass(num_rows: int, num_seqs: int) -> tuple[int, int] | None:
    """The smallest (rows, sequences) that holds a step."""
    rows = next((size for size in PASS_ROWS if size >= num_rows), None)
    seqs = next((size for size in PASS_SEQS if size >= num_seqs), None)
    return None if rows is None or seqs is None else (rows, seqs)
