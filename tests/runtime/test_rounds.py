"""Fixed-shape rounds: the same tokens as the generic step, whatever share of a round is empty.

Rounds are what CUDA graphs are captured from; here they run on the CPU as they stand.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.cache import BlockPool
from paceline.config import EngineConfig
from paceline.engine.core import EngineCore
from paceline.engine.factory import make_core
from paceline.engine.scheduler import DraftLimits
from paceline.models.attention import KVCache
from paceline.models.config import Qwen3Config
from paceline.models.drafter_loader import load_drafter
from paceline.models.loader import load_model
from paceline.proving.drive import Round, RoundRecorder
from paceline.proving.gates import same_rounds
from paceline.runtime.graphs import tiers
from paceline.runtime.runner import Runner
from paceline.sampling.params import SamplingParams
from paceline.speculation.capture_cache import CaptureCache
from paceline.speculation.counters import SpeculationCounters
from paceline.speculation.draft_reserve import DraftReserve
from paceline.speculation.draft_state import CaptureDraftState
from support.engines import GOLDEN, complete, tokens_of

NUM_BLOCKS = 96


def cache_for(config: Qwen3Config) -> KVCache:
    """A cache with the scratch block rounds need behind those of the pool."""
    return KVCache.allocate(
        config.num_hidden_layers,
        NUM_BLOCKS + 1,
        16,
        config.num_key_value_heads,
        config.head_dim,
        dtype=torch.float32,
        device="cpu",
    )


def round_core(
    drafter_name: str | None, lookahead: int, slots: int = 6, *, capture: bool = False
) -> EngineCore:
    """An engine over the golden model whose simple spans run as rounds, divided up as on a GPU: rounds of a
    few sizes, with empty places, beside a generic step for the rest.
    """
    reference = make_core(EngineConfig(model=str(GOLDEN / "qwen3_tiny"), device="cpu", num_blocks=NUM_BLOCKS))
    model = load_model(GOLDEN / "qwen3_tiny", device="cpu", dtype="float32")
    drafter = None if drafter_name is None else load_drafter(GOLDEN / drafter_name, model)
    runner = Runner(
        model,
        cache_for(model.config),
        max_num_seqs=slots,
        max_model_len=reference.info.max_model_len,
        device=torch.device("cpu"),
        eos_token_ids=reference.info.eos_token_ids,
        drafter=drafter,
        num_drafts=0 if drafter is None else drafter.config.max_drafts,
        draft_cache=None if drafter is None else cache_for(drafter.config.layers),
        captures=torch.zeros(100, 16, 3 * 64) if capture else None,
        rounds="eager",
    )
    assert runner.rounds is not None
    runner.rounds.captured = True
    limits = (
        DraftLimits()
        if drafter is None
        else DraftLimits(drafter.config.max_drafts, drafter.config.block_size)
    )
    info = reference.info
    info.max_num_seqs = slots
    pool = BlockPool(NUM_BLOCKS, 16)
    state = None
    if capture:
        limits = replace(limits, block_rows=0)
        state = CaptureDraftState(
            DraftReserve(NUM_BLOCKS, 16),
            CaptureCache(80, 19),
            draft_block=16,
            max_positions=600,
            counters=SpeculationCounters(limits.num_drafts),
        )
    return EngineCore(
        runner,
        pool,
        info,
        max_num_batched_tokens=48,
        lookahead=lookahead,
        drafting=limits,
        draft_state=state,
    )


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and parameters of every kind a round takes, and some it leaves to the generic step."""
    rng = random.Random(3)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.9, "top_k": 40, "min_p": 0.02},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 0.9, "frequency_penalty": 0.5},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.0, "min_tokens": 4},
    ]
    prompts = [[rng.randrange(3, 320) for _ in range(rng.randrange(1, 60))] for _ in range(16)]
    params = [
        SamplingParams(seed=i, max_tokens=3 + 5 * (i % 6), ignore_eos=True, **kinds[i % len(kinds)])
        for i in range(16)
    ]
    return prompts, params


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(
    ("drafter", "capture"),
    [
        (None, False),
        ("dspark_tiny_b7", False),
        ("dspark_tiny_b7", True),
        ("dflash_tiny_b16", False),
        ("dflash_tiny_b16", True),
    ],
)
def test_rounds_change_no_token(drafter: str | None, capture: bool, lookahead: int) -> None:
    prompts, params = requests()
    generic = EngineConfig(model=str(GOLDEN / "qwen3_tiny"), device="cpu", enforce_eager=True)
    want = tokens_of(complete(make_core(generic), prompts, params))
    as_on_a_cpu = make_core(EngineConfig(model=str(GOLDEN / "qwen3_tiny"), device="cpu"))
    assert tokens_of(complete(as_on_a_cpu, prompts, params)) == want, "rounds of exact sizes"
    core = round_core(drafter, lookahead, capture=capture)
    assert isinstance(core.runner, Runner) and core.runner.rounds is not None
    ran: list[int] = []
    run = core.runner.rounds.run

    def counted(spans: Any) -> Any:
        ran.append(len(spans))
        return run(spans)

    core.runner.rounds.run = counted  # type: ignore[method-assign]
    assert tokens_of(complete(core, prompts, params)) == want
    assert tokens_of(complete(core, prompts, params)) == want, "again, all warm"
    assert len(ran) > 20 and {1, 2, 3} <= set(ran), "rounds of several sizes must have run"
    if drafter is not None:
        assert core.scheduler.speculation.num_accepted_tokens > 0


def test_what_is_nobodys_stays_untouched() -> None:
    """A round bigger than its sequences writes only theirs and the scratch block."""
    core = round_core("dspark_tiny_b7", 0)
    runner = core.runner
    assert isinstance(runner, Runner) and runner.drafting is not None
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    complete(core, [[5, 6, 7, 8, 9], [7, 8, 9]], greedy)
    for cache in (runner.cache, runner.drafting.cache):
        used = {b for b in range(NUM_BLOCKS) if bool((cache.k[:, b] != 0).any())}
        assert len(used) <= 4, used
    assert int(runner.state.num_computed[runner.state.spare]) == 0


def test_captured_draft_state_is_the_same_in_rounds() -> None:
    """Cold, warm, by rounds and by generic steps: the same drafts, round for round."""
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = [list(range(5, 55)), list(range(60, 97)), [7, 8, 9] * 8]
    seen = []
    for generic in (True, False):
        core = round_core("dspark_tiny_b7", 0, capture=True)
        runner = core.runner
        assert isinstance(runner, Runner)
        if generic:
            runner.rounds = None
        for _ in range(2):
            recorder = RoundRecorder.on(core)
            for prompt in prompts:
                complete(core, [prompt], greedy)
            seen.append([Round(0, r.context, r.drafts, r.tokens) for r in recorder.rounds])
            core.runner = runner
        assert core.stats().draft_state["hits"] == 3
    assert len(seen[0]) > 10
    for other in seen[1:]:
        assert not same_rounds(seen[0], other)


@pytest.mark.parametrize("capture", [False, True])
def test_rounds_at_the_end_of_the_context(capture: bool) -> None:
    """Rows nobody asked for lie past the last position."""
    prompts = [[5 + i % 300 for i in range(500)], [9, 8, 7]]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    plain = make_core(EngineConfig(model=str(GOLDEN / "qwen3_tiny"), device="cpu", num_blocks=NUM_BLOCKS))
    assert plain.info.max_model_len == 512
    want = tokens_of(complete(plain, prompts, greedy))
    core = round_core("dflash_tiny_b16", 1, capture=capture)
    for _ in range(2):
        assert tokens_of(complete(core, prompts, greedy)) == want


def test_tiers_end_at_the_number_of_slots() -> None:
    assert tiers(1) == [1] and tiers(6) == [1, 2, 4, 6] and tiers(256)[-2:] == [192, 256]
