"""``sampler.sample`` with nothing decided by the host, so that it can be captured in a graph.

Which parameters rows use is not known while a graph is captured, so a graph is made for a *kind* of sampling
(``state.FixedKind``) and does all that the kind allows to every row; parameters that a row does not use leave
it as it is. The rows come as whole spans of equal width, as decode rounds have them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from paceline.sampling.processors import SampleRows, process_spans
from paceline.sampling.sampler import LogprobTensors, SampleOutput, draw_ordered, draw_plain, pick_cuda, score
from paceline.sampling.state import FIXED_K, FIXED_TOP, INV_TEMPERATURE, TOP_K, FixedKind, SamplingState

PART_ROWS = 64
"""Rows that are processed and scored at once: their temporaries, about 40 bytes a logit, bound the memory of
a round of any size."""


def sample_fixed(
    logits: Tensor, rows: SampleRows, fed: Tensor, state: SamplingState, kind: FixedKind
) -> SampleOutput:
    """One token for each row of N spans of W rows, those ``sample`` would pick.

    Args:
        logits: [N * W, V] contiguous, fp32 or what the weights are. Overwritten.
        rows: N * W rows; the W rows of a span are consecutive positions of one slot.
        fed: [N, W] int32, the rows' own tokens.
        state: parameters of the rows' slots, whose ``fixed_kind`` must be ``kind`` or come before it.
        kind: what the rows may need.

    Returns:
        tokens [N * W] int32; with the kind "full" also raw log-probabilities of every row, with the
        ``FIXED_TOP`` most likely tokens.
    """
    if kind == "greedy":
        on_gpu = logits.is_cuda
        greedy = pick_cuda(logits, rows, state, False) if on_gpu else logits.argmax(-1).to(torch.int32)
        return SampleOutput(greedy, None)
    logits = logits.float()
    if kind != "full":
        return SampleOutput(_pick(logits, rows, state, kind), None)
    tokens, logprobs = [], []
    for first, last in _pieces(*fed.shape):
        width = fed.shape[1]
        index = slice(first * width, last * width)
        part = rows.pick(index)
        raw = logits[index].clone()
        process_spans(logits[index], part, fed[first:last], state)
        tokens.append(_pick(logits[index], part, state, kind))
        logprobs.append(score(raw, tokens[-1], min(FIXED_TOP, logits.shape[1])))
    return SampleOutput(
        torch.cat(tokens),
        LogprobTensors(
            np.arange(len(logits)),
            torch.cat([part.token_ids for part in logprobs]),
            torch.cat([part.logprobs for part in logprobs]),
            torch.cat([part.ranks for part in logprobs]),
        ),
    )


def _pieces(num_spans: int, width: int) -> Iterator[tuple[int, int]]:
    """First and last + 1 of the spans of each part."""
    size = max(PART_ROWS // width, 1)
    for first in range(0, num_spans, size):
        yield first, min(first + size, num_spans)


def _pick(logits: Tensor, rows: SampleRows, state: SamplingState, kind: FixedKind) -> Tensor:
    """Tokens [Q] of processed logits [Q, V]."""
    if logits.is_cuda:
        return pick_cuda(logits, rows, state, kind != "random")
    random = state.floats[rows.slots, INV_TEMPERATURE] > 0
    if kind == "filtered" or kind == "full":
        drawn = draw_ordered(logits, rows, state, logits.shape[1])
    else:
        drawn = draw_plain(logits, rows, state)
    if kind == "short":
        cut = draw_ordered(logits, rows, state, min(FIXED_K, logits.shape[1]))
        drawn = torch.where(state.ints[rows.slots, TOP_K] <= FIXED_K, cut, drawn)
    return torch.where(random, drawn, logits.argmax(-1).to(torch.int32))
