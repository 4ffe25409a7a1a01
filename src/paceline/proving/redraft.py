"""Drafts made again from the whole text: no cache, no paging, no state kept between rounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.models.attention import DenseCausalContext
from paceline.models.draft_attention import DenseDraftContext
from paceline.models.drafter import Drafter
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


@torch.inference_mode()
def redraft(drafter: Drafter, rounds: Sequence[Round]) -> list[Redrafted]:
    """Recompute rounds, those of one life in one pass.

    Args:
        drafter: bound to the target whose rounds these are.
        rounds: any, in order.
    """
    lives: dict[int, list[Round]] = defaultdict(list)
    for item in rounds:
        lives[item.life].append(item)
    return [item for life in lives.values() for item in _redraft_life(drafter, life)]


def _redraft_life(drafter: Drafter, rounds: list[Round]) -> list[Redrafted]:
    target = drafter.target
    device = target.embed_tokens.weight.device
    last = rounds[-1]
    tokens = torch.tensor([*last.context, *last.tokens], device=device)
    positions = torch.arange(len(tokens), device=device)
    hidden, taps = target(tokens[None], positions[None], DenseCausalContext(), drafter.config.tap_layer_ids)
    k, v = drafter.context_kv(drafter.context_features(taps), positions[None])
    starts = torch.tensor([[item.start for item in rounds]], device=device)
    anchors = tokens[starts]
    slots = drafter.slots(drafter(anchors, starts, DenseDraftContext(k, v, starts)))
    chain = drafter.chain(slots, anchors)
    g = chain.tokens.shape[-1]
    # The token before each draft slot, as committed; past the text's end anything, nobody reads it.
    reach = (starts[..., None] + torch.arange(g, device=device)).clamp(max=len(tokens) - 1)  # [1, A, g]
    forced = drafter.teacher_forced(slots, tokens[reach])  # [1, A, g, draft vocabulary]
    best = chain.logits.topk(2, dim=-1).values
    gaps = best[..., 0] - best[..., 1]
    favourites = forced.argmax(-1)
    if drafter.target_ids is not None:
        favourites = drafter.target_ids[favourites]
    result = []
    for index, item in enumerate(rounds):
        reached = min(item.num_standing + 1, len(item.drafts))
        p = target.logits(hidden[0, item.start : item.start + reached]).float().softmax(-1)
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
