"""Work on the device as a CUDA graph: one replay instead of its launches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch

from paceline.ops.early import early_launches

Key = TypeVar("Key")
Work = TypeVar("Work", bound=Callable[[], Any])
Output = TypeVar("Output")


class CaptureStream:
    """Where rounds are captured, one after the other, and the memory their graphs share."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool: Any = torch.cuda.graph_pool_handle()


class Captured(Generic[Output]):
    """Work on the device and its graph. Other work may be in flight while it is captured.

    Args:
        work: what to capture. Its inputs must name no sequence while it is captured.
        where: shared by all graphs.
    """

    def __init__(self, work: Callable[[], Output], where: CaptureStream) -> None:
        self._work = work  # its constants are read by the graph: they must live as long
        with early_launches():
            self._capture(where)

    def _capture(self, where: CaptureStream) -> None:
        self._work()  # compiles kernels and makes workspaces: neither may happen while capturing
        self._graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph: that waits for the device and gives back the memory kept for steps.
        where.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(where.stream):
            self._graph.capture_begin(pool=where.pool)
            try:
                self._output = self._work()
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(where.stream)

    def __call__(self) -> Output:
        """Do the work. The output is the same memory each time."""
        self._graph.replay()
        return self._output


class CapturedSet(Generic[Key, Work, Output]):
    """Work of several sizes or shapes, each made and captured when it is first wanted.

    Args:
        make: work of one of them.
        where: where to capture; None runs the work as it is.
        first: what to capture before it is wanted, in this order.

    Attributes:
        where: the same.
        missing: what of that is still to be captured, the next one last.
    """

    def __init__(
        self, make: Callable[[Key], Work], where: CaptureStream | None, first: Iterable[Key]
    ) -> None:
        self.where = where
        self.missing = [*first][::-1]
        self._make = make
        self._made: dict[Key, tuple[Work, Callable[[], Output]]] = {}

    def get(self, key: Key, *, keep: bool = True) -> tuple[Work, Callable[[], Output]]:
        """The work, to be given its inputs, and what runs it. Made, captured and kept if it is not there yet;
        without ``keep`` it is made once more the next time.
        """
        found = self._made.get(key)
        if found is None:
            made = self._make(key)
            found = made, made if self.where is None else Captured(made, self.where)
            if keep:
                self._made[key] = found
            if key in self.missing:
                self.missing.remove(key)
        return found

    def prepare(self) -> bool:
        """Capture the next one; False when all are there. One that fails is not tried again before a step
        needs it.
        """
        if not self.missing:
            return False
        self.get(self.missing.pop())
        return True
