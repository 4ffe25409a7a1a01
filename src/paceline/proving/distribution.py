"""Is sampled output distributed as plain decoding's? Tests of tokens against the probabilities they had.

Given the tokens before it, the token at a position must follow the plain distribution there, whatever was
drafted, accepted or cached. So over all positions of all texts

* the randomised rank u = (probability of likelier tokens) + v * (its own), v uniform, is uniform (the
  probability integral transform; Kolmogorov-Smirnov test);
* the likeliest token comes up as often as its probabilities add up to (a martingale: z-test);
* so does, at each draft position and over all of them, the drafter's favourite: a verifier that takes drafts
  too gladly is caught there first.

Holm's procedure keeps the chance that any of them fails by accident below ``ALPHA``. A test that cannot fail
proves nothing, so the same tests are run on the same rounds with a planted bias: in a share of the verified
rows the favourite is taken without asking. They must notice.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

ALPHA = 1e-3
PLANTED_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Draw:
    """A token that was sampled.

    Attributes:
        probability, above: the token's probability, and that of all likelier ones.
        top, is_top: the largest probability, and whether the token has it.
        draft_position: 1.. for a row that verified a draft, 0 for others.
        favourite: probability of the drafter's favourite there.
        favourite_above: that of all tokens likelier than the favourite.
        is_favourite: whether it was drawn.
    """

    probability: float
    above: float
    top: float
    is_top: bool
    draft_position: int = 0
    favourite: float = 0.0
    favourite_above: float = 0.0
    is_favourite: bool = False


@dataclass(frozen=True, slots=True)
class TestResult:
    """One test.

    Attributes:
        name: what was tested.
        p_value: chance of such a deviation by accident.
        count: draws it looked at.
    """

    __test__ = False  # not a test case of pytest's

    name: str
    p_value: float
    count: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of the tests.

    Attributes:
        results: all tests.
        failed: those that fail after the correction for their number.
        planted_found: whether the planted bias was noticed; None when no draft was verified.
    """

    results: list[TestResult]
    failed: list[TestResult]
    planted_found: bool | None


def judge(draws: Sequence[Draw], seed: int = 0) -> Verdict:
    """Run all tests, and again on the same draws with a planted bias.

    Args:
        draws: every sampled token, in any order.
        seed: of the randomised ranks and the planted bias.
    """
    results = run_tests(draws, random.Random(seed))
    if not any(draw.draft_position for draw in draws):
        return Verdict(results, holm(results), None)
    planted = run_tests(plant(draws, random.Random(seed + 1)), random.Random(seed))
    return Verdict(results, holm(results), bool(holm(planted)))


def plant(draws: Sequence[Draw], rng: random.Random) -> list[Draw]:
    """``draws`` with the drafter's favourite taken unasked in a share of the verified rows."""
    return [
        Draw(
            draw.favourite,
            draw.favourite_above,
            draw.top,
            draw.favourite >= draw.top,
            draw.draft_position,
            draw.favourite,
            draw.favourite_above,
            True,
        )
        if draw.draft_position and rng.random() < PLANTED_SHARE
        else draw
        for draw in draws
    ]


def run_tests(draws: Sequence[Draw], rng: random.Random) -> list[TestResult]:
    """All tests on ``draws``."""
    ranks = sorted(draw.above + rng.random() * draw.probability for draw in draws)
    results = [
        TestResult("ranks are uniform", uniform_p_value(ranks), len(ranks)),
        _frequency("the likeliest token", [(draw.is_top, draw.top) for draw in draws]),
    ]
    verified = [(draw.is_favourite, draw.favourite) for draw in draws if draw.draft_position]
    if verified:
        results.append(_frequency("the drafter's favourite", verified))
    by_position: dict[int, list[tuple[bool, float]]] = defaultdict(list)
    for draw in draws:
        if draw.draft_position:
            by_position[draw.draft_position].append((draw.is_favourite, draw.favourite))
    results += [
        _frequency(f"the drafter's favourite at draft {position}", rows)
        for position, rows in sorted(by_position.items())
        if sum(p * (1 - p) for _, p in rows) > 5  # else too few for a normal law
    ]
    return results


def _frequency(name: str, rows: Sequence[tuple[bool, float]]) -> TestResult:
    """Whether events come up as often as their probabilities say."""
    excess = sum(hit - p for hit, p in rows)
    variance = sum(p * (1 - p) for _, p in rows)
    p_value = math.erfc(abs(excess) / math.sqrt(2 * variance)) if variance > 0 else 1.0
    return TestResult(name, p_value, len(rows))


def uniform_p_value(ordered: Sequence[float]) -> float:
    """Kolmogorov-Smirnov test of sorted values against the uniform law on [0, 1].

    The limiting law with Stephens' correction for finite n (Stephens 1970, "Use of the Kolmogorov-Smirnov,
    Cramer-von Mises and related statistics without extensive tables").
    """
    n = len(ordered)
    if n == 0:
        return 1.0
    distance = max(max((i + 1) / n - u, u - i / n) for i, u in enumerate(ordered))
    x = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance
    if x < 0.3:
        return 1.0  # the series converges slowly there, and the value is 1 to five places
    total = sum((1.0 if k % 2 else -1.0) * math.exp(-2 * k * k * x * x) for k in range(1, 101))
    return min(1.0, max(0.0, 2 * total))


def holm(results: Sequence[TestResult], alpha: float = ALPHA) -> list[TestResult]:
    """Tests that fail while the chance of any false alarm stays below ``alpha`` (Holm 1979)."""
    failed = []
    for rank, result in enumerate(sorted(results, key=lambda item: item.p_value)):
        if result.p_value > alpha / (len(results) - rank):
            break
        failed.append(result)
    return failed
