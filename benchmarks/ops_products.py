"""Cases of the matrix products, as the engine calls them.

Those whose last sum the norm behind them may do come with that norm, swiglu with silu(gate) * up. In the
graphs the weights are other ones from call to call, as they are from layer to layer in a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from ops_case import EPS, Case, Plan, World
from ops_rowwise import norm64
from torch import Tensor

from paceline import ops
from paceline.ops import reference

ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 2048)
DETERMINISTIC_ROWS = (1, 64, 512)
PAST_CACHE = 256 << 20
"""Bytes of weights between two uses of the same: five times an H200's L2 cache."""

MOST_COPIES = 20

SEVERAL_ROUNDINGS = 2.5
"""Of what is rounded some four times on its way, the tolerance, in units of the dtype's epsilon."""


class Weight(NamedTuple):
    """A weight of the target or the drafter: what multiplies by it, and [rows, columns]."""

    op: str
    name: str
    width: int
    depth: int


def target_weights(world: World) -> list[Weight]:
    """Of the target. A drafter's layers have the same."""
    d, inner = world.hidden, world.intermediate
    return [
        Weight("linear", "qkv", world.qkv, d),
        Weight("linear_parts", "o", d, world.heads * world.head_dim),
        Weight("linear_silu_mul", "gate_up", 2 * inner, d),
        Weight("linear_parts", "down", d, inner),
        Weight("linear", "head", world.vocab, d),
    ]


def drafter_weights(world: World) -> list[Weight]:
    """Of a drafter alone: from taps to features, and from these to the keys and values of all its layers."""
    context = 2 * world.kv_heads * world.head_dim * world.draft_layers
    return [
        Weight("linear", "drafter's fc", world.hidden, world.taps * world.hidden),
        Weight("linear", "drafter's context", context, world.hidden),
    ]


def plans(world: World) -> Iterator[Plan]:
    """Every weight at 1 to 2,048 rows; then the deterministic products, which are the target's."""
    make = {"linear": linear, "linear_parts": linear_parts, "linear_silu_mul": linear_silu_mul}
    for weight in (*target_weights(world), *drafter_weights(world)):
        for num_rows in world.each(*ROWS):
            shape = f"{weight.name} R={num_rows}"
            yield Plan(weight.op, shape, partial(make[weight.op], world, weight, num_rows))
    for weight in target_weights(world):
        for num_rows in world.each(*DETERMINISTIC_ROWS):
            build = partial(linear, world, weight, num_rows, deterministic=True)
            yield Plan("deterministic linear", f"{weight.name} R={num_rows}", build)


def operands(world: World, weight: Weight, num_rows: int) -> tuple[Tensor, Tensor]:
    """x [R, depth], and enough weights [copies, width, depth]."""
    copies = 1
    if world.device.type != "cpu":
        copies = min(-(-PAST_CACHE // (weight.width * weight.depth * world.size)), MOST_COPIES)
    weights = world.tensor(copies, weight.width, weight.depth).div_(weight.depth**0.5)
    return world.tensor(num_rows, weight.depth), weights


def product64(x: Tensor, weight: Tensor) -> Tensor:
    """[R, depth] and [width, depth] -> [R, width] float64."""
    return x.double() @ weight.double().T


def product_case(
    weights: Tensor,
    num_rows: int,
    run: Callable[[Tensor], tuple[Tensor, ...]],
    exact: Callable[[], tuple[Tensor, ...]],
    peer: Callable[[], object],
    columns: int,
    *,
    fused: bool = False,
) -> Case:
    """A case of a product; ``columns`` are read and written of each row. Is more ``fused`` to it?"""
    _, width, depth = weights.shape
    return Case(
        lambda: run(weights[0]),
        exact,
        (width * depth + num_rows * columns) * weights.element_size(),
        flops=2 * num_rows * width * depth,
        peer=peer,
        tolerance=1e-5 + SEVERAL_ROUNDINGS * torch.finfo(weights.dtype).eps if fused else None,
        others=[partial(run, weight) for weight in weights[1:]],
    )


def linear(world: World, weight: Weight, num_rows: int, *, deterministic: bool = False) -> Case:
    """The product alone."""
    x, weights = operands(world, weight, num_rows)
    return product_case(
        weights,
        num_rows,
        lambda w: (ops.linear(x, w, deterministic=deterministic),),
        lambda: (product64(x, weights[0]),),
        lambda: F.linear(x, weights[0]),
        weight.width + weight.depth,
    )


def linear_parts(world: World, weight: Weight, num_rows: int) -> Case:
    """The product, added to the residual stream, and normed."""
    x, weights = operands(world, weight, num_rows)
    residual, norm = world.tensor(num_rows, weight.width), world.tensor(weight.width)

    def run(w: Tensor) -> tuple[Tensor, ...]:
        return ops.add_rms_norm(ops.linear_parts(x, w), residual, norm, EPS)

    def exact() -> tuple[Tensor, ...]:
        total = product64(x, weights[0]) + residual.double()
        return norm64(total, norm), total

    def peer() -> Tensor:
        return F.rms_norm(F.linear(x, weights[0]) + residual, (weight.width,), norm, EPS)

    return product_case(weights, num_rows, run, exact, peer, 4 * weight.width + weight.depth, fused=True)


def linear_silu_mul(world: World, weight: Weight, num_rows: int) -> Case:
    """The product, and silu(gate) * up of its halves."""
    x, weights = operands(world, weight, num_rows)

    def exact() -> tuple[Tensor, ...]:
        gate, up = product64(x, weights[0]).chunk(2, dim=-1)
        return (F.silu(gate) * up,)

    return product_case(
        weights,
        num_rows,
        lambda w: (ops.linear_silu_mul(x, w),),
        exact,
        lambda: reference.silu_mul(F.linear(x, weights[0])),
        weight.width // 2 + weight.depth,
        fused=True,
    )
