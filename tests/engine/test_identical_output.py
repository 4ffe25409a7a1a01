"""The same tokens whatever happens around a sequence: batch, chunking, cache, preemption, neighbours."""

from __future__ import annotations

import random
from typing import Any

import pytest

from paceline.sampling.params import SamplingParams
from support.engines import complete, golden_core, tokens_of

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    "plain": SamplingParams(temperature=1.0, seed=11, max_tokens=20, ignore_eos=True),
    "filtered": SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=12, max_tokens=20, ignore_eos=True),
    "penalised": SamplingParams(
        temperature=0.9,
        min_p=0.02,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=0.2,
        logit_bias={5: 2.0},
        seed=13,
        max_tokens=20,
        ignore_eos=True,
    ),
}


def prompts(count: int) -> list[list[int]]:
    """Random prompts, half of them with a common beginning."""
    rng = random.Random(0)
    shared = [rng.randrange(3, 320) for _ in range(40)]
    result = []
    for i in range(count):
        tail = [rng.randrange(3, 320) for _ in range(rng.randrange(1, 30))]
        result.append(shared[: rng.randrange(1, 40)] + tail if i % 2 else tail)
    return result


@pytest.mark.parametrize("kind", list(SAMPLINGS))
def test_same_tokens_in_every_setting(kind: str) -> None:
    params = SAMPLINGS[kind]
    many = prompts(16)
    alone_core = golden_core("qwen3_tiny", enable_prefix_caching=False)
    alone = [tokens_of(complete(alone_core, [prompt], params))[0] for prompt in many]
    settings: dict[str, dict[str, Any]] = {
        "batched": {"max_num_seqs": 24},
        "chunked": {"max_num_seqs": 6, "max_num_batched_tokens": 7},
        "cached": {"max_num_seqs": 2},
        "big blocks": {"block_size": 64},
        "short of memory": {"max_num_seqs": 12, "num_blocks": 16},
    }
    for name, options in settings.items():
        core = golden_core("qwen3_tiny", **options)
        assert tokens_of(complete(core, many, params, check=False)) == alone, name
        if name == "short of memory":
            assert core.scheduler.num_preemptions > 0
        if name == "cached":
            assert core.pool.num_hit_tokens > 0
            assert tokens_of(complete(core, many, params, check=False)) == alone, "again"


def test_seeds_and_samples() -> None:
    core = golden_core("qwen3_tiny")
    prompt = prompts(1)
    base = {"temperature": 1.0, "max_tokens": 16, "ignore_eos": True}
    one = tokens_of(complete(core, prompt, SamplingParams(seed=1, **base)))  # type: ignore[arg-type]
    two = tokens_of(complete(core, prompt, SamplingParams(seed=2, **base)))  # type: ignore[arg-type]
    many = tokens_of(complete(core, prompt, SamplingParams(seed=1, n=5, **base)))  # type: ignore[arg-type]
    assert one != two
    assert many[0] == one[0], "asking for more samples does not change the first"
    assert len({tuple(tokens) for tokens in many}) == 5
    unseeded = [tokens_of(complete(core, prompt, SamplingParams(**base)))[0] for _ in range(2)]  # type: ignore[arg-type]
    assert unseeded[0] != unseeded[1]


def test_512_requests_in_a_pool_that_fits_32() -> None:
    """All finish, each as if alone, and the pool is back at its start."""
    rng = random.Random(1)
    many = [[rng.randrange(3, 320) for _ in range(rng.randrange(4, 28))] for _ in range(512)]
    params = [
        SamplingParams(temperature=float(i % 2), seed=i, max_tokens=1 + i % 5, ignore_eos=True)
        for i in range(512)
    ]
    core = golden_core("qwen3_tiny", num_blocks=64, max_num_seqs=64, max_num_batched_tokens=256)
    together = tokens_of(complete(core, many, params, check=False))
    core.check()
    assert core.pool.num_free == core.pool.num_blocks
    alone_core = golden_core("qwen3_tiny", enable_prefix_caching=False)
    for i in range(0, 512, 8):
        assert tokens_of(complete(alone_core, [many[i]], params[i]))[0] == together[i]
