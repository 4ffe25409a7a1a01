"""Failures that work goes on without: logged, but not each time."""

from __future__ import annotations

import logging


class FailureLog:
    """Logs the failure that is being handled the 1st, 2nd, 4th, 8th, … time.

    Args:
        logger: where to.
        message: what fails, and what becomes of it.
    """

    def __init__(self, logger: logging.Logger, message: str) -> None:
        self._logger, self._message = logger, message
        self._count = 0

    def __call__(self) -> None:
        """To be called in an ``except`` clause."""
        self._count += 1
        if self._count.bit_count() == 1:
            self._logger.exception("%s %d times by now.", self._message, self._count)
