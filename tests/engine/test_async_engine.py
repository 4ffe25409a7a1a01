"""``AsyncEngine`` misused: one request fails, the process and everybody else go on."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from paceline import SamplingParams
from paceline.config import EngineConfig
from paceline.engine import client
from paceline.engine.client import AsyncEngine
from paceline.engine.messages import SequenceOutput, StatsQuery
from paceline.engine.outputs import RequestOutput
from paceline.errors import EngineDeadError, RequestError, RequestFailedError

CONFIG = EngineConfig(device="cpu", max_num_seqs=8, num_blocks=40, max_model_len=1024, threads=1)
SHORT = SamplingParams(temperature=0.0, max_tokens=4)
LONG = SamplingParams(temperature=0.0, max_tokens=600, ignore_eos=True)


async def text(outputs: AsyncIterator[RequestOutput]) -> str:
    return "".join([output.outputs[0].text async for output in outputs])


async def refused(
    engine: AsyncEngine, prompt: Any = "x", params: Any = SHORT, **options: Any
) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await text(engine.generate(prompt, params, **options))
    return caught.value


async def idle(engine: AsyncEngine) -> bool:
    stats = await engine.stats()
    return (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)


async def wrong_types_are_refused_by_name(engine: AsyncEngine) -> None:
    """What the engine process could not decode must not get there: it would end the process."""
    for name, value in (
        *(("priority", value) for value in ("high", 1.5, None, 2**63, 2**70, True)),
        *(("cache_salt", value) for value in (5, None, b"x", "\ud800")),
        *(("request_id", value) for value in (5, b"x", "\ud800")),
    ):
        assert (await refused(engine, **{name: value})).param == name
    for prompt in (5, None, b"abc", [1, "a"], np.array([1, 2]), [-1], [2**64]):
        assert (await refused(engine, prompt)).param == "prompt"
    assert (await refused(engine, params={"temperature": 1})).param == "sampling_params"


async def numbers_of_numpy_are_numbers(engine: AsyncEngine) -> None:
    params = SamplingParams(temperature=np.float64(0.0), max_tokens=4)
    assert await text(engine.generate("def f(x):", params)) == await text(engine.generate("def f(x):", SHORT))


async def refusals_of_the_engine_name_the_field(engine: AsyncEngine) -> None:
    """Only the engine checks these; the answer must be as precise as the text side's."""
    error = await refused(engine, params=SamplingParams(min_tokens=2000, max_tokens=None))
    assert error.param == "min_tokens"
    error = await refused(engine, params=SamplingParams(max_tokens=700))
    assert (error.param, error.code) == ("max_tokens", "context_length_exceeded")
    assert "maximum context length" in str(error)


async def closing_a_stream_aborts_at_once(engine: AsyncEngine) -> None:
    for _ in range(5):
        outputs = engine.generate("a", LONG, request_id="again")
        await anext(outputs)
        await outputs.aclose()
    assert await text(engine.generate("a", SHORT, request_id="again"))


async def one_id_serves_one_request(engine: AsyncEngine) -> None:
    both = [text(engine.generate("a", SHORT, request_id="same")) for _ in range(2)]
    first, second = await asyncio.gather(*both, return_exceptions=True)
    assert isinstance(first, str)
    assert isinstance(second, RequestError) and second.param == "request_id"


async def cancelled_tasks_leave_nothing(engine: AsyncEngine) -> None:
    tasks = [asyncio.create_task(text(engine.generate("a", LONG))) for _ in range(20)]
    while (await engine.stats()).num_running == 0:
        await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def a_failure_inside_is_no_refusal(engine: AsyncEngine) -> None:
    """The sender did nothing wrong, so it must not read as a bad request."""
    outputs = engine.generate("a", LONG, request_id="unlucky")
    await anext(outputs)
    failed = SequenceOutput(
        request_id="unlucky", index=0, token_ids=[], finish_reason="error", error="RuntimeError: boom"
    )
    engine._dispatch(failed)
    with pytest.raises(RequestFailedError, match="boom"):
        await text(outputs)


CASES: list[Callable[[AsyncEngine], Awaitable[None]]] = [
    wrong_types_are_refused_by_name,
    numbers_of_numpy_are_numbers,
    refusals_of_the_engine_name_the_field,
    closing_a_stream_aborts_at_once,
    one_id_serves_one_request,
    cancelled_tasks_leave_nothing,
    a_failure_inside_is_no_refusal,
]


def test_misuse_fails_alone() -> None:
    """All cases on one engine process, each beside a neighbour that must not notice."""

    async def run() -> None:
        async with await AsyncEngine.start(CONFIG) as engine:
            assert engine._process is not None
            pid = engine._process.pid
            want = await text(engine.generate("def f(x):", SHORT))
            for case in CASES:
                neighbour = asyncio.create_task(text(engine.generate("def f(x):", SHORT)))
                await case(engine)
                assert await neighbour == want, case.__name__
                assert engine._process.pid == pid, case.__name__
                assert await idle(engine), case.__name__

    asyncio.run(run())


def test_an_engine_that_lives_but_is_stuck_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(client, "SILENCE_S", 1.0)

    async def run() -> None:
        async with await AsyncEngine.start(CONFIG) as engine:
            process = engine._process
            assert process is not None
            await asyncio.sleep(1.5)  # idle for longer: not stuck, as long as it answers
            await engine.health()
            process.send_signal(signal.SIGSTOP)
            try:
                with pytest.raises(EngineDeadError, match="has not answered for"):
                    while True:
                        await engine.health()
                        await asyncio.sleep(0.05)
            finally:
                process.send_signal(signal.SIGCONT)
            while not await healthy(engine):
                await asyncio.sleep(0.05)
            assert await text(engine.generate("a", SHORT))

    asyncio.run(asyncio.wait_for(run(), 60))


async def healthy(engine: AsyncEngine) -> bool:
    try:
        await engine.health()
    except EngineDeadError:
        return False
    return True


def test_closing_ends_everything_that_waits() -> None:
    async def run() -> None:
        engine = await AsyncEngine.start(CONFIG)
        waiting = [asyncio.create_task(text(engine.generate("a", LONG))) for _ in range(3)]
        await asyncio.sleep(0.1)
        unanswered = asyncio.create_task(engine._ask(-1, StatsQuery(query_id=-2)))
        await asyncio.sleep(0)
        await asyncio.gather(engine.close(), engine.close())
        results = await asyncio.wait_for(asyncio.gather(*waiting, unanswered, return_exceptions=True), 10)
        assert all(isinstance(result, EngineDeadError) for result in results)
        await engine.close()
        for call in (engine.stats, engine.health, engine.reset_prefix_cache):
            with pytest.raises(EngineDeadError, match="closed"):
                await call()
        with pytest.raises(EngineDeadError, match="closed"):
            await text(engine.generate("x", SHORT))

    asyncio.run(run())


def test_a_message_to_a_process_that_has_just_died_is_refused_quietly() -> None:
    """Between the death and the moment the reader notices it, no request may hang and no future be lost."""

    async def run() -> list[dict[str, Any]]:
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        async with await AsyncEngine.start(CONFIG) as engine:
            assert engine._process is not None
            engine._process.kill()
            engine._process.wait()
            for _ in range(20):
                with pytest.raises(EngineDeadError):
                    await asyncio.wait_for(engine.stats(), 20)
                with pytest.raises(EngineDeadError):
                    await asyncio.wait_for(text(engine.generate("x", SHORT)), 20)
                if engine._process.poll() is None:
                    break  # it is being restarted
            gc.collect()
            await asyncio.sleep(0)
        return complaints

    assert asyncio.run(run()) == []


def test_an_engine_whose_parent_died_early_does_not_stay() -> None:
    """Killed between starting the process and the process asking to be told: nobody else would end it."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    start = msgspec.json.encode({"config": CONFIG})
    command = [sys.executable, "-m", "paceline.engine.process", "ipc:///nowhere/engine", str(gone.pid)]
    ended = subprocess.run(command, input=start, capture_output=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert b"Engine ready" not in ended.stderr
