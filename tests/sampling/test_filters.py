"""The filters as functions: the order they share, the sets they keep, the probabilities that come out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from sampling_harness import reference_probs, set_slot
from torch import Tensor

from paceline.sampling.filters import kept_prefix, mask_min_p, min_p_mass, ordered_top
from paceline.sampling.params import SamplingParams
from paceline.sampling.state import INV_TEMPERATURE, SamplingState

GOLDEN = Path(__file__).parent.parent / "golden" / "speculative_sampling"

# a coarse grid, so that ties and values exactly on an edge are common
row_values = st.integers(-12, 12).map(lambda x: x / 4) | st.sampled_from(
    [-0.0, -torch.inf, 1e30, -1e30, 1e-40]
)
rows = st.lists(row_values, min_size=1, max_size=30)


@settings(max_examples=200, deadline=None)
@given(values=rows, k=st.integers(1, 30))
def test_ordered_top_is_by_value_then_id(values: list[float], k: int) -> None:
    k = min(k, len(values))
    top, ids = ordered_top(torch.tensor([values]), k)
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    assert ids[0].tolist() == expected
    assert top[0].tolist() == torch.tensor(values)[expected].tolist()


def filtered_probs(logits: Tensor, params: SamplingParams, first: int | None = None) -> Tensor:
    """Probabilities of [n, V] logits by the sampler's own filters; ``first``: look at so many tokens only."""
    n, V = logits.shape
    state = SamplingState(1, V, device="cpu")
    set_slot(state, 0, params, 0, 1)
    floats, ints = state.floats.expand(n, -1), state.ints.expand(n, -1)
    values, ids = ordered_top(logits, first or V)
    scaled = values * floats[:, INV_TEMPERATURE, None].float()
    total = None if first is None else min_p_mass(logits, floats)
    kept, complete = kept_prefix(scaled, floats, ints, total)
    assert kept[:, 0].all()
    if first is not None:
        assert complete.all()
    probs = torch.zeros_like(logits, dtype=torch.float64)
    return probs.scatter(1, ids.long(), scaled.masked_fill(~kept, -torch.inf).double().softmax(-1))


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.floats(-8, 8, width=16), min_size=2, max_size=40),
    temperature=st.sampled_from([0.25, 1.0, 2.0]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.05, 0.5, 0.77, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.21, 1.0]),
)
def test_probabilities_agree_with_the_reference(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = torch.tensor([values])
    expected = reference_probs(np.array(values), params)
    # a mass or ratio within rounding of its bound may fall on either side
    nearby = [
        reference_probs(
            np.array(values), SamplingParams(temperature=temperature, top_k=top_k, top_p=p, min_p=m)
        )
        for p in (top_p * (1 - 1e-6), min(top_p * (1 + 1e-6), 1.0))
        for m in (min_p * (1 - 1e-6), min(min_p * (1 + 1e-6), 1.0))
    ]
    got = filtered_probs(logits, params)[0].numpy()
    assert any(np.allclose(got, each, atol=1e-6) for each in [expected, *nearby])


@pytest.mark.parametrize("case", json.loads((GOLDEN / "cases.json").read_text())["filter"])
def test_golden_probabilities(case: dict[str, float]) -> None:
    tensors = load_file(GOLDEN / "cases.safetensors")
    logits = tensors["filter.logits"].float()
    expected = tensors[f"filter.{case['index']}.probs"]
    if case["temperature"] == 0:
        got = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[1]).double()
    else:
        params = SamplingParams(
            temperature=case["temperature"], top_k=int(case["top_k"]), top_p=case["top_p"]
        )
        got = filtered_probs(logits, params)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("min_p", [0.0, 0.003])
def test_a_first_look_at_the_largest_gives_the_same_set(min_p: float) -> None:
    logits = torch.randn(20, 2000, generator=torch.Generator().manual_seed(0)) * 4
    params = SamplingParams(top_p=0.8, min_p=min_p, temperature=0.5)
    torch.testing.assert_close(filtered_probs(logits, params, first=256), filtered_probs(logits, params))


def test_an_unfinished_first_look_is_noticed() -> None:
    logits = torch.zeros(2, 100)
    logits[0, 7] = 20.0
    state = SamplingState(1, 100, device="cpu")
    set_slot(state, 0, SamplingParams(top_p=0.5), 0, 1)
    floats, ints = state.floats.expand(2, -1), state.ints.expand(2, -1)
    values, _ = ordered_top(logits, 10)
    _, complete = kept_prefix(values, floats, ints, min_p_mass(logits, floats))
    assert complete.tolist() == [True, False]


def test_mask_min_p() -> None:
    state = SamplingState(1, 4, device="cpu")
    set_slot(state, 0, SamplingParams(min_p=0.45, temperature=0.5), 0, 1)
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # at half the temperature the ratios to the first are 1, 9/16, 1/4, 1/16
    assert mask_min_p(logits, state.floats).isfinite().tolist() == [[True, True, False, False]]
