"""Real engines over the golden models, small enough for tests."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import load_file

from paceline.config import EngineConfig
from paceline.engine.core import EngineCore
from paceline.engine.factory import make_core
from paceline.engine.messages import SequenceOutput
from paceline.models.drafter import Drafter
from paceline.proving import drive
from paceline.proving.drive import tokens_of
from paceline.sampling.params import SamplingParams

__all__ = [
    "DRAFTERS",
    "GOLDEN",
    "complete",
    "drafter_of",
    "golden_cases",
    "golden_core",
    "golden_meta",
    "golden_prompts",
    "tokens_of",
]

GOLDEN = Path(__file__).parent.parent / "golden"
DRAFTERS = (
    "dflash_tiny_b16",
    "dflash_tiny_b7_deepspec",
    "dspark_tiny_b7",
    "dspark_tiny_b7_gated",
    "dspark_tiny_b7_rnn",
    "dspark_tiny_b6_speculators",
)
"""Drafters of ``qwen3_tiny``: every dialect, both anchor layouts, all heads."""


def golden_core(name: str, *, drafter: str | None = None, lookahead: int = 0, **options: Any) -> EngineCore:
    """An engine on the CPU in fp32 over a golden model.

    Args:
        name: the target.
        drafter: a golden drafter.
        lookahead: steps in flight.
        options: engine options; ``speculative_config`` adds to the drafter. All drafts are verified unless it
            says otherwise, so that what happens does not depend on the clock.
    """
    if drafter is not None:
        options["speculative_config"] = {
            "model": str(GOLDEN / drafter),
            "verify_planner": "off",
            **options.get("speculative_config", {}),
        }
    if "kv_cache_memory_bytes" not in options:
        options.setdefault("num_blocks", 512)  # the default pool takes longer to zero than most tests run
    config = EngineConfig.of(model=str(GOLDEN / name), device="cpu", dtype="float32", **options)
    return make_core(config, lookahead=lookahead)


def golden_cases(name: str) -> list[dict[str, np.ndarray[Any, Any]]]:
    """The cases of a golden set, in order: name of the tensor -> values."""
    tensors = load_file(GOLDEN / name / "cases.safetensors")
    names = sorted({key.split(".")[0] for key in tensors})
    return [
        {key.partition(".")[2]: value for key, value in tensors.items() if key.split(".")[0] == case}
        for case in names
    ]


@cache
def golden_meta(name: str) -> dict[str, Any]:
    """The meta data of a golden set."""
    meta: dict[str, Any] = msgspec.json.decode((GOLDEN / name / "cases.json").read_bytes())
    return meta


def complete(
    core: EngineCore,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
    *,
    check: bool = True,
) -> list[list[SequenceOutput]]:
    """Run prompts to their end together, with the engine's own checks after every step."""
    return drive.complete(core, prompts, params, after_step=core.check if check else None)


def drafter_of(core: EngineCore) -> Drafter:
    """The drafter of an engine that has one."""
    stage = drive.runner_of(core).drafting
    assert stage is not None
    return stage.drafter


def golden_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Beginnings of the golden texts, which the golden drafters were taught; every third one ends in noise.

    Many begin alike, so that a prefix cache has something to find.
    """
    rng = random.Random(seed)
    texts = [
        [*case["input_ids"].tolist(), *case["greedy_ids"].tolist()] for case in golden_cases("qwen3_tiny")
    ]
    prompts = []
    for i in range(count):
        text = texts[i % len(texts)]
        prompt = text[: rng.randrange(1, len(text) + 1)]
        if i % 3 == 2:
            prompt += [rng.randrange(3, 317) for _ in range(rng.randrange(1, 8))]
        prompts.append(prompt)
    return prompts
