"""What phases give from block to block of the grid: whose input is awaited, and what is blank at first.

Blocks do not meet: a place that is not written yet holds a value that no result has, and readers wait for
another (``kernel.cu``). So whatever a launch both writes and reads must be blank before it is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from paceline.ops.persistent.phases import Attend, Phase, Product

Range = tuple[int, int]
"""Addresses: the first byte, and the first behind."""


def source(phase: Phase) -> Tensor:
    """[R, k]: what a phase reads of all blocks' results."""
    if isinstance(phase, Product):
        return phase.source
    return phase.qkv if isinstance(phase, Attend) else phase.kv


def results(phase: Phase) -> list[Tensor]:
    """What a phase writes for later ones, [R, n] each."""
    if isinstance(phase, Product):
        return [phase.out] if phase.tap is None else [phase.out, phase.tap]
    return [phase.out] if isinstance(phase, Attend) else []


def ranges(tensors: Iterable[Tensor]) -> list[Range]:
    """Where the rows of some [R, n] tensors lie: neighbours joined, in order."""
    return _joined(
        (start, start + tensor.shape[1] * tensor.element_size())
        for tensor in tensors
        for start in (
            tensor.data_ptr() + row * tensor.stride(0) * tensor.element_size() for row in range(len(tensor))
        )
    )


def awaited(phases: Sequence[Phase]) -> list[bool]:
    """Of each phase whether one before it writes its source."""
    written: list[Range] = []
    found = []
    for phase in phases:
        found.append(_overlap(ranges([source(phase)]), written))
        written = _joined([*written, *ranges(results(phase))])
    return found


def blank_at_first(phases: Sequence[Phase]) -> list[Range]:
    """What must be blank when a launch begins: what is awaited, but what it reads first as it finds it."""
    sources = [(ranges([source(phase)]), waits) for phase, waits in zip(phases, awaited(phases), strict=True)]
    there = _joined(place for places, waits in sources if not waits for place in places)
    return _joined(
        place for places, waits in sources if waits and not _overlap(places, there) for place in places
    )


def _joined(places: Iterable[Range]) -> list[Range]:
    joined: list[Range] = []
    for start, end in sorted(places):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def _overlap(a: Sequence[Range], b: Sequence[Range]) -> bool:
    return any(start < other_end and other < end for start, end in a for other, other_end in b)
