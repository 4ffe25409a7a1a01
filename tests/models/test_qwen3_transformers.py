"""The Qwen3 model against Hugging Face transformers, on tiny random checkpoints of every supported kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import new_cache, paged_forward
from torch import Tensor

from paceline.models.attention import DenseCausalContext
from paceline.models.loader import load_model, save_checkpoint

transformers = pytest.importorskip("transformers")

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
KINDS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "multi-query": {"num_key_value_heads": 1, "num_attention_heads": 3},
    "multi-head": {"num_key_value_heads": 4},
    "attention bias": {"attention_bias": True},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "yarn": {"rope_parameters": YARN},
    "yarn, own ramp": {
        "rope_parameters": {
            **YARN,
            "beta_fast": 1.5,
            "beta_slow": 0.2,
            "attention_factor": 1.3,
            "truncate": False,
        }
    },
    "yarn, no original length": {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}},
    "sliding window": {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    "sliding by layer type": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "window switched off": {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0},
}


def build(folder: Path, **changes: Any) -> Any:
    """A random checkpoint written by transformers; returns its model."""
    settings: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "attn_implementation": "eager",
        **changes,
    }
    torch.manual_seed(len(str(changes)))
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(
                "bias"
            ):  # transformers starts these at 1 and 0: no test of them
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def reference_logits(model: Any, tokens: Tensor) -> Tensor:
    """[B, S] -> [B, S, V]."""
    logits = model(tokens).logits
    assert isinstance(logits, Tensor)
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_same_logits(kind: str, tmp_path: Path) -> None:
    reference = build(tmp_path, **KINDS[kind])
    tokens = torch.randint(0, 96, (2, 61), generator=torch.Generator().manual_seed(3))
    expected = reference_logits(reference, tokens)
    model = load_model(tmp_path)
    dense = model(tokens, torch.arange(61).expand(2, -1), DenseCausalContext()).hidden
    torch.testing.assert_close(model.logits(dense), expected, atol=3e-4, rtol=0)
    # and as a server would: two sequences of unequal progress through a paged cache
    cache, tables = new_cache(model.config, 9), [[1, 3, 5, 7], [2, 4, 6, 8]]
    first = paged_forward(model, cache, list(tokens), [(0, 0, 40), (1, 0, 19)], tables).hidden
    second = paged_forward(model, cache, list(tokens), [(0, 40, 21), (1, 19, 42)], tables).hidden
    rows = torch.cat((first[:40], second[:21], first[40:], second[21:]))
    torch.testing.assert_close(model.logits(rows), expected.flatten(0, 1), atol=3e-4, rtol=0)


@pytest.mark.parametrize(
    "kind", ["untied", "tied", "attention bias", "yarn, own ramp", "sliding by layer type"]
)
def test_transformers_reads_what_we_save(kind: str, tmp_path: Path) -> None:
    build(tmp_path / "theirs", **KINDS[kind])
    model = load_model(tmp_path / "theirs")
    save_checkpoint(model, tmp_path / "ours")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    tokens = torch.arange(40)[None] % 96
    hidden = model(tokens, torch.arange(40)[None], DenseCausalContext()).hidden
    torch.testing.assert_close(reference_logits(back, tokens), model.logits(hidden), atol=3e-4, rtol=0)
    again = load_model(tmp_path / "ours")
    assert again.config == model.config
