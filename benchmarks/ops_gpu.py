"""Check and time every GPU op at Qwen3-4B's geometry, and its drafters', beside the memory limit.

    python benchmarks/ops_gpu.py --out benchmarks/results/ops_gpu.json [--sweep]
    python benchmarks/ops_gpu.py --markdown benchmarks/results/ops_gpu.json
    python benchmarks/ops_gpu.py --cpu --out checks.json

Each op is first compared with a float64 computation (its outputs start as NaN, so that an unwritten element
is seen), integers with the reference's, the persistent kernel with the ordinary layers; and run where waiting
for the device is an error. Then it is timed twice with CUDA events: "cold", the median of single calls with
the L2 cache flushed before each, and "graph", a call's share of a replayed CUDA graph of many calls, where
launches cost nothing and small operands stay in L2; a product's weights do not, there are too many of them.
"torch" is the same work by torch's own kernels, cold. "limit" is the share of the cold time that moving the
bytes alone would take. What goes wrong with one case is reported, and the others go on. Exits with 1 when any
check failed.

--sweep also times attention under other tile sizes and split counts. --cpu runs the same checks of the
references in a small world (rows and lengths above 16 are a 32nd), without times. --markdown prints a table
of what was stored. Kernels are compiled first, in parallel.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import ops_attention
import ops_drafts
import ops_persistent
import ops_products
import ops_rounds
import ops_rowwise
import ops_sampler
import torch
from ops_case import Plan, World
from ops_measure import Result, Timer, measure
from ops_sweep import can_sweep, sweep
from ops_table import heading, line, markdown

COMPILE_SECONDS = 120
"""A process that compiles for longer is given up; what it leaves is compiled when it is checked."""


def plans(world: World, only: str = "") -> Iterator[Plan]:
    """Every case whose 'op shape' contains ``only``."""
    for plan in itertools.chain(
        ops_rowwise.plans(world),
        ops_products.plans(world),
        ops_attention.plans(world),
        ops_drafts.plans(world),
        ops_sampler.plans(world),
        ops_rounds.plans(world),
        ops_persistent.plans(world),
    ):
        if only in f"{plan.op} {plan.shape}":
            yield plan


def compile_all(arguments: list[str]) -> None:
    """Run every case once in processes side by side, so that its kernels are in the caches on disk."""
    shares = max(1, min((os.cpu_count() or 1) - 2, 8))
    workers = [
        subprocess.Popen([sys.executable, __file__, *arguments, "--compile", str(share), str(shares)])
        for share in range(shares)
    ]
    until = time.monotonic() + COMPILE_SECONDS
    for worker in workers:
        try:
            worker.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def compile_share(cases: list[Plan]) -> None:
    """Run cases once; what goes wrong is seen when they are checked."""
    for plan in cases:
        try:
            plan.build().run()
            torch.cuda.synchronize()
        except Exception:
            continue
        finally:
            torch.cuda.empty_cache()


def run(cases: Iterator[Plan], world: World, timer: Timer | None, bandwidth: float) -> list[Result]:
    """Results, each printed as it comes."""
    results = []
    print(heading())
    for plan in cases:
        results.append(measure(plan, world, timer, bandwidth))
        print(line(results[-1]), flush=True)
    return results


def run_sweeps(cases: Iterator[Plan], timer: Timer) -> dict[str, list[dict[str, object]]]:
    """The fastest ways to cut each attention up, by 'op shape'."""
    sweeps = {}
    for plan in cases:
        if "attention" not in plan.op:
            continue
        scene = plan.build().scene
        if scene is not None and can_sweep(scene):
            sweeps[f"{plan.op} {plan.shape}"] = fastest = sweep(scene, timer)[:5]
            print(plan.op, plan.shape, *(f"\n    {timing}" for timing in fastest), flush=True)
    return sweeps


def main(arguments: list[str] | None = None) -> int:
    """The command; ``arguments`` as on the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--markdown", type=Path, metavar="JSON", help="print the results in this file")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--bandwidth-tb-s", type=float, default=4.2, help="memory bandwidth of the device")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--only", default="", help="cases whose 'op shape' contains this")
    parser.add_argument("--sweep", action="store_true", help="also try other attention configurations")
    parser.add_argument("--cpu", action="store_true", help="only check, on the CPU")
    parser.add_argument("--compile", type=int, nargs=2, metavar=("SHARE", "SHARES"), help=argparse.SUPPRESS)
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parser.parse_args(arguments)
    if args.markdown:
        print(markdown(Result(**result) for result in json.loads(args.markdown.read_text())["results"]))
        return 0
    if args.out is None:
        parser.error("--out is missing")
    if not args.cpu and not torch.cuda.is_available():
        parser.error("no CUDA device: this benchmark measures GPU kernels; --cpu checks the references")
    dtype, began = getattr(torch, args.dtype), time.perf_counter()
    world = World.small(dtype) if args.cpu else World(torch.device("cuda", 0), dtype)
    torch.manual_seed(0)
    if args.compile:
        share, shares = args.compile
        with torch.inference_mode():
            compile_share(list(plans(world, args.only))[share::shares])
        return 0
    if not args.cpu and not args.only:
        compile_all(arguments)
        print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    timer = None if args.cpu else Timer(world.device, args.repeats)
    with torch.inference_mode():
        results = run(plans(world, args.only), world, timer, args.bandwidth_tb_s * 1e12)
        sweeps = run_sweeps(plans(world, args.only), timer) if args.sweep and timer else {}
    report = {
        "device": "cpu" if args.cpu else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "geometry": f"hidden {world.hidden}, {world.heads}/{world.kv_heads} heads x {world.head_dim}, "
        f"intermediate {world.intermediate}",
        "dtype": args.dtype,
        "bandwidth_tb_s": args.bandwidth_tb_s,
        "seconds": time.perf_counter() - began,
        "results": [asdict(result) for result in results],
        "sweeps": sweeps,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    failed = [result for result in results if not result.passed]
    print(f"{len(results) - len(failed)} of {len(results)} checks passed; wrote {args.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
