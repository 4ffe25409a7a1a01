"""Stop strings over a stream of text.

The rule, independent of how the text is split: the stop string that is *completed first* ends the output;
among those completed by the same character the one that begins first. Each stop string is followed by a
Knuth-Morris-Pratt automaton (Knuth, Morris & Pratt 1977), whose state is the length of the longest suffix of
the text that may still become the stop string. The longest of them over all stop strings is exactly what must
be held back, so no part of a stop string ever leaks and nothing else is delayed. Time is linear in the text,
for any stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.text.detokenizer import IncrementalDetokenizer
from paceline.text.tokenizer import Tokenizer


class StopChecker:
    """Finds the end of one sequence's text.

    Attributes:
        matched: the stop string that ended the text, or None.
    """

    def __init__(self, stop: Sequence[str], *, include_stop_str_in_output: bool = False) -> None:
        """Watch for the strings in ``stop``, none of which may be empty."""
        if not all(stop):
            raise ValueError("an empty stop string would end every output at once")
        self._automata = [(text, _failure(text)) for text in dict.fromkeys(stop)]
        self._states = [0] * len(self._automata)
        self._include = include_stop_str_in_output
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """Add text; return what may be shown.

        Args:
            text: what follows the text pushed before.
            armed: with False a stop string completed in this text is not a match (``min_tokens``). One that
                begins in it and is completed later is.

        After a match nothing more is returned.
        """
        if self.matched is not None:
            return ""
        if not self._automata:
            return text
        for position, char in enumerate(text):
            longest = self._step(char, armed)
            if longest is not None:
                self.matched = longest
                whole = self._held + text[: position + 1]
                self._held = ""
                return whole if self._include else whole[: len(whole) - len(longest)]
        whole = self._held + text
        shown_len = len(whole) - max(self._states)
        self._held = whole[shown_len:]
        return whole[:shown_len]

    def flush(self) -> str:
        """The end of the text without a match: what was held back."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str, armed: bool) -> str | None:
        """Advance every automaton by one character; return the longest stop string it completes."""
        longest: str | None = None
        for index, (stop, failure) in enumerate(self._automata):
            state = self._states[index]
            while state and stop[state] != char:
                state = failure[state]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                if armed and (longest is None or len(stop) > len(longest)):
                    longest = stop
                state = failure[state]
            self._states[index] = state
        return longest


def _failure(text: str) -> list[int]:
    """``failure[n]``: length of the longest proper prefix of ``text[:n]`` that is also its suffix."""
    failure = [0] * (len(text) + 1)
    border = 0
    for end in range(1, len(text)):
        while border and text[border] != text[end]:
            border = failure[border]
        if text[border] == text[end]:
            border += 1
        failure[end + 1] = border
    return failure


class TextUpdate(NamedTuple):
    """What new tokens did to a sequence's text."""

    text: str
    """New text that may be shown."""
    num_tokens: int
    """How many of the tokens stand: all, or those up to and including the one that completed a stop string.
    Token ids, log-probabilities and usage beyond it must be dropped."""
    stop: str | None
    """The stop string that ended the sequence, or None."""


class TextStream:
    """The text of one sequence: detokenizer and stop strings together, token by token."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """Start an empty text.

        Args:
            tokenizer: the checkpoint's.
            stop: strings that end the text.
            include_stop_str_in_output: keep the stop string (and the text of a stop token) in the text.
            skip_special_tokens: leave special tokens out of the text.
            min_tokens: a stop string counts only if completed by a later token than this many.
        """
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._checker = StopChecker(stop, include_stop_str_in_output=include_stop_str_in_output)
        self._has_stop = bool(stop)
        self._include = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def push(self, ids: Sequence[int], *, ends_with_stop_token: bool = False) -> TextUpdate:
        """Add tokens.

        Args:
            ids: what follows the ids pushed before.
            ends_with_stop_token: the last id ended the sequence (end-of-sequence or ``stop_token_ids``): it
                counts as a token, and has text only under ``include_stop_str_in_output``.
        """
        num_shown = len(ids) - (ends_with_stop_token and not self._include)
        if not self._has_stop:
            self._num_tokens += len(ids)
            return TextUpdate(self._detokenizer.push(ids[:num_shown]), len(ids), None)
        parts: list[str] = []
        for position in range(num_shown):
            self._num_tokens += 1
            text = self._detokenizer.push(ids[position : position + 1])
            parts.append(self._checker.push(text, armed=self._num_tokens > self._min_tokens))
            if self._checker.matched is not None:
                return TextUpdate("".join(parts), position + 1, self._checker.matched)
        return TextUpdate("".join(parts), len(ids), None)

    def flush(self) -> TextUpdate:
        """The end of the sequence for another reason than a stop string: the text still held back.

        An incomplete character becomes U+FFFD, which may itself complete a stop string.
        """
        text = self._checker.push(self._detokenizer.flush(), armed=self._num_tokens > self._min_tokens)
        if self._checker.matched is None:
            text += self._checker.flush()
        return TextUpdate(text, 0, self._checker.matched)
