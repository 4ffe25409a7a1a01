"""Shared by the training tests: a tiny target and drafters for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.models.config import Qwen3Config
from paceline.models.drafter import Drafter
from paceline.models.loader import random_model, save_checkpoint
from paceline.models.qwen3 import Qwen3ForCausalLM
from paceline.training.options import TrainOptions

VOCAB = 64
MASK = 63


def tiny_target(seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """A random fp32 target of four layers."""
    values: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "eos_token_id": [62],
    }
    return random_model(Qwen3Config.from_dict(values | changes), seed=seed)


def tiny_options(method: str, target: str | Path = "", **changes: Any) -> TrainOptions:
    """Options of a small run."""
    values: dict[str, Any] = {
        "target": str(target),
        "data": (Path("unused.jsonl"),),
        "out": Path("unused"),
        "method": method,
        "num_layers": 2,
        "markov_rank": 8,
        "taps": (0, 2),
        "mask_token_id": MASK,
        "max_len": 128,
        "answer_len": 32,
        "steps": 4,
        "tokens_per_step": 256,
        "learning_rate": 3e-3,
        "device": "cpu",
    }
    return TrainOptions(**(values | changes))


def tiny_drafter(method: str, target: Qwen3ForCausalLM, *, seed: int = 1, scale: float = 5.0) -> Drafter:
    """An fp32 drafter with weights large enough to matter, Markov head included."""
    drafter = Drafter(tiny_options(method).drafter_config(target.config, MASK), target)
    drafter.init_weights(torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02 * scale, generator=generator)
    return drafter


def save_target(target: Qwen3ForCausalLM, folder: Path) -> Path:
    """The target as a checkpoint without a tokenizer."""
    return save_checkpoint(target, folder)
