"""Who sees whom in a drafter's block, and that a drafter can be trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import tiny_config

from paceline.models.attention import AttentionSpec, DenseCausalContext
from paceline.models.config import Qwen3Config
from paceline.models.draft_attention import DenseDraftContext, block_mask
from paceline.models.drafter import Drafter
from paceline.models.drafter_config import DrafterConfig
from paceline.models.loader import random_model
from paceline.models.rope import rope_table


@settings(deadline=None, max_examples=60)
@given(
    starts=st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), min_size=1, max_size=2),
    num_context=st.integers(0, 8),
    width=st.integers(1, 4),
    window=st.none() | st.integers(1, 6),
    bidirectional=st.booleans(),
)
def test_block_mask_is_the_rule_spelled_out(
    starts: list[list[int]], num_context: int, width: int, window: int | None, bidirectional: bool
) -> None:
    mask = block_mask(torch.tensor(starts), num_context, width, window, bidirectional)
    assert mask.shape == (len(starts), 1, 2 * width, num_context + 2 * width)
    for b, anchors in enumerate(starts):
        for row in range(2 * width):
            block, slot = divmod(row, width)
            query = anchors[block] + slot
            for key in range(num_context + 2 * width):
                if key < num_context:
                    seen = key < anchors[block]
                    position = key
                else:
                    other, at = divmod(key - num_context, width)
                    seen = other == block and (bidirectional or at <= slot)
                    position = anchors[other] + at
                if window is not None:
                    seen = seen and position > query - window
                assert bool(mask[b, 0, row, key]) == seen


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_causal_block_is_ordinary_causal_attention(window: int | None, bidirectional: bool) -> None:
    """With the context's K and V made from the same rows, a block is the tail of a causal sequence."""
    spec = AttentionSpec(4, 2, 16, 1e-6, window, bidirectional)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(1, 11, 8 * 16, generator=generator)
    q_norm, k_norm = torch.rand(16, generator=generator), torch.rand(16, generator=generator)
    table = rope_table(Qwen3Config.from_dict(tiny_config()).rope, 16, 32)
    positions = torch.arange(11)[None]
    whole = DenseCausalContext().attend(0, qkv, q_norm, k_norm, positions, table, spec)
    # a drafter's context holds normed and rotated keys: take them from a block that is the whole sequence
    start = torch.tensor([[7]])
    recorded = DenseDraftContext(*make_context(qkv, k_norm, table, spec), start)
    block = recorded.attend(0, qkv[:, None, 7:], q_norm, k_norm, positions[:, None, 7:], table, spec)
    same = torch.allclose(block[0, 0], whole[0, 7:], atol=1e-5)
    assert same != bidirectional
    if bidirectional:  # the last row has no later rows to see
        torch.testing.assert_close(block[0, 0, -1], whole[0, -1], atol=1e-5, rtol=0)


def make_context(
    qkv: torch.Tensor, k_norm: torch.Tensor, table: torch.Tensor, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """K (normed, rotated) and V of every row of ``qkv``, [1, B, S, KV, D], written out."""
    _, k, v = qkv.unflatten(-1, (8, 16)).split([4, 2, 2], dim=-2)
    k = k * torch.rsqrt(k.pow(2).mean(-1, keepdim=True) + spec.eps) * k_norm
    cos, sin = table[: qkv.shape[1], None].chunk(2, dim=-1)
    low, high = k.chunk(2, dim=-1)
    k = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    return k[None], v[None]


def new_drafter(**changes: Any) -> Drafter:
    """Initialised for training, for a random target."""
    target = random_model(Qwen3Config.from_dict(tiny_config()))
    layers = replace(target.config, num_hidden_layers=2, windows=(None, 4))
    values: dict[str, Any] = {
        "method": "dspark",
        "dialect": "deepspec",
        "layers": layers,
        "block_size": 4,
        "anchor_first": True,
        "mask_token_id": 95,
        "tap_layer_ids": (0, 1),
        "draft_vocab_size": 96,
        "markov": "vanilla",
        "markov_rank": 8,
        "confidence": True,
        "confidence_with_markov": True,
        **changes,
    }
    drafter = Drafter(DrafterConfig(**values), target)
    drafter.init_weights(torch.Generator().manual_seed(0))
    return drafter


@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn"])
def test_every_parameter_learns(markov: str) -> None:
    """Anchored-block training: the losses reach all of the drafter and nothing of the target."""
    drafter = new_drafter(markov=markov)
    tokens = torch.randint(0, 95, (2, 20), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(20).expand_as(tokens)
    taps = drafter.target(tokens, positions, DenseCausalContext(), drafter.config.tap_layer_ids).taps
    starts = torch.tensor([[3, 9, 15], [1, 8, 14]])
    labels = torch.stack([tokens.gather(1, starts + k) for k in range(1, 5)], dim=-1)  # [B, A, W]
    anchors = tokens.gather(1, starts)
    previous = torch.cat((anchors[..., None], labels[..., :-1]), dim=-1)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        k, v = drafter.context_kv(drafter.context_features(taps), positions)
        slots = drafter.slots(drafter(anchors, starts, DenseDraftContext(k, v, starts)))
        logits = drafter.teacher_forced(slots, previous)
        confidence = drafter.confidence_logits(slots.hidden, previous)
        assert confidence is not None
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 2), labels.flatten())
        loss = loss + torch.nn.functional.softplus(confidence).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert all(p.grad is not None and bool(p.grad.any()) for p in drafter.parameters())
    assert all(p.grad is None for p in drafter.target.parameters())


def test_blocks_of_different_sequences_do_not_mix() -> None:
    drafter = new_drafter()
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(2, 8, 48, generator=generator)
    positions = torch.arange(8).expand(2, -1)
    anchors, starts = torch.tensor([[3], [4]]), torch.tensor([[8], [5]])
    k, v = drafter.context_kv(features, positions)
    both = drafter(anchors, starts, DenseDraftContext(k, v, starts))
    for b in range(2):
        k, v = drafter.context_kv(features[b : b + 1, : int(starts[b])], positions[:1, : int(starts[b])])
        one = drafter(anchors[b : b + 1], starts[b : b + 1], DenseDraftContext(k, v, starts[b : b + 1]))
        torch.testing.assert_close(both[b], one[0], atol=1e-5, rtol=0)


def test_blocks_near_the_end_of_the_context_have_positions() -> None:
    """The last anchor position of the target still has a whole block of rope angles."""
    drafter = new_drafter()
    start = torch.tensor([[drafter.target.config.max_context_len - 1]])
    empty = torch.zeros(2, 1, 0, 2, 16)
    assert drafter(torch.tensor([[1]]), start, DenseDraftContext(empty, empty, start)).isfinite().all()
