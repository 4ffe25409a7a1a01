"""Sampling defaults a checkpoint ships in ``generation_config.json``.

Qwen3 checkpoints name a temperature, top_k and top_p there. A request that leaves these out gets the
checkpoint's values, not the API's, as in vLLM; ``--generation-config none`` turns that off.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import CheckpointError, ConfigError
from paceline.json_files import read_json

logger = logging.getLogger(__name__)

GENERATION_CONFIG_FILE = "generation_config.json"


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What to use where a request says nothing; None where the checkpoint says nothing either."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    """``max_new_tokens`` of the file."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end a sequence. A property of the model: kept when the sampling defaults are ignored."""

    def sampling(self) -> dict[str, float | int]:
        """The sampling defaults that are set, under the names of ``SamplingParams``."""
        fields = msgspec.structs.asdict(self)
        del fields["eos_token_ids"]
        return {name: value for name, value in fields.items() if value is not None}


_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 100.0),
    "max_new_tokens": (1, 2**31 - 1),
}


def load_generation_defaults(folder: str | Path, mode: str = "auto") -> GenerationDefaults:
    """Read a checkpoint's ``generation_config.json``; a checkpoint without one has no defaults.

    Args:
        folder: checkpoint folder.
        mode: ``auto`` applies and logs the sampling defaults; ``none`` (or vLLM's word for it, ``vllm``)
            keeps only the end-of-sequence ids.

    Raises:
        ConfigError: another mode.
        CheckpointError: a value of the wrong type or out of range.
    """
    if mode not in ("auto", "none", "vllm"):
        raise ConfigError(f"generation config mode is {mode!r}; it must be 'auto' or 'none' (alias 'vllm').")
    path = Path(folder) / GENERATION_CONFIG_FILE
    config = read_json(path, required=False)
    eos = _eos_ids(config.get("eos_token_id"), path)
    if mode != "auto":
        return GenerationDefaults(eos_token_ids=eos)
    values: dict[str, Any] = {}
    for name, (low, high) in _RANGES.items():
        value = config.get(name)
        if value is None:
            continue
        whole = isinstance(low, int)
        number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not number or not low <= value <= high:
            kind = "an integer" if whole else "a number"
            raise CheckpointError(f"{path}: {name} is {value!r}; it must be {kind} from {low:g} to {high:g}.")
        values["max_tokens" if name == "max_new_tokens" else name] = value
    if values.get("top_k", 0) == -1:
        values["top_k"] = 0
    defaults = GenerationDefaults(eos_token_ids=eos, **values)
    if values:
        logger.warning(
            "Sampling defaults from %s apply where a request names none: %s. "
            "Use --generation-config none to ignore them.",
            path.name,
            ", ".join(f"{name}={value}" for name, value in defaults.sampling().items()),
        )
    return defaults


def _eos_ids(value: Any, path: Path) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise CheckpointError(f"{path}: eos_token_id is {value!r}; it must be a token id or a list of them.")
    return tuple(ids)
