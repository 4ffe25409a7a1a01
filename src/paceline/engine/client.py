"""The asynchronous engine: runs the engine in a process of its own and streams results from it.

``AsyncEngine`` owns the process, its supervision and the request states of the text side. It is what the
server uses, and what a Python program uses that wants streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from types import TracebackType

import msgspec
import zmq
import zmq.asyncio

from paceline.config import EngineConfig
from paceline.engine.frontend import Frontend, Prompt, RequestState
from paceline.engine.messages import (
    AbortRequests,
    EngineFailure,
    EngineInfo,
    EngineStats,
    OutputBatch,
    RequestRefused,
    ResetPrefixCache,
    SequenceOutput,
    Shutdown,
    StatsQuery,
    StopSequence,
    ToEngine,
)
from paceline.engine.outputs import RequestOutput
from paceline.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    PacelineError,
    RequestError,
    RequestFailedError,
)
from paceline.sampling.params import SamplingParams

logger = logging.getLogger(__name__)

RESTART_LIMIT = 3
"""Restarts within ``RESTART_WINDOW_S`` after which the engine stays down."""
RESTART_WINDOW_S = 300.0
SHUTDOWN_GRACE_S = 5.0
HEARTBEAT_S = 5.0
"""How often the engine is asked for a sign of life."""
SILENCE_S = 60.0
"""Without one for so long it is stuck. It answers between two steps, and a step may compile a kernel."""
NOBODY = 0
"""Query id of a question whose answer nobody waits for; others count from 1."""


class FrontendOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the text side; see :class:`Frontend`."""

    skip_tokenizer_init: bool = False
    generation_config: str = "auto"
    chat_template: str | None = None


def _plain_value(value: object) -> object:
    """Numbers and texts of a subclass, such as numpy's float64, as what they are to the engine."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to the engine")


def _reason(error: Exception) -> str:
    """Why the engine is down; the type says it where the message was not written for that."""
    return str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"


class _Stream:
    """One request's way back to its caller."""

    def __init__(self, state: RequestState) -> None:
        self.state = state
        self.queue: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()


class AsyncEngine:
    """An engine in its own process, from asyncio.

    Use :meth:`start`, then :meth:`generate` as often as wanted and concurrently, then :meth:`close`; or as
    ``async with await AsyncEngine.start(config) as engine``.
    """

    def __init__(self, config: EngineConfig, options: FrontendOptions, log_level: str) -> None:
        self._config = config
        self._options = options
        self._log_level = log_level
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-"))  # mode 0700: nobody else can connect
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._decoder: msgspec.msgpack.Decoder[OutputBatch] = msgspec.msgpack.Decoder(OutputBatch)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain_value)
        self._streams: dict[str, _Stream] = {}
        self._queries: dict[int, asyncio.Future[EngineStats]] = {}
        self._query_ids = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []
        self._heard_s = 0.0  # when the process last said anything
        self._launches = itertools.count(1)
        self._restarts: list[float] = []  # when each was tried
        self._dead: str | None = "it has not been started"
        self._closing = False
        self.frontend: Frontend
        self.info: EngineInfo

    @classmethod
    async def start(
        cls,
        config: EngineConfig | None = None,
        options: FrontendOptions | None = None,
        *,
        log_level: str = "info",
    ) -> AsyncEngine:
        """Start the process and wait until it is ready.

        Raises:
            ConfigError, CheckpointError: the engine cannot serve this.
            EngineDeadError: it failed while starting.
        """
        engine = cls(config or EngineConfig(), options or FrontendOptions(), log_level)
        try:
            engine.info = await engine._launch()
            engine.frontend = Frontend(engine.info, **msgspec.structs.asdict(engine._options))
        except BaseException:
            await engine.close()
            raise
        engine._tasks = [
            asyncio.create_task(engine._read(), name="paceline-engine-reader"),
            asyncio.create_task(engine._keep_asking(), name="paceline-engine-heartbeat"),
        ]
        return engine

    # ------------------------------------------------------------------ the process

    async def _launch(self) -> EngineInfo:
        address = f"ipc://{self._folder}/engine-{next(self._launches)}"
        socket = self._context.socket(zmq.PAIR)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(address)
        self._socket = socket
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paceline.engine.process", address, str(os.getpid())],
            stdin=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        start = {"config": self._config, "log_level": self._log_level}
        self._process.stdin.write(self._encoder_json(start))
        self._process.stdin.close()
        while True:
            for item in await self._receive():
                if isinstance(item, EngineInfo):
                    self._dead = None
                    return item
                if isinstance(item, EngineFailure):
                    kinds = {"config": ConfigError, "checkpoint": CheckpointError}
                    raise kinds.get(item.kind, EngineDeadError)(item.message)

    @staticmethod
    def _encoder_json(value: object) -> bytes:
        return msgspec.json.encode(value)

    async def _receive(self) -> Sequence[object]:
        """The next batch from the process.

        Raises:
            EngineDeadError: the process ended.
        """
        assert self._socket is not None and self._process is not None
        while not await self._socket.poll(1000):
            code = self._process.poll()
            if code is not None and not await self._socket.poll(0):
                raise EngineDeadError(f"the engine process ended with exit code {code}")
        raw = await self._socket.recv()
        self._heard_s = time.monotonic()
        return self._decoder.decode(raw).items

    async def _keep_asking(self) -> None:
        """Give the process something to answer now and then, so that silence means something."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._tell(StatsQuery(query_id=NOBODY))

    async def _read(self) -> None:
        """Hand results to their streams for as long as the engine lives, and restart it when it dies, or when
        what it says cannot be read.
        """
        while not self._closing:
            try:
                for item in await self._receive():
                    self._dispatch(item)
            except Exception as error:
                if not isinstance(error, EngineDeadError):
                    logger.exception("The results of the engine cannot be read.")
                if not await self._restart(_reason(error)):
                    return

    def _dispatch(self, item: object) -> None:
        if isinstance(item, SequenceOutput):
            self._deliver(item)
        elif isinstance(item, RequestRefused):
            self._end(item.request_id, RequestError(item.message, param=item.param, code=item.code))
        elif isinstance(item, EngineStats):
            future = self._queries.pop(item.query_id, None)
            if future is not None and not future.done():
                future.set_result(item)
        elif isinstance(item, EngineFailure):
            raise EngineDeadError(item.message)

    def _deliver(self, output: SequenceOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return  # aborted while this was on its way
        if output.error is not None:
            self._end(output.request_id, RequestFailedError(output.error))
            return
        try:
            update, stop = stream.state.take(output)
        except Exception as error:  # the text of one request must not end the reader of all
            logger.exception("The text of request %s could not be made.", output.request_id)
            self._end(
                output.request_id, RequestFailedError(f"{type(error).__name__} while decoding the output.")
            )
            return
        if update is None:
            return
        stream.queue.put_nowait(stream.state.output([update]))
        if stream.state.finished:
            self._streams.pop(output.request_id, None)
        if stop:
            self._tell(StopSequence(request_id=output.request_id, index=output.index))

    def _end(self, request_id: str, error: Exception) -> None:
        """End one request with an error, here and in the engine."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.queue.put_nowait(error)
            self._tell(AbortRequests(request_ids=[request_id]))

    async def _restart(self, reason: str) -> bool:
        """Fail what was in flight and start again. False when it died too often or the engine is closing."""
        self._dead = reason
        self._fail_all(EngineDeadError(f"The engine stopped: {reason}. The request was lost; send it again."))
        if self._closing:
            return False
        logger.error("The engine stopped: %s", reason)
        while True:
            now = time.monotonic()
            if sum(now - restart < RESTART_WINDOW_S for restart in self._restarts) >= RESTART_LIMIT:
                logger.error("The engine stopped too often; it stays down.")
                return False
            self._restarts.append(now)
            self._kill()
            try:
                self.info = self.frontend.info = await self._launch()
            except Exception as again:
                logger.error("The engine could not be restarted: %s", _reason(again))
                continue
            logger.warning("The engine is back.")
            return True

    def _fail_all(self, error: EngineDeadError) -> None:
        """End everything that waits for the engine."""
        for stream in self._streams.values():
            stream.queue.put_nowait(error)
        self._streams.clear()
        for future in self._queries.values():
            if not future.done():
                future.set_exception(error)
        self._queries.clear()

    def _alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None

    def _send(self, message: ToEngine) -> None:
        if self._socket is None or self._dead is not None:
            raise EngineDeadError(f"The engine is down: {self._dead or 'closed'}.")
        # A PAIR socket without a high-water mark never blocks: the returned future is already done. It holds
        # an error when the process has just died and the reader has not noticed yet.
        sent = self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        assert isinstance(sent, asyncio.Future)
        if sent.exception() is not None:
            raise EngineDeadError("The engine is down: its process does not listen.")

    def _tell(self, message: ToEngine) -> bool:
        """Send what need not arrive if the engine is down; whether it was sent."""
        try:
            self._send(message)
        except EngineDeadError:
            return False
        return True

    # ------------------------------------------------------------------ requests

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream a request: each output holds what is new. Closing the iterator aborts the request.

        Raises:
            RequestError: the request is refused.
            RequestFailedError: it failed alone.
            EngineDeadError: the engine is down or went down meanwhile.
        """
        ids, text = self.frontend.tokenize(prompt)
        state = self.frontend.prepare(
            request_id or f"req-{uuid.uuid4().hex}",
            ids,
            params or self.frontend.default_params(),
            prompt=text,
            priority=priority,
            cache_salt=cache_salt,
        )
        # Without aclosing, the inner generator, and so the abort, would be left to the garbage collector.
        async with contextlib.aclosing(self.stream(state)) as outputs:
            async for output in outputs:
                yield output

    async def stream(self, state: RequestState) -> AsyncGenerator[RequestOutput, None]:
        """Stream a prepared request. Closing the iterator aborts it."""
        request_id = state.request.request_id
        if request_id in self._streams:
            raise RequestError(f"Request id {request_id!r} is already in use.", param="request_id")
        self._send(state.request)
        stream = self._streams[request_id] = _Stream(state)
        try:
            while True:
                item = await stream.queue.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finished:
                    return
        finally:
            if self._streams.pop(request_id, None) is not None:
                self._tell(AbortRequests(request_ids=[request_id]))

    # ------------------------------------------------------------------ observation

    async def health(self) -> None:
        """Return if the engine lives and answers.

        Raises:
            EngineDeadError: it is down (it may be restarting), or has not said anything for ``SILENCE_S``.
        """
        if self._dead is not None:
            raise EngineDeadError(f"The engine is down: {self._dead}.")
        if self._process is not None and self._process.poll() is not None:
            raise EngineDeadError(f"the engine process ended with exit code {self._process.returncode}")
        silence_s = time.monotonic() - self._heard_s
        if silence_s > SILENCE_S:
            raise EngineDeadError(f"The engine has not answered for {silence_s:.0f} s.")

    async def stats(self) -> EngineStats:
        """A snapshot of the engine's counters.

        Raises:
            EngineDeadError: it is down.
        """
        query = next(self._query_ids)
        return await self._ask(query, StatsQuery(query_id=query))

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False (and nothing done) while requests run."""
        query = next(self._query_ids)
        return (await self._ask(query, ResetPrefixCache(query_id=query))).cache_reset

    async def _ask(self, query: int, message: StatsQuery | ResetPrefixCache) -> EngineStats:
        future: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._send(message)
        self._queries[query] = future
        try:
            return await future
        finally:
            self._queries.pop(query, None)

    async def close(self) -> None:
        """Stop the process and fail what is in flight. Safe to call twice."""
        if self._closing:
            return
        self._closing = True
        told = self._tell(Shutdown())  # if not, it is starting or down: nothing to wait for
        self._dead = "it was closed"
        self._fail_all(EngineDeadError("The engine was closed."))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        deadline = time.monotonic() + SHUTDOWN_GRACE_S
        while told and self._alive() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._kill()
        self._context.destroy(0)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
