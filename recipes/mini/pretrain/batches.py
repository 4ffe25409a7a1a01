"""Token shards in device memory, and training batches drawn from them."""

from __future__ import annotations

import lzma
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.common import END_OF_TEXT

STREAMS = ("code", "prose", "instruct")


def _read(path: Path) -> np.ndarray:
    return np.frombuffer(lzma.decompress(path.read_bytes()), dtype="<u2")


def load_streams(folder: Path, device: torch.device, workers: int) -> dict[str, Tensor]:
    """All shards of each stream as one int16 tensor on ``device`` (ids stay under 32768)."""
    streams = {}
    with ProcessPoolExecutor(workers) as pool:
        for stream in STREAMS:
            pieces = list(pool.map(_read, sorted(folder.glob(f"{stream}-*.u16.xz"))))
            if not pieces:
                raise FileNotFoundError(f"no shards of {stream!r} in {folder}; run pack.py first")
            streams[stream] = torch.from_numpy(np.concatenate(pieces).astype(np.int16)).to(device)
    return streams


class Sampler:
    """Windows of one stream, each epoch in a new order and at a new offset.

    Args:
        ids: int16 [N].
        snap: share of windows moved back to the start of the document they begin in, so that text which
            starts at position 0 is common (all of them for conversations).
    """

    def __init__(self, ids: Tensor, snap: float, seed: int) -> None:
        self._ids = ids
        self._snap = snap
        self._generator = torch.Generator(ids.device).manual_seed(seed)
        # Index of the first token of each document; its predecessor is <|endoftext|>.
        ends = (ids == END_OF_TEXT).nonzero().squeeze(-1)
        self._starts = torch.cat([ends.new_zeros(1), ends[:-1] + 1])
        self._queue = ids.new_zeros(0, dtype=torch.int64)
        self.tokens_drawn = 0

    def draw(self, rows: int, length: int) -> Tensor:
        """[rows, length + 1] int64 token ids."""
        ids, device = self._ids, self._ids.device
        span = min(1024, length)  # windows are queued at this stride; longer ones overlap within an epoch
        while self._queue.numel() < rows:
            offset = int(torch.randint(span, (1,), generator=self._generator, device=device))
            windows = torch.arange(offset, ids.numel() - 1, span, device=device)
            order = torch.randperm(windows.numel(), generator=self._generator, device=device)
            self._queue = torch.cat([self._queue, windows[order]])
        at, self._queue = self._queue[:rows], self._queue[rows:]
        chance = torch.rand(rows, 2, generator=self._generator, device=device)
        document = self._starts[torch.searchsorted(self._starts, at, right=True) - 1]
        # Half of the snapped windows also see the <|endoftext|> before the document.
        document = (document - (chance[:, 1] < 0.5).long()).clamp_min(0)
        at = torch.where(chance[:, 0] < self._snap, document, at).clamp_max(ids.numel() - length - 1)
        self.tokens_drawn += rows * length
        return ids[at[:, None] + torch.arange(length + 1, device=device)].long()

    def state(self) -> dict[str, Any]:
        """Position in the stream."""
        return {"generator": self._generator.get_state(), "queue": self._queue, "drawn": self.tokens_drawn}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        self._generator.set_state(state["generator"].cpu())
        self._queue = state["queue"]
        self.tokens_drawn = state["drawn"]
