"""Whether sequences that end are replaced though nobody waits: in traffic that goes on, not in a batch that
runs empty. Pure logic.

Where a server has as many requests as its users have questions, a new one comes soon after one has ended, but
seldom waits for it. Its batch never runs empty, and the fastest depth is the one with most tokens per second,
as if others waited. Batches of a job end and leave the device empty before the next begins.
"""

from __future__ import annotations

from collections import deque

PATIENCE = 32
"""Steps after which nobody is expected any more to take an ended sequence's place."""
MEMORY = 32
"""Ended sequences after which older ones weigh 1/e."""


class Vacancies:
    """Places that ended sequences have left.

    Attributes:
        share: of them that were taken again while others ran.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self._open: deque[int] = deque()  # the steps they became free in, the oldest first
        self._step = 0

    @property
    def replaced(self) -> bool:
        """Whether most sequences that end are replaced."""
        return self.share > 0.5

    def step(self, started: int, ended: int, running: int) -> None:
        """One step.

        Args:
            started, ended: sequences, since the last one.
            running: those that run now.
        """
        self._step += 1
        if not running:  # the device was empty: nobody came in time
            ended += len(self._open)
            self._open.clear()
            self._learn(ended, False)
            return
        self._open.extend([self._step] * ended)
        taken = min(started, len(self._open))
        for _ in range(taken):
            self._open.popleft()
        self._learn(taken, True)
        late = 0
        while self._open and self._open[0] <= self._step - PATIENCE:
            self._open.popleft()
            late += 1
        self._learn(late, False)

    def _learn(self, count: int, taken: bool) -> None:
        self.share += (taken - self.share) * (1.0 - (1.0 - 1.0 / MEMORY) ** count)
