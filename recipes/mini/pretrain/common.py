"""What several stages of the recipe share: paths, the package lists and the model's geometry."""

from __future__ import annotations

import lzma
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).resolve().parent.parent
REPOSITORY = RECIPE.parent.parent
PACKAGE = RECIPE / "pretrain"


VOCAB_SIZE = 7680
CONTEXT_LEN = 4096
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>", *(f"<|spare_{i}|>" for i in range(12))]
END_OF_TEXT, IM_START, IM_END, MASK = (VOCAB_SIZE - len(SPECIALS) + i for i in range(4))

# 19.9 MB in bf16, under the 20.0 MB that fit into the package.
MODEL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 320,
    "intermediate_size": 960,
    "num_hidden_layers": 6,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT_LEN,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_sliding_window": False,
    "sliding_window": None,
    "layer_types": ["full_attention"] * 6,
    "use_cache": True,
    "dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": [IM_END, END_OF_TEXT],
    "pad_token_id": END_OF_TEXT,
}

# LZMA tuned for 16-bit little-endian symbols (one position bit), a quick preset.
U16_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 2, "dict_size": 1 << 24, "lc": 3, "lp": 1, "pb": 1}]


@dataclass(frozen=True)
class Packages:
    """The names of ``packages.toml``; ``train_debian`` maps a package to the licence of its text."""

    heldout_pypi: list[str]
    train_pypi: list[str]
    train_debian: dict[str, str]


def load_packages() -> Packages:
    """Read ``packages.toml``."""
    data = tomllib.loads((PACKAGE / "packages.toml").read_text())
    return Packages(
        heldout_pypi=list(data["heldout"]["pypi"]),
        train_pypi=list(data["train"]["pypi"]),
        train_debian=dict(data["train"]["debian"]),
    )
