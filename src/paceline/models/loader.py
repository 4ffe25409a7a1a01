"""A Qwen3 model from a checkpoint folder, from nothing, and back to a folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError
from paceline.models.checkpoint import (
    check_tensors,
    read_headers,
    resolve_dtype,
    resolve_folder,
    same_rows,
    stream_tensors,
    write_folder,
)
from paceline.models.config import LoadFormat, Qwen3Config
from paceline.models.qwen3 import Attention, DecoderLayer, Qwen3ForCausalLM, freeze

_HEAD: Final = "lm_head.weight"


def layer_tensors(layer: DecoderLayer, config: Qwen3Config) -> dict[str, Tensor]:
    """Hugging Face's names of one layer's tensors -> views of the fused parameters that hold them."""
    mlp = layer.mlp
    inner = config.intermediate_size
    tensors = {
        "input_layernorm.weight": layer.input_layernorm.weight.data,
        "post_attention_layernorm.weight": layer.post_attention_layernorm.weight.data,
        "mlp.gate_proj.weight": mlp.gate_up_proj.weight.data[:inner],
        "mlp.up_proj.weight": mlp.gate_up_proj.weight.data[inner:],
        "mlp.down_proj.weight": mlp.down_proj.weight.data,
    }
    tensors.update(attention_tensors(layer.self_attn, config))
    return tensors


def attention_tensors(attention: Attention, config: Qwen3Config) -> dict[str, Tensor]:
    """The same for the attention sublayer: q, k and v lie one below the other in ``qkv_proj``."""
    tensors = {
        "self_attn.o_proj.weight": attention.o_proj.weight.data,
        "self_attn.q_norm.weight": attention.q_norm.weight.data,
        "self_attn.k_norm.weight": attention.k_norm.weight.data,
    }
    sizes = [config.q_size, config.kv_size, config.kv_size]
    for kind in ("weight", "bias") if config.attention_bias else ("weight",):
        parts = getattr(attention.qkv_proj, kind).data.split(sizes)
        tensors.update({f"self_attn.{n}_proj.{kind}": part for n, part in zip("qkv", parts, strict=True)})
    if config.attention_bias:
        tensors["self_attn.o_proj.bias"] = attention.o_proj.bias.data
    return tensors


def named_tensors(model: Qwen3ForCausalLM) -> dict[str, Tensor]:
    """Hugging Face's names -> views of the model's parameters; the map used for loading and for saving."""
    tensors = {
        "model.embed_tokens.weight": model.embed_tokens.weight.data,
        "model.norm.weight": model.norm.weight.data,
    }
    for i, layer in enumerate(model.decoder_layers()):
        tensors.update(
            {f"model.layers.{i}.{name}": t for name, t in layer_tensors(layer, model.config).items()}
        )
    if not model.config.tie_word_embeddings:
        tensors[_HEAD] = model.lm_head.weight.data
    return tensors


def load_model(
    name_or_path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: str = "auto",
    load_format: LoadFormat = "auto",
    show_progress: bool = False,
    seed: int = 0,
) -> Qwen3ForCausalLM:
    """Load a model for inference (no gradients).

    A checkpoint whose config ties the head to the embedding may carry ``lm_head.weight`` all the same: it is
    accepted when equal to the embedding and refused otherwise, since either tensor could be the one that was
    meant.

    Args:
        name_or_path: folder in the Hugging Face layout, or a hub name.
        dtype: "auto", "float32", "bfloat16" or "float16".
        load_format: "auto" reads the weights; "dummy" reads config.json alone and draws random weights from
            ``seed``.
        show_progress: progress bar on stderr.

    Raises:
        CheckpointError: whatever is wrong with the folder, by name; before any weight is read.
    """
    folder = resolve_folder(name_or_path)
    config = Qwen3Config.from_pretrained(folder)
    if load_format == "dummy":
        return random_model(config, dtype=resolve_dtype(dtype, config.dtype, {}), device=device, seed=seed)
    headers = read_headers(folder)
    model = Qwen3ForCausalLM(config, device=device, dtype=resolve_dtype(dtype, config.dtype, headers))
    targets = named_tensors(model)
    tied = config.tie_word_embeddings
    check_tensors(folder, headers, targets, ignored=(_HEAD,) if tied else ())
    stream_tensors(headers, targets, show_progress=show_progress)
    if tied and _HEAD in headers and not same_rows(headers[_HEAD], _HEAD, model.embed_tokens.weight):
        raise CheckpointError(
            f"{folder}: config.json ties the head to the embedding, but the file has a different {_HEAD}; "
            "set 'tie_word_embeddings' to false to use it, or remove the tensor"
        )
    freeze(model)
    return model


@torch.no_grad()
def random_model(
    config: Qwen3Config,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Qwen3ForCausalLM:
    """A model of random weights for benchmarks and tests, made on the device; the same for the same seed and
    device type.

    Matrices are N(0, 1 / fan_in), so that activations and logits stay of order one at any width and depth.
    """
    model = Qwen3ForCausalLM(config, device=device, dtype=dtype)
    randomize(model, torch.Generator(device).manual_seed(seed))
    freeze(model)
    return model


@torch.no_grad()
def randomize(module: nn.Module, generator: torch.Generator) -> None:
    """Fill parameters in place: vectors (norms) with 1, biases with 0, matrices with N(0, 1 / fan_in)."""
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, float(parameter.shape[-1]) ** -0.5, generator=generator)


def save_checkpoint(model: Qwen3ForCausalLM, folder: str | Path, *, dtype: torch.dtype | None = None) -> Path:
    """Write a folder that Hugging Face and :func:`load_model` read: unfused tensors and config.json.

    Args:
        dtype: convert weights to it; None keeps the model's.

    Returns:
        The folder.
    """
    stored = dtype or model.embed_tokens.weight.dtype
    config = replace(model.config, dtype=str(stored).removeprefix("torch."))
    return write_folder(folder, config.to_dict(), named_tensors(model), stored)
