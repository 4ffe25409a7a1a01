"""When kernels are compiled ahead, and what is gone through for them."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import paceline
from paceline.models.attention import DenseCausalContext
from paceline.models.loader import load_model
from paceline.runtime import precompile as module
from paceline.runtime.memory import StepLimits
from paceline.runtime.precompile import precompile
from paceline.runtime.runner import Runner
from support.engines import GOLDEN

LIMITS = StepLimits(
    max_num_seqs=100, max_num_batched_tokens=2048, max_model_len=512, max_logprobs=20, num_drafts=7
)


class Starts:
    """Engines that are started one after the other on a machine."""

    def __init__(self) -> None:
        self.gone_through = 0
        self.error: Exception | None = None

    def go_through(self, runner: Any, limits: StepLimits, *, planned: bool) -> None:
        self.gone_through += 1
        if self.error is not None:
            raise self.error

    def start(self, facts: object = "facts") -> None:
        precompile(lambda: None, LIMITS, planned=False, facts=facts)  # type: ignore[arg-type, return-value]


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starts:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    starts = Starts()
    monkeypatch.setattr(module, "go_through", starts.go_through)
    return starts


def test_it_happens_at_the_first_start(starts: Starts, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):
        starts.start()
    assert starts.gone_through == 1
    assert caplog.text.count("Compiled 0 kernels in") == 1


def test_it_happens_again_when_other_kernels_are_needed(
    starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    for facts in ("facts", "others", "facts"):
        starts.start(facts)
    assert starts.gone_through == 2
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: "another GPU")
    starts.start()
    assert starts.gone_through == 3


def test_it_happens_again_when_the_kernels_are_gone(starts: Starts, tmp_path: Path) -> None:
    starts.start()
    shutil.rmtree(tmp_path)
    starts.start()
    assert starts.gone_through == 2


def test_a_failure_is_told_and_hurts_nobody(starts: Starts, caplog: pytest.LogCaptureFixture) -> None:
    starts.error = ValueError("an index out of range")
    for _ in range(2):
        starts.start()
    assert starts.gone_through == 1
    assert "could not be compiled side by side" in caplog.text and "an index out of range" in caplog.text


def test_a_changed_source_is_another_kernel(
    tmp_path: Path, starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    (package / "ops" / "triton").mkdir(parents=True)
    monkeypatch.setattr(paceline, "__file__", str(package / "__init__.py"))
    source = package / "ops" / "triton" / "norm.py"
    for text, count in (("a", 1), ("b", 2), ("b", 2)):
        source.write_text(text)
        starts.start()
        assert starts.gone_through == count


def test_layers_that_are_alike_run_once() -> None:
    model = load_model(GOLDEN / "qwen3_tiny", device="cpu", dtype="float32")
    layers = model.decoder_layers()
    assert len(layers) > 2
    layers[1].self_attn.spec = replace(layers[1].self_attn.spec, window=4)
    ran: list[int] = []
    for i, layer in enumerate(layers):
        layer.mlp.register_forward_hook(lambda *_, i=i: ran.append(i))
    rows = torch.arange(6)[None], torch.arange(6)[None]
    want = model(*rows, DenseCausalContext()).hidden
    assert ran == list(range(len(layers)))
    ran.clear()
    with module._once_each(layers):
        model(*rows, DenseCausalContext(), taps=(0, len(layers) - 1))
    assert ran == [0, 1]
    assert torch.equal(model(*rows, DenseCausalContext()).hidden, want)


COUNTS = {1: [7], 2: [7], 4: [7], 8: [7], 16: [2, 4, 7], 32: [2, 7], 64: [2, 4, 7], 100: [2, 7]}


def test_rounds_are_those_that_the_planner_times() -> None:
    runner = object.__new__(Runner)
    runner.rounds = SimpleNamespace(shapes=SimpleNamespace(draft_counts=COUNTS))  # type: ignore[assignment]
    plans = list(module._timed(runner, LIMITS))
    assert all(plan.num_rows <= LIMITS.max_num_batched_tokens for plan in plans)
    drafting = [(len(plan.spans), plan.depth) for plan in plans if plan.spans[0].propose]
    assert drafting == [(size, depth) for size in (1, 8, 64, 100) for depth in (0, *COUNTS[size])]
    plain = [plan for plan in plans if not plan.spans[0].propose]
    assert [len(plan.spans) for plan in plain] == [1, 8, 64, 100]
    assert all(span.rows == 1 for plan in plain for span in plan.spans)
