"""Sampling with nothing decided by the host draws and reports what ``sample`` does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_harness import GARBAGE, Case, set_slot
from test_sampler import EOS, V, any_case, normal, params
from torch import Tensor

from paceline.runtime.division import most
from paceline.sampling import fixed
from paceline.sampling.fixed import sample_fixed
from paceline.sampling.processors import process, process_spans
from paceline.sampling.sampler import SampleOutput, SampleRows, sample
from paceline.sampling.state import FIXED_KINDS, FIXED_TOP, FixedKind, SamplingState

SPARE = 2
"""Places of a round that hold no sequence."""


def both(
    cases: list[Case], width: int, seed: int, kind: FixedKind | None = None
) -> tuple[SampleOutput, SampleOutput, list[int]]:
    """Output of ``sample`` and of ``sample_fixed`` for spans of ``width`` rows that end with the cases'
    tokens, and the slots of the rows. Behind the sequences come places that hold none.
    """
    num_slots = len(cases) + 1
    vocab_size = V
    state = SamplingState(num_slots, vocab_size, eos_token_ids=[EOS], device="cpu")
    tokens = torch.full((num_slots, 40), GARBAGE, dtype=torch.int32)
    tokens[-1] = 0
    slots: list[int] = []
    positions: list[int] = []
    for slot, case in enumerate(cases):
        known = [1] * (width - 1) + case.tokens  # so that every row has a token of its own
        tokens[slot, : len(known)] = torch.tensor(known)
        prompt_len = len(case.tokens) if case.prompt_len is None else case.prompt_len
        set_slot(state, slot, case.params, case.seed, min(prompt_len, len(known)))
        slots += [slot] * width
        positions += range(len(known) - width, len(known))
    host_slots = list(slots)
    slots += [num_slots - 1] * (width * SPARE)
    positions += list(range(width)) * SPARE
    rows = SampleRows(torch.tensor(slots), torch.tensor(positions), tokens, 40)
    fed = tokens[rows.slots, rows.positions].view(-1, width)
    logits = normal(len(slots), vocab_size, seed=seed)
    count = len(host_slots)
    first = SampleRows(rows.slots[:count], rows.positions[:count], tokens, 40)
    want = sample(logits[:count].clone(), first, state, state.features(host_slots))
    if kind is None:
        kind = most([state.fixed_kind(slot) for slot in range(len(cases))])
        assert kind is not None
    return want, sample_fixed(logits, rows, fed, state, kind), host_slots


@settings(max_examples=120, deadline=None)
@given(
    cases=st.lists(any_case(), min_size=1, max_size=5),
    width=st.integers(1, 4),
    seed=st.integers(0, 1000),
    tops=st.lists(st.none() | st.integers(0, FIXED_TOP), min_size=5, max_size=5),
    kind=st.sampled_from([None, "full"]),
)
def test_every_combination_draws_and_reports_the_same(
    cases: list[Case], width: int, seed: int, tops: list[int | None], kind: FixedKind | None
) -> None:
    cases = [
        replace(case, params=msgspec.structs.replace(case.params, logprobs=top))
        for case, top in zip(cases, tops, strict=False)
    ]
    want, got, slots = both(cases, width, seed, kind)
    assert got.tokens[: len(slots)].tolist() == want.tokens.tolist()
    if want.logprobs is not None:
        assert got.logprobs is not None
        for i, row in enumerate(want.logprobs.rows.tolist()):
            top = cases[slots[row]].params.logprobs
            assert top is not None
            columns = slice(0, 1 + top)
            assert got.logprobs.ranks[row] == want.logprobs.ranks[i]
            for a, b in (
                (got.logprobs.token_ids, want.logprobs.token_ids),
                (got.logprobs.logprobs, want.logprobs.logprobs),
            ):
                assert a[row, columns].tolist() == b[i, columns].tolist()


@settings(max_examples=60, deadline=None)
@given(case=any_case(), width=st.integers(1, 4), penalty=st.sampled_from([0.0, 0.7]))
def test_logits_of_a_span_are_processed_as_one_by_one(case: Case, width: int, penalty: float) -> None:
    p = msgspec.structs.replace(case.params, frequency_penalty=penalty)
    state = SamplingState(1, V, eos_token_ids=[EOS], device="cpu")
    known = [1] * (width - 1) + case.tokens
    set_slot(state, 0, p, 0, min(case.prompt_len or 0, len(known)))
    tokens = torch.tensor([known], dtype=torch.int32)
    positions = torch.arange(len(known) - width, len(known))
    rows = SampleRows(torch.zeros(width, dtype=torch.int64), positions, tokens, len(known))
    want = normal(width, V, seed=1)
    got = want.clone()
    process(want, rows, state, state.features([0] * width))
    process_spans(got, rows, tokens[:, -width:], state)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", FIXED_KINDS)
def test_a_kind_serves_the_kinds_before_it(kind: FixedKind) -> None:
    ways: dict[str, list[dict[str, Any]]] = {
        "greedy": [{"temperature": 0.0}, {"temperature": 0.0, "top_k": 3}],
        "random": [{}, {"temperature": 1.7}],
        "short": [{"top_k": 5}, {"top_k": 30, "top_p": 0.6, "min_p": 0.01}],
        "filtered": [{"top_p": 0.8}, {"min_p": 0.1}],
        "full": [{"presence_penalty": 1.0}, {"logit_bias": {3: 4.0}}],
    }
    able = FIXED_KINDS[: FIXED_KINDS.index(kind) + 1]
    cases = [Case(params(**way), [1, 2], 1, i) for i, k in enumerate(able) for way in ways[k]]
    for seed in range(5):
        want, got, slots = both(cases, 3, seed, kind)
        assert got.tokens[: len(slots)].tolist() == want.tokens.tolist()
        assert (got.logprobs is not None) == (kind == "full")


def test_parts_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        Case(params(frequency_penalty=0.1 * i, top_k=i, logprobs=2), [1, 2, 2, i], 1, i) for i in range(7)
    ]
    _, whole, _ = both(cases, 3, 0)
    monkeypatch.setattr(fixed, "PART_ROWS", 7)  # two spans of three rows
    _, parts, _ = both(cases, 3, 0)
    assert parts.tokens.tolist() == whole.tokens.tolist()
    assert parts.logprobs is not None and whole.logprobs is not None
    torch.testing.assert_close(parts.logprobs.token_ids, whole.logprobs.token_ids, rtol=0, atol=0)
    np.testing.assert_array_equal(parts.logprobs.rows, np.arange(len(whole.tokens)))


def test_penalties_see_the_drafts_before_the_row() -> None:
    """Token 7 is likeliest until it stands in the output: as a draft, from the next row on."""
    state = SamplingState(1, 10, device="cpu")
    set_slot(state, 0, params(temperature=0, presence_penalty=2.0), 0, 1)
    logits = torch.zeros(4, 10)
    logits[:, 7], logits[:, 3] = 1.5, 1.0
    tokens = torch.tensor([[1, 2, 4, 7, 5]], dtype=torch.int32)
    rows = SampleRows(torch.zeros(4, dtype=torch.int32), torch.arange(1, 5), tokens, 5)
    got = sample_fixed(logits, rows, tokens[:, 1:], state, "full")
    assert got.tokens.tolist() == [7, 7, 3, 3]


def test_what_cannot_be_fixed() -> None:
    state = SamplingState(2, 50, device="cpu")
    set_slot(state, 0, params(logprobs=FIXED_TOP), 0, 1)
    set_slot(state, 1, params(logprobs=FIXED_TOP + 1), 0, 1)
    assert [state.fixed_kind(slot) for slot in (0, 1)] == ["full", None]


def words_state(words: list[list[int]], vocab_size: int) -> SamplingState:
    state = SamplingState(1, vocab_size, device="cpu")
    set_slot(state, 0, params(temperature=0, bad_words_ids=words), 0, 0)
    return state


@pytest.mark.parametrize("length", [2, 3, 64])
def test_long_bad_words_match_to_the_token(length: int) -> None:
    word = [(3 * i) % 11 for i in range(length)]
    state = words_state([word], 12)
    output = [5, *word[:-1]]
    for wrong in (None, 1, length - 1):
        text = list(output)
        if wrong is not None:
            text[wrong] = 11
        tokens = torch.tensor([text], dtype=torch.int32)
        logits: Tensor = torch.zeros(1, 12)
        logits[0, word[-1]] = 5.0
        rows = SampleRows(torch.tensor([0]), torch.tensor([len(text) - 1]), tokens, len(text))
        drawn = sample(logits, rows, state, state.features([0])).tokens.item()
        assert (drawn == word[-1]) == (wrong is not None), wrong


def test_lists_as_long_as_they_may_be() -> None:
    """Every table is filled to its end."""
    vocab_size = 3000
    fields: dict[str, Any] = {
        "logit_bias": dict.fromkeys(range(1000, 2024), 1.0),
        "stop_token_ids": list(range(1024)),
        "min_tokens": 5,
        "bad_words_ids": [[i] for i in range(1500, 2524)],
    }
    state = SamplingState(1, vocab_size, eos_token_ids=[2900, 2901], device="cpu")
    set_slot(state, 0, params(temperature=0, **fields), 0, 1)
    rows = SampleRows(torch.tensor([0]), torch.tensor([0]), torch.ones(1, 1, dtype=torch.int32), 1)
    for best, expected in (
        (1023, False),
        (1024, True),
        (1500, False),
        (2523, False),
        (2524, True),
        (2901, False),
    ):
        logits = torch.zeros(1, vocab_size)
        logits[0, best] = 3.0
        drawn = sample(logits, rows, state, state.features([0])).tokens.item()
        assert (drawn == best) == expected, best


def test_rows_of_a_chain_see_the_tokens_of_the_chain() -> None:
    """Two chains beside a sequence, with its parameters and tokens of their own."""
    state = SamplingState(2, V, eos_token_ids=[EOS], device="cpu")
    fields: dict[str, Any] = {"frequency_penalty": 1.5, "bad_words_ids": [[4, 9], [5, 8]]}
    set_slot(state, 1, params(temperature=0, **fields), 0, 1)
    chains = torch.tensor([[1, 2, 3, 4, 4], [1, 2, 3, 5, 5]], dtype=torch.int32)
    slots, positions = torch.ones(4, dtype=torch.int32), torch.tensor([3, 4, 3, 4])
    rows = SampleRows(slots, positions, chains, 5, torch.tensor([0, 0, 1, 1]))
    logits = torch.zeros(1, V).repeat(4, 1)
    logits[:, [4, 5, 9, 8]] = torch.tensor([3.0, 3.0, 4.0, 4.0])
    drawn = sample_fixed(logits, rows, chains[:, 3:], state, "full").tokens
    assert drawn.tolist() == [8, 8, 9, 9]
    logits = torch.zeros(1, V).repeat(4, 1)
    logits[:, [4, 5]] = torch.tensor([3.0, 3.1])
    drawn = sample_fixed(logits, rows, chains[:, 3:], state, "full").tokens
    assert drawn.tolist() == [5, 5, 4, 4]


@pytest.mark.gpu
def test_a_device_draws_what_the_cpu_draws() -> None:
    """Captured as a graph, with every parameter; equal but for near ties."""
    vocab_size, width = 151936, 4
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0, "frequency_penalty": 0.7},
        {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
        {"top_p": 0.8, "logit_bias": {5: 3.0}},
        {"min_p": 0.05, "bad_words_ids": [[2, 3], [7]]},
        {"allowed_token_ids": list(range(0, 9000, 3)), "top_k": 2000},
        {"min_tokens": 9, "repetition_penalty": 1.2},
    ]
    raw = normal(len(ways) * width, vocab_size, seed=2)
    drawn = []
    for device in ("cpu", "cuda"):
        state = SamplingState(len(ways), vocab_size, eos_token_ids=[EOS], device=device)
        for slot, way in enumerate(ways):
            set_slot(state, slot, params(**way), slot, 2)
        tokens = torch.arange(8, dtype=torch.int32, device=device).expand(len(ways), -1).contiguous()
        slots = torch.arange(len(ways), dtype=torch.int32, device=device).repeat_interleave(width)
        positions = torch.arange(2, 2 + width, dtype=torch.int32, device=device).repeat(len(ways))
        rows = SampleRows(slots, positions, tokens, 8)
        fed = tokens[:, 2 : 2 + width]
        logits = raw.to(device)
        if device == "cpu":
            drawn.append(sample_fixed(logits.clone(), rows, fed, state, "full"))
            continue
        sample_fixed(logits.clone(), rows, fed, state, "full")  # compiles
        graph = torch.cuda.CUDAGraph()
        work = logits.clone()
        with torch.cuda.graph(graph):
            output = sample_fixed(work, rows, fed, state, "full")
        work.copy_(logits)
        graph.replay()
        torch.cuda.synchronize()
        drawn.append(output)
    here, there = drawn
    same = here.tokens == there.tokens.cpu()
    assert (~same).sum() <= 1, (here.tokens, there.tokens)
    assert here.logprobs is not None and there.logprobs is not None
    torch.testing.assert_close(
        here.logprobs.logprobs[same], there.logprobs.logprobs.cpu()[same], rtol=0, atol=1e-4
    )
