"""Which documents and anchors a step trains on: a function of (seed, step), so that a resumed run, or one on
more devices, sees the same ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.training.documents import Documents

SMALLEST_BUCKET = 128
"""Shortest padded length of a row."""


class Batch(NamedTuple):
    """Rows of one length.

    Attributes:
        tokens: int64 [R, S].
        lengths: int64 [R].
        starts: int64 [R, A], anchors in increasing order.
        valid: bool [R, A]; false for dummies, at the end.
    """

    tokens: Tensor
    lengths: Tensor
    starts: Tensor
    valid: Tensor


class BatchPlan:
    """Batches of about equally many tokens and blocks, for any number of steps.

    Documents are padded to powers of two. Those of a length that do not fill a batch move up to the next
    length; only an epoch's longest batch may repeat some to be full.

    Args:
        documents: answers.
        tokens_per_step: padded tokens of a step, over all processes.
        anchor_every: one block per so many padded tokens.
        world_size: processes that share each batch; rows are a multiple of it.
        seed: order and anchors.
    """

    def __init__(
        self, documents: Documents, *, tokens_per_step: int, anchor_every: int, world_size: int, seed: int
    ) -> None:
        self._documents = documents
        self._tokens_per_step = tokens_per_step
        self._anchor_every = anchor_every
        self._world_size = world_size
        self._seed = seed
        lengths = np.maximum(documents.lengths, SMALLEST_BUCKET)
        self._buckets = 2 ** np.ceil(np.log2(lengths)).astype(np.int64)  # [D]
        # An anchor is an answer token with another after it.
        self._usable = np.flatnonzero(documents.lengths - documents.num_context >= 2)
        self._epochs: list[list[tuple[int, NDArray[np.int64]]]] = []
        self._ends: list[int] = [0]

    @property
    def num_usable(self) -> int:
        """Documents that have anything to train on."""
        return len(self._usable)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the first epoch."""
        self._extend(0)
        return self._ends[1]

    def rows_of(self, length: int) -> int:
        """Rows of a batch of one padded length."""
        per_process = self._tokens_per_step // length // self._world_size
        return max(1, per_process) * self._world_size

    def batch(self, step: int, rank: int = 0) -> Batch:
        """This process's share of a step's batch, on the CPU."""
        length, chosen = self._rows(step)
        generator = torch.Generator().manual_seed(hash_step(self._seed, step))
        documents = self._documents
        num_rows = len(chosen)
        tokens = np.zeros((num_rows, length), np.int64)
        for row, index in enumerate(chosen):
            ids = documents[int(index)]
            tokens[row, : len(ids)] = ids
        lengths = torch.from_numpy(documents.lengths[chosen])
        context = torch.from_numpy(documents.num_context[chosen].astype(np.int64))
        starts, valid = sample_anchors(context, lengths, length, length // self._anchor_every, generator)
        mine = slice(rank * num_rows // self._world_size, (rank + 1) * num_rows // self._world_size)
        return Batch(torch.from_numpy(tokens)[mine], lengths[mine], starts[mine], valid[mine])

    def _rows(self, step: int) -> tuple[int, NDArray[np.int64]]:
        while step >= self._ends[-1]:
            self._extend(len(self._epochs))
        epoch = int(np.searchsorted(self._ends, step, side="right")) - 1
        return self._epochs[epoch][step - self._ends[epoch]]

    def _extend(self, epoch: int) -> None:
        """Make the epoch's batches, unless they are there."""
        if epoch < len(self._epochs):
            return
        draw = np.random.default_rng((self._seed, epoch))
        order = draw.permutation(self._usable)
        batches: list[tuple[int, NDArray[np.int64]]] = []
        waiting = order[:0]
        lengths = sorted(set(self._buckets[order].tolist()))
        for length in lengths:
            waiting = np.concatenate((waiting, order[self._buckets[order] == length]))
            rows = self.rows_of(length)
            full = len(waiting) // rows * rows
            batches += [(length, part) for part in waiting[:full].reshape(-1, rows)]
            waiting = waiting[full:]
        if len(waiting):
            batches.append((lengths[-1], np.resize(waiting, self.rows_of(lengths[-1]))))
        self._epochs.append([batches[i] for i in draw.permutation(len(batches))])
        self._ends.append(self._ends[-1] + len(batches))


def hash_step(seed: int, step: int) -> int:
    """Seed of a step's random draws."""
    return (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + 1) % 2**63


def sample_anchors(
    num_context: Tensor, lengths: Tensor, width: int, num_anchors: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Anchors drawn without replacement from the answers' tokens that have a next one.

    Args:
        num_context, lengths: int64 [R].
        width: padded length.
        num_anchors: A.

    Returns:
        starts int64 [R, A], increasing within the valid ones, and valid bool [R, A].
    """
    position = torch.arange(width)
    allowed = (position >= num_context[:, None].clamp_min(1)) & (
        position < lengths[:, None] - 1
    )  # [R, width]
    key = torch.rand(allowed.shape, generator=generator).masked_fill(~allowed, -1.0)
    best, starts = key.topk(num_anchors, dim=1)
    starts = starts.masked_fill(best < 0, width).sort(dim=1).values
    valid = starts < width
    return starts.masked_fill(~valid, 1), valid
