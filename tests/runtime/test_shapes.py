"""Which shapes of rounds there are, and which of them a step takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cache import sharing
from paceline.runtime.plan import Span
from paceline.runtime.shapes import (
    CAPTURED_KINDS,
    CHEAP_ROWS,
    GIVEN_UP,
    PROMPT_ROWS,
    RoundShape,
    Shapes,
    comes_first,
    roomy,
    tiers,
)
from paceline.sampling.state import FIXED_KINDS, FixedKind
from paceline.speculation.hedging import HedgeLimits

LENGTH = 512


def shapes_for(slots: int, *, captured: bool = True, hedge: int = 0) -> Shapes:
    """Of rounds with 7 drafts."""
    hedging = HedgeLimits(hedge, (0, 1, 2), 7, (1, 3)) if hedge else None
    return Shapes(
        max_num_seqs=slots,
        max_model_len=LENGTH,
        num_drafts=7,
        captured=captured,
        together=True,
        hedging=hedging,
    )


def spans_with(drafts: list[int], chains: int = 0, propose: bool = True) -> list[Span]:
    return [Span(i, n + 1, n, propose, chains=chains) for i, n in enumerate(drafts)]


def chosen(shapes: Shapes, spans: list[Span], depth: int | None = None) -> RoundShape:
    shape = shapes.choose(spans, "greedy", depth)
    assert shape is not None
    return shape


def test_tiers_end_at_the_number_of_slots() -> None:
    assert tiers(1) == [1] and tiers(6) == [1, 2, 4, 6] and tiers(256)[-2:] == [192, 256]


@pytest.mark.parametrize("hedge", [0, 2])
def test_small_rounds_are_captured_first_and_those_with_common_keys_last(
    hedge: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "MIN_SAVED_TOKENS", 5 * LENGTH)
    shapes = shapes_for(6, hedge=hedge)
    every = shapes.to_capture()
    assert len(set(every)) == len(every)
    first = [shape for shape in every if comes_first(shape)]
    together = [shape for shape in every if shape.together]
    others = every[len(first) : -len(together)]
    assert every == [*first, *others, *together]
    for group in first, others:
        sizes = [shape.num_seqs for shape in group]
        assert sizes == sorted(sizes)
    assert {shape.num_seqs for shape in first} == {1, 2}
    assert others[0].packed and others[0].num_seqs == 1, "next are the smallest for prompts"
    assert {shape.num_seqs for shape in together} == {6}, "four cannot save enough"
    assert all(shape.kind == "filtered" and not shape.places for shape in together)
    assert {(shape.num_drafts, shape.propose) for shape in together} == {(7, True), (0, False)}
    assert {(shape.num_seqs, shape.num_rows) for shape in every if shape.packed} == {
        (size, size * width + PROMPT_ROWS) for size in (1, 2, 4, 6) for width in (1, 8)
    }
    largest = shapes.largest()
    assert set(largest) <= set(every)
    assert all(shape.num_seqs == 6 and shape.num_drafts == 7 for shape in largest)
    even = [shape for shape in largest if not (shape.packed or shape.together)]
    assert {(shape.kind, shape.places) for shape in even} == {
        (kind, places) for kind in ("filtered", "full") for places in (0, hedge)
    }
    assert {(shape.packed, shape.together) for shape in largest if shape not in even} == {
        (True, False),
        (False, True),
    }


SLOTS = 70
MANY = shapes_for(SLOTS, hedge=4)
CAPTURED = frozenset(MANY.to_capture())


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=SLOTS - 2),
    st.lists(st.integers(2, 60), max_size=2),
    st.one_of(st.none(), st.integers(0, 7)),
    st.sampled_from(FIXED_KINDS),
    st.sampled_from([0, 0, 1, 3]),
    st.booleans(),
)
def test_what_a_step_takes_is_captured(
    drafts: list[int], prompts: list[int], depth: int | None, kind: FixedKind, chains: int, propose: bool
) -> None:
    if kind == "full":
        drafts = [n if depth is None else min(n, depth) for n in drafts[:64]]  # as they are then cut
    spans = spans_with(drafts, chains, propose)
    spans += [Span(SLOTS - i, n, 0, propose) for i, n in enumerate(prompts, 1)]
    shape = MANY.choose(spans, kind, depth)
    if shape is None:
        assert prompts
        return
    assert shape in CAPTURED and shape.num_seqs >= len(spans)
    assert FIXED_KINDS.index(shape.kind) >= FIXED_KINDS.index(kind) and shape.kind in CAPTURED_KINDS
    assert not (prompts and (chains or kind == "full"))
    assert not (shape.packed and shape.kind == "full"), "whose parameters look at whole spans"
    assert shape.propose or not propose
    assert not MANY.may_be_together(shape) or MANY.with_common_keys(shape) in CAPTURED


def test_a_round_has_the_rows_that_are_needed() -> None:
    """Where nobody plans: fewer than all places have, when some are empty or have fewer drafts."""
    shapes = shapes_for(24, hedge=24)
    assert shapes.draft_counts[24] == [3, 5, 7]

    def rows(drafts: list[int], depth: int | None = None, chains: int = 0) -> int:
        shape = chosen(shapes, spans_with(drafts, chains), depth)
        assert shape.num_drafts == 7
        return shape.num_rows

    assert rows([7] * 24) == 24 * 8
    assert rows([7] * 18) == rows([7] * 17 + [0]) == 24 * 6 == 18 * 8
    assert rows([7] * 18 + [0]) == 24 * 8
    assert rows([7] * 4 + [1] * 20) == 24 * 4
    assert rows([7] * 18, depth=7) == 24 * 8, "who plans has chosen"
    assert rows([7] * 18, chains=3) == 24 * 8, "chains go with all drafts"


def test_uncaptured_rounds_have_exactly_the_rows_that_are_needed() -> None:
    shapes = shapes_for(24, captured=False)
    assert chosen(shapes, spans_with([7, 7, 7])) == RoundShape.even(3, 7, True, "greedy")
    packed = chosen(shapes, spans_with([7, 7, 2]))
    assert packed == RoundShape(3, 7, 3 + 16, True, "greedy", packed=True)
    assert chosen(shapes, spans_with([7, 7, 2]), depth=3).num_rows == 3 + 9


def test_from_which_size_on_a_drafter_is_asked_how_sure_it_is() -> None:
    """Where rounds with rows for some drafts only begin."""
    shapes = shapes_for(24)
    counts = {size: len(counts) for size, counts in shapes.draft_counts.items()}
    assert counts == {size: 1 if size < shapes.choosy_from else 3 for size in tiers(24)}
    assert shapes_for(24, captured=False).choosy_from == 2


@pytest.mark.parametrize(
    ("drafts", "prompts", "depth", "rows"),
    [
        ([7] * 17, [2], None, 24 * 6),  # nobody plans: nearly all drafts
        ([7] * 17, [2], 3, 24 * 4),
        ([7] * 17, [2], 5, 24 * 6),  # rows of three drafts each would do, and are not what was planned
        ([7] * 17, [40], 3, 24 * 4),  # a quarter of 51 drafts is given up
        ([7] * 17, [41], 3, 24 * 6),
        ([7] * 8, [4] * 14, 3, 24 * 4),  # drafts are for those that have some
        ([7] * 17, [2], 7, 24 * 8),
        ([0] * 17, [2], 0, 24 * 4),  # nobody has drafts, but all propose
    ],
)
def test_which_round_takes_prompts(
    drafts: list[int], prompts: list[int], depth: int | None, rows: int
) -> None:
    spans = spans_with([*drafts, *[0] * len(prompts)])
    for span, count in zip(spans[len(drafts) :], prompts, strict=True):
        span.rows = count
    assert chosen(shapes_for(24), spans, depth).num_rows == rows


def test_rounds_with_room_for_prompts() -> None:
    """Where rows cost little, and for plain decoding, which has no drafts to give up. Not where most of a
    round would be nobody's.
    """
    assert [roomy(size, 7).num_rows for size in (1, 16, 24)] == [8 + 64, 128 + 64, 192]
    assert [roomy(size, 0).num_rows for size in (1, 64, 256)] == [65, 128, 320]
    shapes, resuming = shapes_for(64), spans_with([0] * 60)
    assert shapes.choose([*resuming, Span(60, 2, propose=True)], "greedy", 0) is None
    assert shapes.choose([*resuming, Span(60, 80, propose=True)], "greedy", 0) is not None


@given(
    st.lists(st.integers(0, 7), max_size=8),
    st.lists(st.integers(2, 60), min_size=1, max_size=4),
    st.one_of(st.none(), st.integers(0, 7)),
    st.booleans(),
)
def test_a_round_for_prompts_has_room(
    drafts: list[int], prompts: list[int], depth: int | None, propose: bool
) -> None:
    """For every known token, and nearly all drafts that were planned for."""
    spans = spans_with(drafts, propose=propose)
    spans += [Span(8 + i, n, 0, propose) for i, n in enumerate(prompts)]
    shape = shapes_for(12).choose(spans, "greedy", depth)
    known = sum(span.rows - span.drafts for span in spans)
    most = max(drafts, default=0) if depth is None else min(depth, max(drafts, default=0))
    wanted = min(sum(drafts), most * sum(span.lead == 0 for span in spans))
    needed = known + wanted - wanted // GIVEN_UP
    if shape is None:
        size = next(size for size in tiers(12) if size >= len(spans))
        most_rows = roomy(size, 7 if wanted or propose else 0).num_rows
        assert needed > most_rows or most_rows - needed > max(CHEAP_ROWS, needed), "most would be nobody's"
        return
    assert shape.packed and shape.num_seqs >= len(spans) and shape.num_rows >= needed
    assert shape.propose or not any(span.propose for span in spans)
    assert shape.num_drafts == 7 or not wanted
