"""Pick one token per row, as a function of the row's logits, its sequence's tokens, its seed and its
position.

No row's result depends on which other rows are in the batch: every reduction is within a row, and which
method a row takes is decided by its own parameters. Nothing is read back from a CUDA device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.sampling.filters import kept_prefix, mask_min_p, min_p_mass, ordered_top
from paceline.sampling.noise import gumbel, row_keys
from paceline.sampling.processors import SampleRows, process
from paceline.sampling.state import (
    FIXED_K,
    INV_TEMPERATURE,
    NO_LIMIT,
    SEED_KEY,
    TOP_K,
    FixedKind,
    IntArray,
    SamplingFeatures,
    SamplingState,
    parts,
    upload,
)

__all__ = ["LogprobTensors", "SampleOutput", "SampleRows", "sample", "sample_fixed", "score"]

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
        tokens = _pick_cuda(logits, rows, state, features)
    else:
        tokens = _pick_cpu(logits, rows, state, features)
    if chosen_from is None:
        return SampleOutput(tokens, None)
    chosen = tokens[upload(features.logprobs, logits.device, torch.int64)]
    return SampleOutput(tokens, score(chosen_from, chosen, features.num_top, rows=features.logprobs))


def sample_fixed(
    logits: Tensor, slots: Tensor, positions: Tensor, state: SamplingState, kind: FixedKind
) -> Tensor:
    """``sample`` with nothing decided by the host, so that it can be captured in a graph.

    Args:
        logits: [Q, V] fp32, contiguous.
        slots, positions: [Q] int32, as in ``SampleRows``.
        state: parameters of the rows' slots, whose ``fixed_kind`` must be ``kind`` or come before it.
        kind: what the rows may need.

    Returns:
        [Q] int32, the tokens ``sample`` would pick.
    """
    if kind == "greedy":
        return logits.argmax(-1).to(torch.int32)
    floats, ints = state.floats[slots], state.ints[slots]
    group = _Group(None, logits, floats, ints, row_keys(ints[:, SEED_KEY], positions + 1))
    random = group.inv_temperature > 0
    if logits.is_cuda:
        from paceline.sampling.triton_sampler import sample_argmax

        tokens = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
        sample_argmax(logits, slots, positions, state.floats, state.ints, out=tokens)
    else:
        noisy = gumbel(group.keys, state.token_ids).add_(logits * group.inv_temperature)
        tokens = torch.where(random, noisy, logits).argmax(-1).to(torch.int32)
    if kind == "random":
        return tokens
    cut = _draw_ordered(group, min(FIXED_K, logits.shape[1])).to(torch.int32)
    return torch.where(random[:, 0] & (ints[:, TOP_K] < NO_LIMIT), cut, tokens)


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


@dataclass(frozen=True)
class _Group:
    """The rows of a step that are picked by one method, and their parameters."""

    index: Tensor | None  # None: all rows
    logits: Tensor  # [n, V]
    floats: Tensor  # [n, NUM_FLOATS]
    ints: Tensor  # [n, NUM_INTS]
    keys: Tensor  # [n, 2] int32

    @property
    def inv_temperature(self) -> Tensor:
        return self.floats[:, INV_TEMPERATURE, None].float()  # [n, 1]

    def put(self, tokens: Tensor, values: Tensor) -> None:
        if self.index is None:
            tokens.copy_(values)
        else:
            tokens.index_copy_(0, self.index, values.to(tokens.dtype))


def _group(members: IntArray, logits: Tensor, rows: SampleRows, state: SamplingState) -> _Group:
    index, slots, positions = None, rows.slots, rows.positions
    if len(members) < logits.shape[0]:
        index = upload(members, logits.device, torch.int64)
        logits, slots, positions = logits[index], slots[index], positions[index]
    ints = state.ints[slots]
    return _Group(index, logits, state.floats[slots], ints, row_keys(ints[:, SEED_KEY], positions + 1))


def _pick_cpu(logits: Tensor, rows: SampleRows, state: SamplingState, features: SamplingFeatures) -> Tensor:
    if len(features.greedy) == features.num_rows:
        return logits.argmax(-1).to(torch.int32)
    tokens = torch.empty(features.num_rows, dtype=torch.int32)
    if len(features.greedy):
        index = upload(features.greedy, logits.device, torch.int64)
        tokens.index_copy_(0, index, logits[index].argmax(-1).to(torch.int32))
    for members in parts(features.plain, logits):
        group = _group(members, logits, rows, state)
        masked = mask_min_p(group.logits, group.floats) if features.plain_min_p else group.logits
        scores = gumbel(group.keys, state.token_ids).add_(masked * group.inv_temperature)
        group.put(tokens, scores.argmax(-1))
    for members in parts(features.short, logits):
        group = _group(members, logits, rows, state)
        group.put(tokens, _draw_ordered(group, features.short_k))
    for members in parts(features.nucleus, logits):
        group = _group(members, logits, rows, state)
        group.put(tokens, _draw_nucleus(group))
    for members in parts(features.large, logits):
        group = _group(members, logits, rows, state)
        group.put(tokens, _draw_ordered(group, logits.shape[1]))
    return tokens


def _pick_cuda(logits: Tensor, rows: SampleRows, state: SamplingState, features: SamplingFeatures) -> Tensor:
    from paceline.sampling.triton_sampler import sample_argmax  # Triton is not there on a CPU-only install

    tokens = torch.empty(features.num_rows, dtype=torch.int32, device=logits.device)
    if len(features.greedy) or len(features.plain):
        masked = mask_min_p(logits, state.floats[rows.slots]) if features.plain_min_p else logits
        # One kernel over all rows; what it picks for truncated rows is replaced below.
        sample_argmax(masked, rows.slots, rows.positions, state.floats, state.ints, out=tokens)
    for kind, k in (
        (features.short, features.short_k),
        (features.nucleus, logits.shape[1]),
        (features.large, logits.shape[1]),
    ):
        for members in parts(kind, logits):
            group = _group(members, logits, rows, state)
            group.put(tokens, _draw_ordered(group, k))
    return tokens


def _draw_ordered(group: _Group, k: int) -> Tensor:
    """Tokens [n] drawn from the k largest logits of each row."""
    values, ids = ordered_top(group.logits, k)
    scaled = values * group.inv_temperature
    kept, _ = kept_prefix(scaled, group.floats, group.ints)
    return _draw(group, scaled, ids, kept)


def _draw_nucleus(group: _Group) -> Tensor:
    """Tokens [n] of rows with top_p but no top_k. CPU only: asks how many rows need a second look."""
    if group.logits.shape[1] <= FIRST_LOOK:
        return _draw_ordered(group, group.logits.shape[1])
    values, ids = ordered_top(group.logits, FIRST_LOOK)
    scaled = values * group.inv_temperature
    kept, complete = kept_prefix(scaled, group.floats, group.ints, min_p_mass(group.logits, group.floats))
    tokens = _draw(group, scaled, ids, kept)
    rest = torch.nonzero(~complete).flatten()
    if len(rest):
        again = _Group(rest, group.logits[rest], group.floats[rest], group.ints[rest], group.keys[rest])
        again.put(tokens, _draw_ordered(again, group.logits.shape[1]))
    return tokens


def _draw(group: _Group, scaled: Tensor, ids: Tensor, kept: Tensor) -> Tensor:
    scores = gumbel(group.keys, ids).add_(scaled).masked_fill_(~kept, -torch.inf)
    return ids.gather(1, scores.argmax(-1, keepdim=True)).squeeze(1)
