"""``--explain``: colours follow the tokens' origins, the text stays what it is."""

from __future__ import annotations

import io

from rich.console import Console

from paceline.cli.explain import BONUS_STYLE, PLAIN_STYLE, coloured, legend, style_of
from paceline.engine.outputs import BONUS, PLAIN, CompletionOutput, RequestMetrics
from paceline.text import Tokenizer


def completion(tokenizer: Tokenizer, text: str, shown: str | None = None) -> CompletionOutput:
    ids = tokenizer.encode(text)
    origins = [PLAIN, *([1, 2, 3, BONUS] * len(ids))][: len(ids)]
    return CompletionOutput(0, text if shown is None else shown, ids, origins=origins)


def test_every_token_has_its_colour_and_the_text_is_unchanged(tokenizer: Tokenizer) -> None:
    given = completion(tokenizer, "Hello 🙂, naïve [bold]world[/].\nEND :key: of it")
    text = coloured(given, tokenizer)
    assert text.plain == given.text
    styles = [span.style for span in text.spans if span.start < span.end]
    assert PLAIN_STYLE in styles and BONUS_STYLE in styles
    assert {style_of(k) for k in (1, 2, 3)} <= set(styles)


def test_what_a_stop_string_cut_off_stays_off(tokenizer: Tokenizer) -> None:
    assert coloured(completion(tokenizer, "one two three", "one tw"), tokenizer).plain == "one tw"


def test_an_unfinished_character_is_shown_as_such(tokenizer: Tokenizer) -> None:
    whole = completion(tokenizer, "a🙂")
    cut = CompletionOutput(0, "a\ufffd", whole.token_ids[:-1], origins=whole.origins[:-1])
    assert len(whole.token_ids) > 2, "the character must take several tokens"
    assert coloured(cut, tokenizer).plain == "a\ufffd"


def test_positions_beyond_the_palette_still_have_a_colour() -> None:
    assert style_of(40) == style_of(8) and style_of(1) != style_of(2)


def test_the_legend_names_what_there_is(tokenizer: Tokenizer) -> None:
    metrics = RequestMetrics(0.0)
    assert "nothing was drafted" in legend([], metrics).plain
    metrics.add_round(7, 3)
    metrics.add_round(7, 1)
    text = legend([completion(tokenizer, "Hello world of words")], metrics)
    console = Console(file=io.StringIO(), width=200)
    console.print(text)
    assert "draft 1 2 3  bonus" in text.plain
    assert "4 of 14 drafts stand in 2 rounds, accept length 3.00" in text.plain
