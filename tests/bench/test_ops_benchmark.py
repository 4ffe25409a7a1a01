"""The benchmark of the ops passes what is right, on the CPU, and reports what is not."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import ops
from paceline.runtime.few_rows import FewRows
from paceline.sampling.sampler import SampleOutput

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("ops_gpu")


def run(benchmark: Any, folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit status and results."""
    out = folder / "results.json"
    status = benchmark.main(["--cpu", "--out", str(out), *arguments])
    return status, json.loads(out.read_text())["results"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_case_passes(
    benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    status, results = run(benchmark, tmp_path, "--dtype", dtype)
    assert status == 0 and all(result["passed"] and not result["failure"] for result in results)
    assert len({(result["op"], result["shape"]) for result in results}) == len(results)
    names = {name for result in results for name in result["op"].split()}
    kernels = set(importlib.import_module("paceline.ops").__all__)
    others = {"pack_linear", "reads_own_keys", "best_of_buckets"}
    assert {name for name in kernels if name.islower()} - names == others
    assert {"sample_fixed", "persistent", "prompt_attention", "block", "deterministic"} <= names
    capsys.readouterr()
    assert benchmark.main(["--markdown", str(tmp_path / "results.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(results) + 2 and all(line.count("|") == 10 for line in lines)


def test_the_geometry_is_that_of_the_models(benchmark: Any) -> None:
    case = importlib.import_module("ops_case")
    persistent = importlib.import_module("ops_persistent")
    world = case.World(torch.device("cpu"), torch.bfloat16)
    full = persistent.Qwen3Config.from_pretrained(persistent.geometry_folder("qwen3-4b"))
    assert (world.hidden, world.intermediate, world.layers) == (2560, 9728, full.num_hidden_layers)
    assert (world.heads * world.head_dim, world.kv_heads * world.head_dim) == (full.q_size, full.kv_size)
    shapes = {plan.shape for plan in benchmark.plans(world)}
    assert {"qkv R=2048", "8 x 1024", "64 x 16 at 1k", "filtered R=512", "decode 32 x 1k"} <= shapes


def last_changed(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op, with one number of its first result changed."""

    def changed(*args: Any, **kwargs: Any) -> Any:
        found = op(*args, **kwargs)
        first = found[0] if isinstance(found, tuple) else found
        first.view(-1)[-1] += 1
        return found

    return changed


def undone(op: Callable[..., Any]) -> Callable[..., Any]:
    """An op that writes nothing."""
    return lambda *args, **kwargs: None


def another(op: Callable[..., Any]) -> Callable[..., Any]:
    """An op that chooses the tokens beside its choice."""
    return lambda *args, **kwargs: (op(*args, **kwargs) + 1) % 2048


def unwritten(op: Callable[..., Any]) -> Callable[..., Any]:
    """An op that leaves its result as it was allocated."""
    return lambda *args, **kwargs: torch.empty_like(op(*args, **kwargs))


MUTANTS: list[tuple[str, Callable[..., Any]]] = [
    ("rms_norm", last_changed),
    ("add_rms_norm", last_changed),
    ("silu_mul", last_changed),
    ("silu_mul", unwritten),
    ("qk_norm_rope_write", last_changed),
    ("kv_norm_rope_write", undone),
    ("linear", last_changed),
    ("linear", unwritten),
    ("linear_parts", last_changed),
    ("linear_silu_mul", last_changed),
    ("paged_attention", last_changed),
    ("draft_best", another),
    ("draft_candidates", another),
    ("draft_chain", another),
    ("span_rows", last_changed),
    ("allot_drafts", last_changed),
    ("packed_rows", last_changed),
    ("block_rows", last_changed),
    ("cache_slots", last_changed),
    ("cache_slots", unwritten),
    ("leading_matches", last_changed),
    ("synthetic_matches", last_changed),
    ("place_drafts", undone),
    ("advance", undone),
]


@pytest.mark.parametrize(("name", "mutate"), MUTANTS)
def test_a_wrong_result_is_reported(
    benchmark: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    mutate: Callable[..., Callable[..., Any]],
) -> None:
    monkeypatch.setattr(ops, name, mutate(getattr(ops, name)))
    status, results = run(benchmark, tmp_path, "--only", f"{name} ")
    wrong = [result for result in results if result["op"].split()[-1] == name]
    assert status == 1 and wrong and not any(result["passed"] for result in wrong)
    assert not any(result["failure"] for result in wrong)


@pytest.mark.parametrize("op", ["prompt_attention", "block attention", "deterministic attention"])
def test_wrong_attention_of_any_kind_is_reported(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    monkeypatch.setattr(ops, "paged_attention", last_changed(ops.paged_attention))
    status, results = run(benchmark, tmp_path, "--only", op)
    assert status == 1 and results and not any(result["passed"] for result in results)


@pytest.mark.parametrize("options", [{"window": None}, {"bidirectional": False}])
def test_blocks_see_the_keys_they_should(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    attend = ops.paged_attention

    def other(*args: Any, **kwargs: Any) -> Any:
        *operands, window, bidirectional = args
        return attend(*operands, **{"window": window, "bidirectional": bidirectional, **kwargs, **options})

    monkeypatch.setattr(ops, "paged_attention", other)
    _, results = run(benchmark, tmp_path, "--only", "block attention")
    windowed = [result for result in results if "window" in result["shape"]]
    assert windowed and not any(result["passed"] for result in windowed)


@pytest.mark.parametrize("kind", ["greedy", "random", "filtered"])
def test_a_wrong_token_is_reported(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    sampler = importlib.import_module("ops_sampler")
    sample = sampler.sample_fixed

    def other(*args: Any) -> SampleOutput:
        return SampleOutput(last_changed(lambda: sample(*args).tokens)(), None)

    monkeypatch.setattr(sampler, "sample_fixed", other)
    status, results = run(benchmark, tmp_path, "--only", f"sample_fixed {kind}")
    assert status == 1 and results and not any(result["passed"] for result in results)


def test_a_wrong_pass_is_reported(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = FewRows.target
    monkeypatch.setattr(
        FewRows,
        "target",
        lambda *args: lambda *rows: 1.2 * make(*args)(*rows),  # type: ignore[misc]
    )
    status, results = run(benchmark, tmp_path, "--only", "persistent")
    assert status == 1 and results and not any(result["passed"] for result in results)


def test_what_fails_stops_nothing_else(
    benchmark: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no such kernel\nanywhere")

    monkeypatch.setattr(ops, "silu_mul", fail)
    status, results = run(benchmark, tmp_path, "--only", "R=8")
    failed = [result for result in results if not result["passed"]]
    assert status == 1 and {result["op"] for result in failed} == {"silu_mul"}
    assert len(results) > 10 and "no such kernel" in failed[0]["failure"]
    assert "FAILED RuntimeError: no such kernel" in capsys.readouterr().out
    assert not torch.are_deterministic_algorithms_enabled()
