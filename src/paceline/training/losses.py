"""Losses of the DFlash and DSpark papers, over blocks in parts small enough for their logits.

Every term is a weighted mean over supervised drafts, weights exp(-j / decay). Denominators are those of the
whole step over all processes, so gradients of parts and processes simply add up.

- DFlash: cross-entropy against the target's text.
- DSpark: 0.1 cross-entropy + 0.9 ||q - p||_1 against the target's distribution + 1.0 binary cross-entropy of
  the confidence against the acceptance c* = 1 - 1/2 ||q - p||_1, which is not trained through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.models.drafter import Drafter
from paceline.training.blocks import BlockLabels


@dataclass(frozen=True)
class LossWeights:
    """Shares of the terms."""

    cross_entropy: float
    distance: float
    confidence: float

    @staticmethod
    def of(method: str) -> LossWeights:
        """The papers' weights for "dflash" or "dspark"."""
        return LossWeights(1.0, 0.0, 0.0) if method == "dflash" else LossWeights(0.1, 0.9, 1.0)


class LossSums(NamedTuple):
    """Sums over supervised drafts; add up over parts and processes.

    Attributes:
        loss: weighted total that is differentiated, before division by the step's weight.
        cross_entropy, distance, confidence: weighted sums of the terms.
        accepted: [g], sum of 1 - 1/2 ||q - p||_1.
        matched: [g], drafts whose most likely token is the label.
        supervised: [g], number of supervised drafts.
    """

    loss: Tensor
    cross_entropy: Tensor
    distance: Tensor
    confidence: Tensor
    accepted: Tensor
    matched: Tensor
    supervised: Tensor


def block_losses(
    drafter: Drafter,
    hidden: Tensor,
    target_hidden: Tensor,
    previous: Tensor,
    labels: Tensor,
    supervised: Tensor,
    decay_weights: Tensor,
    share: LossWeights,
) -> LossSums:
    """Loss sums of N blocks.

    Args:
        hidden: [N, W, d], the drafter's output for every slot.
        target_hidden: [N, g, d], the target's final hidden state at the row before each label.
        previous, labels: int64 [N, g]; supervised: bool [N, g].
        decay_weights: [g].
    """
    slots = drafter.slots(hidden)
    log_q = F.log_softmax(drafter.teacher_forced(slots, previous), dim=-1)  # [N, g, V] fp32
    weight = decay_weights * supervised  # [N, g]
    nats = -log_q.gather(-1, labels[..., None]).squeeze(-1)
    with torch.no_grad():
        p = torch.softmax(drafter.target.logits(target_hidden).float(), dim=-1)
    distance = (log_q.exp() - p).abs().sum(-1)  # [N, g]
    accept = (1 - 0.5 * distance.detach()).clamp(0.0, 1.0)
    cross_entropy, l1 = (weight * nats).sum(), (weight * distance).sum()
    loss = share.cross_entropy * cross_entropy + share.distance * l1
    confidence = drafter.confidence_logits(slots.hidden, previous)
    bce = torch.zeros_like(loss)
    if confidence is not None:
        bce = (weight * F.binary_cross_entropy_with_logits(confidence, accept, reduction="none")).sum()
        loss = loss + share.confidence * bce
    matched = (log_q.detach().argmax(-1) == labels) & supervised
    return LossSums(
        loss,
        cross_entropy.detach(),
        l1.detach(),
        bce.detach(),
        (accept * supervised).sum(0),
        matched.float().sum(0),
        supervised.float().sum(0),
    )


def flatten_blocks(labels: BlockLabels, target_hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per block: (target hidden states [N, g, d], previous, labels, supervised [N, g]), N = B * A.

    Args:
        target_hidden: [B, S, d].
    """
    rows = labels.rows.flatten(1)  # [B, A * g]
    picked = target_hidden.gather(1, rows[..., None].expand(-1, -1, target_hidden.shape[-1]))
    shape = labels.rows.shape
    return (
        picked.view(shape[0] * shape[1], shape[2], -1),
        labels.previous.flatten(0, 1),
        labels.labels.flatten(0, 1),
        labels.supervised.flatten(0, 1),
    )
