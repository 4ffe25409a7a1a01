"""The engine process's loop, with a scripted socket: what it does while there is nothing to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import zmq

from paceline.engine.core import EngineCore
from paceline.engine.messages import EngineRequest, Shutdown
from paceline.engine.process import EngineLoop
from paceline.sampling.params import SamplingParams


class Script:
    """A socket and an engine in one: writes down what is asked of it, in order.

    Args:
        arrivals: what has arrived at each look at the socket.
        to_prepare: things the engine can prepare.
    """

    def __init__(self, arrivals: list[object], to_prepare: int) -> None:
        self.log: list[str] = []
        self._arrivals: Iterator[object] = iter(arrivals)
        self._to_prepare = to_prepare
        self._steps = 0
        self.runner = SimpleNamespace(prepare=self.prepare)

    @property
    def has_work(self) -> bool:
        return self._steps > 0

    def poll(self, timeout: int) -> int:
        self.log.append("wait")
        return 1

    def recv(self, flags: int) -> bytes:
        item = next(self._arrivals)
        if item is None:
            raise zmq.Again
        return msgspec.msgpack.encode(item)

    def send(self, data: bytes) -> None:
        raise AssertionError("nothing to say")

    def prepare(self) -> bool:
        self.log.append("prepare")
        self._to_prepare -= 1
        return self._to_prepare > 0

    def add(self, request: EngineRequest) -> None:
        self.log.append("request")
        self._steps = 2

    def step(self) -> list[Any]:
        self.log.append("step")
        self._steps -= 1
        return []


def test_what_can_wait_is_prepared_between_looks_at_the_socket() -> None:
    request = EngineRequest(request_id="a", prompt_token_ids=[1], params=SamplingParams())
    script = Script([None, request, None, None, None, None, None, Shutdown()], to_prepare=3)
    loop = EngineLoop(cast(EngineCore, script), cast("zmq.Socket[bytes]", script), os.getppid())
    loop.run()
    want = ["prepare", "request", "step", "step", "prepare", "prepare", "wait", "wait"]
    assert script.log == want
