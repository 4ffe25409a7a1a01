"""The largest steps an engine can be asked for, run before anyone is served.

Kernels are compiled, and the allocator reaches its peak: what those steps need is measured here instead of
estimated, and kept, so that no later step allocates. They are ordinary plans over all slots, with block
tables that point at one block, whose content nobody reads; afterwards the slots are as new.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from paceline.runtime.captures import RESTORE_ROWS
from paceline.runtime.memory import StepLimits
from paceline.runtime.plan import DraftUpdates, Restore, SlotInit, Span, StepPlan, TableUpdate
from paceline.runtime.runner import Runner
from paceline.sampling.params import SamplingParams
from paceline.sampling.state import GPU_PART_BYTES, SHORT_K

logger = logging.getLogger(__name__)

SLACK = 1.1
"""Kept beyond the measured peak: steps of other sizes cut the same memory into other pieces."""


@torch.inference_mode()
def settle(runner: Runner, limits: StepLimits) -> int:
    """Run what needs most memory on a GPU and keep so much of it with the allocator, in one piece.

    Returns:
        bytes kept for steps.
    """
    started = time.perf_counter()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    warm_up(runner, limits)
    if runner.rounds is not None:
        runner.rounds.capture_largest()
    worst = int(SLACK * (torch.cuda.max_memory_allocated() - before))
    gc.collect()
    torch.cuda.empty_cache()
    torch.empty(worst, dtype=torch.uint8, device=runner.device)  # freed, but the allocator keeps it
    logger.info("Warm-up in %.2f s; %.2f GiB for steps", time.perf_counter() - started, worst / 2**30)
    return worst


def warm_up(runner: Runner, limits: StepLimits) -> None:
    """Run the largest steps of every kind. Nobody may hold a slot or a block yet."""
    block = runner.cache.k.shape[1] - 1
    for plan in _largest_steps(runner, limits, block):
        runner.launch(plan, by_rows=True).result()
    runner.state.clear()


def _largest_steps(runner: Runner, limits: StepLimits, block: int) -> Iterator[StepPlan]:
    spans = _spans(limits, runner.model.config.vocab_size)
    draft = _restores(runner, limits.max_model_len)
    for way in _ways(runner.model.config.vocab_size):
        yield _step(runner, limits, spans, way, block, draft)
        draft = DraftUpdates()


def _spans(limits: StepLimits, vocab_size: int) -> list[Span]:
    """Every sequence draws and verifies as many drafts as fit; the first also compute the rows left over."""
    top = vocab_size if limits.max_logprobs == -1 else min(limits.max_logprobs, vocab_size)
    left = limits.max_num_batched_tokens - limits.max_num_seqs
    spans = []
    for slot in range(limits.max_num_seqs):
        drafts = min(limits.num_drafts, left, limits.max_model_len - 1)
        left -= drafts
        spans.append(Span(slot, 1 + drafts, drafts, propose=limits.num_drafts > 0, top=top, prompt_top=top))
    for span in spans:
        span.prompt_rows = min(left, limits.max_model_len - span.rows)
        span.rows += span.prompt_rows
        left -= span.prompt_rows
    return spans


def _ways(vocab_size: int) -> list[dict[str, float]]:
    """Parameters for each way to draw."""
    return [
        {"temperature": 0.0},
        {"min_p": 0.1},
        {"top_k": min(SHORT_K, vocab_size - 1)},
        {"top_k": vocab_size - 1},
        {"top_p": 0.9},
    ]


def _params(way: Mapping[str, Any], limits: StepLimits) -> SamplingParams:
    """A way to draw, with everything beside it that needs memory."""
    return SamplingParams(
        logprobs=limits.max_logprobs,
        frequency_penalty=0.5,
        logit_bias={0: 1.0},
        allowed_token_ids=[0, 1],
        bad_words_ids=[[1]],
        min_tokens=1,
        **way,
    )


def _step(
    runner: Runner,
    limits: StepLimits,
    spans: list[Span],
    way: Mapping[str, Any],
    block: int,
    draft: DraftUpdates,
) -> StepPlan:
    """All spans in one step.

    Sorted rows are worked on in parts, so a way to draw is given to as many sequences as fill one; the others
    draw with min-p, whose masks are made for all rows at once.
    """
    part = GPU_PART_BYTES // (4 * runner.model.config.vocab_size)
    count = 1 + part // (1 + limits.num_drafts)
    drawn, rest = _params(way, limits), _params({"min_p": 0.1}, limits)
    behind = runner.state.tokens.shape[1] - limits.max_model_len  # positions drafts may take
    return StepPlan(
        step=0,
        inits=[
            SlotInit(
                span.slot,
                tokens=[0] * (span.rows - span.drafts),
                computed=0,
                prompt_len=1,
                params=drawn if i < count else rest,
                seed=0,
            )
            for i, span in enumerate(spans)
        ],
        table=[
            TableUpdate(span.slot, 0, [block] * -(-(span.rows + behind) // runner.block_size))
            for span in spans
        ],
        spans=spans,
        max_context=limits.max_model_len,
        draft=draft,
    )


def _restores(runner: Runner, max_model_len: int) -> DraftUpdates:
    """The most captured rows that are restored at once."""
    drafting = runner.drafting
    if drafting is None or drafting.capture_rows is None or len(drafting.capture_rows) < 2:
        return DraftUpdates()
    size, longest = runner.block_size, max_model_len // runner.block_size
    count = min(longest, RESTORE_ROWS // size)
    one = Restore(0, [1] * count, [1] * count)
    return DraftUpdates(restores=[one] * (RESTORE_ROWS // size // count) if count else [])
