"""Failures that work goes on without: logged, but not each time."""

from __future__ import annotations

import logging


class FailureLog:
    """Logs the failure that is being handled the 1st, 2nd, 4th, 8th, … time.

    Args:
        logger: where to.
        message: what fails, and what becomes of it.

    Attributes:
        count: how often it did.
    """

    def __init__(self, logger: logging.Logger, message: str) -> None:
        self._logger, self._message = logger, message
        self.count = 0

    def __call__(self) -> None:
        """To be called in an ``except`` clause."""
        self.count += 1
        if self.count.bit_count() == 1:
            self._logger.exception("%s %d times by now.", self._message, self.count)
