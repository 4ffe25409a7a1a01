"""What a recorded round says of its drafts."""

from __future__ import annotations

import pytest

from paceline.proving.drive import Round, RoundRecorder, complete, runner_of
from paceline.proving.gates import accepted_as_coupled
from paceline.proving.redraft import Redrafted, redraft
from paceline.sampling.params import SamplingParams
from support.engines import golden_core, golden_prompts


@pytest.mark.parametrize(
    ("tokens", "accepted", "standing"),
    [([9], 0, 0), ([5, 9], 1, 1), ([5, 6, 7, 1], 3, 3), ([5, 9, 7, 1], 3, 1), ([9, 6], 1, 0)],
)
def test_a_chains_drafts_are_not_the_rounds_own(tokens: list[int], accepted: int, standing: int) -> None:
    found = Round(life=0, context=[1], drafts=[5, 6, 7], tokens=tokens)
    assert (found.num_accepted, found.num_standing) == (accepted, standing)


def test_drafts_stand_as_often_beside_chains() -> None:
    speculative = {"hedge": 8, "verify_planner": "off"}
    core = golden_core(
        "qwen3_tiny", drafter="dspark_tiny_b7", max_num_seqs=40, speculative_config=speculative
    )
    recorder = RoundRecorder.on(core)
    prompts = golden_prompts(36, seed=7)
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=32, ignore_eos=True) for i in range(36)]
    complete(core, prompts, params)
    stage = runner_of(core).drafting
    assert stage is not None
    assert accepted_as_coupled(redraft(stage.drafter, recorder.rounds)) == []
    more = [item for item in recorder.rounds if item.num_accepted > item.num_standing]
    assert more, "rounds that a chain won"


def test_what_a_chain_wins_is_no_excess() -> None:
    own, chains = Round(0, [1], [5], [5, 9]), Round(0, [1], [5], [6, 9])
    redrafted = [Redrafted(item, [5], [1.0], [0.5], [5]) for item in [own, chains] * 200]
    assert accepted_as_coupled(redrafted) == []
