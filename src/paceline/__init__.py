"""Paceline: an inference engine for Qwen3-family language models.

The names below are the public interface; everything else may change. They are imported on first use, so that
``import paceline`` and the processes that never see the model do not pay for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.config import EngineConfig
    from paceline.engine.client import AsyncEngine, FrontendOptions
    from paceline.engine.messages import EngineStats
    from paceline.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
    from paceline.errors import (
        CheckpointError,
        ConfigError,
        ContextLengthError,
        EngineDeadError,
        PacelineError,
        RequestError,
        RequestFailedError,
    )
    from paceline.llm import LLM
    from paceline.sampling.logprobs import Logprob
    from paceline.sampling.params import SamplingParams
    from paceline.speculation.config import SpeculativeConfig

__version__ = "0.1.0"

_HOME = {
    "LLM": "paceline.llm",
    "AsyncEngine": "paceline.engine.client",
    "CheckpointError": "paceline.errors",
    "CompletionOutput": "paceline.engine.outputs",
    "ConfigError": "paceline.errors",
    "ContextLengthError": "paceline.errors",
    "EngineConfig": "paceline.config",
    "EngineDeadError": "paceline.errors",
    "EngineStats": "paceline.engine.messages",
    "FrontendOptions": "paceline.engine.client",
    "Logprob": "paceline.sampling.logprobs",
    "PacelineError": "paceline.errors",
    "RequestError": "paceline.errors",
    "RequestFailedError": "paceline.errors",
    "RequestMetrics": "paceline.engine.outputs",
    "RequestOutput": "paceline.engine.outputs",
    "SamplingParams": "paceline.sampling.params",
    "SpeculativeConfig": "paceline.speculation.config",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "ContextLengthError",
    "EngineConfig",
    "EngineDeadError",
    "EngineStats",
    "FrontendOptions",
    "Logprob",
    "PacelineError",
    "RequestError",
    "RequestFailedError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
