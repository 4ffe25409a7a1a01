"""Which sequences hold the same first blocks, and are best attended together.

Attention over keys that several sequences share reads them once for all, if it is told which. Prefixes form a
tree (all share the system prompt, some of them the document after it), and a sequence can be in one group
only; the groups chosen save the most readings of tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from paceline.cache.common import common_length

MAX_LEVELS = 16
"""Lengths of common prefixes told apart: deeper trees are searched by rounded lengths. The search is part of
planning, at every arrival and end: 64 sequences cut from one document take 1 ms with 16 lengths and 20 ms
with 64, which save 1 % more; in random trees 64 lengths save a tenth to a fifth more, mostly in short
prefixes."""

MIN_SAVED_TOKENS = 48 * 1024
"""Readings of a token's keys that a group must save to be attended together (32 query heads, 8 key heads of
128, one H200: 32 sequences on 1,536 tokens are about where it begins to pay)."""

MAX_GROUPS = 8
"""Groups that are attended together in a round, at most."""


def saves_enough(num_seqs: int, common: int) -> bool:
    """Whether so many sequences with ``common`` tokens are worth an attention of their own."""
    return (num_seqs - 1) * common >= MIN_SAVED_TOKENS


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

    A node of the prefix tree that is made a group costs its blocks once, and spares every sequence below it,
    down to the next such node, as many. So the best groups below a node depend on nothing but the blocks of
    the nearest group above.

    Args:
        tables: block ids of each sequence. A block that two of them list is full, and in one place.
    """
    order = sorted(range(len(tables)), key=lambda i: tables[i])
    exact = [common_length(tables[a], tables[b]) for a, b in itertools.pairwise(order)]
    grain = 1 if len(set(exact)) <= MAX_LEVELS else max(exact) // MAX_LEVELS + 1
    common = [length // grain * grain for length in exact]

    @cache
    def best(first: int, last: int, above: int) -> tuple[int, tuple[tuple[int, int, int], ...]]:
        """Of ``order[first : last + 1]``: blocks saved; groups as (first, last, blocks), outer ones first."""
        if first == last:
            return above, ()
        least = min(common[first:last])
        borders = [i for i in range(first, last) if common[i] == least]
        branches = list(zip([first, *(i + 1 for i in borders)], [*borders, last], strict=True))

        def below(blocks: int) -> tuple[int, tuple[tuple[int, int, int], ...]]:
            found = [best(start, end, blocks) for start, end in branches]
            return sum(saved for saved, _ in found), tuple(group for _, groups in found for group in groups)

        saved, groups = below(above)
        if least > above:
            more, inner = below(least)
            if more - least > saved:
                return more - least, ((first, last, least), *inner)
        return saved, groups

    owners: dict[int, tuple[int, int, int]] = {}
    for group in best(0, len(tables) - 1, 0)[1] if tables else ():
        owners.update((member, group) for member in order[group[0] : group[1] + 1])
    members: dict[tuple[int, int, int], list[int]] = {}
    for member in order:
        if member in owners:
            members.setdefault(owners[member], []).append(member)
    return sorted((Group(m, g[2]) for g, m in members.items()), key=lambda g: g.saved, reverse=True)
