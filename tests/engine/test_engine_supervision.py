"""``AsyncEngine`` and a process that dies: whoever waits is told, and the process is replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from paceline import SamplingParams
from paceline.config import EngineConfig
from paceline.engine.client import AsyncEngine, FrontendOptions, _Stream
from paceline.engine.frontend import RequestState
from paceline.engine.messages import EngineRequest, RequestRefused, SequenceOutput
from paceline.errors import EngineDeadError, RequestError
from paceline.text import Tokenizer


def unstarted() -> AsyncEngine:
    """An engine without a process, which is as good as one whose process has just died."""
    return AsyncEngine(EngineConfig(), FrontendOptions(), "info")


def waiting(engine: AsyncEngine, tokenizer: Tokenizer | None = None, **params: Any) -> _Stream:
    """A request that waits for its results."""
    request = EngineRequest(request_id="r", prompt_token_ids=[1], params=SamplingParams(**params))
    stream = engine._streams["r"] = _Stream(RequestState(request, None, tokenizer))
    return stream


def test_a_request_that_ends_when_the_process_dies_is_still_told() -> None:
    async def run() -> None:
        engine = unstarted()
        stream = waiting(engine)
        engine._dispatch(RequestRefused(request_id="r", message="no", param="prompt"))
        error = stream.queue.get_nowait()
        assert isinstance(error, RequestError) and error.param == "prompt"
        await engine.close()

    asyncio.run(run())


def test_a_stop_string_found_when_the_process_dies_ends_the_request(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        engine = unstarted()
        stream = waiting(engine, tokenizer, stop="END")
        tokens = tokenizer.encode("the END")
        engine._dispatch(SequenceOutput(request_id="r", index=0, token_ids=tokens))
        output = stream.queue.get_nowait()
        assert not isinstance(output, Exception) and output.finished
        assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("the ", "END")
        await engine.close()

    asyncio.run(run())
