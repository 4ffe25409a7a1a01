"""Which spans of a step run together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime.division import (
    HIDING_ROWS,
    JOIN_ROWS,
    MAX_FULL_SEQS,
    Part,
    divide,
    divide_exactly,
    most,
)
from paceline.sampling.state import FIXED_KINDS, FixedKind


def test_a_round_for_all() -> None:
    assert divide([8, 1, 8], ["greedy", "short", "random"]) == [Part([0, 1, 2], "short")]
    assert divide([8, 1], ["greedy", "full"]) == [Part([0, 1], "full")]


def test_prefill_runs_after_the_round() -> None:
    kinds: list[FixedKind | None] = [None, "greedy", None, "random"]
    assert divide([100, 1, 30, 1], kinds) == [Part([1, 3], "random"), Part([0, 2], None)]


def test_prefill_alone_and_nothing_at_all() -> None:
    assert divide([100, 3], [None, None]) == [Part([0, 1], None)]
    assert divide([], []) == [Part([], None)]


def test_decode_joins_much_prefill_unless_it_is_much_itself() -> None:
    assert divide([JOIN_ROWS, 8], [None, "greedy"]) == [Part([0, 1], None)]
    assert len(divide([JOIN_ROWS - 1, 8], [None, "greedy"])) == 2
    assert len(divide([JOIN_ROWS, *[1] * HIDING_ROWS], [None, *["greedy"] * HIDING_ROWS])) == 2  # type: ignore[list-item]


def test_full_spans_among_many_run_apart() -> None:
    kinds: list[FixedKind | None] = [*["greedy"] * MAX_FULL_SEQS, "full", "random"]  # type: ignore[list-item]
    parts = divide([1] * len(kinds), kinds)
    assert parts[0] == Part([MAX_FULL_SEQS], "full")
    assert parts[1].kind == "random" and len(parts[1].spans) == MAX_FULL_SEQS + 1


def test_many_full_spans_take_several_rounds() -> None:
    kinds: list[FixedKind | None] = ["full"] * (2 * MAX_FULL_SEQS + 1)
    assert [len(part.spans) for part in divide([1] * len(kinds), kinds)] == [MAX_FULL_SEQS, MAX_FULL_SEQS, 1]


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.sampled_from([None, *FIXED_KINDS])), min_size=1, max_size=200)
)
def test_every_span_runs_once_where_it_can(spans: list[tuple[int, FixedKind | None]]) -> None:
    kinds = [kind for _, kind in spans]
    parts = divide([rows for rows, _ in spans], kinds)
    assert sorted(i for part in parts for i in part.spans) == list(range(len(spans)))
    assert all(part.kind is not None for part in parts[:-1]), "rounds come first"
    for part in parts:
        if part.kind is not None:
            assert part.kind == most([kinds[i] for i in part.spans])
            assert part.kind != "full" or len(part.spans) <= MAX_FULL_SEQS


@pytest.mark.parametrize(
    ("kinds", "kind"),
    [
        (["greedy", "short"], "short"),
        (["random", "greedy"], "random"),
        (["greedy", "filtered"], None),
        (["full"], None),
        (["greedy", None], None),
    ],
)
def test_uncaptured_steps_stay_whole(kinds: list[FixedKind | None], kind: FixedKind | None) -> None:
    assert divide_exactly(kinds) == [Part(list(range(len(kinds))), kind)]
