"""``paceline serve``: the engine's process, the API, and a clean end for both."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from paceline.config import EngineConfig
from paceline.engine.client import AsyncEngine, FrontendOptions
from paceline.errors import ConfigError
from paceline.observability.logs import setup_logging
from paceline.server.app import create_app
from paceline.server.options import ServeOptions

logger = logging.getLogger(__name__)

GRACE_S = 5
"""Seconds that requests in flight get to finish once the server is told to stop. Then, or when it is told
again, the engine is closed, which ends each of them with an error of its own."""
GRACE_TO_SEND_S = 2
"""Seconds that clients then get to read it. Who has not is hung up on."""
GRACE_TO_LEAVE_S = 1
"""Seconds after which uvicorn cancels what has not noticed even that."""
KEEP_ALIVE_S = 75
"""Idle seconds before a connection is closed. Longer than common client pools and proxies keep theirs (60),
so that none of them sends a request into a connection that is just being closed."""


class _Server(uvicorn.Server):
    """uvicorn, with signals left to ``_serve``: its own handling would end the process before the engine is
    closed. And clients that stop reading do not hold up the end: it would cancel their requests, which looks
    like errors of the app.

    Args:
        config: uvicorn's.
        started: called when it listens.
    """

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._announce()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        hang_up = asyncio.get_running_loop().call_later(GRACE_S + GRACE_TO_SEND_S, self._hang_up)
        await super().shutdown(sockets)
        hang_up.cancel()

    def _hang_up(self) -> None:
        open_still = list(self.server_state.connections)
        logger.warning("Clients did not read their answers; connections cut off: %d", len(open_still))
        for connection in open_still:
            connection.transport.abort()


def serve_forever(engine: EngineConfig, frontend: FrontendOptions, options: ServeOptions) -> None:
    """Start the engine, serve until SIGINT or SIGTERM, stop everything.

    Raises:
        ConfigError: an option cannot work; the address cannot be listened on.
        CheckpointError: the model cannot be served.
        EngineDeadError: the engine failed while starting.
    """
    setup_logging(options.log_level)
    # Taken before the model is loaded: a port in use should not cost a minute to find out.
    with _bind(options.host, options.port) as listener:
        asyncio.run(_serve(engine, frontend, options, listener))


async def _serve(
    engine: EngineConfig, frontend: FrontendOptions, options: ServeOptions, listener: socket.socket
) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    starting = asyncio.create_task(AsyncEngine.start(engine, frontend, log_level=options.log_level))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return
    stopping.cancel()
    async with starting.result() as client:
        config = uvicorn.Config(
            create_app(client, options),
            log_level=options.uvicorn_log_level,
            access_log=options.uvicorn_log_level in ("debug", "info", "trace"),
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S + GRACE_TO_SEND_S + GRACE_TO_LEAVE_S,
            server_header=False,
        )
        server = _Server(config, lambda: _announce(client, options, listener))
        closing: list[asyncio.Task[None]] = []

        def close() -> None:
            closing.append(asyncio.create_task(client.close()))

        def end() -> None:
            if server.should_exit:
                close()
            else:
                server.should_exit = True
                loop.call_later(GRACE_S, close)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, end)
        if stop.is_set():
            return
        await server.serve(sockets=[listener])
        await asyncio.gather(*closing)
        logger.info("Stopped.")


def _announce(client: AsyncEngine, options: ServeOptions, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    host = "localhost" if host in ("0.0.0.0", "::", "127.0.0.1", "::1") else host
    names = options.served_model_names or (client.info.model,)
    logger.info("Serving %s at http://%s:%d/v1", ", ".join(names), host, port)


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: until the server is ready, clients are refused, not left
    waiting."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on {host}:{port}: {error.strerror or error}. "
            "Choose another with --host and --port."
        ) from error
    return listener
