"""L1: token for token the same, whatever the mode, for greedy and three seeded samplings.

24 prompts in four samplings and every mode, eight for the other drafters.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from paceline.config import EngineConfig
from paceline.proving.lossless import LosslessProof, Mode, all_modes
from support.engines import DRAFTERS, GOLDEN, golden_prompts

MAIN = "dspark_tiny_b7"
MAX_TOKENS = 20
NUM_PROMPTS = 24


@cache
def proof(drafter: str, count: int, max_tokens: int = MAX_TOKENS) -> LosslessProof:
    target = EngineConfig(
        model=str(GOLDEN / "qwen3_tiny"), device="cpu", dtype="float32", num_blocks=512, max_num_seqs=40
    )
    known = None if drafter == MAIN else proof(MAIN, count, max_tokens).reference
    return LosslessProof(
        target, {"model": str(GOLDEN / drafter)}, golden_prompts(count), max_tokens, reference=known
    )


MODES = {mode.name: mode for mode in all_modes(golden_prompts(NUM_PROMPTS), MAX_TOKENS)}


def check(proof: LosslessProof, mode: Mode, share: int = 1) -> None:
    results = proof.run(mode, share)
    assert "preempted" not in mode.name or any(result.num_preemptions for result in results)
    for result in results:
        where = f"{result.mode}, {result.sampling}"
        assert not result.violations, where
        assert result.num_differing == 0 and result.num_tokens > 0
        # The planner goes by the clock: on a busy machine it may find that drafting does not pay.
        if mode.speculative is not None and "planned" not in mode.name:
            assert result.accept_length is not None and result.accept_length > 1.02, where
        # On a CPU the general pass takes what is sampled with penalties or sorted, and has no chains.
        hedged = mode.speculative is not None and "hedge" in mode.speculative and "planned" not in mode.name
        if hedged and result.sampling in ("greedy", "T = 1"):
            assert result.hedge_wins > 0 and result.hedge_losses > 0, where
        if mode.passes > 1:
            assert result.num_cached_tokens > 0


@pytest.mark.parametrize("mode", [name for name in MODES if name != "drafts"])  # the first pass of "cached"
def test_a_drafter_changes_nothing_in_any_mode(mode: str) -> None:
    check(proof(MAIN, NUM_PROMPTS), MODES[mode])


@pytest.mark.parametrize(
    ("drafter", "mode"),
    [
        *((name, "drafts, lookahead, preempted") for name in DRAFTERS if name != MAIN),
        ("dflash_tiny_b16", "drafts, captured state"),
        ("dflash_tiny_b16", "drafts, hedged"),
    ],
)
def test_every_drafter_changes_nothing(drafter: str, mode: str) -> None:
    check(proof(drafter, NUM_PROMPTS), MODES[mode], 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("mode", MODES)
def test_everything(drafter: str, mode: str) -> None:
    """300 prompts in four samplings in every mode, none left out; 60 of them with each other drafter."""
    wanted = next(item for item in all_modes(golden_prompts(300), MAX_TOKENS) if item.name == mode)
    check(proof(drafter, 300), replace(wanted, share=1), 1 if drafter == MAIN else 5)
