"""How CPU threads wait for each other. Import nothing heavy here: it must run before torch is loaded."""

from __future__ import annotations

import os
import sys

SPIN_COUNT = "10000"
"""Turns a thread spins at a barrier before it sleeps: some ten microseconds."""


def sleep_at_barriers() -> None:
    """Have OpenMP threads sleep soon when they wait. Does nothing once torch is loaded, or when the user
    chose.

    libgomp reads ``GOMP_SPINCOUNT`` once, when torch loads it. By default its threads spin for milliseconds
    at each of a step's forty barriers, which beside any other busy process made decoding thirty times slower
    (docs/log.md).
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
