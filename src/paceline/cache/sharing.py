"""Which sequences hold the same first blocks, and are best attended together.

Attention over keys that several sequences share reads them once for all, if it is told which. Prefixes form a
tree (all share the system prompt, some of them the document after it), and a sequence can be in one group
only; the groups chosen save the most readings of tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences with a common prefix.

    Attributes:
        members: their indices, two or more.
        num_blocks: blocks at the head of all their tables.
    """

    members: list[int]
    num_blocks: int

    @property
    def saved(self) -> int:
        """Blocks that need not be read again."""
        return (len(self.members) - 1) * self.num_blocks


def shared_groups(tables: Sequence[list[int]]) -> list[Group]:
    """The disjoint groups that save most, largest saving first.

    Args:
        tables: block ids of each sequence. A block that two of them list is full, and in one place.
    """
    order = sorted(range(len(tables)), key=lambda i: tables[i])
    common = [_common(tables[a], tables[b]) for a, b in itertools.pairwise(order)]

    def saved(groups: list[Group]) -> int:
        return sum(group.saved for group in groups)

    def best(first: int, last: int) -> list[Group]:
        """Of the sequences ``order[first : last + 1]``."""
        if first == last:
            return []
        least = min(common[first:last])
        borders = [i for i in range(first, last) if common[i] == least]
        together, alone, apart = Group([], least), [], []
        for start, end in zip([first, *(i + 1 for i in borders)], [*borders, last], strict=True):
            groups = best(start, end)  # each branch of the tree joins the common group or has its own
            alone += groups
            if (end - start + 1) * least > saved(groups):
                together.members.extend(order[start : end + 1])
            else:
                apart += groups
        apart.append(together)
        return apart if saved(apart) > saved(alone) else alone

    return sorted(best(0, len(tables) - 1), key=lambda g: g.saved, reverse=True) if tables else []


def _common(left: list[int], right: list[int]) -> int:
    """Length of the longest common prefix, by bisection: comparing slices is what Python is fast at."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
