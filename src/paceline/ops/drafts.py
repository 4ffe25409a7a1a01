"""A drafter's choices: the low-rank correction of a chain's logits, the noise, and the largest scores."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.ops.dispatch import kernels
from paceline.ops.linear import linear
from paceline.sampling.noise import gumbel, row_keys
from paceline.sampling.state import INV_TEMPERATURE, SEED_KEY


class LowRank(NamedTuple):
    """A correction of each block's logits: ``weight @ table[rows]``.

    Attributes:
        table: [*, r].
        rows: [N] int64, each block's vector in the table.
        weight: [V, r].
        packed: ``pack_linear(weight)``, used instead of the weight when given.
    """

    table: Tensor
    rows: Tensor
    weight: Tensor
    packed: Tensor | None = None


class BlockNoise(NamedTuple):
    """The sampler's noise on the drafts of N blocks; see ``paceline.sampling.noise``. A token at slot j will
    stand at position ``start + 1 + j``.

    Attributes:
        slots: [N] int32, rows of the sampler's tables.
        starts: [N] int32, positions of the anchors.
        floats, ints: the sampler's tables. Without a temperature a block has no noise.
        token_ids: [V] int32, the sampler's ids of the scores.
    """

    slots: Tensor
    starts: Tensor
    floats: Tensor
    ints: Tensor
    token_ids: Tensor

    def pick(self, blocks: Tensor) -> BlockNoise:
        """The noise of some of the blocks: int [M]."""
        return self._replace(slots=self.slots[blocks], starts=self.starts[blocks])


def draft_best(
    logits: Tensor,
    low_rank: LowRank | None = None,
    noise: BlockNoise | None = None,
    *,
    first: int = 0,
    count: int = 1,
) -> Tensor:
    """Indices of the largest ``(logits + correction) / temperature + noise`` of each slot, best first; of
    equal scores the lower index is the better.

    The correction is rounded to the weight's dtype before it is added. On a GPU neither it nor the noise
    exists outside registers: a call reads the weight once, V * r * 2 bytes (Qwen3-4B with DSpark's rank 256:
    77.8 MB, 18.5 us at 4.2 TB/s), and the logits.

    Args:
        logits: [N, g, V], rows contiguous.
        low_rank: the same correction for all slots of a block.
        first: which slot of the blocks the first one is, for the noise.
        count: 1 or 2.

    Returns:
        [N, g, count] int64.
    """
    if logits.is_cuda:
        found: Tensor = kernels().draft_best(logits, low_rank, noise, first=first, count=count)
        return found
    scores = logits.float()
    if low_rank is not None:
        vectors = low_rank.table[low_rank.rows]
        scores = scores + linear(vectors, low_rank.weight, packed=low_rank.packed).float()[:, None]
    if noise is not None:
        scores = _with_noise(scores, noise, noise.token_ids, first)
    return _best(scores, count)


def draft_candidates(logits: Tensor, noise: BlockNoise | None, count: int) -> Tensor:
    """The tokens of each slot that a chain chooses among: :func:`best_of_buckets` of ``logits / temperature +
    noise``.

    Args:
        logits: [N, g, V], rows contiguous.

    Returns:
        [N, g, count] int32.
    """
    if logits.is_cuda:
        found: Tensor = kernels().draft_candidates(logits, noise, count)
        return found
    scores = logits.float()
    if noise is not None:
        scores = _with_noise(scores, noise, noise.token_ids, 0)
    return best_of_buckets(scores, count)


def best_of_buckets(scores: Tensor, count: int) -> Tensor:
    """Nearly the ``count`` largest of each row: the two best of each of ``count / 2`` buckets, index i lying
    in bucket ``i % (count / 2)``.

    One pass, in which nothing is sorted (as in Chern et al. 2022, arXiv:2206.14286). The two largest are
    always among them; the i-th is not when two larger ones share its bucket, which in 128 buckets happens
    with a chance of 0.2 % to the 10th, and of 6 % to the 50th.

    Args:
        scores: [*, V], V at least ``count``.
        count: even.

    Returns:
        [*, count] int32: the best of all buckets, then their second best.
    """
    buckets = count // 2
    beyond = -scores.shape[-1] % buckets
    grid: Tensor = torch.nn.functional.pad(scores, (0, beyond), value=-torch.inf).unflatten(-1, (-1, buckets))
    found = _best(grid.transpose(-1, -2), 2).transpose(-1, -2)  # [*, 2, buckets]
    ids = found * buckets + torch.arange(buckets, device=scores.device)
    return ids.flatten(-2).to(torch.int32)


class Candidates(NamedTuple):
    """What the slots of N blocks choose among, whatever the token before them.

    Attributes:
        logits: [N, g, V], rows contiguous.
        ids: [N, g, K] int32, indices into V, from :func:`draft_candidates`.
        noise: of the blocks.
    """

    logits: Tensor
    ids: Tensor
    noise: BlockNoise | None


class ChainHead(NamedTuple):
    """What a token does to the slot after it: its logits are corrected by ``weight @ table[token]``.

    Attributes:
        table: [*, r], by target id.
        weight: [V, r].
        successors: [*, m] int32, by target id: the tokens whose correction is largest, indices into V.
        target_ids: [V] int64, the target's id of each index; None when they are the same.
    """

    table: Tensor
    weight: Tensor
    successors: Tensor
    target_ids: Tensor | None = None


def draft_chain(
    candidates: Candidates,
    anchors: Tensor,
    head: ChainHead,
    blocks: Tensor | None = None,
    given: Tensor | None = None,
) -> Tensor:
    """Chains of drafts: :func:`draft_best` slot by slot, each corrected for the token before it, with only
    the slot's candidates and the successors of the token before it to choose from.

    A token that is neither has logits and correction both below those of many others, so that the largest
    sum is rarely its (the threshold algorithm of Fagin, Lotem and Naor 2001, with a fixed depth). On a GPU a
    chain is one program, and a slot reads (K + m) * r * 2 bytes of the weight (384 of rank 256: 0.2 MB, where
    the whole weight of Qwen3-4B's drafter has 77.8).

    Args:
        candidates: of N blocks of g slots.
        anchors: [N] integer of any stride, the token before each block's first slot.
        blocks: [M] int64, the blocks the chains belong to; None: one chain for each block.
        given: [M, C, g] int64, target ids that are taken as drafted, for C chains of each of these blocks; -1
            where there is a choice.

    Returns:
        The token taken and the second best choice, target ids: [M, C, g, 2] int64, or [M, g, 2] without
        ``given``.
    """
    if candidates.logits.is_cuda:
        found: Tensor = kernels().draft_chain(candidates, anchors, head, blocks, given)
        return found
    logits, ids, noise = candidates
    num_slots, vocab_size = logits.shape[1:]
    if blocks is None:
        blocks = torch.arange(len(logits), device=logits.device)
    fixed = torch.full((len(blocks), 1, num_slots), -1, device=logits.device) if given is None else given
    rows = blocks.repeat_interleave(fixed.shape[1])  # [M * C]
    previous, taken = anchors[rows].long(), []
    for slot in range(num_slots):
        known = torch.cat((ids[rows, slot], head.successors[previous]), dim=-1).long()
        bias = torch.bmm(head.weight[known], head.table[previous][..., None]).squeeze(-1)
        scores = logits[rows, slot].gather(-1, known).float() + bias.float()
        if noise is not None:
            scores = _with_noise(scores[:, None], noise.pick(rows), noise.token_ids[known], slot)[:, 0]
        # as scores of the whole vocabulary: the lower index wins a tie, and no token is there twice
        everywhere = scores.new_full((len(rows), vocab_size), -torch.inf).scatter_(-1, known, scores)
        best = _best(everywhere, 2)  # [M * C, 2]
        best = best if head.target_ids is None else head.target_ids[best]
        previous = fixed[..., slot].reshape(-1)
        previous = torch.where(previous < 0, best[:, 0], previous)
        taken.append(torch.stack((previous, best[:, 1]), dim=-1))
    chains: Tensor = torch.stack(taken, dim=1).unflatten(0, fixed.shape[:2])
    return chains[:, 0] if given is None else chains


def _with_noise(scores: Tensor, noise: BlockNoise, token_ids: Tensor, first: int) -> Tensor:
    """Scores [N, g, n] of tokens [n] or [N, n], as the choice is made from them."""
    num_slots = scores.shape[1]
    positions = noise.starts[:, None] + torch.arange(first + 1, first + num_slots + 1, device=scores.device)
    keys = row_keys(noise.ints[noise.slots, SEED_KEY].repeat_interleave(num_slots), positions.view(-1))
    scale = noise.floats[noise.slots, INV_TEMPERATURE].float()[:, None, None]
    noisy = scores * scale + gumbel(keys, token_ids).view_as(scores)
    return torch.where(scale > 0, noisy, scores)


def _best(scores: Tensor, count: int) -> Tensor:
    """Indices of the largest one or two of each row, [*, count]."""
    best = scores.argmax(-1, keepdim=True)
    if count == 1:
        return best
    return torch.cat((best, scores.scatter(-1, best, -torch.inf).argmax(-1, keepdim=True)), dim=-1)
