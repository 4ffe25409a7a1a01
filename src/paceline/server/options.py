"""Options of the HTTP server."""

from __future__ import annotations

import msgspec

from paceline.errors import ConfigError

UVICORN_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


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
            raise ConfigError("An API key is empty: give a non-empty key, or none to serve without keys.")
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
