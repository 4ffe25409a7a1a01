"""Cases of what is done to each row alone: norms, SwiGLU, and what lies between projections and the cache."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from ops_case import EPS, MAX_CONTEXT, Case, Plan, World
from torch import Tensor

from paceline import ops
from paceline.ops import reference

BLOCK_SIZE = 16


def plans(world: World) -> Iterator[Plan]:
    """Every row-wise op, at 1 to 8,192 rows."""
    for num_rows in world.each(1, 8, 64, 1024, 8192):
        for op, build in {
            "rms_norm": rms_norm,
            "add_rms_norm": add_rms_norm,
            "silu_mul": silu_mul,
            "qk_norm_rope_write": qk_norm_rope_write,
            "kv_norm_rope_write": kv_norm_rope_write,
        }.items():
            yield Plan(op, f"R={num_rows}", partial(build, world, num_rows))


def norm64(x: Tensor, weight: Tensor) -> Tensor:
    """The norm of float64 rows [*, d]."""
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def rms_norm(world: World, num_rows: int) -> Case:
    """Rows [R, hidden]."""
    x, weight = world.tensor(num_rows, world.hidden), world.tensor(world.hidden)
    return Case(
        lambda: (ops.rms_norm(x, weight, EPS),),
        lambda: (norm64(x.double(), weight),),
        2 * num_rows * world.hidden * world.size,
        peer=lambda: F.rms_norm(x, (world.hidden,), weight, EPS),
    )


def add_rms_norm(world: World, num_rows: int) -> Case:
    """Rows [R, hidden] and as many of the residual stream."""
    x, residual = (world.tensor(num_rows, world.hidden) for _ in range(2))
    weight = world.tensor(world.hidden)

    def exact() -> tuple[Tensor, ...]:
        total = (x + residual).double()
        return norm64(total, weight), total

    return Case(
        lambda: ops.add_rms_norm(x, residual, weight, EPS),
        exact,
        4 * num_rows * world.hidden * world.size,
        peer=lambda: F.rms_norm(x + residual, (world.hidden,), weight, EPS),
    )


def silu_mul(world: World, num_rows: int) -> Case:
    """Rows [R, 2 * intermediate]."""
    gate_up = world.tensor(num_rows, 2 * world.intermediate)

    def exact() -> tuple[Tensor, ...]:
        gate, up = gate_up.double().chunk(2, dim=-1)
        return (F.silu(gate) * up,)

    return Case(
        lambda: (ops.silu_mul(gate_up),),
        exact,
        3 * num_rows * world.intermediate * world.size,
        peer=lambda: reference.silu_mul(gate_up),
    )


def rope_table(world: World) -> Tensor:
    """[positions, D] fp32, cosines and sines."""
    frequencies = 1e6 ** -(torch.arange(0, world.head_dim, 2, dtype=torch.float64) / world.head_dim)
    angles = torch.arange(MAX_CONTEXT, dtype=torch.float64)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float().to(world.device)


def rotated64(heads: Tensor, weight: Tensor, angles: Tensor) -> Tensor:
    """Heads [R, heads, D] normed by the weight, and rotated by angles [R, D], in float64."""
    cos, sin = angles.double().unsqueeze(1).chunk(2, dim=-1)
    low, high = norm64(heads.double(), weight).chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def places(world: World, num_rows: int) -> tuple[Tensor, Tensor, int]:
    """Positions and cache slots [R] of rows scattered over a cache, and how many blocks it has."""
    num_blocks = 2 * -(-num_rows // BLOCK_SIZE)
    kv_slots = torch.randperm(num_blocks * BLOCK_SIZE, device=world.device)[:num_rows]
    return world.ids(MAX_CONTEXT, num_rows), kv_slots, num_blocks


def qk_norm_rope_write(world: World, num_rows: int) -> Case:
    """Rows [R, (H + 2 KV) * D] of one layer."""
    qkv = world.tensor(num_rows, world.qkv)
    q_norm, k_norm = (world.tensor(world.head_dim) for _ in range(2))
    table, (positions, kv_slots, num_blocks) = rope_table(world), places(world, num_rows)
    shape = (2, num_blocks, BLOCK_SIZE, world.kv_heads, world.head_dim)
    k_cache, v_cache = torch.zeros(shape, dtype=world.dtype, device=world.device).unbind()

    def run() -> tuple[Tensor, ...]:
        q = ops.qk_norm_rope_write(qkv, q_norm, k_norm, EPS, table, positions, kv_slots, k_cache, v_cache)
        return (q,)

    def exact() -> tuple[Tensor, ...]:
        q, k, v = qkv.view(num_rows, -1, world.head_dim).split(
            [world.heads, world.kv_heads, world.kv_heads], dim=1
        )
        angles = table[positions.long()]
        return rotated64(q, q_norm, angles), rotated64(k, k_norm, angles), v.double()

    return Case(
        run,
        exact,
        num_rows * (2 * world.qkv * world.size + world.head_dim * 4),
        outcome=lambda q: (q, k_cache.flatten(0, 1)[kv_slots], v_cache.flatten(0, 1)[kv_slots]),
    )


def kv_norm_rope_write(world: World, num_rows: int) -> Case:
    """What a drafter writes of R rows: keys and values of all its layers, as one product left them,
    [layers, R, 2 KV * D], rows first in memory.
    """
    layers, width = world.draft_layers, 2 * world.kv_heads * world.head_dim
    kv = world.tensor(num_rows, layers, width).transpose(0, 1)
    k_norms, table = world.tensor(layers, world.head_dim), rope_table(world)
    positions, kv_slots, num_blocks = places(world, num_rows)
    shape = (2, layers, num_blocks, BLOCK_SIZE, world.kv_heads, world.head_dim)
    k_cache, v_cache = torch.zeros(shape, dtype=world.dtype, device=world.device).unbind()

    def run() -> tuple[Tensor, ...]:
        ops.kv_norm_rope_write(kv, k_norms, EPS, table, positions, kv_slots, k_cache, v_cache)
        return ()

    def exact() -> tuple[Tensor, ...]:
        angles = table[positions.long()]
        heads = kv.reshape(layers, num_rows, 2, world.kv_heads, world.head_dim)
        keys = [rotated64(k, norm, angles) for k, norm in zip(heads[:, :, 0].unbind(), k_norms, strict=True)]
        return torch.stack(keys), heads[:, :, 1].double()

    return Case(
        run,
        exact,
        num_rows * (2 * layers * width * world.size + world.head_dim * 4),
        outcome=lambda: (k_cache.flatten(1, 2)[:, kv_slots], v_cache.flatten(1, 2)[:, kv_slots]),
    )
