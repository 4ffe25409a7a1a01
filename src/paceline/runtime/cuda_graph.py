"""Work on the device as a CUDA graph: one replay instead of its launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from paceline.ops.early import early_launches

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
