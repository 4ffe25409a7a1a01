"""How many hedge chains pay: found out by running each number for a while. Pure logic.

The traffic decides: chains cost rows and bring tokens where drafts often break at a position whose runner-up
is right. So the controller runs *windows* of rounds, each at one number of chains, and compares the median of
committed tokens per second. It climbs from 0 as long as one chain more gains a margin, keeps what it found
for many rounds, and then looks again. Everything it knows are events (when a round began and ended, tokens it
committed, chains it executed), so a log of them replays to the same choices.

* A window counts only if all its rounds executed the same number of chains; a round that executed fewer than
  was asked for, because rows were short, is booked to what it executed.
* After a pause the window begins anew: rounds before and after it may be different traffic. So it does after
  a round that did not verify all drafts or made none, which the verify planner decides.
* Flat traffic settles at 0: a chain more must gain the margin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class HedgeTuning:
    """When the controller compares and decides.

    Attributes:
        window_rounds: rounds of a window.
        explore_windows: windows' worth of rounds at each number of chains before it is judged.
        memory_windows: last windows whose median counts, for each number.
        margin: share by which one chain more must be faster.
        settle_rounds: rounds before a choice is looked at again.
        max_gap_s: seconds between the end of a round and the beginning of the next after which a window
            begins anew.
    """

    window_rounds: int = 64
    explore_windows: int = 3
    memory_windows: int = 12
    margin: float = 0.03
    settle_rounds: int = 4096
    max_gap_s: float = 0.5


class HedgeController:
    """Chooses the number of hedge chains.

    Args:
        max_chains: most chains of a sequence and round.
        tuning: its constants.

    Attributes:
        chains: how many to run in the next round.
        settled: whether that is a choice, not a trial.
    """

    def __init__(self, max_chains: int, tuning: HedgeTuning | None = None) -> None:
        self.tuning = tuning or HedgeTuning()
        self.max_chains = max_chains
        self.chains = 0
        self.settled = max_chains == 0
        self._speeds: dict[int, list[float]] = {}
        self._asked = 0  # rounds this number of chains was asked for, whatever was executed
        self._last_s: float | None = None
        self._executed: int | None = None
        self._rounds = self._tokens = 0
        self._seconds = 0.0

    @property
    def speeds(self) -> Mapping[int, float]:
        """Median tokens per second by number of chains, as far as known."""
        return {chains: median(values) for chains, values in sorted(self._speeds.items())}

    def round_done(self, began_s: float, now_s: float, tokens: int, executed: int) -> None:
        """A round was committed.

        Args:
            began_s, now_s: when it began and when that was, in seconds of any clock.
            tokens: it committed, over all sequences.
            executed: chains it ran, which may be fewer than were asked for.
        """
        last_s, self._last_s = self._last_s, now_s
        if last_s is None or began_s - last_s > self.tuning.max_gap_s:
            self._restart_window()  # how long this round took is not known either
            return
        if executed != self._executed:
            self._restart_window()
            self._executed = executed
        self._rounds += 1
        self._tokens += tokens
        self._seconds += now_s - last_s
        if self._rounds == self.tuning.window_rounds:
            self._window_done(executed)
        self._asked += 1
        if not self.settled and self._asked >= self.tuning.window_rounds * self.tuning.explore_windows:
            self._judge()
        elif self.max_chains and self.settled and self._asked >= self.tuning.settle_rounds:
            self._explore()

    def interrupted(self, now_s: float) -> None:
        """A round was committed in which chains had no place, whatever was asked for: it does not tell what
        they bring.

        Args:
            now_s: when, in seconds of the same clock.
        """
        self._last_s = now_s
        self._restart_window()

    def _restart_window(self) -> None:
        self._rounds = self._tokens = 0
        self._seconds = 0.0
        self._executed = None

    def _window_done(self, executed: int) -> None:
        if self._seconds > 0.0:
            speeds = self._speeds.setdefault(executed, [])
            speeds.append(self._tokens / self._seconds)
            del speeds[: -self.tuning.memory_windows]
        self._restart_window()

    def _explore(self) -> None:
        """Look again, from 0: what was measured before may be another traffic."""
        self._speeds.clear()
        self.chains = self._asked = 0
        self.settled = False

    def _judge(self) -> None:
        """After enough rounds at a number of chains: go on, or settle at it or below."""
        speeds, chains = self.speeds, self.chains
        if 0 not in speeds:
            return  # pauses left no whole window to compare with
        # A number that was never executed for a whole window does not gain: rows are short.
        gains = chains == 0 or speeds.get(chains, 0.0) > (1 + self.tuning.margin) * speeds[chains - 1]
        self._asked = 0
        if gains and chains < self.max_chains:
            self.chains += 1
        else:
            self.chains -= not gains
            self.settled = True
