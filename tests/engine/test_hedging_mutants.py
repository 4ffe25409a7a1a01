"""Hedged rounds leave no trace but the tokens they win: gates, and planted mistakes that they must catch."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from paceline.engine.core import EngineCore
from paceline.ops import reference_attention
from paceline.proving.drive import RoundRecorder
from paceline.proving.gates import Violation, drafts_as_recomputed, nothing_held, same_tokens, second_turns
from paceline.proving.redraft import redraft
from paceline.runtime import hedging
from paceline.runtime.acceptance import Chains, accept_chains
from paceline.runtime.hedging import HedgedVerify
from paceline.sampling.params import SamplingParams
from support.engines import complete, drafter_of, golden_cases, golden_core, golden_prompts, tokens_of

DRAFTER = "dspark_tiny_b7"
PROMPTS = golden_prompts(8, seed=6)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
RANDOM = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)


def hedged_core(draft_state: str = "paged", hedge: int = 6) -> EngineCore:
    speculative = {"hedge": hedge, "draft_state": draft_state}
    return golden_core("qwen3_tiny", drafter=DRAFTER, speculative_config=speculative)


def assert_hedged(core: EngineCore) -> None:
    stats = core.stats().hedging
    assert stats is not None and stats.num_rounds and stats.num_wins and stats.num_losses


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    core = golden_core("qwen3_tiny")
    return [tokens_of(complete(core, PROMPTS, params)) for params in (GREEDY, RANDOM)]


def gate_tokens(expected: list[list[list[int]]]) -> list[Violation]:
    """Greedy and sampled output, cold and cached."""
    violations, core = [], hedged_core()
    for params, want in zip((GREEDY, RANDOM), expected, strict=True):
        for _ in range(2):
            violations += same_tokens(want, tokens_of(complete(core, PROMPTS, params)))
    assert_hedged(core)
    return violations + nothing_held(core)


def gate_drafts(draft_state: str) -> list[Violation]:
    """Drafts against those made from the whole text, cold and cached: of winners' rows, and no others."""
    core = hedged_core(draft_state)
    recorder = RoundRecorder.on(core)
    for _ in range(2):
        complete(core, PROMPTS, GREEDY)
    assert_hedged(core)
    return drafts_as_recomputed(redraft(drafter_of(core), recorder.rounds))


def gate_turns() -> list[Violation]:
    """Second turns, on the K/V that rounds of the first have left."""
    prompt = golden_cases("qwen3_tiny")[4]["input_ids"].tolist()
    conversations = [
        ([20 + i, *prompt], msgspec.structs.replace(RANDOM, seed=i, max_tokens=62 + i % 7 - len(prompt)))
        for i in range(6)
    ]
    probe = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=20)
    core = hedged_core()
    violations = second_turns(core, hedged_core(), conversations, [46, 151, 298], probe)
    assert_hedged(core)
    return violations


def test_the_unharmed_engine_passes(expected: list[list[list[int]]]) -> None:
    assert not gate_tokens(expected)
    assert not gate_turns()


def test_stops_and_limits_inside_a_chain_cut_it() -> None:
    """Every output cut at a token of its own, or by its length: as plain decoding is cut, before anything is
    committed or counted.
    """
    whole = tokens_of(complete(golden_core("qwen3_tiny"), PROMPTS, RANDOM))
    prompts, params = [], []
    for i, (prompt, tokens) in enumerate(list(zip(PROMPTS, whole, strict=True))[:4]):
        for at in range(12, 20):
            cut = {"max_tokens": at} if (i + at) % 2 else {"stop_token_ids": [tokens[at]]}
            prompts.append(prompt)
            params.append(msgspec.structs.replace(RANDOM, **cut))
    plain, core = complete(golden_core("qwen3_tiny"), prompts, params), hedged_core(hedge=32)
    won: list[int] = []
    commit = core.scheduler.commit

    def counted(step: Any, results: list[Any]) -> Any:
        won.extend(result.won for result in results)
        return commit(step, results)

    core.scheduler.commit = counted  # type: ignore[method-assign]
    for (ours,), (theirs,) in zip(complete(core, prompts, params), plain, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert (ours.finish_reason, ours.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
    stats = core.stats().hedging
    assert stats is not None and 0 < stats.num_tokens < sum(won), "some chains must have been cut"
    assert not nothing_held(core)


@pytest.mark.parametrize("draft_state", ["paged", "capture"])
def test_draft_state_is_that_of_the_winners(draft_state: str) -> None:
    assert not gate_drafts(draft_state)


def test_rows_of_losers_that_are_committed(
    monkeypatch: pytest.MonkeyPatch, expected: list[list[list[int]]]
) -> None:
    replaced = HedgedVerify._replaced
    monkeypatch.setattr(
        HedgedVerify,
        "_replaced",
        lambda self, parents, won: replaced(self, parents, torch.ones_like(won)),
    )
    assert gate_tokens(expected)


@pytest.mark.parametrize("losers", [True, False], ids=["all are copied", "none is copied"])
def test_keys_and_values_of_the_wrong_rows(monkeypatch: pytest.MonkeyPatch, losers: bool) -> None:
    replaced, copy = HedgedVerify._replaced, HedgedVerify._copy_kv
    parents: list[Tensor] = []

    def noted(self: HedgedVerify, of: Tensor, won: Tensor) -> Tensor:
        parents.append(of)
        return replaced(self, of, won)

    def wrong(self: HedgedVerify, kv_slots: Tensor, rows: Tensor) -> None:
        if losers:
            copy(self, kv_slots, replaced(self, parents[-1], torch.ones_like(parents[-1]).bool()))

    monkeypatch.setattr(HedgedVerify, "_replaced", noted)
    monkeypatch.setattr(HedgedVerify, "_copy_kv", wrong)
    assert gate_turns()


@pytest.mark.parametrize("shift", [1, -1], ids=["the parent's next row", "not the branch's row"])
def test_a_wrong_ancestor(
    monkeypatch: pytest.MonkeyPatch, shift: int, expected: list[list[list[int]]]
) -> None:
    """A chain parts from its parent one row too late, or too early."""
    group = reference_attention._group

    def shifted(spans: list[Any], *arguments: Any) -> Any:
        moved = [
            span._replace(shared=span.shared + shift, own_slot=span.own_slot + shift)
            if span.own_slot >= 0
            else span
            for span in spans
        ]
        return group(moved, *arguments)

    monkeypatch.setattr(reference_attention, "_group", shifted)
    assert gate_tokens(expected)


def test_rows_of_the_wrong_chain_counted(
    monkeypatch: pytest.MonkeyPatch, expected: list[list[list[int]]]
) -> None:
    def neighbour(accepted: Tensor, sampled: Tensor, num_drafts: Tensor, chains: Chains) -> Any:
        wrong = chains._replace(tokens=chains.tokens.roll(1, 0), sampled=chains.sampled.roll(1, 0))
        return accept_chains(accepted, sampled, num_drafts, wrong)

    monkeypatch.setattr(hedging, "accept_chains", neighbour)
    assert gate_tokens(expected)


def test_the_wrong_winner(monkeypatch: pytest.MonkeyPatch, expected: list[list[list[int]]]) -> None:
    """As many drafts as the winner has, in the rows of its neighbour."""

    def neighbour(accepted: Tensor, sampled: Tensor, num_drafts: Tensor, chains: Chains) -> Any:
        found, won = accept_chains(accepted, sampled, num_drafts, chains)
        return found, won.roll(1, 0)

    monkeypatch.setattr(hedging, "accept_chains", neighbour)
    assert gate_tokens(expected)
