"""Which depth is the fastest for the work that is known. Pure logic.

While others wait, whoever ends is replaced, and the fastest depth is the one with most tokens per second.
Where nobody waits a batch runs empty, and what counts is when the last of its sequences is done. Plain
sequences of one length end together; with drafts they end one after the other, and the last of them run in
small rounds that cost nearly as much as large ones. So a draft of a sequence that ends before others saves
little, and drafting must gain more than those rounds lose.

How far apart sequences end is what is known of each, or what they were found to differ by, whichever is more:
that some of several new ones will be slow is certain, though not which.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import cast

import numpy as np
from numpy.typing import NDArray

from paceline.speculation.costs import Round, RoundCosts
from paceline.speculation.decision import Batch
from paceline.speculation.survival import Survival

FloatArray = NDArray[np.float64]


def long_run_rates(
    batch: Batch, depths: Sequence[int], costs: RoundCosts, survival: Survival
) -> dict[int, float]:
    """Tokens per second at each depth: of rounds, or where nobody waits, of all work until it is done.

    Args:
        batch: at least one sequence, those that come included.
        depths: ascending from 0.
    """
    num_seqs = len(batch.slots) + len(batch.coming)
    by_slot = np.argsort(batch.slots)  # sums must not depend on the order of a batch
    able = np.asarray(batch.can_draft, dtype=bool)[by_slot, None]
    drafts = survival.of(batch.slots)[by_slot] * able
    new = np.tile(survival.overall(), (len(batch.coming), 1))
    rooms = [costs.room(num_seqs, depth) for depth in depths]
    chances = np.concatenate((drafts, new))
    paces = _chosen(chances, rooms)  # [C, N] tokens per round beside the anchor's
    if survival.trusted and batch.slots:
        # The drafter knows better than the past what stands now; sequences differ by it from round to round.
        moment = survival.of(batch.slots, now=True)[by_slot] * able
        theirs = [room * len(batch.slots) // num_seqs for room in rooms]
        most, usual = (_chosen(of, theirs).sum(1) for of in (moment, drafts))
        paces *= (most / np.maximum(usual, 1e-9))[:, None]
    paces += 1.0
    if batch.refilled:
        seconds = [costs.seconds(Round(num_seqs, depth, depth > 0), batch.context) for depth in depths]
        rates = paces.sum(1) / seconds
    else:
        left = np.concatenate((np.asarray(batch.left, dtype=np.float64)[by_slot], np.sort(batch.coming)))
        left = np.maximum(left, 1.0)
        drafts_only = np.zeros(len(depths))
        if batch.slots and not any(batch.available):  # the first round would only draft
            drafts_only[1:] = 1.0
        then = np.maximum(left - drafts_only[:, None], 1.0)  # [C, N]
        table = _by_size(costs, num_seqs, depths, batch.context)
        first, rest = finish_seconds(paces, then, table, survival.spread)
        first += drafts_only * costs.seconds(Round(num_seqs, 0, True), batch.context)
        times = first + rest
        # Only what comes before the first end differs. Beside all that follows it would look like nothing.
        best = int(times.argmin())
        rates = left.sum() / (times[best] + (times - times[best]) * times[best] / first[best])
    return dict(zip(depths, rates.tolist(), strict=True))


def _chosen(chances: FloatArray, rooms: Sequence[int]) -> FloatArray:
    """Drafts of each sequence that stand where there are rows for so many, which the likeliest get.

    Args:
        chances: [N, g], falling along each row.
        rooms: numbers of drafts [C].

    Returns:
        [C, N].
    """
    rank = np.argsort(np.argsort(-chances, axis=None, kind="stable"), kind="stable").reshape(chances.shape)
    return np.array([np.where(rank < room, chances, 0.0).sum(1) for room in rooms])


def finish_seconds(
    paces: FloatArray, left: FloatArray, seconds: FloatArray, spread: float
) -> tuple[FloatArray, FloatArray]:
    """Seconds until all sequences are done, for each depth: it is kept until the first of them ends, and
    after that the best depth for those that remain.

    Args:
        paces: [C, N] tokens per round of each sequence at each depth; the first depth is plain decoding.
        left: [N], or [C, N] if that differs, tokens each still commits, at least 1.
        seconds: [C, N] of a round of 1 ... N sequences at each depth.
        spread: standard deviation of the rounds that sequences take, as a share of their mean, with drafts.

    Returns:
        [C] until the first ends, and [C] from there on.
    """
    num_depths, num_seqs = paces.shape
    paces = paces * left / (left + (paces - 1.0) / 2.0)  # what the last round has beyond the end is lost
    rounds = np.maximum(left / paces, 1.0)
    order = np.argsort(rounds, axis=1, kind="stable")
    ends = np.take_along_axis(rounds, order, 1)
    mean = ends.mean(1, keepdims=True)
    known, unknown = ends - mean, spread * mean * _scores(num_seqs)
    unknown[0] = 0.0
    ends = np.sort(mean + np.where(np.abs(known) > np.abs(unknown), known, unknown), axis=1)
    lasting = _steps(np.maximum(ends, 1.0))  # rounds of N, N - 1, ... 1 sequences
    found = lasting[:, 0] * seconds[:, -1]
    if num_seqs == 1:
        return found, np.zeros_like(found)
    # Those that remain, in the order of each depth: their mean pace at every depth.
    remaining = np.cumsum(paces[:, order][:, :, ::-1], axis=2)[:, :, ::-1] / np.arange(num_seqs, 0, -1)
    prices = seconds[:, None, ::-1] / remaining  # [C, C, N] seconds per token at a depth, after another
    changes = ~np.eye(num_depths, dtype=bool)
    changes[0] = False  # plain decoding draws nothing out
    drawn_out = _drawn_out(seconds, spread)[:, None, ::-1]
    prices = np.where(changes[:, :, None], prices * drawn_out, prices)
    each = np.arange(num_depths)
    rest = lasting * remaining[each, each] * prices.min(0)
    return found, cast(FloatArray, rest[:, 1:].sum(1))


def _drawn_out(seconds: FloatArray, spread: float) -> FloatArray:
    """How much longer 1 ... N equal sequences take that end one after the other, beside ending together."""
    num_seqs = seconds.shape[1]
    sizes = _halves(num_seqs)
    found = []
    for size in sizes:
        lasting = _steps(np.maximum(1.0 + spread * _scores(size), 0.0))
        found.append((seconds[:, size - 1 :: -1] @ lasting) / seconds[:, size - 1])
    return np.array([np.interp(np.arange(1, num_seqs + 1), sizes, row) for row in np.array(found).T])


def _by_size(costs: RoundCosts, num_seqs: int, depths: Sequence[int], context: float) -> FloatArray:
    """Seconds of rounds of 1 ... ``num_seqs`` sequences at each depth: [C, N]."""
    sizes, every = _halves(num_seqs), np.arange(1, num_seqs + 1)
    found = [[costs.seconds(Round(size, depth, depth > 0), context) for size in sizes] for depth in depths]
    return np.array([np.interp(every, sizes, row) for row in found])


def _halves(count: int) -> list[int]:
    """``count``, half of it, and so on down to 1; ascending."""
    return [count >> halvings for halvings in reversed(range(count.bit_length()))]


def _steps(ends: FloatArray) -> FloatArray:
    """Differences along the last axis, from 0."""
    found = ends.copy()
    found[..., 1:] -= ends[..., :-1]
    return found


@lru_cache(256)
def _scores(count: int) -> FloatArray:
    """Where ``count`` normal draws lie on average, in order (Blom 1958, Statistical Estimates and Transformed
    Beta-Variables).
    """
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.625) / (count + 0.25)) for i in range(count)])
