"""How large the block pool may be."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.models.config import Qwen3Config

logger = logging.getLogger(__name__)

CPU_KV_BYTES = 512 * 2**20
"""K/V budget on a CPU when none is given."""


def kv_bytes(config: Qwen3Config, dtype: torch.dtype) -> int:
    """Bytes of one token's K and V in every layer."""
    return 2 * config.num_hidden_layers * config.kv_size * dtype.itemsize


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step: what scratch memory must be held back for."""

    max_num_seqs: int
    max_num_batched_tokens: int


def step_scratch_bytes(config: Qwen3Config, limits: StepLimits, dtype: torch.dtype) -> int:
    """Upper bound of the activations of the largest step, in bytes.

    Per row: the widest moment of a layer (residual, normed input, gate_up and its product, qkv and attention
    output). Per sampled row: logits in the model's dtype and a few fp32 copies while they are processed.
    """
    per_row = 4 * config.hidden_size + 3 * config.intermediate_size + 2 * config.q_size + 2 * config.kv_size
    logits = config.vocab_size * (dtype.itemsize + 5 * 4)
    return limits.max_num_batched_tokens * per_row * dtype.itemsize + limits.max_num_seqs * logits


def num_blocks(
    engine: EngineConfig,
    config: Qwen3Config,
    limits: StepLimits,
    token_bytes: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Blocks in the pool: as asked for, or what the memory budget holds.

    Args:
        token_bytes: bytes a token takes in the pool: the target's K/V and what the drafter keeps beside it.

    Raises:
        ConfigError: not even one block fits.
    """
    if engine.num_blocks is not None:
        return engine.num_blocks
    size = token_bytes * engine.block_size
    if engine.kv_cache_memory_bytes is not None:
        budget = engine.kv_cache_memory_bytes
        source = f"kv_cache_memory_bytes={budget}"
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        scratch = step_scratch_bytes(config, limits, dtype)
        used = total - free
        budget = int(total * engine.gpu_memory_utilization) - used - scratch
        source = (
            f"gpu_memory_utilization={engine.gpu_memory_utilization} of {total / 2**30:.1f} GiB, less "
            f"{used / 2**30:.1f} GiB "
            f"in use and {scratch / 2**30:.1f} GiB for the largest step"
        )
    else:
        budget = CPU_KV_BYTES
        source = f"the CPU default of {CPU_KV_BYTES // 2**20} MiB"
    count = budget // size
    if count < 1:
        raise ConfigError(
            f"No K/V block fits: {source} leaves {budget} bytes, one block of {engine.block_size} tokens "
            f"takes {size}. "
            "Give more memory or lower max_num_batched_tokens or max_num_seqs."
        )
    logger.info("K/V budget %.2f GiB (%s)", budget / 2**30, source)
    return int(count)
