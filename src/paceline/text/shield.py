"""Keeps strings written by users from turning into control tokens once they are part of a prompt.

The text of a control token (``<|im_end|>``) inside a message must be read as ordinary characters. Escaping
it on the way in and undoing that on the way out is not enough when a chat template stands between: it may
strip, split, slice or join what it is given. The shield therefore *marks* characters: the first character
of each such text is replaced by a stand-in, a code point that occurs nowhere else in the prompt. After
rendering, the prompt is cut behind every stand-in (now replaced by what it stands for) and the pieces are
tokenised apart. A piece can hold the text of a control token only if all of it was written by the template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# Plane 16 private use: no assigned meaning, kept by str.strip(), str.lower() and every Jinja filter.
_STAND_INS = range(0x10FFFD, 0x100000, -1)


class Shield:
    """Marks and cuts; knows the texts of the control tokens.

    Attributes:
        literals: texts of the control tokens.
        first_chars: the characters they begin with.
    """

    def __init__(self, literals: Iterable[str]) -> None:
        # White space as a control token (none is known) would make every message an attack.
        self.literals = frozenset(text for text in literals if text.strip())
        self.first_chars = frozenset(text[0] for text in self.literals)
        groups = []
        for first in sorted(self.first_chars):
            rests = sorted((text[1:] for text in self.literals if text[0] == first), key=len, reverse=True)
            # the rest is looked at, not consumed, so that overlapping occurrences are all found
            groups.append(f"{re.escape(first)}(?={'|'.join(map(re.escape, rests))})")
        # "(?!)" matches nothing
        self._literal = re.compile("|".join(groups) or "(?!)")
        self._any_first = re.compile("|".join(map(re.escape, sorted(self.first_chars))) or "(?!)")

    def concerns(self, text: str) -> bool:
        """Whether the text has any character a control token begins with; if not, nothing needs marking."""
        return self._any_first.search(text) is not None

    def stand_ins(self, texts: Iterable[str]) -> dict[str, str]:
        """One stand-in for each first character, none of which occurs in ``texts``: character to stand-in."""
        used: set[str] = set()
        for text in texts:
            if not text.isascii():
                used.update(text)
        free = (char for code in _STAND_INS if (char := chr(code)) not in used)
        return {first: next(free) for first in sorted(self.first_chars)}

    def mark_literals(self, text: str, stand_ins: Mapping[str, str]) -> str:
        """Replace the first character of every control token's text in ``text``."""
        return self._literal.sub(lambda m: stand_ins[m[0]], text)

    def mark_all(self, text: str, stand_ins: Mapping[str, str]) -> str:
        """Replace every character a control token could begin with.

        Nothing that is done to the result, short of writing new text, can produce a control token.
        """
        return self._any_first.sub(lambda m: stand_ins[m[0]], text)

    def cut(self, marked: str, stand_ins: Mapping[str, str]) -> list[str]:
        """The pieces of a marked text, one at least.

        All but the last end with a character that was marked and is now itself again.
        """
        if marked.isascii() or not stand_ins:
            return [marked]
        pieces = re.split(f"(?<=[{''.join(stand_ins.values())}])", marked)
        table = str.maketrans({image: char for char, image in stand_ins.items()})
        return [piece.translate(table) for piece in pieces]

    def literals_in(self, marked: str, stand_ins: Mapping[str, str]) -> list[str]:
        """The texts of control tokens that are whole in the pieces of a marked text, in order."""
        return [
            max((text for text in self.literals if piece.startswith(text, match.start())), key=len)
            for piece in self.cut(marked, stand_ins)
            for match in self._literal.finditer(piece)
        ]


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON-like value with every string, keys included, changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(k) if isinstance(k, str) else k: map_strings(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, change) for item in value]
    return value


def strings_in(value: Any) -> list[str]:
    """Every string in a JSON-like value, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for k, v in value.items() for item in (k, v) for text in strings_in(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in strings_in(item)]
    return []
