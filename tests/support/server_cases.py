"""What the server tests share: an engine that plays a script, and a way to call the app without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec

from paceline.engine.frontend import Frontend, RequestState
from paceline.engine.messages import EngineRequest, EngineStats, SequenceOutput
from paceline.engine.outputs import RequestOutput
from paceline.errors import EngineDeadError
from paceline.sampling.logprobs import Logprob
from paceline.server.app import create_app
from paceline.server.options import ServeOptions
from support.info import engine_info

MAX_MODEL_LEN = 256
REPLY = "Hello 🙂, naïve world.\nEND of it"


class ScriptedEngine:
    """Answers every request with ``reply``, one token per step, then the end-of-sequence token.

    It plays the part of the engine process only: prompts, text and stop strings are the real frontend's.

    Attributes:
        requests: what arrived.
        aborted: ids of requests whose stream was closed before its end.
        dead: answer as an engine that is down.
        busy: in a step that does not end: nothing is answered.
        fail_after: raise ``failure`` after this many steps.
        hold: called before every step; awaiting in it stalls the engine.
    """

    def __init__(self, folder: Path, reply: str = REPLY) -> None:
        info = engine_info(
            model="org/mini",
            folder=str(folder),
            vocab_size=512,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=[439],
        )
        self.frontend = Frontend(info)
        self.reply = reply
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.dead = False
        self.busy = False
        self.fail_after: int | None = None
        self.failure: Exception = EngineDeadError("The engine stopped: test.")
        self.hold: Callable[[int], Any] | None = None

    async def stream(self, state: RequestState) -> AsyncIterator[RequestOutput]:
        request = state.request
        self.requests.append(request)
        try:
            for step, output in enumerate(self._script(request)):
                if self.fail_after is not None and step >= self.fail_after:
                    raise self.failure
                if self.hold is not None:
                    await self.hold(step)
                update, _ = state.take(output)
                if update is not None:
                    yield state.output([update])
                    await asyncio.sleep(0)
        finally:
            if not state.finished:
                self.aborted.append(request.request_id)

    def _script(self, request: EngineRequest) -> list[SequenceOutput]:
        tokenizer = self.frontend.tokenizer
        assert tokenizer is not None
        params = request.params
        ids = tokenizer.encode(self.reply + tokenizer.special_tokens["eos_token"])
        limit = params.max_tokens or len(ids)
        outputs = []
        for position, token in enumerate(ids[:limit]):
            last = position == min(limit, len(ids)) - 1
            reason = None if not last else "stop" if len(ids) <= limit else "length"
            for index in range(params.n):
                output = SequenceOutput(
                    request_id=request.request_id,
                    index=index,
                    token_ids=[token],
                    finish_reason=reason,  # type: ignore[arg-type]
                    num_cached_tokens=4,
                    first_scheduled_s=0.0,
                )
                if params.logprobs is not None:
                    output.logprobs = [_entry(token, params.logprobs)]
                if params.prompt_logprobs is not None and position == 0 and index == 0:
                    prompt = request.prompt_token_ids
                    output.prompt_logprobs = [
                        None if i == 0 else _entry(t, params.prompt_logprobs) for i, t in enumerate(prompt)
                    ]
                outputs.append(output)
        return outputs

    async def health(self) -> None:
        if self.dead:
            raise EngineDeadError("The engine is down: test.")

    async def stats(self) -> EngineStats:
        await self.health()
        if self.busy:
            await asyncio.Future()
        return EngineStats(
            num_running=2, num_waiting=1, kv_cache_usage=0.25, prefix_queries=10, prefix_hits=4
        )


def _entry(token: int, top: int) -> dict[int, Logprob]:
    """The chosen token as the second most likely, as when sampling."""
    others = [i for i in range(40, 40 + top + 1) if i != token][:top]
    values = {token: Logprob(-1.5, 2)}
    values.update({other: Logprob(-1.0 - n, 1 + n + (n > 0)) for n, other in enumerate(others)})
    return values


class Api:
    """Calls the app in-process. Errors of the app become responses, as a real server makes them."""

    def __init__(self, engine: ScriptedEngine, options: ServeOptions | None = None) -> None:
        self.engine = engine
        self.app = create_app(engine, options or ServeOptions(served_model_names=("mini",)))

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **kwargs)

        return asyncio.run(call())

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.request("GET", path, **kwargs)

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.request("POST", path, json=body)

    def ok(self, path: str, **body: Any) -> Any:
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def chat(self, **body: Any) -> Any:
        return self.ok("/v1/chat/completions", **{"messages": [{"role": "user", "content": "hi"}], **body})

    def complete(self, **body: Any) -> Any:
        return self.ok("/v1/completions", **{"prompt": "hi", "max_tokens": 64, **body})

    def stream(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream, checked for the form, without ``[DONE]``."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events_in(response.content)

    def refused(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """The error of a refused request, checked for the envelope."""
        response = self.post(path, body)
        assert response.status_code == status, response.text
        return envelope(response)


def envelope(response: httpx.Response) -> dict[str, Any]:
    """The error in a response, checked for its form and size."""
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 2500
    content = response.json()
    assert set(content) == {"error"}
    error: dict[str, Any] = content["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert error["type"] in ("invalid_request_error", "server_error")
    return error


def events_in(content: bytes) -> list[Any]:
    """Parse a stream that must end with ``[DONE]``."""
    assert content.endswith(b"data: [DONE]\n\n")
    parts = content.split(b"\n\n")[:-2]
    assert all(part.startswith(b"data: ") for part in parts)
    return [msgspec.json.decode(part.removeprefix(b"data: ")) for part in parts]
