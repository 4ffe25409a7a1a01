"""The FastAPI application."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
from collections.abc import AsyncIterator, Iterable

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline import __version__
from paceline.observability.logs import log_stats
from paceline.observability.metrics import Metrics
from paceline.server import errors
from paceline.server.engine_client import EngineClient
from paceline.server.options import ServeOptions
from paceline.server.routes import Service, build_router


def create_app(client: EngineClient, options: ServeOptions) -> FastAPI:
    """The API over an engine.

    Args:
        client: a started engine; the caller closes it after the server has stopped.
        options: names, keys and limits.
    """
    names = options.served_model_names or (client.frontend.info.model,)
    service = Service(client, options, Metrics(names[0]))

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(log_stats(client.stats), name="paceline-stats-line")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # The generated pages describe typed handlers; bodies here are read by msgspec, so they would be empty.
    app = FastAPI(
        title="Paceline",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.router.redirect_slashes = False
    app.include_router(build_router(service))
    errors.install(app)
    if options.api_keys:
        app.add_middleware(RequireKey, keys=options.api_keys)
    return app


class RequireKey:
    """Lets in who presents a key as a bearer token; ``/health`` is open to load balancers."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(os.fsencode(key)) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on or refuse it (ASGI)."""
        if scope["type"] == "lifespan" or scope["path"] == "/health" or self._known(scope):
            await self._app(scope, receive, send)
            return
        refusal = errors.HTTPError(
            401,
            "A valid API key is required: send it as 'Authorization: Bearer KEY'.",
            code="invalid_api_key",
        )
        response = errors.error_response(refusal)
        response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = header.partition(b" ")
        given = _digest(key.strip())
        # Digests have one length and every key is compared, so time tells nothing about any of them.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
