"""Cases of a decode round's small change. Integers, which must be the reference's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from ops_case import Case, Plan, World, num_bytes
from torch import Tensor

from paceline import ops
from paceline.ops import reference

WIDTH, BLOCK_SIZE, MAX_LEN = 8, 16, 4096
MASK_ID, CHANCE = 5, 0.8


def plans(world: World) -> Iterator[Plan]:
    """Every op, for 1 and for 64 sequences."""
    for count in world.each(1, 64):
        for build in (
            span_rows,
            allot_drafts,
            packed_rows,
            block_rows,
            cache_slots,
            place_drafts,
            leading_matches,
            synthetic_matches,
            advance,
        ):
            yield Plan(build.__name__, f"N={count}", partial(make, build, world, count))


def make(build: Callable[[Round], Case], world: World, count: int) -> Case:
    """A case with slots of its own."""
    return build(Round(world, count))


class Round:
    """Slots of N sequences and a spare one, which the last place of several has, for it has no sequence.

    Attributes:
        slots, drafts: [N] int32; drafts of each span, -1 for no sequence.
        leads: [N] int32, rows before each anchor.
        num_computed: [N + 1] int32, by slot.
        tokens, tables: [N + 1, L] and [N + 1, M] int32, by slot.
    """

    def __init__(self, world: World, count: int) -> None:
        self.world, self.count = world, count
        self.slots = torch.randperm(count, device=world.device).to(torch.int32)
        self.drafts = world.ids(WIDTH, count)
        if count > 1:
            self.slots[-1], self.drafts[-1] = count, -1
        self.leads = torch.zeros_like(self.drafts)
        self.num_computed = world.ids(MAX_LEN - 4 * WIDTH, count + 1)
        self.tokens = world.ids(world.vocab, count + 1, MAX_LEN)
        num_blocks = MAX_LEN // BLOCK_SIZE
        self.tables = torch.randperm((count + 1) * num_blocks, device=world.device).to(torch.int32)
        self.tables = self.tables.view(count + 1, num_blocks)
        self.scratch = (count + 1) * num_blocks * BLOCK_SIZE


def pure(
    op: Callable[..., Any], definition: Callable[..., Any], operands: tuple[Any, ...], read: int
) -> Case:
    """An op that returns what it computes of its operands; ``read`` bytes of them, and all it returns."""

    def results(compute: Callable[..., Any]) -> tuple[Tensor, ...]:
        found = compute(*operands)
        return found if isinstance(found, tuple) else (found,)

    return Case(
        lambda: results(op),
        lambda: results(definition),
        read + num_bytes(*results(definition)),
        peer=lambda: definition(*operands),
    )


def span_rows(scene: Round) -> Case:
    """Rows of verify spans."""
    operands = (scene.slots, scene.drafts, scene.num_computed, scene.tokens, scene.tables)
    sizes = (WIDTH, BLOCK_SIZE, MAX_LEN - 1, scene.scratch)
    return pure(ops.span_rows, reference.span_rows, (*operands, *sizes), scene.count * (12 + 8 * WIDTH))


def allot_drafts(scene: Round) -> Case:
    """Rows for half of the drafts."""
    chances = torch.rand(scene.count + 1, WIDTH - 1, device=scene.slots.device).cumprod(1)
    operands = (scene.slots, scene.drafts, scene.leads, chances, scene.count * (WIDTH + 1) // 2)
    return pure(ops.allot_drafts, reference.allot_drafts, operands, scene.count * (8 + 4 * (WIDTH - 1)))


def packed_rows(scene: Round) -> Case:
    """Rows of verify spans side by side, with some behind them that are nobody's."""
    operands = (scene.slots, scene.drafts, scene.leads, scene.num_computed, scene.tokens, scene.tables)
    sizes = (scene.count * WIDTH, BLOCK_SIZE, scene.count, MAX_LEN - 1, scene.scratch)
    return pure(ops.packed_rows, reference.packed_rows, (*operands, *sizes), scene.count * (12 + 8 * WIDTH))


def block_rows(scene: Round) -> Case:
    """Rows of drafter's blocks, of which every other has no room."""
    reserved = (torch.arange(scene.count, device=scene.slots.device) % 2 == 0).to(torch.int32)
    operands = (scene.slots, reserved, scene.num_computed, scene.tokens, scene.tables)
    sizes = (WIDTH, BLOCK_SIZE, MASK_ID, scene.scratch)
    return pure(ops.block_rows, reference.block_rows, (*operands, *sizes), scene.count * (16 + 4 * WIDTH))


def cache_slots(scene: Round) -> Case:
    """Cache slots of rows anywhere in their sequences."""
    slots = scene.slots.repeat_interleave(WIDTH)
    positions = scene.world.ids(MAX_LEN, len(slots))
    operands = (scene.tables, BLOCK_SIZE, slots, positions)
    return pure(ops.cache_slots, reference.cache_slots, operands, len(slots) * 12)


def leading_matches(scene: Round) -> Case:
    """Draws beside drafts that mostly are the same, [N, W] and [N, W - 1]."""
    fed = scene.world.ids(scene.world.vocab, scene.count, WIDTH)
    sampled = torch.cat((fed[:, 1:], fed[:, :1]), dim=1)
    sampled = torch.where(torch.rand(sampled.shape, device=sampled.device) < CHANCE, sampled, -1)
    operands = (sampled, fed[:, 1:], scene.drafts)
    return pure(
        ops.leading_matches, reference.leading_matches, operands, num_bytes(sampled, fed, scene.drafts)
    )


def synthetic_matches(scene: Round) -> Case:
    """Drafts that stand with a given chance."""
    seed_keys = scene.world.ids(2**62, scene.count + 1, 4, dtype=torch.int64)[:, 0]
    anchors = scene.world.ids(MAX_LEN, scene.count, WIDTH)[:, 0]
    bound = torch.tensor(round(CHANCE * 2**31), device=scene.slots.device)
    operands = (seed_keys, scene.slots, anchors, scene.drafts, WIDTH - 1, bound)
    return pure(ops.synthetic_matches, reference.synthetic_matches, operands, scene.count * 20)


def place_drafts(scene: Round) -> Case:
    """Drafts [N, W - 1] behind the newest tokens; the first of each pair that a chain leaves."""
    drafts = scene.world.ids(scene.world.vocab, scene.count, WIDTH - 1, 2, dtype=torch.int64)[..., 0]
    operands, before = (scene.slots, drafts, scene.num_computed), scene.tokens.clone()

    def place(op: Callable[..., None], tokens: Tensor) -> tuple[Tensor, ...]:
        op(*operands, tokens)
        return (tokens,)

    return Case(
        lambda: place(ops.place_drafts, scene.tokens),
        lambda: place(reference.place_drafts, before),
        scene.count * (8 + 12 * (WIDTH - 1)),
        peer=lambda: place(reference.place_drafts, scene.tokens),
    )


def advance(scene: Round) -> Case:
    """Draws [N, W] behind the anchors, and lengths past what stands. What is timed moves nobody on, or the
    sequences would not last.
    """
    sampled = scene.world.ids(scene.world.vocab, scene.count, WIDTH)
    accepted = (scene.drafts - 1).clamp(min=0)
    nobody = torch.full_like(accepted, -1)

    def move(op: Callable[..., None], accepted: Tensor, num_computed: Tensor, tokens: Tensor) -> None:
        op(scene.slots, scene.drafts, sampled, accepted, num_computed, tokens)

    def moved(op: Callable[..., None]) -> tuple[Tensor, ...]:
        num_computed, tokens = scene.num_computed.clone(), scene.tokens.clone()
        move(op, accepted, num_computed, tokens)
        return num_computed, tokens[:-1]  # the spare slot's tokens are anything

    def run() -> tuple[Tensor, ...]:
        move(ops.advance, nobody, scene.num_computed, scene.tokens)
        return ()

    return Case(
        run,
        lambda: moved(reference.advance),
        scene.count * (16 + 8 * WIDTH),
        peer=lambda: move(reference.advance, nobody, scene.num_computed, scene.tokens),
        outcome=lambda: moved(ops.advance),
    )
