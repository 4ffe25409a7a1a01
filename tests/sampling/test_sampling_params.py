"""The validator that every entry point shares: what it lets pass, what it refuses, and how it says so."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import RequestError
from paceline.sampling.params import MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_STRINGS, SamplingParams, validate
from paceline.sampling.seeds import mix64, sequence_seed

V = 1000
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 128, "temperature": 0, "top_k": -1, "top_p": 1, "min_p": 1, "seed": -(2**63)},
        {"temperature": 100.0, "top_k": 2**31 - 1, "top_p": 1e-9, "seed": 2**63 - 1},
        {"presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 0.01},
        {"max_tokens": None, "min_tokens": 5},
        {"max_tokens": 5, "min_tokens": 5, "stop": "x", "stop_token_ids": [0, V - 1]},
        {"logprobs": 20, "prompt_logprobs": 0},
        {"logit_bias": {0: -100, V - 1: 100.0}, "allowed_token_ids": list(range(V))},
        {"bad_words": ["no"], "bad_words_ids": [[1], [2, 3]]},
        {"stop_token_ids": None, "stop": None, "bad_words": None},
    ],
)
def test_accepts(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    validate(params, vocab_size=V)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert again == params
    validate(again, vocab_size=V)


def each(field: str, *values: Any) -> list[tuple[str, Any]]:
    return [(field, value) for value in values]


REFUSED: list[tuple[str, Any]] = [
    *each("n", 0, -1, 129, 2**31, 2**63, 1.5, True, "2", None),
    *each("temperature", -0.1, 100.1, NAN, INF, -INF, 10**400, "hot", None, True),
    *each("top_k", -2, 2**31, 2**63, 1.0, NAN, True),
    *each("top_p", 0, -0.5, 1.0001, NAN, INF),
    *each("min_p", -0.1, 1.1, NAN),
    *each("presence_penalty", -2.1, 2.1, NAN, INF),
    *each("frequency_penalty", -2.1, 2.1, NAN, INF),
    *each("repetition_penalty", 0, -1, 101, NAN, INF),
    *each("seed", 2**63, -(2**63) - 1, 10**5000, 1.0, "7"),
    *each("max_tokens", 0, -1, 2**31, 2**63, 1.5),
    *each("min_tokens", -1, 17, 2**31, 0.5, None),  # max_tokens is 16
    *each("stop", [""], ["x"] * (MAX_STOP_STRINGS + 1), ["x" * 1025], [1], 3, ""),
    *each("stop_token_ids", [-1], [V], [2**63], [1.0], [0] * 1025, "12"),
    *each("logprobs", -2, 21, -1, 2**31, True, 1.0),
    *each("prompt_logprobs", -2, 21, 2**63),
    *each("logit_bias", {V: 1.0}, {-1: 1.0}, {2**63: 1.0}, {0: 101}, {0: NAN}, {"a": 1}, [1]),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
    *each("allowed_token_ids", [], [V], [-1], [0] * (V + 1), 5),
    *each("bad_words", [""], ["x" * 257], ["x"] * (MAX_BAD_WORDS + 1), "word", [3]),
    *each("bad_words_ids", [[V]], [[]], [[0] * 65], [[0]] * 1025, [3], 3),
    *each("ignore_eos", 1, "yes", None),
    *[("include_stop_str_in_output", 0), ("detokenize", 1), ("skip_special_tokens", None)],
]


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=[f"{f}-{i}" for i, (f, _) in enumerate(REFUSED)])
def test_refuses_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        validate(SamplingParams(**{field: value}), vocab_size=V, max_logprobs=20)  # type: ignore[arg-type]
    name = "bad_words" if field == "bad_words_ids" else field
    assert caught.value.param == name
    assert name in caught.value.message
    assert len(caught.value.message) < 400  # the input is not echoed back whole


def test_message_says_given_allowed_and_remedy() -> None:
    with pytest.raises(RequestError) as caught:
        validate(SamplingParams(temperature=NAN), vocab_size=V)
    message = caught.value.message
    assert "nan" in message
    assert "from 0 to 100" in message
    assert "greedy" in message


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="detokenize"):
        validate(SamplingParams(stop=["x"], detokenize=False), vocab_size=V)


def test_logprob_limits_are_the_servers() -> None:
    whole = SamplingParams(logprobs=-1)
    validate(whole, vocab_size=V, max_logprobs=-1)
    validate(whole, vocab_size=V, max_logprobs=V)
    with pytest.raises(RequestError, match="max_logprobs"):
        validate(whole, vocab_size=V, max_logprobs=V - 1)


def test_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=3)  # type: ignore[call-arg]


def test_one_stop_string_becomes_a_list_and_minus_one_seed_is_no_seed() -> None:
    params = SamplingParams(stop="x", seed=-1)
    assert params.stop_strings == ["x"]
    assert params.seed is None
    assert msgspec.structs.replace(params, stop="y").stop_strings == ["y"]


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(st.sampled_from(sorted(SamplingParams.__struct_fields__)), json_like)
def test_any_value_is_accepted_or_refused_but_never_crashes(field: str, value: object) -> None:
    try:
        validate(SamplingParams(**{field: value}), vocab_size=V)  # type: ignore[arg-type]
    except RequestError as refusal:
        assert refusal.param is not None


def test_sequence_seeds() -> None:
    assert sequence_seed(5, 0) == 5  # asking for more samples does not change the first
    seeds = {sequence_seed(request, index) for request in range(-50, 50) for index in range(50)}
    assert len(seeds) == 100 * 50  # nor does a sample equal a neighbouring request's
    assert all(-(2**63) <= s < 2**63 for s in seeds)
    assert sequence_seed(2**63 - 1, 3) != sequence_seed(-(2**63), 3)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 63))
def test_mix64_is_a_bijection_that_moves_many_bits(x: int, bit: int) -> None:
    changed = (mix64(x) ^ mix64(x ^ (1 << bit))) & (2**64 - 1)
    assert changed.bit_count() >= 8  # 32 on average; fewer has a chance of 1e-10 per pair
