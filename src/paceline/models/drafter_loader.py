"""A drafter from a checkpoint folder, from nothing, and back to a folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.json_files import read_json
from paceline.models.checkpoint import (
    StoredTensor,
    check_tensors,
    open_shard,
    read_headers,
    resolve_folder,
    stream_tensors,
    write_folder,
)
from paceline.models.config import LoadFormat
from paceline.models.drafter import Drafter
from paceline.models.drafter_config import DrafterConfig
from paceline.models.drafter_dialects import load_drafter_config
from paceline.models.loader import randomize
from paceline.models.qwen3 import Qwen3ForCausalLM

_EMBEDDING: Final = "embed_tokens.weight"
_HEAD: Final = "lm_head.weight"
_OFFSETS: Final = "d2t"
_MASK: Final = "t2d"
STS_NAME: Final = "sts.json"
_NUM_COMPARED: Final = 64  # rows of a stored copy that are compared with the target's


def named_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """Checkpoint names -> views of the drafter's parameters; the same in every dialect."""
    shape = drafter.config.layers
    tensors = {
        "fc.weight": drafter.fc.weight.data,
        "hidden_norm.weight": drafter.hidden_norm.weight.data,
        "norm.weight": drafter.norm.weight.data,
    }
    inner = shape.intermediate_size
    for i, layer in enumerate(drafter.draft_layers()):
        parts: dict[str, Tensor] = {
            "input_layernorm.weight": layer.input_layernorm.weight,
            "post_attention_layernorm.weight": layer.post_attention_layernorm.weight,
            "self_attn.q_norm.weight": layer.q_norm.weight,
            "self_attn.k_norm.weight": layer.k_norm.weight,
            "self_attn.o_proj.weight": layer.o_proj.weight,
            "mlp.gate_proj.weight": layer.mlp.gate_up_proj.weight[:inner],
            "mlp.up_proj.weight": layer.mlp.gate_up_proj.weight[inner:],
            "mlp.down_proj.weight": layer.mlp.down_proj.weight,
        }
        stacked = {"weight": drafter.qkv_proj[i]}
        if drafter.qkv_bias is not None:
            stacked["bias"] = drafter.qkv_bias[i]
            parts["self_attn.o_proj.bias"] = layer.o_proj.bias
        for kind, rows in stacked.items():
            qkv = torch.split(rows, [shape.q_size, shape.kv_size, shape.kv_size])
            parts |= {f"self_attn.{n}_proj.{kind}": part for n, part in zip("qkv", qkv, strict=True)}
        tensors |= {f"layers.{i}.{name}": tensor.detach() for name, tensor in parts.items()}
    if drafter.markov_head is not None:
        tensors |= {f"markov_head.{n}": p.data for n, p in drafter.markov_head.named_parameters()}
    if drafter.confidence_head is not None:
        tensors |= {
            f"confidence_head.proj.{n}": p.data for n, p in drafter.confidence_head.named_parameters()
        }
    if drafter.lm_head is not None:
        tensors[_HEAD] = drafter.lm_head.weight.data
    return tensors


def load_drafter(
    name_or_path: str | Path,
    target: Qwen3ForCausalLM,
    *,
    load_format: LoadFormat = "auto",
    show_progress: bool = False,
    seed: int = 0,
    revision: str | None = None,
) -> Drafter:
    """Load a drafter for inference, to the target's device and in the target's dtype.

    Copies of the target's embedding and head in the checkpoint are not loaded. Some of their rows are
    compared with the target's: a drafter made for another target of the same size would otherwise only show
    as bad acceptance.

    Confidences are calibrated when the folder has an ``sts.json`` (see :func:`read_sts`).

    Args:
        name_or_path: folder, or hub name, of any dialect (:mod:`paceline.models.drafter_dialects`).
        load_format: "auto" reads the weights; "dummy" draws random ones from ``seed``.
        show_progress: progress bar on stderr.
        revision: of a hub name.

    Raises:
        CheckpointError: whatever is wrong or does not fit the target, by name.
    """
    folder = resolve_folder(name_or_path, revision=revision)
    config = load_drafter_config(folder, target.config)
    if load_format == "dummy":
        return random_drafter(config, target, seed=seed)
    headers = read_headers(folder)
    weight = target.embed_tokens.weight
    drafter = Drafter(config, target, device=weight.device, dtype=weight.dtype)
    targets = named_tensors(drafter)
    check_tensors(folder, headers, targets, ignored=(_EMBEDDING, _HEAD, _OFFSETS, _MASK))
    if config.reduced_vocab:
        drafter.target_ids = _read_target_ids(folder, headers, config).to(weight.device)
    copies = (
        {_EMBEDDING: weight} if config.reduced_vocab else {_EMBEDDING: weight, _HEAD: target.lm_head.weight}
    )
    for name, ours in copies.items():
        if name in headers:
            _compare_rows(headers[name], name, ours, config.mask_token_id)
    stream_tensors(headers, targets, show_progress=show_progress, what="drafter weights")
    if (folder / STS_NAME).is_file():
        drafter.sts_temperatures.copy_(read_sts(folder / STS_NAME, config.max_drafts))
    drafter.freeze()
    return drafter


def _read_target_ids(folder: Path, headers: dict[str, StoredTensor], config: DrafterConfig) -> Tensor:
    """The target's id of each draft id, [draft vocabulary] int64, from ``d2t``: offsets from the draft id."""
    size, vocab = config.draft_vocab_size, config.layers.vocab_size
    if _OFFSETS not in headers:
        raise CheckpointError(
            f"{folder}: draft_vocab_size is {size} of {vocab} tokens, but the tensor {_OFFSETS!r}, which "
            "maps draft ids to the target's, is missing"
        )
    with open_shard(headers[_OFFSETS].file) as shard:
        ids: Tensor = shard.get_tensor(_OFFSETS).long()
    if ids.shape != (size,):
        raise CheckpointError(
            f"{folder}: {_OFFSETS!r} is {list(ids.shape)}, expected [{size}] (draft_vocab_size)"
        )
    ids = ids + torch.arange(size)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(ids.unique()) != size:
        raise CheckpointError(
            f"{folder}: {_OFFSETS!r} does not map draft ids one to one into the {vocab} target ids"
        )
    if _MASK in headers:
        with open_shard(headers[_MASK].file) as shard:
            mask: Tensor = shard.get_tensor(_MASK).bool()
        if mask.shape != (vocab,) or int(mask.sum()) != size or not bool(mask[ids].all()):
            raise CheckpointError(
                f"{folder}: {_OFFSETS!r} and {_MASK!r} describe different draft vocabularies"
            )
    return ids


def _compare_rows(stored: StoredTensor, name: str, ours: Tensor, mask_token_id: int) -> None:
    """Refuse a copy of the target's table that is not one; the mask token's row may have been trained."""
    if stored.shape != tuple(ours.shape):
        raise CheckpointError(
            f"{stored.file}: the drafter's {name} is {list(stored.shape)}, the target's is {list(ours.shape)}"
        )
    step = max(1, stored.shape[0] // _NUM_COMPARED)
    rows = [row for row in range(0, stored.shape[0], step) if row != mask_token_id]
    with open_shard(stored.file) as shard:
        part = shard.get_slice(name)
        theirs = torch.stack([part[row] for row in rows]).float()
    mine = ours[rows].float().cpu()
    if not torch.allclose(theirs, mine, rtol=0.02, atol=1e-3):  # room for one of them in bf16
        raise CheckpointError(
            f"{stored.file}: the drafter's copy of {name} differs from the target's, so it was made for "
            "another target; use the target it names, or a drafter made for this one"
        )


def random_drafter(config: DrafterConfig, target: Qwen3ForCausalLM, *, seed: int = 0) -> Drafter:
    """A drafter of random weights, on the target's device and in its dtype, for benchmarks and tests."""
    weight = target.embed_tokens.weight
    drafter = Drafter(config, target, device=weight.device, dtype=weight.dtype)
    randomize(drafter, torch.Generator(weight.device).manual_seed(seed))
    drafter.freeze()
    return drafter


def save_drafter(
    drafter: Drafter, folder: str | Path, *, dtype: torch.dtype | None = None, with_tables: bool = False
) -> Path:
    """Write a folder in a dialect other engines read: DeepSpec's, or z-lab's for an anchor-drop DFlash.

    Args:
        dtype: convert weights to it; None keeps the drafter's.
        with_tables: add copies of the target's embedding and head, as DeepSpec's own checkpoints have.

    Raises:
        CheckpointError: no dialect can express the drafter.
    """
    stored = dtype or drafter.fc.weight.dtype
    layers = replace(drafter.config.layers, dtype=str(stored).removeprefix("torch."))
    depth = drafter.target.config.num_hidden_layers
    config = replace(drafter.config, layers=layers, num_target_layers=depth).to_dict()
    tensors = named_tensors(drafter)
    if with_tables:
        tensors[_EMBEDDING] = drafter.target.embed_tokens.weight
        tensors[_HEAD] = drafter.target.lm_head.weight.clone()  # tied: safetensors refuses shared memory
    return write_folder(folder, config, tensors, stored)


def read_sts(path: str | Path, num_drafts: int) -> Tensor:
    """Sequential temperature scaling: one temperature per draft position, [num_drafts] fp32.

    The file is SGLang's: a JSON object with ``temperatures``, a list of positive numbers, and notes of the
    fit.

    Raises:
        CheckpointError: unreadable, too few temperatures, or not positive.
    """
    values = read_json(Path(path)).get("temperatures")
    if not isinstance(values, list) or not all(
        isinstance(v, int | float) and not isinstance(v, bool) and v > 0 for v in values
    ):
        raise CheckpointError(f"{path}: 'temperatures' must be a list of positive numbers, got {values!r}")
    if len(values) < num_drafts:
        raise CheckpointError(
            f"{path}: {len(values)} temperatures for a drafter that drafts {num_drafts} tokens per round"
        )
    return torch.tensor(values[:num_drafts], dtype=torch.float32)
