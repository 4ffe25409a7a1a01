"""From engine options to a running engine core. The only place where the engine meets the runtime, and so
torch.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from paceline.cache import BlockPool
from paceline.collector import collector_paused
from paceline.config import EngineConfig
from paceline.engine.core import EngineCore
from paceline.engine.messages import EngineInfo
from paceline.engine.planned import DraftLimits
from paceline.engine.round_times import TimingLimits, time_rounds
from paceline.errors import ConfigError
from paceline.speculation.capture_cache import CaptureCache
from paceline.speculation.controller import HedgeController
from paceline.speculation.costs import RoundCosts
from paceline.speculation.counters import SpeculationCounters
from paceline.speculation.draft_reserve import DraftReserve
from paceline.speculation.draft_state import CaptureDraftState
from paceline.speculation.hedging import Hedger
from paceline.speculation.odds import ChainOdds
from paceline.speculation.planner import Planner
from paceline.speculation.survival import Survival
from paceline.threads import sleep_at_barriers

if TYPE_CHECKING:
    from paceline.runtime.build import Built
    from paceline.runtime.memory import CaptureMemory

logger = logging.getLogger(__name__)


def make_core(config: EngineConfig, *, lookahead: int | None = None) -> EngineCore:
    """Load the model and build the engine around it.

    Args:
        config: engine options.
        lookahead: steps in flight while the host goes on, 0 or 1; None takes 1 on a GPU, where it hides the
            host, and 0 on a CPU, where there is nothing to hide it behind.

    Raises:
        ConfigError, CheckpointError: with what was given and what would work.
    """
    started = time.perf_counter()
    sleep_at_barriers()
    with collector_paused():
        from paceline.runtime.build import build  # torch takes seconds to import: only where it is needed

        with collector_paused():  # with what was imported out of its sight
            return _make_core(config, build(config), lookahead, started)


def _make_core(config: EngineConfig, built: Built, lookahead: int | None, started: float) -> EngineCore:
    """The engine around a device whose making ``started`` then, in seconds of the performance counter."""
    info = EngineInfo(
        model=config.model or "paceline-mini",
        folder=str(built.folder),
        vocab_size=built.vocab_size,
        max_model_len=built.max_model_len,
        max_num_seqs=built.max_num_seqs,
        block_size=config.block_size,
        num_blocks=built.num_blocks,
        eos_token_ids=list(built.eos_token_ids),
        max_logprobs=config.max_logprobs,
        device=str(built.device),
        dtype=str(built.dtype).removeprefix("torch."),
        weights_bytes=built.weights_bytes,
        ready_s=0.0,
    )
    if built.captures is not None:
        _log_captures(config, built, built.captures)
    if built.num_drafts and config.load_format != "dummy":
        _check_drafter(config, built, info)
    core = _assemble(config, built, info, lookahead, _planner(config, built), _hedger(config, built))
    _refuse_failing_drafter(config, built)
    info.ready_s = time.perf_counter() - started
    logger.info("Engine ready in %.2f s", info.ready_s)
    return core


def _planner(config: EngineConfig, built: Built) -> Planner | None:
    """A planner that knows what rounds cost here; None where there is nothing to plan."""
    speculation = config.speculation
    if speculation is None or speculation.verify_planner == "off":
        return None
    on_gpu, started = built.device.type == "cuda", time.perf_counter()
    shapes = None if built.runner.rounds is None else built.runner.rounds.shapes
    tiers = shapes.draft_counts if shapes is not None and shapes.captured else None
    limits = TimingLimits(
        max_num_seqs=built.max_num_seqs,
        max_model_len=built.max_model_len,
        max_num_batched_tokens=built.max_num_batched_tokens,
        num_blocks=built.num_blocks,
        block_size=config.block_size,
        num_drafts=built.num_drafts,
    )
    measured = time_rounds(
        built.runner,
        limits,
        (lambda size: (built.num_drafts,)) if tiers is None else tiers.__getitem__,
        budget_s=1.0,
        repeats=2 if on_gpu else 1,
        warm_up=True,
    )
    if not measured:
        logger.info("Verify planner: off, sequences here are too short to time rounds with")
        return None
    logger.info("Verify planner: %d rounds timed in %.2f s", len(measured), time.perf_counter() - started)
    shares_keys = tiers is not None and shapes is not None and shapes.together
    costs = RoundCosts(measured, built.num_drafts, tiers, built.hedging, shares_keys=shares_keys)
    odds = None if built.hedging is None or speculation.hedge_auto else ChainOdds(built.hedging.positions)
    return Planner(costs, Survival(built.max_num_seqs, built.num_drafts), odds)


def _hedger(config: EngineConfig, built: Built) -> Hedger | None:
    """Who chooses what is hedged; None when nothing is."""
    if built.hedging is None or config.speculation is None:
        return None
    positions = built.hedging.positions
    logger.info(
        "Hedging: up to %d sequences of a round, drafts %s, %s",
        built.hedging.max_seqs,
        ", ".join(map(str, positions)),
        "as many as pay" if config.speculation.hedge_auto else "where rows are left for them",
    )
    return Hedger(built.hedging, HedgeController(len(positions)) if config.speculation.hedge_auto else None)


def _check_drafter(config: EngineConfig, built: Built, info: EngineInfo) -> None:
    """Draft on a fixed prompt with an engine of its own, so that nothing of it stays."""
    from paceline.engine.self_check import check_prompt, self_check

    speculation, prompt = config.speculation, check_prompt(built.folder)
    assert speculation is not None and speculation.model is not None
    if prompt is not None and speculation.synthetic_accept_length is None:
        self_check(_assemble(config, built, info, 0), prompt, speculation.model)


def _refuse_failing_drafter(config: EngineConfig, built: Built) -> None:
    """A drafter that failed while the engine was made will fail again; while serving nobody would see it."""
    drafting = built.runner.drafting
    if drafting is not None and drafting.failure is not None:
        assert config.speculation is not None
        raise ConfigError(
            f"The drafter {config.speculation.model} does not run on {built.device} ({drafting.failure}). "
            "Name another one, or serve without."
        )


def _assemble(
    config: EngineConfig,
    built: Built,
    info: EngineInfo,
    lookahead: int | None,
    planner: Planner | None = None,
    hedger: Hedger | None = None,
) -> EngineCore:
    """An engine with empty queues and an empty cache over a ready device."""
    captures = built.captures
    pool = BlockPool(
        built.num_blocks,
        config.block_size,
        # A prefix hit whose draft state cannot be restored is worth less than the drafter.
        enable_caching=config.enable_prefix_caching and (captures is None or captures.num_slots > 0),
        hash_key=config.prefix_hash_key.encode() if config.prefix_hash_key is not None else None,
    )
    return EngineCore(
        built.runner,
        pool,
        info,
        max_num_batched_tokens=built.max_num_batched_tokens,
        lookahead=int(built.device.type == "cuda") if lookahead is None else lookahead,
        seed=config.seed,
        drafting=DraftLimits(built.num_drafts, 0 if captures else built.draft_block_rows),
        draft_state=None if captures is None else _captured(config, built, captures),
        planner=planner,
        hedger=hedger,
    )


def _captured(config: EngineConfig, built: Built, captures: CaptureMemory) -> CaptureDraftState:
    """Captured draft state that holds nothing yet."""
    return CaptureDraftState(
        DraftReserve(built.num_blocks, config.block_size),
        CaptureCache(captures.num_slots, captures.num_open),
        draft_block=built.draft_block_rows,
        max_positions=built.max_model_len + built.draft_block_rows,
        counters=SpeculationCounters(built.num_drafts),
    )


def _log_captures(config: EngineConfig, built: Built, captures: CaptureMemory) -> None:
    """Say what captured draft state can hold."""
    reserve = DraftReserve(built.num_blocks, config.block_size)
    ceiling = reserve.ceiling(built.max_model_len + built.draft_block_rows)
    logger.info(
        "Draft state: capture, %d blocks of tap rows (%.1f MiB, the longest prefix that can be restored is "
        "%d tokens) and %d being filled; draft K/V for %d tokens: %d requests of %d tokens can draft at once",
        captures.num_slots,
        captures.num_slots * captures.slot_bytes / 2**20,
        captures.num_slots * config.block_size,
        captures.num_open,
        reserve.num_blocks * config.block_size,
        ceiling,
        built.max_model_len,
    )
    if not ceiling:
        logger.warning(
            "NO REQUEST OF FULL LENGTH CAN DRAFT: draft K/V holds %d tokens, one of %d tokens needs more and "
            "is served without drafts. Raise the K/V memory (--num-blocks), lower --max-model-len, or use "
            "--draft-state paged.",
            reserve.num_blocks * config.block_size,
            built.max_model_len,
        )
