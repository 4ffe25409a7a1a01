"""A client that leaves ends its work in the engine, whatever it asked for and however far it had come."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from support.server_cases import Api, ScriptedEngine

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def _scope(path: str) -> dict[str, Any]:
    """A POST request of JSON, as a server describes it."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("test", 80),
    }


async def _leave(api: Api, path: str, body: dict[str, Any], after_steps: int) -> list[dict[str, Any]]:
    """Call the app as a server would, with a client that leaves when the engine has run ``after_steps``
    steps."""
    gone = asyncio.Event()
    forever = asyncio.Event()
    sent: list[dict[str, Any]] = []
    steps = 0

    async def hold(step: int) -> None:
        nonlocal steps
        steps += 1
        if steps > after_steps:
            gone.set()
            await forever.wait()  # the engine makes no more progress: only an abort ends this

    api.engine.hold = hold
    messages = [{"type": "http.request", "body": msgspec.json.encode(body), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await asyncio.wait_for(api.app(_scope(path), receive, send), 20)
    return sent


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        (CHAT, {"messages": HI}, 1),
        (CHAT, {"messages": HI, "n": 3}, 1),
        (COMPLETIONS, {"prompt": ["a", "b", "c"], "max_tokens": 64}, 3),
    ],
)
def test_the_engine_is_told(
    api: Api,
    scripted: ScriptedEngine,
    path: str,
    body: dict[str, Any],
    count: int,
    stream: bool,
    steps: int,
) -> None:
    sent = asyncio.run(_leave(api, path, {**body, "stream": stream}, steps))
    assert len(scripted.requests) == count
    assert sorted(scripted.aborted) == sorted(request.request_id for request in scripted.requests)
    if stream and steps == 0:
        assert sent == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize"])
def test_who_leaves_while_sending_is_no_error(
    api: Api, scripted: ScriptedEngine, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    messages: list[dict[str, Any]] = [
        {"type": "http.disconnect"},
        {"type": "http.request", "body": b'{"prompt": ', "more_body": True},
    ]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return messages.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(api.app(_scope(path), receive, send))
    assert sent[0]["status"] == 499 and not scripted.requests and not caplog.records


def test_aborts_are_counted(api: Api) -> None:
    asyncio.run(_leave(api, CHAT, {"messages": HI, "n": 2, "stream": True}, 4))
    text = api.get("/metrics").text
    assert 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="mini"} 2.0' in text
