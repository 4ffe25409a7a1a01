"""What the device knows about every running sequence: arrays indexed by slot, read and advanced by each
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from paceline import ops
from paceline.runtime.plan import SlotInit, TableUpdate
from paceline.runtime.staging import Staging
from paceline.sampling.params import SamplingParams
from paceline.sampling.state import SamplingState, SlotSampling

MAX_INDEX = 2**31
"""Cells of a table up to which int32 says where one is."""


class SlotState:
    """Token ids, lengths, block tables and sampling parameters of all slots.

    There is one slot more than sequences may run: the last is nobody's, and stands in where a fixed shape has
    more places than there are sequences.

    Attributes:
        tokens: [S + 1, L] int32; known tokens of a sequence, and tentative ones (drafts) behind them.
        num_computed: [S + 1] int32; rows whose K/V has been written and stands.
        block_tables: [S + 1, M] int32.
        sampling: the slots' sampling parameters, of S + 1 slots.

    Args:
        num_slots: S, sequences that may run at once.
        max_len: longest sequence in tokens.
        lookahead: positions beyond it that tentative rows may touch: a drafter's block.
    """

    def __init__(
        self,
        num_slots: int,
        max_len: int,
        block_size: int,
        sampling: SamplingState,
        device: torch.device,
        lookahead: int = 0,
    ) -> None:
        self.device = device
        self.block_size = block_size
        width = max_len + lookahead + 1
        blocks = -(-width // block_size)
        self.spare = num_slots
        self.tokens = torch.zeros(num_slots + 1, width, dtype=torch.int32, device=device)
        self.num_computed = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(num_slots + 1, blocks, dtype=torch.int32, device=device)
        self.sampling = sampling
        self._staging = Staging(4096, device)

    def clear(self) -> None:
        """Back to what a new state is: no slot has been taken."""
        for tensor in (self.tokens, self.num_computed, self.block_tables):
            tensor.zero_()
        self.sampling.set_slots(
            [SlotSampling(slot, SamplingParams(temperature=0.0), 0, 0) for slot in range(self.spare)]
        )

    def kv_slots(self, row_slots: Tensor, positions: Tensor) -> Tensor:
        """Cache slot of each row, [R] int64, from its slot and position (int [R])."""
        return ops.cache_slots(self.block_tables, self.block_size, row_slots, positions)

    def apply(self, inits: Sequence[SlotInit], table: Sequence[TableUpdate]) -> None:
        """Write new tenants and new block ids. Idempotent, and ordered before the step that follows."""
        if inits:
            tokens = [np.asarray(i.tokens, dtype=np.int32) for i in inits]
            where = [(i.slot, 0, piece.size) for i, piece in zip(inits, tokens, strict=True)]
            self._write_rows(self.tokens, where, np.concatenate(tokens))
            slots = np.array([i.slot for i in inits], dtype=np.int32)
            computed = np.array([i.computed for i in inits], dtype=np.int32)
            index, value = self._staging.send([slots, computed])
            self.num_computed.index_copy_(0, index.long(), value)
            self.sampling.set_slots([SlotSampling(i.slot, i.params, i.seed, i.prompt_len) for i in inits])
        self.write_tables(self.block_tables, table)

    def write_tables(self, tables: Tensor, updates: Sequence[TableUpdate]) -> None:
        """Write block ids into slot-indexed tables [S, M]."""
        if updates:
            ids = np.array([*chain.from_iterable(u.ids for u in updates)], dtype=np.int32)
            self._write_rows(tables, [(u.slot, u.first, len(u.ids)) for u in updates], ids)

    def _write_rows(self, target: Tensor, pieces: Sequence[tuple[int, int, int]], values: np.ndarray) -> None:
        """Write ``values``, piece by piece, into ``target`` with one upload and one scatter. A piece is a
        row, its first column there, and how many values it takes.
        """
        width = target.shape[1]
        row, first, size = np.array(pieces, dtype=np.int64).T
        # a piece that ran on into the next row would change what another sequence reads
        assert (first + size <= width).all()
        ends = np.cumsum(size)
        if target.numel() <= MAX_INDEX:
            index = np.arange(ends[-1]) + np.repeat(row * width + first - (ends - size), size)
            sent = self._staging.send([index.astype(np.int32), values])
            target.view(-1).index_copy_(0, sent[0].long(), sent[1])
        else:  # one contiguous copy per piece
            parts = self._staging.send(np.split(values, ends[:-1]))
            for (slot, start, count), part in zip(pieces, parts, strict=True):
                target[slot, start : start + count] = part
