"""Losses against the formulas written out slot by slot."""

from __future__ import annotations

import math

import pytest
import torch
from drafter_cases import VOCAB, tiny_drafter, tiny_target

from paceline.training.blocks import slot_weights
from paceline.training.losses import LossWeights, block_losses


@pytest.mark.parametrize("method", ["dspark", "dflash"])
@torch.no_grad()
def test_losses_by_hand(method: str) -> None:
    target = tiny_target()
    drafter = tiny_drafter(method, target)
    generator = torch.Generator().manual_seed(0)
    width, g = drafter.config.block_size, drafter.config.max_drafts
    hidden = torch.randn(2, width, 32, generator=generator)
    aim = torch.randn(2, g, 32, generator=generator)
    previous = torch.randint(0, VOCAB, (2, g), generator=generator)
    labels = torch.randint(0, VOCAB, (2, g), generator=generator)
    supervised = torch.ones(2, g, dtype=torch.bool)
    supervised[1, 3:] = False
    share = LossWeights.of(method)
    sums = block_losses(
        drafter, hidden, aim, previous, labels, supervised, slot_weights(g, 4.0, hidden.device), share
    )
    head = target.lm_head.weight
    nats = distance = bce = 0.0
    accepted = torch.zeros(g)
    for n in range(2):
        for j in range(g if n == 0 else 3):
            h = hidden[n, j + (0 if method == "dspark" else 1)]
            logits = head @ h
            if drafter.markov_head is not None:
                logits = (
                    logits
                    + drafter.markov_head.markov_w2.weight
                    @ drafter.markov_head.markov_w1.weight[previous[n, j]]
                )
            q, p = torch.softmax(logits, -1), torch.softmax(head @ aim[n, j], -1)
            w = math.exp(-j / 4)
            l1 = float((q - p).abs().sum())
            nats -= w * float(q[labels[n, j]].log())
            distance += w * l1
            c = 1 - l1 / 2
            accepted[j] += c
            if drafter.confidence_head is not None and drafter.markov_head is not None:
                z = drafter.confidence_head(
                    torch.cat((h, drafter.markov_head.markov_w1.weight[previous[n, j]]))
                ).sigmoid()
                bce -= w * (c * math.log(float(z)) + (1 - c) * math.log(1 - float(z)))
    assert float(sums.cross_entropy) == pytest.approx(nats, rel=1e-4)
    assert float(sums.distance) == pytest.approx(distance, rel=1e-4)
    assert float(sums.confidence) == pytest.approx(bce, rel=1e-4)
    total = nats if method == "dflash" else 0.1 * nats + 0.9 * distance + bce
    assert float(sums.loss.detach()) == pytest.approx(total, rel=1e-4)
    torch.testing.assert_close(sums.accepted, accepted, rtol=1e-4, atol=1e-4)
    assert sums.supervised.tolist() == [2, 2, 2, 1, 1, 1, 1]


def test_confidence_target_is_not_trained_through() -> None:
    """The confidence term alone moves the confidence head, not the logits it predicts the fate of."""
    drafter = tiny_drafter("dspark", tiny_target())
    assert drafter.markov_head is not None
    hidden = torch.randn(1, 7, 32, requires_grad=True)
    ids = torch.randint(0, VOCAB, (1, 7))
    sums = block_losses(
        drafter,
        hidden,
        torch.randn(1, 7, 32),
        ids,
        ids,
        torch.ones(1, 7, dtype=torch.bool),
        torch.ones(7),
        LossWeights(0.0, 0.0, 1.0),
    )
    sums.loss.backward()
    assert drafter.markov_head.markov_w2.weight.grad is not None
    assert float(drafter.markov_head.markov_w2.weight.grad.abs().max()) == 0.0
    assert hidden.grad is not None and float(hidden.grad.abs().max()) > 0
