"""From engine options to a device that is ready to run steps."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.models.attention import KVCache
from paceline.models.checkpoint import resolve_folder
from paceline.models.config import Qwen3Config
from paceline.models.drafter import Drafter
from paceline.models.drafter_loader import load_drafter
from paceline.models.loader import load_model
from paceline.models.qwen3 import Qwen3ForCausalLM
from paceline.runtime.memory import (
    CaptureMemory,
    StepLimits,
    capture_memory,
    draft_scratch_bytes,
    kv_bytes,
    num_blocks,
)
from paceline.runtime.runner import Runner
from paceline.speculation.config import SpeculativeConfig
from paceline.text.generation_config import load_generation_defaults

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Built:
    """A ready device and the limits it was built for."""

    runner: Runner
    folder: Path
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    eos_token_ids: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    weights_bytes: int
    num_drafts: int
    draft_block_rows: int
    captures: CaptureMemory | None
    """Set when draft state is captured; the draft K/V then has ``num_blocks`` blocks of its own."""


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


def build(engine: EngineConfig) -> Built:
    """Load the model, size and allocate the cache, and make the runner.

    Raises:
        ConfigError, CheckpointError: with what was given and what would work.
    """
    started = time.perf_counter()
    if engine.threads is not None:
        torch.set_num_threads(engine.threads)
    device = pick_device(engine.device)
    on_gpu = device.type == "cuda"
    folder = resolve_folder(engine.model_path, revision=engine.revision)
    config = Qwen3Config.from_pretrained(folder)
    max_model_len = engine.max_model_len or config.max_context_len
    if max_model_len > config.max_context_len:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but {engine.model_path} was made for at most "
            f"{config.max_context_len} "
            "tokens. Lower max_model_len, or add rope scaling to the checkpoint's config."
        )
    max_num_seqs = engine.max_num_seqs or (256 if on_gpu else 32)
    max_rows = engine.max_num_batched_tokens or max(8192 if on_gpu else 512, max_num_seqs)
    if max_rows < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens is {max_rows}, less than max_num_seqs ({max_num_seqs}): not every "
            "running sequence "
            "could get a row per step. Raise the former or lower the latter."
        )
    # Half precision is emulated on most CPUs and saves nothing there.
    dtype_name = engine.dtype if on_gpu or engine.dtype != "auto" else "float32"
    model = load_model(
        folder,
        device=device,
        dtype=dtype_name,
        load_format=engine.load_format,
        show_progress=engine.show_progress,
    )
    dtype = model.embed_tokens.weight.dtype
    drafter = num_drafts = window = captures = None
    token_bytes, fixed_bytes, scratch_bytes = kv_bytes(config, dtype), 0, 0
    speculation = engine.speculation
    limits = StepLimits(max_num_seqs, max_rows)
    if speculation is not None:
        drafter = _load_drafter(engine, speculation, model)
        num_drafts = drafter.config.num_drafts(speculation.num_speculative_tokens)
        window = speculation.draft_window
        draft_bytes = kv_bytes(drafter.config.layers, dtype)
        token_bytes += draft_bytes
        limits = StepLimits(max_num_seqs, max_rows, num_drafts)
        scratch_bytes = draft_scratch_bytes(drafter.config, limits, dtype)
        if speculation.draft_state == "capture":
            captures = capture_memory(engine, speculation, drafter.config, limits, dtype)
            # Block 0 of the draft K/V takes the rows of sequences that do not draft.
            fixed_bytes = captures.num_bytes + engine.block_size * draft_bytes
    blocks = num_blocks(
        engine,
        config,
        limits,
        token_bytes,
        dtype,
        device,
        fixed_bytes=fixed_bytes,
        scratch_bytes=scratch_bytes,
    )
    tokens = blocks * engine.block_size
    logger.info(
        "K/V cache: %d tokens in %d blocks (%.2f GiB%s); %.1f sequences of %d tokens at once",
        tokens,
        blocks,
        tokens * token_bytes / 2**30,
        ""
        if drafter is None
        else f", {kv_bytes(drafter.config.layers, dtype) / token_bytes:.0%} of it draft state",
        tokens / max_model_len,
        max_model_len,
    )
    eos = {*config.eos_token_ids, *load_generation_defaults(folder, "none").eos_token_ids}
    runner = Runner(
        model,
        _allocate(config, blocks, engine.block_size, dtype, device),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        device=device,
        eos_token_ids=sorted(eos),
        drafter=drafter,
        num_drafts=num_drafts or 0,
        draft_cache=None
        if drafter is None
        else _allocate(
            drafter.config.layers, blocks + (captures is not None), engine.block_size, dtype, device
        ),
        draft_window=window,
        captures=None
        if captures is None or drafter is None
        else torch.zeros(
            captures.num_physical,
            engine.block_size,
            len(drafter.config.tap_layer_ids) * config.hidden_size,
            dtype=dtype,
            device=device,
        ),
    )
    logger.info("Engine built in %.2f s on %s, %s", time.perf_counter() - started, device, dtype)
    return Built(
        runner=runner,
        folder=folder,
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_rows,
        num_blocks=blocks,
        eos_token_ids=tuple(sorted(eos)),
        device=device,
        dtype=dtype,
        weights_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        num_drafts=num_drafts or 0,
        draft_block_rows=0 if drafter is None else drafter.config.block_size,
        captures=captures,
    )


def _load_drafter(engine: EngineConfig, speculation: SpeculativeConfig, target: Qwen3ForCausalLM) -> Drafter:
    """The drafter a config names, checked against the method it names."""
    assert speculation.model is not None
    drafter = load_drafter(
        speculation.model,
        target,
        load_format=engine.load_format,
        show_progress=engine.show_progress,
        revision=speculation.revision,
    )
    if speculation.method not in (None, drafter.config.method):
        raise ConfigError(
            f"speculative_config asks for method {speculation.method!r}, but {speculation.model} is a "
            f"{drafter.config.method!r} drafter. Drop the method or name another drafter."
        )
    return drafter


def _allocate(
    config: Qwen3Config, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    return KVCache.allocate(
        config.num_hidden_layers,
        blocks,
        block_size,
        config.num_key_value_heads,
        config.head_dim,
        dtype=dtype,
        device=device,
    )
