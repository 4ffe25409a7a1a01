"""Check one case, and time it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from ops_case import Case, Plan, World
from torch import Tensor

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
GRAPH_CALLS, GRAPH_REPEATS = 20, 7


@dataclass
class Result:
    """What was seen of a case.

    Attributes:
        error: largest difference from float64 over the largest value; infinite where integers differ.
        cold_us, graph_us, peer_us: times; None where they were not taken.
        mebibytes: read and written once.
        limit: share of the memory limit reached, cold.
        tflops: TFLOP/s, cold.
        failure: what went wrong, in words; empty for nothing.
    """

    op: str
    shape: str
    error: float | None = None
    passed: bool = False
    cold_us: float | None = None
    graph_us: float | None = None
    peer_us: float | None = None
    mebibytes: float | None = None
    limit: float | None = None
    tflops: float | None = None
    failure: str = ""


class Timer:
    """CUDA-event times. Holds the buffer that is overwritten to empty the L2 cache."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.repeats = repeats
        self._flush = torch.empty(1 << 30, dtype=torch.uint8, device=device)

    def cold_us(self, run: Callable[[], object]) -> float:
        """Median time of single calls that find nothing in the L2 cache."""
        run()
        pairs = []
        for _ in range(self.repeats):
            # long enough for the host to queue the op behind it: launch time stays out of the measure
            self._flush.zero_()
            pairs.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            pairs[-1][0].record()
            run()
            pairs[-1][1].record()
        torch.cuda.synchronize()
        return float(statistics.median(start.elapsed_time(end) for start, end in pairs)) * 1e3


def graph_us(runs: Sequence[Callable[[], object]], calls: int, repeats: int) -> float:
    """Median of a call's share of a graph of so many, of these in turn."""
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            runs[call % len(runs)]()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return float(statistics.median(times))


def error_of(case: Case) -> float:
    """The largest difference of what is compared; what the op leaves unwritten is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty returns
    try:
        outs = case.run()
    finally:
        torch.use_deterministic_algorithms(False)
    pairs = zip(case.outcome(*outs), case.exact(), strict=True)
    return max(difference(out, exact) for out, exact in pairs)


def difference(out: Tensor, exact: Tensor) -> float:
    """Largest difference over the largest value, and infinite for anything that cannot be compared."""
    if out.shape != exact.shape:
        return math.inf
    if not exact.is_floating_point():
        return 0.0 if out.dtype == exact.dtype and torch.equal(out, exact) else math.inf
    ratio = float((out.double() - exact).abs().max() / exact.abs().max())
    return math.inf if math.isnan(ratio) else ratio


def measure(plan: Plan, world: World, timer: Timer | None, bandwidth: float) -> Result:
    """The result of a plan, with times where there is a timer. Whatever goes wrong is in the result, too.

    Args:
        bandwidth: of the memory, in bytes per second.
    """
    result = Result(plan.op, plan.shape)
    try:
        case = plan.build()
        result.error = error_of(case)
        result.passed = result.error <= (TOLERANCE[world.dtype] if case.tolerance is None else case.tolerance)
        result.mebibytes = case.num_bytes / 2**20
        if timer is not None:
            take_times(result, case, timer, bandwidth)
    except Exception as error:
        result.passed, result.failure = False, f"{type(error).__name__}: {error}"
    return result


def take_times(result: Result, case: Case, timer: Timer, bandwidth: float) -> None:
    """Also sees that the op never waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    result.cold_us = timer.cold_us(case.run)
    result.limit = case.num_bytes / (result.cold_us * 1e-6) / bandwidth
    result.tflops = case.flops / result.cold_us / 1e6
    result.graph_us = graph_us([case.run, *case.others], GRAPH_CALLS, GRAPH_REPEATS)
    result.peer_us = timer.cold_us(case.peer) if case.peer else None
