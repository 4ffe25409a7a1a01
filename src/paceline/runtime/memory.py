"""Who gets how much memory: scratch, captured draft state, and the block pool with what is left."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.models.config import Qwen3Config
from paceline.models.drafter_config import DrafterConfig
from paceline.runtime.captures import RESTORE_ROWS
from paceline.speculation.config import SpeculativeConfig
from paceline.speculation.draft_reserve import capture_slot_bytes, capture_slots, open_blocks

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
    num_drafts: int = 0
    """Drafts a sequence may have verified in a step."""


def step_scratch_bytes(config: Qwen3Config, limits: StepLimits, dtype: torch.dtype) -> int:
    """Upper bound of the activations of the largest step, in bytes.

    Per row: the widest moment of a layer (residual, normed input, gate_up and its product, qkv and attention
    output). Per sampled row: logits in the model's dtype and a few fp32 copies while they are processed.
    """
    sampled = min(limits.max_num_seqs * (1 + limits.num_drafts), limits.max_num_batched_tokens)
    per_row = 4 * config.hidden_size + 3 * config.intermediate_size + 2 * config.q_size + 2 * config.kv_size
    logits = config.vocab_size * (dtype.itemsize + 5 * 4)
    return limits.max_num_batched_tokens * per_row * dtype.itemsize + sampled * logits


def draft_scratch_bytes(config: DrafterConfig, limits: StepLimits, dtype: torch.dtype) -> int:
    """Upper bound of what drafting adds to the largest step, in bytes.

    Per row: the taps one by one and side by side, the features, and K and V of all layers before and after
    norm and rotation, which is fp32. Per sequence: the block's activations, and the logits of its drafts as
    they come, corrected, and with noise.
    """
    layers = config.layers
    kv = layers.num_hidden_layers * 2 * layers.kv_size
    per_row = dtype.itemsize * (2 * len(config.tap_layer_ids) * layers.hidden_size + 2 * layers.hidden_size)
    per_row += kv * (2 * dtype.itemsize + 2 * 4)
    block_row = 4 * layers.hidden_size + 3 * layers.intermediate_size + 2 * layers.q_size + 2 * layers.kv_size
    logits = limits.num_drafts * config.draft_vocab_size * (dtype.itemsize + 2 * 4)
    noise = config.draft_vocab_size * 4 * 4  # of one position at a time
    per_sequence = config.block_size * block_row * dtype.itemsize + logits + noise
    rows = max(limits.max_num_batched_tokens, RESTORE_ROWS)
    return rows * per_row + limits.max_num_seqs * per_sequence


@dataclass(frozen=True, slots=True)
class CaptureMemory:
    """What captured draft state takes beside the pool, and how large the pool makes it.

    Attributes:
        num_slots: captures that can be published.
        num_open: slots beside them for blocks that sequences are filling.
        slot_bytes: bytes of one.
    """

    num_slots: int
    num_open: int
    slot_bytes: int

    @property
    def num_physical(self) -> int:
        """Slots to allocate; one more than those in use takes the rows that nobody keeps."""
        return self.num_slots + self.num_open + 1 if self.num_slots else 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return self.num_physical * self.slot_bytes


def capture_memory(
    engine: EngineConfig,
    speculation: SpeculativeConfig,
    config: DrafterConfig,
    limits: StepLimits,
    dtype: torch.dtype,
) -> CaptureMemory:
    """Slots for captured rows: those the budget holds, and those that sequences fill.

    A budget of 0 captures nothing, and neither does an engine without a prefix cache: there is nobody to
    restore for.

    Raises:
        ConfigError: a budget smaller than one slot.
    """
    taps, hidden = len(config.tap_layer_ids), config.layers.hidden_size
    slot_bytes = capture_slot_bytes(engine.block_size, taps, hidden, dtype.itemsize)
    budget_mb = speculation.capture_mb
    slots = capture_slots(int(budget_mb * 2**20), slot_bytes)
    if budget_mb and not slots:
        smallest = slot_bytes / 2**20
        raise ConfigError(
            f"draft_capture_mb is {budget_mb}, but one block of {engine.block_size} tokens takes "
            f"{smallest:.4g} MiB ({taps} taps of {hidden} values). Give at least that, or 0 to serve without "
            "prefix caching."
        )
    if not slots or not engine.enable_prefix_caching:
        logger.warning(
            "Draft state: capture without a cache (%s): prefix caching is off, no rows are captured.",
            "draft_capture_mb is 0" if not slots else "enable_prefix_caching is off",
        )
        return CaptureMemory(0, 0, slot_bytes)
    # One step may be in flight while the host plans the next.
    filling = limits.max_num_seqs * open_blocks(engine.block_size, limits.num_drafts, lookahead=1)
    return CaptureMemory(slots, filling, slot_bytes)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes of everything that is allocated once.

    Attributes:
        num_blocks: blocks in the pool.
        token_bytes: bytes of one token in the pool, the drafter's part included.
        draft_token_bytes: the drafter's part.
        captures: the store of captured rows, when draft state is captured.
        rounds: whether simple spans run as decode rounds.
    """

    num_blocks: int
    token_bytes: int
    draft_token_bytes: int
    captures: CaptureMemory | None
    rounds: bool

    @property
    def target_blocks(self) -> int:
        """Blocks of the target's K/V: the pool's, and one that rounds scribble in."""
        return self.num_blocks + self.rounds

    @property
    def draft_blocks(self) -> int:
        """Blocks of the drafter's K/V; one takes the rows of rounds and of sequences that do not draft."""
        return self.num_blocks + (self.rounds or self.captures is not None)


def plan_memory(
    engine: EngineConfig,
    config: Qwen3Config,
    drafter: DrafterConfig | None,
    limits: StepLimits,
    dtype: torch.dtype,
    device: torch.device,
) -> MemoryPlan:
    """Divide the memory.

    Raises:
        ConfigError: not even one block fits, or a capture budget smaller than one slot.
    """
    captures, draft_bytes = None, 0
    speculation = engine.speculation
    if drafter is not None and speculation is not None:
        draft_bytes = kv_bytes(drafter.layers, dtype)
        if speculation.draft_state == "capture":
            captures = capture_memory(engine, speculation, drafter, limits, dtype)
    token_bytes = kv_bytes(config, dtype) + draft_bytes
    rounds = not engine.enforce_eager
    scratch = _scratch_bytes(config, drafter, limits, dtype)
    fixed = 0
    if captures is not None:
        # Without rounds there still is a block for the rows of sequences that do not draft.
        fixed = captures.num_bytes + (0 if rounds else engine.block_size * draft_bytes)
    if rounds:
        # One block is scratch. Graphs keep the memory of the largest round apart from what other steps use.
        fixed += engine.block_size * token_bytes
        rows = limits.max_num_seqs * (1 + limits.num_drafts)
        scratch += _scratch_bytes(config, drafter, replace(limits, max_num_batched_tokens=rows), dtype)
    if engine.num_blocks is not None:
        blocks = engine.num_blocks
    else:
        budget, source = _budget(engine, scratch, device)
        blocks = (budget - fixed) // (token_bytes * engine.block_size)
        if blocks < 1:
            beside = f", {fixed} of them taken whatever the size of the pool" if fixed else ""
            raise ConfigError(
                f"No K/V block fits: {source} leaves {budget} bytes{beside}; one block of "
                f"{engine.block_size} tokens "
                f"takes {token_bytes * engine.block_size}. Give more memory, or lower "
                "max_num_batched_tokens or "
                "max_num_seqs."
            )
        logger.info("K/V budget %.2f GiB (%s)", budget / 2**30, source)
    return MemoryPlan(blocks, token_bytes, draft_bytes, captures, rounds)


def _scratch_bytes(
    config: Qwen3Config, drafter: DrafterConfig | None, limits: StepLimits, dtype: torch.dtype
) -> int:
    """What the largest step needs beside weights and caches."""
    scratch = step_scratch_bytes(config, limits, dtype)
    return scratch if drafter is None else scratch + draft_scratch_bytes(drafter, limits, dtype)


def _budget(engine: EngineConfig, scratch: int, device: torch.device) -> tuple[int, str]:
    """Bytes for the pool and what is beside it, and where that number comes from."""
    if engine.kv_cache_memory_bytes is not None:
        return engine.kv_cache_memory_bytes, f"kv_cache_memory_bytes={engine.kv_cache_memory_bytes}"
    if device.type == "cpu":
        return CPU_KV_BYTES, f"the CPU default of {CPU_KV_BYTES // 2**20} MiB"
    free, total = torch.cuda.mem_get_info(device)
    used = total - free
    source = (
        f"gpu_memory_utilization={engine.gpu_memory_utilization} of {total / 2**30:.1f} GiB, less "
        f"{used / 2**30:.1f} GiB in use and {scratch / 2**30:.1f} GiB for the largest steps"
    )
    return int(total * engine.gpu_memory_utilization) - used - scratch, source
