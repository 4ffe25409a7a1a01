"""What can be known to fail is refused while the engine is built, in words."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.engine.factory import make_core
from paceline.errors import ConfigError
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
