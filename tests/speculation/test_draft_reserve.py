"""The arithmetic of captured draft state against the golden numbers, and the ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvariantError
from paceline.speculation.draft_reserve import (
    DraftReserve,
    capture_slot_bytes,
    capture_slots,
    max_cache_len,
    open_blocks,
)

GOLDEN = Path(__file__).parent.parent / "golden" / "arithmetic.json"
CASE: dict[str, Any] = json.loads(GOLDEN.read_text())["geometries"][0]
GEOMETRY = CASE["geometry"]


def slot_bytes() -> int:
    return capture_slot_bytes(
        GEOMETRY["kv_block_tokens"],
        GEOMETRY["num_taps"],
        GEOMETRY["hidden_size"],
        GEOMETRY["bytes_per_element"],
    )


def test_bytes_of_a_capture() -> None:
    assert slot_bytes() == CASE["capture_slot_bytes"]
    assert slot_bytes() // GEOMETRY["kv_block_tokens"] == CASE["capture_bytes_per_token"]


@pytest.mark.parametrize("case", CASE["capture_slots"], ids=lambda case: f"{case['budget_mib']} MiB")
def test_slots_of_a_budget(case: dict[str, int]) -> None:
    slots = capture_slots(case["budget_mib"] * 2**20, slot_bytes())
    assert slots == case["slots"]
    assert slots * GEOMETRY["kv_block_tokens"] == case["tokens"]


def test_how_many_requests_can_draft() -> None:
    case = CASE["request_ceiling"]
    longest = max_cache_len(case["prompt"], case["max_tokens"], case["block"], case["draft_max_position"])
    assert longest == case["max_cache_len"]
    size = GEOMETRY["kv_block_tokens"]
    # Per token the system this is modelled on holds draft K/V, projected rows and captured rows; ours holds
    # draft K/V alone, the rest of the reserve goes to more requests.
    theirs = DraftReserve(case["reserve_bytes"] // (CASE["request_state_bytes_per_token"] * size), size)
    assert (
        theirs.cost(longest) * size * CASE["request_state_bytes_per_token"]
        == (case["charge_bytes_per_request"])
    )
    assert theirs.ceiling(longest) == case["max_requests"]
    ours = DraftReserve(case["reserve_bytes"] // (CASE["draft_kv_bytes_per_token"] * size), size)
    assert ours.ceiling(longest) == 114
    assert max_cache_len(40000, 2000, 16, case["draft_max_position"]) == case["draft_max_position"]


@pytest.mark.parametrize(
    ("block_size", "num_drafts", "lookahead", "expected"),
    [(16, 7, 0, 2), (16, 7, 1, 2), (16, 15, 0, 2), (16, 15, 1, 3), (64, 15, 1, 2), (16, 1, 0, 2)],
)
def test_blocks_being_filled(block_size: int, num_drafts: int, lookahead: int, expected: int) -> None:
    assert open_blocks(block_size, num_drafts, lookahead) == expected
    rows = block_size - 1 + (1 + lookahead) * (1 + num_drafts)
    assert (expected - 1) * block_size < rows <= expected * block_size


@given(
    num_blocks=st.integers(1, 40),
    lives=st.lists(st.tuples(st.integers(1, 200), st.booleans()), max_size=60),
)
def test_charges_never_exceed_the_reserve_and_come_back_once(
    num_blocks: int, lives: list[tuple[int, bool]]
) -> None:
    reserve = DraftReserve(num_blocks, 16)
    held: list[list[int]] = []
    for positions, leave in lives:
        if leave and held:
            gone = held.pop(0)
            reserve.refund(gone)
            with pytest.raises(InvariantError):
                reserve.refund(gone)
        if reserve.fits(positions):
            ids = reserve.charge(positions)
            assert len(ids) == -(-positions // 16) and 0 not in ids
            held.append(ids)
        else:
            with pytest.raises(InvariantError):
                reserve.charge(positions)
        owned = [block for ids in held for block in ids]
        assert len(set(owned)) == len(owned) == num_blocks - reserve.num_free
        reserve.check()
    for ids in held:
        reserve.refund(ids)
    assert reserve.num_free == num_blocks
