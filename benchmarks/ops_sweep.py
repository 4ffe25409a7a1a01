"""Attention cut up in other ways than the engine's."""

from __future__ import annotations

import itertools
import sys
from dataclasses import asdict
from functools import partial

import torch
from ops_attention import AttentionScene
from ops_measure import Timer


def can_sweep(scene: AttentionScene) -> bool:
    """Whether the cut is free: neither by the prompt's own kernel nor by what a row's bits must not depend
    on.
    """
    return scene.own is None and not scene.options.deterministic


def sweep(scene: AttentionScene, timer: Timer) -> list[dict[str, object]]:
    """Cold times of the ways to cut the same attention up, fastest first."""
    from paceline.ops.triton.attention_config import AttentionConfig, choose_config

    num_rows, _, _ = scene.q.shape
    processors = torch.cuda.get_device_properties(scene.q.device).multi_processor_count
    kv_heads = scene.k_cache.shape[2]
    chosen = choose_config(scene.layout, num_rows, scene.group, kv_heads, scene.q.dtype, processors)
    timings: list[tuple[float, dict[str, object]]] = []
    tiles = {chosen.block_m, 64} if chosen.block_m >= 32 else {chosen.block_m}
    splits = sorted({max(1, int(chosen.num_splits * f)) for f in (0.5, 1, 2)} | {1})
    for block_m, block_n, num_splits, warps, stages, split_keys in itertools.product(
        tiles, (32, 64, 128), splits, (chosen.num_warps // 2, chosen.num_warps), (2, 3, 4), (64, 192, 320)
    ):
        if num_splits == 1 and split_keys != chosen.split_keys:
            continue
        config = AttentionConfig(block_m, block_n, num_splits, warps, stages, split_keys, whole=block_m > 64)
        try:
            took = timer.cold_us(partial(scene.run, config))
        except Exception as error:  # a tile that does not fit in shared memory
            print(f"  {config}: {type(error).__name__}", file=sys.stderr)
            continue
        timings.append((took, {"us": took, "chosen": config == chosen, **asdict(config)}))
    return [timing for _, timing in sorted(timings, key=lambda pair: pair[0])]
