"""Captured draft state through the whole engine: the tokens of plain decoding, same drafts warm as cold."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor

from paceline.engine.core import EngineCore
from paceline.errors import ConfigError
from paceline.proving.drive import Round, RoundRecorder, runner_of
from paceline.proving.gates import same_rounds
from paceline.runtime.captures import CaptureStore
from paceline.runtime.plan import Restore
from paceline.sampling.params import SamplingParams
from paceline.speculation.draft_state import CaptureDraftState
from support.engines import DRAFTERS, complete, golden_cases, golden_core, tokens_of

SLOT_MB = 16 * 3 * 64 * 4 / 2**20
"""MiB of one capture of a golden drafter: 16 tokens, 3 taps of 64 fp32 values."""


def capture_core(drafter: str, *, mb: float = 1, lookahead: int = 0, **options: Any) -> EngineCore:
    config = {"draft_state": "capture", "draft_capture_mb": mb}
    return golden_core(
        "qwen3_tiny", drafter=drafter, lookahead=lookahead, speculative_config=config, **options
    )


def state_of(core: EngineCore) -> CaptureDraftState:
    state = core.scheduler.draft_state
    assert isinstance(state, CaptureDraftState)
    return state


def nothing_held(core: EngineCore) -> None:
    core.check()
    state = state_of(core)
    assert core.pool.num_free == core.pool.num_blocks
    assert state.reserve.num_free == state.reserve.num_blocks
    assert state.captures.num_in_progress == 0


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def shared_prompts(count: int, shared_len: int = 70) -> list[list[int]]:
    """Random prompts, most with a common beginning."""
    rng = random.Random(3)
    shared = [rng.randrange(3, 320) for _ in range(shared_len)]
    return [
        shared[: rng.randrange(shared_len // 2, shared_len) if i % 4 else 0]
        + [rng.randrange(3, 320) for _ in range(rng.randrange(1, 20))]
        for i in range(count)
    ]


SETTINGS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"max_num_seqs": 4, "max_num_batched_tokens": 19, "num_blocks": 128},
    "one step ahead": {"lookahead": 1},
    "short of memory": {"num_blocks": 13, "max_num_seqs": 8},
    "short of captures": {"mb": 12 * SLOT_MB},
    "no captures": {"mb": 0},
    "big blocks": {"block_size": 64},
}


@pytest.mark.parametrize("setting", list(SETTINGS))
@pytest.mark.parametrize("drafter", ["dflash_tiny_b16", "dspark_tiny_b7"])
def test_same_tokens_as_without_a_drafter(drafter: str, setting: str) -> None:
    many = shared_prompts(10)
    params = [greedy(20) for _ in many[:5]] + [
        SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=20, ignore_eos=True) for i in range(5)
    ]
    plain = tokens_of(complete(golden_core("qwen3_tiny", enable_prefix_caching=False), many, params))
    core = capture_core(drafter, **SETTINGS[setting])
    for turn in ("cold", "warm"):
        assert tokens_of(complete(core, many, params)) == plain, turn
        nothing_held(core)
    stats = core.stats()
    assert stats.num_drafts > 0
    if setting == "short of memory":
        assert stats.num_preemptions > 0
    if setting == "no captures":
        assert stats.prefix_hits == 0 and not stats.draft_state
    else:
        assert stats.draft_state["restored_tokens"] > 0


# ---------------------------------------------------------------------- warm is cold


def rounds_of(core: EngineCore, prompts: list[list[int]], max_tokens: int = 24) -> list[Round]:
    """All rounds of prompts served one after the other, without their lives' numbers."""
    recorder = RoundRecorder.on(core)
    for prompt in prompts:
        complete(core, [prompt], greedy(max_tokens))
    core.runner = recorder.runner
    return [Round(0, item.context, item.drafts, item.tokens) for item in recorder.rounds]


def golden_prompts(drafter: str) -> list[list[int]]:
    """Prompts with at least one full block."""
    prompts = [case["input_ids"].tolist() for case in golden_cases(drafter)]
    return [prompt for prompt in prompts if len(prompt) > 16]


def warm_differs(drafter: str) -> list[object]:
    """What warm rounds do differently from cold ones: the gate."""
    core = capture_core(drafter)
    prompts = golden_prompts(drafter)
    cold, warm = rounds_of(core, prompts), rounds_of(core, prompts)
    assert core.stats().draft_state["hits"] == len(prompts), "every prompt was restored"
    assert len(cold) > 5
    return list(same_rounds(cold, warm))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_warm_rounds_are_cold_rounds(drafter: str) -> None:
    assert warm_differs(drafter) == []


Parts = Iterator[tuple[Tensor, Tensor, Tensor]]


def restore_nothing(original: Callable[..., Parts]) -> Callable[..., Parts]:
    """Mutant: rows are announced and not copied."""
    return lambda store, restores: iter(())


def restore_shifted(original: Callable[..., Parts]) -> Callable[..., Parts]:
    """Mutant: block i comes from the slot of block i + 1."""

    def shifted(store: CaptureStore, restores: list[Restore]) -> Parts:
        moved = [
            Restore(item.slot, [*item.capture_slots[1:], item.capture_slots[0]], item.draft_blocks)
            for item in restores
        ]
        return original(store, moved)

    return shifted


@pytest.mark.parametrize("mutant", [restore_nothing, restore_shifted])
@pytest.mark.parametrize("drafter", ["dflash_tiny_b16", "dspark_tiny_b7", "dspark_tiny_b6_speculators"])
def test_the_gate_sees_a_wrong_restore(
    drafter: str,
    mutant: Callable[[Callable[..., Parts]], Callable[..., Parts]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CaptureStore, "restored", mutant(CaptureStore.restored))
    assert warm_differs(drafter)


@pytest.mark.parametrize("share", [0, 50, 95, 100])
def test_acceptance_does_not_depend_on_the_cached_share(share: int) -> None:
    """The same text with more and more of it restored: the same rounds."""
    drafter = "dspark_tiny_b7"
    rng = random.Random(5)
    prompt = [rng.randrange(3, 320) for _ in range(321)]
    cold = rounds_of(capture_core(drafter, enable_prefix_caching=False), [prompt])
    core = capture_core(drafter)
    cached = len(prompt) * share // 100
    if cached:
        complete(core, [[*prompt[:cached], 7]], greedy(1))
    assert same_rounds(cold, rounds_of(core, [prompt])) == []
    assert core.stats().draft_state.get("restored_tokens", 0) == cached // 16 * 16


# ---------------------------------------------------------------------- single cases


def test_two_turns_around_a_block_boundary() -> None:
    """Twelve conversations whose first turn ends at every offset: all draft on turn two, as a fresh engine
    would.
    """
    drafter = "dspark_tiny_b7"
    core = capture_core(drafter, num_blocks=128)
    fresh = capture_core(drafter, num_blocks=64, enable_prefix_caching=False)
    cases = golden_cases(drafter)
    prompt = cases[4]["input_ids"].tolist()
    assert len(prompt) == 33
    for i in range(12):
        first = [prompt[0] + i, *prompt[1:]]
        max_tokens = 10 + i  # turn one ends with 42 to 53 computed tokens, a block ends at 48
        (answer,) = tokens_of(complete(core, [first], greedy(max_tokens)))
        second = [*first, *answer, 9, 8]
        hits = core.stats().draft_state.get("hits", 0)
        warm = rounds_of(core, [second], 10)
        assert core.stats().draft_state["hits"] == hits + 1
        assert warm and same_rounds(rounds_of(fresh, [second], 10), warm) == []
    assert core.stats().draft_state.get("misses", 0) == 0 and not core.stats().draft_refusals


def test_a_miss_is_plain_and_counted() -> None:
    core = capture_core("dspark_tiny_b7", mb=2 * SLOT_MB)
    prompt = shared_prompts(1, 410)[0][:1] + [5 + i % 300 for i in range(400)]
    plain = tokens_of(complete(golden_core("qwen3_tiny"), [prompt], greedy(16)))
    assert tokens_of(complete(core, [prompt], greedy(16))) == plain
    drafts = core.stats().num_drafts
    (output,) = complete(core, [prompt], greedy(16))[0]
    assert [output.token_ids] == plain and output.num_cached_tokens == 400
    assert drafts > 0 and core.stats().num_drafts == drafts
    assert core.stats().draft_refusals == {"capture_miss": 1}


def test_a_prefix_longer_than_the_cache_restores_its_head() -> None:
    core = capture_core("dspark_tiny_b7", mb=20 * SLOT_MB)
    prompt = [5 + i % 300 for i in range(400)]
    cold = rounds_of(core, [prompt], 40)
    warm = rounds_of(core, [prompt], 40)
    assert same_rounds(cold, warm) == []
    stats = core.stats()
    assert stats.draft_state == {
        "misses": 1,
        "restored_tokens": 320,
        "reforwarded_tokens": 64,
        "publishes": 20,
        "evictions": 0,
    }


@pytest.mark.parametrize("count", [64, 96])
def test_many_requests_on_one_prefix(count: int) -> None:
    """More requests than the draft K/V can hold: some decode plainly, none waits, all is given back."""
    core = capture_core("dspark_tiny_b7", num_blocks=count * 10, max_num_seqs=count)
    prefix = [5 + i % 300 for i in range(256)]
    prompts = [[*prefix, 3 + i] for i in range(count)]
    plain = tokens_of(complete(golden_core("qwen3_tiny"), prompts[:8], greedy(16)))
    complete(core, [prefix], greedy(1))
    got = tokens_of(complete(core, prompts, greedy(16), check=False))
    assert got[:8] == plain
    nothing_held(core)
    stats = core.stats()
    fits = count * 10 // 18
    assert stats.draft_state["hits"] == fits and stats.draft_refusals == {"draft_reserve": count - fits}
    assert stats.num_drafts >= fits


def test_samples_and_prompt_logprobs() -> None:
    prompt = shared_prompts(1)[0][:1] + [5 + i for i in range(40)]
    for params in (
        SamplingParams(temperature=1.0, seed=4, n=4, max_tokens=20, ignore_eos=True),
        greedy(12, prompt_logprobs=2, logprobs=1),
    ):
        plain = complete(golden_core("qwen3_tiny"), [prompt], params)
        core = capture_core("dflash_tiny_b16")
        for _ in range(2):
            got = complete(core, [prompt], params)
            assert tokens_of(got) == tokens_of(plain)
            first, want = got[0][0].prompt_logprobs, plain[0][0].prompt_logprobs
            assert (first is None) == (want is None)
            if first is not None and want is not None:
                assert [None if row is None else sorted(row) for row in first] == [
                    None if row is None else sorted(row) for row in want
                ]
        assert core.stats().num_drafts > 0 and not core.stats().draft_refusals
        nothing_held(core)


# ---------------------------------------------------------------------- budgets and start-up


def test_a_budget_of_0_switches_prefix_caching_off_loudly(caplog: pytest.LogCaptureFixture) -> None:
    for options in ({"mb": 0}, {"enable_prefix_caching": False}):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            core = capture_core("dspark_tiny_b7", **options)
        assert "prefix caching is off" in caplog.text
        assert not core.pool.enable_caching and state_of(core).captures.num_physical == 0


def test_a_budget_below_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"draft_capture_mb is 0\.01, but one block .* takes 0\.01172 MiB"):
        capture_core("dspark_tiny_b7", mb=0.01)
    assert state_of(capture_core("dspark_tiny_b7", mb=0.0118)).captures.num_slots == 1


def test_the_pool_shrinks_by_what_is_captured(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {}
    total = 16 * 2**20
    with caplog.at_level(logging.INFO):
        for mb in (0, 1, 8):
            core = capture_core("dspark_tiny_b7", mb=mb, kv_cache_memory_bytes=total, max_num_seqs=4)
            stage = runner_of(core).drafting
            assert stage is not None
            target, draft = runner_of(core).cache, stage.cache
            held = [target.k, target.v, draft.k, draft.v, stage.capture_rows]
            sizes[mb] = sum(t.numel() * t.element_size() for t in held if t is not None)
            state = state_of(core)
            assert state.captures.num_slots == int(mb / SLOT_MB)
            assert state.reserve.num_blocks == core.pool.num_blocks == target.k.shape[1] - 1  # scratch
    block = 16 * 2 * 64 * 4 * (6 + 2)
    assert all(total - block < size <= total for size in sizes.values())
    assert "requests of 512 tokens can draft at once" in caplog.text


def test_a_pool_in_which_no_long_request_can_draft_is_told_loudly(caplog: pytest.LogCaptureFixture) -> None:
    for num_blocks, loud in ((4, True), (64, False)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            capture_core("dspark_tiny_b7", num_blocks=num_blocks, max_model_len=128)
        warned = [r.levelname for r in caplog.records if "NO REQUEST OF FULL LENGTH CAN DRAFT" in r.message]
        assert warned == (["WARNING"] if loud else [])
