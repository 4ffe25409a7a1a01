"""Sequences that end at the last position there is, with a step in flight that may have ended them before."""

from __future__ import annotations

import pytest

from paceline.proving.drive import runner_of
from paceline.runtime.plan import SlotInit, TableUpdate
from paceline.sampling.params import SamplingParams
from support.engines import complete, golden_cases, golden_core, tokens_of


@pytest.mark.parametrize("draft_state", ["paged", "capture"])
def test_no_row_or_block_passes_the_end(draft_state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that is nearly always right: spans in flight reach far beyond what the host knows."""
    drafter = "dflash_tiny_b16"
    prompt = golden_cases(drafter)[-1]["input_ids"].tolist()
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    (plain,) = tokens_of(complete(golden_core("qwen3_tiny", num_blocks=64), [prompt], params))
    for length in range(30, 54, 5):
        core = golden_core(
            "qwen3_tiny",
            drafter=drafter,
            lookahead=1,
            num_blocks=64,
            max_model_len=len(prompt) + length,
            speculative_config={"draft_state": draft_state},
        )
        state = runner_of(core).state
        width = state.block_tables.shape[1]
        apply = state.apply

        def checked(inits: list[SlotInit], table: list[TableUpdate]) -> None:
            assert all(update.first + len(update.ids) <= width for update in table)  # noqa: B023
            apply(inits, table)  # noqa: B023

        monkeypatch.setattr(state, "apply", checked)
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        got = complete(core, [prompt, prompt[:20]], [params, params])
        assert got[0][0].token_ids == plain[:length]
        assert core.stats().num_accepted_tokens > 0
        assert int(state.num_computed.max()) <= len(prompt) + length
