"""The warm-up runs the largest steps there are, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.engine.core import EngineCore
from paceline.proving.drive import runner_of
from paceline.runtime.memory import StepLimits
from paceline.runtime.plan import PendingStep, StepPlan
from paceline.runtime.runner import PROMPT_LOGPROB_ROWS, Runner
from paceline.runtime.warmup import settle, warm_up
from paceline.sampling.params import SamplingParams
from support.engines import complete, golden_core, tokens_of

LIMITS = StepLimits(
    max_num_seqs=4, max_num_batched_tokens=64, max_model_len=512, max_logprobs=20, num_drafts=7
)
CAPTURE = {"draft_state": "capture", "draft_capture_mb": 1}
SETTINGS: list[Any] = [
    (None, {}),
    (None, {"enforce_eager": True}),
    ("dspark_tiny_b7", {}),
    ("dspark_tiny_b7", {"speculative_config": CAPTURE}),
    ("dspark_tiny_b7", {"speculative_config": CAPTURE, "enforce_eager": True}),
]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 2},
    {"temperature": 0.9, "frequency_penalty": 0.5, "seed": 3, "logprobs": 2},
]


def make(drafter: str | None, options: dict[str, Any]) -> EngineCore:
    return golden_core("qwen3_tiny", drafter=drafter, max_num_seqs=4, max_num_batched_tokens=64, **options)


def limits_for(drafter: str | None) -> StepLimits:
    return LIMITS if drafter is not None else StepLimits(4, 64, 512, 20)


def output_of(core: EngineCore) -> list[Any]:
    """Tokens and cached tokens of a prompt each kind of sampling continues, twice over."""
    prompts = [[5, 6, 7, 8] * 9 for _ in KINDS]
    params = [SamplingParams(max_tokens=20, ignore_eos=True, **kind) for kind in KINDS]
    runs = [complete(core, prompts, params) for _ in range(2)]
    return [(tokens_of(run), [group[0].num_cached_tokens for group in run]) for run in runs]


@pytest.mark.parametrize(("drafter", "options"), SETTINGS)
def test_a_warm_up_leaves_nothing_behind(drafter: str | None, options: dict[str, Any]) -> None:
    want = output_of(make(drafter, options))
    core = make(drafter, options)
    runner = runner_of(core)
    warm_up(runner, limits_for(drafter))
    fresh = runner_of(make(drafter, options)).state
    for name in ("tokens", "num_computed", "block_tables"):
        assert torch.equal(getattr(runner.state, name), getattr(fresh, name)), name
    slots = range(4)
    assert all(runner.state.sampling.fixed_kind(i) == fresh.sampling.fixed_kind(i) for i in slots)
    assert core.pool.num_free == core.pool.num_blocks
    assert output_of(core) == want


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The plans that are launched from now on."""
    plans: list[StepPlan] = []
    launch = Runner.launch

    def recorded(self: Runner, plan: StepPlan, *, by_rows: bool = False) -> PendingStep:
        assert by_rows, "rounds have memory of their own"
        plans.append(plan)
        return launch(self, plan, by_rows=by_rows)

    monkeypatch.setattr(Runner, "launch", recorded)
    return plans


def test_its_steps_are_the_largest(launched: list[StepPlan]) -> None:
    warm_up(runner_of(make("dspark_tiny_b7", {})), LIMITS)
    *drawing, prompts = launched
    for plan in drawing:
        assert plan.num_rows == 64 and plan.max_context == 512
        assert [span.drafts for span in plan.spans] == [7] * 4
        assert sum(span.prompt_rows for span in plan.spans) == 64 - 4 * 8
        assert all(span.sample and span.propose and span.top == 20 for span in plan.spans)
        assert all(init.params.logprobs == 20 for init in plan.inits)
    assert [plan.inits[0].params.greedy for plan in drawing] == [True, False]
    (span,) = prompts.spans
    assert span.prompt_rows == span.rows == 64 and span.prompt_top == 20 and not span.sample


@pytest.mark.parametrize("rows", [10, 64, 200])
def test_no_step_scores_more_rows_of_a_prompt(rows: int, launched: list[StepPlan]) -> None:
    """However many rows a step has: few, some beside those that draw, or as many as are scored at once."""
    core = golden_core("qwen3_tiny", max_num_seqs=4, max_num_batched_tokens=rows)
    warm_up(runner_of(core), StepLimits(4, rows, 512, 20))
    most = max(span.prompt_rows for plan in launched for span in plan.spans)
    assert min(most, PROMPT_LOGPROB_ROWS) == min(rows, PROMPT_LOGPROB_ROWS)


def test_drafts_give_way_to_a_row_for_every_sequence(launched: list[StepPlan]) -> None:
    """A step with fewer rows than drafts could fill."""
    warm_up(runner_of(make("dspark_tiny_b7", {})), StepLimits(4, 16, 512, 20, num_drafts=7))
    assert [span.rows for span in launched[0].spans] == [8, 6, 1, 1]


@pytest.mark.parametrize(("asked", "reckoned"), [(-1, 320), (0, 0), (5, 5), (5000, 320)])
def test_whole_vocabularies_are_not_reported_for_every_row(
    asked: int, reckoned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(make(None, {}))
    seen: list[StepPlan] = []
    monkeypatch.setattr(Runner, "launch", lambda self, plan, by_rows: seen.append(plan))
    warm_up(runner, StepLimits(4, 64, 512, asked))
    for plan in seen:
        assert {span.top for span in plan.spans if span.sample} <= {reckoned}
        assert {span.prompt_top for span in plan.spans} == {reckoned}
        assert {init.params.logprobs for init in plan.inits} == {reckoned}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's allocator that has seen 1000 bytes more than there were at first."""
    numbers = {"memory_allocated": 500, "max_memory_allocated": 1500}
    for name, number in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda number=number: number)
    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)


@pytest.mark.usefixtures("memory")
def test_what_was_measured_once_is_not_run_again(launched: list[StepPlan]) -> None:
    runner = runner_of(make("dspark_tiny_b7", {}))
    rounds, captured = runner.rounds, []
    assert rounds is not None
    rounds.capture_largest = lambda: captured.append(len(launched))  # type: ignore[method-assign]
    worst = settle(runner, LIMITS)
    assert worst == 1100 and len(launched) == 3
    assert settle(runner, LIMITS, worst) == worst and len(launched) == 3
    assert captured == [3, 3]
