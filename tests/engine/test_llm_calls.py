"""``LLM`` called wrongly, and calls that overlap."""

from __future__ import annotations

import gc
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.config import BUNDLED_MODEL
from paceline.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    RequestError,
    RequestFailedError,
)
from paceline.runtime.plan import PendingStep, SpanResult, StepPlan

SHORT = SamplingParams(temperature=0.0, max_tokens=4)
LONG = SamplingParams(temperature=1.0, seed=7, max_tokens=40, ignore_eos=True)
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def engine() -> LLM:
    return LLM(device="cpu", max_num_seqs=8, num_blocks=600, max_model_len=1024, threads=1)


@pytest.fixture
def llm(engine: LLM) -> Iterator[LLM]:
    """The engine; whatever a test does to it, nothing may be left behind."""
    yield engine
    gc.collect()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    engine._core.check()


@pytest.mark.parametrize(
    "prompts",
    [
        *(None, 5, 1.5, b"abc", bytearray(b"abc"), {1, 2}, iter([1, 2]), np.array([1, 2]), torch.tensor([1])),
        *([1, "a"], [None], [[]], "", [[[1]]], [True, False], [b"ab"], [np.array([1, 2])]),
        *(
            {"promt": "x"},
            {"prompt": None},
            {"prompt_token_ids": 5},
            {"prompt": "x", "prompt_token_ids": [1]},
        ),
        *([-1], [7680], [2**31], [2**63], [2**70], "\ud800"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_prompts_of_another_kind_are_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts, SHORT, use_tqdm=False)
    assert caught.value.param in ("prompt", "prompts") or "surrogate" in str(caught.value)


@pytest.mark.parametrize(
    "params", [{"temperature": 1}, [{"temperature": 1}], "hot", 5, [None], [], [SHORT] * 2]
)
def test_params_of_another_kind_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="sampling_params"):
        llm.generate(["x"], params, use_tqdm=False)


@pytest.mark.parametrize(
    "priority", [3, "12", [1], [0, "1"], [0, None], [0, 1.5], [0, float("nan")], [0, 2**80], [0, True]]
)
def test_priorities_of_another_kind_are_refused(llm: LLM, priority: Any) -> None:
    with pytest.raises(RequestError, match="priority"):
        llm.generate(["x", "y"], SHORT, use_tqdm=False, priority=priority)


@pytest.mark.parametrize(
    "messages", [None, "Hi", USER, 5, [], [[]], [5], ["Hi"], [USER, [USER]], [[USER], []], [[USER], "Hi"]]
)
def test_conversations_of_another_kind_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        llm.chat(messages, SHORT, use_tqdm=False)
    assert caught.value.param == "messages"


def test_template_variables_must_be_a_map(llm: LLM) -> None:
    with pytest.raises(RequestError, match="chat_template_kwargs"):
        llm.chat([USER], SHORT, use_tqdm=False, chat_template_kwargs=5)  # type: ignore[arg-type]


def test_one_refused_prompt_refuses_the_call_and_the_next_call_works(llm: LLM) -> None:
    prompts: list[Any] = ["fine", [7680]]
    with pytest.raises(RequestError):
        llm.generate(prompts, SHORT, use_tqdm=False)
    assert len(llm.generate(["fine", "too"], SHORT, use_tqdm=False)) == 2


def test_lists_may_be_tuples(llm: LLM) -> None:
    params = SamplingParams(stop=("a", "b"), stop_token_ids=(1,), bad_words=("c",), max_tokens=4)  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids, params.bad_words) == (["a", "b"], [1], ["c"])
    assert len(llm.generate((1, 2, 3), params, use_tqdm=False)) == 1
    assert len(llm.generate(((1, 2, 3), "x"), params, use_tqdm=False)) == 2


def test_a_text_that_cannot_fit_is_refused_unread(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = llm._frontend.tokenizer
    assert tokenizer is not None
    with pytest.raises(ContextLengthError, match=r"maximum context length is 1024 tokens.*has 1100 tokens"):
        llm.generate([300] * 1100, SHORT, use_tqdm=False)
    monkeypatch.setattr(tokenizer, "_encode", lambda *args: pytest.fail("it was tokenised"))
    with pytest.raises(ContextLengthError, match="maximum context length"):
        llm.generate("ab " * 1_000_000, SHORT, use_tqdm=False)
    with pytest.raises(ContextLengthError, match="maximum context length"):
        llm.chat([{"role": "user", "content": "<b> " * 1_000_000}], SHORT, use_tqdm=False)


def test_the_longest_texts_that_fit_are_read(llm: LLM) -> None:
    """The bound on characters never refuses what fits in tokens."""
    tokenizer = llm._frontend.tokenizer
    assert tokenizer is not None and tokenizer.max_token_chars is not None
    longest = max((tokenizer.token_text(i) for i in range(llm.info.vocab_size)), key=len)
    assert len(longest) <= tokenizer.max_token_chars
    ids, _ = llm._frontend.tokenize(longest * 1000)
    assert len(ids) >= 1000


# ---------------------------------------------------------------------- calls that overlap


def tokens(llm: LLM, prompt: str) -> list[int]:
    return llm.generate(prompt, LONG, use_tqdm=False)[0].outputs[0].token_ids


@pytest.fixture
def alone(llm: LLM) -> dict[str, list[int]]:
    return {prompt: tokens(llm, prompt) for prompt in ("def f(x):", "class A:", "import os", "return")}


def test_a_stream_goes_on_around_other_calls(llm: LLM, alone: dict[str, list[int]]) -> None:
    got: list[int] = []
    for output in llm.stream("def f(x):", LONG):
        got += output.outputs[0].token_ids
        if len(got) < 5:
            assert tokens(llm, "class A:") == alone["class A:"]
    assert got == alone["def f(x):"]


def test_streams_may_alternate(llm: LLM, alone: dict[str, list[int]]) -> None:
    streams = {prompt: llm.stream(prompt, LONG) for prompt in alone}
    got: dict[str, list[int]] = {prompt: [] for prompt in alone}
    while streams:
        for prompt, stream in list(streams.items()):
            output = next(stream, None)
            if output is None:
                del streams[prompt]
            else:
                got[prompt] += output.outputs[0].token_ids
    assert got == alone


def test_threads_may_share_an_engine(llm: LLM, alone: dict[str, list[int]]) -> None:
    got: dict[str, list[int]] = {}
    threads = [threading.Thread(target=lambda p=p: got.update({p: tokens(llm, p)})) for p in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == alone


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_call_leaves_nothing_behind(
    llm: LLM, alone: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Ctrl-C while the device works, where nearly all time is spent: the next call finds the engine whole."""
    launch = llm._core.runner.launch
    for steps in range(4):
        left = iter([False] * steps)

        def interrupted(plan: StepPlan, left: Iterator[bool] = left) -> PendingStep:
            pending = launch(plan)
            if next(left, True):
                result = pending.result
                calls = iter([raising])
                monkeypatch.setattr(pending, "result", lambda: next(calls, result)())
            return pending

        def raising() -> list[SpanResult]:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(llm._core.runner, "launch", interrupted)
            with pytest.raises(error):
                llm.generate([[300 + steps, *range(300, 400)], [400, 500]], LONG, use_tqdm=False)
        llm._core.check()
        assert llm.stats().kv_cache_usage == 0.0
    assert tokens(llm, "return") == alone["return"]


@pytest.mark.parametrize("place", ["launch", "result"])
def test_an_interrupted_call_leaves_other_streams_alive(
    llm: LLM, alone: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A stream is open while another call is interrupted: where the device was only waited for, it goes on
    with the same tokens; where a step was cut while it was launched, it ends with an error.
    """
    stream = llm.stream("return", LONG)
    first = next(stream)
    launch = llm._core.runner.launch
    calls = iter(range(99))

    def interrupted(plan: StepPlan) -> PendingStep:
        if place == "launch" and next(calls) == 1:
            raise KeyboardInterrupt
        pending = launch(plan)
        if place == "result" and next(calls) == 1:
            result, seen = pending.result, iter([1])
            monkeypatch.setattr(pending, "result", lambda: raising() if next(seen, 0) else result())
        return pending

    def raising() -> list[SpanResult]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm._core.runner, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[300, *range(300, 400)], [400, 500]], LONG, use_tqdm=False)
    if place == "launch":
        with pytest.raises(RequestFailedError):
            list(stream)
    else:
        assert [t for update in (first, *stream) for t in update.outputs[0].token_ids] == alone["return"]
    llm._core.check()
    assert llm.stats().kv_cache_usage == 0.0
    assert tokens(llm, "return") == alone["return"]


# ---------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat_template": 5}, "chat_template must be"),
        ({"model": str(BUNDLED_MODEL), "revision": "v2"}, "local folder"),
        ({"revision": "v2"}, "local folder"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=message):
        LLM(num_blocks=64, **options)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_end_token_outside_the_vocabulary_is_refused(tmp_path: Path, file: str) -> None:
    """It could never be drawn, and masking it for ``min_tokens`` would write outside the row."""
    folder = shutil.copytree(BUNDLED_MODEL, tmp_path / "model")
    settings = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**settings, "eos_token_id": [7666, 99999]}))
    with pytest.raises(CheckpointError, match=r"eos_token_id names \[99999\]"):
        LLM(str(folder), num_blocks=64, speculative_config={})
