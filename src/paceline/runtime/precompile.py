"""A first start on a machine: its kernels compiled side by side, before the first of them is needed.

The steps and captures of a start are gone through once with a runner that nobody needs, in which kernels only
compile (``ops/ahead.py``). Whether that has been done before is noted in Triton's own cache: who deletes the
kernels deletes the note.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

import paceline
from paceline.models.attention import AttentionSpec
from paceline.models.qwen3 import DecoderLayer
from paceline.ops.ahead import compile_only
from paceline.runtime.memory import StepLimits
from paceline.runtime.plan import Span, StepPlan
from paceline.runtime.runner import Runner
from paceline.runtime.warmup import warm_up

logger = logging.getLogger(__name__)

NOTE = "compiled"
SOURCES = ("models", "ops", "runtime", "sampling")
"""Packages that say which kernels there are."""

APART = 8
"""How much larger the next size is of rounds that the verify planner times at its start."""


def precompile(make: Callable[[], Runner], limits: StepLimits, *, planned: bool, facts: object) -> None:
    """Compile the kernels of a start, unless that was done before. What goes wrong here is logged: kernels
    compile when they are launched, too.

    Args:
        make: a runner that nobody needs, over caches as small as can be.
        limits: of its steps.
        planned: whether there is a verify planner, which times rounds.
        facts: what of the engine says which kernels there are, by its ``repr``.
    """
    from triton.runtime.cache import get_cache_manager

    note = get_cache_manager(_key(facts))
    if note.get_file(NOTE) is not None:
        return
    try:
        _compile(make, limits, planned=planned)
    except Exception:
        logger.warning("Kernels could not be compiled side by side; each compiles when needed", exc_info=True)
    gc.collect()
    torch.cuda.empty_cache()
    note.put("", NOTE)


def _compile(make: Callable[[], Runner], limits: StepLimits, *, planned: bool) -> None:
    started = time.perf_counter()
    with compile_only() as count:
        go_through(make(), limits, planned=planned)
        found_s = time.perf_counter() - started
    logger.info(
        "Compiled %d kernels in %.2f s; it took %.2f s to find which",
        *count,
        time.perf_counter() - started,
        found_s,
    )


@torch.inference_mode()
def go_through(runner: Runner, limits: StepLimits, *, planned: bool) -> None:
    """Run and capture all that a start does, and a first short prompt."""
    with _once_each(runner.model.decoder_layers()):
        warm_up(runner, limits)
        if runner.rounds is None or runner.passes is None:
            return
        for part in (runner.rounds, runner.passes):
            part.capture_largest()
            part.capture_first()
        for plan in _timed(runner, limits) if planned else ():
            runner.launch(plan)
        for propose in {False, limits.num_drafts > 0}:
            runner.launch(StepPlan(0, spans=[Span(0, 2, propose=propose)], max_context=limits.max_model_len))


@contextmanager
def _once_each(layers: Sequence[DecoderLayer]) -> Iterator[None]:
    """Of layers that differ in their weights only, the first is run: the others would launch the same
    kernels.
    """
    seen: set[AttentionSpec] = set()
    repeated = []
    for layer in layers:
        spec = layer.self_attn.spec
        repeated += [layer] if spec in seen else []
        seen.add(spec)
    for layer in repeated:
        layer.forward = lambda x, residual, *_: (x, residual)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in repeated:
            del layer.forward


def _timed(runner: Runner, limits: StepLimits) -> Iterator[StepPlan]:
    """Rounds like those that the verify planner times: every number of drafts at sizes far apart."""
    assert runner.rounds is not None
    captured, most = runner.rounds.shapes.draft_counts, limits.num_drafts
    last = 0
    for size in captured:
        if last and size < APART * last and size < limits.max_num_seqs:
            continue
        last = size
        for depth in (0, *captured[size]):
            spans = [Span(slot, 1 + most, most, propose=True) for slot in range(size)]
            yield StepPlan(0, spans=spans, max_context=limits.max_model_len, depth=depth)
        yield StepPlan(0, spans=[Span(slot, 1) for slot in range(size)], max_context=limits.max_model_len)


def _key(facts: object) -> str:
    """What a note is kept under: all that decides which kernels there are and how they are compiled."""
    import triton

    key = hashlib.sha256(repr((facts, torch.__version__, triton.__version__)).encode())
    key.update(repr(torch.cuda.get_device_properties(0)).encode())
    folder = Path(paceline.__file__).parent
    for path in sorted(path for name in SOURCES for path in (folder / name).rglob("*.py")):
        key.update(path.read_bytes())
    return key.hexdigest()
