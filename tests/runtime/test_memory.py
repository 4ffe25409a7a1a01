"""Who gets how much memory: plain arithmetic, every byte of it counted once."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.runtime.memory import CaptureMemory, MemoryPlan, budget_left

BLOCK, DRAFT = 1000, 200


def plan(*, captures: CaptureMemory | None = None, rounds: bool = True, drafter: bool = True) -> MemoryPlan:
    return MemoryPlan(0, BLOCK, DRAFT if drafter else 0, captures, rounds)


def all_bytes(plan: MemoryPlan) -> int:
    """What will be allocated for a plan."""
    captured = 0 if plan.captures is None else plan.captures.num_physical * plan.captures.slot_bytes
    target = plan.target_blocks * (plan.block_bytes - plan.draft_block_bytes)
    return target + plan.draft_blocks * plan.draft_block_bytes + captured


@pytest.mark.parametrize("captures", [None, CaptureMemory(3, 2, 50), CaptureMemory(0, 0, 50)])
@pytest.mark.parametrize("rounds", [True, False])
@pytest.mark.parametrize("drafter", [True, False])
def test_the_pool_takes_what_is_left_and_no_more(
    captures: CaptureMemory | None, rounds: bool, drafter: bool
) -> None:
    if captures is not None and not drafter:
        return
    empty = plan(captures=captures, rounds=rounds, drafter=drafter)
    for budget in (3000, 7777, 100_000):
        made = empty.within(budget, "a test")
        assert all_bytes(made) <= budget < all_bytes(made) + made.block_bytes


def test_too_little_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="No K/V block fits: a test leaves 1999 bytes, 1000 of them"):
        plan().within(1999, "a test")


def test_the_smallest_plan_holds_what_a_step_needs() -> None:
    small = plan(captures=CaptureMemory(500, 80, 50)).smallest()
    assert (small.target_blocks, small.draft_blocks) == (2, 2)
    assert small.captures is not None and small.captures.num_physical == 2
    nothing = plan(captures=CaptureMemory(0, 0, 50)).smallest()
    assert nothing.captures is not None and nothing.captures.num_physical == 0


def test_what_is_in_use_and_what_steps_need_is_taken_off() -> None:
    budget, source = budget_left(0.5, used=10 * 2**30, steps=2**30, total=40 * 2**30)
    assert budget == 9 * 2**30
    assert source == (
        "gpu_memory_utilization=0.5 of 40.0 GiB, less 10.0 GiB in use and 1.0 GiB for the largest steps and "
        "graphs"
    )
