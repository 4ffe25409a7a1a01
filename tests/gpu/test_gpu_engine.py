"""The whole engine on a real device: golden numbers, a 4B geometry, and a step that never waits."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.bench.geometry import geometry_folder
from paceline.cache import sharing
from paceline.config import EngineConfig
from paceline.engine.core import EngineCore
from paceline.engine.factory import make_core
from paceline.models.attention import DenseCausalContext
from paceline.runtime import graphs
from paceline.runtime.plan import Span
from paceline.runtime.runner import Runner
from paceline.runtime.sharing import group_values
from paceline.sampling.params import SamplingParams
from support.engines import GOLDEN, complete, golden_cases, golden_prompts, tokens_of

pytestmark = pytest.mark.gpu

GEOMETRY = geometry_folder("qwen3-4b")
REGRET_NATS = 0.20


def gpu_core(model: Path, **options: Any) -> EngineCore:
    options = {"device": "cuda", "num_blocks": 512, "max_num_seqs": 16, **options}
    return make_core(EngineConfig.of(model=str(model), **options))


def limited(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)


def runner_of(core: EngineCore) -> Runner:
    assert isinstance(core.runner, Runner)
    return core.runner


@pytest.mark.parametrize("name", ["qwen3_tiny", "qwen3_tiny_untied", "qwen3_yarn"])
@pytest.mark.parametrize("budget", [16, 512])
def test_golden_numbers_in_fp32(name: str, budget: int) -> None:
    core = gpu_core(GOLDEN / name, dtype="float32", max_num_batched_tokens=budget, max_logprobs=400)
    cases = golden_cases(name)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, prompt_logprobs=-1)
    outputs = complete(core, [case["input_ids"].tolist() for case in cases], params)
    for case, (output,) in zip(cases, outputs, strict=True):
        logits = case["logits"].astype(np.float64)
        want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        assert output.prompt_logprobs is not None
        for row, entry in zip(want[:-1], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            got = np.array([entry[i].logprob for i in range(len(row))])
            np.testing.assert_allclose(got, row, atol=2e-4, rtol=0)
        assert output.token_ids == case["greedy_ids"].tolist()


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 1.0},
    "truncated": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
}


@pytest.mark.parametrize("drafter", [None, "dflash_tiny_b16", "dspark_tiny_b7", "dspark_tiny_b7_rnn"])
@pytest.mark.parametrize("sampling", list(SAMPLINGS))
def test_same_tokens_with_graphs_and_drafters(drafter: str | None, sampling: str) -> None:
    """Captured rounds, with and without drafts, against plain eager steps."""
    prompts = [case["input_ids"].tolist() for case in golden_cases("qwen3_tiny")]
    params = [limited(20 + 5 * i, seed=i, **SAMPLINGS[sampling]) for i in range(len(prompts))]
    eager = gpu_core(GOLDEN / "qwen3_tiny", dtype="float32", enforce_eager=True)
    plain = tokens_of(complete(eager, prompts, params))
    core = gpu_core(
        GOLDEN / "qwen3_tiny",
        dtype="float32",
        speculative_config=None
        if drafter is None
        else {"model": str(GOLDEN / drafter), "verify_planner": "off"},
    )
    assert runner_of(core).rounds is not None and runner_of(eager).rounds is None
    assert tokens_of(complete(core, prompts, params)) == plain
    assert drafter is None or core.scheduler.speculation.num_accepted_tokens > 0
    assert tokens_of(complete(core, prompts, params)) == plain, "again, all warm"


@pytest.mark.parametrize("drafter", [None, "dspark_tiny_b7"])
def test_same_tokens_from_shared_prefixes(drafter: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that attend to common keys once, two prefixes and strangers, against plain eager steps."""
    first, second = golden_prompts(2, seed=7)
    tails = golden_prompts(14, seed=8)
    heads = [(first * 9)[:96], (second * 9)[:70], []]
    prompts = [[*heads[i % 3], *tail[: 3 + i]] for i, tail in enumerate(tails)]
    params = [limited(30, seed=i, **list(SAMPLINGS.values())[i % 3]) for i in range(len(prompts))]
    eager = gpu_core(GOLDEN / "qwen3_tiny", dtype="float32", enforce_eager=True, enable_prefix_caching=False)
    plain = tokens_of(complete(eager, prompts, params))
    monkeypatch.setattr(sharing, "MIN_SAVED_TOKENS", 64)
    found = []

    def spied(spans: Sequence[Span], num_seqs: int) -> np.ndarray | None:
        found.append(group_values(spans, num_seqs))
        return found[-1]

    monkeypatch.setattr(graphs, "group_values", spied)
    speculative = None if drafter is None else {"model": str(GOLDEN / drafter), "verify_planner": "off"}
    core = gpu_core(GOLDEN / "qwen3_tiny", dtype="float32", speculative_config=speculative)
    assert tokens_of(complete(core, prompts, params)) == plain
    assert any(values is not None for values in found), "no round was told of common keys"
    assert tokens_of(complete(core, prompts, params)) == plain, "again, all warm"


@pytest.mark.parametrize("drafter", ["dflash_tiny_b16", "dspark_tiny_b7", "dspark_tiny_b7_rnn"])
@pytest.mark.parametrize("draft_state", ["paged", "capture"])
def test_same_tokens_with_hedges(drafter: str, draft_state: str) -> None:
    """Captured rounds with chains for some of their sequences, every kind of sampling."""
    prompts = golden_prompts(16, seed=4)
    ways = [*SAMPLINGS.values(), {"temperature": 0.9, "frequency_penalty": 0.3, "logprobs": 3}]
    params = [limited(40, seed=i, **ways[i % len(ways)]) for i in range(len(prompts))]
    eager = gpu_core(GOLDEN / "qwen3_tiny", dtype="float32", enforce_eager=True)
    plain = tokens_of(complete(eager, prompts, params))
    speculative = {
        "model": str(GOLDEN / drafter),
        "verify_planner": "off",
        "draft_state": draft_state,
        "hedge": 6,
    }
    core = gpu_core(GOLDEN / "qwen3_tiny", dtype="float32", speculative_config=speculative)
    for _ in range(2):
        assert tokens_of(complete(core, prompts, params)) == plain
    stats = core.stats().hedging
    assert stats is not None and stats.num_wins and stats.num_losses


def test_sampler_features_agree_with_the_cpu() -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 320) for _ in range(20)] for _ in range(8)]
    params = [
        limited(24, temperature=0.0, logprobs=3),
        limited(24, temperature=1.0, seed=1),
        limited(24, temperature=0.8, top_k=20, seed=2),
        limited(24, temperature=0.8, top_p=0.8, seed=3),
        limited(24, temperature=1.2, min_p=0.05, seed=4),
        limited(24, temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.2, seed=5),
        limited(24, temperature=0.9, logit_bias={7: 5.0}, allowed_token_ids=list(range(3, 60)), seed=6),
        limited(24, temperature=0.9, bad_words_ids=[[5], [6, 7]], min_tokens=5, seed=7),
    ]
    on_gpu = complete(gpu_core(GOLDEN / "qwen3_tiny", dtype="float32"), prompts, params)
    cpu = make_core(EngineConfig(model=str(GOLDEN / "qwen3_tiny"), device="cpu", dtype="float32"))
    assert tokens_of(on_gpu) == tokens_of(complete(cpu, prompts, params))


@pytest.fixture(scope="module")
def big() -> Iterator[EngineCore]:
    core = gpu_core(GEOMETRY, load_format="dummy", num_blocks=2048, max_num_seqs=32)
    while core.runner.prepare():  # capturing waits for nothing, but compiles
        pass
    yield core
    del core
    torch.cuda.empty_cache()


@torch.inference_mode()
def regrets(core: EngineCore, prompt: list[int], output: list[int]) -> torch.Tensor:
    """How far below the best token each chosen one lies under a dense torch forward pass, in nats."""
    model = runner_of(core).model
    tokens = torch.tensor(prompt + output, device="cuda")
    hidden = model(tokens, torch.arange(len(tokens), device="cuda"), DenseCausalContext()).hidden
    rows = torch.log_softmax(model.logits(hidden[len(prompt) - 1 : -1]).float(), dim=-1)
    return rows.max(-1).values - rows.gather(1, tokens[len(prompt) :, None])[:, 0]


def test_4b_geometry_agrees_with_torch_at_every_position(big: EngineCore) -> None:
    rng = random.Random(0)
    lengths = [1, 15, 16, 17, 100, 511, 512, 700]
    prompts = [[rng.randrange(151_000) for _ in range(n)] for n in lengths]
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    for tokens, prompt in zip(tokens_of(complete(big, prompts, params)), prompts, strict=True):
        worst = float(regrets(big, prompt, tokens).max())
        assert worst <= REGRET_NATS, f"{worst} nats after a prompt of {len(prompt)}"


def test_steps_never_wait_on_the_device(big: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill, mixed and decode steps of every kind of sampling run with synchronisation forbidden."""
    rng = random.Random(1)
    kinds = [
        limited(12, temperature=0.0),
        limited(12, temperature=0.0, logprobs=5),
        limited(12, temperature=1.0),
        limited(12, temperature=0.7, top_k=50, top_p=0.9, min_p=0.01),
        limited(12, temperature=0.7, frequency_penalty=0.5, logit_bias={3: 1.0}, min_tokens=3),
    ]
    prompts = [[rng.randrange(151_000) for _ in range(40 + 9 * i)] for i in range(len(kinds))]
    complete(big, prompts, kinds)  # compile first: loading a kernel may synchronise
    launch, count = big.runner.launch, 0

    def guarded(plan: Any) -> Any:
        nonlocal count
        count += 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(big.runner, "launch", guarded)
    complete(big, [prompt[::-1] for prompt in prompts], kinds)
    assert count >= 12


def test_drafting_at_4b_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random drafter at DSpark's real size: rounds run without waiting and what stands is the target's
    own.
    """
    core = gpu_core(
        GEOMETRY,
        load_format="dummy",
        num_blocks=1024,
        max_num_seqs=8,
        speculative_config={
            "model": str(GEOMETRY.parent / "qwen3-4b-dspark-b7"),
            "verify_planner": "off",
        },
    )
    rng = random.Random(2)
    prompts = [[rng.randrange(151_000) for _ in range(30 + 40 * i)] for i in range(4)]
    params = [
        SamplingParams(temperature=float(i == 3), seed=i, max_tokens=24, ignore_eos=True) for i in range(4)
    ]
    while core.runner.prepare():
        pass
    allocated = torch.cuda.memory_reserved()
    complete(core, prompts, params)
    launch = core.runner.launch

    def guarded(plan: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(core.runner, "launch", guarded)
    outputs = tokens_of(complete(core, [prompt[::-1] for prompt in prompts], params))
    assert core.scheduler.speculation.num_drafts > 0
    assert torch.cuda.memory_reserved() == allocated, "memory grew after start-up"
    for prompt, tokens in zip(prompts[:3], outputs, strict=False):
        assert float(regrets(core, prompt[::-1], tokens).max()) <= REGRET_NATS
