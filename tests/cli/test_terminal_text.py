"""Text of users and models reaches the terminal as it is: no markup, no emoji codes, no wrapping."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline.cli import local, main
from paceline.engine.outputs import CompletionOutput, RequestOutput
from paceline.errors import ConfigError
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
