"""The acceptance rule: a draft stands while it equals the row's own sample. And its synthetic stand-in."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.sampling.noise import row_keys


def count_accepted(sampled: Tensor, drafts: Tensor, num_drafts: Tensor) -> Tensor:
    """How many leading drafts of each span stand.

    Row j of a span draws its own token ``sampled[:, j]`` from the target's distribution; draft j is the token
    row j + 1 was fed. Draft j stands when it and all drafts before it were drawn by the rows before them.
    Since the draws are keyed by position, the tokens that stand are exactly those plain decoding draws
    (sample-match acceptance; equal in law to rejection sampling with a one-hot proposal, Leviathan et al.,
    arXiv:2211.17192, section 2.3).

    Args:
        sampled: [N, K + 1] int32, each row's own draw; columns beyond a span's rows are ignored.
        drafts: [N, K] int32.
        num_drafts: [N] int32, drafts of each span, 0..K.

    Returns:
        [N] int32 in 0..num_drafts.
    """
    num_columns = drafts.shape[1]
    column = torch.arange(num_columns, device=drafts.device, dtype=num_drafts.dtype)
    match = (sampled[:, :num_columns] == drafts) & (column < num_drafts[:, None])
    return match.to(torch.int32).cumprod(dim=1).sum(dim=1, dtype=torch.int32)


def synthetic_accepted(
    seed_keys: Tensor, anchors: Tensor, num_drafts: Tensor, width: int, rate: float
) -> Tensor:
    """How many leading drafts of each span stand when each stands with a given chance, whatever it is.

    A function of sequence seed and position, like every draw: the same in any batch or step. For measuring
    only (:mod:`paceline.speculation.synthetic`).

    Args:
        seed_keys: [N] int64, ``mix64`` of the sequence seeds.
        anchors: [N] int32, position of each span's anchor.
        num_drafts: [N] int32, drafts of each span, 0..K.
        width: K.
        rate: chance of a draft to stand if all before it do.

    Returns:
        [N] int32 in 0..num_drafts.
    """
    column = torch.arange(width, device=anchors.device, dtype=num_drafts.dtype)
    positions = anchors[:, None] + 1 + column  # [N, K]
    keys = row_keys(seed_keys[:, None].expand_as(positions).reshape(-1), positions.reshape(-1))
    uniform = (keys[:, 1].long() & 0x7FFFFFFF).view_as(positions)  # 31 bits
    stands = (uniform < round(rate * 2**31)) & (column < num_drafts[:, None])
    return stands.to(torch.int32).cumprod(dim=1).sum(dim=1, dtype=torch.int32)
