"""The routes. Each reads a body, asks the text side for engine requests, runs them and has a writer shape the
result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from paceline import __version__
from paceline.engine.frontend import WITHOUT_TOKENIZER, Frontend, RequestState
from paceline.errors import EngineDeadError, RequestError, shown
from paceline.observability.metrics import CONTENT_TYPE, Metrics
from paceline.server.engine_client import EngineClient
from paceline.server.errors import HTTPError, json_response
from paceline.server.options import ServeOptions
from paceline.server.requests import chat_state, completion_states, in_thread_if_long, render_chat
from paceline.server.responses import ChatWriter, CompletionWriter, Json, Writer
from paceline.server.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
)
from paceline.server.streaming import ClientLeftError, EventStream, collect, events, unless_left

STATS_TIMEOUT_S = 0.25
"""How long /metrics waits for the engine, which answers between two steps. Then its last answer stands."""

_Body = TypeVar("_Body", bound=msgspec.Struct)


@dataclass
class Service:
    """What the routes share."""

    client: EngineClient
    options: ServeOptions
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def names(self) -> Sequence[str]:
        """Names the model is served under."""
        return self.options.served_model_names or (self.frontend.info.model,)

    @property
    def frontend(self) -> Frontend:
        """The text side."""
        return self.client.frontend

    def model_name(self, asked: str | None) -> str:
        """The name to answer under.

        Raises:
            HTTPError: no such model.
        """
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            raise HTTPError(
                404,
                f"The model {asked[:200]!r} does not exist. Available: {', '.join(self.names)}.",
                param="model",
                code="model_not_found",
            )
        return asked

    def model_card(self, name: str) -> Json:
        """An entry of ``/v1/models``."""
        info = self.frontend.info
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "paceline",
            "root": info.model,
            "parent": None,
            "max_model_len": info.max_model_len,
        }


async def read_body(request: Request, limit: int) -> bytes:
    """The body of a request.

    Raises:
        HTTPError: it is larger than ``limit`` bytes, or not declared as JSON.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPError(415, f"The content type must be application/json, got {kind[:100]!r}.")
    too_large = HTTPError(413, f"The body is larger than {limit} bytes: send less.", code="request_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
    return b"".join(parts)


def build_router(service: Service) -> APIRouter:
    """All routes of the API."""
    router = APIRouter()
    _add_generation(router, service)
    _add_models(router, service)
    _add_tokens(router, service)
    _add_operation(router, service)
    return router


def _add_generation(router: APIRouter, service: Service) -> None:
    async def read(request: Request, kind: type[_Body]) -> _Body:
        return parse(await read_body(request, service.options.max_body_bytes), kind)

    async def answer(
        request: Request, stream: bool | None, states: Sequence[RequestState], writer: Writer
    ) -> Response:
        await service.client.health()
        if stream:
            return EventStream(events(service.client, states, writer, service.metrics))
        try:
            await unless_left(request.receive, collect(service.client, states, service.metrics))
        except ClientLeftError:
            return Response(status_code=499)  # nobody reads it; the access log does
        except RequestError as error:
            raise writer.refusal(error) from error
        return json_response(writer.response())

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await read(request, ChatCompletionRequest)
        name = service.model_name(body.model)
        state = await chat_state(service.frontend, body)
        return await answer(request, body.stream, [state], ChatWriter(body, state, service.frontend, name))

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read(request, CompletionRequest)
        name = service.model_name(body.model)
        states = await completion_states(service.frontend, body, service.options.max_sequences)
        return await answer(
            request, body.stream, states, CompletionWriter(body, states, service.frontend, name)
        )


def _add_models(router: APIRouter, service: Service) -> None:
    @router.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [service.model_card(name) for name in service.names]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return json_response(service.model_card(service.model_name(name)))


def _add_tokens(router: APIRouter, service: Service) -> None:
    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = parse(await read_body(request, service.options.max_body_bytes), TokenizeRequest)
        service.model_name(body.model)
        frontend, tokenizer = service.frontend, service.frontend.tokenizer
        if tokenizer is None:
            raise RequestError(WITHOUT_TOKENIZER)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("Give either prompt or messages.", param="prompt")
        if body.prompt is not None:
            text, special = body.prompt, body.add_special_tokens is not False
            ids = await in_thread_if_long(
                lambda: tokenizer.encode(text, add_special_tokens=special), len(text)
            )
        else:
            assert body.messages is not None
            ids = await render_chat(
                frontend, body.messages, body.add_generation_prompt, body.chat_template_kwargs
            )
        result: Json = {"count": len(ids), "max_model_len": frontend.info.max_model_len, "tokens": ids}
        if body.return_token_strs:
            result["token_strs"] = [tokenizer.id_to_token(i) for i in ids]
        return json_response(result)

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = parse(await read_body(request, service.options.max_body_bytes), DetokenizeRequest)
        service.model_name(body.model)
        tokenizer = service.frontend.tokenizer
        if tokenizer is None:
            raise RequestError(WITHOUT_TOKENIZER)
        for token in body.tokens:
            if not 0 <= token < service.frontend.info.vocab_size:
                raise RequestError(
                    f"tokens contains the id {shown(token)}; ids must lie in "
                    f"0..{service.frontend.info.vocab_size - 1}.",
                    param="tokens",
                )
        prompt = await in_thread_if_long(
            lambda: tokenizer.decode(body.tokens, skip_special_tokens=False), len(body.tokens)
        )
        return json_response({"prompt": prompt})


def _add_operation(router: APIRouter, service: Service) -> None:
    @router.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        await service.client.health()
        return json_response({"status": "ok"})

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @router.get("/metrics")
    async def metrics() -> Response:
        try:
            try:
                service.metrics.update(await asyncio.wait_for(service.client.stats(), STATS_TIMEOUT_S))
            except TimeoutError:
                await service.client.health()
                service.metrics.busy()
        except EngineDeadError:
            service.metrics.update(None)
        return Response(service.metrics.render(), media_type=CONTENT_TYPE)
