"""``AsyncEngine`` and a process that dies: whoever waits is told, and the process is replaced."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from paceline import SamplingParams
from paceline.config import EngineConfig
from paceline.engine import client
from paceline.engine.client import AsyncEngine, FrontendOptions, _Stream
from paceline.engine.frontend import Frontend, RequestState
from paceline.engine.messages import EngineInfo, EngineRequest, RequestRefused, SequenceOutput
from paceline.errors import EngineDeadError, RequestError
from paceline.text import Tokenizer
from support.info import engine_info


def unstarted() -> AsyncEngine:
    """An engine without a process, which is as good as one whose process has just died."""
    engine = AsyncEngine(EngineConfig(), FrontendOptions(), "info")
    engine.info = info()
    engine.frontend = Frontend(engine.info, skip_tokenizer_init=True)
    return engine


def waiting(engine: AsyncEngine, tokenizer: Tokenizer | None = None, **params: Any) -> _Stream:
    """A request that waits for its results."""
    request = EngineRequest(request_id="r", prompt_token_ids=[1], params=SamplingParams(**params))
    stream = engine._streams["r"] = _Stream(RequestState(request, None, tokenizer))
    return stream


def info(**changes: Any) -> EngineInfo:
    """What a process says when it is ready."""
    return engine_info(max_model_len=256, **changes)


class Processes:
    """Plays the processes of an engine.

    Args:
        engine: started by this.
        outcomes: of its starts, in order: what it says when ready, or why it fails. Each process that comes
            up is dead on the first look.
        death: how it is seen.
    """

    def __init__(
        self, engine: AsyncEngine, outcomes: list[EngineInfo | Exception], death: Exception | None = None
    ) -> None:
        self.outcomes = outcomes
        self.death = death or EngineDeadError("the engine process ended with exit code -9")
        self.num_starts = 0
        engine._launch = self._launch  # type: ignore[method-assign]
        engine._receive = self._receive  # type: ignore[method-assign]

    async def _launch(self) -> EngineInfo:
        self.num_starts += 1
        outcome = self.outcomes[self.num_starts - 1]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _receive(self) -> list[object]:
        if self.num_starts == len(self.outcomes):
            await asyncio.Future()  # the last one lives
        raise self.death


async def until_read(engine: AsyncEngine, processes: Processes) -> None:
    """Read until the last process is up, or the engine stays down."""
    reader = asyncio.create_task(engine._read())
    while processes.num_starts < len(processes.outcomes) and not reader.done():
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    reader.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reader


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


@pytest.mark.parametrize(
    "death",
    [
        EngineDeadError("the engine process ended with exit code -9"),
        msgspec.DecodeError("not MessagePack"),
        zmq.ZMQError(zmq.EFAULT),
        OSError("cannot allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_ends_the_reading_ends_the_requests_and_restarts(death: Exception) -> None:
    async def run() -> None:
        engine = unstarted()
        stream = waiting(engine)
        starts = Processes(engine, [BrokenPipeError("it is gone"), OSError("no fork"), info()], death)
        await until_read(engine, starts)
        error = stream.queue.get_nowait()
        assert isinstance(error, EngineDeadError) and str(death) in str(error)
        await engine.close()

    asyncio.run(run())


def test_limits_are_those_of_the_new_process() -> None:
    """The K/V pool is measured anew when a process starts, and the GPU may have less to give."""

    async def run() -> None:
        engine = unstarted()
        assert engine.frontend.output_room(6) == 250
        await until_read(engine, Processes(engine, [info(num_blocks=4)]))
        assert engine.info.num_blocks == 4
        assert engine.frontend.output_room(6) == 58
        await engine.close()

    asyncio.run(run())


@pytest.mark.parametrize("age_s", [0.0, 10 * client.RESTART_WINDOW_S])
def test_so_many_restarts_in_a_window_and_no_more(monkeypatch: pytest.MonkeyPatch, age_s: float) -> None:
    """However long the first process has lived, and counted again when the window is over."""
    clock = age_s
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: clock))

    async def run() -> None:
        nonlocal clock
        engine = unstarted()
        starts = Processes(engine, [info() for _ in range(client.RESTART_LIMIT + 5)])
        await until_read(engine, starts)
        assert starts.num_starts == client.RESTART_LIMIT == 3
        clock += client.RESTART_WINDOW_S - 1
        await until_read(engine, starts)
        assert starts.num_starts == client.RESTART_LIMIT
        clock += 1
        await until_read(engine, starts)
        assert starts.num_starts == 2 * client.RESTART_LIMIT
        await engine.close()

    asyncio.run(run())
