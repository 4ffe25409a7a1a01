"""Stages of the round benchmark."""

from __future__ import annotations

from typing import Final

from paceline.bench.stages import DRAFT_KERNEL, ONE_KERNEL, STAGES

LAYERED: Final = tuple(stage for stage in STAGES if stage not in (ONE_KERNEL, DRAFT_KERNEL))
"""Those of a round whose passes are not one kernel."""
