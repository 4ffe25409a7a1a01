"""The distribution tests: right draws pass, every kind of bias is noticed, few draws prove nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from paceline.proving.distribution import Draw, TestResult, holm, judge, plant, run_tests, uniform_p_value

Chooser = Callable[[random.Random, Sequence[float], int], int]


def honest(rng: random.Random, p: Sequence[float], favourite: int) -> int:
    return rng.choices(range(len(p)), p)[0]


def draws(count: int, choose: Chooser = honest, seed: int = 0) -> list[Draw]:
    """Draws from random laws over six tokens; two thirds verify a draft at positions 1 to 3."""
    rng = random.Random(seed)
    result = []
    for i in range(count):
        weights = [rng.gammavariate(0.5, 1.0) + 1e-6 for _ in range(6)]
        p = sorted((w / sum(weights) for w in weights), reverse=True)
        favourite = 0 if rng.random() < 0.7 else rng.randrange(6)
        token = choose(rng, p, favourite)
        position = i % 3 + 1 if i % 9 < 6 else 0
        result.append(
            Draw(
                p[token],
                sum(p[:token]),
                p[0],
                token == 0,
                position,
                p[favourite] if position else 0.0,
                sum(p[:favourite]) if position else 0.0,
                bool(position) and token == favourite,
            )
        )
    return result


@pytest.mark.parametrize("seed", range(5))
def test_right_draws_pass_and_the_planted_bias_is_noticed(seed: int) -> None:
    verdict = judge(draws(3000, seed=seed), seed)
    assert not verdict.failed
    assert verdict.planted_found is True
    assert len(verdict.results) == 6


def test_false_alarms_are_as_rare_as_promised() -> None:
    """At a level of 5 % instead of 0.1 %, so that there is something to count."""
    alarms = sum(bool(holm(run_tests(draws(300, seed=i), random.Random(i)), alpha=0.05)) for i in range(200))
    assert alarms <= 22  # of 10 expected at most; 23 or more: one run in 5,000


def takes_drafts(rng: random.Random, p: Sequence[float], favourite: int) -> int:
    return favourite if rng.random() < 0.08 else honest(rng, p, favourite)


def avoids_the_top(rng: random.Random, p: Sequence[float], favourite: int) -> int:
    token = honest(rng, p, favourite)
    return honest(rng, p, favourite) if token == 0 and rng.random() < 0.2 else token


def too_cold(rng: random.Random, p: Sequence[float], favourite: int) -> int:
    return rng.choices(range(len(p)), [value**1.3 for value in p])[0]


@pytest.mark.parametrize("choose", [takes_drafts, avoids_the_top, too_cold])
def test_a_bias_is_noticed(choose: Chooser) -> None:
    assert judge(draws(4000, choose)).failed


def test_few_draws_prove_nothing() -> None:
    verdict = judge(draws(40))
    assert not verdict.failed and verdict.planted_found is False


def test_without_drafts_there_is_nothing_to_plant() -> None:
    plain = [Draw(0.5, 0.0, 0.5, True) for _ in range(10)]
    assert judge(plain).planted_found is None
    assert plant(plain, random.Random(0)) == plain


def test_uniform_p_values_are_known_ones() -> None:
    assert uniform_p_value([]) == 1.0
    assert uniform_p_value([(i + 0.5) / 100 for i in range(100)]) == 1.0
    assert uniform_p_value([0.5] * 50) < 1e-9
    # D = 0.1 at n = 100: the limiting law's 0.2417 with Stephens' correction
    shifted = [min(1.0, i / 100 + 0.1) for i in range(100)]
    assert uniform_p_value(shifted) == pytest.approx(0.244, abs=0.05)


def test_holm_stops_at_the_first_that_passes() -> None:
    results = [TestResult(str(p), p, 1) for p in (0.0006, 0.00001, 0.2, 0.00033)]
    assert [item.p_value for item in holm(results, 0.001)] == [0.00001, 0.00033]
