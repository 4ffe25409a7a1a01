"""Who gets how much memory: plain arithmetic, every byte of it counted once."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.models.loader import load_model
from paceline.runtime import build
from paceline.runtime.memory import CaptureMemory, MemoryPlan, StepLimits, budget_left, plan_memory
from paceline.runtime.plan import PendingStep, StepPlan
from paceline.runtime.runner import Runner
from support.engines import GOLDEN

BLOCK, DRAFT = 1000, 200


def plan(
    *,
    captures: CaptureMemory | None = None,
    rounds: bool = True,
    drafter: bool = True,
    hedge_blocks: int = 0,
) -> MemoryPlan:
    return MemoryPlan(0, BLOCK, DRAFT if drafter else 0, captures, rounds, hedge_blocks)


def all_bytes(plan: MemoryPlan) -> int:
    """What will be allocated for a plan."""
    captured = 0 if plan.captures is None else plan.captures.num_physical * plan.captures.slot_bytes
    target = plan.target_blocks * (plan.block_bytes - plan.draft_block_bytes)
    return target + plan.draft_blocks * plan.draft_block_bytes + captured


@pytest.mark.parametrize("captures", [None, CaptureMemory(3, 2, 50), CaptureMemory(0, 0, 50)])
@pytest.mark.parametrize("rounds", [True, False])
@pytest.mark.parametrize("drafter", [True, False])
@pytest.mark.parametrize("hedge_blocks", [0, 3])
def test_the_pool_takes_what_is_left_and_no_more(
    captures: CaptureMemory | None, rounds: bool, drafter: bool, hedge_blocks: int
) -> None:
    if captures is not None and not drafter:
        return
    empty = plan(captures=captures, rounds=rounds, drafter=drafter, hedge_blocks=hedge_blocks)
    for budget in (6000, 7777, 100_000):
        made = empty.within(budget, "a test")
        assert made.target_blocks == made.num_blocks + rounds + hedge_blocks
        assert all_bytes(made) <= budget < all_bytes(made) + made.block_bytes


def test_too_little_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="No K/V block fits: a test leaves 1999 bytes, 1000 of them"):
        plan().within(1999, "a test")
    with pytest.raises(
        ConfigError, match=r"of them .* \(29050 by captured rows\).*lower draft_capture_mb, max_num"
    ):
        plan(captures=CaptureMemory(500, 80, 50)).within(1999, "a test")


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


def test_a_gpu_is_measured_with_a_runner_that_then_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, with made-up figures of a GPU of 100 GB."""
    engine = EngineConfig.of(model=str(GOLDEN / "qwen3_tiny"), device="cpu", gpu_memory_utilization=0.5)
    model = load_model(engine.model_path, device="cpu", dtype="float32")
    limits = StepLimits(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64, max_logprobs=5)
    parts = build._Parts(engine, model, None, limits, (), None, torch.device("cpu"))
    made: list[weakref.ref[Runner]] = []
    free = iter([80 * 10**9, 77 * 10**9])
    emptied: list[bool] = []
    steps: list[int] = []

    def runner_of(self: build._Parts, memory: MemoryPlan) -> Runner:
        assert memory.num_blocks == 1
        runner = make(self, memory)
        made.append(weakref.ref(runner))
        return runner

    def launch(self: Runner, plan: StepPlan, **options: Any) -> PendingStep:
        steps.append(plan.num_rows)
        return launch_really(self, plan, **options)

    make, launch_really = build._Parts.runner, Runner.launch
    monkeypatch.setattr(build._Parts, "runner", runner_of)
    monkeypatch.setattr(Runner, "launch", launch)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 100 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 10_000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 15_000)
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(not made or made[0]() is None))
    memory = plan_memory(engine, model.config, None, limits, torch.float32)
    (budget, source), worst = build._measured_budget(parts, memory)
    assert worst == int(1.1 * 5_000)
    assert budget == (50 - 20 - 3) * 10**9 and "gpu_memory_utilization=0.5" in source
    assert set(steps) == {32}, "steps are as large as may be"
    assert len(made) == 1 and emptied[-1], "the runner is gone before its memory is given back"
