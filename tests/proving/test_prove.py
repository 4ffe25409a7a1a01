"""``paceline prove``: passes on a right engine, fails on a wrong one, and says what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.proving import prove as module
from paceline.proving.closeness import ClosenessProof, ScoredResult
from paceline.proving.distribution import TestResult, Verdict
from paceline.proving.gates import Violation, hedges_win_and_lose
from paceline.proving.lossless import Mode, ModeResult, all_modes
from paceline.proving.prove import ProveOptions, run_prove
from paceline.proving.report import show_modes
from paceline.runtime.acceptance import count_accepted
from support.engines import GOLDEN, golden_prompts

DRAFTER = GOLDEN / "dspark_tiny_b7"
TARGET = GOLDEN / "qwen3_tiny"
FEW = ("plain, one at a time", "drafts, lookahead", "drafts, captured state")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(json.dumps(ids) for ids in golden_prompts(6)) + "\n")
    return path


@pytest.fixture
def few_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "all_modes", lambda *args: [mode for mode in all_modes(*args) if mode.name in FEW]
    )


def run(*arguments: str) -> Any:
    fixed = ["prove", "--device", "cpu", "--target", str(TARGET), "--drafter", str(DRAFTER)]
    return CliRunner().invoke(app, [*fixed, "--max-tokens", "12", *arguments])


@pytest.mark.usefixtures("few_modes")
def test_a_right_engine_is_proved(prompts: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    result = run("--prompts", str(prompts), "--json", str(report))
    assert result.exit_code == 0, result.output
    assert "Proved" in result.output
    content = json.loads(report.read_text())
    assert content["proved"] and content["level"].startswith("L1")
    assert {row["mode"] for row in content["modes"]} == set(FEW)
    assert {row["sampling"] for row in content["modes"]} >= {"greedy", "T = 1"}
    assert all(row["num_differing"] == 0 and not row["violations"] for row in content["modes"])
    names = " ".join(check["name"] for check in content["checks"])
    for part in ("second turns", "paged", "capture", "drafts stand", "nothing is held"):
        assert part in names


@pytest.mark.usefixtures("few_modes")
def test_a_wrong_engine_is_not(prompts: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def generous(sampled: Tensor, drafts: Tensor, num_drafts: Tensor) -> Tensor:
        return torch.minimum(count_accepted(sampled, drafts, num_drafts) + 1, num_drafts)

    for where in ("runner", "round"):
        monkeypatch.setattr(f"paceline.runtime.{where}.count_accepted", generous)
    report = tmp_path / "report.json"
    result = run("--prompts", str(prompts), "--json", str(report))
    assert result.exit_code == 1
    assert "Not proved" in result.output and "violation same tokens" in result.output
    content = json.loads(report.read_text())
    assert not content["proved"]
    wrong = [row for row in content["modes"] if row["num_differing"]]
    assert wrong and all(row["mode"] != "plain, one at a time" for row in wrong)


def closeness(dtype: str, count: int, max_tokens: int, mode: Mode) -> list[ScoredResult]:
    target = EngineConfig.of(model=str(TARGET), device="cpu", dtype=dtype, num_blocks=512, max_num_seqs=count)
    proof = ClosenessProof(target, {"model": str(DRAFTER)}, golden_prompts(count), max_tokens)
    return proof.run(mode)


def test_sampled_output_is_scored_and_tested() -> None:
    greedy, sampled = closeness("float32", 48, 28, Mode("drafts, cached", passes=2))
    for result in (greedy, sampled):
        assert not result.violations and result.max_regret < 1e-3
        assert result.num_tokens == 2 * 48 * 28 and result.num_cached_tokens > 0
    assert greedy.verdict is None and sampled.verdict is not None
    assert sampled.verdict.planted_found and len(sampled.verdict.results) > 4


def test_a_biased_verifier_fails_the_law_and_the_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draft after the last right one stands, too, with the odds of one in eight."""
    generator = torch.Generator().manual_seed(0)

    def biased(sampled: Tensor, drafts: Tensor, num_drafts: Tensor) -> Tensor:
        count = count_accepted(sampled, drafts, num_drafts)
        for i in range(len(count)):
            k = int(count[i])
            if k < int(num_drafts[i]) and torch.rand((), generator=generator) < 0.125:
                sampled[i, k] = drafts[i, k]
        return count_accepted(sampled, drafts, num_drafts)

    for where in ("runner", "round"):
        monkeypatch.setattr(f"paceline.runtime.{where}.count_accepted", biased)
    _, sampled = closeness("float32", 64, 32, Mode("drafts"))
    gates = {item.gate for item in sampled.violations}
    assert {"regret", "distribution"} <= gates


def test_too_few_tokens_prove_nothing() -> None:
    _, sampled = closeness("float32", 2, 6, Mode("drafts"))
    assert [item.where for item in sampled.violations if item.gate == "distribution"] == ["power"]


def test_half_precision_is_scored_not_compared() -> None:
    """bfloat16 on a CPU: rounding depends on the batch, so tokens may differ, but none by much."""
    for result in closeness("bfloat16", 8, 12, Mode("drafts")):
        assert result.mean_regret < 0.05
        assert not [item for item in result.violations if item.gate == "nothing held"]


def test_bad_input_is_named(tmp_path: Path) -> None:
    def options(**fields: Any) -> ProveOptions:
        return ProveOptions(**{"target": str(TARGET), "drafter": str(DRAFTER), "device": "cpu", **fields})

    with pytest.raises(ConfigError, match="needs a drafter"):
        run_prove(ProveOptions(target=str(TARGET)), None)
    with pytest.raises(ConfigError, match="No such file"):
        run_prove(options(prompts=str(tmp_path / "none")), None)
    with pytest.raises(ConfigError, match=r"--json .*: Is a directory"):
        run_prove(ProveOptions(target=str(TARGET)), str(tmp_path))
    path = tmp_path / "prompts"
    for text, message in (
        ("hello\n", "line 1 is text, but the model has no tokenizer"),
        ("[1]\n[5, 320]\n", "line 2: token ids must be"),
        ("\n", "has no prompts"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            run_prove(options(prompts=str(path)), None)


def test_prompts_without_a_file_are_the_models_own() -> None:
    prover = module._Prover(
        ProveOptions(str(TARGET), str(DRAFTER), "cpu", num_prompts=20), Console(stderr=True)
    )
    found = prover._prompts
    assert len(found) == 20 and all(0 <= token < 320 for ids in found for token in ids)
    assert len({len(ids) for ids in found}) > 5


def test_scored_tables_fit_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[ModeResult] = [
        ScoredResult(
            "drafts, 64-row chunks",
            "greedy",
            32,
            12345,
            accept_length=3.21,
            max_regret=0.1234,
            mean_regret=0.01,
            verdict=Verdict([TestResult("ranks", p_value, 10)], [], True),
            violations=[Violation("gate", "where", "what")] * 12,
        )
        for p_value in (0.5, 1e-9)
    ]
    show_modes(Console(width=80), "L2", rows)
    out = capsys.readouterr().out
    assert "0.123" in out and "12,345" in out and "0.500" in out and "<.001" in out and "12 bad" in out
    assert "…" not in out


def test_chains_that_never_win_or_never_lose_are_a_violation() -> None:
    assert not hedges_win_and_lose(3, 400) and not hedges_win_and_lose(0, 200), "or there are too few"
    for wins, losses in ((0, 400), (400, 0)):
        (found,) = hedges_win_and_lose(wins, losses)
        assert "both must occur" in str(found)
