"""How far two sequences agree from their start."""

from __future__ import annotations

from collections.abc import Sequence


def common_length(left: Sequence[object], right: Sequence[object]) -> int:
    """Length of the longest common prefix, by bisection: comparing slices is what Python is fast at."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
