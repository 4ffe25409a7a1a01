"""The dialects of drafter configs, each read into a :class:`DrafterConfig`.

The same two architectures are written down in several ways, and names collide: ``DFlashDraftModel`` is both
z-lab's and speculators', ``DSparkDraftModel`` both SpecForge's and speculators'. So the dialect is decided by
structure first, and nothing is inferred from what merely tends to go together:

- *speculators* has ``speculators_model_type``. Tap ids index Hugging Face's hidden_states: id j is the output
  of layer j - 1. The layout is ``sample_from_anchor``.
- *deepspec* is ``Qwen3DSparkModel`` with flat keys, for DSpark and DFlash alike; anchor first.
- *specforge* is ``DSparkDraftModel``, or ``dflash_config.projector_type`` "dspark"; anchor first.
- *z-lab* is ``DFlashDraftModel`` with ``dflash_config``; anchor drop.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from paceline.errors import CheckpointError
from paceline.json_files import read_json
from paceline.models.config import Qwen3Config
from paceline.models.drafter_config import MARKOV_KINDS, DrafterConfig
from paceline.models.fields import Fields

logger = logging.getLogger(__name__)

# Hugging Face's Qwen3Config defaults: speculators stores the layer config as a difference from them.
_QWEN3_DEFAULTS: Final[Mapping[str, Any]] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
_DEFAULT_THETA: Final = 10_000.0
# Settings of drafters whose mathematics is not built here, with the value at which they do nothing.
_NEUTRAL: Final[Mapping[str, str | float | bool]] = {
    "attention_mode": "gqa",
    "pure_draft_prefix_len": 0,
    "input_embedding_scale": 1,
    "output_multiplier": 1,
    "attention_sink_bias": False,
    "attention_value_scale": 1,
}
_DFLASH2_KEYS: Final = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def load_drafter_config(folder: str | Path, target: Qwen3Config) -> DrafterConfig:
    """Read ``config.json`` of a local drafter folder, for a target. Raises CheckpointError."""
    path = Path(folder) / "config.json"
    return read_drafter_config(read_json(path), target, where=str(path))


def read_drafter_config(
    values: Mapping[str, Any], target: Qwen3Config, where: str = "config.json"
) -> DrafterConfig:
    """Read a parsed ``config.json`` of any dialect, for a target.

    Raises:
        CheckpointError: an unknown dialect, a drafter of another architecture, a key that may change the
            computation and is not implemented, or a geometry that does not fit the target.
    """
    fields = Fields(values, where)
    _refuse_known_others(fields)
    architectures = fields.raw("architectures", [])
    if fields.has("speculators_model_type"):
        config = _read_speculators(fields, target)
    elif architectures == ["Qwen3DSparkModel"]:
        config = _read_deepspec(fields)
    elif architectures in (["DFlashDraftModel"], ["DSparkDraftModel"]):
        config = _read_nested(fields, target)
    else:
        raise CheckpointError(
            f"{where}: architecture {architectures!r} is not a drafter that Paceline knows. Known are DFlash "
            "and DSpark drafters for Qwen3: DFlashDraftModel (z-lab, SpecForge), DSparkDraftModel "
            "(SpecForge), Qwen3DSparkModel (DeepSpec) and speculators' dflash and dspark"
        )
    config.check_fit(target, where)
    return config


def default_taps(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """z-lab's rule for absent ``target_layer_ids``: evenly from 1 to L - 3, halves rounded to even."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_draft_layers))


def _refuse_known_others(fields: Fields) -> None:
    """Drafters that are recognised but not built: say so, instead of complaining about their keys."""
    inner = fields.values.get("dflash_config")
    sources = [fields.values, inner] if isinstance(inner, dict) else [fields.values]
    if (
        "DFlash2DraftModel" in str(fields.values.get("architectures"))
        or fields.values.get("speculators_model_type") == "dflash2"
        or any(source.get(key) for key in _DFLASH2_KEYS for source in sources)
    ):
        raise CheckpointError(
            f"{fields.where}: this is a DFlash2 drafter (grouped convolutions and a candidate selector), "
            "which is not implemented; use a DFlash or DSpark drafter"
        )
    bundled = sorted(key for key in fields.values if key.startswith("dspark_"))
    if bundled:
        raise CheckpointError(
            f"{fields.where}: {', '.join(bundled)} belong to the DSpark heads bundled inside DeepSeek-V4 "
            "checkpoints, which are not implemented; use a separate DFlash or DSpark drafter for a Qwen3 "
            "target"
        )


def _read_heads(fields: Fields) -> dict[str, Any]:
    """The Markov and confidence heads' keys; the same names in every dialect."""
    rank = fields.integer("markov_rank", 0, low=0)
    kind = fields.raw("markov_head_type", "vanilla" if rank else None)
    if kind is not None and kind not in MARKOV_KINDS:
        raise fields.wrong("markov_head_type", kind, f"one of {', '.join(MARKOV_KINDS)}")
    confidence = fields.flag("enable_confidence_head", False)
    with_markov = fields.flag("confidence_head_with_markov", False)
    if confidence and with_markov and not rank:
        raise fields.wrong(
            "confidence_head_with_markov", True, "false: there is no Markov head (markov_rank 0)"
        )
    return {
        "method": "dspark" if rank or confidence else "dflash",
        "markov": kind if rank else None,
        "markov_rank": rank,
        "confidence": confidence,
        "confidence_with_markov": confidence and with_markov,
    }


def _read_deepspec(fields: Fields) -> DrafterConfig:
    """The target's config with the drafter's keys among the others."""
    fields.raw("num_anchors")  # training only
    config = _read_heads(fields) | {
        "dialect": "deepspec",
        "num_target_layers": fields.optional_integer("num_target_layers"),
        "block_size": fields.integer("block_size", low=2),
        "anchor_first": True,
        "mask_token_id": fields.integer("mask_token_id", low=0),
        "tap_layer_ids": fields.integers("target_layer_ids", low=-1),
    }
    layers = Qwen3Config.from_fields(fields)
    return DrafterConfig(layers=layers, draft_vocab_size=layers.vocab_size, **config)


def _read_nested(fields: Fields, target: Qwen3Config) -> DrafterConfig:
    """z-lab's and SpecForge's: the drafter's keys under ``dflash_config``."""
    inner = fields.section("dflash_config")
    for key, neutral in _NEUTRAL.items():
        value = inner.raw(key, neutral)
        if value != neutral or isinstance(value, bool) != isinstance(neutral, bool):
            raise inner.wrong(key, value, f"{neutral!r}: anything else is not implemented")
    projector = inner.raw("projector_type")
    if projector not in (None, "dspark"):
        raise inner.wrong("projector_type", projector, "'dspark' for a DSpark drafter, absent for DFlash")
    dspark = fields.raw("architectures") == ["DSparkDraftModel"] or projector == "dspark"
    heads = _read_heads(inner)
    if not dspark and heads["method"] == "dspark":
        raise CheckpointError(
            f"{inner.where}: there are Markov or confidence head keys, but 'projector_type' is not 'dspark'"
        )
    inner.raw("confidence_head_alpha")  # weight of a training loss
    mask_token = inner.raw("mask_token", "<|MASK|>")
    if not inner.has("mask_token_id"):
        raise CheckpointError(
            f"{inner.where}: 'mask_token_id' is missing; give the id of {mask_token!r} in the target's "
            "vocabulary"
        )
    num_target_layers = _agreed(fields, inner, "num_target_layers")
    if inner.has("target_layer_ids"):
        taps = inner.integers("target_layer_ids", low=-1)
    else:
        inner.raw("target_layer_ids")
        depth = num_target_layers or target.num_hidden_layers
        taps = default_taps(depth, fields.integer("num_hidden_layers"))
    config = heads | {
        "dialect": "specforge" if dspark else "z-lab",
        "num_target_layers": num_target_layers,
        "block_size": _agreed(fields, inner, "block_size") or fields.integer("block_size"),
        "anchor_first": _nested_layout(inner, dspark),
        "mask_token_id": inner.integer("mask_token_id", low=0),
        "tap_layer_ids": taps,
    }
    inner.finish()
    layers = Qwen3Config.from_fields(fields)
    return DrafterConfig(layers=layers, draft_vocab_size=layers.vocab_size, **config)


def _nested_layout(inner: Fields, dspark: bool) -> bool:
    """Whether the anchor comes first: said outright, or by the family's convention."""
    anchor_first = inner.flag("sample_from_anchor", dspark)
    shifted = inner.flag("shift_label", anchor_first)
    if shifted != anchor_first:
        raise CheckpointError(
            f"{inner.where}: 'shift_label' is {shifted}, but the layout is anchor "
            f"{'first' if anchor_first else 'drop'}; set 'sample_from_anchor' to true when slot k predicts "
            "the token after its position or to false when it predicts its own, and remove 'shift_label'"
        )
    return anchor_first


def _agreed(fields: Fields, inner: Fields, key: str) -> int | None:
    """An integer that may stand at the top level, in ``dflash_config``, or equally in both."""
    low = 2 if key == "block_size" else 1
    found = {
        value for source in (fields, inner) if (value := source.optional_integer(key, low=low)) is not None
    }
    if len(found) > 1:
        raise CheckpointError(
            f"{fields.where}: {key!r} differs between the top level and 'dflash_config': {sorted(found)}"
        )
    return found.pop() if found else None


def _read_speculators(fields: Fields, target: Qwen3Config) -> DrafterConfig:
    """Layers under ``transformer_layer_config``, as a difference from Qwen3Config's defaults."""
    kind = fields.string("speculators_model_type")
    if kind not in ("dflash", "dspark"):
        raise fields.wrong("speculators_model_type", kind, "'dflash' or 'dspark'")
    if kind == "dspark" and not fields.has("sample_from_anchor"):
        raise CheckpointError(
            f"{fields.where}: 'sample_from_anchor' is missing. Its default for dspark changed from false to "
            "true between releases of speculators, so the layout is ambiguous: set it to true when every "
            "block slot is a draft, to false when slot 0 is not. The wrong choice accepts next to nothing"
        )
    heads = _read_heads(fields)
    if kind == "dflash" and heads["method"] == "dspark":
        raise CheckpointError(f"{fields.where}: Markov or confidence head keys in a drafter of type 'dflash'")
    width = fields.optional_integer("target_hidden_size")
    if width not in (None, target.hidden_size):
        raise CheckpointError(
            f"{fields.where}: the drafter does not fit the target: target_hidden_size is {width} in the "
            f"drafter and hidden_size is {target.hidden_size} in the target"
        )
    given = fields.section("transformer_layer_config")
    if given.raw("model_type", "qwen3") != "qwen3":
        raise given.wrong("model_type", given.raw("model_type"), "'qwen3'")
    if not any(given.has(key) for key in ("rope_parameters", "rope_scaling", "rope_theta")):
        logger.warning(
            "%s has no rope_theta: taking Qwen3Config's default, %g. Suspect it if few drafts are accepted.",
            given.where,
            _DEFAULT_THETA,
        )
    layers = Qwen3Config.from_fields(Fields({**_QWEN3_DEFAULTS, **given.values}, given.where), _DEFAULT_THETA)
    if fields.has("aux_hidden_state_layer_ids"):
        ids = fields.integers("aux_hidden_state_layer_ids")
    else:
        fields.raw("aux_hidden_state_layer_ids")
        ids = (2, target.num_hidden_layers // 2, target.num_hidden_layers - 3)
    for key in ("speculators_version", "speculators_config", "tie_word_embeddings"):
        fields.raw(key)  # provenance and serving hints; the embedding and head are the target's
    config = heads | {
        "dialect": "speculators",
        "block_size": fields.integer("block_size", 8, low=2),
        "anchor_first": fields.flag("sample_from_anchor", False),
        "mask_token_id": fields.integer("mask_token_id", low=0),
        "tap_layer_ids": tuple(j - 1 for j in ids),  # hidden_states[j] is the output of layer j - 1
        "draft_vocab_size": fields.integer("draft_vocab_size", layers.vocab_size),
        "window_non_causal": fields.flag("sliding_window_non_causal", False),
    }
    fields.finish()
    return DrafterConfig(layers=layers, **config)
