"""A sequence: one of the ``n`` continuations of a request, as the host knows it."""

from __future__ import annotations

import enum
from array import array
from collections import deque
from dataclasses import dataclass, field

from paceline.cache import SequenceBlocks
from paceline.engine.messages import EngineRequest
from paceline.engine.outputs import FinishReason
from paceline.runtime.plan import Span
from paceline.sampling.logprobs import Logprob


class Status(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Host-side state of one continuation.

    ``tokens`` holds what the host knows. The device may be up to ``lookahead`` steps further: those spans are
    listed in ``in_flight``, oldest first.
    """

    request: EngineRequest
    index: int
    arrival: int
    """Position in the order of arrival over the engine's life."""
    tokens: array[int]
    """uint32: hashing its blocks and sending it to the device take its bytes as they are."""
    prompt_len: int
    seed: int
    blocks: SequenceBlocks
    stop_ids: frozenset[int]
    """Ids that end the sequence: end-of-sequence ids unless ignored, and the request's own."""
    status: Status = Status.WAITING
    slot: int = -1
    in_flight: deque[Span] = field(default_factory=deque)
    """Its spans in steps whose results the host has not read."""
    rows_in_flight: int = 0
    sampling: int = 0
    """Spans in flight that draw a token: each commits at least one."""
    leader: Sequence | None = None
    """Continuation 0 of the same request, whose prompt blocks this one shares."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the cache at first admission."""
    first_scheduled_s: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """Of every prompt token but the first, as far as forwarded, when the request asked."""
    error: str | None = None
    """With finish_reason ``error``: what went wrong."""
    awaited: bytes | None = None
    """Identity of the block it was missing when it last waited for another sequence to compute it."""
    tenancy: int = 0
    """How often the sequence has given up a slot."""
    drafted: int = 0
    """Drafts that stand tentatively on the device once everything in flight has run."""
    can_draft: bool = False
    """Whether its draft state is there, for its stay in the slot."""
    table_len: int = 0
    """Block ids already written to the device's block table."""

    order: tuple[int, int, int] = field(init=False)
    """Importance: what is scheduled first and preempted last."""
    max_tokens: int = field(init=False)
    """Most tokens this sequence may generate."""

    def __post_init__(self) -> None:
        self.order = (self.request.priority, self.arrival, self.index)
        limit = self.request.params.max_tokens
        assert limit is not None, "the text side fills in max_tokens"
        self.max_tokens = limit

    def launched(self, span: Span) -> None:
        """One more span is in flight."""
        self.in_flight.append(span)
        self.rows_in_flight += span.rows
        self.sampling += span.sample

    def landed(self) -> Span:
        """The oldest span in flight, whose results are there."""
        span = self.in_flight.popleft()
        self.rows_in_flight -= span.rows
        self.sampling -= span.sample
        return span

    def abandon(self) -> None:
        """Nothing that is in flight will be committed."""
        self.in_flight.clear()
        self.rows_in_flight = self.sampling = 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, as known to the host."""
        return len(self.tokens) - self.prompt_len

    @property
    def scheduled(self) -> int:
        """Upper bound of ``num_computed`` once everything in flight has run."""
        return self.blocks.computed + self.rows_in_flight

    @property
    def rows_wanted(self) -> int:
        """Rows this sequence must run next: the known tokens not yet scheduled, else one for a token in
        flight. Zero when the spans in flight are certain to reach ``max_tokens``.
        """
        known = len(self.tokens) - self.blocks.computed - self.rows_in_flight
        if known > 0:
            return known
        return 1 if self.sampling and self.tokens_left > 0 else 0

    @property
    def tokens_left(self) -> int:
        """Most tokens that may still be generated after what is in flight."""
        return self.max_tokens + self.prompt_len - len(self.tokens) - self.sampling
