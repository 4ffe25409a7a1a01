"""Every row of the performance targets, on one GPU at Qwen3-4B's geometry.

    python benchmarks/targets.py --out FOLDER [--parts plain,dspark,...] [--rows decode,rounds,...]
        [--repeats 3] [--rounds 1,8,32]

Parts: ``plain``, ``dspark`` and ``dflash`` run random weights (drafters with a synthetic accept length of
3.52, every draft verified); ``planned`` and ``planned-dflash`` are with the verify planner; ``deterministic``
is ``plain`` with ``--deterministic``; ``real`` inflates the bundled pair to that geometry and compares tokens
with and without the drafter; ``startup`` starts a server-like process on empty caches of compiled code, then
twice more, and twice without the planner. Each part runs in a process of its own and writes
``FOLDER/targets_PART.json`` row by row, so that a part that fails or is cut keeps what it has.
Decode rounds are captured when they are first needed, in a run that is not timed; for ``planned`` all of them
before, since nobody knows which depths will be chosen. A part takes about a minute on an H200. ``--small``
runs all but ``real`` on the bundled pair on a CPU, to try the script.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.bench.driver import Driver, random_prompts
from paceline.bench.geometry import with_geometry
from paceline.bench.inflate import inflate_pair
from paceline.bench.latency import Shape, measure_latency
from paceline.bench.machine import describe_engine, describe_machine, read_bandwidth
from paceline.bench.prefix import PrefixCases, shared_prefix, warm_prefix
from paceline.bench.round import measure_round
from paceline.bench.speculation import run_speculation
from paceline.bench.startup import measure_startup
from paceline.bench.throughput import measure_throughput
from paceline.config import EngineConfig

GEOMETRY = "qwen3-4b"
ACCEPT_LENGTH = 3.52
DRAFTERS = {
    "plain": None,
    "dspark": "dspark-b7",
    "dflash": "dflash-b16",
    "planned": "dspark-b7",
    "planned-dflash": "dflash-b16",
    "deterministic": None,
}
PARTS = (*DRAFTERS, "real", "startup")
ROWS = ("decode", "prefill", "prefix", "rounds")
SHAPES = [(1, 128, 512), (1, 4000, 256), (8, 128, 512), (32, 128, 256), (64, 1024, 256), (128, 1024, 256)]
STARTS = ("first", "again", "once more")
SMALL_SHAPES = [(1, 32, 24), (4, 32, 24)]


class Results:
    """Rows of a part, written as they come."""

    def __init__(self, folder: Path, part: str, device: torch.device) -> None:
        self.path = folder / f"targets_{part}.json"
        machine = describe_machine(device)
        machine["command"] = f"python benchmarks/targets.py --parts {part}"
        self.head: dict[str, Any] = {"machine": machine}
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, row: dict[str, Any]) -> None:
        """One more row."""
        self.rows.append({"row": name, **row})
        self.path.write_text(json.dumps({**self.head, "results": self.rows}, indent=1) + "\n")
        shown = {key: value for key, value in row.items() if not isinstance(value, list)}
        print(name, json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in shown.items()}))
        for stage in row.get("stages", []):
            print("   ", {k: round(v, 4) if isinstance(v, float) else v for k, v in stage.items() if v})
        sys.stdout.flush()

    def measure(self, name: str, action: Callable[[], dict[str, Any]]) -> None:
        """The row an action returns, or what went wrong with it."""
        start = time.perf_counter()
        try:
            row = action()
        except Exception as error:
            traceback.print_exc()
            row = {"error": f"{type(error).__name__}: {error}"}
        self.add(name, {**row, "took_s": time.perf_counter() - start})


def engine_of(part: str, small: bool) -> EngineConfig:
    """The engine of a part with random weights."""
    drafter = DRAFTERS[part]
    planner = "auto" if part.startswith("planned") else "off"
    speculation: dict[str, Any] = {"synthetic_accept_length": ACCEPT_LENGTH, "verify_planner": planner}
    deterministic = part == "deterministic"
    if small:
        speculation["method"] = "dflash" if part.endswith("dflash") else "dspark"
        config = {} if drafter is None else speculation
        return EngineConfig.of(
            device="cpu", num_blocks=1000, deterministic=deterministic, speculative_config=config
        )
    base = EngineConfig.of(
        device="cuda",
        max_num_seqs=128,
        deterministic=deterministic,
        speculative_config=None if drafter is None else speculation,
    )
    return with_geometry(base, GEOMETRY, drafter)


def decoded(driver: Driver, shape: Shape, repeats: int, read_bytes_per_s: float) -> dict[str, Any]:
    """A row of decoding."""
    return asdict(measure_latency(driver, shape, repeats, read_bytes_per_s))


def taken_apart(driver: Driver, size: int, context: int, read_bytes_per_s: float) -> dict[str, Any]:
    """A row of a decode round by stages."""
    return {"stages": measure_round(driver, size, context, 8, read_bytes_per_s)}


def run_random(
    results: Results, part: str, args: argparse.Namespace, sizes: list[int], batches: list[int] | None
) -> None:
    """Of decoding at every shape, prefill, prefixes, and rounds taken apart, those asked for."""
    rows, repeats, small = args.rows.split(","), args.repeats, args.small
    device = torch.device("cpu" if small else "cuda")
    rate = read_bandwidth(device)  # before the engine takes the memory
    driver = Driver(engine_of(part, small), prepare=False)
    if part.startswith("planned"):
        driver.prepare_greedy()
    results.head["settings"] = {**describe_engine(driver), "repeats": repeats, "read_bytes_per_s": rate}
    results.add("built", {"ready_s": driver.info.ready_s, "num_blocks": driver.info.num_blocks})
    driver.run(random_prompts(4, 64, driver.info.vocab_size, 9), 16)
    if "decode" in rows:
        shapes = SMALL_SHAPES if small else SHAPES
        for shape in (shape for shape in shapes if batches is None or shape[0] in batches):
            # One sequence draws few accept lengths: more runs, for their mean to settle.
            runs = repeats * (5 if shape[0] == 1 and DRAFTERS[part] is not None else 1)
            name = f"{part} {shape[0]} x {shape[1]} -> {shape[2]}"
            results.measure(name, partial(decoded, driver, Shape(*shape), runs, rate))
    if "prefill" in rows:
        count, length = (4, 100) if small else (64, 1024)
        results.measure(
            f"{part} prefill {count} x {length}",
            lambda: asdict(measure_throughput(driver, count, length, 1, None, repeats)),
        )
    if "prefix" in rows:
        cases = PrefixCases(6, 256, 16, 8, 512, 0) if small else PrefixCases(96, 4000, 16, 16, 16384, 0)
        results.measure(f"{part} shared prefix", lambda: shared_prefix(driver, cases, repeats))
        results.measure(f"{part} warm prefix", lambda: warm_prefix(driver, cases, 2 * repeats + 1))
    if "rounds" in rows:
        for size in sizes:
            context = 64 if small else 512
            results.measure(f"{part} round at {size}", partial(taken_apart, driver, size, context, rate))


def run_real(results: Results, repeats: int) -> None:
    """The bundled pair at full size: the same tokens with and without the drafter, and what it gains."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        target, drafter = inflate_pair(
            "mini", "mini-dspark", GEOMETRY, folder + "/pair", pad_vocab=True, dtype="bfloat16"
        )
        results.add("inflate", {"seconds": time.perf_counter() - start})
        config = EngineConfig.of(
            model=str(target),
            device="cuda",
            max_num_seqs=16,
            speculative_config={"model": str(drafter), "verify_planner": "off"},
        )
        report = run_speculation(config, None, 256, 0.0, "1,8,16", repeats)
        results.head["settings"] = report.settings
        for row in report.results:
            results.add(f"real pair, batch {row['batch_size']}", row)


def numbers(text: str) -> list[int] | None:
    """Positive numbers with commas between; None if there is anything else."""
    parts = text.split(",")
    return [int(part) for part in parts] if all(p.isdecimal() and int(p) > 0 for p in parts) else None


def main() -> int:
    """Run parts, each in a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}; random weights only")
    parser.add_argument("--batches", help="batch sizes that are decoded; all without")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--rounds",
        help="batch sizes whose rounds are taken apart: 1,8,32, with --small 1; random weights only",
    )
    parser.add_argument("--small", action="store_true", help="the bundled pair on a CPU, to try the script")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    parts = args.parts.split(",")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}. There are {', '.join(PARTS)}.")
    rows = args.rows.split(",")
    if not set(rows) <= set(ROWS):
        parser.error(f"--rows takes some of {', '.join(ROWS)}, with commas between; got {args.rows!r}.")
    sizes = numbers(args.rounds or ("1" if args.small else "1,8,32"))
    batches = None if args.batches is None else numbers(args.batches)
    if sizes is None or (batches is None and args.batches is not None):
        parser.error("--rounds and --batches take batch sizes separated by commas, such as 1,8,32.")
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.here:
        command = [sys.executable, *sys.argv, "--here", "--parts"]
        return max(subprocess.run([*command, part], check=False).returncode for part in parts)
    (part,) = parts
    results = Results(args.out, part, torch.device("cpu" if args.small else "cuda"))
    if part in DRAFTERS:
        run_random(results, part, args, sizes, batches)
    elif part == "startup":
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = os.environ["TRITON_CACHE_DIR"] = folder
            for planner, drafter, starts in (("auto", "planned", STARTS), ("off", "dspark", STARTS[:2])):
                for when in starts:
                    name = f"start, planner {planner}, {when}"
                    results.measure(name, partial(measure_startup, engine_of(drafter, args.small)))
    elif not args.small:
        run_real(results, args.repeats)
    return int(any("error" in row for row in results.rows))


if __name__ == "__main__":
    sys.exit(main())
