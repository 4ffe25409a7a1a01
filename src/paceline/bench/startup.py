"""From nothing to the first token: a fresh process, and when each phase of it ended.

The phases are the engine's own log lines: what a user sees go by, with the time at which it went.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import msgspec
import torch

from paceline.bench.machine import describe_machine
from paceline.bench.report import Column, Plot, Report
from paceline.config import EngineConfig
from paceline.errors import ConfigError

COLUMNS = (
    Column("at_s", "at s", ".2f"),
    Column("took_s", "took s", ".2f"),
    Column("phase", "until", wrap=True),
)


def measure_startup(engine: EngineConfig) -> dict[str, Any]:
    """Start an engine in a process of its own.

    Returns:
        ``ready_s`` and ``first_token_s``, from the start of the process, and ``phases``: each has ``phase``,
        what was said at its end, ``at_s``, when that was, and ``took_s``, since the one before.

    Raises:
        ConfigError: it did not start; with the last thing it said.
    """
    start = time.monotonic()  # Linux counts it from boot: the same clock in every process
    child = subprocess.run(
        [sys.executable, "-m", "paceline.bench.startup_child"],
        input=msgspec.json.encode(engine),
        capture_output=True,
        check=False,
    )
    lines = child.stdout.splitlines()
    if child.returncode or not lines:
        said = child.stderr.decode(errors="replace").strip().splitlines()
        raise ConfigError(f"The engine did not start: {said[-1] if said else 'it said nothing.'}")
    marks = [(at - start, phase) for at, phase in json.loads(lines[-1])]
    ends = [0.0, *(at for at, _ in marks)]
    phases = [
        {"phase": phase, "at_s": at, "took_s": later - earlier}
        for (at, phase), (earlier, later) in zip(marks, itertools.pairwise(ends), strict=True)
    ]
    return {"ready_s": marks[-2][0], "first_token_s": marks[-1][0], "phases": phases}


def run_startup(engine: EngineConfig, repeats: int) -> Report:
    """Start it ``repeats`` times; the run of median time to the first token is reported."""
    runs = [measure_startup(engine) for _ in range(repeats)]
    run = sorted(runs, key=lambda run: float(run["first_token_s"]))[len(runs) // 2]
    device = "cuda" if engine.device != "cpu" and torch.cuda.is_available() else "cpu"
    return Report(
        bench="startup",
        machine=describe_machine(torch.device(device)),
        settings={
            "model": engine.model or "paceline-mini",
            "engine": msgspec.to_builtins(engine),
            "repeats": repeats,
            "ready_s": run["ready_s"],
            "first_token_s": run["first_token_s"],
            "median_ready_s": statistics.median(run["ready_s"] for run in runs),
        },
        columns=COLUMNS,
        plot=Plot("phase", "took_s", bars=True),
        results=run["phases"],
    )
