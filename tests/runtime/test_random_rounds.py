"""Random rounds: padded ones of captured sizes against the generic step."""

from __future__ import annotations

import pytest
import torch

from paceline.models.drafter_loader import load_drafter
from paceline.models.loader import load_model
from support.engines import GOLDEN
from support.random_rounds import RandomRounds, Shape, make_runner, run_both


@pytest.mark.parametrize(("drafter_name", "count"), [("dspark_tiny_b7", 60), ("dflash_tiny_b16", 30)])
def test_rounds_do_what_generic_steps_do(drafter_name: str, count: int) -> None:
    model = load_model(GOLDEN / "qwen3_tiny", device="cpu", dtype="float32")
    drafter = load_drafter(GOLDEN / drafter_name, model)
    shape = Shape(slots=5, length=512)
    padded = make_runner(model, drafter, shape, "eager")
    generic = make_runner(model, drafter, shape, "none")
    rounds = RandomRounds(shape, drafter.config.max_drafts, model.config.vocab_size, seed=7)
    mixed, _ = run_both(padded, generic, rounds, count, exact=False)
    assert mixed > 5, "truncated spans beside full ones"
    assert torch.equal(padded.state.num_computed[:5], generic.state.num_computed[:5])
