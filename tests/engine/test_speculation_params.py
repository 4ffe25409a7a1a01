"""Every sampling parameter with drafts: what plain decoding gives, to the last logprob."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.engine.core import EngineCore
from paceline.engine.frontend import Frontend, RequestState
from paceline.engine.messages import SequenceOutput
from paceline.engine.outputs import BONUS, PLAIN
from paceline.proving.drive import RoundRecorder
from paceline.proving.gates import nothing_held, same_outputs
from paceline.sampling.params import SamplingParams
from support.engines import complete, golden_cases, golden_core, golden_meta, golden_prompts

DRAFTER = "dspark_tiny_b7"


@cache
def engines() -> tuple[EngineCore, EngineCore]:
    """One without drafts, one with, the second with a step in flight."""
    return (
        golden_core("qwen3_tiny", max_logprobs=400),
        golden_core("qwen3_tiny", drafter=DRAFTER, lookahead=1, max_logprobs=400),
    )


def both(
    prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[list[SequenceOutput]]:
    """Run on both engines, demand the same, return it."""
    plain, core = engines()
    before = core.stats().num_accepted_tokens
    plain.reset_prefix_cache()
    core.reset_prefix_cache()
    expected, got = complete(plain, prompts, params), complete(core, prompts, params)
    assert not same_outputs(expected, got)
    assert not nothing_held(core)
    assert core.stats().num_accepted_tokens > before or all(len(o.token_ids) < 3 for g in got for o in g)
    return got


def case() -> tuple[list[int], list[int]]:
    """A prompt whose first rounds are accepted whole, and its greedy text."""
    found, meta = golden_cases(DRAFTER)[2], golden_meta(DRAFTER)["cases"][2]
    assert [entry["accepted"] for entry in meta["trace"][:2]] == [7, 7]
    return found["input_ids"].tolist(), found["trace_output_ids"].tolist()


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **fields})


def cut_after(tokens: list[int], stops: set[int], min_tokens: int = 0) -> list[int]:
    """``tokens`` up to the first stop that counts."""
    for i, token in enumerate(tokens):
        if token in stops and i + 1 > min_tokens:
            return tokens[: i + 1]
    return tokens


@pytest.mark.parametrize("offset", range(18))
def test_a_stop_token_at_every_offset_of_the_first_rounds(offset: int) -> None:
    prompt, text = case()
    ((output,),) = both([prompt], greedy(stop_token_ids=[text[offset]], logprobs=1))
    assert output.token_ids == cut_after(text, {text[offset]})
    assert (output.finish_reason, output.stop_reason) == ("stop", text[offset])
    assert output.num_accepted_tokens <= len(output.token_ids)


@pytest.mark.parametrize("length", range(1, 19))
def test_every_length_limit(length: int) -> None:
    prompt, text = case()
    _, core = engines()
    rows = core.stats().num_rows
    ((output,),) = both([prompt], greedy(max_tokens=length, logprobs=0))
    assert output.token_ids == text[:length] and output.finish_reason == "length"
    # Rows past the limit would be thrown away: none are planned beyond the token that reaches it.
    assert core.stats().num_rows - rows <= len(prompt) + length + 7


@pytest.mark.parametrize("limit", [5, 6, 7])
def test_a_stop_before_a_limit_in_the_same_run_wins(limit: int) -> None:
    prompt, text = case()
    ((output,),) = both([prompt], greedy(max_tokens=limit, stop_token_ids=[text[4]]))
    assert output.token_ids == text[:5] and output.finish_reason == "stop"


def test_min_tokens_outlives_stops_inside_a_run() -> None:
    """Stops are not drawn before the limit, so the text changes there, in both the same way."""
    prompt, text = case()
    for min_tokens in (2, 4, 5, 9):
        ((output,),) = both([prompt], greedy(stop_token_ids=[text[4]], min_tokens=min_tokens))
        assert text[4] not in output.token_ids[: min_tokens - 1]
        assert len(output.token_ids) > min_tokens or output.finish_reason == "length"


def test_the_end_of_sequence_token_unless_ignored() -> None:
    prompt, text = case()
    plain, core = engines()
    for engine in (plain, core):
        engine.info.eos_token_ids.append(text[9])
    try:
        params = [greedy(ignore_eos=False), greedy(ignore_eos=True)]
        (ended,), (whole,) = both([prompt, prompt], params)
    finally:
        for engine in (plain, core):
            engine.info.eos_token_ids.pop()
    assert ended.token_ids == cut_after(text, {text[9]}) and ended.stop_reason is None
    assert whole.token_ids == text[:24]


@pytest.mark.parametrize("top", [0, 5, -1])
def test_logprobs_of_every_token(top: int) -> None:
    outputs = both(golden_prompts(6), greedy(logprobs=top, prompt_logprobs=max(top, 0)))
    for (output,) in outputs:
        assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
        assert all(token in entry for token, entry in zip(output.token_ids, output.logprobs, strict=True))


def test_many_samples_of_one_prompt() -> None:
    prompt, _ = case()
    (outputs,) = both([prompt], SamplingParams(n=5, temperature=0.8, seed=4, max_tokens=24, ignore_eos=True))
    assert len({tuple(output.token_ids) for output in outputs}) == 5


def test_banned_and_allowed_tokens() -> None:
    prompt, text = case()
    ((banned,),) = both([prompt], greedy(bad_words_ids=[[text[3]], text[5:7]]))
    assert text[3] not in banned.token_ids
    assert banned.token_ids[:3] == text[:3]
    allowed = sorted({*text[:6], 50, 60})
    ((chosen,),) = both([prompt], greedy(allowed_token_ids=allowed))
    assert set(chosen.token_ids) <= set(allowed) and chosen.token_ids[:6] == text[:6]


def random_params(rng: random.Random, number: int) -> SamplingParams:
    """Any combination of what a request may ask for."""

    def maybe(value: Any, default: Any, chance: float = 0.4) -> Any:
        return value if rng.random() < chance else default

    return SamplingParams(
        temperature=rng.choice([0.0, 0.5, 1.0, 1.3]),
        top_k=maybe(rng.randrange(1, 60), 0),
        top_p=maybe(rng.uniform(0.3, 1.0), 1.0),
        min_p=maybe(rng.uniform(0.0, 0.1), 0.0),
        repetition_penalty=maybe(rng.uniform(0.8, 1.5), 1.0),
        presence_penalty=maybe(rng.uniform(-1, 1), 0.0),
        frequency_penalty=maybe(rng.uniform(-1, 1), 0.0),
        logit_bias=maybe({rng.randrange(320): rng.uniform(-5, 5) for _ in range(4)}, None),
        bad_words_ids=maybe([[rng.randrange(320)], [rng.randrange(320), rng.randrange(320)]], []),
        allowed_token_ids=maybe(sorted(rng.sample(range(320), 200)), None, 0.15),
        stop_token_ids=maybe(rng.sample(range(320), 12), []),
        min_tokens=maybe(rng.randrange(8), 0),
        max_tokens=rng.randrange(8, 28),
        ignore_eos=rng.random() < 0.5,
        logprobs=maybe(rng.randrange(4), None),
        prompt_logprobs=maybe(rng.randrange(3), None, 0.2),
        n=maybe(2, 1, 0.2),
        seed=number,
    )


def test_any_combination() -> None:
    rng = random.Random(9)
    both(golden_prompts(48, seed=4), [random_params(rng, i) for i in range(48)])


# ---------------------------------------------------------------------- text


def run_text(core: EngineCore, frontend: Frontend, prompt: list[int], params: SamplingParams) -> RequestState:
    """One request through the text side, which tells the engine when it finds a stop string."""
    state = frontend.prepare("text", prompt, params)
    core.add(state.request)
    while core.has_work:
        for output in core.step():
            _, stop = state.take(output)
            if stop:
                core.stop_sequence("text", output.index)
    assert state.finished
    return state


@pytest.fixture(scope="module")
def frontend(text_folder: Path) -> Frontend:
    """The text side with a tokenizer that has a text for every id of the golden model."""
    plain, _ = engines()
    return Frontend(msgspec.structs.replace(plain.info, folder=str(text_folder)))


def test_a_stop_string_at_every_offset(frontend: Frontend) -> None:
    plain, core = engines()
    prompt, _ = case()
    params = greedy(logprobs=2, max_tokens=18)
    whole = run_text(core, frontend, prompt, params).outputs[0]
    assert max(whole.origins) == 7 and BONUS in whole.origins and whole.origins[0] == PLAIN
    text = whole.text
    for at in range(len(text) - 1):
        stop = text[at : at + 2]
        chosen = msgspec.structs.replace(params, stop=[stop])
        want = run_text(plain, frontend, prompt, chosen).outputs[0]
        got = run_text(core, frontend, prompt, chosen).outputs[0]
        assert (got.text, got.token_ids, got.finish_reason, got.stop_reason) == (
            want.text,
            want.token_ids,
            "stop",
            stop,
        )
        assert got.text == text[: text.index(stop)]
        assert got.logprobs is not None and want.logprobs is not None
        assert len(got.logprobs) == len(got.token_ids) == len(got.origins)
        assert got.cumulative_logprob == pytest.approx(want.cumulative_logprob, abs=1e-4)
    assert not nothing_held(core)


def test_metrics_of_a_request_are_its_rounds(frontend: Frontend) -> None:
    core = golden_core("qwen3_tiny", drafter=DRAFTER)
    recorder = RoundRecorder.on(core)
    prompt, _ = case()
    state = run_text(core, frontend, prompt, greedy(max_tokens=24))
    metrics = state.metrics
    assert metrics.num_drafts == len(recorder.rounds) == core.stats().num_drafts
    assert metrics.num_draft_tokens == sum(len(item.drafts) for item in recorder.rounds)
    stats = core.stats()
    assert metrics.num_accepted_tokens == stats.num_accepted_tokens
    assert metrics.accepted_per_position == stats.accepted_per_position[: len(metrics.accepted_per_position)]
    assert sum(origin > 0 for origin in state.outputs[0].origins) == stats.num_accepted_tokens
    assert sum(n * c for n, c in enumerate(stats.accept_lengths, start=1)) == 23
