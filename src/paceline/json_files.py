"""JSON files of checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """The object in a JSON file; {} where there is no file and none is required.

    Raises:
        CheckpointError: the file is missing or is not a JSON object.
    """
    if not required and not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; a checkpoint folder needs a config.json") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__}, expected an object")
    return values
