"""Closed forms of acceptance against simulation with the same noise, and rounds along a text."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.training.acceptance import (
    RoundTally,
    noise_given,
    rejection_acceptance,
    rejection_given,
    shared_noise_acceptance,
    shared_noise_given,
)
from paceline.training.calibration import calibrate, calibration_error, fit_temperatures, survival

DRAWS = 200_000


def pair(seed: int, size: int = 7, sharpness: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, size, generator=generator, dtype=torch.float64) * sharpness
    p, q = torch.softmax(logits, dim=-1)
    return p, q


def gumbel(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    uniform = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return -(-uniform.log()).log()


@pytest.mark.parametrize("seed", range(4))
def test_shared_noise_against_simulation(seed: int) -> None:
    """Agreement of two argmaxes with one noise, overall and given the target's token."""
    p, q = pair(seed)
    noise = gumbel((DRAWS, 7), seed)
    target, draft = (p.log() + noise).argmax(-1), (q.log() + noise).argmax(-1)
    same = (target == draft).double()
    spread = 4 * math.sqrt(0.25 / DRAWS)
    assert abs(float(same.mean()) - float(shared_noise_acceptance(p, q))) < spread
    for token in range(7):
        drawn = target == token
        expected = float(shared_noise_given(p, q, torch.tensor(token)))
        assert abs(float(same[drawn].mean()) - expected) < 4 * math.sqrt(0.25 / float(drawn.sum()))


@given(st.integers(0, 10**6), st.integers(2, 40), st.floats(0.1, 8))
@settings(max_examples=60, deadline=None)
def test_shared_noise_formula_is_the_sum_over_pairs(seed: int, size: int, sharpness: float) -> None:
    """The sorted form equals sum_x 1 / sum_y max(p_y / p_x, q_y / q_x) and lies between its known bounds."""
    p, q = pair(seed, size, sharpness)
    pairs = torch.maximum(p[None] / p[:, None], q[None] / q[:, None])  # [x, y]
    expected = float((1 / pairs.sum(-1)).sum())
    found = float(shared_noise_acceptance(p, q))
    assert math.isclose(found, expected, rel_tol=1e-9)
    kept = float(rejection_acceptance(p, q))  # 1 - TV
    assert kept / (2 - kept) - 1e-9 <= found <= kept + 1e-9
    given_tokens = torch.arange(size)
    many = shared_noise_given(p.expand(size, -1), q.expand(size, -1), given_tokens)
    assert math.isclose(float((p * many).sum()), found, rel_tol=1e-6)  # over the target's tokens: the same
    one = rejection_given(p.expand(size, -1), q.expand(size, -1), given_tokens)
    assert math.isclose(float((p * one).sum()), kept, rel_tol=1e-6)


def test_extremes() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    q = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]])
    torch.testing.assert_close(shared_noise_acceptance(p, q), torch.tensor([1.0, 0.0], dtype=torch.float64))
    tokens = torch.tensor([1, 0])
    torch.testing.assert_close(shared_noise_given(p, q, tokens), torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(rejection_given(p, q, tokens), torch.tensor([1.0, 0.0]))


def test_noise_is_what_the_target_must_have_had() -> None:
    """It reproduces the token always, and a second model agrees with it as often as with fresh noise."""
    p, q = pair(5)
    tokens = torch.multinomial(p, DRAWS, replacement=True, generator=torch.Generator().manual_seed(1))
    noise = noise_given(p.log().expand(DRAWS, -1), tokens, torch.Generator().manual_seed(2))
    assert torch.equal((p.log() + noise).argmax(-1), tokens)
    agree = float(((q.log() + noise).argmax(-1) == tokens).double().mean())
    assert abs(agree - float(shared_noise_acceptance(p, q))) < 4 * math.sqrt(0.25 / DRAWS)
    # over the target's tokens, it is standard Gumbel noise again
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.02


def play(accept: np.ndarray, uniform: np.ndarray) -> tuple[int, int]:
    """(rounds, tokens) of one walk through a text."""
    anchor = rounds = tokens = 0
    while anchor < len(accept):
        stood = 0
        while stood < accept.shape[1] and uniform[anchor, stood] < accept[anchor, stood]:
            stood += 1
        rounds, tokens, anchor = rounds + 1, tokens + stood + 1, anchor + stood + 1
    return rounds, tokens


def test_rounds_along_a_text_against_walks() -> None:
    draw = np.random.default_rng(0)
    accept = draw.random((40, 3)) ** 0.3
    tally = RoundTally(3)
    tally.add(accept)
    walks = [play(accept, draw.random(accept.shape)) for _ in range(4000)]
    rounds, tokens = (sum(values) for values in zip(*walks, strict=True))
    assert abs(tally.accept_length - tokens / rounds) < 0.02
    uniform = 1 + np.cumprod(accept, axis=1).sum(1).mean()
    assert math.isclose(tally.uniform_accept_length, uniform)


def test_certain_acceptance_is_counted_exactly() -> None:
    tally = RoundTally(2)
    tally.add(np.array([[1, 1], [0, 0], [0, 0], [1, 0], [1, 1], [0, 0]], float))
    # rounds at anchors 0 (two stand), 3 (one stands), 5 (none): 3 + 2 + 1 tokens
    assert tally.accept_length == pytest.approx(2.0)
    assert tally.survival == pytest.approx([2 / 3, 1 / 3])
    assert tally.conditional == pytest.approx([3 / 6, 2 / 3])


def test_calibration_undoes_a_known_distortion() -> None:
    """Confidences stretched by known factors: the fit finds them, and the error of the product falls."""
    draw = np.random.default_rng(1)
    true = draw.normal(1.0, 1.2, (40_000, 3))
    factors = np.array([2.0, 0.6, 1.5])
    stands = np.cumprod(draw.random(true.shape) < 1 / (1 + np.exp(-true)), axis=1).astype(bool)
    temperatures = fit_temperatures(true * factors, stands)
    assert np.allclose(temperatures, factors, rtol=0.15)
    fit = calibrate(true * factors, stands, np.arange(40_000), "made up")
    assert max(fit.ece_after) < 0.02
    assert all(after < before / 2 for before, after in zip(fit.ece_before, fit.ece_after, strict=True))


def test_calibration_error_by_hand() -> None:
    chance = np.array([0.05, 0.05, 0.95, 0.95])
    happened = np.array([False, True, True, True])
    assert calibration_error(chance, happened) == pytest.approx((abs(0.1 - 1) + abs(1.9 - 2)) / 4)
    assert survival(np.zeros((1, 2)), np.ones(2)).tolist() == [[0.5, 0.25]]
