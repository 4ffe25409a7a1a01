"""What changes logits before a token is picked, in vLLM's order: masks, logit bias, penalties.

Every function works in place on the rows it is given, from device tables alone; rows that do not use a
parameter come out as they were. The generic step runs each on the rows that need it, a captured round runs
all of them on all rows. Nothing is remembered between steps: penalties and bad words are computed from the
sequence's own tokens up to the row, drafts before it included, so a row has the same logits whether it is
decoded, verified or recomputed after a preemption.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.sampling.lists import LONGEST_PREFIX, suffix_hashes
from paceline.sampling.state import (
    FREQUENCY,
    MIN_LEN,
    PRESENCE,
    PROMPT_LEN,
    REPETITION,
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
        owners: [Q] integer, on the device: which row of ``tokens`` holds the sequence of each row, where
        that is not its slot: rows of a hedge chain see the chain's own tokens.
    """

    slots: Tensor
    positions: Tensor
    tokens: Tensor
    max_len: int
    owners: Tensor | None = None

    @property
    def sequences(self) -> Tensor:
        """Which row of ``tokens`` holds the sequence of each row, [Q]."""
        return self.slots if self.owners is None else self.owners

    def pick(self, index: Tensor | slice) -> SampleRows:
        """Some of the rows."""
        owners = None if self.owners is None else self.owners[index]
        return SampleRows(self.slots[index], self.positions[index], self.tokens, self.max_len, owners)


def process(logits: Tensor, rows: SampleRows, state: SamplingState, features: SamplingFeatures) -> None:
    """Apply masks, bias and penalties to ``logits`` [Q, V] fp32 in place."""
    for members, change in (
        (features.allowed, mask_allowed),
        (features.bad_words, suppress_bad_words),
        (features.min_tokens, suppress_stops),
        (features.bias, add_bias),
        (features.penalty, _penalise_rows),
    ):
        for part in parts(members, logits):
            index = upload(part, logits.device, torch.int64)
            picked = logits[index]
            change(picked, rows.pick(index), state)
            logits.index_copy_(0, index, picked)


def process_spans(logits: Tensor, rows: SampleRows, fed: Tensor, state: SamplingState) -> None:
    """``process`` of N whole spans of equal width, with nothing decided by the host.

    Args:
        logits: [N * W, V] fp32, changed in place.
        rows: N * W rows; the W rows of a span are consecutive positions of one slot.
        fed: [N, W] int32, the rows' own tokens.
        state: parameters of the rows' slots.
    """
    mask_allowed(logits, rows, state)
    suppress_bad_words(logits, rows, state)
    suppress_stops(logits, rows, state)
    add_bias(logits, rows, state)
    # The rows of a span share all tokens up to the first of them: those are counted once.
    N, W = fed.shape
    anchors = rows.pick(slice(None, None, W))
    before = torch.ones(W, W, device=logits.device).tril_()
    before[:, 0] = 0.0  # the first row's token is counted
    index = fed.long()[:, None].expand(-1, W, -1)  # [N, W rows, W tokens]
    weights = before.expand(N, -1, -1)
    seen, in_output = (
        counts[:, None].repeat(1, W, 1).scatter_add_(2, index, weights).view_as(logits)
        for counts in _count(anchors, state, logits.shape[1])
    )
    _penalise(logits, rows, state, seen, in_output)


def mask_allowed(logits: Tensor, rows: SampleRows, state: SamplingState) -> None:
    """Leave the ids a slot allows."""
    logits.masked_fill_(~state.lists.allowed[rows.slots], -torch.inf)


def suppress_bad_words(logits: Tensor, rows: SampleRows, state: SamplingState) -> None:
    """Suppress the last token of every bad word whose other tokens the output ends with."""
    lists, slots = state.lists, rows.slots
    distance = torch.arange(LONGEST_PREFIX, device=logits.device)
    positions = (rows.positions[:, None] - distance).clamp(min=0)  # [n, w], the row's own token first
    hashes = suffix_hashes(rows.tokens[rows.sequences[:, None], positions].long())  # [n, w + 1]
    prefix = lists.word_prefix[slots]  # [n, W]
    found = hashes.gather(1, prefix.clamp(min=0)) == lists.word_hash[slots]
    # As in vLLM, a word cannot begin in the prompt.
    num_output = rows.positions[:, None] + 1 - state.ints[slots, PROMPT_LEN, None]
    active = found & (prefix >= 0) & (prefix <= num_output.clamp(min=0))
    # A minimum, not an assignment: words may share their last token, and only one of them be about to end.
    values = torch.where(active, SUPPRESSED, torch.inf)
    logits.scatter_reduce_(1, lists.word_last[slots], values, "amin")


def suppress_stops(logits: Tensor, rows: SampleRows, state: SamplingState) -> None:
    """Suppress stop tokens and EOS before a sequence has its ``min_tokens``."""
    lists, slots = state.lists, rows.slots
    ids = lists.stop_ids[slots]  # [n, E]
    early = rows.positions[:, None] + 1 < state.ints[slots, MIN_LEN, None]
    active = early & (torch.arange(ids.shape[1], device=logits.device) < lists.num_stops[slots])
    values = logits.gather(1, ids)
    logits.scatter_(1, ids, torch.where(active, values.clamp(max=SUPPRESSED), values))


def add_bias(logits: Tensor, rows: SampleRows, state: SamplingState) -> None:
    """Add the logit bias."""
    ids = state.lists.bias_ids[rows.slots]
    logits.scatter_(1, ids, logits.gather(1, ids) + state.lists.bias[rows.slots])


def _penalise_rows(logits: Tensor, rows: SampleRows, state: SamplingState) -> None:
    _penalise(logits, rows, state, *_count(rows, state, logits.shape[1]))


def _count(rows: SampleRows, state: SamplingState, vocab_size: int) -> tuple[Tensor, Tensor]:
    """How often each token stands up to the row, in all and in the output: [n, V] fp32 each."""
    prompt_len = state.ints[rows.slots, PROMPT_LEN]
    index = torch.arange(min(rows.max_len, rows.tokens.shape[1]), device=rows.tokens.device)
    valid = index <= rows.positions[:, None]  # [n, length]
    output = valid & (index >= prompt_len[:, None])
    # Anything may stand after the row: such entries have weight 0, and all kinds of ids, because additions to
    # one address wait for each other.
    tokens = torch.where(valid, rows.tokens[:, : len(index)][rows.sequences], index % vocab_size).to(
        torch.int64
    )
    counts = torch.zeros(len(valid), vocab_size, device=rows.tokens.device)
    return counts.scatter_add(1, tokens, valid.float()), counts.scatter_add(1, tokens, output.float())


def _penalise(
    logits: Tensor, rows: SampleRows, state: SamplingState, seen: Tensor, in_output: Tensor
) -> None:
    """Apply the penalties, given how often each token [n, V] stands before the row."""
    floats = state.floats[rows.slots].float()
    repetition = floats[:, REPETITION, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits.copy_(torch.where(seen > 0, repeated, logits))
    logits.sub_(floats[:, FREQUENCY, None] * in_output)
    logits.sub_(floats[:, PRESENCE, None] * (in_output > 0))
