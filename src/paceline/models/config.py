"""The geometry and mathematics of a Qwen3 checkpoint, read strictly from its ``config.json``.

Free of torch: the scheduler and the server read it too. Defaults for absent keys are those of Hugging Face's
``Qwen3Config``; keys without a safe default are required.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from paceline.errors import CheckpointError
from paceline.json_files import read_json
from paceline.models.fields import REQUIRED, Fields

SUPPORTED_ARCHITECTURES: Final = ("Qwen3ForCausalLM",)
SUPPORTED_ROPE_TYPES: Final = ("default", "linear", "yarn")
SUPPORTED_DTYPES: Final = ("float32", "bfloat16", "float16")
LoadFormat = Literal["auto", "dummy"]
"""Weights as they are stored, or drawn at random."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its scaling.

    Attributes:
        theta: base of the frequencies.
        kind: "default"; "linear" (position interpolation, Chen et al. 2023, arXiv:2306.15595); "yarn" (Peng
            et al. 2023, arXiv:2309.00071).
        factor: context extension factor s; 1 for "default".
        original_max_position: YaRN: the context length before extension, L in the paper.
        attention_factor: YaRN: multiplies cos and sin (the paper's sqrt(1/t)); None means 0.1 ln(s) + 1.
        beta_fast, beta_slow: YaRN: rotations over L above which a frequency is kept, and below which it is
            interpolated.
        truncate: YaRN: round the borders of the ramp outwards to whole dimensions.
    """

    theta: float
    kind: Literal["default", "linear", "yarn"] = "default"
    factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


def read_rope(fields: Fields, max_position: int, default_theta: float | None = None) -> RopeConfig:
    """Read either spelling: ``rope_theta`` + ``rope_scaling``, or ``rope_parameters`` holding both.

    ``default_theta`` stands in for an absent ``rope_theta``; None makes it required, because a silent default
    of 1e4 gives plausible text from the wrong model.

    Raises:
        CheckpointError: unknown rope type or key, missing theta, or two spellings that disagree.
    """
    where = fields.where
    parameters, older = fields.raw("rope_parameters"), fields.raw("rope_scaling")
    if parameters is not None and older is not None and parameters != older:
        raise CheckpointError(f"{where}: 'rope_parameters' and 'rope_scaling' disagree; keep one of them")
    spelling = "rope_parameters" if older is None else "rope_scaling"
    scaling = fields.section(spelling) if fields.has(spelling) else Fields({}, f"{where}, {spelling!r}")
    thetas = {source.number("rope_theta") for source in (scaling, fields) if source.has("rope_theta")}
    if len(thetas) > 1:
        raise CheckpointError(f"{where}: two values of 'rope_theta': {sorted(thetas)}")
    if not thetas and default_theta is None:
        raise CheckpointError(
            f"{where}: 'rope_theta' is neither at the top level nor under 'rope_parameters'"
        )
    theta = thetas.pop() if thetas else default_theta
    assert theta is not None

    kind = scaling.string("rope_type", scaling.string("type", "default"))
    scaling.raw("type"), scaling.raw("rope_theta")
    for source in (scaling, fields):
        if source.number("partial_rotary_factor", 1.0) != 1.0:
            raise source.wrong(
                "partial_rotary_factor", source.raw("partial_rotary_factor"), "1 (whole heads)"
            )
    if kind == "default":
        rope = RopeConfig(theta)
    elif kind == "linear":
        rope = RopeConfig(theta, "linear", factor=scaling.number("factor"))
    elif kind == "yarn":
        rope = _read_yarn(scaling, theta, max_position)
    else:
        raise scaling.wrong("rope_type", kind, f"one of {', '.join(SUPPORTED_ROPE_TYPES)}")
    scaling.finish()
    return rope


def _read_yarn(scaling: Fields, theta: float, max_position: int) -> RopeConfig:
    original = scaling.integer("original_max_position_embeddings", max_position)
    factor = scaling.number("factor", max_position / original)
    if factor < 1.0:
        raise scaling.wrong("factor", factor, "a factor of at least 1")
    attention_factor = scaling.number("attention_factor") if scaling.has("attention_factor") else None
    mscales = [scaling.number(key) for key in ("mscale", "mscale_all_dim") if scaling.has(key)]
    if mscales:
        raise CheckpointError(
            f"{scaling.where}: 'mscale' and 'mscale_all_dim' are not implemented; give 'attention_factor'"
        )
    return RopeConfig(
        theta,
        "yarn",
        factor=factor,
        original_max_position=original,
        attention_factor=attention_factor,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.flag("truncate", True),
    )


def read_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """The attention window of each layer, in keys and counting the query's own position; None = full
    attention.

    ``layer_types`` decides when it is there; otherwise ``use_sliding_window`` puts the window on layers from
    ``max_window_layers`` on, as Hugging Face does.
    """
    enabled = fields.flag("use_sliding_window", False)
    window = fields.optional_integer("sliding_window")
    first = fields.integer("max_window_layers", 28, low=0)
    window = window if enabled else None
    kinds = fields.raw("layer_types")
    if kinds is None:
        return tuple(window if i >= first else None for i in range(num_layers))
    return windows_from_layer_types(fields, kinds, window, num_layers)


def windows_from_layer_types(
    fields: Fields, kinds: object, window: int | None, num_layers: int
) -> tuple[int | None, ...]:
    """One window per entry of a ``layer_types`` list.

    Raises CheckpointError on unknown kinds, length, missing window.
    """
    allowed = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or any(kind not in allowed for kind in kinds):
        raise fields.wrong("layer_types", kinds, f"a list of {' or '.join(allowed)}")
    if len(kinds) != num_layers:
        raise fields.wrong("layer_types", f"a list of {len(kinds)}", f"one entry per layer ({num_layers})")
    if window is None and "sliding_attention" in kinds:
        raise CheckpointError(
            f"{fields.where}: 'layer_types' asks for sliding_attention, but there is no window: set "
            "'sliding_window' to a length (and 'use_sliding_window' to true), or use full_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


@dataclass(frozen=True)
class Qwen3Config:
    """A Qwen3 dense model (Qwen3 Technical Report, arXiv:2505.09388).

    Attributes:
        max_position_embeddings: as in the file. What can be served is ``max_context_len``.
        windows: attention window per layer in keys (own position included), None = full attention.
        dtype: name of the checkpoint's weight dtype, None when the file does not say.
        eos_token_ids: every id that ends a generation.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: RopeConfig
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    windows: tuple[int | None, ...] = ()
    dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_hidden_layers)
        if len(self.windows) != self.num_hidden_layers:
            raise CheckpointError(f"{len(self.windows)} windows for {self.num_hidden_layers} layers")
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"'num_attention_heads' ({self.num_attention_heads}) must be a multiple of "
                f"'num_key_value_heads' ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"'head_dim' is {self.head_dim}; rotary embedding needs an even number")

    @property
    def max_context_len(self) -> int:
        """Positions the rope table covers, in tokens: the YaRN-extended length when there is one."""
        if self.rope.kind == "yarn":
            return max(self.max_position_embeddings, int(self.rope.original_max_position * self.rope.factor))
        return self.max_position_embeddings

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads (and of all value heads)."""
        return self.num_key_value_heads * self.head_dim

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Qwen3Config:
        """Read ``config.json`` of a local checkpoint folder. Raises CheckpointError."""
        path = Path(folder) / "config.json"
        return cls.from_dict(read_json(path), where=str(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "config.json") -> Qwen3Config:
        """Read a parsed ``config.json``.

        Raises:
            CheckpointError: an unsupported architecture, quantisation, activation or rope type; a key that
                may change the computation and is not implemented; a missing or mis-typed value.
        """
        fields = Fields(values, where)
        require_architecture(fields)
        return cls.from_fields(fields)

    @classmethod
    def from_fields(cls, fields: Fields, default_theta: float | None = None) -> Qwen3Config:
        """The layer geometry proper, architecture name aside; drafters share it. Consumes the fields."""
        refuse_quantization(fields)
        activation = fields.string("hidden_act", "silu")
        if activation != "silu":
            raise fields.wrong("hidden_act", activation, "'silu'")
        num_layers = fields.integer("num_hidden_layers")
        num_heads = fields.integer("num_attention_heads")
        max_position = fields.integer("max_position_embeddings", 32768)
        config = cls(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=fields.integer("num_key_value_heads", num_heads),
            head_dim=fields.integer("head_dim", 128),
            max_position_embeddings=max_position,
            rope=read_rope(fields, max_position, default_theta),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            attention_bias=fields.flag("attention_bias", False),
            windows=read_windows(fields, num_layers),
            dtype=read_dtype(fields),
            bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
            eos_token_ids=fields.token_ids("eos_token_id"),
            initializer_range=fields.number("initializer_range", 0.02),
        )
        fields.finish()
        return config

    def to_dict(self) -> dict[str, Any]:
        """The ``config.json`` that Hugging Face and ``from_dict`` both read back to this config."""
        rope: dict[str, Any] = {"rope_type": self.rope.kind, "rope_theta": self.rope.theta}
        if self.rope.kind != "default":
            rope["factor"] = self.rope.factor
        if self.rope.kind == "yarn":
            rope["original_max_position_embeddings"] = self.rope.original_max_position
            rope["beta_fast"], rope["beta_slow"] = self.rope.beta_fast, self.rope.beta_slow
            rope["truncate"] = self.rope.truncate
            if self.rope.attention_factor is not None:
                rope["attention_factor"] = self.rope.attention_factor
        window = next((w for w in self.windows if w is not None), None)
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": rope,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.attention_bias,
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "layer_types": ["full_attention" if w is None else "sliding_attention" for w in self.windows],
            "dtype": self.dtype,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids)
            if len(self.eos_token_ids) != 1
            else self.eos_token_ids[0],
            "initializer_range": self.initializer_range,
        }


def require_architecture(fields: Fields) -> None:
    """Raise CheckpointError unless ``architectures`` names one that is served."""
    architectures = fields.raw("architectures", REQUIRED)
    if (
        not isinstance(architectures, list)
        or len(architectures) != 1
        or architectures[0] not in SUPPORTED_ARCHITECTURES
    ):
        raise CheckpointError(
            f"{fields.where}: architecture {architectures!r} is not supported; Paceline serves "
            f"{', '.join(SUPPORTED_ARCHITECTURES)} (dense Qwen3 of any size)"
        )
    model_type = fields.raw("model_type", "qwen3")
    if model_type != "qwen3":
        raise CheckpointError(
            f"{fields.where}: model_type is {model_type!r}, which is not what its architecture "
            f"{architectures[0]} goes by, 'qwen3'; one of the two is wrong"
        )


def refuse_quantization(fields: Fields) -> None:
    """Raise CheckpointError for a quantised checkpoint, naming the method."""
    for key in ("quantization_config", "compression_config"):
        if fields.has(key):
            settings = fields.raw(key)
            method = settings.get("quant_method", "unnamed") if isinstance(settings, dict) else settings
            raise CheckpointError(
                f"{fields.where}: {key!r} asks for {method!r} quantisation, which is not supported; use the "
                f"checkpoint's unquantised release ({', '.join(SUPPORTED_DTYPES)})"
            )


def read_dtype(fields: Fields) -> str | None:
    """``dtype`` (newer spelling) or ``torch_dtype``, without a "torch." prefix."""
    name = fields.raw("dtype", fields.raw("torch_dtype"))
    if name is None:
        return None
    name = str(name).removeprefix("torch.")
    if name not in SUPPORTED_DTYPES:
        raise fields.wrong("dtype", name, f"one of {', '.join(SUPPORTED_DTYPES)}")
    return name
