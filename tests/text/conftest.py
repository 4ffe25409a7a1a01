"""Fixtures of the text tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from text_cases import build_backend, write_checkpoint

from paceline.text import Tokenizer

# a loaded machine is no defect
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), build_backend())


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)
