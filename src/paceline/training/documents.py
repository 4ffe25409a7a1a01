"""Token sequences on disk and in memory: prompts, or prompts with the target's answers.

One safetensors file holds many documents back to back, with ids in 16 bits where the vocabulary allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from paceline.errors import ConfigError

IntArray = NDArray[np.integer[Any]]
FORMAT: Final = "paceline-documents-1"


@dataclass(frozen=True)
class Documents:
    """Token sequences, each a context followed by an answer (which is empty in a prompt).

    Attributes:
        tokens: [N] uint16 or int32, all documents back to back.
        offsets: [D + 1] int64; document i is ``tokens[offsets[i]:offsets[i + 1]]``.
        num_context: [D] int32, its leading tokens that were given, not generated.
        temperature: [D] fp32 the answer was sampled at; of a prompt, NaN.
        source: [D] int32, index of the prompt an answer belongs to.
    """

    tokens: IntArray
    offsets: NDArray[np.int64]
    num_context: NDArray[np.int32]
    temperature: NDArray[np.float32]
    source: NDArray[np.int32]

    @staticmethod
    def of(
        sequences: Sequence[Sequence[int]],
        vocab_size: int,
        num_context: Sequence[int] | None = None,
        temperature: Sequence[float] | None = None,
        source: Sequence[int] | None = None,
    ) -> Documents:
        """Pack sequences; without ``num_context`` they are prompts."""
        lengths = [len(sequence) for sequence in sequences]
        count = len(sequences)
        dtype = np.uint16 if vocab_size <= 2**16 else np.int32
        flat = [token for sequence in sequences for token in sequence]
        return Documents(
            np.array(flat, dtype),
            np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
            np.array(lengths if num_context is None else num_context, np.int32),
            np.array([np.nan] * count if temperature is None else temperature, np.float32),
            np.array(range(count) if source is None else source, np.int32),
        )

    def __len__(self) -> int:
        return len(self.num_context)

    def __getitem__(self, index: int) -> IntArray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[D], tokens per document."""
        return np.diff(self.offsets)

    @property
    def answered(self) -> bool:
        """Whether these are answers rather than prompts."""
        return bool((self.num_context < self.lengths).any())

    def subset(self, indices: IntArray) -> Documents:
        """The documents of these indices, in that order."""
        lengths = self.lengths[indices]
        parts = [self[int(i)] for i in indices]
        return Documents(
            np.concatenate(parts) if parts else self.tokens[:0],
            np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
            self.num_context[indices],
            self.temperature[indices],
            self.source[indices],
        )

    @staticmethod
    def concatenate(parts: Sequence[Documents]) -> Documents:
        """All documents of several sets."""
        sizes = [part.offsets[-1] for part in parts]
        starts = np.concatenate(([0], np.cumsum(sizes)))
        offsets = [part.offsets[:-1] + start for part, start in zip(parts, starts, strict=False)]
        return Documents(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([*offsets, starts[-1:]]).astype(np.int64),
            np.concatenate([part.num_context for part in parts]),
            np.concatenate([part.temperature for part in parts]),
            np.concatenate([part.source for part in parts]),
        )

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        tensors: dict[str, NDArray[Any]] = {
            "tokens": self.tokens,
            "offsets": self.offsets,
            "num_context": self.num_context,
            "temperature": self.temperature,
            "source": self.source,
        }
        partial = path.with_name(path.name + ".partial")
        save_file(tensors, partial, metadata={"format": FORMAT})
        partial.replace(path)

    @staticmethod
    def load(path: Path) -> Documents:
        """Read a file.

        Raises:
            ConfigError: it is not one of ours.
        """
        try:
            with safe_open(path, framework="np") as file:
                if (file.metadata() or {}).get("format") != FORMAT:
                    raise ConfigError(
                        f"{path} holds no token sequences (format {FORMAT!r}); give a file written by "
                        "train-drafter, or prompts as .jsonl or .txt"
                    )
                fields = ("tokens", "offsets", "num_context", "temperature", "source")
                return Documents(*(file.get_tensor(name) for name in fields))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} cannot be read as safetensors: {error}") from error

    def check(self, vocab_size: int, max_len: int, where: str) -> None:
        """Refuse ids outside the vocabulary and documents that are empty or too long for the target.

        Raises:
            ConfigError: naming the document.
        """
        if len(self) == 0:
            raise ConfigError(f"{where} holds no documents")
        if int(self.tokens.max(initial=0)) >= vocab_size:
            raise ConfigError(
                f"{where}: token id {int(self.tokens.max())} is outside the target's vocabulary of "
                f"{vocab_size}; it was made for another target"
            )
        lengths = self.lengths
        if int(lengths.min()) < 1 or int(lengths.max()) > max_len:
            raise ConfigError(
                f"{where}: documents must have 1 to {max_len} tokens (the target's context), got "
                f"{int(lengths.min())} to {int(lengths.max())}"
            )
