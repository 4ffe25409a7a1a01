"""Drafts beside the prefix cache: unchanged acceptance after hits, shared copies, nothing left behind."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.core import EngineCore
from paceline.engine.messages import EngineRequest
from paceline.proving.drive import RoundRecorder
from paceline.proving.gates import drafts_as_recomputed, flat_acceptance, nothing_held, second_turns
from paceline.proving.redraft import redraft
from paceline.sampling.params import SamplingParams
from support.engines import (
    DRAFTERS,
    complete,
    drafter_of,
    golden_cases,
    golden_core,
    golden_prompts,
    tokens_of,
)

BLOCK = 16
STATES = ["paged", "capture"]


def greedy(max_tokens: int, **fields: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **fields)  # type: ignore[arg-type]


def texts() -> list[list[int]]:
    """Golden prompts with their continuation, cut so that they end in the middle of what can be drafted."""
    cases = golden_cases("qwen3_tiny")
    return [[*c["input_ids"].tolist(), *c["greedy_ids"].tolist()][:84] for c in cases[-2:]]


@pytest.mark.parametrize(
    ("drafter", "state"),
    [*((name, "paged") for name in DRAFTERS), ("dflash_tiny_b16", "capture"), ("dspark_tiny_b7", "capture")],
)
def test_acceptance_is_flat_in_the_cached_share(drafter: str, state: str) -> None:
    """0, 50, 95 and 100 % of the prompt from the cache: the same rounds, one for one."""
    core = golden_core("qwen3_tiny", drafter=drafter, speculative_config={"draft_state": state})
    prompts = texts()
    rounds = {}
    for share in (0, 50, 95, 100):
        assert core.reset_prefix_cache()
        for prompt in prompts:
            if share:
                complete(core, [prompt[: -(-len(prompt) * share // 100)]], greedy(1))
        recorder = RoundRecorder.on(core)
        outputs = [complete(core, [prompt], greedy(28))[0][0] for prompt in prompts]
        for output, prompt in zip(outputs, prompts, strict=True):
            warm = -(-len(prompt) * share // 100)
            assert output.num_cached_tokens == min(warm, len(prompt) - 1) // BLOCK * BLOCK
        rounds[f"{share} % cached"] = [replace(item, life=0) for item in recorder.rounds]
        assert not drafts_as_recomputed(redraft(drafter_of(core), recorder.rounds))
    cold = rounds["0 % cached"]
    assert sum(item.num_accepted for item in cold) > 8
    assert all(other == cold for other in rounds.values())
    counts = {share: [(len(items), sum(r.num_accepted for r in items))] for share, items in rounds.items()}
    assert not flat_acceptance(counts)


@pytest.mark.parametrize("state", STATES)
def test_acceptance_after_preemption(state: str) -> None:
    """A sequence that lost its place drafts again exactly what the whole text says it should."""
    prompts = golden_prompts(12, seed=3)
    options: dict[str, Any] = {
        "max_num_seqs": 8,
        "num_blocks": 13,
        "speculative_config": {"draft_state": state},
    }
    core = golden_core("qwen3_tiny", drafter="dspark_tiny_b7", **options)
    recorder = RoundRecorder.on(core)
    squeezed = tokens_of(complete(core, prompts, greedy(40)))
    stats = core.stats()
    assert stats.num_preemptions > 0
    assert not drafts_as_recomputed(redraft(drafter_of(core), recorder.rounds))
    assert not nothing_held(core)
    ample = golden_core("qwen3_tiny", drafter="dspark_tiny_b7", speculative_config={"draft_state": state})
    free = RoundRecorder.on(ample)
    assert tokens_of(complete(ample, prompts, greedy(40))) == squeezed
    # Where the same anchor came up in both, the same drafts stood.
    by_context = {tuple(item.context): item for item in free.rounds}
    common = [item for item in recorder.rounds if tuple(item.context) in by_context]
    assert len(common) > 20
    for item in common:
        twin = by_context[tuple(item.context)]
        both = min(len(item.drafts), len(twin.drafts))
        assert item.drafts[:both] == twin.drafts[:both]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_request_that_fits_alone_is_never_preempted(lookahead: int) -> None:
    """Drafts in flight reserve more than will stand: it waits for them to land."""
    for length in range(20, 40):
        prompt = [7 + i for i in range(length)]
        blocks = -(-(length + 30) // BLOCK)
        core = golden_core("qwen3_tiny", drafter="dspark_tiny_b7", lookahead=lookahead, num_blocks=blocks)
        (tokens,) = tokens_of(complete(core, [prompt], greedy(30)))
        assert len(tokens) == 30 and core.stats().num_preemptions == 0


@pytest.mark.parametrize(("state", "lookahead"), [("paged", 0), ("capture", 1)])
def test_cached_tokens_are_those_of_an_engine_without_drafts(state: str, lookahead: int) -> None:
    """Conversations that grow turn by turn, each turn a prefix of the next."""
    plain = golden_core("qwen3_tiny", lookahead=lookahead)
    core = golden_core(
        "qwen3_tiny",
        drafter="dspark_tiny_b7",
        lookahead=lookahead,
        speculative_config={"draft_state": state},
    )
    rng = random.Random(5)
    conversations = golden_prompts(6, seed=1)
    cached = 0
    for _ in range(4):
        params = greedy(rng.randrange(5, 20))
        wanted, got = (complete(engine, conversations, params) for engine in (plain, core))
        for want, have in zip(wanted, got, strict=True):
            assert have[0].num_cached_tokens == want[0].num_cached_tokens
            cached += have[0].num_cached_tokens
        conversations = [
            [*prompt, *output[0].token_ids, *(rng.randrange(3, 317) for _ in range(5))]
            for prompt, output in zip(conversations, got, strict=True)
        ]
    assert cached > 300


@pytest.mark.parametrize(("state", "lookahead"), [("paged", 0), ("paged", 1), ("capture", 1)])
def test_twelve_conversations_that_end_around_a_block_border(state: str, lookahead: int) -> None:
    """The first turn's last token is a bonus nobody forwarded: it must not complete a block."""
    options: dict[str, Any] = {"lookahead": lookahead, "speculative_config": {"draft_state": state}}
    core = golden_core("qwen3_tiny", drafter="dspark_tiny_b7", **options)
    fresh = golden_core("qwen3_tiny", drafter="dspark_tiny_b7", **options)
    case = golden_cases("qwen3_tiny")[4]
    prompt = case["input_ids"].tolist()
    conversations = [
        # a different first token, so that no conversation finds another's blocks
        ([20 + offset, *prompt], greedy(3 * BLOCK - len(prompt) - 1 + offset))
        for offset in range(-6, 6)
    ]
    probe = greedy(10, logprobs=20)
    assert not second_turns(core, fresh, conversations, [46, 151, 298], probe)
    assert not nothing_held(core)


@pytest.mark.parametrize("count", [64, 96])
def test_many_requests_share_one_copy_and_all_draft(count: int) -> None:
    """Four shared blocks and two of its own each: far less memory than ``count`` times all of it."""
    prefix = texts()[1][: 4 * BLOCK]
    own = 2  # blocks: tail, output and a drafter's block beyond it
    core = golden_core(
        "qwen3_tiny",
        drafter="dspark_tiny_b7",
        max_num_seqs=count,
        max_num_batched_tokens=512,
        num_blocks=4 + own * count + 1,
    )
    complete(core, [[*prefix, 5]], greedy(1))
    prompts = [[*prefix, 3 + i, 7] for i in range(count)]
    peak = 0.0

    def watch() -> None:
        nonlocal peak
        core.check()
        peak = max(peak, core.pool.usage)

    for i, prompt in enumerate(prompts):
        core.add(EngineRequest(request_id=str(i), prompt_token_ids=prompt, params=greedy(16)))
    drafted = dict.fromkeys(range(count), 0)
    together = 0
    while core.has_work:
        for output in core.step():
            drafted[int(output.request_id)] += output.num_draft_tokens
            assert output.num_cached_tokens == 4 * BLOCK
        together = max(together, core.stats().num_running)
        watch()
    assert together == count
    assert min(drafted.values()) > 0
    stats = core.stats()
    assert stats.num_preemptions == 0 and not stats.draft_refusals
    assert peak * core.pool.num_blocks <= 4 + own * count
    assert not nothing_held(core)


@pytest.fixture(scope="module", params=STATES)
def shared_core(request: pytest.FixtureRequest) -> EngineCore:
    return golden_core(
        "qwen3_tiny",
        drafter="dspark_tiny_b7",
        lookahead=1,
        num_blocks=24,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        speculative_config={"draft_state": request.param},
    )


PROMPTS = golden_prompts(8, seed=2)


@pytest.fixture(scope="module")
def plain_tokens() -> list[list[int]]:
    return tokens_of(complete(golden_core("qwen3_tiny"), PROMPTS, greedy(24)))


@settings(max_examples=12)
@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, len(PROMPTS) - 1)),
            st.tuples(st.just("abort"), st.integers(0, 9)),
            st.tuples(st.just("step"), st.integers(1, 4)),
        ),
        max_size=30,
    )
)
def test_whatever_is_aborted_nothing_stays_and_the_others_are_right(
    shared_core: EngineCore, plain_tokens: list[list[int]], events: list[tuple[str, int]]
) -> None:
    core = shared_core
    got: dict[str, list[int]] = {}
    alive: list[str] = []

    def step() -> None:
        for output in core.step():
            got[output.request_id] += output.token_ids
        core.check()

    for number, (kind, value) in enumerate(events):
        if kind == "add":
            name = f"{value}-{number}"
            got[name] = []
            alive.append(name)
            core.add(EngineRequest(request_id=name, prompt_token_ids=PROMPTS[value], params=greedy(24)))
        elif kind == "abort" and alive:
            core.abort([alive.pop(value % len(alive))])
        elif kind == "step":
            for _ in range(value):
                step()
    while core.has_work:
        step()
    assert not nothing_held(core)
    for name in alive:
        assert got[name] == plain_tokens[int(name.partition("-")[0])]
