"""A step from its plan to its commit, as the scheduler keeps it: plain data."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from paceline.engine.sequence import Sequence
from paceline.runtime.plan import Span, SpanResult, StepPlan
from paceline.sampling.logprobs import Logprob
from paceline.speculation.costs import Round
from paceline.speculation.decision import EVERYTHING, Decision


@dataclass(slots=True)
class Entry:
    """One span of a plan with the sequence it belongs to."""

    sequence: Sequence
    span: Span
    tenancy: int
    """The sequence's tenancy when the span was planned; a preemption in between makes the span stale."""
    hedgeable: bool = False
    """Whether it could have hedge chains, room or not."""

    @property
    def decodes(self) -> bool:
        """Whether the span is an anchor and its drafts, no prefill."""
        return self.span.sample and self.span.rows == self.span.drafts + 1


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What the drafter does per round: drafts proposed, and how many positions from the anchor on its block
    touches in the target's blocks.
    """

    num_drafts: int = 0
    block_rows: int = 0


@dataclass(slots=True)
class PlannedStep:
    """A device plan and, in the same order, whose spans it holds."""

    plan: StepPlan
    entries: list[Entry]
    decision: Decision = EVERYTHING
    chains: int | None = None
    """Once it has run, the chains that most spans had which could have some; None where none could."""

    def round(self) -> Round | None:
        """The decode round that is all the step does; None if it does more."""
        spans, depth = self.plan.spans, self.plan.depth
        if not all(entry.decodes for entry in self.entries):
            return None
        drafts = max(span.drafts for span in spans)
        return Round(
            len(spans),
            drafts if depth is None else min(drafts, depth),
            any(span.propose for span in spans),
            max(span.chains for span in spans),
        )

    def rows_run(self, results: Items[SpanResult], chain_rows: int) -> int:
        """Rows the target forwarded: drafts that got none are left out, chains have ``chain_rows`` each."""
        planned = self.plan.num_rows - sum(span.drafts for span in self.plan.spans)
        return planned + sum(result.verified + result.chains * chain_rows for result in results)


@dataclass(slots=True)
class Progress:
    """What a committed step did to one sequence."""

    sequence: Sequence
    tokens: list[int]
    logprobs: list[dict[int, Logprob]] | None
    num_drafts: int = 0
    num_accepted: int = 0
