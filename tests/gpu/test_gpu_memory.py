"""Memory on a real device: as much as was planned, and nothing allocated after start-up."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline.bench.geometry import geometry_folder
from paceline.config import EngineConfig
from paceline.engine.core import EngineCore
from paceline.engine.factory import make_core
from paceline.sampling.params import SamplingParams
from support.engines import complete

pytestmark = pytest.mark.gpu

SHARE = 0.6
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.0, "logprobs": 20},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "logprobs": 5},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.9, "top_k": 50_000},
    {"temperature": 1.1, "min_p": 0.02},
    {"temperature": 0.7, "frequency_penalty": 0.5, "presence_penalty": 0.1, "repetition_penalty": 1.2},
    {"temperature": 0.7, "logit_bias": {3: 1.0}, "min_tokens": 3, "bad_words_ids": [[5, 6]]},
    {"temperature": 0.9, "allowed_token_ids": list(range(1000)), "logprobs": 20},
    {"temperature": 0.0, "prompt_logprobs": 20},
]


@pytest.fixture(autouse=True)
def nothing_left_over() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield


def in_use() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def engine(draft_state: str | None, **options: Any) -> EngineCore:
    speculative: dict[str, Any] | None = None
    if draft_state is not None:
        folder = geometry_folder("qwen3-4b-dspark-b7")
        speculative = {"model": str(folder), "draft_state": draft_state, "verify_planner": "off"}
    options = {"gpu_memory_utilization": SHARE, "max_num_seqs": 64, **options}
    return make_core(
        EngineConfig.of(
            model=str(geometry_folder("qwen3-4b")),
            device="cuda",
            load_format="dummy",
            speculative_config=speculative,
            **options,
        )
    )


def run_anything(core: EngineCore, seed: int, count: int, longest: int) -> None:
    """Requests of every kind and many lengths, more than fit at once."""
    rng = random.Random(seed)
    vocab = core.info.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(rng.randrange(1, longest))] for _ in range(count)]
    params = [
        SamplingParams(seed=i, max_tokens=rng.randrange(2, 64), ignore_eos=True, **rng.choice(KINDS))
        for i in range(count)
    ]
    complete(core, prompts, params, check=False)


@pytest.mark.parametrize("draft_state", [None, "paged", "capture"])
def test_nothing_is_allocated_after_start_up(draft_state: str | None) -> None:
    core = engine(draft_state)
    total = torch.cuda.mem_get_info()[1]
    start = in_use()
    assert start <= SHARE * total
    assert start > SHARE * total - 6 * 2**30, "memory was left lying about"
    while core.runner.prepare():
        pass
    reserved = torch.cuda.memory_reserved()
    assert in_use() <= SHARE * total, "graphs were not counted"
    run_anything(core, seed=1, count=150, longest=1500)
    run_anything(core, seed=2, count=64, longest=5000)
    run_anything(core, seed=3, count=3, longest=30_000)
    assert torch.cuda.memory_reserved() == reserved
    assert in_use() <= SHARE * total


@pytest.mark.parametrize("sizes", [(1, 512), (3, 64), (5, 128), (64, 576)])
def test_small_limits_are_no_exception(sizes: tuple[int, int]) -> None:
    """Few sequences: other ways to draw are then the largest."""
    core = engine("paged", max_num_seqs=sizes[0], max_num_batched_tokens=sizes[1], num_blocks=4096)
    while core.runner.prepare():
        pass
    reserved = torch.cuda.memory_reserved()
    run_anything(core, seed=4, count=24, longest=600)
    assert torch.cuda.memory_reserved() == reserved
