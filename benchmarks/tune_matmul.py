"""Measure, for a model's weight shapes, which cut of our matmul kernel beats the vendor's library.

    python benchmarks/tune_matmul.py --model src/paceline/bench/geometries/qwen3-4b \
        --drafter src/paceline/bench/geometries/qwen3-4b-dspark-b7 --out choices.json

Writes the table ``paceline.ops.choices`` reads, by default to the user's cache. Every candidate runs in a
CUDA graph of many calls on copies of the weights that do not fit into the L2 cache together, with what it is
fused with: ``swiglu`` with silu(gate) * up, ``parts`` with the add and norm behind it. A winner must equal
the library's result. Kernels are compiled first, in parallel. Takes some
two minutes for Qwen3-4B on an H200.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from paceline import ops
from paceline.models.config import Qwen3Config
from paceline.models.drafter_dialects import load_drafter_config
from paceline.ops.choices import MatmulConfig, Op, cache_path, dump
from paceline.ops.triton.matmul import matmul

ROWS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
DEVICE = torch.device("cuda")
PAST_CACHE = 256 << 20  # bytes of weights between two uses of the same: five times an H200's L2
SHARED_MEMORY = 220 << 10
GAIN = 0.98  # of the library's time: less is not worth a kernel of our own

Shape = tuple[Op, int, int]


def shapes_of(model: Path, drafter: Path | None) -> list[Shape]:
    """(op, N, K) of every product in a model, and in its drafter."""
    config = Qwen3Config.from_pretrained(model)
    shapes: list[Shape] = [("linear", config.vocab_size, config.hidden_size), *layer_shapes(config)]
    if drafter is not None:
        draft = load_drafter_config(drafter, config)
        d = draft.layers.hidden_size
        shapes += [("linear", d, len(draft.tap_layer_ids) * d), *layer_shapes(draft.layers)]
    return list(dict.fromkeys(shapes))


def layer_shapes(config: Qwen3Config) -> list[Shape]:
    d, inner = config.hidden_size, config.intermediate_size
    return [
        ("linear", config.q_size + 2 * config.kv_size, d),
        ("parts", d, config.q_size),
        ("swiglu", inner, d),
        ("parts", d, inner),
    ]


def tiles(op: Op, rows: int) -> Iterator[MatmulConfig]:
    """Ways to cut a product of so many rows, without splits."""
    few = max(16, min(triton.next_power_of_2(rows), 128))
    pointers, tma = [(False, 4)], [(True, 4), (True, 6)]  # how tiles are fetched, and stages
    options: list[tuple[int, int, int, bool, int, tuple[bool, int]]] = []  # block m, n, k, swap, warps, fetch
    if rows <= 128:
        options += [(few, n, k, True, 4, f) for n in (64, 128) for k in (64, 128) for f in pointers + tma]
    if rows <= 32:
        options += [(few, n, k, False, 4, f) for n in (32, 64, 128) for k in (64, 128) for f in pointers]
    if 32 < rows <= 256:
        options += [(64, n, k, False, 4, f) for n in (64, 128) for k in (64, 128) for f in pointers + tma]
    if rows >= 128:
        options += [(128, n, 64, False, 8, (t, s)) for n in (64, 128, 256) for t, s in ((True, 3), *tma[:1])]
        options += [(128, 128, 64, False, 8, (False, 3))]
    weights = 2 if op == "swiglu" else 1
    for m, n, k, swap, warps, (by_tma, stages) in options:
        if stages * (m + weights * n) * k * 2 <= SHARED_MEMORY and weights * m * n <= 128 * 256:
            yield MatmulConfig(m, n, k, swap=swap, num_warps=warps, num_stages=stages, tma=by_tma)


def candidates(shape: Shape, rows: int) -> Iterator[MatmulConfig]:
    """Tiles with as many splits as fill the device about once to four times."""
    op, width, depth = shape
    processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    for config in tiles(op, rows):
        programs = triton.cdiv(width, config.block_n) * triton.cdiv(rows, config.block_m)
        for splits in (1, 2, 3, 4, 5, 6, 8):
            if splits > 1 and (programs * splits > 4 * processors or depth // splits < 2 * config.block_k):
                continue
            if programs * splits < 0.6 * processors:
                continue
            yield replace(config, splits=splits)


def compile_share(shapes: list[Shape], row_counts: tuple[int, ...], share: int, shares: int) -> None:
    """Run every shares-th kernel once, on small operands, so that it is in Triton's cache."""
    kernels = {
        (shape[0], replace(config, splits=1), config.splits > 1 and shape[0] != "parts")
        for shape, rows in itertools.product(shapes, row_counts)
        for config in candidates(shape, rows)
    }
    for op, config, split in sorted(kernels, key=repr)[share::shares]:
        weight = torch.zeros(512, 1024, dtype=torch.bfloat16, device=DEVICE)
        try:
            run(op, weight[:16], weight, replace(config, splits=2 if split else 1))
        except Exception as error:
            print(f"{op} {config}: {error}", file=sys.stderr)


def compile_all(arguments: list[str]) -> None:
    shares = max(1, min((os.cpu_count() or 1) - 2, 14))
    workers = [
        subprocess.Popen([sys.executable, __file__, *arguments, "--compile", str(share), str(shares)])
        for share in range(shares)
    ]
    for worker in workers:
        worker.wait()


def run(op: Op, x: Tensor, weight: Tensor, config: MatmulConfig | None) -> Tensor:
    """The product; by the library when there is no config, then with silu(gate) * up where the op says so."""
    if config is not None:
        return matmul(x, weight, config=config, swiglu=op == "swiglu", parts=op == "parts")
    out = F.linear(x, weight)
    return ops.silu_mul(out) if op == "swiglu" else out


class Bench:
    """One product on operands of its shape, with as many copies of the weights as do not fit into the L2."""

    def __init__(self, shape: Shape, rows: int) -> None:
        self.op, width, depth = shape
        self.x = torch.randn(rows, depth, dtype=torch.bfloat16, device=DEVICE)
        out = 2 * width if self.op == "swiglu" else width
        count = max(2, -(-PAST_CACHE // (out * depth * 2)))
        self.weights = torch.randn(count, out, depth, dtype=torch.bfloat16, device=DEVICE) / depth**0.5
        self.residual = torch.randn(rows, width, dtype=torch.bfloat16, device=DEVICE)
        self.norm = torch.ones(width, dtype=torch.bfloat16, device=DEVICE)

    def call(self, weight: Tensor, config: MatmulConfig | None) -> Tensor:
        out = run(self.op, self.x, weight, config)
        return ops.add_rms_norm(out, self.residual, self.norm, 1e-6)[0] if self.op == "parts" else out

    def time_us(self, config: MatmulConfig | None) -> float:
        """Median time of a call, of five replays of a graph."""
        self.call(self.weights[0], config)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for weight in self.weights:
                self.call(weight, config)
        return median_us(graph.replay) / len(self.weights)

    def agrees(self, config: MatmulConfig) -> bool:
        """Whether a cut gives the library's result, to a few roundings."""
        ours, library = (self.call(self.weights[0], c).float() for c in (config, None))
        return bool((ours - library).abs().max() <= 0.03 * library.abs().max())


def median_us(replay: Callable[[], None], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return float(statistics.median(times))


def tune(shape: Shape, rows: int) -> MatmulConfig | None:
    """The fastest cut, or None when the library is as fast; prints what was measured."""
    bench = Bench(shape, rows)
    library = bench.time_us(None)
    torch.backends.cuda.preferred_blas_library("cublaslt")
    lt = bench.time_us(None)
    torch.backends.cuda.preferred_blas_library("default")
    timed = []
    for config in candidates(shape, rows):
        try:
            timed.append((bench.time_us(config), config))
        except triton.runtime.errors.OutOfResources:
            continue
    timed.sort(key=lambda pair: pair[0])
    best, chosen = next(((t, c) for t, c in timed if bench.agrees(c)), (float("inf"), None))
    op, width, depth = shape
    floor = (2 if op == "swiglu" else 1) * width * depth * 2 / 4.2e6
    print(
        f"{op:7}{width:7}{depth:6} R={rows:<5} floor {floor:6.1f}  cuBLAS {library:7.1f}  Lt {lt:7.1f}  "
        f"ours {best:7.1f} us ({library / best:4.2f}x) of {len(timed)}  {chosen}",
        flush=True,
    )
    return chosen if best < GAIN * library else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json")
    parser.add_argument("--drafter", type=Path, help="folder with a drafter's config.json")
    parser.add_argument("--out", type=Path, help="table to write; default: the user's cache")
    parser.add_argument("--rows", help="row counts to measure, such as 16,64; default: all")
    parser.add_argument("--compile", type=int, nargs=2, metavar=("SHARE", "SHARES"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: this measures GPU kernels")
    shapes = shapes_of(args.model, args.drafter)
    row_counts = ROWS if args.rows is None else tuple(int(count) for count in args.rows.split(","))
    if args.compile:
        compile_share(shapes, row_counts, *args.compile)
        return 0
    began = time.perf_counter()
    compile_all(sys.argv[1:])
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    gpu = torch.cuda.get_device_name()
    out = args.out or cache_path(gpu)
    out.parent.mkdir(parents=True, exist_ok=True)
    table: dict[Shape, dict[int, MatmulConfig | None]] = {}
    for shape in shapes:
        with torch.inference_mode():
            table[shape] = {rows: tune(shape, rows) for rows in row_counts}
        # after each shape: what is measured stays, should the rest be cut off
        out.write_text(dump(table, gpu=gpu, torch=torch.__version__, triton=triton.__version__))
    print(f"wrote {out} in {time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
