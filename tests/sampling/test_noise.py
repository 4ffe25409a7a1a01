"""The noise is what its docstring says, and its statistics are those of independent Gumbel draws.

All inputs are fixed, so the statistical tests always give the same answer; their bound of five standard
deviations leaves a sound generator a chance of 1e-4 over the whole file of ever having failed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from paceline.sampling import noise
from paceline.sampling.noise import gumbel, row_keys
from paceline.sampling.seeds import MASK64, mix64

LIMIT = 5.0  # standard deviations


def make(seeds: Sequence[int], positions: Sequence[int], token_ids: Tensor) -> Tensor:
    keys = row_keys(torch.tensor([mix64(s) for s in seeds]), torch.tensor(positions))
    return gumbel(keys, token_ids.to(torch.int32))


def uniform(values: Tensor) -> Tensor:
    """The v of the docstring back from the noise, float64."""
    return -torch.expm1(-torch.exp(-values.double()))


def chi_square(counts: Tensor, expected: float) -> float:
    """Pearson's statistic in standard deviations from its mean."""
    freedom = counts.numel() - 1
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    return (statistic - freedom) / math.sqrt(2 * freedom)


def pair_test(a: Tensor, b: Tensor, bins: int = 64) -> float:
    cells = (a * bins).long().clamp(max=bins - 1) * bins + (b * bins).long().clamp(max=bins - 1)
    counts = torch.bincount(cells.flatten(), minlength=bins * bins).double()
    return chi_square(counts, a.numel() / bins**2)


def by_the_book(seed: int, position: int, token: int) -> float:
    """The docstring's formula in Python integers."""
    mask = 2**32 - 1

    def asr(x: int, bits: int) -> int:
        return ((x - 2**32 if x >> 31 else x) >> bits) & mask

    key = mix64(mix64(seed) + (position + 1) * noise.GOLDEN64) & MASK64
    lo, hi = key & mask, key >> 32
    x = (token * noise.GOLDEN32 & mask) ^ lo
    x = ((x ^ (x >> 16)) * noise.MUL1 & mask) ^ hi
    x = (x ^ asr(x, 15)) * noise.MUL2 & mask
    m = x ^ asr(x, 15)
    assert 0 <= m < 2**31
    return -math.log(-math.log1p(-(m + 0.5) * noise.SCALE))


def test_matches_the_formula() -> None:
    cases = [(0, 0), (5, 3), (-7, 99), (2**63 - 1, 2**31 - 2), (-(2**63), 40960)]
    token_ids = torch.cat([torch.arange(300), torch.tensor([151935, 2**31 - 1])])
    got = make([s for s, _ in cases], [p for _, p in cases], token_ids)
    expected = torch.tensor([[by_the_book(s, p, t) for t in token_ids.tolist()] for s, p in cases])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_golden_values() -> None:
    """A change here changes the tokens that users' seeds produce."""
    got = make([42, 42, 43], [7, 8, 7], torch.tensor([0, 1, 7679]))
    expected = torch.tensor(
        [[2.379617, -0.082184, -0.296088], [-0.724718, 1.208900, 1.624763], [-0.518275, 1.546031, 1.053185]]
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_an_element_is_the_same_in_any_company() -> None:
    """Bit for bit: alone, in a batch, among other tokens, at another place in memory."""
    token_ids = torch.arange(7681)
    whole = make([1, 2, 3], [10, 20, 30], token_ids)
    for row, (seed, position) in enumerate([(1, 10), (2, 20), (3, 30)]):
        assert torch.equal(make([seed], [position], token_ids)[0], whole[row])
        picked = torch.randperm(7681, generator=torch.Generator().manual_seed(row))[:37]
        assert torch.equal(make([seed], [position], picked)[0], whole[row, picked])
        for token in (0, 5, 7680):
            assert make([seed], [position], torch.tensor([token]))[0, 0] == whole[row, token]


def test_per_row_token_ids() -> None:
    ids = torch.tensor([[3, 1, 4], [1, 5, 9]])
    both = make([7, 8], [0, 1], ids)
    assert torch.equal(both[0], make([7], [0], ids[0])[0])
    assert torch.equal(both[1], make([8], [1], ids[1])[0])


def test_range_is_finite() -> None:
    """Also at the extremes of the hash, which random tests would not meet."""
    m = torch.tensor([0, 2**31 - 1]).to(torch.float32)
    v = m.add(0.5).mul(noise.SCALE)
    values = -torch.log(-torch.log1p(-v))
    assert values.isfinite().all()
    assert values[0] == pytest.approx(22.18, abs=0.01)
    assert values[1] == pytest.approx(-2.77, abs=0.01)


@pytest.fixture(scope="module")
def by_position() -> Tensor:
    """[256 positions, 8192 tokens] uniforms of one seed."""
    return uniform(make([7] * 256, range(256), torch.arange(8192)))


@pytest.fixture(scope="module")
def by_seed() -> Tensor:
    """[256 seeds, 8192 tokens] uniforms at one position."""
    return uniform(make(range(256), [5] * 256, torch.arange(8192)))


@pytest.mark.parametrize("bins", [16, 256, 4096])
def test_uniform(by_position: Tensor, by_seed: Tensor, bins: int) -> None:
    for u in (by_position, by_seed):
        counts = torch.bincount((u * bins).long().clamp(max=bins - 1).flatten(), minlength=bins).double()
        assert abs(chi_square(counts, u.numel() / bins)) < LIMIT


def test_low_bits_are_uniform(by_position: Tensor) -> None:
    low = (by_position[by_position < 2**-8] * 2**20) % 1  # bits 12 to 20 of the smallest values
    counts = torch.bincount((low * 64).long(), minlength=64).double()
    assert abs(chi_square(counts, low.numel() / 64)) < LIMIT


@pytest.mark.parametrize("threshold", [1e-3, 1e-4, 1e-5])
def test_small_values_have_their_chance(by_position: Tensor, by_seed: Tensor, threshold: float) -> None:
    """Small v is where a token wins the race."""
    u = torch.cat([by_position, by_seed])
    expected = u.numel() * threshold
    assert abs((u < threshold).sum().item() - expected) < LIMIT * math.sqrt(expected)


def test_neighbours_are_independent(by_position: Tensor, by_seed: Tensor) -> None:
    u, s = by_position, by_seed
    scores = {f"token lag {lag}": pair_test(u[:, :-lag], u[:, lag:]) for lag in (1, 2, 3, 8, 64, 256, 4096)}
    scores |= {f"position lag {lag}": pair_test(u[:-lag], u[lag:]) for lag in (1, 2, 4, 128)}
    scores |= {f"seed lag {lag}": pair_test(s[:-lag], s[lag:]) for lag in (1, 2, 4, 128)}
    scores["next token at next position"] = pair_test(u[:-1, :-1], u[1:, 1:])
    scores["previous token at next position"] = pair_test(u[:-1, 1:], u[1:, :-1])
    scores["mirrored tokens"] = pair_test(u, u.flip(1))
    assert {name: score for name, score in scores.items() if abs(score) > LIMIT} == {}


def test_no_two_rows_correlate(by_position: Tensor, by_seed: Tensor) -> None:
    """Every pair of 512 rows. Position 5 of seed 7 is in both sets and must be the only equal pair."""
    z = (torch.cat([by_position, by_seed]) - 0.5) * math.sqrt(12)
    correlation = (z @ z.T) / math.sqrt(z.shape[1])  # unit normal for independent rows
    correlation.fill_diagonal_(0.0)
    assert correlation[5, 256 + 7] > 80
    correlation[5, 256 + 7] = correlation[256 + 7, 5] = 0.0
    assert correlation.abs().max() < 6.0  # 131,000 pairs: the largest is about 4.5
    assert correlation.var() == pytest.approx(1.0, abs=0.05)


def test_every_input_bit_moves_the_noise() -> None:
    """Avalanche: flipping any bit of seed, position or token flips each hash bit half of the time."""
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**62), 2**62, (400,), generator=generator).tolist()
    positions = torch.randint(0, 2**17, (400,), generator=generator).tolist()
    tokens = torch.randint(0, 2**17, (400, 1), generator=generator)
    base = uniform(make(seeds, positions, tokens)) > 0.5
    changed = {
        **{f"seed {b}": make([s ^ (1 << b) for s in seeds], positions, tokens) for b in range(0, 62, 3)},
        **{f"position {b}": make(seeds, [p ^ (1 << b) for p in positions], tokens) for b in range(17)},
        **{f"token {b}": make(seeds, positions, tokens ^ (1 << b)) for b in range(17)},
    }
    flips = {name: ((uniform(x) > 0.5) != base).sum().item() for name, x in changed.items()}
    assert {name: n for name, n in flips.items() if abs(n - 200) > LIMIT * 10} == {}


@pytest.mark.parametrize("weakened", [("MUL1", "MUL2"), ("MUL1", "GOLDEN32"), ("MUL2", "GOLDEN32")])
def test_the_tests_would_see_a_weaker_hash(
    weakened: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Power: with a single multiplication left (any two are enough) the checks above fail by far."""
    for name in weakened:
        monkeypatch.setattr(noise, name, 1)
    u = uniform(make([7] * 64, range(64), torch.arange(8192)))
    assert abs(pair_test(u[:, :-1], u[:, 1:])) > 100 * LIMIT
    assert abs(pair_test(u[:-1], u[1:])) > LIMIT
