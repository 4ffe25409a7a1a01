"""Reading config.json: what is understood, what is refused, and that the refusal names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_cases import tiny_config

from paceline.errors import CheckpointError
from paceline.models.config import Qwen3Config, RopeConfig


def test_both_rope_spellings_are_one_config() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    older = Qwen3Config.from_dict(tiny_config(rope_theta=1e6, rope_scaling=scaling))
    newer = Qwen3Config.from_dict(
        tiny_config(rope_theta=None, rope_parameters={**scaling, "rope_theta": 1e6})
    )
    assert older == newer
    assert older.rope == RopeConfig(1e6, "yarn", factor=4.0, original_max_position=64)
    oldest = Qwen3Config.from_dict(
        tiny_config(rope_theta=1e6, rope_scaling={"type": "linear", "factor": 2.0})
    )
    assert oldest.rope == RopeConfig(1e6, "linear", factor=2.0)


def test_defaults_are_those_of_hugging_face() -> None:
    config = Qwen3Config.from_dict(
        tiny_config(head_dim=None, num_key_value_heads=None, max_position_embeddings=None, rms_norm_eps=None)
    )
    assert (config.head_dim, config.num_key_value_heads, config.max_position_embeddings) == (128, 4, 32768)
    assert config.rms_norm_eps == 1e-6


def test_what_else_is_carried() -> None:
    config = Qwen3Config.from_dict(tiny_config(bos_token_id=1, dtype="bfloat16", torch_dtype=None))
    assert (config.eos_token_ids, config.bos_token_id, config.dtype) == ((2, 5), 1, "bfloat16")
    assert Qwen3Config.from_dict(tiny_config(eos_token_id=7)).eos_token_ids == (7,)
    assert Qwen3Config.from_dict(tiny_config(eos_token_id=None)).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (None, None, None)),
        ({"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}, (None, None, None)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, (None, 8, 8)),
        ({"use_sliding_window": True, "sliding_window": 8}, (None, None, None)),  # from layer 28 on
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
    ],
)
def test_windows(changes: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    assert Qwen3Config.from_dict(tiny_config(**changes)).windows == expected


def test_context_length_follows_yarn() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert (
        Qwen3Config.from_dict(tiny_config(max_position_embeddings=80, rope_scaling=yarn)).max_context_len
        == 256
    )
    assert (
        Qwen3Config.from_dict(tiny_config(max_position_embeddings=512, rope_scaling=yarn)).max_context_len
        == 512
    )
    assert Qwen3Config.from_dict(tiny_config(max_position_embeddings=80)).max_context_len == 80


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "attention_bias": True, "eos_token_id": 3, "bos_token_id": 1},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False, "attention_factor": 1.1}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ],
)
def test_to_dict_reads_back(changes: dict[str, Any]) -> None:
    config = Qwen3Config.from_dict(tiny_config(**changes))
    assert Qwen3Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


HARMLESS = {
    "_name_or_path": "x",
    "unsloth_version": "2026",
    "transformers_version": "5",
    "use_cache": True,
    "attention_dropout": 0.0,
    "auto_map": {},
    "something_new": None,
}


def test_harmless_keys_are_accepted() -> None:
    assert Qwen3Config.from_dict(tiny_config() | HARMLESS) == Qwen3Config.from_dict(tiny_config())


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, ["LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, ["Qwen3MoeForCausalLM"]),
        ({"architectures": None}, ["architectures"]),
        ({"model_type": "llama"}, ["model_type is 'llama'", "Qwen3ForCausalLM"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config", "awq"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping"]),
        ({"mlp_bias": False, "num_experts": 8}, ["mlp_bias", "num_experts"]),
        ({"rope_theta": None}, ["rope_theta"]),
        ({"rope_theta": 0}, ["rope_theta", "above 0"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["llama3", "default, linear, yarn"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}, ["dynamic"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["factor"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "new_knob": 3}}, ["new_knob"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 3}}, ["mscale"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, ["factor", "0.5"]),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, ["rope_theta", "10000", "500000"]),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "linear"}},
            ["disagree"],
        ),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads", "4", "num_key_value_heads", "3"]),
        ({"head_dim": 15}, ["head_dim", "15", "even"]),
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"hidden_size": "48"}, ["hidden_size", "'48'", "integer"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"attention_bias": 1}, ["attention_bias", "true or false"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "bfloat16"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "3"]),
        ({"layer_types": ["linear_attention"] * 3}, ["linear_attention"]),
        ({"layer_types": ["sliding_attention"] * 3}, ["sliding_window"]),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 4}, ["use_sliding_window"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id", "</s>"]),
    ],
)
def test_refused_by_name(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        Qwen3Config.from_dict(tiny_config(**changes), where="/m/config.json")
    for part in parts:
        assert part in str(caught.value)


def test_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        Qwen3Config.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        Qwen3Config.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected an object"):
        Qwen3Config.from_pretrained(tmp_path)
