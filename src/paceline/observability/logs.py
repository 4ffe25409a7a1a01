"""Log lines: their format, and the periodic line of a serving engine."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from paceline.errors import ConfigError, EngineDeadError

if TYPE_CHECKING:
    from paceline.engine.messages import EngineStats

logger = logging.getLogger(__name__)

LEVELS = ("debug", "info", "warning", "error", "critical")
LOG_INTERVAL_S = 10.0


def setup_logging(level: str = "info") -> None:
    """Send the package's log lines to standard error, one format for all. Other packages' loggers are left
    alone.

    Raises:
        ConfigError: an unknown level.
    """
    if level.lower() not in LEVELS:
        raise ConfigError(f"log level is {level!r}; it must be one of {', '.join(LEVELS)}.")
    root = logging.getLogger("paceline")
    root.setLevel(level.upper())
    root.propagate = False
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(
            logging.Formatter("%(levelname)-7s %(asctime)s [%(name)s] %(message)s", datefmt="%m-%d %H:%M:%S")
        )
        root.addHandler(handler)


class StatsLine:
    """Makes the periodic line out of successive snapshots."""

    def __init__(self) -> None:
        self._last: EngineStats | None = None
        self._last_s = 0.0

    def next(self, stats: EngineStats, now_s: float) -> str | None:
        """The line for the time since the previous snapshot, or None when nothing happened and nothing is
        under way.

        Args:
            stats: the engine's counters.
            now_s: time of the snapshot on a monotonic clock.
        """
        last, last_s = self._last, self._last_s
        self._last, self._last_s = stats, now_s
        if last is None or now_s <= last_s:
            return None
        if stats.num_steps < last.num_steps:
            return None  # the engine was restarted: its counters began again
        prompt = stats.prompt_tokens - last.prompt_tokens
        generation = stats.generation_tokens - last.generation_tokens
        if not (prompt or generation or stats.num_running or stats.num_waiting):
            return None
        elapsed_s = now_s - last_s
        queries = stats.prefix_queries - last.prefix_queries
        hits = stats.prefix_hits - last.prefix_hits
        hit_rate = f"{hits / queries:.1%}" if queries else "-"
        line = (
            f"prompt {prompt / elapsed_s:.1f} tok/s, generation {generation / elapsed_s:.1f} tok/s, "
            f"running {stats.num_running}, waiting {stats.num_waiting}, "
            f"K/V {stats.kv_cache_usage:.1%}, prefix hits {hit_rate}"
        )
        drafts = _drafts_line(stats, last, elapsed_s)
        return line if drafts is None else f"{line}\n{drafts}"


def _drafts_line(stats: EngineStats, last: EngineStats, elapsed_s: float) -> str | None:
    """What speculation did since ``last``; None when nothing was drafted."""
    rounds = stats.num_drafts - last.num_drafts
    if rounds <= 0:
        return None
    drafted = stats.num_draft_tokens - last.num_draft_tokens
    accepted = stats.num_accepted_tokens - last.num_accepted_tokens
    before = last.accepted_per_position or [0] * len(stats.accepted_per_position)
    rates = " ".join(
        f"{(new - old) / rounds:.2f}" for new, old in zip(stats.accepted_per_position, before, strict=True)
    )
    line = (
        f"drafts: accept length {1 + accepted / rounds:.2f}, accepted {accepted} of {drafted} tokens "
        f"({accepted / drafted:.1%}), {accepted / elapsed_s:.1f} of {drafted / elapsed_s:.1f} tok/s, "
        f"by position {rates}"
    )
    now, then = stats.hedging, last.hedging
    if now is None or then is None:
        return line
    wins, losses = now.num_wins - then.num_wins, now.num_losses - then.num_losses
    if wins + losses == 0:
        return line
    return (
        f"{line}\nhedges: {now.chains} chains each, {wins} of {wins + losses} spans won, "
        f"{now.num_tokens - then.num_tokens} tokens gained"
    )


async def log_stats(read: Callable[[], Awaitable[EngineStats]], interval_s: float = LOG_INTERVAL_S) -> None:
    """Log a line every ``interval_s`` while the engine is active. Runs until cancelled.

    Args:
        read: gets a snapshot.
        interval_s: seconds between lines.
    """
    line = StatsLine()
    while True:
        try:
            text = line.next(await read(), time.monotonic())
        except EngineDeadError:
            text = None  # reported by whoever supervises it
        if text is not None:
            for line_ in text.splitlines():
                logger.info(line_)
        await asyncio.sleep(interval_s)
