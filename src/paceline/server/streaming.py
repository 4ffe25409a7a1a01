"""Running requests for a client that may leave, and server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from paceline.engine.frontend import RequestState
from paceline.engine.outputs import RequestOutput
from paceline.errors import RequestError
from paceline.observability.metrics import Metrics, RequestObserver
from paceline.server.engine_client import EngineClient
from paceline.server.errors import error_content, error_response
from paceline.server.responses import Writer

DONE = b"data: [DONE]\n\n"

_T = TypeVar("_T")


class ClientLeftError(Exception):
    """The client closed the connection; there is nobody to answer."""


async def unless_left(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Run ``work`` for as long as the client stays; cancel it when the client leaves.

    Args:
        receive: the request's channel, its body already read, so that the next message is the disconnect.
        work: what to do.

    Raises:
        ClientLeftError: the client left first.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeftError
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        # Waiting for the cancelled work means that its abort has reached the engine when this returns.
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def run(
    client: EngineClient, states: Sequence[RequestState], metrics: Metrics
) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Run the requests together; yield each increment with the index of its request.

    One failure ends all. Closing the iterator aborts what is unfinished.
    """
    if len(states) == 1:
        async with _closing(_observed(client, states[0], metrics)) as outputs:
            async for output in outputs:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue()

    async def pump(index: int, state: RequestState) -> None:
        try:
            async with _closing(_observed(client, state, metrics)) as outputs:
                async for output in outputs:
                    queue.put_nowait((index, output))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(index, state)) for index, state in enumerate(states)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _closing(iterator: AsyncIterator[_T]) -> contextlib.aclosing[AsyncGenerator[_T, None]]:
    """Closes a generator at the end of a block, whatever ends it: that is what aborts requests."""
    assert isinstance(iterator, AsyncGenerator)
    return contextlib.aclosing(iterator)


async def _observed(
    client: EngineClient, state: RequestState, metrics: Metrics
) -> AsyncIterator[RequestOutput]:
    observer = RequestObserver(metrics, state.request.params.n)
    failed = False
    try:
        async with _closing(client.stream(state)) as outputs:
            async for output in outputs:
                observer.see(output)
                yield output
    except Exception:
        failed = True
        raise
    finally:
        observer.close(failed=failed)


async def collect(client: EngineClient, states: Sequence[RequestState], metrics: Metrics) -> None:
    """Run the requests to their ends; the states then hold everything."""
    async with _closing(run(client, states, metrics)) as outputs:
        async for _ in outputs:
            pass


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


async def events(
    client: EngineClient, states: Sequence[RequestState], writer: Writer, metrics: Metrics
) -> AsyncGenerator[bytes, None]:
    """The events of a streamed response, ``[DONE]`` included."""
    begun = False
    try:
        async with _closing(run(client, states, metrics)) as outputs:
            async for index, output in outputs:
                if not begun:
                    begun = True
                    for chunk in writer.first_chunks():
                        yield event(chunk)
                for chunk in writer.chunks(index, output):
                    yield event(chunk)
    except RequestError as error:
        raise writer.refusal(error) from error
    for chunk in writer.last_chunks():
        yield event(chunk)
    yield DONE


class EventStream(Response):
    """Sends events as they come, and stops when the client leaves.

    The status line waits for the first event, so that a request refused by the engine gets its proper status.
    A failure after that is an event with the error envelope, which clients raise, followed by ``[DONE]``.
    """

    media_type = "text/event-stream"

    def __init__(self, source: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request (ASGI)."""
        with contextlib.suppress(ClientLeftError):
            await unless_left(receive, self._send_all(scope, receive, send))

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        async with contextlib.aclosing(self._source) as source:
            try:
                async for data in source:
                    if not begun:
                        begun = True
                        await self._begin(send)
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except Exception as error:
                if not begun:
                    await error_response(error)(scope, receive, send)
                    return
                data = event(error_content(error)[1]) + DONE
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, send: Send) -> None:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # reverse proxies must not collect events
        }
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
