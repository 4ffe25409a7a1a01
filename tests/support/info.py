"""What an engine without a model says of itself."""

from __future__ import annotations

from typing import Any

from paceline.engine.messages import EngineInfo


def engine_info(**fields: Any) -> EngineInfo:
    """That of a simulated device, but for ``fields``; a context may fill the cache."""
    sizes = {"max_num_seqs": 8, "block_size": 16, "num_blocks": 64, **fields}
    defaults: dict[str, Any] = {
        "model": "simulated",
        "folder": "",
        "vocab_size": 97,
        "max_model_len": sizes["num_blocks"] * sizes["block_size"],
        "eos_token_ids": [0],
        "max_logprobs": 5,
        "device": "simulated",
        "dtype": "none",
        "weights_bytes": 0,
        "ready_s": 0.0,
    }
    return EngineInfo(**{**defaults, **sizes})
