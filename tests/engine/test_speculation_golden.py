"""Drafting through the whole engine against the independent reference: round by round, all dialects."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.proving.drive import Round, RoundRecorder
from paceline.proving.gates import nothing_held, same_rounds
from paceline.sampling.params import SamplingParams
from support.engines import DRAFTERS, GOLDEN, complete, golden_cases, golden_core, golden_meta, tokens_of


def expected_rounds(case: dict[str, Any], num_drafts: int | None = None) -> list[Round]:
    """The trace of a case, up to the first decision too close to call."""
    rounds = []
    for entry in case["trace"]:
        if min(entry["min_draft_gap"], entry["min_verify_gap"]) < 1e-3:
            break
        drafts = entry["drafts"][:num_drafts]
        tokens = [*entry["drafts"][: entry["accepted"]], entry["next"]]
        rounds.append(Round(0, [0] * (entry["start"] + 1), drafts, tokens))
    return rounds


def of_prompt(recorder: RoundRecorder, prompt: list[int]) -> list[Round]:
    return [item for item in recorder.rounds if item.context[: len(prompt)] == prompt]


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_round_of_every_trace(name: str, lookahead: int) -> None:
    """All prompts at once, so that rounds of different lengths, plain rows and prefills share steps."""
    core = golden_core("qwen3_tiny", drafter=name, lookahead=lookahead, max_num_batched_tokens=112)
    recorder = RoundRecorder.on(core)
    cases, meta = golden_cases(name), golden_meta(name)
    prompts = [case["input_ids"].tolist() for case in cases]
    params = [
        SamplingParams(temperature=0.0, max_tokens=len(case["trace_output_ids"]) + 20, ignore_eos=True)
        for case in cases
    ]
    got = tokens_of(complete(core, prompts, params))
    num_rounds = 0
    for i, (case, prompt) in enumerate(zip(cases, prompts, strict=True)):
        offline = case["trace_output_ids"].tolist()
        assert got[i][: len(offline)] == offline
        if len(prompt) == 1:
            continue  # every other prompt might begin like it; it has a test of its own
        expected = expected_rounds(meta["cases"][i])
        num_rounds += len(expected)
        assert not same_rounds(expected, of_prompt(recorder, prompt))
    assert num_rounds > 10
    assert not nothing_held(core)


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_prompt_of_one_token(name: str) -> None:
    core = golden_core("qwen3_tiny", drafter=name)
    recorder = RoundRecorder.on(core)
    case = golden_cases(name)[0]
    assert len(case["input_ids"]) == 1
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    complete(core, [case["input_ids"].tolist()], params)
    assert not same_rounds(expected_rounds(golden_meta(name)["cases"][0]), recorder.rounds)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ["dflash_tiny_b16", "dspark_tiny_b7_rnn"])
def test_fewer_drafts_are_the_first_ones(name: str, count: int) -> None:
    core = golden_core("qwen3_tiny", drafter=name, speculative_config={"num_speculative_tokens": count})
    recorder = RoundRecorder.on(core)
    case, meta = golden_cases(name)[2], golden_meta(name)["cases"][2]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    (tokens,) = tokens_of(complete(core, [case["input_ids"].tolist()], params))
    assert tokens == case["trace_output_ids"].tolist()[:20]
    first = recorder.rounds[0]
    assert first.drafts == meta["trace"][0]["drafts"][:count]
    assert first.num_accepted == min(count, meta["trace"][0]["accepted"])
    assert all(len(item.drafts) <= count for item in recorder.rounds)


@pytest.mark.parametrize(("name", "trained"), [("dflash_tiny_b16", 15), ("dspark_tiny_b6_speculators", 6)])
def test_more_drafts_than_trained_are_refused(name: str, trained: int) -> None:
    with pytest.raises(ConfigError, match=rf"num_speculative_tokens.* {trained + 1}\b.* {trained}\b"):
        golden_core("qwen3_tiny", drafter=name, speculative_config={"num_speculative_tokens": trained + 1})


def test_the_method_is_the_checkpoints_or_refused() -> None:
    golden_core("qwen3_tiny", drafter="dspark_tiny_b7", speculative_config={"method": "dspark"})
    with pytest.raises(ConfigError, match=r"asks for method 'dflash'.*'dspark' drafter"):
        golden_core("qwen3_tiny", drafter="dspark_tiny_b7", speculative_config={"method": "dflash"})


def test_without_a_config_nothing_is_drafted() -> None:
    configs: list[dict[str, str] | None] = [None, {}]
    for config in configs:
        core = golden_core("qwen3_tiny", speculative_config=config)
        params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
        complete(core, [[5, 6, 7]], params)
        assert core.stats().num_drafts == 0 and core.stats().accepted_per_position == []


def test_a_damaged_trace_is_noticed(tmp_path: Path) -> None:
    """The gate itself: another layout of the same weights is not the same rounds."""
    folder = tmp_path / "other"
    shutil.copytree(GOLDEN / "dspark_tiny_b7", folder)
    config = json.loads((folder / "config.json").read_text())
    config["block_size"] = 6
    (folder / "config.json").write_text(json.dumps(config))
    core = golden_core("qwen3_tiny", speculative_config={"model": str(folder)})
    recorder = RoundRecorder.on(core)
    case = golden_cases("dspark_tiny_b7")[2]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    complete(core, [case["input_ids"].tolist()], params)
    assert same_rounds(expected_rounds(golden_meta("dspark_tiny_b7")["cases"][2]), recorder.rounds)
