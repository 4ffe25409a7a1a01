"""Engine options: one typed, validated place, named as ``vllm serve`` names its flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.errors import ConfigError
from paceline.models.config import LoadFormat
from paceline.speculation.config import SpeculativeConfig

ASSETS = Path(__file__).parent / "assets"
BUNDLED_MODEL = ASSETS / "mini"
"""Folder of the model that ships with the package; used when no model is named."""
BUNDLED_DRAFTERS = {"dspark": ASSETS / "mini-dspark", "dflash": ASSETS / "mini-dflash"}
"""Folders of the drafters that ship for it, by method."""

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


# Beyond these, libraries crash before anything of ours could say what is wrong.
MAX_THREADS = 1024
MAX_SEQUENCES = 65536


class EngineConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Everything an engine is started with. Crosses the process border as JSON, so it holds plain values
    only.

    ``None`` means "derived when the engine starts", from the checkpoint or the device; the derived values are
    logged.
    """

    model: str | None = None
    """Checkpoint folder or hub name; None serves the bundled model."""
    revision: str | None = None
    """Hub revision; only meaningful with a hub name."""
    device: Device = "auto"
    dtype: Dtype = "auto"
    """Weights and K/V. ``auto`` is the checkpoint's dtype on a GPU and float32 on a CPU."""
    load_format: LoadFormat = "auto"
    """``dummy`` draws random weights at the checkpoint's geometry (benchmarks)."""
    max_model_len: int | None = None
    """Longest sequence, prompt plus output, in tokens."""
    max_num_seqs: int | None = None
    """Sequences that may run at once. Default 32 on a CPU, 256 on a GPU."""
    max_num_batched_tokens: int | None = None
    """Rows per step over all sequences. Default 512 on a CPU, 8192 on a GPU."""
    block_size: Literal[16, 64] = 16
    """Tokens per K/V block."""
    num_blocks: int | None = None
    """Size of the block pool; overrides both memory options below."""
    kv_cache_memory_bytes: int | None = None
    """Bytes for K/V. Default on a CPU 512 MiB; on a GPU what ``gpu_memory_utilization`` leaves."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory the engine may use in all."""
    enable_prefix_caching: bool = True
    prefix_hash_key: str | None = None
    """Shared secret for lineage hashes when engines share them; None draws a key per process."""
    speculative_config: SpeculativeConfig | None = None
    """How to draft. None drafts with the bundled drafter when the bundled model is served, else not at all;
    ``SpeculativeConfig()`` switches it off."""
    enforce_eager: bool = False
    """Lay out every step row by row; no decode rounds, and so no CUDA graphs on a GPU."""
    deterministic: bool = False
    """Logits are the same bit for bit whatever runs beside a sequence and however it is cut into steps; by
    default they are so up to rounding. Slower."""
    max_logprobs: int = 20
    """Most alternatives a request may ask for per position; -1 is no limit."""
    seed: int = 0
    """Seed of requests that name none. Each request's own seed is derived from it and the request's
    number.
    """
    show_progress: bool = False
    """Draw a progress bar on standard error while weights are read."""
    threads: int | None = None
    """CPU threads for torch; None leaves torch's choice."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_blocks", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")
        for name, limit in (("threads", MAX_THREADS), ("max_num_seqs", MAX_SEQUENCES)):
            value = getattr(self, name)
            if value is not None and value > limit:
                raise ConfigError(f"{name} is {value}; it must be at most {limit}.")
        if self.kv_cache_memory_bytes is not None and self.kv_cache_memory_bytes < 1:
            raise ConfigError(f"kv_cache_memory_bytes is {self.kv_cache_memory_bytes}; it must be positive.")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must lie in (0, 1], for "
                "example 0.9."
            )
        if self.prefix_hash_key is not None and not self.enable_prefix_caching:
            raise ConfigError(
                "prefix_hash_key is set, but enable_prefix_caching is off: nothing is hashed. "
                "Set enable_prefix_caching or drop prefix_hash_key."
            )
        if self.max_logprobs < -1:
            raise ConfigError(f"max_logprobs is {self.max_logprobs}; give 0 or more, or -1 for no limit.")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed}; it must lie in 0..2**63 - 1.")

    @classmethod
    def of(cls, **fields: Any) -> EngineConfig:
        """Options from untyped values, checked.

        Raises:
            ConfigError: an unknown option, or a value of the wrong type or out of range.
        """
        try:
            fields["speculative_config"] = SpeculativeConfig.of(fields.get("speculative_config"))
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, ConfigError):  # a range check: its message says it all
                raise error.__cause__ from None
            known = ", ".join(sorted(cls.__struct_fields__))
            raise ConfigError(f"Engine options: {error}. The options are {known}.") from error

    @property
    def model_path(self) -> str:
        """The checkpoint to load: a folder or a hub name."""
        return str(BUNDLED_MODEL) if self.model is None else self.model

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """Speculation with its drafter named, or None when it is off.

        Raises:
            ConfigError: a method without a drafter for a model that brings none.
        """
        wanted = self.speculative_config
        if wanted is None:
            if self.model is not None or not BUNDLED_DRAFTERS["dspark"].is_dir():
                return None
            wanted = SpeculativeConfig(method="dspark")
        if wanted == SpeculativeConfig():
            return None
        if wanted.model is None:
            # A config that says how to draft, but not with what, does not switch drafting off.
            if self.model is not None:
                raise ConfigError(
                    f"speculative_config names no drafter, and {self.model} brings none. "
                    'Add "model": the drafter\'s folder or hub name.'
                )
            method = wanted.method or "dspark"
            wanted = msgspec.structs.replace(wanted, method=method, model=str(BUNDLED_DRAFTERS[method]))
        return wanted
