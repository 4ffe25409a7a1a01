"""Whatever goes wrong with a drafter, requests get the tokens plain decoding gives them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from paceline.engine.core import EngineCore
from paceline.engine.messages import EngineRequest
from paceline.errors import ConfigError, EngineDeadError
from paceline.models.drafter import Drafter
from paceline.proving.drive import runner_of
from paceline.runtime.captures import CaptureStore
from paceline.runtime.cuda_graph import CapturedSet
from paceline.runtime.graphs import RoundSet
from paceline.runtime.plan import PendingStep, Span, StepPlan
from paceline.runtime.runner import Runner
from paceline.runtime.shapes import RoundShape
from paceline.sampling.params import SamplingParams
from paceline.sampling.state import FixedKind
from support.engines import complete, golden_core, golden_prompts, tokens_of

DRAFTER = "dspark_tiny_b7"
CAPTURE = {"draft_state": "capture", "draft_capture_mb": 1}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"enforce_eager": True},
    {"speculative_config": {"hedge": 3}},
    {"speculative_config": CAPTURE},
    {"speculative_config": CAPTURE, "enforce_eager": True},
]


def make(drafter: str | None = DRAFTER, **options: Any) -> EngineCore:
    return golden_core("qwen3_tiny", drafter=drafter, max_num_seqs=4, max_num_batched_tokens=40, **options)


def tokens(core: EngineCore) -> list[list[list[int]]]:
    """Of prompts that share prefixes, at random and greedily, twice over."""
    prompts = golden_prompts(8)
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=16, ignore_eos=True) for i in range(8)]
    return [tokens_of(complete(core, prompts, params)) for _ in range(2)]


def sometimes(work: Callable[..., Any], every: int) -> Callable[..., Any]:
    """The same, but every so many calls fail."""
    calls = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % every == 0:
            raise RuntimeError("out of luck")
        return work(*args, **kwargs)

    return failing


@pytest.fixture(scope="module")
def plain() -> list[list[list[int]]]:
    return tokens(make(None))


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize("place", ["draft", "write_context"])
def test_a_failing_drafter_costs_drafts_alone(
    place: str, options: dict[str, Any], every: int, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make(**options)
    monkeypatch.setattr(Drafter, place, sometimes(getattr(Drafter, place), every))
    assert tokens(core) == plain
    drafting = runner_of(core).drafting
    assert drafting is not None and drafting.failure == "RuntimeError: out of luck"
    assert core.stats().draft_refusals["failure"] == drafting.num_failures > 0


def test_so_does_one_whose_past_cannot_be_rebuilt(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make(speculative_config=CAPTURE)
    monkeypatch.setattr(CaptureStore, "restored", sometimes(CaptureStore.restored, 2))
    assert tokens(core) == plain
    drafting = runner_of(core).drafting
    assert drafting is not None and drafting.failure is not None


@pytest.mark.parametrize("options", SETTINGS[2:4])
def test_a_round_that_fails_runs_row_by_row(
    options: dict[str, Any], plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make(**options)
    monkeypatch.setattr(RoundSet, "run", sometimes(RoundSet.run, 2))
    assert tokens(core) == plain


def test_what_goes_on_failing_is_logged_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core = make()
    for owner, name in (Drafter, "draft"), (RoundSet, "run"):
        monkeypatch.setattr(owner, name, sometimes(getattr(owner, name), 1))
    with caplog.at_level(logging.ERROR, logger="paceline"):
        tokens(core)
    for what in "Drafting failed", "A decode round failed":
        counts = [int(r.getMessage().split()[-4]) for r in caplog.records if what in r.getMessage()]
        assert len(counts) > 3 and counts == [2**i for i in range(len(counts))]


def test_a_round_on_a_dead_device_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make()

    def run(self: RoundSet, spans: Sequence[Span], kind: FixedKind, depth: int | None) -> Any:
        raise EngineDeadError("the GPU refuses")

    monkeypatch.setattr(RoundSet, "run", run)
    with pytest.raises(EngineDeadError, match="the GPU refuses"):
        tokens(core)


def test_what_cannot_be_captured_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(make())
    assert runner.rounds is not None
    graphs, seen = runner.rounds.graphs, list[int]()
    get = CapturedSet.get

    def noted(self: Any, shape: RoundShape) -> Any:
        seen.append(shape.num_seqs)
        return get(self, shape)

    graphs.missing = [RoundShape.even(size, 0, False, "greedy") for size in (3, 2, 1)]
    monkeypatch.setattr(CapturedSet, "get", sometimes(noted, 2))
    assert [runner.prepare() for _ in range(4)] == [True, True, True, False]
    assert seen == [1, 3], "the second failed"


def test_a_drafter_that_never_works_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drafter, "draft", sometimes(Drafter.draft, 1))
    with pytest.raises(ConfigError, match=r"dspark_tiny_b7 does not run on cpu \(RuntimeError: out of luck"):
        make(speculative_config={"verify_planner": "auto"})


def test_a_step_that_cannot_be_repeated_ends_the_engine_and_no_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where spans are run one by one, to find the one at fault."""
    core = make()
    launched: list[int] = []

    def launch(self: Runner, plan: StepPlan, *, by_rows: bool = False) -> PendingStep:
        launched.append(len(plan.spans))
        raise RuntimeError("out of luck") if len(launched) == 1 else EngineDeadError("its tokens stand")

    monkeypatch.setattr(Runner, "launch", launch)
    for i in range(2):
        params = SamplingParams(max_tokens=4)
        core.add(EngineRequest(request_id=str(i), prompt_token_ids=[5, 6, 7], params=params))
    with pytest.raises(EngineDeadError, match="its tokens stand"):
        core.step()
    assert launched == [2, 1]
