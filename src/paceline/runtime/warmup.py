"""The largest steps an engine can be asked for, run before anyone is served.

Kernels are compiled, and the allocator reaches its peak: what those steps need is measured here instead of
estimated, and kept, so that no later step allocates. They are ordinary plans over all slots, with block
tables that point at one block, whose content nobody reads; afterwards the slots are as new.
"""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import replace
from typing import Any

import torch

from paceline.runtime.captures import RESTORE_ROWS
from paceline.runtime.memory import StepLimits
from paceline.runtime.plan import DraftUpdates, Restore, SlotInit, Span, StepPlan, TableUpdate
from paceline.runtime.runner import PROMPT_LOGPROB_ROWS, Runner
from paceline.sampling.params import SamplingParams

logger = logging.getLogger(__name__)

SLACK = 1.1
"""Kept beyond the measured peak: steps of other sizes cut the same memory into other pieces."""

SMALL_BYTES, NUM_SMALL = 2**19, 128
"""torch keeps tensors below 1 MiB apart, in memory of their own: 64 MiB for those."""
MOST_LOGPROBS = 1024
"""More alternatives are not reckoned with, where ``max_logprobs`` allows them at all: every row of a step
reporting the whole vocabulary would leave no room for anything else."""
EVERYTHING: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "logit_bias": {0: 1.0},
    "allowed_token_ids": [0, 1],
    "bad_words_ids": [[1]],
    "min_tokens": 1,
}
"""Sampling parameters that need memory, each for itself."""


@torch.inference_mode()
def settle(runner: Runner, limits: StepLimits, worst: int | None = None) -> int:
    """Bring a GPU's allocator to where no step makes it grow: the largest rounds and passes are captured, and
    what steps need beside them is left with it, in one piece.

    Args:
        runner: nobody may hold a slot or a block of it yet.
        limits: of its steps.
        worst: bytes that steps need, where this was called for another runner with the same options. The
            steps then do not run again: their kernels are there, and what a runner itself needs it has from
            the start, apart from pinned memory of the host, which the other has left behind.

    Returns:
        Bytes that steps need.
    """
    started = time.perf_counter()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    if worst is None:
        warm_up(runner, limits)
        torch.cuda.synchronize()
    if runner.rounds is not None:
        runner.rounds.capture_largest()
    for part in (runner.passes, runner.deferred):
        if part is not None:
            part.capture_largest()
    if worst is None:
        worst = int(SLACK * (torch.cuda.max_memory_allocated() - before))
    gc.collect()
    torch.cuda.empty_cache()
    # All of it is freed at once, but the allocator keeps it.
    sizes = [worst, *[SMALL_BYTES] * NUM_SMALL]
    [torch.empty(size, dtype=torch.uint8, device=runner.device) for size in sizes].clear()
    logger.info("Warm-up in %.2f s; %.2f GiB for steps", time.perf_counter() - started, worst / 2**30)
    return worst


def warm_up(runner: Runner, limits: StepLimits) -> None:
    """Run the largest steps: drawing greedily and at random, and with the most rows of prompts. Nobody may
    hold a slot or a block yet.
    """
    block = runner.cache.k.shape[1] - 1
    top = _top(limits, runner.model.config.vocab_size)
    greedy: dict[str, Any] = {"temperature": 0.0}
    random: dict[str, Any] = {"top_k": 50, "top_p": 0.9, "min_p": 0.1}
    drawing = _drawing(limits, top)
    beginning = [replace(span, fresh=True) for span in drawing]  # prompts' own kernel, too
    steps = [(drawing, greedy), (beginning, random)]
    if drawing[0].prompt_rows < PROMPT_LOGPROB_ROWS:  # more are scored at once where nobody draws
        steps.append((_prompts(limits, top), greedy))
    for spans, way in steps:
        params = SamplingParams(logprobs=top, **EVERYTHING, **way)
        runner.launch(_step(runner, limits, spans, params, block), by_rows=True)
    runner.state.clear()


def _top(limits: StepLimits, vocab_size: int) -> int:
    """Alternatives reported at every row."""
    wanted = MOST_LOGPROBS if limits.max_logprobs == -1 else limits.max_logprobs
    return min(wanted, MOST_LOGPROBS, vocab_size)


def _drawing(limits: StepLimits, top: int) -> list[Span]:
    """Every sequence draws and verifies as many drafts as fit; the first also compute the rows left over."""
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


def _prompts(limits: StepLimits, top: int) -> list[Span]:
    """Every row is a prompt's, and reports log-probabilities."""
    left = limits.max_num_batched_tokens
    spans = []
    for slot in range(limits.max_num_seqs):
        rows = min(left, limits.max_model_len - 1)
        left -= rows
        if rows:
            spans.append(Span(slot, rows, sample=False, prompt_rows=rows, prompt_top=top))
    return spans


def _step(
    runner: Runner, limits: StepLimits, spans: list[Span], params: SamplingParams, block: int
) -> StepPlan:
    """All spans in one step, sampled alike."""
    behind = runner.state.tokens.shape[1] - limits.max_model_len  # positions drafts may take
    return StepPlan(
        step=0,
        inits=[SlotInit(span.slot, [0] * (span.rows - span.drafts), 0, 1, params, 0) for span in spans],
        table=[
            TableUpdate(span.slot, 0, [block] * -(-(span.rows + behind) // runner.block_size))
            for span in spans
        ],
        spans=spans,
        max_context=limits.max_model_len,
        draft=_restores(runner, limits.max_model_len),
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
