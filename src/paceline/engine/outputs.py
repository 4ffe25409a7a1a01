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
    """Times of one request on the monotonic clock of the process that received it, in seconds; and what was
    drafted for it, over all its continuations.
    """

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_drafts: int = 0
    """Rounds in which drafts were verified."""
    num_draft_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    """How often the draft at each position became part of the output."""

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts that became part of the output."""
        return sum(self.accepted_per_position)

    @property
    def accept_length(self) -> float | None:
        """Mean tokens per verify step, the bonus included; None when nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    def add_round(self, num_drafts: int, num_accepted: int) -> None:
        """Count one verified round."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.accepted_per_position += [0] * (num_drafts - len(self.accepted_per_position))
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1


PLAIN = -1
"""Origin of a token drawn without drafts before it."""
BONUS = 0
"""Origin of the token drawn after a round's accepted drafts; a draft's origin is its position, from 1."""


@dataclass(slots=True)
class CompletionOutput:
    """One of the ``n`` continuations of a request.

    In a stream ``text``, ``token_ids``, ``logprobs`` and ``origins`` hold only what is new since the
    previous output.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """Stop token id or stop string that ended it; None at the end-of-sequence token and at a length limit."""
    origins: list[int] = field(default_factory=list, compare=False)
    """How each token came: its position k >= 1 among the drafts of its round, ``BONUS`` or ``PLAIN``."""

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
