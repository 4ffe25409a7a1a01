"""The process that ``startup`` starts: reads engine options, makes the engine, draws one token, and prints
when what happened, as JSON: [[seconds on the monotonic clock, what], ...].
"""

from __future__ import annotations

import time

_MARKS = [(time.monotonic(), "Python is running")]

import json  # noqa: E402 -- the clock comes before every import
import logging  # noqa: E402
import sys  # noqa: E402


class _Clock(logging.Handler):
    """Notes when each line was logged."""

    def emit(self, record: logging.LogRecord) -> None:
        _MARKS.append((time.monotonic(), record.getMessage()))


def main() -> None:
    """See the module."""
    import msgspec

    from paceline.collector import collector_paused
    from paceline.config import EngineConfig
    from paceline.errors import PacelineError

    engine = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    try:
        with collector_paused():  # as where an engine has a process of its own
            import torch  # noqa: F401

            from paceline.bench.driver import Driver

            _MARKS.append((time.monotonic(), "torch and the package are imported"))
            logger = logging.getLogger("paceline")
            logger.setLevel(logging.INFO)
            logger.addHandler(_Clock())
            driver = Driver(engine, prepare=False)
        _MARKS.append((time.monotonic(), "the engine can be used"))
        driver.run([[1, 2, 3, 4]], 1)
    except PacelineError as error:
        sys.exit(str(error))
    _MARKS.append((time.monotonic(), "the first token is there"))
    print(json.dumps(_MARKS))


if __name__ == "__main__":
    main()
