"""Who gets how much memory: scratch, captured draft state, and the block pool with what is left."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.models.config import Qwen3Config
from paceline.models.drafter_config import DrafterConfig
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
    """The largest step.

    Attributes:
        max_num_seqs, max_num_batched_tokens, max_model_len: as in the engine's options.
        max_logprobs: most alternatives a request may ask for per position; -1 is the whole vocabulary.
        num_drafts: drafts a sequence may have verified in a step.
        hedge_rows: rows of hedge chains beside those.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_logprobs: int
    num_drafts: int = 0
    hedge_rows: int = 0


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
    """Sizes of the caches.

    Attributes:
        num_blocks: blocks in the pool.
        block_bytes: bytes of one, the drafter's part included.
        draft_block_bytes: the drafter's part.
        captures: the store of captured rows, when draft state is captured.
        rounds: whether simple spans run as decode rounds.
        hedge_blocks: blocks that hedge chains of a round scribble in.
    """

    num_blocks: int
    block_bytes: int
    draft_block_bytes: int
    captures: CaptureMemory | None
    rounds: bool
    hedge_blocks: int = 0

    @property
    def target_blocks(self) -> int:
        """Blocks of the target's K/V: the pool's, those of hedge chains, and one that rounds scribble in."""
        return self.num_blocks + self.hedge_blocks + self.rounds

    @property
    def draft_blocks(self) -> int:
        """Blocks of the drafter's K/V: as the target's, by the same ids. When rows are captured it has blocks
        of its own, one of them for the rows of rounds and of sequences that do not draft.
        """
        return self.target_blocks if self.captures is None else self.num_blocks + 1

    @property
    def fixed_bytes(self) -> int:
        """Bytes taken whatever the size of the pool: captured rows and scratch blocks."""
        scratch = self.draft_blocks * self.draft_block_bytes + self.target_blocks * (
            self.block_bytes - self.draft_block_bytes
        )
        captured = 0 if self.captures is None else self.captures.num_bytes
        return scratch - self.num_blocks * self.block_bytes + captured

    def smallest(self) -> MemoryPlan:
        """The same with one block in the pool and one captured: enough to run steps that nobody needs."""
        captures = self.captures
        if captures is not None:
            captures = replace(captures, num_slots=min(captures.num_slots, 1), num_open=0)
        return replace(self, num_blocks=1, captures=captures)

    def within(self, budget: int, source: str) -> MemoryPlan:
        """The same with as large a pool as fits.

        Args:
            budget: bytes for everything that is planned here.
            source: where that number comes from, for messages.

        Raises:
            ConfigError: not even one block fits.
        """
        blocks = (budget - self.fixed_bytes) // self.block_bytes
        if blocks < 1:
            fixed = self.fixed_bytes
            captured = 0 if self.captures is None else self.captures.num_bytes
            rows = f" ({captured} by captured rows)" if captured else ""
            beside = f", {fixed} of them taken whatever the size of the pool{rows}" if fixed else ""
            less = "draft_capture_mb, " if captured else ""
            raise ConfigError(
                f"No K/V block fits: {source} leaves {budget} bytes{beside}; one block takes "
                f"{self.block_bytes}. Give more memory, or lower {less}max_num_batched_tokens or "
                "max_num_seqs."
            )
        logger.info("K/V budget %.2f GiB (%s)", budget / 2**30, source)
        return replace(self, num_blocks=blocks)


def plan_memory(
    engine: EngineConfig,
    config: Qwen3Config,
    drafter: DrafterConfig | None,
    limits: StepLimits,
    dtype: torch.dtype,
) -> MemoryPlan:
    """What the caches consist of, with as many blocks as the options name, or none.

    Raises:
        ConfigError: a capture budget smaller than one slot.
    """
    captures, draft_bytes = None, 0
    speculation = engine.speculation
    if drafter is not None and speculation is not None:
        draft_bytes = kv_bytes(drafter.layers, dtype)
        if speculation.draft_state == "capture":
            captures = capture_memory(engine, speculation, drafter, limits, dtype)
    return MemoryPlan(
        num_blocks=engine.num_blocks or 0,
        block_bytes=engine.block_size * (kv_bytes(config, dtype) + draft_bytes),
        draft_block_bytes=engine.block_size * draft_bytes,
        captures=captures,
        rounds=not engine.enforce_eager,
        hedge_blocks=-(-limits.hedge_rows // engine.block_size),
    )


def given_budget(engine: EngineConfig, device: torch.device) -> tuple[int, str] | None:
    """Bytes for the caches and where that number comes from; None when it is what a GPU has left."""
    if engine.kv_cache_memory_bytes is not None:
        return engine.kv_cache_memory_bytes, f"kv_cache_memory_bytes={engine.kv_cache_memory_bytes}"
    if device.type == "cpu":
        return CPU_KV_BYTES, f"the CPU default of {CPU_KV_BYTES // 2**20} MiB"
    return None


def budget_left(share: float, used: int, steps: int, total: int) -> tuple[int, str]:
    """What a GPU has left for the caches, and where that number comes from.

    Args:
        share: ``gpu_memory_utilization``.
        used: bytes in use by anybody before any step ran: weights, other processes.
        steps: bytes that steps were seen to need, graphs included.
        total: bytes of the GPU.
    """
    source = (
        f"gpu_memory_utilization={share} of {total / 2**30:.1f} GiB, less {used / 2**30:.1f} GiB in use and "
        f"{steps / 2**30:.1f} GiB for the largest steps and graphs"
    )
    return int(total * share) - used - steps, source
