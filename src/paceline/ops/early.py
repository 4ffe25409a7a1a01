"""Whether kernels are launched before the ones they wait for have ended; see ``ops/triton/dependent.py``.

Only in graphs: there a launch costs what is to be saved, and everything behind a kernel is known to wait for
it. Where the host launches kernels one by one there is nothing to gain.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_early = False


@contextmanager
def early_launches() -> Iterator[None]:
    """What is captured in here is launched early, on a GPU that can."""
    global _early
    before, _early = _early, True
    try:
        yield
    finally:
        _early = before


def launched_early() -> bool:
    """Whether that is so now."""
    return _early
