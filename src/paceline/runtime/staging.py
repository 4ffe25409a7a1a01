"""Host-to-device transfer of one step's small integers: packed, one copy, never waiting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class Staging:
    """Packs int32 arrays of a step into one buffer and sends them in one asynchronous copy.

    On a GPU the copy reads pinned memory after the call has returned, so buffers are used in turn: ``depth``
    steps may be in flight before one is written again. On a CPU the device tensor is the host buffer.

    Args:
        capacity: int32 values per step.
        device: where the arrays are needed.
        depth: buffers in the ring.
    """

    def __init__(self, capacity: int, device: torch.device, depth: int = 3) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._depth = depth
        self._turn = 0
        self._host = [self._new_host(capacity) for _ in range(depth)]
        self._sent: list[torch.cuda.Event | None] = [None] * depth

    def _new_host(self, capacity: int) -> Tensor:
        return torch.empty(capacity, dtype=torch.int32, pin_memory=self._pinned)

    def send(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Int32 device views of ``arrays``, in order. Valid until ``depth`` further calls."""
        self._turn = (self._turn + 1) % self._depth
        turn = self._turn
        total = sum(array.size for array in arrays)
        event = self._sent[turn]
        if event is not None:
            event.synchronize()  # the copy of `depth` steps ago: long done
        if self._host[turn].numel() < total:
            self._host[turn] = self._new_host(2 * total)
        host = self._host[turn]
        flat = host.numpy()
        offset = 0
        bounds: list[tuple[int, int]] = []
        for array in arrays:
            flat[offset : offset + array.size] = array
            bounds.append((offset, offset + array.size))
            offset += array.size
        packed = host[:total]
        if self._pinned:
            packed = packed.to(self._device, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._sent[turn] = event
        return [packed[start:stop] for start, stop in bounds]


def to_host(tensor: Tensor) -> Tensor:
    """Start a copy to host memory; on a GPU the values are there once an event recorded after this call has
    passed.
    """
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
