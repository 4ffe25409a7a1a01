"""The slots' arrays: what is written for one never reaches another."""

from __future__ import annotations

import pytest
import torch

from paceline.runtime.plan import TableUpdate
from paceline.runtime.state import SlotState
from paceline.sampling.state import SamplingState

CPU = torch.device("cpu")


def test_ids_past_the_end_of_a_table_are_not_written() -> None:
    state = SlotState(2, 15, 4, SamplingState(3, 11, eos_token_ids=(), device=CPU), CPU)
    width = state.block_tables.shape[1]
    state.apply([], [TableUpdate(0, 1, [7] * (width - 1))])
    before = state.block_tables.clone()
    assert before[0].tolist() == [0] + [7] * (width - 1) and not before[1:].any()
    with pytest.raises(AssertionError):
        state.apply([], [TableUpdate(0, 1, [8] * width)])
    assert torch.equal(state.block_tables, before)
