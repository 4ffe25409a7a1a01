"""Short passes over rows as CUDA graphs: the layers of the target, for steps that are no rounds.

A prompt's last rows behind a cached prefix, or a short prompt, take less time to compute than their layers
take to launch. Rows of any spans up to some two thousand are therefore padded to one of a few sizes, as far
as that is worth it, and go through the layers in one replay; what comes before (which rows) and after
(sampling, drafting) differs from step to step and stays a matter of ordinary launches. Rows of padding are
written nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.models.attention import KVCache, PagedContext
from paceline.models.qwen3 import ForwardOutput, Qwen3ForCausalLM
from paceline.ops import RowLayout
from paceline.runtime.cuda_graph import CapturedSet, CaptureStream
from paceline.runtime.rows import StepRows
from paceline.runtime.state import SlotState

PASS_ROWS = (32, 64, 128, 256, 512, 768, 1024, 1536, 2048)
"""Close enough where rows take time: up to 256 of them the weights do, which are read once."""

LAUNCH_ROWS = 2048
"""So many rows take as long to compute as their layers take to launch (Qwen3-4B on one H200: 25 ms, where
launching takes 19 to 33)."""

FEW_ROWS, FEW_SEQS, MANY_SEQS = 256, (1, 4), 16
"""Sequences that passes of up to so many rows are for, and those of more: attention hands out tiles for every
sequence that could be there, which tells where the rows' own are few."""


class RowPass:
    """The layers for up to R rows of up to B sequences, ready to be called as often as wanted.

    Args:
        num_rows, num_seqs: R and B.
        model: the target.
        cache: its K/V.
        state: the slots; the spare one stands in where there is no sequence.
        taps: layers whose outputs are wanted.
        max_model_len: longest sequence in tokens.
        output: where to leave what comes out, [>= R, d] and [>= R, n * d].
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
        output: ForwardOutput,
    ) -> None:
        def ints(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=state.device)

        self.num_rows, self.num_seqs = num_rows, num_seqs
        self._model, self._cache, self._state, self._taps = model, cache, state, taps
        self._max_context = max_model_len
        self._output = output
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
        """Run the layers on the rows filled in; see :meth:`Qwen3ForCausalLM.forward`. The output is the same
        memory for all passes, whatever rows they have.
        """
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
        made = self._model(self._tokens, self._positions, context, self._taps)
        hidden = self._output.hidden[: self.num_rows].copy_(made.hidden)
        if self._output.taps is None:
            return ForwardOutput(hidden, None)
        return ForwardOutput(hidden, self._output.taps[: self.num_rows].copy_(made.taps))


class PassSet:
    """All captured passes.

    Args:
        make: a pass of so many rows and sequences.
        max_rows: rows of a step at most; no pass has more.
        where: where to capture; None runs the passes as they are, which is how they are tested on a CPU.

    Attributes:
        graphs: the passes by their size (rows, sequences).
    """

    def __init__(
        self, make: Callable[[int, int], RowPass], max_rows: int, where: CaptureStream | None
    ) -> None:
        self._sizes = pass_sizes(max_rows)
        self.graphs = CapturedSet[tuple[int, int], RowPass, ForwardOutput](
            lambda size: make(*size), where, sorted(self._sizes, key=lambda size: size[::-1])
        )

    def forward(self, rows: StepRows) -> ForwardOutput | None:
        """The layers' output for a step's rows, overwritten by the next call; None when they fit no pass, or
        none that is worth its padding.
        """
        num_rows, num_seqs = len(rows.tokens), len(rows.layout.host_rows)
        size = choose_pass(num_rows, num_seqs, self._sizes)
        if size is None:
            return None
        row_pass, run = self.graphs.get(size)
        row_pass.fill(rows)
        hidden, tapped = run()
        return ForwardOutput(hidden[:num_rows], None if tapped is None else tapped[:num_rows])

    def capture_first(self) -> None:
        """Capture the passes of one sequence: what a server with little to do needs at once."""
        while self.graphs.missing and self.graphs.missing[-1][1] == 1:
            self.graphs.prepare()

    def capture_largest(self) -> None:
        """Capture the pass that needs most memory: all others then find room in what it leaves."""
        self.graphs.get(self._sizes[-1])


def pass_sizes(max_rows: int) -> list[tuple[int, int]]:
    """Rows and sequences of all passes for steps of up to ``max_rows`` rows, ascending."""
    rows = [size for size in PASS_ROWS if size < max_rows]
    if max_rows <= PASS_ROWS[-1]:
        rows.append(max_rows)
    return [(size, seqs) for size in rows for seqs in (FEW_SEQS if size <= FEW_ROWS else (MANY_SEQS,))]


def choose_pass(num_rows: int, num_seqs: int, sizes: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """The smallest of the ascending ``sizes`` that holds a step, if its padding is worth it.

    Launched kernel by kernel, a step of no more rows than a pass can have takes as long as launching; a pass,
    as long as its rows and the padding take to compute. It must save at least what the padding costs: while
    the device is busy with earlier steps, launching costs nothing, and padding delays what comes after.
    """
    found = next((size for size in sizes if size[0] >= num_rows and size[1] >= num_seqs), None)
    if found is None:
        return None
    padding, saved = found[0] - num_rows, LAUNCH_ROWS - found[0]
    return found if saved >= padding else None
