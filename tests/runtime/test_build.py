"""What can be known to fail is refused while the engine is built, in words."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from paceline.bench.geometry import geometry_folder
from paceline.config import EngineConfig
from paceline.engine.factory import make_core
from paceline.errors import CheckpointError, ConfigError
from paceline.models.config import Qwen3Config
from paceline.models.loader import load_model
from paceline.runtime import build, few_rows
from paceline.runtime.memory import StepLimits
from support.engines import GOLDEN, golden_core


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 10**9}, r"100000000\d blocks takes [\d,.]+ GiB, which cpu does not have"),
        ({"num_blocks": 10**18}, "blocks takes"),
        ({"kv_cache_memory_bytes": 9 * 10**15}, "Lower num_blocks or kv_cache_memory_bytes"),
        ({"kv_cache_memory_bytes": 100}, "No K/V block fits"),
        ({"max_model_len": 513}, "made for at most 512"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "not every running sequence"),
        ({"device": "cuda"}, "sees no GPU"),
    ],
    ids=str,
)
def test_what_cannot_be_built_is_refused(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        make_core(EngineConfig.of(**{"model": str(GOLDEN / "qwen3_tiny"), "device": "cpu"} | options))


@pytest.mark.parametrize("drafter", ["dspark_tiny_b7", "dflash_tiny_b16"])
def test_markov_candidates_that_change_nothing_are_told(
    drafter: str, caplog: pytest.LogCaptureFixture
) -> None:
    golden_core("qwen3_tiny", drafter=drafter)
    assert "markov_candidates" not in caplog.text
    golden_core("qwen3_tiny", drafter=drafter, speculative_config={"markov_candidates": 16})
    assert "markov_candidates is 16 and changes nothing here" in caplog.text


@pytest.mark.parametrize(
    ("options", "early"), [({}, ["kernel"]), ({"enforce_eager": True}, []), ({"deterministic": True}, [])]
)
def test_the_kernel_for_few_rows_is_begun_before_weights_are_read(
    options: dict[str, Any], early: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []
    monkeypatch.setattr(few_rows.FewRows, "compile_early", lambda *_: begun.append("kernel"))

    def load(*_: Any, **__: Any) -> None:
        begun.append("weights")
        raise CheckpointError("enough")

    monkeypatch.setattr(build, "load_model", load)
    with pytest.raises(CheckpointError, match="enough"):
        golden_core("qwen3_tiny", **options)
    assert begun == [*early, "weights"]


@pytest.mark.parametrize(
    ("geometry", "changes", "begun"),
    [
        ("qwen3-4b", {}, [2560]),
        ("qwen3-8b", {}, [4096]),
        ("qwen3-4b", {"attention_bias": True}, []),
        ("qwen3-4b", {"head_dim": 64}, []),
        ("qwen3-4b", {"intermediate_size": 9729}, []),
    ],
    ids=str,
)
def test_it_is_begun_for_models_it_can_run(
    geometry: str, changes: dict[str, Any], begun: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(few_rows, "compile_early", asked.append)
    monkeypatch.setattr(few_rows, "is_hopper", lambda device: device.type == "cuda")
    monkeypatch.setattr(few_rows, "can_compile", lambda: True)
    processors = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: processors)
    config = replace(Qwen3Config.from_pretrained(geometry_folder(geometry)), **changes)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    few_rows.FewRows.compile_early(config, gpu, torch.bfloat16, 16)
    assert asked == begun
    few_rows.FewRows.compile_early(config, gpu, torch.float16, 16)
    few_rows.FewRows.compile_early(config, gpu, torch.bfloat16, 8)
    few_rows.FewRows.compile_early(config, cpu, torch.bfloat16, 16)
    assert asked == begun


def test_what_compiled_kernels_are_noted_under() -> None:
    """Options that choose no kernel may change without a start that looks for kernels again."""
    model = load_model(GOLDEN / "qwen3_tiny", device="cpu", dtype="float32")

    def facts(max_num_seqs: int = 2, **options: Any) -> tuple[object, ...]:
        engine = EngineConfig.of(model=str(GOLDEN / "qwen3_tiny"), device="cpu", **options)
        limits = StepLimits(max_num_seqs, max_num_batched_tokens=32, max_model_len=64, max_logprobs=5)
        return build._Parts(engine, model, None, limits, (), None, torch.device("cpu")).kernel_facts

    assert facts() == facts(seed=7) == facts(num_blocks=20) == facts(gpu_memory_utilization=0.5)
    assert repr(facts()) == repr(facts(enable_prefix_caching=False))
    others = [facts(max_num_seqs=3), facts(block_size=64), facts(deterministic=True)]
    assert len({repr(found) for found in (facts(), *others)}) == 4


def test_a_missing_drafter_is_named_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "load_model", lambda *args, **options: pytest.fail("weights were read"))
    config = EngineConfig.of(
        model=str(GOLDEN / "qwen3_tiny"), device="cpu", speculative_config={"model": "/no/such"}
    )
    with pytest.raises(CheckpointError, match=r"drafter in speculative_config: .*/no/such does not exist"):
        build.build(config)


def test_a_cache_smaller_than_a_sequence_is_told(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig.of(model=str(GOLDEN / "qwen3_tiny"), device="cpu", num_blocks=31)
    build.build(config)
    assert "holds 496 tokens, and sequences may have 512" in caplog.text
    caplog.clear()
    build.build(msgspec.structs.replace(config, num_blocks=32))
    assert "sequences may have" not in caplog.text
