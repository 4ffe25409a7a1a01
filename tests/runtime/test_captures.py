"""The capture store on the device: rows go where the tables say and come back in order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.errors import InvariantError
from paceline.ops import RowLayout
from paceline.runtime import captures as module
from paceline.runtime.captures import CaptureStore
from paceline.runtime.plan import DraftUpdates, Restore, TableUpdate
from paceline.runtime.state import SlotState
from paceline.sampling.state import SamplingState

CPU = torch.device("cpu")
BLOCK, WIDTH, SLOTS, DRAFT_BLOCKS = 4, 3, 7, 9


def make_store(num_slots: int = SLOTS) -> tuple[CaptureStore, Tensor]:
    sampling = SamplingState(3, 11, eos_token_ids=(), device=CPU)
    state = SlotState(2, 32, BLOCK, sampling, CPU)
    rows = torch.zeros(num_slots, BLOCK, WIDTH)
    return CaptureStore(rows, DRAFT_BLOCKS, state), rows


def layout(spans: list[tuple[int, list[int]]]) -> RowLayout:
    """Rows of (slot, positions) spans; only what the store reads."""
    counts = torch.tensor([len(positions) for _, positions in spans])
    return RowLayout(
        slots=torch.tensor([slot for slot, _ in spans], dtype=torch.int32),
        row_start=torch.zeros(1, dtype=torch.int32),
        row_seq=torch.arange(len(spans), dtype=torch.int32).repeat_interleave(counts),
        positions=torch.tensor([p for _, positions in spans for p in positions], dtype=torch.int32),
        kv_slots=torch.zeros(1, dtype=torch.int64),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        num_computed=torch.zeros(1, dtype=torch.int32),
        host_rows=tuple(counts.tolist()),
        host_max_context=32,
    )


def taps(spans: list[tuple[int, list[int]]]) -> Tensor:
    """A row that names its slot and position."""
    return torch.tensor([[100.0 * slot + p] * WIDTH for slot, positions in spans for p in positions])


def capture(store: CaptureStore, spans: list[tuple[int, list[int]]]) -> None:
    store.capture(taps(spans), layout(spans))


def test_rows_go_where_the_tables_say() -> None:
    store, rows = make_store()
    store.apply(DraftUpdates(capture_tables=[TableUpdate(0, 1, [5, 2]), TableUpdate(1, 0, [3])]))
    capture(store, [(0, [3, 4, 5, 6]), (1, [0, 1])])
    capture(store, [(1, [2, 3]), (0, [7, 8])])
    assert rows[5, :, 0].tolist() == [4, 5, 6, 7]
    assert rows[3, :, 0].tolist() == [100, 101, 102, 103]
    assert rows[2, 0, 0] == 8
    assert rows[1].any() == rows[4].any() == rows[6].any() == False  # noqa: E712
    assert rows[0, 3, 0] == 3, "the row of block 0, which nobody keeps, went to the sink"


def test_a_new_tenant_writes_nowhere_until_told() -> None:
    store, rows = make_store()
    store.apply(DraftUpdates(capture_tables=[TableUpdate(0, 0, [4])], draft_tables=[TableUpdate(0, 0, [6])]))
    store.apply(DraftUpdates(resets=[0], draft_tables=[TableUpdate(0, 1, [2])]))
    capture(store, [(0, [0, 1])])
    assert not rows[4].any()
    assert store.kv_slots(layout([(0, [1, 5])])).tolist() == [1, 2 * BLOCK + 1]


@pytest.mark.parametrize("rows_at_once", [4, 8, 4096])
def test_restored_in_order_with_positions_and_targets(
    rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RESTORE_ROWS", rows_at_once)
    store, rows = make_store()
    rows.copy_(torch.arange(SLOTS * BLOCK * WIDTH).view(SLOTS, BLOCK, WIDTH))
    restores = [Restore(0, [3, 1, 5], [8, 2, 4]), Restore(1, [3], [7])]
    parts = list(store.restored(restores))
    assert len(parts) == -(-4 * BLOCK // rows_at_once)
    got, positions, kv_slots = (torch.cat(column) for column in zip(*parts, strict=True))
    assert torch.equal(got, rows[[3, 1, 5, 3]].flatten(0, 1))
    assert positions.tolist() == [*range(12), *range(4)]
    assert kv_slots.tolist() == [block * BLOCK + row for block in (8, 2, 4, 7) for row in range(BLOCK)]


@pytest.mark.parametrize(
    "restore",
    [
        Restore(0, [0], [1]),  # the sink
        Restore(0, [SLOTS], [1]),
        Restore(0, [1], [0]),
        Restore(0, [1], [DRAFT_BLOCKS]),
        Restore(0, [1, 2], [1]),
    ],
)
def test_what_does_not_fit_is_refused(restore: Restore) -> None:
    store, _ = make_store()
    with pytest.raises(InvariantError, match="do not fit the capture store"):
        list(store.restored([restore]))


def test_without_slots_nothing_is_captured() -> None:
    store, _ = make_store(0)
    store.apply(DraftUpdates(resets=[0, 1], draft_tables=[TableUpdate(1, 0, [3])]))
    capture(store, [(0, [0, 1]), (1, [2])])
    assert store.kv_slots(layout([(1, [2])])).tolist() == [3 * BLOCK + 2]
    assert list(store.restored([])) == []
