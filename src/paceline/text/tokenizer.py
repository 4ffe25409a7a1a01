"""The checkpoint's tokenizer: a thin, typed face over the ``tokenizers`` library.

Two things it adds. Untrusted text can be encoded so that it never yields a *control token* (a token flagged
special, such as ``<|im_end|>``); and a token's exact bytes are known for byte-level vocabularies, which makes
incremental decoding exact.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Backend

from paceline.errors import CheckpointError, RequestError
from paceline.json_files import read_json
from paceline.text.shield import Shield

TOKENIZER_FILE = "tokenizer.json"
_NAMED_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to token ids and back, as the checkpoint defines it.

    Safe to share between threads: nothing is changed after construction but caches of pure functions.

    Attributes:
        config: the checkpoint's ``tokenizer_config.json`` ({} when it has none).
        special_tokens: the named special tokens, such as ``{"eos_token": "<|im_end|>"}``; handed to chat
            templates.
        vocab_size: one more than the highest token id the tokenizer knows. The model may have more rows
            (padding).
        special_ids: ids of the tokens flagged special: what ``skip_special_tokens`` skips.
        control_ids: ids that untrusted text must not yield: the special ones and the named ones.
        shield: marks the text of control tokens inside untrusted strings.
        byte_level: whether decoding is concatenation of token bytes (GPT-2 style byte-level BPE, as Qwen3's).
    """

    def __init__(self, backend: Backend, config: Mapping[str, Any] | None = None) -> None:
        """Wrap a ``tokenizers.Tokenizer``, which must not be changed afterwards.

        Args:
            backend: the tokenizer; its truncation and padding are switched off.
            config: contents of ``tokenizer_config.json``.
        """
        self.config: Mapping[str, Any] = dict(config or {})
        self._backend = backend
        # tokenizer.json files saved after training often carry both; a server must see whole prompts
        backend.no_truncation()
        backend.no_padding()
        _apply_added_tokens(backend, self.config)
        self.special_tokens = _named_specials(self.config)

        added = backend.get_added_tokens_decoder()
        named = {
            token_id
            for text in self.special_tokens.values()
            if (token_id := backend.token_to_id(text)) is not None
        }
        self.vocab_size = max([backend.get_vocab_size(with_added_tokens=False), *(i + 1 for i in added)])
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.control_ids = self.special_ids | named
        self.byte_level = _is_byte_level(backend)
        self.shield = Shield(filter(None, (backend.id_to_token(i) for i in self.control_ids)))
        self._normalize_first = backend.normalizer is not None and any(
            added[i].normalized for i in self.control_ids if i in added
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Load ``tokenizer.json`` and, where present, ``tokenizer_config.json`` and
        ``special_tokens_map.json``.

        Raises:
            CheckpointError: no ``tokenizer.json``, or a file that cannot be read.
        """
        folder = Path(folder)
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise CheckpointError(
                f"{folder} has no {TOKENIZER_FILE}. Paceline reads fast tokenizers only: write one with "
                "`transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)`, "
                "or work with token ids alone (skip_tokenizer_init=True)."
            )
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}") from error
        config = read_json(folder / "special_tokens_map.json", required=False)
        config.update(read_json(folder / "tokenizer_config.json", required=False))
        return cls(backend, config)

    # -- text to ids -----------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: any string without lone surrogates.
            add_special_tokens: apply the checkpoint's post-processor, which may add a beginning-of-sequence
                token.
            allow_special: whether the text of a control token becomes that token (as in a raw completion
                prompt). With False it is read as ordinary characters; text without such strings encodes the
                same either way.

        Raises:
            RequestError: the text is not valid Unicode, or a control token cannot be avoided.
        """
        if allow_special:
            return self._encode(text, add_special_tokens).ids
        text = self.normalized(text)
        stand_ins = self.shield.stand_ins([text])
        marked = self.shield.mark_literals(text, stand_ins)
        return self.encode_marked(marked, stand_ins, add_special_tokens=add_special_tokens)

    def encode_marked(
        self, marked: str, stand_ins: Mapping[str, str], *, add_special_tokens: bool = False
    ) -> list[int]:
        """Token ids of a text in which ``Shield`` has marked what must not become a control token.

        The text is cut after every marked character, so that no piece holds the whole text of a control token
        that a user wrote; the pieces are encoded alone and joined. A text without marks is one piece: exactly
        ``encode``.

        Args:
            marked: output of the shield, or a template's rendering that contains such outputs.
            stand_ins: what the shield marked with: character to stand-in.
            add_special_tokens: as in ``encode``.
        """
        pieces = self.shield.cut(marked, stand_ins)
        if len(pieces) == 1:
            return self._encode(pieces[0], add_special_tokens).ids
        for piece in pieces[:-1]:
            # A control token of one character cannot be cut in two. No known checkpoint has one; do not let
            # it by.
            if piece[-1] in self.shield.literals:
                raise RequestError(
                    f"the text contains {piece[-1]!r}, which this model knows only as a control token: "
                    "remove it."
                )
        merged = Encoding.merge([self._encode(piece, add_special_tokens=False) for piece in pieces])
        return self._backend.post_process(merged, None, add_special_tokens).ids

    def normalized(self, text: str) -> str:
        """The text as control tokens are matched against it: normalised when any of them matches after
        normalisation.

        Otherwise a look-alike (a full-width ``＜``) could turn into a control token behind the shield's back.
        """
        if not self._normalize_first:
            return text
        result: str = self._backend.normalizer.normalize_str(text)
        return result

    def _encode(self, text: str, add_special_tokens: bool) -> Encoding:
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens)
        except TypeError as error:  # the binding's answer to a string that is not UTF-8 encodable
            raise RequestError(
                "the text contains a lone surrogate (half of a UTF-16 pair), which is not valid Unicode: "
                "send well-formed UTF-8 or complete \\u escapes."
            ) from error

    # -- ids to text -----------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no valid UTF-8 become U+FFFD, ids outside the vocabulary
        nothing."""
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary entry of an id (in the vocabulary's own spelling), or None for an id outside of
        it."""
        # ids come from clients too (/detokenize); the binding raises OverflowError beyond 32 bits
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a vocabulary entry, or None."""
        return self._backend.token_to_id(token)

    @functools.cached_property
    def _token_bytes(self) -> dict[int, bytes]:
        return {}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text; ``b""`` outside the vocabulary.

        Exact for byte-level vocabularies, where one token may be a part of a character. For others, the UTF-8
        bytes of the token decoded alone.
        """
        cache = self._token_bytes
        known = cache.get(token_id)
        if known is None:
            token = self.id_to_token(token_id)
            if token is None:
                return b""
            if self.byte_level:
                known = _byte_level_bytes(token)
            else:
                known = self.decode([token_id], skip_special_tokens=False).encode()
            cache[token_id] = known
        return known

    def token_text(self, token_id: int) -> str:
        """A token as readable text, for log-probabilities: U+FFFD where it is only a part of a character."""
        return self.token_bytes(token_id).decode(errors="replace")

    @functools.cached_property
    def max_token_chars(self) -> int | None:
        """Characters that no token's text exceeds; None where a token may stand for any text (unknown
        words)."""
        return max(map(len, self._backend.get_vocab())) if self.byte_level else None


def _apply_added_tokens(backend: Backend, config: Mapping[str, Any]) -> None:
    """Add what ``added_tokens_decoder`` of tokenizer_config.json says beyond tokenizer.json, as transformers
    does."""
    declared = config.get("added_tokens_decoder") or {}
    known = backend.get_added_tokens_decoder()
    for token_id, entry in sorted((int(i), entry) for i, entry in declared.items()):
        token = AddedToken(**{k: v for k, v in entry.items() if k != "__type"})
        present = known.get(token_id)
        if present is not None and present.content == token.content and present.special == token.special:
            continue
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        got = backend.token_to_id(token.content)
        if got != token_id:
            raise CheckpointError(
                f"tokenizer_config.json gives {token.content!r} the id {token_id}, but tokenizer.json "
                f"gives it {got}: the two files do not belong together."
            )


def _named_specials(config: Mapping[str, Any]) -> dict[str, str]:
    specials: dict[str, str] = {}
    for name in _NAMED_SPECIALS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str) and text:
            specials[name] = text
    return specials


def _is_byte_level(backend: Backend) -> bool:
    if backend.decoder is None:
        return False
    state = json.loads(backend.decoder.__getstate__())
    parts: Iterable[Mapping[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return [part["type"] for part in parts] == ["ByteLevel"]


@functools.cache
def _byte_of_char() -> dict[str, int]:
    # GPT-2's reversible map (Radford et al. 2019): printable Latin-1 stands for itself, the others for U+0100
    # onwards
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(rest)}


def _byte_level_bytes(token: str) -> bytes:
    table = _byte_of_char()
    try:
        return bytes([table[char] for char in token])
    except KeyError:  # an added token with other characters stands for its own UTF-8
        return token.encode()
