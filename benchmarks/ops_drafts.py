"""Cases of a drafter's choices: the op's choice is scored in float64, and must score the most."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from ops_case import Case, Plan, World, score_of
from torch import Tensor

from paceline import ops

SLOTS, CANDIDATES = 7, 256


def plans(world: World) -> Iterator[Plan]:
    """One slot over the whole vocabulary; chains among candidates."""
    for num_rows in world.each(1, 8, 64, 128):
        yield Plan("draft_best", f"R={num_rows}", partial(draft_best, world, num_rows))
    for num_blocks in world.each(1, 8, 32):
        yield Plan("draft_candidates", f"N={num_blocks}", partial(draft_candidates, world, num_blocks))
        yield Plan("draft_chain", f"N={num_blocks}", partial(draft_chain, world, num_blocks))


def draft_best(world: World, num_rows: int) -> Case:
    """One slot of DSpark's chain, [R, V] logits corrected for the token before it."""
    vocab, rank = world.vocab, world.rank
    logits, table, weight = (world.tensor(n, m) for n, m in ((num_rows, vocab), (vocab, rank), (vocab, rank)))
    rows = world.ids(vocab, num_rows, dtype=torch.int64)
    low_rank = ops.LowRank(table, rows, weight)

    def scores() -> Tensor:
        return logits.double() + table[rows].double() @ weight.double().T

    return Case(
        lambda: (ops.draft_best(logits[:, None], low_rank),),
        lambda: (scores().amax(1, keepdim=True),),
        (vocab * rank + num_rows * vocab) * world.size,
        flops=2 * num_rows * vocab * rank,
        peer=lambda: (logits.float() + F.linear(table[rows], weight).float()).argmax(-1),
        outcome=lambda best: (score_of(scores(), best[:, 0, 0]),),
    )


def draft_candidates(world: World, num_blocks: int) -> Case:
    """What DSpark's chains choose among, of [N, slots, V] logits."""
    logits = world.tensor(num_blocks, SLOTS, world.vocab)

    def values(ids: Tensor) -> tuple[Tensor, ...]:
        return (logits.double().gather(2, ids.long().clamp(0, world.vocab - 1)),)

    return Case(
        lambda: (ops.draft_candidates(logits, None, CANDIDATES),),
        lambda: values(ops.best_of_buckets(logits.float(), CANDIDATES)),
        num_blocks * SLOTS * world.vocab * world.size,
        peer=lambda: logits.topk(CANDIDATES, dim=-1),
        outcome=values,
    )


def draft_chain(world: World, num_blocks: int) -> Case:
    """DSpark's chains among candidates, all slots of them. The first token of a chain must score the most
    among the slot's candidates and the anchor's successors.
    """
    vocab, rank, count = world.vocab, world.rank, CANDIDATES
    logits = world.tensor(num_blocks, SLOTS, vocab)
    table, weight = world.tensor(vocab, rank), world.tensor(vocab, rank)
    successors, anchors = world.ids(vocab, vocab, count // 2), world.ids(vocab, num_blocks)
    head = ops.ChainHead(table, weight, successors)
    candidates = ops.Candidates(logits, ops.draft_candidates(logits, None, count), None)

    def scores() -> Tensor:
        return logits[:, 0].double() + table[anchors].double() @ weight.double().T

    def most() -> tuple[Tensor, ...]:
        among = torch.cat((candidates.ids[:, 0], successors[anchors]), dim=1).long()
        return (scores().gather(1, among).amax(1, keepdim=True),)

    return Case(
        lambda: (ops.draft_chain(candidates, anchors, head),),
        most,
        num_blocks * SLOTS * (count + count // 2) * rank * world.size,
        outcome=lambda chains: (score_of(scores(), chains[:, 0, 0]),),
    )
