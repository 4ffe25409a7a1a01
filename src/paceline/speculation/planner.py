"""The verify planner: how many drafts a round verifies, and whether the next block is drafted at all. Pure
logic.

A round of N sequences with up to K drafts each is expected to commit E(K) = Σᵢ (1 + Σⱼ≤K aᵢⱼ) tokens, where
aᵢⱼ is the chance that draft j of sequence i and all before it stand (``survival.py``), and takes t(N, K)
seconds (``costs.py``). Drafting pays at the depth K whose rate E(K) / t(N, K) is the highest, and not at all
when no rate beats the plain round's N / t(N): a drafter then costs nothing but the room it takes. Where
nobody waits to take the place of sequences that end, the rate is that of all known work until it is done
(``horizon.py``).

Drafts already in place are sunk cost. So a round runs the depth that gains most over the best rate r that can
be had in the long run: the largest E(K) - r · t(N, K), as in renewal-reward theory.

What does not run cannot be learnt from: drafts that would stand by now, rounds that take longer or shorter
than was measured. So now and then the depth that has not run for longest does, plain decoding included, at a
price: its extra seconds, and those that the tokens it lacks are worth. It is paid from ``EXPLORE_SHARE`` of
all seconds, and what the round commits beyond its plan is paid back. If drafts have become good, exploring is
free and goes on at once. The first trials of a depth at a batch size are free too unless they look dear: what
was measured may be an interpolation, or may have been disturbed. A smaller depth that was seen and is far
behind is left alone: it could only surprise by its time. For the same reason plain decoding that has
not run yet is tried at once where it is close, and drafting once however dear it looks.

Rows of hedge chains are bought out of the same budget: beside all drafts, where the tokens they are expected
to add (``odds.py``) are worth more than the seconds they take at that rate.

With a step in flight all numbers are those of earlier rounds; lengths and acceptance stay on the device, so
that nothing waits for the choice.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.speculation.costs import Round, RoundCosts
from paceline.speculation.decision import Batch, Decision, Reason
from paceline.speculation.horizon import long_run_rates
from paceline.speculation.odds import ChainOdds
from paceline.speculation.survival import Survival

logger = logging.getLogger(__name__)

EXPLORE_SHARE = 0.004
"""Most time given up to find out what else would be faster now, as a share of all."""
FREE_TRIALS = 2
FREE_EVERY = 64
FREE_PRICE = 2.0
"""Trials of a depth that need not be paid for, for each size of batch that costs are known for; the rounds
between any two of them; and the price up to which they are free, in rounds."""
PLAIN_PRICE = 0.5
"""The same of plain decoding, which must be close to be worth trying; where it has not run since start it is
tried at once: until it does, nothing shows that it was measured too slow."""
DOUBTS = 2.0
"""Standard deviations of what its time is in doubt by that a smaller depth must be within of the present one
to be tried again: what its rounds commit is known from what stands now."""
SETTLE_EVERY = 17
"""Most rounds after which a choice is looked at again while the batch stays what it is. A new one is looked
at after one, two, four: what it was made from is known least then. No multiple of a block's tokens: sequences
that started together need new blocks in the same step, and the host has enough to do in it."""
HYSTERESIS = 0.005
"""Another depth must be so much faster than the present one to be chosen."""
UNIT = 1 << 30
"""Chances are summed as integers of this unit: a sum must not depend on the order of a batch."""


@dataclass(frozen=True, slots=True)
class _Trial:
    depth: int
    propose: bool
    baseline: float


class _Seen(NamedTuple):
    """What was last worked out of a batch: tokens by depth, the best depth."""

    now: list[float]
    depth: int


def allot(chances: NDArray[np.int64], slots: Sequence[int], limits: Sequence[int], rows: int) -> list[int]:
    """Give ``rows`` to the drafts most likely to stand.

    Args:
        chances: [N, g], falling along each row.
        slots: who the rows of ``chances`` are; the smaller slot wins a tie.
        limits: most drafts of each.
        rows: to give.

    Returns:
        Drafts of each.
    """
    position = np.arange(chances.shape[1])
    wanted, draft = np.nonzero(position < np.asarray(limits)[:, None])  # sequence and position of each draft
    order = np.lexsort((np.asarray(slots)[wanted], draft, -chances[wanted, draft]))[:rows]
    return np.bincount(wanted[order], minlength=len(slots)).tolist()  # type: ignore[no-any-return]


def expected_tokens(chances: NDArray[np.int64], limits: Sequence[int], rooms: Sequence[int]) -> list[float]:
    """Tokens committed with rows for so many drafts, which the likeliest of all get.

    Args:
        chances: [N, g] that a draft and all before it stand, in ``UNIT``.
        limits: most drafts of each sequence.
        rooms: numbers of drafts.

    Returns:
        As many.
    """
    position = np.arange(chances.shape[1])
    counted = np.where(position < np.asarray(limits)[:, None], chances, 0).ravel()
    totals = np.concatenate(([0], np.cumsum(np.sort(counted)[::-1])))
    return [len(limits) + float(totals[min(room, len(counted))]) / UNIT for room in rooms]


class Planner:
    """Chooses the depth of every round.

    Args:
        costs: seconds of rounds.
        survival: chances of drafts.
        odds: what hedge chains bring; None where there are none.

    Attributes:
        rounds: rounds planned, by depth and reason.
        expected_tokens: tokens they should have committed; ``realised_tokens`` those they did.
        last: the last decision.
    """

    def __init__(self, costs: RoundCosts, survival: Survival, odds: ChainOdds | None = None) -> None:
        self.costs = costs
        self.survival = survival
        self.odds = odds
        self.rounds: Counter[tuple[int, Reason]] = Counter()
        self.expected_tokens = 0.0
        self.realised_tokens = 0
        self.last: Decision | None = None
        self._depth = costs.num_drafts  # where the last round would have liked to be
        self._rate = 0.0  # tokens per second there
        self._settled_for: tuple[int, bool] | None = None
        self._settled_until = 0
        self._settle_after = 1
        self._situation: tuple[object, ...] = ()  # what ``_seen`` was worked out for
        self._seen = _Seen([], 0)
        self._bank = 0.0  # seconds to spend on exploring
        self._drafted_for = 0  # depth to explore now that drafts are in place
        self._drafted = False  # whether drafts were ever verified
        self._hedges = False  # whether the last round had chains
        self._chain_trial = 0  # rounds with chains still to run to learn from them
        self._unhedged_s = 0.0  # seconds since chains last ran
        self._last_run: dict[Round, int] = {}
        self._trials: Counter[Round] = Counter()
        self._last_free = 0
        self._round = 0

    def decide(self, batch: Batch) -> Decision:
        """Plan a round. The choice depends on the set of sequences, never on their order."""
        num_seqs = len(batch.slots)
        rate = self._settle(batch)
        propose = self._depth > 0
        if not num_seqs:  # only prefill: who gets to its first token drafts if the next round does
            return Decision(0, None, propose, "drafts pay" if propose else "plain is faster")

        @cache
        def seconds(depth: int, propose: bool) -> float:
            return self.costs.seconds(Round(num_seqs, depth, propose), batch.context)

        choices = (0, *self.costs.counts(num_seqs))
        about = (num_seqs, max(batch.available), sum(batch.available), batch.row_limit)
        situation = (self._settled_for, self._settled_until, *about)
        if situation != self._situation:  # else the last look still holds
            self._situation = situation
            self._look(batch, choices, lambda k: rate * seconds(k, propose))
        now, depth = self._seen
        # What trials cost is told at the rate of this round, if that is more: a token of a sequence that ends
        # before others saves little, but is not free.
        worth = max(rate, now[depth] / seconds(depth, propose))
        trial = self._trial(batch, choices, depth, now, worth, seconds)
        reason: Reason = "exploring" if trial else "drafts pay" if propose else "plain is faster"
        chosen = trial or _Trial(depth, propose, now[depth])
        gain = self._hedge(batch, chosen, rate)
        self._last_run[self.costs.kind(Round(num_seqs, chosen.depth, chosen.propose))] = self._round
        self._round += 1
        self._drafted |= chosen.depth > 0
        self.rounds[chosen.depth, reason] += 1
        self.last = Decision(
            chosen.depth,
            self._allot(batch, chosen.depth),
            chosen.propose,
            reason,
            expected=now[chosen.depth] + gain,
            baseline=chosen.baseline,
            worth=worth,
            context=batch.context,
            hedge=self._hedges,
        )
        return self.last

    def _look(self, batch: Batch, choices: Sequence[int], price: Callable[[int], float]) -> None:
        """Work out what the round may commit, and the depth at which that is most beyond what it costs."""
        if any(batch.available):
            rooms = [
                min(self.costs.room(len(batch.slots), depth), batch.row_limit)
                for depth in range(self.costs.num_drafts + 1)
            ]
            now = expected_tokens(self._chances(batch), batch.available, rooms)
        else:
            now = [float(len(batch.slots))] * (self.costs.num_drafts + 1)
        reach = bisect_left(choices, max(batch.available))  # nobody has more drafts than this choice
        self._seen = _Seen(now, max(choices[: reach + 1], key=lambda k: now[k] - price(k)))

    def _chances(self, batch: Batch) -> NDArray[np.int64]:
        """That each draft and all before it stand, [N, g] in ``UNIT``."""
        return np.rint(self.survival.of(batch.slots, now=True) * UNIT).astype(np.int64)

    def _trial(
        self,
        batch: Batch,
        choices: Sequence[int],
        depth: int,
        now: Sequence[float],
        worth: float,
        seconds: Callable[[int, bool], float],
    ) -> _Trial | None:
        """What to run instead of ``depth`` to learn from it; None to learn nothing this time."""
        num_seqs, propose, in_place = len(batch.slots), self._depth > 0, any(batch.available)
        self._bank += EXPLORE_SHARE * seconds(depth, propose)
        began, self._drafted_for = self._drafted_for, 0
        if began and in_place:
            return _Trial(began if began in choices else choices[-1], propose, float(num_seqs))
        if self._chain_trial or in_place != propose or not any(batch.can_draft):
            return None
        # Of those that have not run for equally long plain decoding, then the deepest: it tells most.
        kinds = self.costs.kinds(num_seqs)
        rate = now[depth] / seconds(depth, propose)
        others = [
            k
            for k in kinds
            if k > self._depth  # later drafts may stand by now
            or (k < self._depth and now[k] / seconds(k, k > 0) * self._faster(kinds[k], kinds[depth]) > rate)
        ]
        if not others:
            return None
        other = min(others, key=lambda k: self._last_run.get(kinds[k], -1))
        if not propose:
            price = worth * (seconds(0, True) + seconds(other, False) - 2 * seconds(0, False))
            trial = _Trial(0, True, float(num_seqs))
        elif other == 0:  # and the round after it has no drafts either
            price = worth * (seconds(0, False) + seconds(0, True)) - 2 * num_seqs
            trial = _Trial(0, False, float(num_seqs))
        else:
            sure = now[min(other, depth)]
            price = now[depth] - sure + worth * (seconds(other, True) - seconds(depth, True))
            trial = _Trial(other, True, sure)
        price /= worth
        if self._free(kinds[other], price / seconds(depth, propose)):
            self._last_free = self._round
        elif self._bank < price:
            return None
        self._bank = min(self._bank - price, 0.0)  # what a free one brings must not pay for the next
        self._trials[kinds[other]] += 1
        if not propose:
            self._drafted_for = other
        return trial

    def _faster(self, kind: Round, present: Round) -> float:
        """By how much rounds of a kind may yet be faster, beside those of the present one, than they seem."""
        if not self.costs.seen(kind):
            return math.inf  # start-up figures may be anything
        return math.exp(DOUBTS * self.costs.doubt(kind, present))

    def _free(self, kind: Round, price: float) -> bool:
        """Whether a trial that costs ``price`` rounds need not be paid for. The very first of drafting need
        not, whatever it costs: nothing is known of drafts yet, and it may be long until it could be paid.
        """
        if kind.num_drafts and not self._drafted:
            return True
        due = self._round >= self._last_free + FREE_EVERY
        if kind.num_drafts == 0:
            due = (due or not self.costs.seen(kind)) and price <= PLAIN_PRICE
        return due and price <= FREE_PRICE and self._trials[kind] < FREE_TRIALS

    def _hedge(self, batch: Batch, chosen: _Trial, rate: float) -> float:
        """Choose whether chains run in this round. Returns the tokens they should add to it: chains are made
        in one round and verified in the next.
        """
        depth, had = self.costs.num_drafts, self._hedges
        self._hedges = False
        if self.odds is None:  # how many is for others to say; they go with all drafts there are
            self._hedges = chosen.propose and chosen.depth >= max(batch.available)
            return 0.0
        if batch.hedged == 0:
            self._chain_trial = 0
            return 0.0
        gain, extra = self._chains(batch, len(batch.slots))
        self._unhedged_s += self.costs.seconds(
            Round(len(batch.slots), chosen.depth, chosen.propose), batch.context
        )
        if chosen.depth != depth or not chosen.propose:
            self._chain_trial = 0  # its second round has no place
            return 0.0
        self._hedges = gain > rate * extra or self._chain_trial > 0
        if not self._hedges and self._depth == depth and 2 * extra <= EXPLORE_SHARE * self._unhedged_s:
            self._hedges, self._chain_trial = True, 2
        if self._hedges:
            self._chain_trial = max(self._chain_trial - 1, 0)
            self._unhedged_s = 0.0
        return gain if had and self._hedges else 0.0

    def _chains(self, batch: Batch, num_seqs: int) -> tuple[float, float]:
        """Tokens that chains add to a round with all drafts, and seconds they take."""
        assert self.odds is not None
        depth = self.costs.num_drafts
        with_chains, without = (
            self.costs.seconds(Round(num_seqs, depth, True, chains), batch.context)
            for chains in (batch.chains, 0)
        )
        gain = batch.hedged * self.odds.gain(self.survival.overall(), batch.chains)
        return gain, with_chains - without

    def _settle(self, batch: Batch) -> float:
        """Choose the depth that pays best in the long run. Returns its rate in tokens per second."""
        num_seqs = len(batch.slots) + len(batch.coming)
        if not num_seqs:
            return 0.0
        if batch.slots and not any(batch.can_draft):  # what pays for others is not for these to say
            return num_seqs / self.costs.seconds(Round(num_seqs, 0, False), batch.context)
        work = (num_seqs, batch.refilled)
        if work == self._settled_for and self._round < self._settled_until:
            return self._rate
        rates = long_run_rates(batch, (0, *self.costs.counts(num_seqs)), self.costs, self.survival)
        if batch.hedged:
            gain, extra = self._chains(batch, num_seqs)
            depth = self.costs.num_drafts
            tokens = num_seqs * (1.0 + float(self.survival.overall().sum()))
            seconds = self.costs.seconds(Round(num_seqs, depth, True), batch.context)
            rates[depth] *= max(1.0, (1.0 + gain / tokens) / (1.0 + extra / seconds))
        best = max(rates, key=lambda depth: rates[depth])
        self._settle_after = min(2 * self._settle_after, SETTLE_EVERY)
        if rates[best] > (1 + HYSTERESIS) * rates.get(self._depth, 0.0):
            self._log(best, rates, num_seqs)
            self._depth, self._settle_after = best, 1
        self._settled_for, self._settled_until = work, self._round + self._settle_after
        self._rate = rates[self._depth]
        return self._rate

    def _log(self, depth: int, rates: Mapping[int, float], num_seqs: int) -> None:
        if depth != self._depth:
            logger.debug(
                "Verify planner: %d drafts for %d sequences instead of %d; tok/s by drafts: %s; "
                "%d of %.0f expected tokens came so far",
                depth,
                num_seqs,
                self._depth,
                ", ".join(f"{k}: {rate:.0f}" for k, rate in rates.items()),
                self.realised_tokens,
                self.expected_tokens,
            )

    def _allot(self, batch: Batch, depth: int) -> dict[int, int] | None:
        """Most drafts of each sequence. Which of a sequence's drafts stand is best said by the drafter, on
        the device; where it does not know, by what stood before.
        """
        wanted, room = sum(batch.available), batch.row_limit
        if not wanted or not depth:
            return None
        if not self.survival.trusted:
            room = min(room, self.costs.room(len(batch.slots), depth))
        if wanted <= room:
            return None
        each = allot(self._chances(batch), batch.slots, batch.available, room)
        return dict(zip(batch.slots, each, strict=True))

    def committed(
        self,
        decision: Decision,
        slots: Sequence[int],
        drafts: Sequence[int],
        accepted: Sequence[int],
        chains: Sequence[int] = (),
        won: Sequence[int] = (),
        predicted: Sequence[Sequence[float] | None] = (),
    ) -> None:
        """Learn from a round's results.

        Args:
            decision: what it was planned as.
            slots: sequences that decoded.
            drafts: drafts verified for each.
            accepted: how many of them stood, chains left aside.
            chains: hedge chains verified beside them, and
            won: tokens committed because of one; empty where there are none.
            predicted: how likely the drafter held all drafts of each to stand, those not verified too; None
                where it did not say.
        """
        self.survival.observe(slots, drafts, accepted, predicted)
        if self.odds is not None and chains:
            self.odds.observe(accepted, drafts, chains, won)
        tokens = sum(accepted) + sum(won) + len(slots)
        logger.debug(
            "Verify planner: a round of %d sequences had rows for %d drafts each (%s), %.1f tokens expected, "
            "%d came",
            len(slots),
            decision.depth,
            decision.reason,
            decision.expected,
            tokens,
        )
        self.expected_tokens += decision.expected
        self.realised_tokens += tokens
        if decision.reason == "exploring":
            self._bank += (tokens - decision.baseline) / decision.worth
            self._settled_for = None  # something was learnt
