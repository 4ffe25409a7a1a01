"""``text_offset`` of completions: an index into the text, streamed or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.text import Tokenizer
from support.server_cases import Api, ScriptedEngine

PIECES = ["a", "the ", "\U0001f642", "é", "東京", "STO", "STOP", "\n", "x\ufffd", "<|im_end|>"]
STOPS = [None, "STOP", "\U0001f642", ["P\n", "東"], ["é", "TO"]]
texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join)


def characters(tokenizer: Tokenizer, token_ids: list[int]) -> int:
    """Whole characters in the tokens of a well-formed text, special ones left out."""
    shown = [token for token in token_ids if token not in tokenizer.special_ids]
    return len(b"".join(map(tokenizer.token_bytes, shown)).decode(errors="ignore"))


@settings(max_examples=60)
@given(reply=texts, stop=st.sampled_from(STOPS), include=st.booleans(), max_tokens=st.integers(1, 24))
def test_offsets_point_into_the_text_streamed_or_not(
    text_folder: Path, reply: str, stop: Any, include: bool, max_tokens: int
) -> None:
    engine = ScriptedEngine(text_folder, reply)
    tokenizer = engine.frontend.tokenizer
    assert tokenizer is not None
    api = Api(engine)
    body = {
        "prompt": "hi",
        "logprobs": 0,
        "max_tokens": max_tokens,
        "stop": stop,
        "include_stop_str_in_output": include,
        "return_token_ids": True,
    }
    choice = api.ok("/v1/completions", **body)["choices"][0]
    offsets, token_ids = choice["logprobs"]["text_offset"], choice["token_ids"]
    assert offsets == [characters(tokenizer, token_ids[:i]) for i in range(len(token_ids))]
    # With the stop string that was cut off, the text holds every place.
    cut = choice["stop_reason"] if isinstance(choice["stop_reason"], str) and not include else ""
    text = choice["text"] + cut
    assert offsets == sorted(offsets) and offsets[-1] <= len(text)
    for offset, token in zip(offsets, token_ids, strict=True):
        piece = tokenizer.token_text(token)
        if token not in tokenizer.special_ids and "\ufffd" not in piece:
            # Of the token that completes a stop string, what follows the string is cut off.
            assert text.startswith(piece[: len(text) - offset] if cut or include else piece, offset)

    streamed: list[int] = []
    for chunk in api.stream("/v1/completions", **body):
        streamed += (chunk["choices"][0]["logprobs"] or {"text_offset": []})["text_offset"]
    assert streamed == offsets


@pytest.mark.parametrize("prompt", ["a \U0001f642 b", "東 <|im_end|> x", [64, 439, 65]], ids=repr)
def test_offsets_of_an_echo_go_on_in_the_answer(scripted: ScriptedEngine, api: Api, prompt: Any) -> None:
    tokenizer = scripted.frontend.tokenizer
    assert tokenizer is not None
    choice = api.complete(prompt=prompt, logprobs=0, echo=True)["choices"][0]
    offsets = choice["logprobs"]["text_offset"]
    prompt_ids = scripted.requests[-1].prompt_token_ids
    echoed = prompt if isinstance(prompt, str) else "ab"
    assert choice["text"] == echoed + scripted.reply
    assert offsets == sorted(offsets) and offsets[-1] == len(choice["text"])
    assert offsets[len(prompt_ids)] == len(echoed)
    for offset, token in zip(offsets, prompt_ids, strict=False):
        piece = tokenizer.token_text(token)
        if "\ufffd" not in piece and (isinstance(prompt, str) or token not in tokenizer.special_ids):
            assert choice["text"].startswith(piece, offset)
