"""A drafter that fails while a round is captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.config import EngineConfig
from paceline.engine.core import EngineCore
from paceline.engine.factory import make_core
from paceline.models.drafter import Drafter
from paceline.proving.drive import runner_of
from paceline.runtime.failures import FailureLog
from paceline.sampling.params import SamplingParams
from support.engines import GOLDEN, complete, golden_prompts, tokens_of

pytestmark = pytest.mark.gpu


def make(**options: Any) -> EngineCore:
    model = str(GOLDEN / "qwen3_tiny")
    sizes: dict[str, Any] = {"num_blocks": 512, "max_num_seqs": 16}
    return make_core(EngineConfig.of(model=model, device="cuda", dtype="float32", **sizes, **options))


def test_it_costs_no_request_and_no_later_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[FailureLog] = []
    monkeypatch.setattr(FailureLog, "__call__", lambda log: failures.append(log))
    prompts = golden_prompts(12)
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=20, ignore_eos=True) for i in range(12)]
    plain = tokens_of(complete(make(enforce_eager=True), prompts, params))
    speculative = {"model": str(GOLDEN / "dspark_tiny_b7"), "verify_planner": "off"}
    core = make(speculative_config=speculative)
    rounds = runner_of(core).rounds
    assert rounds is not None
    assert any(shape.propose for shape in rounds.graphs.missing)
    draft = Drafter.draft

    def failing(*args: Any, **options: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("out of luck")
        return draft(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drafter, "draft", failing)
        assert tokens_of(complete(core, prompts, params)) == plain
        while core.runner.prepare():  # all that is left is tried, and fails where it drafts
            pass
        assert not rounds.graphs.missing
    assert failures
    failures.clear()
    assert tokens_of(complete(core, prompts, params)) == plain
    assert not failures, "a round that is needed is captured after all"
