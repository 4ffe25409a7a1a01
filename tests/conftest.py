"""Fixtures shared by several packages' tests. Imports are local: most tests need none of this."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from paceline.text import Tokenizer
    from support.server_cases import Api, ScriptedEngine

# a loaded machine is no defect
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder with a tokenizer and a chat template, without a model."""
    from support.text_cases import build_backend, write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("text"), build_backend())


@pytest.fixture(scope="session")
def tokenizer(text_folder: Path) -> Tokenizer:
    """Its tokenizer."""
    from paceline.text import Tokenizer

    return Tokenizer.from_folder(text_folder)


@pytest.fixture
def scripted(text_folder: Path) -> ScriptedEngine:
    """An engine that plays a script."""
    from support.server_cases import ScriptedEngine

    return ScriptedEngine(text_folder)


@pytest.fixture
def api(scripted: ScriptedEngine) -> Api:
    """The HTTP API over it."""
    from support.server_cases import Api

    return Api(scripted)
