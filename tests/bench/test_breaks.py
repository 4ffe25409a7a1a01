"""The break study: against rounds the engine really ran, and by hand."""

from __future__ import annotations

import pytest

from paceline.bench.breaks import Break, study, summarise
from paceline.proving.drive import RoundRecorder, complete
from paceline.sampling.params import SamplingParams
from support.engines import drafter_of, golden_core, golden_prompts


@pytest.mark.parametrize("name", ("dspark_tiny_b7", "dflash_tiny_b16"))
def test_rounds_break_where_the_engine_saw_them_break(name: str) -> None:
    core = golden_core("qwen3_tiny", drafter=name)
    recorder = RoundRecorder.on(core)
    complete(core, golden_prompts(8), SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    num_drafts = core.scheduler.drafting.num_drafts
    last = {item.life: item.start + len(item.tokens) for item in recorder.rounds}
    whole = [item for item in recorder.rounds if item.start + num_drafts <= last[item.life]]
    whole.sort(key=lambda item: item.life)
    breaks = study(drafter_of(core), recorder.rounds, num_drafts)
    assert len(breaks) == len(whole) > 10
    for item, engine in zip(breaks, whole, strict=True):  # near its end a request verifies fewer drafts
        assert min(item.accepted, len(engine.drafts)) == engine.num_accepted
    for item in breaks:
        assert (item.gain > 0) == (item.rank == 2), "a hedge helps where the second best was right"
        assert (item.rank is None) == (item.accepted == num_drafts) and item.rank != 1
        assert item.accepted + item.gain <= num_drafts
    assert any(item.gain > 1 for item in breaks), "some tail counted"


@pytest.mark.parametrize("name", ("dspark_tiny_b7", "dflash_tiny_b16"))
def test_chains_win_what_the_study_says_they_should(name: str) -> None:
    core = golden_core("qwen3_tiny", drafter=name, speculative_config={"hedge": 8})
    recorder = RoundRecorder.on(core)
    complete(core, golden_prompts(8), SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    num_drafts, won, expected = core.scheduler.drafting.num_drafts, [], []
    for life in {item.life for item in recorder.rounds}:
        rounds = [item for item in recorder.rounds if item.life == life]
        # An answer's first block is drafted with its prompt, without chains.
        breaks = study(drafter_of(core), rounds, num_drafts)[1:]
        gains = [item.gain if item.accepted <= 2 else 0 for item in breaks]
        expected += gains
        # Near its end a request verifies fewer drafts, and what its chain had beyond the end is no gain.
        pairs = zip(gains, rounds[1:], strict=False)
        won += [r.num_accepted - r.num_standing if len(r.drafts) == num_drafts else gain for gain, r in pairs]
    assert won == expected and sum(expected) > 5


def test_summary() -> None:
    breaks = [Break(0, 2, 3), Break(0, 5, 0), Break(1, 2, 1), Break(2, None, 0)]
    rows = {row["at"]: row for row in summarise(breaks, 2)}
    assert rows["0"] == {
        "at": "0",
        "share": 0.5,
        "second": 0.5,
        "third": 0.0,
        "fourth": 0.0,
        "gain": 0.75,
        "accept_length": None,
    }
    assert rows["1"]["second"] == 1.0 and rows["1"]["share"] == 0.25
    assert rows["{}"]["accept_length"] == 1.75
    assert rows["{0,1}"]["gain"] == 1.0 and rows["{0,1}"]["accept_length"] == 2.75
    assert list(rows) == ["0", "1", "{}", "{0}", "{1}", "{0,1}"]
