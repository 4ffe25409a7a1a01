"""Token ids to text, a few at a time, equal to decoding them all at once.

For byte-level vocabularies (Qwen3's kind) a text is the concatenation of its tokens' bytes, so an incremental
UTF-8 decoder is the whole algorithm: exact, constant memory, linear time, and a replacement character comes
out only once the bytes are certain to be invalid. Other vocabularies are decoded over a sliding window of
tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from paceline.text.tokenizer import Tokenizer

_MAX_PENDING_TOKENS = 8
"""Window decoding: a character has at most four bytes, so this many tokens without a whole one are none."""


class IncrementalDetokenizer:
    """Decodes one sequence's output as it grows.

    After ``flush`` the concatenation of all returned strings is ``tokenizer.decode`` of all ids (for
    byte-level vocabularies, always; for others, as long as the output is valid text).
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.byte_level else None
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        """Text made certain by more tokens; may be empty while a character is incomplete."""
        if self._bytes is not None:
            token_bytes = self._tokenizer.token_bytes
            return self._bytes.decode(b"".join(token_bytes(i) for i in ids if i not in self._skipped))
        return "".join(self._push_windowed(i) for i in ids if i not in self._skipped)

    def flush(self) -> str:
        """The end of the sequence: what is still incomplete, as U+FFFD."""
        if self._bytes is not None:
            return self._bytes.decode(b"", final=True)
        return self._advance(force=True)

    def _push_windowed(self, token_id: int) -> str:
        self._pending.append(token_id)
        return self._advance(force=len(self._pending) >= _MAX_PENDING_TOKENS)

    def _advance(self, *, force: bool) -> str:
        # Decoding the last tokens again with the new ones tells how these join on (a leading space, for one).
        before = self._decode(self._context)
        after = self._decode(self._context + self._pending)
        if not force and (after.endswith("\ufffd") or len(after) <= len(before)):
            return ""
        # The context begins where a character does: bytes cut off from their character decode to nothing.
        self._context = self._pending
        self._pending = []
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
