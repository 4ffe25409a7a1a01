"""From engine options to a running engine core. The only place where the engine meets the runtime, and so
torch.
"""

from __future__ import annotations

import logging
import time

from paceline.cache import BlockPool
from paceline.config import EngineConfig
from paceline.engine.core import EngineCore
from paceline.engine.messages import EngineInfo
from paceline.engine.scheduler import DraftLimits
from paceline.threads import sleep_at_barriers

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
    sleep_at_barriers()
    from paceline.runtime.build import build  # torch takes seconds to import: only where it is needed

    started = time.perf_counter()
    built = build(config)
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
        ready_s=time.perf_counter() - started,
    )
    logger.info("Engine ready in %.2f s", info.ready_s)
    pool = BlockPool(
        built.num_blocks,
        config.block_size,
        enable_caching=config.enable_prefix_caching,
        hash_key=config.prefix_hash_key.encode() if config.prefix_hash_key is not None else None,
    )
    return EngineCore(
        built.runner,
        pool,
        info,
        max_num_batched_tokens=built.max_num_batched_tokens,
        lookahead=int(built.device.type == "cuda") if lookahead is None else lookahead,
        seed=config.seed,
        drafting=DraftLimits(built.num_drafts, built.draft_block_rows),
    )
