"""Synthetic acceptance: the length asked for, on average; never more drafts than were verified; the same in
rounds and in the general step.
"""

from __future__ import annotations

import pytest
import torch

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.ops import synthetic_matches
from paceline.sampling.params import SamplingParams
from paceline.sampling.seeds import mix64
from paceline.speculation.config import SpeculativeConfig
from paceline.speculation.synthetic import conditional_rate
from support.engines import complete, golden_core

PROMPTS = [[5 + i, 7, 11, 13 + i] for i in range(6)]


@pytest.mark.parametrize("num_drafts", [1, 7, 15])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_the_rate_gives_the_length(num_drafts: int, share: float) -> None:
    length = 1 + share * num_drafts
    rate = conditional_rate(length, num_drafts)
    assert sum(rate**j for j in range(num_drafts + 1)) == pytest.approx(length)


@pytest.mark.parametrize("length", [0.5, 8.5])
def test_a_length_out_of_reach_is_refused(length: float) -> None:
    with pytest.raises(ConfigError, match=r"must lie in 1\.\.8"):
        conditional_rate(length, 7)


@pytest.mark.parametrize("length", [0.9, float("inf"), float("nan")])
def test_a_length_no_drafter_can_have_is_refused_before_anything_is_loaded(length: float) -> None:
    with pytest.raises(ConfigError, match="synthetic_accept_length"):
        SpeculativeConfig(synthetic_accept_length=length)


def test_the_engine_refuses_a_length_beyond_its_drafts() -> None:
    with pytest.raises(ConfigError, match=r"with 7 drafts per round it must lie in 1\.\.8"):
        golden_core("qwen3_tiny", drafter="dspark_tiny_b7", speculative_config=synthetic(9.0))


def synthetic(length: float) -> dict[str, float]:
    return {"synthetic_accept_length": length}


@pytest.mark.parametrize("length", [1.0, 3.52, 6.0, 8.0])
def test_draws_have_the_mean_asked_for(length: float) -> None:
    count = 20000
    seeds = torch.tensor([mix64(i) for i in range(count)])
    anchors = torch.arange(count, dtype=torch.int32) % 997
    drafts = torch.full((count,), 7, dtype=torch.int32)
    slots = torch.arange(count, dtype=torch.int32)
    bound = torch.tensor(round(conditional_rate(length, 7) * 2**31))
    accepted = synthetic_matches(seeds, slots, anchors, drafts, 7, bound)
    assert float(accepted.float().mean()) + 1 == pytest.approx(length, abs=0.06)


def test_spans_with_fewer_drafts_accept_no_more_than_they_have() -> None:
    drafts = torch.tensor([-1, 0, 3, 7], dtype=torch.int32)
    slots = torch.arange(4, dtype=torch.int32)
    accepted = synthetic_matches(torch.arange(4), slots, slots, drafts, 7, torch.tensor(2**31))
    assert accepted.tolist() == [0, 0, 3, 7]


@pytest.mark.parametrize("eager", [True, False])
def test_an_engine_commits_what_was_drawn_and_stops_where_it_must(eager: bool) -> None:
    """Truncation at max_tokens stays exact, and rounds accept what the general step accepts."""
    params = SamplingParams(temperature=0.0, max_tokens=97, ignore_eos=True)
    core = golden_core(
        "qwen3_tiny", drafter="dspark_tiny_b7", speculative_config=synthetic(3.52), enforce_eager=eager
    )
    outputs = complete(core, PROMPTS, params)
    assert [len(group[0].token_ids) for group in outputs] == [97] * len(PROMPTS)
    stats = core.stats()
    assert 1 + stats.num_accepted_tokens / stats.num_drafts == pytest.approx(3.52, abs=0.45)
    again = golden_core("qwen3_tiny", drafter="dspark_tiny_b7", speculative_config=synthetic(3.52))
    complete(again, PROMPTS, params)
    assert again.stats().accept_lengths == stats.accept_lengths


def test_the_rate_can_be_changed_while_an_engine_runs() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=97, ignore_eos=True)
    core = golden_core("qwen3_tiny", drafter="dspark_tiny_b7", speculative_config=synthetic(1.0))
    complete(core, PROMPTS, params)
    assert core.stats().num_accepted_tokens == 0
    core.runner.drafting.change_synthetic_rate(1.0)  # type: ignore[attr-defined]
    complete(core, PROMPTS, params)
    assert core.stats().num_accepted_tokens >= 7 * 11 * len(PROMPTS)


def test_it_is_said_loudly(caplog: pytest.LogCaptureFixture) -> None:
    golden_core("qwen3_tiny", drafter="dspark_tiny_b7", speculative_config=synthetic(2.0))
    assert "SYNTHETIC ACCEPTANCE" in caplog.text


def test_it_needs_a_drafter() -> None:
    with pytest.raises(ConfigError, match="names no drafter"):
        _ = EngineConfig.of(model="org/other", speculative_config=synthetic(2.0)).speculation
