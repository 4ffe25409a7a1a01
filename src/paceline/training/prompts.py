"""Prompts for the target to answer, from files of several kinds.

- ``.jsonl``: per line one object with ``messages`` (a conversation; the answer after its last user message is
  left to the target), ``prompt`` (text to continue), ``prompt_token_ids``, or ``text`` (a document: a random
  beginning of it becomes the prompt);
- ``.safetensors``: token sequences, see :mod:`paceline.training.documents`; a folder stands for its files;
- anything else is read as one document of text.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from paceline.errors import ConfigError, PacelineError
from paceline.text.chat import ChatTemplate
from paceline.text.tokenizer import Tokenizer
from paceline.training.documents import Documents

_KEYS: Final = ("messages", "prompt", "prompt_token_ids", "text")
MIN_PREFIX: Final = 8  # tokens of a document given to the target, at least and (usually) at most
MAX_PREFIX: Final = 512


class PromptReader:
    """Turns data files into prompts for one target.

    Args:
        folder: the target's, for its tokenizer and chat template; read when text comes along.
        vocab_size: of the target.
        max_len: longest prompt in tokens; longer ones keep their end.
        seed: chooses where documents are cut.
    """

    def __init__(self, folder: Path, vocab_size: int, max_len: int, seed: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._max_len = max_len
        self._seed = seed
        self._tokenizer: Tokenizer | None = None
        self._template: ChatTemplate | None = None

    def read(self, paths: Iterable[Path]) -> Documents:
        """All prompts (or, from .safetensors, answers) of the files.

        Raises:
            ConfigError: a file or line that cannot be used, by name and number.
        """
        packed: list[Documents] = []
        prompts: list[list[int]] = []
        for path in _files(paths):
            if not path.is_file():
                raise ConfigError(f"data file {path} does not exist")
            if path.suffix == ".safetensors":
                packed.append(Documents.load(path))
            else:
                prompts += (
                    self._lines(path) if path.suffix == ".jsonl" else [self._cut(_text(path), path.name)]
                )
        if prompts:
            packed.append(Documents.of(prompts, self._vocab_size))
        if not packed:
            raise ConfigError("no data: give at least one file of prompts or answers")
        if len({part.answered for part in packed}) > 1:
            raise ConfigError("prompts and answers are mixed; give one or the other")
        return Documents.concatenate(packed)

    def _lines(self, path: Path) -> Iterator[list[int]]:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    row = json.loads(line)
                    yield self._prompt(row, where)
                except (json.JSONDecodeError, UnicodeDecodeError) as error:
                    raise ConfigError(f"{where} is not JSON: {error}") from error
                except PacelineError as error:
                    raise ConfigError(f"{where}: {error}") from error

    def _prompt(self, row: Any, where: str) -> list[int]:
        found = [key for key in _KEYS if isinstance(row, dict) and key in row]
        if len(found) != 1:
            raise ConfigError(f"a line must be an object with exactly one of {', '.join(_KEYS)}; got {found}")
        value = row[found[0]]
        if found[0] == "prompt_token_ids":
            if not isinstance(value, list) or not all(type(token) is int for token in value):
                raise ConfigError("prompt_token_ids must be a list of integers")
            return value[-self._max_len :]
        if found[0] == "messages":
            return self._chat(value)[-self._max_len :]
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{found[0]} must be a text that is not empty")
        if found[0] == "text":
            return self._cut(value, where)
        return self._text_side().encode(value)[-self._max_len :]

    def _chat(self, messages: Any) -> list[int]:
        if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
            raise ConfigError("messages must be a list of objects with role and content")
        last = max((i for i, m in enumerate(messages) if m.get("role") == "user"), default=None)
        if last is None:
            raise ConfigError("messages hold no user message to answer")
        if self._template is None:
            self._template = ChatTemplate.from_folder(self._folder, self._text_side())
        if self._template is None:
            raise ConfigError(f"the target {self._folder} has no chat template; give prompt or text instead")
        return self._template.render(messages[: last + 1], add_generation_prompt=True)

    def _cut(self, text: str, name: str) -> list[int]:
        """A beginning of a document; its length is log-uniform, as prompts' lengths are, more or less."""
        tokens = self._text_side().encode(text)
        if not tokens:
            raise ConfigError(f"{name} is empty")
        draw = random.Random(f"{self._seed} {name}")
        longest = min(MAX_PREFIX, self._max_len)
        length = round(math.exp(draw.uniform(math.log(min(MIN_PREFIX, longest)), math.log(longest))))
        return tokens[: max(1, min(length, len(tokens) // 2))]

    def _text_side(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_folder(self._folder)
        return self._tokenizer


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(path.glob("*.safetensors"))
        else:
            yield path


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error


def split(documents: Documents, share: float, seed: int) -> tuple[Documents, Documents]:
    """(training, held out): whole prompts go to one side, with all their answers.

    Args:
        share: of the prompts that is held out; at least one is.
    """
    sources: Sequence[int] = sorted(set(documents.source.tolist()))
    count = max(1, round(len(sources) * share))
    if count >= len(sources):
        raise ConfigError(
            f"{len(sources)} prompts are too few to hold some out for the report; give more, or --eval-data"
        )
    held = set(random.Random(seed).sample(sources, count))
    mask = np.isin(documents.source, list(held))
    return documents.subset(np.flatnonzero(~mask)), documents.subset(np.flatnonzero(mask))
