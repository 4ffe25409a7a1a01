"""Where what was compiled or measured on this machine is kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """A folder of ours in the user's cache (XDG base directories); it need not exist."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "paceline" / name
