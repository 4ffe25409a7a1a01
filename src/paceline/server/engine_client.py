"""What the HTTP layer needs of an engine. ``paceline.engine.client.AsyncEngine`` is one; tests script
another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from paceline.engine.frontend import Frontend, RequestState
from paceline.engine.messages import EngineStats
from paceline.engine.outputs import RequestOutput


class EngineClient(Protocol):
    """An engine seen from asyncio."""

    @property
    def frontend(self) -> Frontend:
        """The text side: tokenizer, chat template, defaults, validation."""

    def stream(self, state: RequestState) -> AsyncIterator[RequestOutput]:
        """Run a prepared request; each output holds what is new.

        An async generator: closing it aborts the request.

        Raises:
            RequestError: the request is refused.
            RequestFailedError: it failed alone.
            EngineDeadError: the engine is down or went down meanwhile.
        """

    async def health(self) -> None:
        """Return if the engine lives; raise ``EngineDeadError`` if not."""

    async def stats(self) -> EngineStats:
        """A snapshot of the engine's counters; raises ``EngineDeadError`` when it is down."""
