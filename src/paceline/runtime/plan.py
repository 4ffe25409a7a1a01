"""What the scheduler asks of the device and what comes back: plain data, no torch.

A plan names slots and row counts. Token ids, positions and cache slots of the rows are worked out on the
device from its own slot-indexed arrays, which is why a plan can be made before the previous step's tokens are
known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.sampling.logprobs import Logprob
from paceline.sampling.params import SamplingParams


@dataclass(slots=True)
class SlotInit:
    """A sequence takes a slot: written to the device before the step's rows are formed."""

    slot: int
    tokens: Sequence[int]
    """All tokens known so far (prompt, and output after a preemption)."""
    computed: int
    """Rows already in the cache (the prefix hit)."""
    prompt_len: int
    params: SamplingParams
    seed: int
    """Sequence seed, a signed 64-bit integer: with the position it keys every random draw."""


@dataclass(slots=True)
class Span:
    """The rows of one sequence in a step, at positions ``num_computed + 0..rows - 1`` of its slot."""

    slot: int
    rows: int
    drafts: int = 0
    """How many of the last rows are fed tentative tokens; the row before them is the anchor."""
    propose: bool = False
    """Draft the next block after this step: its tokens will stand tentatively behind the newest one."""
    sample: bool = True
    """False for an inner prefill chunk: rows are forwarded, nothing is drawn."""
    prompt_rows: int = 0
    """How many of the first rows are evaluated for prompt logprobs: the successor of each is a prompt
    token.
    """
    prompt_top: int = 0
    """Alternatives asked for at those rows; the whole vocabulary at most."""
    top: int = 0
    """Alternatives asked for at sampled rows, for requests that ask for logprobs at all."""


@dataclass(slots=True)
class TableUpdate:
    """Block ids to write into a slot's block table from ``first`` on."""

    slot: int
    first: int
    ids: Sequence[int]


@dataclass(slots=True)
class StepPlan:
    """One device step."""

    step: int
    inits: list[SlotInit] = field(default_factory=list)
    table: list[TableUpdate] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    max_context: int = 0
    """Upper bound of the largest position + 1 any row of this step may have."""

    @property
    def num_rows(self) -> int:
        """Rows forwarded by the target in this step."""
        return sum(span.rows for span in self.spans)

    def split(self) -> list[StepPlan]:
        """The same step as one plan per span: used to find the one span that cannot be run."""
        return [
            StepPlan(
                self.step,
                [init for init in self.inits if init.slot == span.slot],
                [update for update in self.table if update.slot == span.slot],
                [span],
                self.max_context,
            )
            for span in self.spans
        ]


@dataclass(slots=True)
class SpanResult:
    """What one span produced."""

    tokens: list[int]
    """Accepted drafts and the token drawn after them, in order; empty for an inner prefill chunk. So of a
    span with drafts ``len(tokens) - 1`` were accepted."""
    logprobs: list[dict[int, Logprob]] | None = None
    """Aligned with ``tokens`` when the request asked for logprobs."""
    prompt_logprobs: list[dict[int, Logprob]] | None = None
    """One per ``prompt_rows``: the logprobs of the row's successor."""
    error: str | None = None
    """Set when this span alone could not be run; everything else is then empty."""


class PendingStep(Protocol):
    """A launched step."""

    def result(self) -> list[SpanResult]:
        """Wait for the step and return one result per span, in plan order."""


class StepRunner(Protocol):
    """The device, as the engine sees it."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step. Steps run in launch order; the call does not wait for the device."""
