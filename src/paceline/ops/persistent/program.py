"""A list of phases that is written once and run many times."""

from __future__ import annotations

from torch import Tensor

from paceline.ops.layout import RowLayout
from paceline.ops.persistent import reference
from paceline.ops.persistent.launch import Launch, Machine
from paceline.ops.persistent.phases import Phase


class Program:
    """Phases, run by the kernel on a GPU and by torch elsewhere.

    Args:
        machine: what launches share; None runs the phases in torch.
        num_seqs, span: rows of a pass, ``num_seqs * span`` of them.
        eps: of all norms.
        cos_sin: [positions, D] fp32, of the rotations in attention.
    """

    def __init__(
        self, machine: Machine | None, num_seqs: int, span: int, *, eps: float, cos_sin: Tensor
    ) -> None:
        self.num_rows = num_seqs * span
        self._machine, self._num_seqs, self._span = machine, num_seqs, span
        self._eps, self._cos_sin = eps, cos_sin
        self._phases: list[Phase] = []
        self._launch: Launch | None = None

    def add(self, phase: Phase) -> None:
        """Append a phase."""
        self._phases.append(phase)

    def seal(self) -> None:
        """No more phases: bring the list to the device."""
        if self._machine is not None:
            self._launch = Launch(
                self._phases,
                self._machine,
                num_seqs=self._num_seqs,
                span=self._span,
                eps=self._eps,
                cos_sin=self._cos_sin,
            )

    def __call__(self, layout: RowLayout) -> None:
        """Run all phases on ``layout``'s rows: ``span`` consecutive ones of each sequence."""
        if self._launch is not None:
            self._launch(layout)
        else:
            reference.run(self._phases, layout, eps=self._eps, cos_sin=self._cos_sin)
