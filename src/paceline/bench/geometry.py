"""Geometries of real checkpoints, without weights: what to measure when only the shape matters.

A folder ``geometries/NAME`` holds the ``config.json`` of a Qwen3 model, or of a drafter for one
(``TARGET-METHOD-bBLOCK``); its weights are drawn at random.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.speculation.config import SpeculativeConfig

FOLDER = Path(__file__).parent / "geometries"


def geometry_names() -> list[str]:
    """Every geometry there is, drafters included."""
    return sorted(path.name for path in FOLDER.iterdir() if path.is_dir())


def geometry_folder(name: str) -> Path:
    """The folder of a geometry.

    Raises:
        ConfigError: no such name.
    """
    if name not in geometry_names():
        raise ConfigError(f"There is no geometry {name!r}. There are {', '.join(geometry_names())}.")
    return FOLDER / name


def with_geometry(engine: EngineConfig, target: str | None, drafter: str | None) -> EngineConfig:
    """Engine options with random weights at a geometry.

    Args:
        engine: options that name no model.
        target: name of a geometry; None changes nothing.
        drafter: of a drafter, without the target's name, such as ``dspark-b7``; None leaves drafting off.

    Raises:
        ConfigError: an unknown name, a model or drafter beside a geometry, or a drafter's geometry without a
            target's.
    """
    if target is None:
        if drafter is not None:
            raise ConfigError(f"draft_geometry is {drafter!r}, but no geometry is named. Add --geometry.")
        return engine
    if engine.model is not None:
        raise ConfigError(f"Both a model ({engine.model}) and a geometry ({target}) are named. Name one.")
    speculation = engine.speculative_config
    if drafter is not None:
        folder = str(geometry_folder(f"{target}-{drafter}"))
        given = SpeculativeConfig() if speculation is None else speculation
        if given.model is not None:
            raise ConfigError(
                f"Both a drafter ({given.model}) and a drafter's geometry ({drafter}) are named. Name one."
            )
        speculation = msgspec.structs.replace(given, model=folder)
    return msgspec.structs.replace(
        engine,
        model=str(geometry_folder(target)),
        load_format="dummy",
        speculative_config=speculation,
    )


def plain(engine: EngineConfig) -> EngineConfig:
    """The same engine without a drafter."""
    return msgspec.structs.replace(engine, speculative_config=SpeculativeConfig())
