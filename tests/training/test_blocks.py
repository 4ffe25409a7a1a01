"""Anchored blocks: attention against one block at a time, labels against their definition, anchors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from drafter_cases import MASK, VOCAB, tiny_drafter, tiny_target
from torch import Tensor

from paceline.models.attention import DenseCausalContext
from paceline.models.draft_attention import DenseDraftContext
from paceline.models.drafter import Drafter
from paceline.training.batches import BatchPlan, sample_anchors
from paceline.training.blocks import BlockContext, block_labels
from paceline.training.documents import Documents

STARTS = torch.tensor([[3, 4, 9, 17], [1, 8, 12, 19]])


def context_of(drafter: Drafter, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Draft keys and values of whole sequences."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    taps = drafter.target(tokens, positions, DenseCausalContext(), drafter.config.tap_layer_ids).taps
    return drafter.context_kv(drafter.context_features(taps), positions)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, MASK, (2, 24), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("method", ["dspark", "dflash"])
@pytest.mark.parametrize(
    ("window", "bidirectional"), [(None, True), (None, False), (5, True), (5, False), (20, True)]
)
@torch.no_grad()
def test_blocks_see_what_one_block_alone_sees(
    tokens: Tensor, method: str, window: int | None, bidirectional: bool
) -> None:
    """All blocks of a sequence in one pass, against each block with a context cut at its anchor."""
    drafter = tiny_drafter(method, tiny_target())
    for layer in drafter.draft_layers():
        layer.spec = replace(layer.spec, window=window, bidirectional=bidirectional)
    k, v = context_of(drafter, tokens)
    together = drafter(tokens.gather(1, STARTS), STARTS, BlockContext(k, v, STARTS))
    for row in range(2):
        for block, start in enumerate(STARTS[row].tolist()):
            one = torch.tensor([[start]])
            past = DenseDraftContext(k[:, row : row + 1, :start], v[:, row : row + 1, :start], one)
            alone = drafter(tokens[row : row + 1, start : start + 1], one, past)
            torch.testing.assert_close(together[row, block], alone[0, 0], rtol=1e-4, atol=1e-5)


def test_blocks_differentiate_like_masked_attention(tokens: Tensor) -> None:
    drafter = tiny_drafter("dspark", tiny_target())
    gradients = []
    for context in (BlockContext, DenseDraftContext):
        k, v = context_of(drafter, tokens)
        out = drafter(tokens.gather(1, STARTS), STARTS, context(k, v, STARTS))
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
        found = torch.autograd.grad((out * weight).sum(), [drafter.fc.weight, drafter.qkv_proj])
        gradients.append(found)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_future_and_other_blocks_do_not_leak(tokens: Tensor) -> None:
    """Tokens from the anchor on, apart from the anchor itself, change nothing in its block."""
    drafter = tiny_drafter("dspark", tiny_target())
    starts = torch.tensor([[9, 17], [9, 17]])
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % MASK
    outs = []
    for ids in (tokens, changed):
        k, v = context_of(drafter, ids)
        outs.append(drafter(ids.gather(1, starts), starts, BlockContext(k, v, starts)))
    torch.testing.assert_close(outs[0][:, 0], outs[1][:, 0])
    assert not torch.allclose(outs[0][:, 1], outs[1][:, 1])


def test_labels_are_the_tokens_after_the_anchor() -> None:
    """Draft j of a block at ``start`` stands for the token at start + 1 + j, in both layouts; only labels
    within the sequence count."""
    tokens = torch.arange(100, 112)[None]
    labels = block_labels(
        tokens, torch.tensor([10]), torch.tensor([[2, 7, 1]]), torch.tensor([[True, True, False]]), 4
    )
    assert labels.anchors.tolist() == [[102, 107, 101]]
    assert labels.labels[0, 0].tolist() == [103, 104, 105, 106]
    assert labels.previous[0, 0].tolist() == [102, 103, 104, 105]
    assert labels.rows[0, 0].tolist() == [2, 3, 4, 5]
    assert labels.supervised[0].tolist() == [[True] * 4, [True, True, False, False], [False] * 4]


@torch.no_grad()
def test_layouts_draft_from_different_slots(tokens: Tensor) -> None:
    """Anchor first uses slots 0..6 of 7, anchor drop slots 1..7 of 8: seven drafts each."""
    for method, first in (("dspark", 0), ("dflash", 1)):
        drafter = tiny_drafter(method, tiny_target())
        k, v = context_of(drafter, tokens)
        hidden = drafter(tokens.gather(1, STARTS), STARTS, BlockContext(k, v, STARTS))
        slots = drafter.slots(hidden)
        assert drafter.config.max_drafts == 7 == slots.logits.shape[-2]
        torch.testing.assert_close(slots.hidden, hidden[:, :, first : first + 7])


def test_anchors_are_answer_tokens_with_a_next_one() -> None:
    generator = torch.Generator().manual_seed(0)
    context, lengths = torch.tensor([5, 0, 12]), torch.tensor([20, 4, 13])
    seen: list[set[int]] = [set(), set(), set()]
    for _ in range(50):
        starts, valid = sample_anchors(context, lengths, 32, 8, generator)
        assert starts.shape == valid.shape == (3, 8)
        for row in range(3):
            drawn = starts[row][valid[row]].tolist()
            assert drawn == sorted(set(drawn))  # without replacement
            seen[row].update(drawn)
        assert valid.sum(1).tolist() == [8, 2, 0]
    assert seen == [set(range(5, 19)), {1, 2}, set()]


def documents(lengths: list[int], context: int = 4) -> Documents:
    return Documents.of(
        [[i % VOCAB] * n for i, n in enumerate(lengths)],
        VOCAB,
        [context] * len(lengths),
        [1.0] * len(lengths),
    )


def test_an_epoch_shows_every_answer_and_the_next_another_order() -> None:
    draw = np.random.default_rng(0)
    docs = documents(draw.integers(6, 500, 300).tolist())
    plan = BatchPlan(docs, tokens_per_step=2048, anchor_every=8, world_size=1, seed=3)
    epochs = []
    for epoch in range(2):
        steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
        rows = [plan._rows(step) for step in steps]
        assert all(len(chosen) * length == 2048 or length > 1024 for length, chosen in rows)
        assert all(docs.lengths[chosen].max() <= length for length, chosen in rows)
        epochs.append([tuple(chosen) for _, chosen in rows])
        assert set(np.concatenate([c for _, c in rows])) == set(range(300))
    assert epochs[0] != epochs[1]


def test_processes_split_the_batch_of_one_process() -> None:
    docs = documents([40, 90, 33, 120, 77, 58, 61, 99])
    whole = BatchPlan(docs, tokens_per_step=512, anchor_every=8, world_size=2, seed=0)
    for step in range(3):
        halves = [whole.batch(step, rank) for rank in range(2)]
        again = BatchPlan(docs, tokens_per_step=512, anchor_every=8, world_size=2, seed=0)
        for ours, theirs in zip(halves[1], again.batch(step, 1), strict=True):
            assert torch.equal(ours, theirs)
        assert not torch.equal(halves[0].tokens, halves[1].tokens)
        assert sum(len(half.tokens) for half in halves) == 4
