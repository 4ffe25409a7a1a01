"""Last rows of prompts in the decode round's own pass: the same tokens, drafts and draft state."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
from test_rounds import Shallow, generic_core, round_core

from paceline.cache import sharing
from paceline.engine.core import EngineCore
from paceline.engine.messages import EngineRequest
from paceline.proving.drive import RoundRecorder, runner_of
from paceline.proving.gates import same_rounds
from paceline.runtime.graphs import RoundSet
from paceline.runtime.plan import Span
from paceline.sampling.params import SamplingParams
from paceline.speculation.survival import Survival
from support.engines import complete, golden_prompts, tokens_of

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
]


def watched(core: EngineCore) -> list[tuple[list[int], bool]]:
    """Leads of the spans of each round with prompts, and whether attention was told of common keys."""
    rounds = runner_of(core).rounds
    assert rounds is not None
    seen: list[tuple[list[int], bool]] = []
    run, together = rounds.run, rounds.shapes.with_common_keys

    def counted(spans: Any, kind: Any, depth: Any) -> Any:
        told.clear()
        result = run(spans, kind, depth)
        if any(span.lead for span in spans):
            seen.append(([span.lead for span in spans], bool(told)))
        return result

    def noted(shape: Any) -> Any:
        told.append(shape)
        return together(shape)

    told: list[Any] = []
    rounds.run = counted  # type: ignore[method-assign, assignment]
    rounds.shapes.with_common_keys = noted  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(
    ("drafter", "capture"),
    [(None, False), ("dspark_tiny_b7", False), ("dspark_tiny_b7", True), ("dflash_tiny_b16", False)],
)
def test_prompts_in_rounds_change_no_token(
    drafter: str | None, capture: bool, lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cold and behind cached prefixes, alone and beside others, with and without keys in common."""
    monkeypatch.setattr(sharing, "MIN_SAVED_TOKENS", 2 * 32)
    rng = random.Random(5)
    shared = [rng.randrange(3, 320) for _ in range(40)]
    prompts = [
        shared[: 40 * (i % 3 > 0)] + [rng.randrange(3, 320) for _ in range(1 + 3 * i)] for i in range(12)
    ]
    params = [
        SamplingParams(seed=i, max_tokens=4 + 5 * (i % 6), ignore_eos=True, **KINDS[i % 3]) for i in range(12)
    ]
    want = tokens_of(complete(generic_core(), prompts, params))
    core = round_core(drafter, lookahead, capture=capture, slots=8)
    seen = watched(core)
    for _ in range(2):
        assert tokens_of(complete(core, prompts, params)) == want
    assert tokens_of(complete(core, prompts[3:5], params[3:5])) == want[3:5]
    assert any(leads.count(0) for leads, _ in seen), "beside sequences that decode"
    assert any(not leads.count(0) for leads, _ in seen), "and without"
    assert any(sum(lead > 0 for lead in leads) > 1 for leads, _ in seen), "several at once"
    assert any(told for _, told in seen) and any(not told for _, told in seen)
    core.check()


@pytest.mark.parametrize("lookahead", [0, 1])
def test_prompts_in_packed_rounds_change_no_token(lookahead: int) -> None:
    """They take rows of drafts, and how many are verified is what the device says."""
    params = [SamplingParams(seed=i, max_tokens=10 + i, ignore_eos=True, **KINDS[i % 3]) for i in range(24)]
    texts = golden_prompts(len(params), seed=4)
    want = tokens_of(complete(generic_core(), texts, params))
    core = round_core("dspark_tiny_b7", lookahead, slots=12)
    core.scheduler.planner = Shallow(Survival(12, 7))
    seen = watched(core)
    runner = runner_of(core)
    assert runner.rounds is not None
    launch, with_prompts, planned = runner.launch, runner.rounds.with_prompts, list[Any]()

    def launched(plan: Any) -> Any:
        planned[:] = [plan.depth]
        return launch(plan)

    def asked(spans: Any, kinds: Any, depth: Any) -> Any:
        assert depth == planned[0]
        return with_prompts(spans, kinds, depth)

    runner.launch = launched  # type: ignore[method-assign, assignment]
    runner.rounds.with_prompts = asked  # type: ignore[method-assign]
    for _ in range(2):
        assert tokens_of(complete(core, texts, params)) == want
    assert sum(0 in leads for leads, _ in seen) > 5
    speculation = core.scheduler.speculation
    assert 0 < speculation.num_accepted_tokens < speculation.num_draft_tokens


@pytest.mark.parametrize("drafter", ["dspark_tiny_b7", "dflash_tiny_b16"])
def test_drafts_behind_a_prompt_are_the_same(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round for round, whether the prompt ran in a round or by rows."""
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = [prompt[:12] for prompt in golden_prompts(6, seed=1)]
    seen = []
    for joins in (True, False):
        core = round_core(drafter, 0)
        rounds = runner_of(core).rounds
        assert rounds is not None
        if not joins:
            monkeypatch.setattr(rounds, "with_prompts", lambda spans, kinds, depth: kinds)
        joined = watched(core)
        recorder = RoundRecorder.on(core)
        complete(core, prompts, greedy)
        assert bool(joined) == joins
        seen.append(recorder.rounds)
    assert len(seen[0]) > 10 and not same_rounds(*seen)


def test_synthetic_acceptance_behind_a_prompt_is_the_same() -> None:
    """It is keyed by where drafts stand, in a round with prompts as by rows."""
    prompts = [[5 + i, 6, 7 + i, 9][: 2 + i % 3] for i in range(12)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=6 + 5 * (i % 5), ignore_eos=True, seed=i)
        for i in range(12)
    ]
    seen = []
    for joins in (True, False):
        core = round_core("dspark_tiny_b7", 0, synthetic_rate=0.7)
        if not joins:
            runner_of(core).rounds = None
        joined = watched(core) if joins else []
        seen.append(tokens_of(complete(core, prompts, params)))
        assert sum(0 in leads for leads, _ in joined) > 1 or not joins
        assert core.scheduler.speculation.num_accepted_tokens > 20
    assert seen[0] == seen[1]


@functools.cache
def roundset() -> RoundSet:
    """Rounds that are made only when they are run, and here none is."""
    rounds = runner_of(round_core("dspark_tiny_b7", 0, slots=8)).rounds
    assert rounds is not None
    return rounds


DECODING = [Span(0, 8, 7, propose=True), Span(1, 8, 7, propose=True)]
PROMPT = Span(2, 20, propose=True)


@pytest.mark.parametrize(
    ("spans", "why"),
    [
        ([*DECODING, Span(2, 20, sample=False)], "not a prompt's last rows"),
        ([*DECODING, PROMPT, Span(3, 20, sample=False)], "a pass beside the round is needed anyway"),
        ([*DECODING, Span(2, 20, propose=True, prompt_rows=19)], "its rows' log-probabilities are wanted"),
        ([*DECODING, Span(2, 800, propose=True)], "more rows than there are"),
        ([Span(0, 8, 7, propose=True, chains=3), PROMPT], "chains"),
    ],
)
def test_prompts_that_no_round_takes(spans: list[Span], why: str) -> None:
    rounds = roundset()
    kinds = [rounds.kind(span) for span in spans]
    assert rounds.with_prompts(spans, kinds, None) == kinds and None in kinds, why


def test_a_prompt_without_the_rarer_parameters_only() -> None:
    core = round_core("dspark_tiny_b7", 0)
    seen = watched(core)
    kinds: list[dict[str, Any]] = [{"logprobs": 3}, {"frequency_penalty": 0.5}, {"top_p": 0.9}]
    for i, kind in enumerate(kinds):
        params = SamplingParams(max_tokens=6, ignore_eos=True, **kind)
        core.add(EngineRequest(request_id=str(i), prompt_token_ids=[5, 6, 7 + i], params=params))
        while core.has_work:
            core.step()
        assert len(seen) == (i == 2)
