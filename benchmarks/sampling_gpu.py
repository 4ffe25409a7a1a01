"""Check and time the sampler's filters on a GPU at Qwen3's vocabulary, rows by kind of filter.

    python benchmarks/sampling_gpu.py --out benchmarks/results/sampling_gpu_h200.json [--sweep]

Times are a call's share of a replayed CUDA graph of many calls: "filters" finds the last token kept, "sample"
does that and draws. Without filters, the first says what rows pay that have none. "same" counts the rows
whose kept tokens are those of ``filters.kept_prefix`` on the CPU; where mass decides, a token or two at the
edge may differ by rounding ("off" is the most).

Floors on an H200: one row is 0.6 MB and comes from L2, so launches are all, 2 us for each of four kernels;
512 rows are 311 MB, read once by the filters and once by the draw, 65 us each at 4.8 TB/s. Expected: some 20
us for "filters" with top_k at up to 64 rows and 150 us at 512, 30 and 200 us with top_p alone. A nucleus
of thousands of tokens is searched for in the row by one program: 400 us, and four times that at 512.
--sweep also tries other sizes of pieces.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from ops_measure import graph_us
from torch import Tensor

from paceline.bench.machine import describe_machine
from paceline.sampling import triton_filters
from paceline.sampling.filters import kept_prefix, ordered_top
from paceline.sampling.params import SamplingParams
from paceline.sampling.state import INV_TEMPERATURE, SamplingState, SlotSampling
from paceline.sampling.triton_filters import LastKept, last_kept
from paceline.sampling.triton_sampler import sample_argmax

VOCAB = 151936
ROWS = (1, 8, 64, 512)
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_k 20, top_p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "top_k 1000": {"top_k": 1000},
    "top_k 5000": {"top_k": 5000},
    "top_p 0.95": {"temperature": 0.6, "top_p": 0.95},
    "top_p 0.95, wide": {"temperature": 1.5, "top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
    "min_p 0.05, top_p 0.9": {"min_p": 0.05, "top_p": 0.9},
}
SIZES = {"CHUNK": (64, 128), "BLOCK": (1024, 2048, 4096), "NUM_WARPS": (4, 8, 16)}
CHECKED_ROWS = 8
GRAPH_CALLS = 10


def some_logits(rows: int) -> Tensor:
    """Like a model's: rounded to bf16, which ties many, with a few tokens that stand out."""
    generator = torch.Generator("cuda").manual_seed(rows)
    logits = torch.randn(rows, VOCAB, device="cuda", generator=generator) * 2
    likely = torch.randint(VOCAB, (rows, 60), device="cuda", generator=generator)
    height = torch.rand(rows, 60, device="cuda", generator=generator) * 8
    return logits.scatter_add_(1, likely, height + 5).bfloat16().float()


def state_of(fields: dict[str, Any]) -> SamplingState:
    state = SamplingState(1, VOCAB, device="cuda")
    state.set_slots([SlotSampling(0, SamplingParams(**fields), 7, 1)])
    return state


def check(logits: Tensor, last: LastKept, state: SamplingState) -> dict[str, int]:
    """Rows that keep what the CPU keeps, and the largest difference in a number of tokens."""
    count = min(CHECKED_ROWS, len(logits))
    x = logits[:count].cpu()
    slots = torch.zeros(count, dtype=torch.int64)
    floats, ints = state.floats.cpu()[slots], state.ints.cpu()[slots]
    values, ids = ordered_top(x, VOCAB)
    kept, _ = kept_prefix(values * floats[:, INV_TEMPERATURE, None].float(), floats, ints)
    last_logit, last_token = last.logits[:count, None].cpu(), last.tokens[:count, None].cpu()
    got = (values > last_logit) | ((values == last_logit) & (ids <= last_token))
    differences = (got != kept).sum(1)
    return {"rows": count, "same": int((differences == 0).sum()), "off": int(differences.max())}


def measure(rows: int, way: str, repeats: int) -> dict[str, Any]:
    """Times of one kind of filter on so many rows."""
    logits, state = some_logits(rows), state_of(WAYS[way])
    slots = torch.zeros(rows, dtype=torch.int32, device="cuda")
    positions = torch.arange(rows, dtype=torch.int32, device="cuda")
    tokens = torch.empty(rows, dtype=torch.int32, device="cuda")

    def filters() -> LastKept:
        return last_kept(logits, slots, state.floats, state.ints)

    def sample() -> None:
        sample_argmax(logits, slots, positions, state.floats, state.ints, last=filters(), out=tokens)

    return {
        "rows": rows,
        "way": way,
        "checked": check(logits, filters(), state),
        "filters_us": graph_us([filters], GRAPH_CALLS, repeats),
        "sample_us": graph_us([sample], GRAPH_CALLS, repeats),
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--sweep", action="store_true", help="also time other sizes of pieces")
    args = parser.parse_args()
    results = []
    for rows, way in itertools.product(ROWS, WAYS):
        results.append(measure(rows, way, args.repeats))
        print(results[-1], flush=True)
    report: dict[str, Any] = {"machine": describe_machine(torch.device("cuda")), "results": results}
    report["machine"]["command"] = "python benchmarks/sampling_gpu.py"
    if args.sweep:
        report["sweep"] = []
        for sizes in itertools.product(*SIZES.values()):
            for name, size in zip(SIZES, sizes, strict=True):
                setattr(triton_filters, name, size)
            for rows, way in itertools.product((1, 64, 512), ("top_k 20, top_p 0.95", "top_p 0.95")):
                entry = dict(zip(SIZES, sizes, strict=True)) | measure(rows, way, 5)
                report["sweep"].append(entry)
                print(entry, flush=True)
    Path(args.out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
