"""What the sampler tests share: sampling a list of cases, and a plain reference of the whole sampler.

The reference is written for reading, one row at a time in float64 numpy, from the definitions in the
docstrings. Only the noise is the sampler's own (it has its own tests).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.sampling.noise import gumbel, row_keys
from paceline.sampling.params import SamplingParams
from paceline.sampling.sampler import SampleOutput, SampleRows, sample
from paceline.sampling.seeds import mix64
from paceline.sampling.state import SamplingState, SlotSampling

Floats = np.ndarray[Any, np.dtype[np.float64]]
GARBAGE = -7
"""Fills token arrays behind a row: reading it as an id would fail or show."""


@dataclass(frozen=True)
class Case:
    """One row: the last of ``tokens`` is the row's own; the next one is to be sampled."""

    params: SamplingParams
    tokens: list[int] = field(default_factory=lambda: [1])
    prompt_len: int | None = None  # all of the tokens
    seed: int = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.tokens) if self.prompt_len is None else self.prompt_len :]


def set_slot(state: SamplingState, slot: int, params: SamplingParams, seed: int, prompt_len: int) -> None:
    """Store the parameters of one sequence."""
    state.set_slots([SlotSampling(slot, params, seed, prompt_len)])


def draw(
    logits: Tensor,
    cases: Sequence[Case],
    *,
    eos: Sequence[int] = (),
    slots: Sequence[int] | None = None,
    spare: int = 3,
) -> SampleOutput:
    """Sample a token per case: row i of ``logits`` [Q, V] is case i's, in slot ``slots[i]``, or i."""
    slots = range(len(cases)) if slots is None else slots
    state = SamplingState(max(slots) + 1, logits.shape[1], eos_token_ids=eos, device="cpu")
    width = max(len(case.tokens) for case in cases) + spare
    tokens = torch.full((max(slots) + 1, width), GARBAGE, dtype=torch.int32)
    for slot, case in zip(slots, cases, strict=True):
        tokens[slot, : len(case.tokens)] = torch.tensor(case.tokens, dtype=torch.int32)
        prompt_len = len(case.tokens) if case.prompt_len is None else case.prompt_len
        set_slot(state, slot, case.params, case.seed, prompt_len)
    rows = SampleRows(
        slots=torch.tensor(list(slots), dtype=torch.int32),
        positions=torch.tensor([len(case.tokens) - 1 for case in cases], dtype=torch.int32),
        tokens=tokens,
        max_len=width - spare,
    )
    return sample(logits.clone(), rows, state, state.features(list(slots)))


def draw_tokens(logits: Tensor, cases: Sequence[Case], **options: Any) -> list[int]:
    return draw(logits, cases, **options).tokens.tolist()


def reference_logits(logits: Tensor, case: Case, eos: Sequence[int] = ()) -> Floats:
    """One row's [V] logits after masks, bias and penalties."""
    p, output = case.params, case.output
    x = logits.double().numpy().copy()
    if p.allowed_token_ids is not None:
        x[[t for t in range(len(x)) if t not in p.allowed_token_ids]] = -np.inf
    for word in p.bad_words_ids:
        if len(word) == 1 or (
            len(output) >= len(word) - 1 and output[len(output) - len(word) + 1 :] == word[:-1]
        ):
            x[word[-1]] = min(x[word[-1]], -1e30)
    if len(output) < p.min_tokens:
        for token in [*p.stop_ids, *eos]:
            x[token] = min(x[token], -1e30)
    for token, bias in (p.logit_bias or {}).items():
        x[token] += bias
    for token in set(case.tokens):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(output):
        x[token] -= p.presence_penalty + p.frequency_penalty * output.count(token)
    return x


def reference_probs(x: Floats, p: SamplingParams) -> Floats:
    """[V] probabilities after temperature, min_p, top_k and top_p of processed logits [V]."""
    order = np.lexsort((np.arange(len(x)), -x))
    if p.greedy:
        keep = 1
        z = x
    else:
        z = x / p.temperature
        weights = np.exp(z[order] - z[order[0]])
        keep = int((weights >= p.min_p).sum())
        if p.top_k > 0:
            keep = min(keep, p.top_k)
        if p.top_p < 1:
            mass = np.cumsum(weights[:keep])
            keep = int((mass - weights[:keep] < p.top_p * mass[-1]).sum())
    probs = np.zeros(len(x))
    kept = order[: max(keep, 1)]
    probs[kept] = np.exp(z[kept] - z[order[0]])
    return np.asarray(probs / probs.sum())


def reference_scores(logits: Tensor, case: Case, eos: Sequence[int] = ()) -> Floats:
    """[V] scores of one row whose argmax is the sampled token; -inf for what cannot be drawn."""
    x = reference_logits(logits, case, eos)
    probs = reference_probs(x, case.params)
    with np.errstate(divide="ignore"):
        scores = np.log(probs)
    if case.params.greedy:
        return scores
    keys = row_keys(torch.tensor([mix64(case.seed)]), torch.tensor([len(case.tokens)]))
    return np.asarray(scores + gumbel(keys, torch.arange(len(x), dtype=torch.int32))[0].double().numpy())
