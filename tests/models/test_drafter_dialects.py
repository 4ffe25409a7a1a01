"""Every dialect of drafter config, and everything that must be refused by name."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from model_cases import GOLDEN, tiny_config

from paceline.errors import CheckpointError, ConfigError
from paceline.models.config import Qwen3Config, RopeConfig
from paceline.models.drafter_config import DrafterConfig
from paceline.models.drafter_dialects import default_taps, load_drafter_config, read_drafter_config

Values = dict[str, Any]


def big_target(**changes: Any) -> Qwen3Config:
    """The geometry of Qwen3-4B."""
    return Qwen3Config.from_dict(
        tiny_config(
            vocab_size=151936,
            hidden_size=2560,
            intermediate_size=9728,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=40960,
            rope_theta=1e6,
            **changes,
        )
    )


LAYERS: Values = {
    "num_hidden_layers": 5,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "layer_types": ["full_attention"] * 5,
    "model_type": "qwen3",
    "dtype": "bfloat16",
}


def z_lab(**inner: Any) -> Values:
    """Qwen3-4B-DFlash-b16, as z-lab publishes it."""
    return LAYERS | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 16,
        "num_target_layers": 36,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33], **inner},
    }


def deepspec(**changes: Any) -> Values:
    """dspark_qwen3_4b_block7, as DeepSpec publishes it."""
    return (
        LAYERS
        | {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": 7,
            "num_target_layers": 36,
            "mask_token_id": 151669,
            "target_layer_ids": [1, 9, 17, 25, 33],
            "num_anchors": 512,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "markov_rank": 256,
            "markov_head_type": "vanilla",
            "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        }
        | changes
    )


def specforge(**inner: Any) -> Values:
    """A DSpark drafter as SpecForge trains it."""
    return LAYERS | {
        "architectures": ["DSparkDraftModel"],
        "block_size": 7,
        "rope_theta": 1000000,
        "dflash_config": {
            "attention_mode": "gqa",
            "mask_token_id": 151669,
            "target_layer_ids": [1, 9, 17, 25, 33],
            "projector_type": "dspark",
            "markov_rank": 256,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "confidence_head_alpha": 1.0,
            **inner,
        },
    }


def speculators(kind: str = "dspark", **changes: Any) -> Values:
    """A drafter as speculators writes it: the layers are a difference from Qwen3Config's defaults."""
    layer = {
        key: value
        for key, value in LAYERS.items()
        if key not in ("head_dim", "vocab_size", "rms_norm_eps", "dtype")
    }
    heads = {"markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True}
    values: Values = {
        "architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.8.0",
        "speculators_config": {"algorithm": kind},
        "model_type": "speculator_model",
        "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
        "block_size": 8,
        "mask_token_id": 151669,
        "sample_from_anchor": True,
        "draft_vocab_size": 151936,
        "transformer_layer_config": layer | {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        **(heads if kind == "dspark" else {}),
        **changes,
    }
    return {key: value for key, value in values.items() if value is not None}


def read(values: Values) -> DrafterConfig:
    return read_drafter_config(values, big_target(), where="/d/config.json")


def test_z_lab() -> None:
    config = read(z_lab())
    assert (config.dialect, config.method, config.markov, config.confidence) == (
        "z-lab",
        "dflash",
        None,
        False,
    )
    assert (config.block_size, config.anchor_first, config.max_drafts, config.first_slot) == (
        16,
        False,
        15,
        1,
    )
    assert (config.mask_token_id, config.tap_layer_ids) == (151669, (1, 9, 17, 25, 33))
    assert config.layers.rope == RopeConfig(1e6)


def test_deepspec() -> None:
    config = read(deepspec())
    assert (config.dialect, config.method, config.markov, config.markov_rank) == (
        "deepspec",
        "dspark",
        "vanilla",
        256,
    )
    assert (config.anchor_first, config.max_drafts, config.first_slot) == (True, 7, 0)
    assert config.confidence
    assert config.confidence_with_markov
    plain = read(
        deepspec(
            markov_rank=0,
            markov_head_type=None,
            enable_confidence_head=False,
            confidence_head_with_markov=None,
        )
    )
    assert (plain.method, plain.markov, plain.confidence) == ("dflash", None, False)
    alone = read(deepspec(markov_rank=0, markov_head_type=None, confidence_head_with_markov=False))
    assert (alone.method, alone.markov, alone.confidence, alone.confidence_with_markov) == (
        "dspark",
        None,
        True,
        False,
    )


def test_specforge() -> None:
    config = read(specforge())
    assert (config.dialect, config.method, config.anchor_first, config.max_drafts) == (
        "specforge",
        "dspark",
        True,
        7,
    )
    by_projector = read(z_lab(projector_type="dspark", markov_rank=16))
    assert (by_projector.dialect, by_projector.anchor_first, by_projector.markov) == (
        "specforge",
        True,
        "vanilla",
    )
    assert not read(specforge(sample_from_anchor=False)).anchor_first


def test_speculators() -> None:
    config = read(speculators())
    assert (config.dialect, config.method) == ("speculators", "dspark")
    assert config.tap_layer_ids == (1, 9, 17, 25, 33)  # one lower than written: they index hidden_states
    assert (config.layers.head_dim, config.layers.vocab_size) == (128, 151936)  # from the defaults
    assert read(speculators(aux_hidden_state_layer_ids=[0, 5])).tap_layer_ids == (-1, 4)
    assert read(speculators(aux_hidden_state_layer_ids=None)).tap_layer_ids == (1, 17, 32)
    assert not read(speculators(sample_from_anchor=False)).anchor_first
    dflash = read(speculators("dflash", sample_from_anchor=None, block_size=None))
    assert (dflash.method, dflash.anchor_first, dflash.block_size, dflash.max_drafts) == (
        "dflash",
        False,
        8,
        7,
    )
    reduced = read(speculators(draft_vocab_size=32000))
    assert reduced.reduced_vocab
    assert not config.reduced_vocab


def test_speculators_without_theta_takes_the_default_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    values = speculators()
    del values["transformer_layer_config"]["rope_parameters"]
    with caplog.at_level(logging.WARNING):
        assert read(values).layers.rope.theta == 1e4
    assert "rope_theta" in caplog.text


def test_the_architecture_name_does_not_decide() -> None:
    """Both names are used by two dialects with different tap numbering and layout."""
    assert read(speculators("dflash")).tap_layer_ids == read(z_lab()).tap_layer_ids
    assert read(speculators("dflash", sample_from_anchor=False)).dialect == "speculators"


@pytest.mark.parametrize(
    ("num_target_layers", "num_draft_layers", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (7, 3, (1, 2, 4)),
        (36, 1, (18,)),
        (28, 5, (1, 7, 13, 19, 25)),
        (6, 2, (1, 3)),
    ],
)
def test_default_taps(num_target_layers: int, num_draft_layers: int, expected: tuple[int, ...]) -> None:
    assert default_taps(num_target_layers, num_draft_layers) == expected


def test_absent_taps_follow_the_rule() -> None:
    assert read(z_lab(target_layer_ids=None)).tap_layer_ids == (1, 9, 17, 25, 33)


def test_scaling_comes_from_the_drafters_config_alone() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    target = big_target(rope_scaling=yarn)
    assert target.rope.kind == "yarn"
    assert read_drafter_config(z_lab(), target).layers.rope.kind == "default"
    assert read_drafter_config(z_lab() | {"rope_scaling": yarn}, target).layers.rope.kind == "yarn"


def test_sliding_layers() -> None:
    kinds = ["sliding_attention"] * 4 + ["full_attention"]
    window = {"layer_types": kinds, "sliding_window": 2048, "use_sliding_window": True}
    config = read(z_lab() | window)
    assert config.layers.windows == (2048, 2048, 2048, 2048, None)
    assert not config.window_non_causal
    values = speculators(sliding_window_non_causal=True)
    values["transformer_layer_config"] |= window
    assert read(values).window_non_causal


@pytest.mark.parametrize("make", [z_lab, deepspec, specforge])
def test_to_dict_reads_back(make: Any) -> None:
    config = read(make())
    again = read(json.loads(json.dumps(config.to_dict())))
    assert again.layers == config.layers
    for name in (
        "method",
        "block_size",
        "anchor_first",
        "tap_layer_ids",
        "markov",
        "markov_rank",
        "confidence",
    ):
        assert getattr(again, name) == getattr(config, name)


def test_what_no_dialect_can_express() -> None:
    for values in (speculators(sample_from_anchor=False), speculators(draft_vocab_size=100)):
        with pytest.raises(CheckpointError, match="can be written"):
            read(values).to_dict()


def test_number_of_drafts() -> None:
    config = read(z_lab())
    assert (config.num_drafts(None), config.num_drafts(4), config.num_drafts(15)) == (15, 4, 15)
    for wrong in (0, 16):
        with pytest.raises(ConfigError, match=f"num_speculative_tokens is {wrong}.*1 to 15"):
            config.num_drafts(wrong)


def test_golden_folders() -> None:
    target = Qwen3Config.from_pretrained(GOLDEN / "qwen3_tiny")
    assert load_drafter_config(GOLDEN / "dspark_tiny_b7_rnn", target).markov == "rnn"


def without(values: Values, key: str) -> Values:
    return {k: v for k, v in values.items() if k != key}


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        # other drafters
        ({"architectures": ["DFlash2DraftModel"]}, ["DFlash2", "not implemented"]),
        (z_lab(conv_kernel_size=2, conv_group_size=16), ["DFlash2"]),
        (z_lab(selector_rank=256, selector_top_k=16), ["DFlash2"]),
        (speculators() | {"speculators_model_type": "dflash2"}, ["DFlash2"]),
        (
            {"architectures": ["DeepseekV4ForCausalLM"], "dspark_block_size": 5},
            ["dspark_block_size", "DeepSeek-V4"],
        ),
        (speculators() | {"speculators_model_type": "eagle3"}, ["speculators_model_type", "eagle3"]),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, ["LlamaForCausalLMEagle3", "DSpark"]),
        ({}, ["architecture []"]),
        # unknown mathematics
        (z_lab(final_logit_softcapping=30.0), ["final_logit_softcapping"]),
        (z_lab(input_embedding_scale=2.0), ["input_embedding_scale", "2.0"]),
        (z_lab(attention_sink_bias=True), ["attention_sink_bias"]),
        (z_lab(attention_mode="mla"), ["attention_mode", "mla"]),
        (z_lab(swa_window_size=512), ["swa_window_size"]),
        (z_lab(projector_type="domino", gru_hidden_dim=64), ["projector_type", "domino"]),
        (z_lab() | {"brand_new": 1}, ["brand_new"]),
        (deepspec(brand_new=1), ["brand_new"]),
        (speculators(brand_new=1), ["brand_new"]),
        (specforge(markov_head_type="lstm"), ["markov_head_type", "lstm", "vanilla, gated, rnn"]),
        (z_lab(markov_rank=8), ["Markov", "projector_type"]),
        (speculators("dflash", markov_rank=8), ["Markov", "dflash"]),
        (deepspec(markov_rank=0), ["confidence_head_with_markov"]),
        (z_lab() | {"quantization_config": {"quant_method": "fp8"}}, ["quantization_config", "fp8"]),
        # ambiguous or contradictory layout
        (speculators(sample_from_anchor=None), ["sample_from_anchor", "ambiguous"]),
        (z_lab(shift_label=True), ["shift_label", "sample_from_anchor"]),
        (z_lab(block_size=8), ["block_size", "[8, 16]"]),
        # missing
        (without(z_lab(), "rope_theta"), ["rope_theta"]),
        (without(z_lab(), "block_size"), ["block_size", "missing"]),
        (without(z_lab(), "dflash_config"), ["dflash_config", "missing"]),
        (z_lab(mask_token_id=None, mask_token="<|MASK|>"), ["mask_token_id", "<|MASK|>"]),
        (without(deepspec(), "target_layer_ids"), ["target_layer_ids", "missing"]),
        (deepspec(block_size=1), ["block_size", "1", "at least 2"]),
        # does not fit the target
        (z_lab() | {"hidden_size": 2048}, ["hidden_size", "2048", "2560"]),
        (deepspec(vocab_size=151669), ["vocab_size", "151669", "151936"]),
        (deepspec(mask_token_id=151936), ["151937", "mask_token_id", "151936"]),
        (speculators(draft_vocab_size=151937), ["151937", "draft_vocab_size", "151936"]),
        (speculators(target_hidden_size=4096), ["target_hidden_size", "4096", "2560"]),
        (z_lab() | {"num_target_layers": 28}, ["target layers", "28", "36"]),
        (deepspec(num_target_layers=28), ["target layers", "28", "36"]),
        (deepspec(target_layer_ids=[1, 9, 40]), ["40", "35"]),
        (deepspec(target_layer_ids=[1, 9, 35]), ["last layer", "35", "final norm"]),
        (speculators(aux_hidden_state_layer_ids=[2, 36]), ["last layer", "35"]),
        (deepspec(target_layer_ids=[9, 1]), ["increase", "[9, 1]"]),
        (deepspec(target_layer_ids=[1, 1]), ["increase"]),
        (deepspec(target_layer_ids=[-2, 1]), ["target_layer_ids", "-1"]),
    ],
)
def test_refused_by_name(values: Values, parts: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(values)
    for part in parts:
        assert part in str(caught.value)
