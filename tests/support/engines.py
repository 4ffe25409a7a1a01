"""Real engines over the golden models, small enough for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from paceline.config import EngineConfig
from paceline.engine.core import EngineCore
from paceline.engine.factory import make_core
from paceline.engine.messages import EngineRequest, SequenceOutput
from paceline.sampling.params import SamplingParams

GOLDEN = Path(__file__).parent.parent / "golden"


def golden_core(name: str, **options: Any) -> EngineCore:
    """An engine on the CPU in fp32 over a golden model."""
    return make_core(EngineConfig.of(model=str(GOLDEN / name), device="cpu", dtype="float32", **options))


def golden_cases(name: str) -> list[dict[str, np.ndarray[Any, Any]]]:
    """The cases of a golden set, in order: name of the tensor -> values."""
    tensors = load_file(GOLDEN / name / "cases.safetensors")
    names = sorted({key.split(".")[0] for key in tensors})
    return [
        {key.partition(".")[2]: value for key, value in tensors.items() if key.split(".")[0] == case}
        for case in names
    ]


def complete(
    core: EngineCore,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
    *,
    check: bool = True,
) -> list[list[SequenceOutput]]:
    """Run prompts to their end together; per prompt (and continuation) its merged output."""
    many = params if isinstance(params, list) else [params] * len(prompts)
    for i, (prompt, chosen) in enumerate(zip(prompts, many, strict=True)):
        core.add(EngineRequest(request_id=str(i), prompt_token_ids=prompt, params=chosen))
    merged: dict[tuple[int, int], SequenceOutput] = {}
    while core.has_work:
        for output in core.step():
            key = (int(output.request_id), output.index)
            if key not in merged:
                merged[key] = output
                continue
            whole = merged[key]
            whole.token_ids += output.token_ids
            if output.logprobs is not None:
                whole.logprobs = (whole.logprobs or []) + output.logprobs
            whole.finish_reason, whole.stop_reason = output.finish_reason, output.stop_reason
        if check:
            core.check()
    return [[merged[i, j] for j in range(many[i].n)] for i in range(len(prompts))]


def tokens_of(outputs: list[list[SequenceOutput]]) -> list[list[int]]:
    """Token ids of every continuation, flattened."""
    return [output.token_ids for group in outputs for output in group]
