"""The slots' arrays: what is written for one never reaches another."""

from __future__ import annotations

import random
from array import array

import pytest
import torch

from paceline.runtime import state as state_module
from paceline.runtime.plan import SlotInit, TableUpdate
from paceline.runtime.state import SlotState
from paceline.sampling.params import SamplingParams
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


@pytest.mark.parametrize("large", [False, True])
def test_tenants_and_tables_stand_where_they_belong(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not int32 says where a table's cells are."""
    if large:
        monkeypatch.setattr(state_module, "MAX_INDEX", 0)
    rng = random.Random(0)
    state = SlotState(6, 90, 4, SamplingState(7, 11, eos_token_ids=(), device=CPU), CPU)
    tokens, tables = state.tokens.clone(), state.block_tables.clone()
    for _ in range(20):
        inits, updates = [], []
        for slot in rng.sample(range(6), rng.randrange(7)):
            known = array("I", [rng.randrange(1, 11) for _ in range(rng.randrange(1, 91))])
            inits.append(SlotInit(slot, known, 0, len(known), SamplingParams(), 0))
            tokens[slot, : len(known)] = torch.tensor(known.tolist())
        for slot in rng.sample(range(6), rng.randrange(7)):
            first = rng.randrange(tables.shape[1])
            ids = [rng.randrange(100) for _ in range(rng.randrange(1, tables.shape[1] - first + 1))]
            updates.append(TableUpdate(slot, first, ids))
            tables[slot, first : first + len(ids)] = torch.tensor(ids)
        state.apply(inits, updates)
        assert torch.equal(state.tokens, tokens) and torch.equal(state.block_tables, tables)
