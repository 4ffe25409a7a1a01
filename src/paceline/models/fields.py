"""Strict reading of a ``config.json``: typed, with every key accounted for.

A key that is silently skipped is how a model comes to give plausible but wrong text. So every key must be
either read or known to have no influence on the computation; the rest is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from paceline.errors import CheckpointError


class _Required:
    """Marks a field without a default."""


REQUIRED: Final = _Required()

# Bookkeeping of the tools that write config.json; training-time settings; output switches. None of them
# changes a forward pass.
IGNORABLE: Final = frozenset(
    """
    architectures auto_map model_type transformers_version torch_dtype dtype use_cache initializer_range
    attention_dropout pad_token_id bos_token_id eos_token_id sep_token_id decoder_start_token_id
    output_attentions output_hidden_states return_dict return_dict_in_generate torchscript id2label label2id
    problem_type task_specific_params tokenizer_class finetuning_task is_decoder is_encoder_decoder
    name_or_path gradient_checkpointing chunk_size_feed_forward pretraining_tp prefix
    """.split()  # noqa: SIM905 (words read better as words)
)
_IGNORABLE_PREFIXES: Final = ("_", "unsloth_")


class Fields:
    """One JSON object of a config, read key by key.

    Args:
        values: the parsed object.
        where: what the object is, for messages (a path, or a path and a key).
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def raw(self, key: str, default: Any = None) -> Any:
        """The value as parsed; null counts as absent."""
        self._read.add(key)
        value = self.values.get(key)
        if value is not None:
            return value
        if default is REQUIRED:
            raise CheckpointError(f"{self.where}: the required key {key!r} is missing")
        return default

    def integer(self, key: str, default: int | _Required = REQUIRED, *, low: int = 1) -> int:
        """An integer of at least ``low``."""
        value = self.raw(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, value, "an integer")
        if value < low:
            raise self.wrong(key, value, f"an integer of at least {low}")
        return value

    def optional_integer(self, key: str, *, low: int = 1) -> int | None:
        """An integer of at least ``low``, or None when absent or null."""
        return self.integer(key, low=low) if self.has(key) else self.raw(key)

    def number(self, key: str, default: float | _Required = REQUIRED) -> float:
        """A number above 0."""
        value = self.raw(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.wrong(key, value, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool | _Required = REQUIRED) -> bool:
        """true or false."""
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def string(self, key: str, default: str | _Required = REQUIRED) -> str:
        """A string."""
        value = self.raw(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        return value

    def integers(self, key: str, *, low: int = 0) -> tuple[int, ...]:
        """A list of integers, each at least ``low``."""
        value = self.raw(key, REQUIRED)
        if not isinstance(value, list) or any(
            isinstance(v, bool) or not isinstance(v, int) or v < low for v in value
        ):
            raise self.wrong(key, value, f"a list of integers of at least {low}")
        return tuple(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them, as a tuple; () when absent."""
        value = self.raw(key, [])
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in ids):
            raise self.wrong(key, value, "a token id or a list of token ids")
        return tuple(ids)

    def section(self, key: str) -> Fields:
        """A nested object."""
        value = self.raw(key, REQUIRED)
        if not isinstance(value, dict):
            raise self.wrong(key, value, "an object")
        return Fields(value, f"{self.where}, {key!r}")

    def wrong(self, key: str, value: object, expected: str) -> CheckpointError:
        """The error for a value that is not what the key allows."""
        return CheckpointError(f"{self.where}: {key!r} is {value!r}, expected {expected}")

    def finish(self, also_ignorable: Iterable[str] = ()) -> None:
        """Refuse every key that was neither read nor is known to be harmless. Null values are harmless."""
        allowed = self._read | IGNORABLE | set(also_ignorable)
        unknown = sorted(
            key
            for key, value in self.values.items()
            if key not in allowed and value is not None and not key.startswith(_IGNORABLE_PREFIXES)
        )
        if unknown:
            listed = ", ".join(f"{key} = {self.values[key]!r}"[:80] for key in unknown)
            raise CheckpointError(
                f"{self.where}: unknown keys, which may change the computation: {listed}. Paceline refuses "
                "what it does not implement; remove a key from the file if you know that it changes nothing."
            )
