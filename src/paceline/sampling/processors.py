"""What changes logits before a token is picked, in vLLM's order: masks, logit bias, penalties.

Every function works in place on the rows that need it. Nothing is remembered between steps: penalties and
bad words are computed from the sequence's own tokens up to the row, drafts before it included, so a row has
the same logits whether it is decoded, verified or recomputed after a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.sampling.state import (
    FREQUENCY,
    MIN_LEN,
    PRESENCE,
    PROMPT_LEN,
    REPETITION,
    IntArray,
    SamplingFeatures,
    SamplingState,
    parts,
    upload,
)

SUPPRESSED = -1e30
"""Logit of a token masked by min_tokens or bad words. Finite, so that a row whose allowed tokens are all
suppressed still picks among them; far enough from fp32's limit for penalties and the lowest temperature."""


@dataclass(frozen=True)
class SampleRows:
    """The sampled rows of a step.

    Attributes:
        slots: [Q] integer, on the device: slot of the row's sequence. positions: [Q] integer, on the
        device: absolute position p of the row's token. The sampled one stands at p + 1.
        tokens: [num_slots, L] int32, on the device: token ids of the sequences; of row q's, 0 … p are read.
        max_len: upper bound of p + 1 over the rows, known to the host.
    """

    slots: Tensor
    positions: Tensor
    tokens: Tensor
    max_len: int


def process(logits: Tensor, rows: SampleRows, state: SamplingState, features: SamplingFeatures) -> None:
    """Apply masks, bias and penalties to ``logits`` [Q, V] fp32 in place."""
    if len(features.allowed):
        _mask_allowed(logits, state, features)
    if len(features.bad_words):
        _suppress_bad_words(logits, rows, state, features)
    if len(features.min_tokens):
        _suppress_stops(logits, rows, state, features)
    if len(features.bias):
        _add_bias(logits, state, features)
    if len(features.penalty):
        for members in parts(features.penalty, logits):
            _penalise(logits, rows, state, members)


def _mask_allowed(logits: Tensor, state: SamplingState, features: SamplingFeatures) -> None:
    masks = []
    for slot in features.slots[features.allowed]:
        mask = state.lists(slot).allowed
        assert mask is not None
        masks.append(mask)
    picked = upload(features.allowed, logits.device, torch.int64)
    allowed = torch.stack(masks)  # [n, V]
    logits.index_copy_(0, picked, logits[picked].masked_fill_(~allowed, -torch.inf))


def _flat(rows: IntArray, ids: Sequence[IntArray], vocab_size: int) -> tuple[IntArray, IntArray]:
    """Rows' id lists as indices into the flattened logits, and the row of each."""
    row = np.repeat(rows, [len(i) for i in ids])
    return row * vocab_size + np.concatenate(ids), row


def _suppress(logits: Tensor, flat: Tensor, active: Tensor) -> None:
    # A minimum, not an assignment: an id may come twice, once active and once not.
    values = torch.where(active, SUPPRESSED, torch.inf)
    logits.view(-1).scatter_reduce_(0, flat, values, "amin")


def _suppress_stops(
    logits: Tensor, rows: SampleRows, state: SamplingState, features: SamplingFeatures
) -> None:
    ids = [state.lists(slot).stop_ids for slot in features.slots[features.min_tokens]]
    flat, row = _flat(features.min_tokens, ids, logits.shape[1])
    row_index = upload(row, logits.device, torch.int64)
    min_len = state.ints[rows.slots[row_index], MIN_LEN]
    active = rows.positions[row_index] + 1 < min_len
    _suppress(logits, upload(flat, logits.device, torch.int64), active)


def _suppress_bad_words(
    logits: Tensor, rows: SampleRows, state: SamplingState, features: SamplingFeatures
) -> None:
    lists = [state.lists(slot) for slot in features.slots[features.bad_words]]
    flat, row = _flat(features.bad_words, [each.bad_last for each in lists], logits.shape[1])
    prefixes = [prefix for each in lists for prefix in each.bad_prefixes]
    width = max(len(prefix) for prefix in prefixes)
    padded = np.full((len(prefixes), width), -1, dtype=np.int64)  # -1: matches anything
    for i, prefix in enumerate(prefixes):
        padded[i, width - len(prefix) :] = prefix

    row_index = upload(row, logits.device, torch.int64)
    expected = upload(padded, logits.device, torch.int64)  # [N, width]
    slots = rows.slots[row_index]
    offsets = torch.arange(1 - width, 1, device=logits.device)
    positions = rows.positions[row_index, None] + offsets  # [N, width], the last ones up to the row
    found = rows.tokens[slots[:, None], positions.clamp(min=0)]
    output = positions >= state.ints[slots, PROMPT_LEN, None]  # as in vLLM, a word cannot begin in the prompt
    active = ((expected < 0) | ((found == expected) & output)).all(dim=-1)
    _suppress(logits, upload(flat, logits.device, torch.int64), active)


def _add_bias(logits: Tensor, state: SamplingState, features: SamplingFeatures) -> None:
    lists = [state.lists(slot) for slot in features.slots[features.bias]]
    flat, _ = _flat(features.bias, [each.bias_ids for each in lists], logits.shape[1])
    values = upload(np.concatenate([each.bias_values for each in lists]), logits.device, torch.float32)
    logits.view(-1).index_add_(0, upload(flat, logits.device, torch.int64), values)  # each index once


def _penalise(logits: Tensor, rows: SampleRows, state: SamplingState, members: IntArray) -> None:
    V = logits.shape[1]
    picked = upload(members, logits.device, torch.int64)
    slots, positions = rows.slots[picked], rows.positions[picked]
    floats, prompt_len = state.floats[slots].float(), state.ints[slots, PROMPT_LEN]
    length = min(rows.max_len, rows.tokens.shape[1])
    index = torch.arange(length, device=logits.device)
    valid = index <= positions[:, None]  # [n, length]
    output = valid & (index >= prompt_len[:, None])
    # Anything may stand after the row: such entries point at token 0 with weight 0.
    tokens = torch.where(valid, rows.tokens[:, :length][slots], 0).to(torch.int64)
    counts = torch.zeros(len(members), V, device=logits.device)
    in_output = counts.scatter_add(1, tokens, output.float())
    seen = counts.scatter_add_(1, tokens, valid.float())

    x = logits[picked]
    repetition = floats[:, REPETITION, None]
    x = torch.where(seen > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    x -= floats[:, FREQUENCY, None] * in_output
    x -= floats[:, PRESENCE, None] * (in_output > 0)
    logits.index_copy_(0, picked, x)
