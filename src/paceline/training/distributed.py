"""The few collective operations training needs; no-ops in a single process.

Launched with ``torchrun``, every process trains on its share of each batch and gradients are summed (NCCL on
GPUs, gloo on CPUs).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class World:
    """This process among its peers.

    Attributes:
        rank: 0 for the one that writes files.
        size: number of processes.
    """

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process writes files and draws progress bars."""
        return self.rank == 0

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their sums over all processes, in one message per dtype."""
        if self.size == 1:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for group in by_dtype.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in group])
            dist.all_reduce(flat)
            for tensor, part in zip(group, flat.split([t.numel() for t in group]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def agree(self, value: float, device: torch.device) -> float:
        """Rank 0's value, everywhere: clocks differ, and schedules must not."""
        if self.size == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=device)
        dist.broadcast(shared, 0)
        return float(shared)

    def barrier(self) -> None:
        """Wait for all."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def joined(device: torch.device) -> Iterator[World]:
    """Join the processes ``torchrun`` started, if it did."""
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        yield World() if not dist.is_initialized() else World(dist.get_rank(), dist.get_world_size())
        return
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield World(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
