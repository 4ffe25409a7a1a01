"""Between the steps and those who choose about drafts: chains the hedger adds to a step and what became of
them, and what the verify planner learns from one. Pure logic.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

from paceline.engine.planned import PlannedStep
from paceline.runtime.plan import SpanResult
from paceline.speculation.hedging import HedgeCandidate, Hedger
from paceline.speculation.planner import Planner


def add_chains(step: PlannedStep, hedger: Hedger, spare_rows: int) -> None:
    """Give sequences chains in the rows the step has left, to verify now and to make for the next one."""
    decoding = {e.span.slot: e for e in step.entries if e.decodes and (e.span.drafts or e.span.propose)}
    candidates = []
    for slot, entry in decoding.items():
        # The span is in flight already, and commits at least one token.
        budget = entry.sequence.tokens_left + 1
        candidates.append(HedgeCandidate(entry.sequence.order, slot, budget))
        entry.hedgeable = hedger.eligible(budget)
    for slot in hedger.choose(candidates, spare_rows) if step.decision.hedge else ():
        decoding[slot].span.chains = hedger.chains


def executed_chains(step: PlannedStep, results: Sequence[SpanResult]) -> int | None:
    """The chains that most of a step's spans ran which could have some; None where none could. Rows may be
    short, chains not made yet, or the step one that runs without.
    """
    ran = [result.chains for entry, result in zip(step.entries, results, strict=True) if entry.hedgeable]
    return median_low(ran) if ran else None


def teach(planner: Planner, step: PlannedStep, results: Sequence[SpanResult]) -> None:
    """Tell the planner what the step's decode spans committed, ends and limits left aside."""
    slots, decoded, predicted = [], [], []
    for entry, result in zip(step.entries, results, strict=True):
        if result.tokens and entry.decodes and entry.sequence.tenancy == entry.tenancy:
            slots.append(entry.span.slot)
            decoded.append(result)
            # Where no drafts were in place it is what was said of others, maybe another's.
            predicted.append(result.predicted if entry.span.drafts else None)
    planner.committed(
        step.decision,
        slots,
        [result.verified for result in decoded],
        [len(result.tokens) - 1 - result.won for result in decoded],
        [result.chains for result in decoded],
        [result.won for result in decoded],
        predicted,
    )
