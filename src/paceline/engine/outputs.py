"""What a caller gets back: the shapes of vLLM's ``RequestOutput``, so code written for it reads the same
here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from paceline.sampling.logprobs import Logprob

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request on the monotonic clock of the process that received it, in seconds."""

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of the ``n`` continuations of a request.

    In a stream ``text``, ``token_ids`` and ``logprobs`` hold only what is new since the previous output.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """Stop token id or stop string that ended it; None at the end-of-sequence token and at a length limit."""

    @property
    def finished(self) -> bool:
        """Whether this continuation has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request's results: complete from ``LLM.generate``, increments from a stream."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = field(default=None, compare=False)
