"""Text of users and models reaches the terminal as it is: no markup, no emoji codes, no wrapping."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline.cli import local, main
from paceline.engine.outputs import CompletionOutput, RequestOutput
from paceline.errors import ConfigError, ContextLengthError
from paceline.sampling.params import SamplingParams

TEXT = "x = [/red] [bold]:key: " + "long " * 40 + "\\"


class _Echo:
    """An ``LLM`` that answers every prompt with ``TEXT``, in pieces that cut its codes apart or not."""

    def stream(self, prompt: Any, params: Any) -> Iterator[RequestOutput]:
        for piece in (TEXT[:30], TEXT[30:-1], TEXT[-1:]):
            yield RequestOutput("r", None, [1], [CompletionOutput(0, piece, [1])], finished=True)

    def generate(self, prompts: list[str], params: Any, use_tqdm: bool) -> list[RequestOutput]:
        return [
            RequestOutput("r", prompt, [1], [CompletionOutput(0, TEXT, [1])], finished=True)
            for prompt in prompts
        ]

    def make_sampling_params(self, **given: Any) -> SamplingParams:
        return SamplingParams()


def test_a_continuation_follows_its_prompt_unchanged(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_load", lambda engine, **options: _Echo())
    local.generate(None, [":x: [/] "], {}, "auto")  # type: ignore[arg-type]
    assert capsys.readouterr().out == f":x: [/] {TEXT}\n"


def test_a_chat_answer_is_printed_unchanged(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["hello", ""])
    monkeypatch.setattr(local, "_load", lambda engine, **options: _Echo())
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    local.chat(None, {}, None, None, "auto")  # type: ignore[arg-type]
    assert capsys.readouterr().out == f"{TEXT}\n"


class _Forgetful(_Echo):
    """An ``LLM`` whose context holds one question and its answer, which the limit cuts off."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def stream(self, prompt: Any, params: Any) -> Iterator[RequestOutput]:
        if len(prompt) > 2:
            raise ContextLengthError("the context is full")
        self.seen.append([message["content"] for message in prompt])
        completion = CompletionOutput(0, "answer", [1], finish_reason="length")
        yield RequestOutput("r", None, [1], [completion], finished=True)

    def make_sampling_params(self, **given: Any) -> SamplingParams:
        return SamplingParams(**given)


def _chat(
    lines: list[str], llm: _Forgetful, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Chat until the conversation ends; the lines that were not read."""
    rest = [*lines]
    monkeypatch.setattr(local, "_load", lambda engine, **options: llm)
    monkeypatch.setattr("builtins.input", lambda prompt: rest.pop(0))
    local.chat(None, sampling, "be brief", None, "auto")  # type: ignore[arg-type]
    return rest


def test_a_full_conversation_says_so_and_can_be_begun_anew(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = _Forgetful()
    rest = _chat(["one", "two", "/help", "/reset", "three", "/exit", "four"], llm, {}, monkeypatch)
    assert rest == ["four"]
    assert llm.seen == [["be brief", "one"], ["be brief", "three"]]
    printed = capsys.readouterr()
    assert printed.out == "answer\nanswer\n"
    assert printed.err.count("(cut off: the context is full") == 2
    assert "the context is full\n/reset begins a new conversation." in printed.err
    assert printed.err.count("or an empty line") == 2


def test_an_answer_cut_off_by_its_own_limit_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _chat(["one", ""], _Forgetful(), {"max_tokens": 1}, monkeypatch)
    assert "(cut off: max_tokens)" in capsys.readouterr().err


def test_the_demo_prints_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    local._show(_Echo(), ":x: ", SamplingParams())  # type: ignore[arg-type]
    assert capsys.readouterr().out == f":x: {TEXT}\n"


def test_an_error_is_one_line_whatever_it_quotes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ConfigError("no model at [/foo] :x:")

    monkeypatch.setattr(main, "app", fail)
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: no model at [/foo] :x:\n"
