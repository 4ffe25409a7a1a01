"""The self-check at load: silent and quick with a drafter that fits, loud with one that does not."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.engine import self_check as module
from paceline.engine.core import EngineCore
from paceline.engine.factory import make_core
from paceline.engine.self_check import MIN_ACCEPT_RATE, NUM_ROUNDS, check_prompt, self_check
from paceline.models.drafter import Drafter
from paceline.models.drafter_loader import load_drafter
from support.engines import DRAFTERS, GOLDEN, golden_cases, golden_core


def prompt() -> list[int]:
    """One the drafters were taught, whose text does not repeat: a shifted block would fit one that does."""
    ids: list[int] = golden_cases("qwen3_tiny")[5]["input_ids"].tolist()
    return ids


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, logger="paceline"):
        yield caplog


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_that_fits_is_soon_believed(name: str, log: pytest.LogCaptureFixture) -> None:
    core = golden_core("qwen3_tiny", drafter=name)
    rate = self_check(core, prompt(), name)
    assert rate is not None and rate > MIN_ACCEPT_RATE
    assert core.scheduler.speculation.num_drafts < NUM_ROUNDS
    assert not log.records and not core.has_work


def with_wrong_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **kwargs: Any) -> Drafter:
        drafter = load_drafter(*args, **kwargs)
        changed = Drafter(
            replace(drafter.config, anchor_first=not drafter.config.anchor_first), drafter.target
        )
        changed.load_state_dict(drafter.state_dict())
        changed.freeze()
        return changed

    monkeypatch.setattr("paceline.runtime.build.load_drafter", wrong)


def test_the_wrong_anchor_layout_is_reported(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    with_wrong_layout(monkeypatch)
    core = golden_core("qwen3_tiny", drafter="dflash_tiny_b16")
    rate = self_check(core, prompt(), "dflash_tiny_b16")
    assert rate is not None and rate < MIN_ACCEPT_RATE
    (record,) = log.records
    message = record.getMessage()
    for cause in ("DOES NOT FIT", "dflash_tiny_b16", "anchor layout", "tap", "rope"):
        assert cause in message
    assert core.scheduler.speculation.num_drafts == NUM_ROUNDS


def test_it_runs_at_load_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, text_folder: Path, tmp_path: Path
) -> None:
    """With a tokenizer in the checkpoint; on an engine that is not the one to serve."""
    folder = tmp_path / "target"
    shutil.copytree(GOLDEN / "qwen3_tiny", folder)
    seen: list[EngineCore] = []

    def note(core: EngineCore, ids: list[int], drafter: str) -> float | None:
        seen.append(core)
        return self_check(core, prompt(), drafter)

    monkeypatch.setattr(module, "self_check", note)

    def load() -> EngineCore:
        drafter = {"model": str(GOLDEN / "dspark_tiny_b7")}
        return make_core(
            EngineConfig.of(model=str(folder), device="cpu", num_blocks=64, speculative_config=drafter)
        )

    load()
    assert not seen and check_prompt(folder) is None
    shutil.copy(text_folder / "tokenizer.json", folder)
    shutil.copy(text_folder / "tokenizer_config.json", folder)
    core = load()
    assert len(seen) == 1 and seen[0] is not core
    assert core.stats().num_drafts == 0 and core.pool.num_free == 64
    assert check_prompt(folder)


@pytest.mark.parametrize("options", [{"max_model_len": 20}, {"num_blocks": 1}])
def test_too_short_to_tell(options: dict[str, int], log: pytest.LogCaptureFixture) -> None:
    core = golden_core("qwen3_tiny", drafter="dspark_tiny_b7", **options)
    log.clear()  # of what the engine says about its size
    assert self_check(core, prompt()[:10], "short") is None
    assert not log.records
