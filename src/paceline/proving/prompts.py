"""Prompts for measuring on real text when none are given: Python to continue, written for this purpose."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import ConfigError

PROMPTS = (
    'def median(values):\n    """Return the median of a list of numbers."""\n',
    'def read_config(path):\n    """Read a JSON file and return its contents as a dict."""\n',
    'class Queue:\n    """A first-in, first-out queue."""\n\n    def __init__(self, maxsize=0):\n',
    'def flatten(items):\n    """Yield the elements of nested lists, depth first."""\n',
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(description=",
    'def is_palindrome(text):\n    """Whether text reads the same backwards."""\n',
    "import unittest\n\n\nclass TestParser(unittest.TestCase):\n    def test_empty(self):\n",
    'def chunks(sequence, size):\n    """Split a sequence into lists of at most size items."""\n',
    "class Vector:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n    def __add__",
    'def count_words(path):\n    """Count how often each word occurs in a file."""\n    counts = {}\n',
    "from dataclasses import dataclass\n\n\n@dataclass\nclass Point:\n",
    'def retry(function, attempts=3):\n    """Call function until it succeeds, at most attempts times."""\n',
    "import logging\n\nlogger = logging.getLogger(__name__)\n\n\ndef handle(request):\n",
    'def parse_date(text):\n    """Parse a date of the form YYYY-MM-DD."""\n',
    "def test_addition():\n    assert 1 + 1 == 2\n\n\ndef test_subtraction():\n",
    'def walk(node):\n    """Visit a tree and yield every node."""\n',
)


def read_prompts(path: str | None) -> list[str]:
    """One prompt per line of a file; the built-in ones without a file.

    Raises:
        ConfigError: the file cannot be read, or has no prompts.
    """
    if path is None:
        return list(PROMPTS)
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--prompts {path} cannot be read: {reason}. Name a text file in UTF-8.") from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompts {path} has no prompts. Write one on each line.")
    return prompts
