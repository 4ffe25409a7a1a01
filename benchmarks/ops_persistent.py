"""Cases of the persistent kernel: the target's whole forward pass of a few rows, beside the ordinary layers.

Weights are drawn at random, in bf16: the kernel knows nothing else. The check is coarse, for the roundings of
36 layers add up; ``tests/gpu/test_gpu_few_rows.py`` looks closer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from ops_attention import AttentionScene, Options
from ops_case import MAX_CONTEXT, Case, Plan, World
from torch import Tensor

from paceline.bench.geometry import geometry_folder
from paceline.models.attention import KVCache, PagedContext
from paceline.models.config import Qwen3Config
from paceline.models.qwen3 import Qwen3ForCausalLM, freeze
from paceline.runtime.few_rows import FewRows

CONTEXT, BLOCK_SIZE = 1016, 16
TOLERANCE = 0.15
"""Of logits. With weights like these a bf16 pass is 0.05 from an fp32 one behind 36 layers, so that two
differ by some 0.07 (small geometries on a CPU)."""


def plans(world: World) -> Iterator[Plan]:
    """A decode row, and eight rows of one sequence and of eight."""
    if world.device.type != "cpu" and world.dtype != torch.bfloat16:
        return
    for count, span in ((1, 1), (1, 8), (8, 1)):
        yield Plan("persistent pass", f"{count} x {span} at 1k", partial(target_pass, world, count, span))


def target_of(world: World) -> Qwen3ForCausalLM:
    """A target of the world's geometry."""
    config = replace(
        Qwen3Config.from_pretrained(geometry_folder("qwen3-4b")),
        hidden_size=world.hidden,
        intermediate_size=world.intermediate,
        num_attention_heads=world.heads,
        num_key_value_heads=world.kv_heads,
        head_dim=world.head_dim,
        vocab_size=world.vocab,
        num_hidden_layers=world.layers,
        windows=(None,) * world.layers,
    )
    model = Qwen3ForCausalLM(config, device=world.device, dtype=world.dtype)
    model.init_weights()
    freeze(model)
    return model


def target_pass(world: World, count: int, span: int) -> Case:
    """Logits [R, V] of ``span`` rows of each of ``count`` sequences. All weights are read once, and the
    sequences' keys and values.
    """
    model = target_of(world)
    if world.device.type != "cpu" and not FewRows.runs_on(model, BLOCK_SIZE):
        raise RuntimeError("the persistent kernel does not run on this device")
    computed = world.fewer(CONTEXT)
    options = Options(block_size=BLOCK_SIZE, max_context=MAX_CONTEXT)
    scene = AttentionScene.make(world, [(computed, span)] * count, options)
    num_blocks = scene.k_cache.shape[0]
    shape = (world.layers, num_blocks, BLOCK_SIZE, world.kv_heads, world.head_dim)
    cache = KVCache(world.tensor(*shape), world.tensor(*shape))
    tokens, layout = world.ids(world.vocab, count * span), scene.layout
    forward = FewRows(model, cache).target(count, span)
    if forward is None:
        raise RuntimeError(f"{count} x {span} rows do not fit the persistent kernel")

    def exact() -> tuple[Tensor, ...]:
        hidden, _ = model(tokens, layout.positions, PagedContext(cache, layout))
        return (model.logits(hidden).double(),)

    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    numbers = sum(weight.numel() for weight in weights)  # the head is the embedding
    keys = count * (computed + span)
    kv = 2 * keys * world.layers * world.kv_heads * world.head_dim
    return Case(
        lambda: (forward(tokens, layout),),
        exact,
        (numbers + kv) * world.size,
        flops=2 * count * span * numbers + 4 * keys * span * world.layers * world.heads * world.head_dim,
        tolerance=TOLERANCE,
    )
