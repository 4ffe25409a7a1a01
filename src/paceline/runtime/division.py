"""How a step is divided: which of its spans run together in a captured round, and which row by row.

Pure logic, no torch. A round is one launch, a general pass over rows some hundred, and each reads the weights
once. So the time of a step on a GPU is about

    divided   max(host, round + rows),  where round >= weights
    joined    max(host, rows of both)

with *host* the time to launch a general pass (about 10 ms), *weights* the time to read the weights once (4B:
2 ms) and *rows* the arithmetic. Beside few prefill rows the host is what takes time, and the round, launched
first, runs in its shadow: dividing is free, and what sampling and drafting would add to the launches of the
general pass is saved. Beside many, arithmetic is what takes time, and dividing costs one more reading of the
weights, unless the decode rows are themselves so many that their arithmetic hides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.sampling.state import FIXED_KINDS, FixedKind

JOIN_ROWS = 2048
"""Beside so many other rows a general pass is bound by arithmetic, not by its launches."""

HIDING_ROWS = 256
"""So many decode rows take as long to compute as the weights take to read."""

MAX_FULL_SEQS = 64
"""Most sequences of a captured round that serves every sampling parameter."""


@dataclass(frozen=True)
class Part:
    """Spans that run together.

    Attributes:
        spans: their indices in the step, ascending.
        kind: sampling the round must be able to do; None for a general pass.
    """

    spans: list[int]
    kind: FixedKind | None


def divide(rows: Sequence[int], kinds: Sequence[FixedKind | None]) -> list[Part]:
    """Parts of a step where rounds are captured, in the order to launch them: rounds first.

    Args:
        rows: of each span.
        kinds: sampling each span needs if a round can take it, else None.
    """
    simple = [i for i, kind in enumerate(kinds) if kind is not None]
    others = [i for i, kind in enumerate(kinds) if kind is None]
    other_rows = sum(rows[i] for i in others)
    if not simple or (other_rows >= JOIN_ROWS and sum(rows[i] for i in simple) < HIDING_ROWS):
        return [Part(list(range(len(rows))), None)]
    full = [i for i in simple if kinds[i] == "full"]
    if full and len(simple) <= MAX_FULL_SEQS:
        groups = [simple]
    else:
        groups = [full[first : first + MAX_FULL_SEQS] for first in range(0, len(full), MAX_FULL_SEQS)]
        groups.append([i for i in simple if kinds[i] != "full"])
    parts = [Part(group, most([kinds[i] for i in group])) for group in groups if group]
    return [*parts, Part(others, None)] if others else parts


def divide_exactly(kinds: Sequence[FixedKind | None]) -> list[Part]:
    """Parts of a step where rounds are not captured, and two passes cost more than one.

    Rounds then serve what needs no sort of the vocabulary: the general pass, which may ask what its rows
    need, is faster at the rest.
    """
    needed = most(kinds)
    kind = needed if needed in ("greedy", "random", "short") else None
    return [Part(list(range(len(kinds))), kind)]


def most(kinds: Sequence[FixedKind | None]) -> FixedKind | None:
    """The kind that can do what each of ``kinds`` can; None if one of them is."""
    return None if None in kinds else max((k for k in kinds if k is not None), key=FIXED_KINDS.index)
