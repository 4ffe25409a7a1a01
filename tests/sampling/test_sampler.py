"""Each parameter has its effect, alone and with others, and nothing but a row's own inputs has any."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_harness import GARBAGE, Case, draw, draw_tokens, reference_logits, reference_scores, set_slot
from torch import Tensor

from paceline.sampling import sampler
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import SampleRows, process
from paceline.sampling.sampler import sample
from paceline.sampling.state import SamplingState

EOS = 0


def normal(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**fields)


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, **fields)


# --- single parameters ----------------------------------------------------------------------------


def test_greedy_takes_the_largest_and_the_lowest_id_on_a_tie() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0], [-5.0, -1.0, -1.0, -2.0]])
    assert draw_tokens(logits, [Case(greedy())] * 3) == [1, 0, 1]


def test_almost_zero_temperature_is_greedy() -> None:
    logits = torch.tensor([[1.0, 1.0 + 1e-6, 0.0]]).repeat(200, 1)
    cold = [Case(params(temperature=9e-6), seed=i) for i in range(200)]
    assert set(draw_tokens(logits, cold)) == {1}
    warm = [Case(params(temperature=1e-3), seed=i) for i in range(200)]
    assert set(draw_tokens(logits, warm)) == {0, 1}


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}])
def test_filters_that_leave_only_the_most_likely(fields: dict[str, Any]) -> None:
    logits = normal(50, 100)
    cases = [Case(params(**fields), seed=i) for i in range(50)]
    assert draw_tokens(logits, cases) == logits.argmax(-1).tolist()


def test_top_k_draws_from_exactly_k() -> None:
    logits = normal(1, 50, scale=0.1).repeat(2000, 1)
    drawn = set(draw_tokens(logits, [Case(params(top_k=7), seed=i) for i in range(2000)]))
    assert drawn == set(logits[0].topk(7).indices.tolist())


def test_top_k_beyond_the_vocabulary_is_no_filter() -> None:
    logits = normal(20, 50)
    filtered = [Case(params(top_k=51), seed=i) for i in range(20)]
    assert draw_tokens(logits, filtered) == draw_tokens(logits, [Case(params(), seed=i) for i in range(20)])


def test_ties_at_the_edge_of_top_k_go_to_the_lowest_ids() -> None:
    logits = torch.zeros(3000, 40)
    logits[:, 30] = 1.0
    drawn = set(draw_tokens(logits, [Case(params(top_k=4), seed=i) for i in range(3000)]))
    assert drawn == {0, 1, 2, 30}


def test_top_p_keeps_the_token_that_crosses() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(2000, 1)
    for top_p, expected in [
        (0.49, {0}),
        (0.51, {0, 1}),
        (0.79, {0, 1}),
        (0.81, {0, 1, 2}),
        (0.96, {0, 1, 2, 3}),
    ]:
        assert set(draw_tokens(logits, [Case(params(top_p=top_p), seed=i) for i in range(2000)])) == expected


def test_top_p_is_not_rounded_up() -> None:
    """Eight of ten equal tokens have a mass of 0.8; the fp32 number next to 0.8 would keep nine."""
    logits = torch.zeros(2000, 10)
    assert set(draw_tokens(logits, [Case(params(top_p=0.8), seed=i) for i in range(2000)])) == set(range(8))


def test_min_p_is_relative_to_the_most_likely() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().repeat(2000, 1)
    assert set(draw_tokens(logits, [Case(params(min_p=0.45), seed=i) for i in range(2000)])) == {0, 1, 2}


def test_seed_position_and_nothing_else_choose_the_draw() -> None:
    logits = torch.zeros(1, 1000)
    case = Case(params(), tokens=[1, 2, 3], seed=5)
    token = draw_tokens(logits, [case])[0]
    assert draw_tokens(logits, [Case(params(), tokens=[4, 5, 6], seed=5)])[0] == token
    assert draw_tokens(logits, [Case(params(), tokens=[1, 2, 3], seed=5, prompt_len=1)])[0] == token
    by_seed = draw_tokens(logits.repeat(64, 1), [Case(params(), tokens=[1, 2, 3], seed=i) for i in range(64)])
    by_position = draw_tokens(
        logits.repeat(64, 1), [Case(params(), tokens=[1] * (i + 1), seed=5) for i in range(64)]
    )
    assert by_seed[5] == by_position[2] == token
    assert len(set(by_seed)) > 55  # 64 draws from 1,000: 62 distinct on average
    assert len(set(by_position)) > 55


def test_logit_bias() -> None:
    logits = normal(3, 50)
    assert draw_tokens(logits, [Case(greedy(logit_bias={7: 100.0, 8: 50.0}))] * 3) == [7, 7, 7]
    best = logits.argmax(-1).tolist()
    banned = draw_tokens(logits, [Case(greedy(logit_bias={token: -100.0})) for token in best])
    assert banned == logits.topk(2).indices[:, 1].tolist()


def test_allowed_token_ids() -> None:
    logits = normal(300, 50)
    allowed = [3, 14, 15]
    drawn = draw_tokens(
        logits, [Case(params(allowed_token_ids=allowed, temperature=9.0), seed=i) for i in range(300)]
    )
    assert set(drawn) == set(allowed)


def test_bad_words() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 9.0]])
    single = Case(greedy(bad_words_ids=[[3]]))
    assert draw_tokens(logits, [single]) == [2]
    pair = greedy(bad_words_ids=[[1, 2, 3], [2]])
    assert draw_tokens(logits, [Case(pair, tokens=[0, 1, 2], prompt_len=1)]) == [1]  # 1 2 would become 1 2 3
    assert draw_tokens(logits, [Case(pair, tokens=[0, 1, 1], prompt_len=1)]) == [3]
    assert draw_tokens(logits, [Case(pair, tokens=[1, 2], prompt_len=0)]) == [1]
    assert draw_tokens(logits, [Case(pair, tokens=[0, 1, 2], prompt_len=2)]) == [3]  # not begun in the prompt
    assert draw_tokens(logits, [Case(pair, tokens=[2], prompt_len=0)]) == [3]  # longer than what there is


def test_min_tokens_holds_back_eos_and_stop_ids() -> None:
    logits = torch.tensor([[9.0, 8.0, 7.0, 1.0]])
    p = greedy(min_tokens=2, stop_token_ids=[1])
    drawn = [
        draw_tokens(logits, [Case(p, tokens=[3] * (4 + n), prompt_len=4)], eos=[EOS])[0] for n in range(4)
    ]
    assert drawn == [2, 2, 0, 0]


def test_repetition_penalty_counts_prompt_and_output() -> None:
    logits = torch.tensor([[4.0, 3.9, 3.0, -1.0]])
    p = greedy(repetition_penalty=2.0)
    assert draw_tokens(logits, [Case(p, tokens=[0], prompt_len=1)]) == [1]
    assert draw_tokens(logits, [Case(p, tokens=[0, 1], prompt_len=1)]) == [2]
    negative = torch.tensor([[-1.0, -1.5, -9.0]])
    assert draw_tokens(negative, [Case(p, tokens=[0])]) == [1]  # a negative logit is multiplied


def test_presence_and_frequency_penalty_count_the_output_only() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.9, 0.0]])
    presence, frequency = greedy(presence_penalty=1.5), greedy(frequency_penalty=0.6)
    prompt = [0, 0, 0]
    assert draw_tokens(logits, [Case(presence, tokens=prompt)]) == [0]
    assert draw_tokens(logits, [Case(frequency, tokens=prompt)]) == [0]
    assert draw_tokens(logits, [Case(presence, tokens=[*prompt, 0], prompt_len=3)]) == [1]
    assert draw_tokens(logits, [Case(frequency, tokens=[*prompt, 0], prompt_len=3)]) == [0]
    assert draw_tokens(logits, [Case(frequency, tokens=[*prompt, 0, 0], prompt_len=3)]) == [1]
    assert draw_tokens(logits, [Case(presence, tokens=[*prompt, 0, 0], prompt_len=3)]) == [1]


# --- all of them, against the reference -----------------------------------------------------------

V = 40
token = st.integers(0, V - 1)
any_params = st.builds(
    params,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 3, 39, 40]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.4]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.3, -1.1]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.5, 0.6]),
    min_tokens=st.sampled_from([0, 0, 1, 4]),
    stop_token_ids=st.lists(token, max_size=3),
    logit_bias=st.none()
    | st.dictionaries(st.integers(0, 8), st.sampled_from([-100.0, -3.0, 2.0]), max_size=3),
    allowed_token_ids=st.none() | st.none() | st.lists(token, min_size=1, max_size=20),
    bad_words_ids=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=4),
)


@st.composite
def any_case(draw_: st.DrawFn) -> Case:
    tokens = draw_(st.lists(st.integers(0, 5), min_size=1, max_size=12))
    prompt_len = draw_(st.integers(0, len(tokens)))
    return Case(draw_(any_params), tokens, prompt_len, seed=draw_(st.integers(-(2**63), 2**63 - 1)))


@settings(max_examples=150, deadline=None)
@given(cases=st.lists(any_case(), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_every_combination_agrees_with_the_reference(cases: list[Case], seed: int) -> None:
    logits = normal(len(cases), V, seed=seed)
    drawn = draw_tokens(logits, cases, eos=[EOS])
    for row, case in enumerate(cases):
        if reference_logits(logits[row], case, eos=[EOS]).max() < -1e29:  # all suppressed: any allowed one
            assert drawn[row] in (case.params.allowed_token_ids or [])
            continue
        scores = reference_scores(logits[row], case, eos=[EOS])
        # the reference computes in float64: on a near tie, either may be right
        assert scores[drawn[row]] >= scores.max() - 1e-4, (case, drawn[row], int(scores.argmax()))


@settings(max_examples=100, deadline=None)
@given(cases=st.lists(any_case(), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_processed_logits_agree_with_the_reference(cases: list[Case], seed: int) -> None:
    logits = normal(len(cases), V, seed=seed)
    state = SamplingState(len(cases), V, eos_token_ids=[EOS], device="cpu")
    tokens = torch.full((len(cases), 16), GARBAGE, dtype=torch.int32)
    for slot, case in enumerate(cases):
        tokens[slot, : len(case.tokens)] = torch.tensor(case.tokens)
        assert case.prompt_len is not None
        set_slot(state, slot, case.params, case.seed, case.prompt_len)
    positions = torch.tensor([len(case.tokens) - 1 for case in cases])
    got = logits.clone()
    slots = list(range(len(cases)))
    process(got, SampleRows(torch.tensor(slots), positions, tokens, 12), state, state.features(slots))
    for row, case in enumerate(cases):
        expected = reference_logits(logits[row], case, eos=[EOS])
        np.testing.assert_allclose(got[row].double().numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"min_p": 0.01},
        {"top_p": 0.7, "temperature": 0.2},  # found within the first look
        {"top_p": 0.95, "temperature": 2.0},  # needs the whole row in order
        {"top_p": 0.9, "min_p": 0.001},
        {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
        {"top_k": 1500, "top_p": 0.95, "temperature": 2.0},
        {"top_k": 1024},
        {"top_k": 1025},
    ],
)
def test_large_vocabulary_agrees_with_the_reference(fields: dict[str, Any]) -> None:
    logits = normal(40, 4000, seed=3)
    cases = [Case(params(**fields), seed=i) for i in range(40)]
    for row, drawn in enumerate(draw_tokens(logits, cases)):
        scores = reference_scores(logits[row], cases[row])
        assert scores[drawn] >= scores.max() - 1e-4


# --- nothing else has an effect -------------------------------------------------------------------

VARIETY = [
    greedy(),
    params(),
    params(temperature=0.5, min_p=0.05),
    params(top_k=5),
    params(top_k=50, top_p=0.9, temperature=0.6),
    params(top_p=0.8),
    params(top_p=0.97, temperature=2.0),
    params(top_k=1100, temperature=3.0),
    params(repetition_penalty=1.3, logprobs=2),
    greedy(presence_penalty=0.7, frequency_penalty=0.3, logprobs=5),
    params(logit_bias={5: 3.0, 9: -3.0}, top_k=9),
    params(allowed_token_ids=[2, 4, 6, 8, 10]),
    params(bad_words_ids=[[4], [1, 7], [3, 1, 2]], logprobs=0),
    params(min_tokens=8, stop_token_ids=[3, 4, 5], top_p=0.9),
]


def mixed_cases() -> list[Case]:
    generator = np.random.default_rng(0)
    return [
        Case(p, generator.integers(0, 9, 3 + i % 7).tolist(), prompt_len=2, seed=1000 + i)
        for i, p in enumerate(VARIETY * 3)
    ]


@pytest.mark.parametrize("vocab_size", [1501, 7680])
def test_a_row_does_not_depend_on_its_batch(vocab_size: int) -> None:
    """Order, neighbours, slots, batch size and array widths: bit for bit the same tokens and logprobs."""
    cases = mixed_cases()
    logits = normal(len(cases), vocab_size, seed=1)
    whole = draw(logits, cases, eos=[EOS])
    assert whole.logprobs is not None
    place = {int(row): i for i, row in enumerate(whole.logprobs.rows)}
    generator = np.random.default_rng(1)
    for size in (1, 2, 5, 13, len(cases)):
        picked = generator.permutation(len(cases))[:size]
        slots = generator.permutation(60)[:size].tolist()
        some = draw(logits[picked], [cases[i] for i in picked], eos=[EOS], slots=slots, spare=size)
        assert some.tokens.tolist() == whole.tokens[picked].tolist()
        if some.logprobs is None:
            continue
        for i, row in enumerate(some.logprobs.rows):
            j, k = place[int(picked[row])], some.logprobs.token_ids.shape[1]
            assert torch.equal(some.logprobs.token_ids[i], whole.logprobs.token_ids[j, :k])
            assert torch.equal(some.logprobs.logprobs[i], whole.logprobs.logprobs[j, :k])
            assert some.logprobs.ranks[i] == whole.logprobs.ranks[j]


def toy_model(tokens: list[int], vocab_size: int) -> Tensor:
    """Logits [V] that are a function of the last three tokens."""
    seed = sum((token + 1) * 7919**i for i, token in enumerate(tokens[-3:]))
    return normal(vocab_size, seed=seed % 2**31, scale=2.0)


@pytest.mark.parametrize("p", VARIETY, ids=range(len(VARIETY)))
def test_a_verify_span_draws_what_plain_decoding_draws(p: SamplingParams) -> None:
    """Rows of one slot at consecutive positions over tentative tokens, some of them wrong."""
    prompt, num_vocab, length = [3, 1, 2], 1200, 27
    plain = list(prompt)
    while len(plain) < length:
        plain += draw_tokens(
            toy_model(plain, num_vocab)[None], [Case(p, plain, len(prompt), seed=9)], eos=[EOS]
        )

    state = SamplingState(2, num_vocab, eos_token_ids=[EOS], device="cpu")
    set_slot(state, 1, p, 9, len(prompt))
    generator = np.random.default_rng(2)
    known = list(prompt)
    while len(known) < length:
        drafts = [t if generator.random() < 0.8 else 11 for t in plain[len(known) : len(known) + 4]]
        fed = known + drafts
        span = range(len(known) - 1, len(fed))
        tokens = torch.full((2, 40), GARBAGE, dtype=torch.int32)
        tokens[1, : len(fed)] = torch.tensor(fed)
        rows = SampleRows(torch.ones(len(span), dtype=torch.int32), torch.tensor(span), tokens, len(fed))
        logits = torch.stack([toy_model(fed[: i + 1], num_vocab) for i in span])
        drawn = sample(logits, rows, state, state.features([1] * len(span))).tokens.tolist()
        for i, draft in enumerate([*drafts, None]):
            known.append(drawn[i])
            if drawn[i] != draft:
                break
    assert known[:length] == plain


def test_a_slot_taken_over_keeps_nothing_of_its_last_tenant() -> None:
    logits = normal(1, 50)
    state = SamplingState(1, 50, eos_token_ids=[EOS], device="cpu")
    everything = params(
        top_k=3, min_p=0.1, min_tokens=9, logit_bias={1: 50.0}, allowed_token_ids=[1], bad_words_ids=[[2]],
        repetition_penalty=2.0, logprobs=3,
    )  # fmt: skip
    rows = SampleRows(torch.tensor([0]), torch.tensor([0]), torch.ones(1, 4, dtype=torch.int32), 1)
    set_slot(state, 0, everything, 1, 1)
    assert sample(logits.clone(), rows, state, state.features([0])).tokens.tolist() == [1]
    set_slot(state, 0, greedy(), 1, 1)
    again = sample(logits.clone(), rows, state, state.features([0]))
    set_slot(state, 0, greedy(logit_bias={7: 100.0}, allowed_token_ids=[6, 7]), 1, 1)
    assert sample(logits.clone(), rows, state, state.features([0])).tokens.tolist() == [7]
    assert again.tokens.tolist() == logits.argmax(-1).tolist()
    assert again.logprobs is None


# --- bad numbers stay where they are --------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("p", VARIETY, ids=range(len(VARIETY)))
def test_broken_logits_give_a_token_in_range_and_leave_others_alone(value: float, p: SamplingParams) -> None:
    logits = normal(3, 1200)
    cases = [Case(p, tokens=[1, 2], prompt_len=1, seed=i) for i in range(3)]
    sound = draw_tokens(logits, cases, eos=[EOS])
    logits[1] = value
    broken = draw_tokens(logits, cases, eos=[EOS])
    assert [broken[0], broken[2]] == [sound[0], sound[2]]
    assert 0 <= broken[1] < 1200


def test_when_every_allowed_token_is_suppressed_one_of_them_is_drawn() -> None:
    logits = normal(2, 30)
    fields: dict[str, Any] = {"allowed_token_ids": [4, 9], "min_tokens": 5, "bad_words_ids": [[9]]}
    for p in (
        greedy(**fields),
        params(temperature=1e-5, repetition_penalty=100.0, **fields),
        params(top_p=0.9, **fields),
    ):
        assert set(draw_tokens(logits, [Case(p, tokens=[4, 9])] * 2, eos=[4])) <= {4, 9}


# --- what is not asked for is not done ------------------------------------------------------------


def test_greedy_rows_cost_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("noise was made")

    monkeypatch.setattr(sampler, "gumbel", fail)
    monkeypatch.setattr(sampler, "ordered_top", fail)
    draw(normal(4, 50), [Case(greedy(top_k=5, top_p=0.5, min_p=0.1))] * 4)
    with pytest.raises(AssertionError, match="noise"):
        draw(normal(4, 50), [*[Case(greedy())] * 3, Case(params())])


def test_features_name_the_rows_that_need_them() -> None:
    state = SamplingState(4, 50, device="cpu")
    set_slot(state, 0, greedy(), 0, 1)
    set_slot(state, 1, params(top_k=9, logprobs=2), 0, 1)
    set_slot(state, 3, greedy(repetition_penalty=1.1, logprobs=-1), 0, 1)
    features = state.features([0, 0, 1, 3, 1])
    assert features.greedy.tolist() == [0, 1, 3]
    assert features.short.tolist() == [2, 4]
    assert features.short_k == 9
    assert features.penalty.tolist() == [3]
    assert features.logprobs.tolist() == [2, 3, 4]
    assert features.num_top == 50
    assert not any(len(rows) for rows in (features.plain, features.nucleus, features.large, features.bias))
