"""Draft context written late is what it would have been, wherever anybody may look at it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config import EngineConfig
from paceline.engine.core import EngineCore
from paceline.engine.factory import make_core
from paceline.engine.messages import EngineRequest
from paceline.proving.drive import runner_of
from paceline.runtime.deferred import DeferredContext, KeptRows, pass_sizes
from paceline.runtime.drafting import KEPT_ROWS, DraftStage
from paceline.runtime.plan import StepPlan
from paceline.sampling.params import SamplingParams
from paceline.speculation.decision import Batch, Decision
from paceline.speculation.planner import Planner
from support.engines import GOLDEN, golden_prompts

Caches = tuple[Tensor, Tensor]


class Moody(Planner):
    """Decodes plainly for a while, then drafts for a while.

    Args:
        planner: whose place it takes.
        seed: of its moods.
    """

    def __init__(self, planner: Planner, seed: int) -> None:
        super().__init__(planner.costs, planner.survival)
        self._rng = random.Random(seed)
        self._left, self._drafts = 0, True

    def decide(self, batch: Batch) -> Decision:
        """Moods of any length."""
        if self._left == 0:
            self._drafts = not self._drafts
            self._left = self._rng.randint(1, 4) if self._drafts else self._rng.choice((1, 3, 20, 40))
        self._left -= 1
        return Decision(7 if self._drafts else 0, None, self._drafts, "exploring")


@torch.inference_mode()
def core_for(lookahead: int, scarce: bool, seed: int, device: str) -> EngineCore:
    """An engine in changing moods."""
    config = EngineConfig.of(
        model=str(GOLDEN / "qwen3_tiny"),
        device=device,
        dtype="float32",
        max_num_seqs=4 if scarce else 6,
        num_blocks=12 if scarce else 60,
        speculative_config={"model": str(GOLDEN / "dspark_tiny_b7")},
    )
    core = make_core(config, lookahead=lookahead)
    assert core.scheduler.planner is not None
    core.scheduler.planner = Moody(core.scheduler.planner, seed)
    deferred = runner_of(core).deferred
    if deferred is not None:
        deferred.write()
    for cache in caches(core):
        cache.zero_()  # of what was timed at start
    return core


def serve(core: EngineCore, seed: int, look: Callable[[], None]) -> list[tuple[str, int]]:
    """Requests that come over time, some with a common beginning, some given up; ``look`` after each step."""
    rng = random.Random(seed)
    prompts = golden_prompts(14, seed)
    tokens: list[tuple[str, int]] = []
    waiting = [(rng.choice((0, 3, 40, 80)), i) for i in range(len(prompts))]
    given_up = {f"{i}": rng.randrange(20, 120) for i in range(0, len(prompts), 4)}
    step = 0
    while waiting or core.has_work:
        for item in [item for item in waiting if item[0] <= step]:
            waiting.remove(item)
            name = f"{item[1]}"
            params = SamplingParams(
                temperature=float(item[1] % 2), seed=item[1], max_tokens=rng.randint(3, 70), ignore_eos=True
            )
            core.add(EngineRequest(request_id=name, prompt_token_ids=prompts[item[1]], params=params))
        core.abort([name for name, when in given_up.items() if when == step])
        tokens += [(out.request_id, token) for out in core.step() for token in out.token_ids]
        look()
        step += 1
    return tokens


def caches(core: EngineCore) -> Caches:
    """The drafter's K/V but for the block that is nobody's."""
    drafting = runner_of(core).drafting
    assert drafting is not None
    return drafting.cache.k[:, :-1], drafting.cache.v[:, :-1]


@torch.inference_mode()
def with_what_is_owed(core: EngineCore) -> Caches:
    """The drafter's K/V as it were if all that is owed were written; it stays owed."""
    deferred = runner_of(core).deferred
    assert deferred is not None
    owed, before = dict(deferred._owed), [cache.clone() for cache in caches(core)]
    deferred.write()
    k, v = (cache.clone() for cache in caches(core))
    for cache, was in zip(caches(core), before, strict=True):
        cache.copy_(was)
    deferred._owed = owed
    return k, v


def name(item: tuple[str, int]) -> str:
    """Of a request and one of its tokens."""
    return item[0]


def differing(
    lookahead: int, scarce: bool, monkeypatch: pytest.MonkeyPatch, seed: int = 0, device: str = "cpu"
) -> int:
    """Steps after which the drafter's K/V is not what it is when every step writes its own, and one more if
    tokens did not come in the same steps.
    """
    wanted: list[Caches] = []
    with monkeypatch.context() as patch:
        patch.setattr(DraftStage, "defers", False)
        core = core_for(lookahead, scarce, seed, device)
        assert runner_of(core).deferred is None
        tokens = serve(core, seed, lambda: wanted.append((caches(core)[0].clone(), caches(core)[1].clone())))
    late = core_for(lookahead, scarce, seed, device)
    deferred = runner_of(late).deferred
    assert deferred is not None
    most, wrong, step = 0, 0, iter(wanted)

    def look() -> None:
        nonlocal most, wrong
        most = max(most, *deferred._owed.values(), 0)
        pairs = zip(with_what_is_owed(late), next(step, caches(late)), strict=True)
        wrong += not all(torch.allclose(a, b, atol=1e-4) for a, b in pairs)

    found = serve(late, seed, look)
    assert sorted(found, key=name) == sorted(tokens, key=name)
    assert most >= KEPT_ROWS, "all places were used"
    assert (late.scheduler.num_preemptions > 0) == scarce
    return wrong + (found != tokens)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("scarce", [False, True], ids=["plenty", "scarce"])
def test_context_is_what_it_would_have_been(
    lookahead: int, scarce: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert differing(lookahead, scarce, monkeypatch) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("scarce", [False, True], ids=["plenty", "scarce"])
def test_context_written_by_graphs(scarce: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert differing(1, scarce, monkeypatch, device="cuda") == 0


def never(self: DeferredContext, plan: StepPlan) -> None:
    """Only full places are emptied."""
    if max(self._owed.values(), default=0) == KEPT_ROWS:
        self.write()


def too_late(self: DeferredContext, plan: StepPlan) -> None:
    """One more row than there are places."""
    left = not self._owed.keys() <= {span.slot for span in plan.spans}
    if plan.inits or left or max(self._owed.values(), default=0) > KEPT_ROWS:
        self.write()


def shifted(write: Any) -> Any:
    """Rows are written one position too early."""
    return lambda self, slots, behind: write(self, slots, behind + 1)


@pytest.mark.parametrize("mutant", [never, too_late])
def test_writing_too_late_is_seen(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeferredContext, "write_before", mutant)
    assert differing(1, True, monkeypatch) > 0


def test_writing_elsewhere_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftStage, "write_kept", shifted(DraftStage.write_kept))
    assert differing(0, False, monkeypatch) > 0


def test_sizes_of_passes_hold_all_that_can_be_owed() -> None:
    for slots in (1, 2, 3, 7, 8, 100, 256):
        sizes = pass_sizes(slots)
        assert sizes == sorted(set(sizes)) and sizes[0] == KEPT_ROWS and sizes[-1] == KEPT_ROWS * slots


@torch.inference_mode()
def test_the_largest_pass_holds_all_that_is_owed_and_the_smallest_is_captured_first() -> None:
    runner = runner_of(core_for(0, True, 0, "cpu"))
    drafting, state = runner.drafting, runner.state
    assert drafting is not None
    sizes = pass_sizes(state.spare)
    where: Any = object()
    assert DeferredContext(drafting, state, where).graphs.missing == sizes[::-1]
    deferred, made = DeferredContext(drafting, state, None), []

    def make(size: int) -> KeptRows:
        made.append(size)
        return KeptRows(size, drafting, state)

    deferred.graphs._make = make
    deferred.capture_largest()
    for _ in range(KEPT_ROWS):
        deferred.note(range(state.spare))
    deferred.write()
    assert made == [sizes[-1]], "the same pass"
