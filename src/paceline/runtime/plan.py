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
    """How many of the last rows are fed tentative tokens, at most; the row before them is the anchor."""
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
    group: int = 0
    """Spans of one group stand side by side in a plan, and their sequences hold the same first blocks; 0 for
    none.
    """
    common: int = 0
    """Tokens in those blocks; all stand before the rows of the group."""
    fresh: bool = False
    """Whether nothing stands before its rows: a prompt that begins, without a cached prefix. Such spans are a
    plan's last.
    """
    chains: int = 0
    """Hedge chains to verify beside the drafts, where they were made with them, and to make for the next
    round. Left out where the span does not run as a round.
    """

    @property
    def lead(self) -> int:
        """Rows before the anchor: those of a prompt, but the last."""
        return self.rows - self.drafts - 1


@dataclass(slots=True)
class TableUpdate:
    """Block ids to write into a slot's block table from ``first`` on."""

    slot: int
    first: int
    ids: Sequence[int]


@dataclass(slots=True)
class Restore:
    """Rebuild the draft K/V of a sequence's first blocks from captured tap rows."""

    slot: int
    capture_slots: Sequence[int]
    """Where the rows of block 0, 1, ... lie in the capture store."""
    draft_blocks: Sequence[int]
    """Where their draft K/V goes, aligned."""


@dataclass(slots=True)
class DraftUpdates:
    """What a step does to draft state that is kept apart from the target's blocks; empty when none is.

    Carried out in this order before the step's rows: resets, tables, restores. Each slot's rows are captured
    through its tables at the end of the step, so a restore still reads a slot that the same step reuses.
    """

    resets: list[int] = field(default_factory=list)
    """Slots with a new tenant: both tables of theirs are cleared."""
    draft_tables: list[TableUpdate] = field(default_factory=list)
    """Blocks of the draft K/V, per block of a sequence."""
    capture_tables: list[TableUpdate] = field(default_factory=list)
    """Slots of the capture store, per block of a sequence."""
    restores: list[Restore] = field(default_factory=list)

    def drop(self, slot: int) -> None:
        """Forget what was planned for a slot."""
        self.resets = [item for item in self.resets if item != slot]
        self.draft_tables = [item for item in self.draft_tables if item.slot != slot]
        self.capture_tables = [item for item in self.capture_tables if item.slot != slot]
        self.restores = [item for item in self.restores if item.slot != slot]


@dataclass(slots=True)
class StepPlan:
    """One device step."""

    step: int
    inits: list[SlotInit] = field(default_factory=list)
    table: list[TableUpdate] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    max_context: int = 0
    """Upper bound of the largest position + 1 any row of this step may have."""
    depth: int | None = None
    """Drafts of a decoding sequence, on average, that there are to be rows for: the device verifies those of
    all their drafts that are most likely to stand. None: all of them.
    """
    draft: DraftUpdates = field(default_factory=DraftUpdates)

    @property
    def num_rows(self) -> int:
        """Rows forwarded by the target in this step."""
        return sum(span.rows for span in self.spans)

    def split(self) -> list[StepPlan]:
        """The same step as one plan per span: used to find the one span that cannot be run.

        Draft state is updated for all of them by the first: restores must read before anything is captured.
        """
        return [
            StepPlan(
                self.step,
                [init for init in self.inits if init.slot == span.slot],
                [update for update in self.table if update.slot == span.slot],
                [span],
                self.max_context,
                self.depth,
                DraftUpdates() if i else self.draft,
            )
            for i, span in enumerate(self.spans)
        ]


@dataclass(slots=True)
class SpanResult:
    """What one span produced."""

    tokens: list[int]
    """Accepted drafts and the token drawn after them, in order; empty for an inner prefill chunk. So of a
    span with drafts ``len(tokens) - 1`` were accepted."""
    logprobs: list[dict[int, Logprob]] | None = None
    """Aligned with ``tokens`` when the request asked for logprobs."""
    verified: int = 0
    """Drafts that were verified: those of the span, or fewer where a plan has rows for some only."""
    predicted: list[float] | None = None
    """How likely the drafter held each of its drafts and all before it to stand, the unverified ones
    included; None where it does not say.
    """
    chains: int = 0
    """Hedge chains that were verified beside the span."""
    won: int = 0
    """How many of the accepted drafts are a chain's."""
    prompt_logprobs: list[dict[int, Logprob]] | None = None
    """One per ``prompt_rows``: the logprobs of the row's successor."""
    error: str | None = None
    """Set when this span alone could not be run; everything else is then empty."""

    @staticmethod
    def failed(error: Exception) -> SpanResult:
        """Of a span that could not be run."""
        return SpanResult([], error=f"{type(error).__name__}: the step failed for this request.")


class PendingStep(Protocol):
    """A launched step."""

    def result(self) -> list[SpanResult]:
        """Wait for the step and return one result per span, in plan order."""


class DoneStep:
    """A step whose results are already there.

    Args:
        results: one per span, in plan order.
    """

    def __init__(self, results: list[SpanResult]) -> None:
        self._results = results

    def result(self) -> list[SpanResult]:
        """See :meth:`PendingStep.result`."""
        return self._results


class StepRunner(Protocol):
    """The device, as the engine sees it."""

    @property
    def num_draft_failures(self) -> int:
        """How often something went wrong that cost drafts, and nothing else."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step. Steps run in launch order; the call does not wait for the device."""

    def prepare(self) -> bool:
        """Make one more thing ready that steps can do without but run faster with; False when all are."""
