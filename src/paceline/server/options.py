"""Options of the HTTP server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline.errors import ConfigError

UVICORN_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


KEY_VARIABLE = "PACELINE_API_KEY"


def read_keys(given: Sequence[str], file: str | None) -> tuple[str, ...]:
    """API keys from everywhere they may be named: flags, a file, and the environment. Space around a key is
    no part of it: it does not survive in a header.

    Args:
        given: keys named by flags.
        file: a text file with a key on each line.

    Raises:
        ConfigError: the file cannot be read or holds no key.
    """
    keys = list(given)
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"--api-key-file {file}: {reason}. Name a readable text file.") from error
        found = [line for line in lines if line.strip()]
        if not found:
            raise ConfigError(f"--api-key-file {file} holds no key. Write one on each line.")
        keys += found
    if KEY_VARIABLE in os.environ:
        keys.append(os.environ[KEY_VARIABLE])
    return tuple(key.strip() for key in keys)


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the API is offered; named as ``vllm serve`` names its flags."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free port; the chosen one is logged."""
    served_model_names: tuple[str, ...] = ()
    """Names clients may use. Default: the model as it was given to the engine."""
    api_keys: tuple[str, ...] = ()
    """With any, every route but /health requires one of them as a bearer token."""
    uvicorn_log_level: str = "warning"
    log_level: str = "info"
    max_body_bytes: int = 32 * 1024**2
    """Largest request body."""
    max_sequences: int = 1024
    """Most sequences one completions request may ask for: prompts times ``n``."""

    def __post_init__(self) -> None:
        if not all(key.strip() for key in self.api_keys):
            raise ConfigError(
                f"An API key is empty: give a non-empty key, or none (and no {KEY_VARIABLE}) to serve "
                "without keys."
            )
        if not all(self.served_model_names):
            raise ConfigError("A served model name is empty: give another, or none to use the model's.")
        if self.uvicorn_log_level not in UVICORN_LEVELS:
            raise ConfigError(
                f"uvicorn_log_level is {self.uvicorn_log_level!r}; it must be one of "
                f"{', '.join(UVICORN_LEVELS)}."
            )
        if self.max_body_bytes < 1 or self.max_sequences < 1:
            raise ConfigError(
                f"max_body_bytes is {self.max_body_bytes} and max_sequences {self.max_sequences}; "
                "both must be positive."
            )
