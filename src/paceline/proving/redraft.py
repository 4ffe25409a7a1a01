"""Drafts made again from the whole text: no cache, no paging, no state kept between rounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.models.attention import DenseCausalContext
from paceline.models.draft_attention import DenseDraftContext
from paceline.models.drafter import Drafter, DraftSlots
from paceline.proving.drive import Round
from paceline.training.acceptance import shared_noise_acceptance


@dataclass(frozen=True, slots=True)
class Redrafted:
    """One round, recomputed.

    Attributes:
        round: what the engine did.
        tokens: [g] greedy drafts.
        gaps: [g] best minus second best score of each greedy draft.
        chances: [m + 1] for m drafts that stood, g at most: chance that draft k stands at temperature 1 under
            shared noise, given the committed tokens before it.
        favourites: [m + 1] the drafter's most likely token there, given the committed tokens before it.
    """

    round: Round
    tokens: list[int]
    gaps: list[float]
    chances: list[float]
    favourites: list[int]


class DenseBlocks(NamedTuple):
    """Blocks of one text, drafted in one pass over the whole of it.

    Attributes:
        tokens: int64 [T], the text.
        hidden: [T, d], what the target's head reads.
        starts: int64 [1, A], positions of the anchors.
        anchors: int64 [1, A], their tokens.
        slots: g of each block, [1, A] blocks.
    """

    tokens: Tensor
    hidden: Tensor
    starts: Tensor
    anchors: Tensor
    slots: DraftSlots


def by_life(rounds: Iterable[Round]) -> list[list[Round]]:
    """Rounds of each life, in order."""
    lives: dict[int, list[Round]] = defaultdict(list)
    for item in rounds:
        lives[item.life].append(item)
    return list(lives.values())


def dense_blocks(
    drafter: Drafter, text: Sequence[int], starts: Sequence[int], num_drafts: int | None = None
) -> DenseBlocks:
    """The drafter's blocks at ``starts`` of a text; ``num_drafts`` as in :meth:`Drafter.slots`."""
    target = drafter.target
    device = target.embed_tokens.weight.device
    tokens = torch.tensor(text, device=device)
    positions = torch.arange(len(tokens), device=device)
    hidden, taps = target(tokens[None], positions[None], DenseCausalContext(), drafter.config.tap_layer_ids)
    k, v = drafter.context_kv(drafter.context_features(taps), positions[None])
    at = torch.tensor([starts], device=device)
    anchors = tokens[at]
    slots = drafter.slots(drafter(anchors, at, DenseDraftContext(k, v, at)), num_drafts)
    return DenseBlocks(tokens, hidden[0], at, anchors, slots)


@torch.inference_mode()
def redraft(drafter: Drafter, rounds: Sequence[Round]) -> list[Redrafted]:
    """Recompute rounds, those of one life in one pass.

    Args:
        drafter: bound to the target whose rounds these are.
        rounds: any, in order.
    """
    return [item for life in by_life(rounds) for item in _redraft_life(drafter, life)]


def _redraft_life(drafter: Drafter, rounds: list[Round]) -> list[Redrafted]:
    tokens, hidden, starts, anchors, slots = dense_blocks(
        drafter, rounds[-1].text, [item.start for item in rounds]
    )
    chain = drafter.chain(slots, anchors)
    offsets = torch.arange(chain.tokens.shape[-1], device=tokens.device)
    # The token before each draft slot, as committed; past the text's end anything, nobody reads it.
    reach = (starts[..., None] + offsets).clamp(max=len(tokens) - 1)  # [1, A, g]
    forced = drafter.teacher_forced(slots, tokens[reach])  # [1, A, g, draft vocabulary]
    best = chain.logits.topk(2, dim=-1).values
    gaps = best[..., 0] - best[..., 1]
    favourites = forced.argmax(-1)
    if drafter.target_ids is not None:
        favourites = drafter.target_ids[favourites]
    result = []
    for index, item in enumerate(rounds):
        reached = min(item.num_standing + 1, len(item.drafts))
        p = drafter.target.logits(hidden[item.start : item.start + reached]).float().softmax(-1)
        q = _over_target_ids(drafter, forced[0, index, :reached].softmax(-1), p.shape[-1])
        result.append(
            Redrafted(
                item,
                chain.tokens[0, index].tolist(),
                gaps[0, index].tolist(),
                shared_noise_acceptance(p, q).tolist(),
                favourites[0, index, :reached].tolist(),
            )
        )
    return result


def _over_target_ids(drafter: Drafter, q: Tensor, vocab_size: int) -> Tensor:
    """Probabilities over the draft vocabulary as ones over the target's: [*, draft vocabulary] -> [*, V]."""
    if drafter.target_ids is None:
        return q
    return q.new_zeros(*q.shape[:-1], vocab_size).index_copy_(-1, drafter.target_ids, q)
