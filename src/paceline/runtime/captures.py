"""Captured tap rows on the device, and the tables that say where a sequence's draft state lies.

The store is addressed like a K/V cache: each slot of the runner has a table from block index to capture slot,
so rows are captured where they will stay. Publishing, sharing and evicting a capture move nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from paceline.errors import InvariantError
from paceline.ops import RowLayout, cache_slots
from paceline.runtime.plan import DraftUpdates, Restore
from paceline.runtime.staging import Staging
from paceline.runtime.state import SlotState

RESTORE_ROWS = 4096
"""Captured rows whose draft K/V is rebuilt at once: large enough for the GEMMs, and bounds their scratch."""


class CaptureStore:
    """Tap rows of full and filling blocks.

    Args:
        rows: [capture slots, P, n * d], zeroed; slot 0 takes the rows that nobody keeps. No slots at all when
            nothing is captured.
        num_draft_blocks: blocks of the draft K/V, for the range check.
        state: the runner's slots.

    Attributes:
        draft_tables: [S, M] int32, block of the draft K/V per block of a slot; 0 where it has none.
    """

    def __init__(self, rows: Tensor, num_draft_blocks: int, state: SlotState) -> None:
        self._rows = rows
        self._num_draft_blocks = num_draft_blocks
        self._state = state
        self._block_size = state.block_size
        self.draft_tables = torch.zeros_like(state.block_tables)
        self._capture_tables = torch.zeros_like(state.block_tables)
        self._staging = Staging(4096, state.device)

    def apply(self, updates: DraftUpdates) -> None:
        """Write tables. Idempotent."""
        if updates.resets:
            (slots,) = self._staging.send([np.array(updates.resets, dtype=np.int32)])
            self.draft_tables.index_fill_(0, slots.long(), 0)
            self._capture_tables.index_fill_(0, slots.long(), 0)
        self._state.write_tables(self.draft_tables, updates.draft_tables)
        self._state.write_tables(self._capture_tables, updates.capture_tables)

    def restored(self, restores: list[Restore]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Captured rows to be rebuilt, in parts: rows [R, n * d], their positions [R] int32 and the cache
        slots [R] int64 of their draft K/V.

        Raises:
            InvariantError: a slot or block out of range, or more of one than of the other.
        """
        index = self._restore_index(restores)  # [3, blocks]
        step = RESTORE_ROWS // self._block_size
        for start in range(0, index.shape[1], step):
            captures, targets, blocks = self._staging.send(list(index[:, start : start + step]))
            offset = torch.arange(self._block_size, device=blocks.device, dtype=torch.int32)
            positions = (blocks[:, None] * self._block_size + offset).view(-1)
            kv_slots = (targets[:, None].long() * self._block_size + offset).view(-1)
            yield self._rows[captures.long()].flatten(0, 1), positions, kv_slots

    def _restore_index(self, restores: list[Restore]) -> np.ndarray:
        """Capture slot, draft block and index in the sequence of every block to restore, [3, blocks]
        int32.
        """
        parts = [
            np.stack((np.asarray(item.capture_slots), np.asarray(item.draft_blocks), np.arange(count)))
            for item in restores
            if (count := len(item.capture_slots)) == len(item.draft_blocks)
        ]
        index = np.concatenate(parts, axis=1).astype(np.int32) if parts else np.zeros((3, 0), dtype=np.int32)
        captures, blocks = index[0], index[1]
        inside = (
            (captures > 0) & (captures < len(self._rows)) & (blocks > 0) & (blocks < self._num_draft_blocks)
        )
        if len(parts) != len(restores) or not inside.all():
            raise InvariantError(f"restores do not fit the capture store: {restores}")
        return index

    def capture(self, taps: Tensor, layout: RowLayout) -> None:
        """Keep the tap rows [R, n * d] of a step where the tables of their slots say."""
        if len(self._rows):
            slots = cache_slots(
                self._capture_tables, self._block_size, layout.slots[layout.row_seq], layout.positions
            )
            self._rows.flatten(0, 1).index_copy_(0, slots, taps)

    def kv_slots(self, layout: RowLayout) -> Tensor:
        """Cache slots [R] int64 of the draft K/V of a step's rows; in block 0 where there is no draft
        state.
        """
        row_slots = layout.slots[layout.row_seq]
        return cache_slots(self.draft_tables, self._block_size, row_slots, layout.positions)
