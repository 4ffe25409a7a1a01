"""Files that a user names for results: what cannot be written is said before hours of work, not after."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import ConfigError


def check_writable(flag: str, path: str) -> None:
    """Refuse a file that could not be written. What is in it stays.

    Raises:
        ConfigError: no such folder, no permission, or a folder itself.
    """
    file = Path(path)
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {file.parent}. Make it first.")
    if file.exists() and not file.is_file() and not file.is_dir():
        return  # a pipe or a terminal: opened once, by whoever writes
    is_new = not file.exists()
    try:
        file.open("ab").close()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}. Name a file that can be written.") from error
    if is_new:
        file.unlink()
