"""A trained pair written at the size of a larger model: the same function (:mod:`paceline.bench.padding`),
so real acceptance at real cost, in checkpoints that any engine loads.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.bench.geometry import geometry_folder, geometry_names
from paceline.bench.padding import RAISE, Layers, Named, Noise, Padding, spread
from paceline.config import ASSETS, BUNDLED_DRAFTERS, BUNDLED_MODEL
from paceline.errors import CheckpointError, ConfigError
from paceline.models.checkpoint import INDEX_NAME, open_shard, read_headers, resolve_dtype, resolve_folder
from paceline.models.config import Qwen3Config
from paceline.models.drafter_config import DrafterConfig
from paceline.models.drafter_dialects import load_drafter_config, read_drafter_config
from paceline.models.drafter_loader import STS_NAME

SHARD_BYTES = 2 * 2**30
_MEMBERS: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    STS_NAME,
)


def inflate_pair(
    target: str | None, drafter: str | None, geometry: str, out: str, *, pad_vocab: bool, dtype: str
) -> tuple[Path, Path]:
    """Write ``out/target`` and ``out/drafter``.

    Args:
        target, drafter: folder, hub name, or name of something bundled such as ``mini-dspark``; None is the
            bundled model and its DSpark drafter.
        geometry: name of a target's geometry; the drafter's is the one for it of the drafter's method.
        pad_vocab: up to the geometry's vocabulary.
        dtype: of the stored weights.

    Raises:
        ConfigError, CheckpointError: they do not fit, or ``out`` holds something.
    """
    source = _source(target, BUNDLED_MODEL)
    draft_source = _source(drafter, BUNDLED_DRAFTERS["dspark"])
    stored = resolve_dtype(dtype, None, {})
    method = load_drafter_config(draft_source, Qwen3Config.from_pretrained(source)).method
    shape = geometry_folder(geometry)
    names = [name for name in geometry_names() if name.startswith(f"{geometry}-{method}-")]
    if not names:
        ending = f"-{method}-"
        fit = ", ".join(sorted(name.split(ending)[0] for name in geometry_names() if ending in name))
        raise ConfigError(f"There is no geometry of a {method} drafter for {geometry}. There is for {fit}.")
    for part in ("target", "drafter"):  # before the first is written, which takes minutes
        _make_empty(Path(out) / part)
    large = inflate_target(source, shape, Path(out) / "target", pad_vocab=pad_vocab, dtype=stored)
    draft_shape = geometry_folder(names[0])
    return large, inflate_drafter(
        draft_source, source, draft_shape, Path(out) / "drafter", large, dtype=stored
    )


def _source(name: str | None, default: Path) -> Path:
    if name is None:
        return default
    bundled = ASSETS / name
    return bundled if "/" not in name and bundled.is_dir() else resolve_folder(name)


def place_taps(
    taps: Sequence[int], places: Sequence[int], wanted: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Tapped layers of the large pair: those its geometry taps, moved where they would not see a small tap.

    Args:
        taps: of the small drafter.
        places: of the small target's layers, from :func:`spread`.
        wanted: taps of the geometry, at least as many.

    Returns:
        The taps, and which of them each small tap is.

    Raises:
        ConfigError: they cannot be moved so that they stay in order.
    """
    result = list(wanted)
    chosen: list[int] = []
    bounds = [-1, *places]  # the output of small layer t is there from bounds[t + 1] to bounds[t + 2] - 1
    for tap in taps:
        low, high = bounds[tap + 1], bounds[tap + 2] - 1
        free = [i for i in range(len(wanted)) if not chosen or i > chosen[-1]]
        if not free:
            break
        best = min(free, key=lambda i: abs(wanted[i] - min(max(wanted[i], low), high)))
        result[best] = min(max(wanted[best], low), high)
        chosen.append(best)
    if len(chosen) < len(taps) or result != sorted(set(result)):
        raise ConfigError(
            f"The drafter's taps {list(taps)} find no place among the geometry's {list(wanted)}. Take a "
            "geometry with more layers and taps."
        )
    return result, chosen


def target_config(small: Qwen3Config, geometry: Qwen3Config, plan: Padding) -> Qwen3Config:
    """The large target: the geometry's sizes, everything else the small one's.

    Raises:
        ConfigError: the geometry is smaller somewhere.
    """
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        ours, theirs = getattr(small, name), getattr(geometry, name)
        if ours > theirs:
            raise ConfigError(f"{name} is {theirs} in the geometry, less than the checkpoint's {ours}.")
    if small.head_dim != geometry.head_dim:
        raise ConfigError(
            f"head_dim is {geometry.head_dim} in the geometry and {small.head_dim} in the checkpoint; they "
            "must be equal."
        )
    if small.attention_bias or any(window is not None for window in small.windows):
        raise ConfigError("Checkpoints with attention biases or windows cannot be inflated.")
    if geometry.tie_word_embeddings and not small.tie_word_embeddings:
        raise ConfigError(
            "The geometry ties head and embedding, the checkpoint does not. Take an untied one."
        )
    return replace(
        geometry,
        vocab_size=plan.vocab_size,
        max_position_embeddings=small.max_position_embeddings,
        rope=small.rope,
        rms_norm_eps=plan.epsilon(small),
        windows=(),
        dtype=str(plan.dtype).removeprefix("torch."),
        bos_token_id=small.bos_token_id,
        eos_token_ids=small.eos_token_ids,
    )


def inflate_target(source: Path, geometry: Path, out: Path, *, pad_vocab: bool, dtype: torch.dtype) -> Path:
    """Write the large target.

    Args:
        source: the small checkpoint.
        geometry: folder whose ``config.json`` gives the sizes.
        out: folder to make.

    Raises:
        ConfigError: the geometry does not hold the checkpoint.
    """
    small, sizes = Qwen3Config.from_pretrained(source), Qwen3Config.from_pretrained(geometry)
    padding = Padding.of(small, sizes, pad_vocab=pad_vocab, dtype=dtype)
    large = target_config(small, sizes, padding)
    tensors = _read(source)
    table = tensors["model.embed_tokens.weight"]

    def named() -> Named:
        yield "model.embed_tokens.weight", padding.embedding(table)
        yield "model.norm.weight", padding.norm(tensors["model.norm.weight"], spare=RAISE)
        yield from Layers(small, large, padding, Noise(dtype), tensors, "model.")
        if not large.tie_word_embeddings:
            yield "lm_head.weight", padding.head(tensors.get("lm_head.weight", table))

    return write_sharded(out, large.to_dict(), named(), dtype, source)


def inflate_drafter(
    source: Path, target: Path, geometry: Path, out: Path, large_target: Path, *, dtype: torch.dtype
) -> Path:
    """Write the large drafter of a target that has been inflated.

    Args:
        source, target: the small pair.
        geometry: folder of a drafter's ``config.json``, for the large target's own geometry.
        out: folder to make.
        large_target: the inflated target.

    Raises:
        ConfigError: the geometry does not hold the drafter, or its heads are of a kind that is not padded.
    """
    small_target = Qwen3Config.from_pretrained(target)
    small = load_drafter_config(source, small_target)
    sizes = Qwen3Config.from_pretrained(large_target)
    fields = json.loads((geometry / "config.json").read_text()) | {"vocab_size": sizes.vocab_size}
    mask = {"mask_token_id": small.mask_token_id}
    fields |= {"dflash_config": fields["dflash_config"] | mask} if "dflash_config" in fields else mask
    shape = read_drafter_config(fields, sizes, str(geometry))
    padding = Padding.of(
        small_target, sizes, pad_vocab=sizes.vocab_size != small_target.vocab_size, dtype=dtype
    )
    large, chosen = _drafter_config(small, shape, padding, small_target, sizes)
    tensors = _read(source)
    d, width = padding.small, padding.large

    def named() -> Named:
        fc = torch.zeros(width, len(large.tap_layer_ids) * width, dtype=dtype)
        for i, place in enumerate(chosen):
            fc[:d, place * width : place * width + d] = tensors["fc.weight"][:, i * d : (i + 1) * d]
        if padding.constant:
            fc[d, chosen[0] * width + d] = 1.0  # the features have epsilon's spare channel too
        yield "fc.weight", fc
        yield "hidden_norm.weight", padding.norm(tensors["hidden_norm.weight"])
        yield "norm.weight", padding.norm(tensors["norm.weight"], spare=RAISE)
        yield from Layers(small.layers, large.layers, padding, Noise(dtype), tensors, "")
        if small.markov is not None:
            yield from _markov(tensors, small, large, dtype)
        if small.confidence:
            yield from _confidence(tensors, small, large, padding)

    return write_sharded(out, large.to_dict(), named(), dtype, source)


def _drafter_config(
    small: DrafterConfig, shape: DrafterConfig, padding: Padding, target: Qwen3Config, large: Qwen3Config
) -> tuple[DrafterConfig, list[int]]:
    """The large drafter, and which of its taps are the small one's."""
    if small.markov not in (None, "vanilla") or small.reduced_vocab:
        raise ConfigError(
            "Only drafters over the whole vocabulary, with a vanilla Markov head or none, can be inflated."
        )
    if small.method != shape.method or small.markov_rank > shape.markov_rank:
        raise ConfigError(
            f"The geometry is of a {shape.method} drafter of Markov rank {shape.markov_rank}, the checkpoint "
            f"of a {small.method} one of rank {small.markov_rank}; it does not hold it."
        )
    places = spread(target.num_hidden_layers, large.num_hidden_layers)
    taps, chosen = place_taps(small.tap_layer_ids, places, shape.tap_layer_ids)
    config = replace(
        small,
        layers=target_config(small.layers, replace(shape.layers, tie_word_embeddings=False), padding),
        markov_rank=shape.markov_rank,
        tap_layer_ids=tuple(taps),
        draft_vocab_size=padding.vocab_size,
        num_target_layers=large.num_hidden_layers,
    )
    return config, chosen


def _markov(
    tensors: Mapping[str, Tensor], small: DrafterConfig, large: DrafterConfig, dtype: torch.dtype
) -> Named:
    """W1 meets zero columns of W2 beyond the small rank; rows of W2 beyond the vocabulary add nothing."""
    vocab, rank = small.layers.vocab_size, small.markov_rank
    first = Noise(dtype).matrix(large.layers.vocab_size, large.markov_rank)
    first[:vocab, :rank] = tensors["markov_head.markov_w1.weight"]
    yield "markov_head.markov_w1.weight", first
    second = torch.zeros(large.draft_vocab_size, large.markov_rank, dtype=dtype)
    second[:vocab, :rank] = tensors["markov_head.markov_w2.weight"]
    yield "markov_head.markov_w2.weight", second


def _confidence(
    tensors: Mapping[str, Tensor], small: DrafterConfig, large: DrafterConfig, padding: Padding
) -> Named:
    """The confidence head reads [hidden; Markov embedding]."""
    weight = tensors["confidence_head.proj.weight"]
    d, width = padding.small, padding.large
    wide = torch.zeros(1, width + (large.markov_rank if large.confidence_with_markov else 0))
    wide[:, :d] = weight[:, :d]
    if small.confidence_with_markov:
        wide[:, width : width + small.markov_rank] = weight[:, d:]
    yield "confidence_head.proj.weight", wide
    yield "confidence_head.proj.bias", tensors["confidence_head.proj.bias"]


def _read(folder: Path) -> dict[str, Tensor]:
    """All tensors of a small checkpoint, fp32."""
    headers = read_headers(folder)
    tensors = {}
    for name, stored in headers.items():
        with open_shard(stored.file) as shard:
            tensors[name] = shard.get_tensor(name).float()
    return tensors


def _make_empty(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}. Name a new folder.") from error
    if not is_empty:
        raise CheckpointError(f"{folder} is not empty. Name a new folder.")


def write_sharded(
    folder: Path, config: Mapping[str, Any], named: Named, dtype: torch.dtype, source: Path
) -> Path:
    """Write a checkpoint shard by shard, holding one at a time; tokenizer and defaults come from ``source``.

    Raises:
        ConfigError, CheckpointError: the folder cannot be made, or is not empty.
    """
    _make_empty(folder)
    shards: list[list[str]] = []
    part: dict[str, Tensor] = {}
    total = 0

    def close() -> None:
        save_file(part, folder / f"part-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(part))
        part.clear()

    for name, tensor in named:
        stored = tensor.to(dtype).contiguous()
        if part and sum(t.nbytes for t in part.values()) + stored.nbytes > SHARD_BYTES:
            close()
        part[name] = stored
        total += stored.nbytes
    close()
    index: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(folder / f"part-{i}", folder / file)
        index |= dict.fromkeys(names, file)
    (folder / INDEX_NAME).write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1) + "\n"
    )
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
    for member in _MEMBERS:
        if (source / member).is_file():
            shutil.copy(source / member, folder / member)
    return folder
