"""Log-probabilities in OpenAI's two formats and vLLM's one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from paceline.sampling.logprobs import Logprob
from paceline.text.detokenizer import IncrementalDetokenizer
from paceline.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""What OpenAI shows for a token that cannot occur; JSON has no infinity."""

Entries = Sequence[dict[int, Logprob]]


class TokenNames:
    """How tokens are shown: as text, or as ``token_id:N`` on request and without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = None if as_ids else tokenizer
        self._bytes_of = tokenizer

    def name(self, token_id: int) -> str:
        """The token's text; ``bytes:\\x..`` for a part of a character, so that two such tokens stay
        distinct."""
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def bytes(self, token_id: int) -> list[int] | None:
        """The token's bytes, None when unknown."""
        return None if self._bytes_of is None else list(self._bytes_of.token_bytes(token_id))


class TextOffsets:
    """Where each token of a growing text begins: after the characters that all tokens before it have made.

    A token that only continues a character begins where the character does. Text that is held back, or cut
    off by a stop string, counts, so that an offset is certain as soon as its token is there.

    Args:
        tokenizer: None where tokens make no text.
        begin: characters before the first token.
        skip_special_tokens: special tokens make no text.
    """

    def __init__(self, tokenizer: Tokenizer | None, begin: int, *, skip_special_tokens: bool) -> None:
        self._detokenizer = (
            None
            if tokenizer is None
            else IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        )
        self._end = begin

    def push(self, token_ids: Sequence[int]) -> list[int]:
        """Offsets of the next tokens."""
        offsets = []
        for token in token_ids:
            offsets.append(self._end)
            if self._detokenizer is not None:
                self._end += len(self._detokenizer.push([token]))
        return offsets


def echo_offsets(tokenizer: Tokenizer | None, token_ids: Sequence[int], text: str) -> list[int]:
    """Where each token of an echoed prompt begins in ``text``, in which a special token may stand or not:
    one that the tokenizer added does not.
    """
    if tokenizer is None:
        return [0] * len(token_ids)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    offsets, end = [], 0
    for token in token_ids:
        offsets.append(min(end, len(text)))
        piece = detokenizer.push([token])
        if token not in tokenizer.special_ids or text.startswith(piece, end):
            end += len(piece)
    return offsets


def _finite(value: float) -> float:
    return max(value, LOWEST) if not math.isnan(value) else LOWEST


def chat_logprobs(names: TokenNames, token_ids: Sequence[int], entries: Entries, top: int) -> dict[str, Any]:
    """``choices[].logprobs`` of chat completions: the chosen tokens, each with its ``top`` most likely
    ones."""

    def one(token: int, item: Logprob) -> dict[str, Any]:
        return {"token": names.name(token), "logprob": _finite(item.logprob), "bytes": names.bytes(token)}

    content = []
    for token, entry in zip(token_ids, entries, strict=True):
        ranked = sorted(entry.items(), key=lambda pair: -pair[1].logprob)[:top]
        content.append({**one(token, entry[token]), "top_logprobs": [one(*pair) for pair in ranked]})
    return {"content": content}


def completion_logprobs(
    names: TokenNames,
    token_ids: Sequence[int],
    entries: Sequence[dict[int, Logprob] | None],
    offsets: Sequence[int],
) -> dict[str, Any]:
    """``choices[].logprobs`` of completions.

    Args:
        names: how to show tokens.
        token_ids: tokens of the text, the echoed prompt's included.
        entries: per token; None for the first token of a prompt, which nothing predicts.
        offsets: per token the character of the text at which it begins.
    """
    tokens, values, tops = [], [], []
    for token, entry in zip(token_ids, entries, strict=True):
        tokens.append(names.name(token))
        values.append(None if entry is None else _finite(entry[token].logprob))
        tops.append(
            None
            if entry is None
            else {names.name(other): _finite(item.logprob) for other, item in entry.items()}
        )
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": [*offsets]}


def prompt_logprobs(
    entries: Sequence[dict[int, Logprob] | None],
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's ``prompt_logprobs``: per prompt token, token id to log-probability, rank and text."""
    return [
        None
        if entry is None
        else {
            str(token): {
                "logprob": _finite(item.logprob),
                "rank": item.rank,
                "decoded_token": item.decoded_token,
            }
            for token, item in entry.items()
        }
        for entry in entries
    ]
