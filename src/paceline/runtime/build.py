"""From engine options to a device that is ready to run steps."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.models.attention import KVCache
from paceline.models.checkpoint import load_model, open_checkpoint
from paceline.runtime.memory import StepLimits, block_bytes, num_blocks
from paceline.runtime.runner import Runner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Built:
    """A ready device and the limits it was built for."""

    runner: Runner
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    eos_token_ids: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    weights_bytes: int


def pick_device(name: str) -> torch.device:
    """The device to run on; ``auto`` prefers a GPU.

    Raises:
        ConfigError: a GPU was asked for and there is none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch sees no GPU here. Use device='cpu' or 'auto'.")
    return torch.device(name)


def pick_dtype(name: str, checkpoint: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype of weights and K/V: as named, else float32 on a CPU and the checkpoint's own on a GPU."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    if device.type == "cpu":
        return torch.float32
    return checkpoint if checkpoint is not None else torch.bfloat16


def build(engine: EngineConfig) -> Built:
    """Load the model, size and allocate the cache, and make the runner.

    Raises:
        ConfigError, CheckpointError: with what was given and what would work.
    """
    started = time.perf_counter()
    if engine.threads is not None:
        torch.set_num_threads(engine.threads)
    device = pick_device(engine.device)
    checkpoint = open_checkpoint(engine.model_path, revision=engine.revision)
    config = checkpoint.config
    dtype = pick_dtype(engine.dtype, checkpoint.dtype, device)
    max_model_len = engine.max_model_len or config.max_context_len
    if max_model_len > config.max_context_len:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but {engine.model_path} was made for at most {config.max_context_len} "
            "tokens. Lower max_model_len, or add rope scaling to the checkpoint's config."
        )
    on_gpu = device.type == "cuda"
    max_num_seqs = engine.max_num_seqs or (256 if on_gpu else 32)
    max_rows = engine.max_num_batched_tokens or max(8192 if on_gpu else 512, max_num_seqs)
    if max_rows < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens is {max_rows}, less than max_num_seqs ({max_num_seqs}): not every running sequence "
            "could get a row per step. Raise the former or lower the latter."
        )
    model = load_model(checkpoint, device=device, dtype=dtype, dummy=engine.load_format == "dummy")
    limits = StepLimits(max_num_seqs, max_rows)
    blocks = num_blocks(engine, config, limits, dtype, device)
    cache = KVCache.allocate(
        config.num_hidden_layers,
        blocks,
        engine.block_size,
        config.num_key_value_heads,
        config.head_dim,
        dtype=dtype,
        device=device,
    )
    tokens = blocks * engine.block_size
    logger.info(
        "K/V cache: %d tokens in %d blocks (%.2f GiB); %.1f sequences of %d tokens at once",
        tokens,
        blocks,
        blocks * block_bytes(config, engine.block_size, dtype) / 2**30,
        tokens / max_model_len,
        max_model_len,
    )
    runner = Runner(model, cache, max_num_seqs=max_num_seqs, max_model_len=max_model_len, device=device)
    logger.info("Engine built in %.2f s on %s, %s", time.perf_counter() - started, device, dtype)
    return Built(
        runner=runner,
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_rows,
        num_blocks=blocks,
        eos_token_ids=tuple(config.eos_token_ids),
        device=device,
        dtype=dtype,
        weights_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
    )
