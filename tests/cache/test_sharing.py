"""Groups of sequences with common first blocks: disjoint, right, and no others save more."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cache.sharing import Group, shared_groups


def common(tables: list[list[int]], members: tuple[int, ...]) -> int:
    first = tables[members[0]]
    return next(
        (i for i in range(len(first)) if any(tables[m][i : i + 1] != first[i : i + 1] for m in members)),
        len(first),
    )


def most_saved(tables: list[list[int]]) -> int:
    """Over all ways to put the sequences into groups."""
    if not tables:
        return 0
    others = range(1, len(tables))
    return max(
        len(company) * common(tables, (0, *company))
        + most_saved([tables[i] for i in others if i not in company])
        for count in range(len(tables))
        for company in combinations(others, count)
    )


@pytest.mark.parametrize(
    ("tables", "groups"),
    [
        ([], []),
        ([[1, 2]], []),
        ([[1], [2], []], []),
        ([[1, 2, 3], [9], [1, 2, 4]], [Group([0, 2], 2)]),
        # all share one block, three of them four: these by themselves, and the others too
        (
            [[1, 5], [1, 2, 3, 4, 7], [1, 6], [1, 2, 3, 4, 8], [1, 2, 3, 4]],
            [Group([4, 1, 3], 4), Group([0, 2], 1)],
        ),
        # all share three blocks, two of them four: together 3 * 3
        ([[1, 2, 3, 5], [1, 2, 3, 4, 7], [1, 2, 3], [1, 2, 3, 4, 8]], [Group([2, 1, 3, 0], 3)]),
        # one pair shares three blocks and one eight, all share two
        (
            [[1, 2, 3, 5], [1, 2, 3, 6], [1, 2, 4, 4, 4, 4, 4, 4], [1, 2, 4, 4, 4, 4, 4, 4, 4]],
            [Group([2, 3], 8), Group([0, 1], 3)],
        ),
        ([[1, 2], [1, 3], [4, 5, 6], [4, 5, 7]], [Group([2, 3], 2), Group([0, 1], 1)]),
    ],
)
def test_groups(tables: list[list[int]], groups: list[Group]) -> None:
    assert shared_groups(tables) == groups


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=6))
def test_no_other_groups_save_more(tables: list[list[int]]) -> None:
    groups = shared_groups(tables)
    members = [member for group in groups for member in group.members]
    assert len(set(members)) == len(members)
    for group in groups:
        assert len(group.members) > 1
        assert group.num_blocks == common(tables, tuple(group.members)) > 0
    assert sum(group.saved for group in groups) == most_saved(tables)


def test_a_deep_tree_is_searched_by_rounded_lengths() -> None:
    """Each sequence goes on where the one before ended: as deep as there are sequences."""
    tables = [list(range(length)) for length in range(0, 3000, 3)]
    groups = shared_groups(tables)
    members = [member for group in groups for member in group.members]
    assert len(set(members)) == len(members) and sum(group.saved for group in groups) > 500_000
    for group in groups:
        assert all(
            tables[member][: group.num_blocks] == list(range(group.num_blocks)) for member in group.members
        )
