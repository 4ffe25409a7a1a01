"""The engine in a process of its own: ``python -m paceline.engine.process``.

The parent passes the engine options as JSON on standard input and a path of a Unix socket; messages are
msgspec structs in MessagePack, both ways (no pickle anywhere). The process ends when told to, and when its
parent is gone.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence

import msgspec
import zmq

from paceline.config import EngineConfig
from paceline.engine.core import EngineCore
from paceline.engine.factory import make_core
from paceline.engine.messages import (
    AbortRequests,
    EngineFailure,
    EngineRequest,
    FromEngine,
    OutputBatch,
    RequestRefused,
    ResetPrefixCache,
    SequenceOutput,
    Shutdown,
    StatsQuery,
    StopSequence,
    ToEngine,
)
from paceline.errors import CheckpointError, ConfigError, RequestError

logger = logging.getLogger(__name__)

IDLE_POLL_MS = 1000
"""How often an idle engine looks whether its parent is still there."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask the kernel to end this process when its parent dies (Linux; elsewhere the idle poll notices).

    Args:
        parent: process id of whoever started this process. It may be gone already, in which case no signal
            will come.

    Raises:
        SystemExit: it is gone.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


class EngineLoop:
    """Messages in, steps, messages out.

    Args:
        core: the engine.
        socket: a connected PAIR socket.
        parent: process id of whoever is at its other end.
    """

    def __init__(self, core: EngineCore, socket: zmq.Socket[bytes], parent: int) -> None:
        self._core = core
        self._socket = socket
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._parent = parent
        self._running = True

    def send(self, items: Sequence[FromEngine]) -> None:
        """Send one batch."""
        self._socket.send(self._encoder.encode(OutputBatch(items=list(items))))

    def run(self) -> None:
        """Serve until told to stop or the parent is gone."""
        prepared = False
        while self._running:
            self._receive(wait=prepared and not self._core.has_work)
            if self._core.has_work:
                outputs = self._core.step()
                if outputs:
                    self.send(outputs)
            elif not prepared:
                prepared = not self._core.runner.prepare()
            elif os.getppid() != self._parent:
                return

    def _receive(self, *, wait: bool) -> None:
        """Handle every message that has arrived; with ``wait``, sleep until there is one."""
        if wait and not self._socket.poll(IDLE_POLL_MS):
            return
        while self._running:
            try:
                raw = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(self._decoder.decode(raw))

    def _handle(self, message: ToEngine) -> None:
        core = self._core
        if isinstance(message, EngineRequest):
            try:
                core.add(message)
            except RequestError as error:
                refused = RequestRefused(
                    request_id=message.request_id,
                    message=error.message,
                    param=error.param,
                    code=error.code,
                )
                self.send([refused])
            except Exception as error:
                logger.exception("Request %s could not be queued.", message.request_id)
                self.send([_failed(message, f"{type(error).__name__}: it could not be queued.")])
        elif isinstance(message, AbortRequests):
            core.abort(message.request_ids)
        elif isinstance(message, StopSequence):
            core.stop_sequence(message.request_id, message.index)
        elif isinstance(message, StatsQuery):
            self.send([msgspec.structs.replace(core.stats(), query_id=message.query_id)])
        elif isinstance(message, ResetPrefixCache):
            done = core.reset_prefix_cache()
            self.send([msgspec.structs.replace(core.stats(), query_id=message.query_id, cache_reset=done)])
        elif isinstance(message, Shutdown):
            self._running = False


def _failed(request: EngineRequest, message: str) -> SequenceOutput:
    return SequenceOutput(
        request_id=request.request_id, index=0, token_ids=[], finish_reason="error", error=message
    )


def main() -> int:
    """Entry point: options on standard input; socket address and process id of the parent as arguments."""
    for number in (signal.SIGINT, signal.SIGTERM):  # both go to whole process groups: the parent's to handle
        signal.signal(number, signal.SIG_IGN)
    address, parent = sys.argv[1], int(sys.argv[2])
    die_with_parent(parent)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(address)
    try:
        options = msgspec.json.decode(sys.stdin.buffer.read(), type=_Start)
        from paceline.observability.logs import setup_logging

        setup_logging(options.log_level)
        core = make_core(options.config)
        loop = EngineLoop(core, socket, parent)
        socket.send(msgspec.msgpack.encode(OutputBatch(items=[core.info])))
        gc.collect()
        gc.freeze()  # what lives now lives for good: keep the collector off it
        loop.run()
    except (ConfigError, CheckpointError) as error:
        failure = EngineFailure(
            message=str(error), kind="config" if isinstance(error, ConfigError) else "checkpoint"
        )
        socket.send(msgspec.msgpack.encode(OutputBatch(items=[failure])))
        return 2
    except Exception as error:
        logger.exception("The engine stopped.")
        failure = EngineFailure(message=f"{type(error).__name__}: {error}")
        socket.send(msgspec.msgpack.encode(OutputBatch(items=[failure])))
        return 1
    finally:
        socket.close()
        context.term()
    return 0


class _Start(msgspec.Struct, forbid_unknown_fields=True):
    """What the parent writes to standard input."""

    config: EngineConfig
    log_level: str = "info"


if __name__ == "__main__":
    sys.exit(main())
