"""Stop strings: found across every split, never leaked, tokens and text in agreement."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.text import StopChecker, TextStream, Tokenizer

# few letters, so that prefixes, overlaps and near misses are common
letters = st.text("ab", max_size=30)
stops = st.lists(st.text("ab", min_size=1, max_size=9), max_size=3)


def _truncate(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    """The rule by definition: first completed, then longest."""
    found = [(text.find(s) + len(s), -len(s), s) for s in stop if s in text]
    if not found:
        return text, None
    end, negative_len, matched = min(found)
    return text[: end if include else end + negative_len], matched


def _split(text: str, cuts: list[int]) -> list[str]:
    ends = [*sorted(c for c in cuts if c <= len(text)), len(text)]
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


@settings(max_examples=500)
@given(text=letters, stop=stops, cuts=st.lists(st.integers(0, 30), max_size=12), include=st.booleans())
def test_stream_equals_offline_truncation(text: str, stop: list[str], cuts: list[int], include: bool) -> None:
    expected, matched = _truncate(text, stop, include)
    checker = StopChecker(stop, include_stop_str_in_output=include)
    shown = ""
    for piece in _split(text, cuts):
        shown += checker.push(piece)
        assert expected.startswith(shown)  # nothing shown is ever taken back
    if checker.matched is None:
        shown += checker.flush()
    assert (shown, checker.matched) == (expected, matched)


@given(text=letters, stop=stops)
def test_only_a_possible_beginning_is_held_back(text: str, stop: list[str]) -> None:
    checker = StopChecker(stop)
    shown = checker.push(text)
    if checker.matched is None:
        held = text[len(shown) :]
        longest = max(
            (n for s in stop for n in range(len(s)) if text.endswith(s[:n])), default=0
        )  # the longest suffix that may still become a stop string
        assert len(held) == longest


def test_unarmed_matches_do_not_count_but_their_beginnings_do() -> None:
    checker = StopChecker(["END"])
    assert checker.push("xENDyE", armed=False) == "xENDy"
    assert checker.push("ND!") == ""
    assert checker.matched == "END"
    checker = StopChecker(["aa"])
    assert checker.push("aa", armed=False) == "a"  # the second a may begin a match
    assert checker.push("a") == ""
    assert checker.matched == "aa"


def test_nothing_after_a_match_and_no_empty_stop() -> None:
    checker = StopChecker(["."])
    assert checker.push("a.b") == "a"
    assert checker.push("c") == "" and checker.flush() == ""
    with pytest.raises(ValueError, match="empty stop string"):
        StopChecker(["a", ""])


@given(data=st.data(), include=st.booleans())
def test_token_stream_agrees_with_its_tokens(
    tokenizer: Tokenizer, data: st.DataObject, include: bool
) -> None:
    text = data.draw(
        st.lists(st.sampled_from(["a", "b", "🙂", "東京", " fox", "<|", "\n"]), max_size=12).map("".join)
    )
    stop = data.draw(
        st.lists(st.sampled_from(["ab", "🙂", "京 f", "x\n", "<|<", "b"]), max_size=3, unique=True)
    )
    ids = tokenizer.encode(text, allow_special=False)
    chunk = data.draw(st.integers(1, 5))
    expected, matched = _truncate(text, stop, include)

    stream = TextStream(tokenizer, stop=stop, include_stop_str_in_output=include)
    shown, kept = "", []
    for start in range(0, len(ids), chunk):
        update = stream.push(ids[start : start + chunk])
        shown += update.text
        kept += ids[start : start + update.num_tokens]
        if update.stop is not None:
            break
    else:
        update = stream.flush()
        shown += update.text
    assert (shown, update.stop) == (expected, matched)
    whole = tokenizer.decode(kept)
    if matched is None:
        assert kept == ids
    else:
        # the last kept token is the one that completed the stop string: with it present, without it absent
        assert matched in whole
        assert matched not in tokenizer.decode(kept[:-1])


@pytest.mark.parametrize("stop", [[], ["zzz"]])
def test_stop_token_has_no_text_unless_asked_for(tokenizer: Tokenizer, stop: list[str]) -> None:
    head, last = tokenizer.encode("hello "), tokenizer.encode("b")
    for include, expected in ((False, "hello "), (True, "hello b")):
        stream = TextStream(tokenizer, stop=stop, include_stop_str_in_output=include)
        update = stream.push(head + last, ends_with_stop_token=True)
        assert update.text + stream.flush().text == expected
        assert update.num_tokens == len(head) + 1


def test_min_tokens_delays_stop_strings(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("b"), *tokenizer.encode("a"), *tokenizer.encode("b")]
    stream = TextStream(tokenizer, stop=["b"], min_tokens=1)
    update = stream.push(ids)
    assert update == ("ba", 3, "b")
    stream = TextStream(tokenizer, stop=["b"], min_tokens=0)
    assert stream.push(ids) == ("", 1, "b")


def test_an_incomplete_character_at_the_end_can_be_the_stop(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=["\ufffd"])
    shown = stream.push(tokenizer.encode("x🙂")[:-1]).text
    last = stream.flush()
    assert shown + last.text == "x" and last.stop == "\ufffd"
