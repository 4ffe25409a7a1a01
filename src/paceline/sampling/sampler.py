"""Pick one token per row, as a function of the row's logits, its sequence's tokens, its seed and its
position.

No row's result depends on which other rows are in the batch: every reduction is within a row, and which
method a row takes is decided by its own parameters. Nothing is read back from a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.sampling.filters import kept_prefix, mask_min_p, min_p_mass, ordered_top
from paceline.sampling.noise import gumbel, row_keys
from paceline.sampling.processors import SampleRows, process
from paceline.sampling.state import (
    INV_TEMPERATURE,
    SEED_KEY,
    IntArray,
    SamplingFeatures,
    SamplingState,
    parts,
    upload,
)

__all__ = [
    "LogprobTensors",
    "SampleOutput",
    "SampleRows",
    "draw_ordered",
    "draw_plain",
    "pick_cuda",
    "sample",
    "score",
]

FIRST_LOOK = 256
"""On the CPU, a row with top_p alone first tries so many of its largest tokens and is sorted if need be."""


@dataclass(frozen=True)
class LogprobTensors:
    """Log-probabilities of n rows; ``logprobs.position_logprobs`` turns a row into what the user sees.

    Attributes:
        rows: [n] host array: the sampled rows these belong to, in order.
        token_ids: [n, 1 + K] int32: the chosen token, then the K most likely ones in order.
        logprobs: [n, 1 + K] fp32, of the logits before any processing.
        ranks: [n] int32 of the chosen token, from 1; equal logits rank by ascending token id.
    """

    rows: IntArray
    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor


@dataclass(frozen=True)
class SampleOutput:
    """tokens: [Q] int32 on the logits' device; logprobs: of the rows that asked, or None when none did."""

    tokens: Tensor
    logprobs: LogprobTensors | None


def sample(
    logits: Tensor, rows: SampleRows, state: SamplingState, features: SamplingFeatures
) -> SampleOutput:
    """Sample one token for each row.

    In order, as in vLLM: allowed ids, bad words, min_tokens, logit bias, penalties, temperature, min_p,
    top_k, top_p, then ``argmax(logit / T + gumbel(seed, p + 1, token))``; greedy rows take the largest
    logit, lowest id on a tie.

    Args:
        logits: [Q, V] fp32, contiguous. Overwritten.
        rows: the Q rows.
        state: parameters of the rows' slots.
        features: ``state.features`` of the same rows.

    Returns:
        Tokens, and the raw log-probabilities asked for.
    """
    chosen_from = None
    if len(features.logprobs):  # before the logits are changed
        chosen_from = logits[upload(features.logprobs, logits.device, torch.int64)]
    process(logits, rows, state, features)
    if logits.is_cuda:
        filtered = features.plain_min_p or any(map(len, (features.short, features.nucleus, features.large)))
        tokens = pick_cuda(logits, rows, state, filtered)
    else:
        tokens = _pick_cpu(logits, rows, state, features)
    if chosen_from is None:
        return SampleOutput(tokens, None)
    chosen = tokens[upload(features.logprobs, logits.device, torch.int64)]
    return SampleOutput(tokens, score(chosen_from, chosen, features.num_top, rows=features.logprobs))


def score(logits: Tensor, token_ids: Tensor, num_top: int, *, rows: IntArray | None = None) -> LogprobTensors:
    """Log-probabilities of given tokens and of the most likely ones: of prompts as of sampled tokens.

    Needs about 20 bytes for each logit while it runs: a caller with many rows should bring them in parts.

    Args:
        logits: [n, V] fp32, unprocessed.
        token_ids: [n] integer: the token that stands after each row.
        num_top: how many of the most likely tokens to report.
        rows: [n] host array kept as ``LogprobTensors.rows``; 0 … n - 1 when not given.
    """
    n = logits.shape[0]
    pieces = [
        _score(logits[p[0] : p[-1] + 1], token_ids[p[0] : p[-1] + 1], num_top)
        for p in parts(np.arange(n), logits)
    ]
    ids, logprobs, ranks = (torch.cat(column) for column in zip(*pieces, strict=True))
    return LogprobTensors(np.arange(n) if rows is None else rows, ids, logprobs, ranks)


def _score(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, log-probabilities and ranks as in ``LogprobTensors``."""
    V = logits.shape[1]
    chosen = token_ids.to(torch.int64)[:, None]  # [n, 1]
    value = logits.gather(1, chosen)
    # Ranked by logit: rounding in log_softmax can make two different logits equal.
    ahead = (logits > value) | ((logits == value) & (torch.arange(V, device=logits.device) < chosen))
    ids = chosen
    if num_top:
        ids = torch.cat([chosen, ordered_top(logits, min(num_top, V))[1].to(torch.int64)], dim=1)
    logprobs = logits.log_softmax(-1).gather(1, ids)
    return ids.to(torch.int32), logprobs, ahead.sum(-1, dtype=torch.int32) + 1


def _pick_cpu(logits: Tensor, rows: SampleRows, state: SamplingState, features: SamplingFeatures) -> Tensor:
    if len(features.greedy) == features.num_rows:
        return logits.argmax(-1).to(torch.int32)
    tokens = torch.empty(features.num_rows, dtype=torch.int32)

    def put(members: IntArray, draw: Callable[[Tensor, SampleRows], Tensor]) -> None:
        for part in parts(members, logits):
            if len(part) == len(logits):
                tokens.copy_(draw(logits, rows))
            else:
                index = upload(part, logits.device, torch.int64)
                tokens.index_copy_(0, index, draw(logits[index], rows.pick(index)))

    def plain(x: Tensor, picked: SampleRows) -> Tensor:
        if features.plain_min_p:
            x = mask_min_p(x, state.floats[picked.slots])
        return draw_plain(x, picked, state)

    put(features.greedy, lambda x, _: x.argmax(-1).to(torch.int32))
    put(features.plain, plain)
    put(features.short, lambda x, picked: draw_ordered(x, picked, state, features.short_k))
    put(features.nucleus, lambda x, picked: _draw_nucleus(x, picked, state))
    put(features.large, lambda x, picked: draw_ordered(x, picked, state, logits.shape[1]))
    return tokens


def pick_cuda(logits: Tensor, rows: SampleRows, state: SamplingState, filtered: bool) -> Tensor:
    """Tokens [Q] int32 of logits [Q, V] on a GPU: the largest kept, with noise where rows are random.

    Args:
        filtered: whether any row may have a filter.
    """
    from paceline.sampling.triton_filters import last_kept  # Triton is not there on a CPU-only install
    from paceline.sampling.triton_sampler import sample_argmax

    last = last_kept(logits, rows.slots, state.floats, state.ints) if filtered else None
    tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    sample_argmax(logits, rows.slots, rows.positions, state.floats, state.ints, last=last, out=tokens)
    return tokens


def draw_plain(logits: Tensor, rows: SampleRows, state: SamplingState) -> Tensor:
    """Tokens [n] int32 drawn from all of each row's logits [n, V]."""
    scores = gumbel(_keys(rows, state), state.token_ids)
    inv_temperature = state.floats[rows.slots, INV_TEMPERATURE, None].float()
    return scores.add_(logits * inv_temperature).argmax(-1).to(torch.int32)


def draw_ordered(logits: Tensor, rows: SampleRows, state: SamplingState, k: int) -> Tensor:
    """Tokens [n] int32 drawn from what the filters keep of the k largest of each row's logits [n, V]."""
    values, ids = ordered_top(logits, k)
    floats, ints = state.floats[rows.slots], state.ints[rows.slots]
    scaled = values * floats[:, INV_TEMPERATURE, None].float()
    kept, _ = kept_prefix(scaled, floats, ints)
    return _draw(_keys(rows, state), scaled, ids, kept)


def _draw_nucleus(logits: Tensor, rows: SampleRows, state: SamplingState) -> Tensor:
    """Tokens [n] int32 of rows with top_p but no top_k. CPU only: asks how many rows need a second look."""
    if logits.shape[1] <= FIRST_LOOK:
        return draw_ordered(logits, rows, state, logits.shape[1])
    values, ids = ordered_top(logits, FIRST_LOOK)
    floats, ints = state.floats[rows.slots], state.ints[rows.slots]
    scaled = values * floats[:, INV_TEMPERATURE, None].float()
    kept, complete = kept_prefix(scaled, floats, ints, min_p_mass(logits, floats))
    tokens = _draw(_keys(rows, state), scaled, ids, kept)
    rest = torch.nonzero(~complete).flatten()
    if len(rest):
        tokens[rest] = draw_ordered(logits[rest], rows.pick(rest), state, logits.shape[1])
    return tokens


def _keys(rows: SampleRows, state: SamplingState) -> Tensor:
    """Keys of the noise, [n, 2] int32."""
    return row_keys(state.ints[rows.slots, SEED_KEY], rows.positions + 1)


def _draw(keys: Tensor, scaled: Tensor, ids: Tensor, kept: Tensor) -> Tensor:
    scores = gumbel(keys, ids).add_(scaled).masked_fill_(~kept, -torch.inf)
    return ids.gather(1, scores.argmax(-1, keepdim=True)).squeeze(1)
