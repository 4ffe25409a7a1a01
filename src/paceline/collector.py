"""Python's garbage collector, kept away while an engine starts.

Importing torch makes a million objects that stay, and starting an engine makes more. The collector would look
at all of them time and again: that is a quarter of the time that imports take.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Nothing is collected in here, unless by ``gc.collect``, which looks at what was made in here only."""
    enabled, was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
        if enabled:
            gc.enable()
