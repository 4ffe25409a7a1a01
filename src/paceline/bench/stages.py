"""Where a decode round's time goes, stage by stage, without a line of measuring code in the engine.

While a recorder is active, the functions that make up a round open a range when they are called. On a CPU a
range's own time is what the clock says. On a GPU the ranges go into torch's profiler, and each kernel is
charged to the range it was launched from.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch

from paceline.models.attention import PagedContext
from paceline.models.drafter import Drafter
from paceline.models.qwen3 import Linear, Qwen3ForCausalLM
from paceline.ops.persistent.program import Program
from paceline.runtime import round as rounds
from paceline.runtime.drafting import DraftStage
from paceline.runtime.few_rows import DraftPass, TargetPass
from paceline.runtime.graphs import RoundSet

ROUND: Final = "rows, acceptance"
ONE_KERNEL: Final = "target: one kernel"
"""The whole of a few rows' pass: layers, head, and the drafter's fc and K/V where they lie in its blocks."""
TARGET: Final = "target: norms, rotation, rest"
MATMULS: Final = "target: matmuls"
ATTENTION: Final = "target: attention"
HEAD: Final = "target: head"
SAMPLING: Final = "sampling"
DRAFT_CONTEXT: Final = "draft: fc and K/V"
DRAFT_LAYERS: Final = "draft: layers"
DRAFT_KERNEL: Final = "draft: one kernel"
"""The whole of the drafter's pass over a few rows: layers and head."""
DRAFT_HEAD: Final = "draft: head"
MARKOV: Final = "draft: Markov, choice"
STAGES: Final = (
    ONE_KERNEL,
    MATMULS,
    ATTENTION,
    TARGET,
    HEAD,
    SAMPLING,
    ROUND,
    DRAFT_CONTEXT,
    DRAFT_KERNEL,
    DRAFT_LAYERS,
    DRAFT_HEAD,
    MARKOV,
)
"""In the order they are shown. Which a round has depends on whether a pass is one kernel."""

PHASES: Final = "run_phases"
"""The persistent kernel. The profiler sees it run, but not the call that launches it: a range of this name
around each call says where that was."""

SERVED: Final = "round as it is served"
"""The range of a captured round's launch."""


class _Part(NamedTuple):
    """A function whose calls are a stage when made from another one."""

    owner: Any
    name: str
    stage: str
    within: str | None


# The same function may serve several stages: a Linear called by the drafter is no matmul of the target.
_PARTS: Final = (
    _Part(rounds.DecodeRound, "__call__", ROUND, None),
    _Part(TargetPass, "__call__", ONE_KERNEL, ROUND),
    _Part(Qwen3ForCausalLM, "forward", TARGET, ROUND),
    _Part(Linear, "forward", MATMULS, TARGET),
    _Part(Linear, "parts", MATMULS, TARGET),
    _Part(Linear, "silu_mul", MATMULS, TARGET),
    _Part(PagedContext, "attend", ATTENTION, TARGET),
    _Part(Qwen3ForCausalLM, "logits", HEAD, ROUND),
    _Part(rounds, "sample_fixed", SAMPLING, ROUND),
    _Part(DraftStage, "write_context", DRAFT_CONTEXT, ROUND),
    _Part(DraftStage, "keep_context", DRAFT_CONTEXT, ROUND),
    _Part(DraftStage, "propose", DRAFT_LAYERS, ROUND),
    _Part(DraftPass, "__call__", DRAFT_KERNEL, DRAFT_LAYERS),
    _Part(Drafter, "head", DRAFT_HEAD, DRAFT_LAYERS),
    _Part(Drafter, "draft", MARKOV, DRAFT_LAYERS),
    _Part(Drafter, "branch_off", MARKOV, DRAFT_LAYERS),
)


class Recorder(ABC):
    """Opens and closes ranges, which nest; counts the rounds."""

    def __init__(self) -> None:
        self.num_rounds = 0
        self._stack: list[str] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Until it ends, calls of the parts are recorded."""
        with ExitStack() as stack:
            for part in _PARTS:
                stack.enter_context(patch.object(part.owner, part.name, self._recorded(part)))
            yield

    def _recorded(self, part: _Part) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(part.owner, part.name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if (self._stack[-1] if self._stack else None) != part.within:
                return function(*args, **kwargs)
            self._stack.append(part.stage)
            try:
                with self.range(part.stage):
                    return function(*args, **kwargs)
            finally:
                self._stack.pop()
                self.num_rounds += part.stage == ROUND

        return call

    @abstractmethod
    def range(self, stage: str) -> AbstractContextManager[None]:
        """The range of one call."""


class ClockRecorder(Recorder):
    """Each stage's own seconds by the clock, without those of the stages within it.

    Attributes:
        seconds: by stage, over all rounds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner: list[float] = []

    @contextmanager
    def range(self, stage: str) -> Iterator[None]:
        """See :meth:`Recorder.range`."""
        self._inner.append(0.0)
        start = time.perf_counter()
        try:
            yield
        finally:
            whole = time.perf_counter() - start
            self.seconds[stage] += whole - self._inner.pop()
            if self._inner:
                self._inner[-1] += whole


class ProfilerRecorder(Recorder):
    """Ranges in torch's profiler.

    Attributes:
        seconds: by stage, of kernels, over all rounds; there once :meth:`profiled` has ended.
        kernels: their number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds: Mapping[str, float] = {}
        self.kernels: Mapping[str, int] = {}

    @contextmanager
    def range(self, stage: str) -> Iterator[None]:
        """See :meth:`Recorder.range`."""
        with torch.profiler.record_function(stage):
            yield

    @contextmanager
    def profiled(self) -> Iterator[None]:
        """Record, profile, and at the end charge the kernels."""
        with profiled() as events, self.active(), _in_ranges(Program, "__call__", PHASES):
            yield
        self.seconds, self.kernels = charge_kernels(events)


class Gaps(NamedTuple):
    """A round as the profiler sees it served, on average over rounds that follow each other.

    Attributes:
        period_s: from its first kernel to the next round's.
        within_s: of that, before its last kernel ends, while nothing ran on the GPU.
        between_s: after that, the same.
    """

    period_s: float
    within_s: float
    between_s: float


class GapRecorder:
    """What lies between the kernels of captured rounds.

    Attributes:
        gaps: there once :meth:`profiled` has ended; None for less than two rounds.
    """

    gaps: Gaps | None = None

    @contextmanager
    def profiled(self) -> Iterator[None]:
        """Profile, and at the end look for gaps."""
        with profiled() as events, _in_ranges(RoundSet, "run", SERVED):
            yield
        self.gaps = find_gaps(events)


@contextmanager
def profiled() -> Iterator[list[Mapping[str, Any]]]:
    """Run torch's profiler; the events of its Chrome trace are in the list once it has ended."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    events: list[Mapping[str, Any]] = []
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        yield events
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events += json.loads(path.read_text())["traceEvents"]


@contextmanager
def _in_ranges(owner: Any, name: str, label: str) -> Iterator[None]:
    """Until it ends, each call of a function is a range."""
    function: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(label):
            return function(*args, **kwargs)

    with patch.object(owner, name, call):
        yield


def charge_kernels(events: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, int]]:
    """Seconds and number of kernels by stage, from the events of a Chrome trace.

    A kernel and the call that launched it share a correlation number; the call lies within the ranges open
    when it was made, and the innermost is charged. Persistent kernels whose calls were not seen belong to the
    ranges named like them, in their order. Kernels launched outside of all ranges are left out.

    Args:
        events: of ``torch.profiler``: ``ts`` and ``dur`` in microseconds.
    """
    ranges = sorted((*_interval(e), str(e["name"])) for e in _annotations(events) if e["name"] in STAGES)
    calls = _calls(events)
    seen = {correlation for _, correlation in calls}
    unseen = sorted(
        (float(e["ts"]), _correlation(e))
        for e in events
        if e.get("cat") == "kernel" and PHASES in str(e["name"]) and _correlation(e) not in seen
    )
    marks = sorted(float(e["ts"]) for e in _annotations(events) if e["name"] == PHASES)
    calls += [(at, correlation) for at, (_, correlation) in zip(marks, unseen, strict=False)]
    stage_of: dict[int, str] = {}
    opened: list[tuple[float, str]] = []  # ends and names, innermost last
    following = iter([*ranges, (float("inf"), 0.0, "")])
    coming = next(following)
    for at, correlation in sorted(calls):
        while coming[0] <= at:
            while opened and opened[-1][0] <= coming[0]:
                opened.pop()
            opened.append(coming[1:])
            coming = next(following)
        while opened and opened[-1][0] < at:
            opened.pop()
        if opened:
            stage_of[correlation] = opened[-1][1]
    seconds: dict[str, float] = {}
    kernels: dict[str, int] = {}
    for event in _on_device(events):
        stage = stage_of.get(_correlation(event))
        if stage is not None:
            seconds[stage] = seconds.get(stage, 0.0) + 1e-6 * float(event["dur"])
            kernels[stage] = kernels.get(stage, 0) + 1
    return seconds, kernels


def find_gaps(events: Sequence[Mapping[str, Any]]) -> Gaps | None:
    """When nothing ran on the GPU, within captured rounds and from each to the next; None for less than two.

    Args:
        events: as for :func:`charge_kernels`, with a range named ``SERVED`` around each round's launch.
    """
    served = sorted(_interval(e) for e in _annotations(events) if e["name"] == SERVED)
    starts = [start for start, _ in served]
    launches = {
        correlation
        for at, correlation in _calls(events, "GraphLaunch")
        if (index := bisect_right(starts, at)) and at <= served[index - 1][1]
    }
    spans: dict[int, tuple[float, float]] = {}
    for event in _on_device(events):
        correlation = _correlation(event)
        if correlation in launches:
            first, last = spans.get(correlation, _interval(event))
            start, end = _interval(event)
            spans[correlation] = min(first, start), max(last, end)
    rounds = sorted(spans.values())
    if len(rounds) < 2:
        return None
    idle = _idle([_interval(event) for event in _on_device(events)])
    within = between = 0.0
    for (start, end), (following, _) in itertools.pairwise(rounds):
        within += _overlap(idle, start, end)
        between += _overlap(idle, end, following)
    count = 1e6 * (len(rounds) - 1)
    return Gaps((rounds[-1][0] - rounds[0][0]) / count, within / count, between / count)


def _idle(busy: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """What lies between intervals."""
    found: list[tuple[float, float]] = []
    reached = float("inf")
    for start, end in sorted(busy):
        if start > reached:
            found.append((reached, start))
        reached = end if reached == float("inf") else max(reached, end)
    return found


def _overlap(intervals: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """How much of an interval others cover that do not overlap each other."""
    return sum(max(0.0, min(end, last) - max(start, first)) for first, last in intervals)


def _interval(event: Mapping[str, Any]) -> tuple[float, float]:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _correlation(event: Mapping[str, Any]) -> int:
    return int(event.get("args", {}).get("correlation", -1))


def _annotations(events: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    return (event for event in events if event.get("cat") == "user_annotation")


def _on_device(events: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    return (event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"))


def _calls(events: Sequence[Mapping[str, Any]], name: str = "") -> list[tuple[float, int]]:
    """When calls of the CUDA runtime and driver were made, and their correlation numbers."""
    return [
        (float(event["ts"]), _correlation(event))
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and "correlation" in event.get("args", {})
        and name in str(event.get("name", ""))
    ]
