"""Captured draft state on a real device: same tokens, warm as good as cold, nothing allocated after start."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.config import EngineConfig
from paceline.engine.core import EngineCore
from paceline.engine.factory import make_core
from paceline.sampling.params import SamplingParams
from support.engines import GOLDEN, complete, golden_cases, tokens_of

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def make(**options: Any) -> EngineCore:
    # Rows for all drafts of all requests at once: a step short of rows verifies fewer drafts, at other rates.
    sizes = {"num_blocks": 512, "max_num_seqs": 96, "max_num_batched_tokens": 4096}
    options = {"dtype": "float32", **sizes, **options}
    return make_core(EngineConfig.of(model=str(GOLDEN / "qwen3_tiny"), device=DEVICE, **options))


def prompts_on_one_prefix(count: int) -> list[list[int]]:
    """A prompt of 70 tokens, and more or less of what the target says next: text the drafters know."""
    case = golden_cases("qwen3_tiny")[-1]
    prefix, answer = case["input_ids"].tolist(), case["greedy_ids"].tolist()
    assert len(prefix) == 70
    return [[*prefix, *answer[: i % 20]] for i in range(count)]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("drafter", ["dflash_tiny_b16", "dspark_tiny_b7"])
@pytest.mark.parametrize("count", [8, 64, 96])
def test_many_requests_on_one_prefix(count: int, drafter: str, eager: bool) -> None:
    prompts = prompts_on_one_prefix(count)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    plain = tokens_of(complete(make(enforce_eager=True), prompts, params, check=False))
    config = {"model": str(GOLDEN / drafter), "draft_state": "capture", "draft_capture_mb": 2}
    config["verify_planner"] = "off"
    core = make(enforce_eager=eager, speculative_config=config)
    while core.runner.prepare():  # all rounds there are, so that none is made meanwhile
        pass
    counters = core.scheduler.speculation
    rates: list[float] = []
    allocated = 0
    for _ in range(3):
        drafted, accepted = counters.num_draft_tokens, counters.num_accepted_tokens
        assert tokens_of(complete(core, prompts, params, check=False)) == plain
        core.check()
        rates.append((counters.num_accepted_tokens - accepted) / (counters.num_draft_tokens - drafted))
        if DEVICE == "cuda":
            now = torch.cuda.memory_allocated()
            assert allocated in (0, now), "a later pass holds more memory than the first"
            allocated = now
    assert core.pool.num_free == core.pool.num_blocks
    assert counters.draft_state["restored_tokens"] > 0 and min(rates) > 0.05
    # At 96 the draft K/V of all may not fit at once: some then decode plainly beside the others.
    assert set(counters.refused) <= {"draft_reserve"}
    if not counters.refused:
        assert max(rates) - min(rates) <= 0.02
