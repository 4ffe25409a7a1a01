"""A round taken apart by the profiler: every stage has kernels, and they fit into the round."""

from __future__ import annotations

import pytest

from paceline.bench.round import run_round
from paceline.config import EngineConfig
from support.engines import GOLDEN
from support.stages import LAYERED

pytestmark = pytest.mark.gpu


def test_every_kernel_of_a_round_is_charged_to_a_stage() -> None:
    engine = EngineConfig.of(
        model=str(GOLDEN / "qwen3_tiny"),
        device="cuda",
        num_blocks=512,
        max_num_seqs=4,
        speculative_config={
            "model": str(GOLDEN / "dspark_tiny_b7"),
            "synthetic_accept_length": 3.0,
            "verify_planner": "off",
        },
    )
    rows = {row["stage"]: row for row in run_round(engine, 2, 64, 4).results}
    assert set(LAYERED) <= set(rows)
    assert 0 <= rows["idle between"]["share"] < 1 and 0 <= rows["idle within rounds"]["share"] < 1
    assert all(rows[stage]["kernels"] >= 1 and rows[stage]["ms"] > 0 for stage in LAYERED)
    assert rows["round"]["kernels"] == pytest.approx(sum(rows[stage]["kernels"] for stage in LAYERED))
