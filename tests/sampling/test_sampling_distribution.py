"""What is drawn follows the law it should: Pearson's test over draws at many positions and seeds.

All draws are fixed by their seeds. The family of tests is held to one chance in a thousand of a false alarm
in all (Bonferroni), and a sampler with a small planted bias must fail it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sampling_harness import Floats, reference_probs, set_slot
from torch import Tensor

from paceline.sampling import sampler
from paceline.sampling.noise import row_keys
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import SampleRows
from paceline.sampling.sampler import sample
from paceline.sampling.state import SamplingState

V = 300  # above FIRST_LOOK, so that every method of the sampler is used
DRAWS = 20_000
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.8},
    {"top_k": 12},
    {"top_k": 200, "temperature": 1.5},
    {"top_p": 0.8},
    {"top_p": 0.97, "temperature": 1.8},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    {"min_p": 0.02, "top_k": 40, "top_p": 0.9, "temperature": 1.2},
]
ALPHA = 1e-3 / (2 * len(FILTERS))


def row() -> Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(4)) * 2


def draws(params: SamplingParams, logits: Tensor, *, by_seed: bool) -> Tensor:
    """[DRAWS] tokens: one seed at many positions, or many seeds at one position."""
    num_slots = 500 if by_seed else 1
    state = SamplingState(num_slots, V, device="cpu")
    for slot in range(num_slots):
        set_slot(state, slot, params, 77 + slot, 1)
    slots = np.arange(DRAWS) % num_slots
    positions = torch.arange(DRAWS) // num_slots
    rows = SampleRows(torch.from_numpy(slots), positions, torch.zeros(num_slots, 1, dtype=torch.int32), 1)
    return sample(logits.expand(DRAWS, V).contiguous(), rows, state, state.features(slots)).tokens


def p_value(tokens: Tensor, probs: Floats) -> float:
    """Chance of a Pearson statistic this large (Wilson and Hilferty's normal approximation)."""
    counts = np.bincount(tokens.numpy(), minlength=V)
    assert counts[probs == 0].sum() == 0  # nothing outside the kept set
    expected = probs * len(tokens)
    rare = (expected < 8) & (probs > 0)  # pooled: Pearson's test wants a few expected per cell
    cells = [(counts[i], expected[i]) for i in np.flatnonzero(expected >= 8)]
    if expected[rare].sum() >= 8:
        cells.append((counts[rare].sum(), expected[rare].sum()))
    statistic = sum((c - e) ** 2 / e for c, e in cells)
    k = len(cells) - 1
    z = ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
    return 0.5 * math.erfc(z / math.sqrt(2))


@pytest.mark.parametrize("by_seed", [False, True], ids=["positions", "seeds"])
@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_draws_follow_the_filtered_law(fields: dict[str, Any], by_seed: bool) -> None:
    params = SamplingParams(**fields)
    probs = reference_probs(row().double().numpy(), params)
    assert p_value(draws(params, row(), by_seed=by_seed), probs) > ALPHA


@pytest.mark.parametrize("fields", [{}, {"top_k": 12}], ids=str)
def test_a_planted_bias_is_seen(fields: dict[str, Any]) -> None:
    """A temperature 7% too high."""
    probs = reference_probs(row().double().numpy(), SamplingParams(**fields))
    assert p_value(draws(SamplingParams(temperature=1.07, **fields), row(), by_seed=True), probs) < ALPHA


def test_noise_shared_by_positions_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal noise at every four positions, as a wrong key would make it."""
    monkeypatch.setattr(sampler, "row_keys", lambda seeds, positions: row_keys(seeds, positions // 4))
    probs = reference_probs(row().double().numpy(), SamplingParams())
    assert p_value(draws(SamplingParams(), row(), by_seed=False), probs) < ALPHA


def test_a_rare_token_gets_its_share() -> None:
    logits = torch.full((V,), -torch.inf)
    logits[0], logits[1] = math.log(1 - 1e-3), math.log(1e-3)
    drawn = torch.cat([draws(SamplingParams(), logits, by_seed=by_seed) for by_seed in (False, True)])
    expected = len(drawn) * 1e-3
    assert set(drawn.tolist()) == {0, 1}
    assert abs(int((drawn == 1).sum()) - expected) < 5 * math.sqrt(expected)
