"""Prompts: all ids are checked, and the first that does not exist is named."""

from __future__ import annotations

import pytest

from paceline.engine.prompt import prompt_array
from paceline.errors import RequestError

VOCAB = 151_936


def test_ids_are_kept_as_they_are() -> None:
    ids = [0, VOCAB - 1, 7, 7]
    tokens = prompt_array(ids, VOCAB)
    assert tokens.tolist() == ids
    assert tokens.itemsize == 4


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**32, 2**32 + 1, -(2**70)])
def test_the_first_id_that_does_not_exist_is_named(bad: int) -> None:
    with pytest.raises(RequestError, match=rf"token id {bad}; ids must lie in 0\.\.{VOCAB - 1}\.") as refused:
        prompt_array([1, bad, -5, VOCAB + 1], VOCAB)
    assert refused.value.param == "prompt"


def test_an_id_too_long_to_be_printed_is_refused_like_any_other() -> None:
    with pytest.raises(RequestError, match="token id an integer of thousands of digits; ids must lie"):
        prompt_array([1, 10**5000], VOCAB)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="no tokens"):
        prompt_array([], VOCAB)
