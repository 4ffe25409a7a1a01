"""Many requests on one long prefix at Qwen3-4B geometry, with a drafter at its real size and random weights.

    python benchmarks/shared_prefix_gpu.py --out benchmarks/results/shared_prefix_qwen3_4b_h200.json

For each way to keep draft state: 64 and 96 requests that share 4,000 tokens and differ in the next 32, for 16
and 64 output tokens each. Every request must draft; memory must stay within what was planned at start; timed
from the submission of the first to the last token of all. Once with an empty prefix cache and once with the
prefix in it; drafts are accepted at random as often as a trained drafter's are (3.52 tokens per round).
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from pathlib import Path
from typing import Any

import torch

from paceline.bench.geometry import geometry_folder
from paceline.bench.machine import describe_machine
from paceline.config import EngineConfig
from paceline.engine.core import EngineCore
from paceline.engine.factory import make_core
from paceline.engine.messages import EngineRequest
from paceline.sampling.params import SamplingParams

ACCEPT_LENGTH = 3.52
SHARE = 0.9
CAPTURE_MB = 4096


def make(draft_state: str, small: bool) -> EngineCore:
    """An engine that drafts."""
    if small:
        bundled = {"method": "dspark", "draft_state": draft_state}
        return make_core(EngineConfig.of(device="cpu", max_num_seqs=96, speculative_config=bundled))
    speculative: dict[str, Any] = {
        "model": str(geometry_folder("qwen3-4b-dspark-b7")),
        "draft_state": draft_state,
        "synthetic_accept_length": ACCEPT_LENGTH,
        "verify_planner": "off",  # everyone is to draft
    }
    if draft_state == "capture":
        speculative["draft_capture_mb"] = CAPTURE_MB
    return make_core(
        EngineConfig.of(
            model=str(geometry_folder("qwen3-4b")),
            device="cuda",
            load_format="dummy",
            gpu_memory_utilization=SHARE,
            max_num_seqs=96,
            speculative_config=speculative,
        )
    )


def bytes_in_use() -> tuple[int, int]:
    """Of the whole device, and reserved by this process's allocator."""
    if not torch.cuda.is_available():
        return 0, 0
    free, total = torch.cuda.mem_get_info()
    return total - free, torch.cuda.memory_reserved()


def run(core: EngineCore, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """All prompts together: seconds, rounds, and who did not draft."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    before = core.stats()
    rounds, accepted, refused = before.num_drafts, before.num_accepted_tokens, dict(before.draft_refusals)
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        core.add(EngineRequest(request_id=str(i), prompt_token_ids=prompt, params=params))
    drafted = dict.fromkeys(range(len(prompts)), 0)
    cached, tokens, steps = {}, 0, 0
    while core.has_work:
        steps += 1
        for output in core.step():
            drafted[int(output.request_id)] += output.num_draft_tokens
            cached[output.request_id] = output.num_cached_tokens
            tokens += len(output.token_ids)
    seconds = time.perf_counter() - start
    after = core.stats()
    return {
        "seconds": seconds,
        "output_tokens": tokens,
        "steps": steps,
        "requests_that_drafted": sum(count > 0 for count in drafted.values()),
        "cached_tokens": sum(cached.values()),
        "accept_length": 1 + (after.num_accepted_tokens - accepted) / max(after.num_drafts - rounds, 1),
        "refusals": {k: v - refused.get(k, 0) for k, v in after.draft_refusals.items() if v},
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True)
    parser.add_argument("--small", action="store_true", help="the bundled pair on a CPU, to try the script")
    args = parser.parse_args()
    rng = random.Random(0)
    rows: list[dict[str, Any]] = []
    prefix_len, counts = (200, (6, 8)) if args.small else (4000, (64, 96))
    for draft_state in ("paged", "capture"):
        core = make(draft_state, args.small)
        vocab = core.info.vocab_size
        while core.runner.prepare():
            pass  # all graphs: what is measured is serving
        used, reserved = bytes_in_use()
        warm = [[rng.randrange(vocab) for _ in range(300)] for _ in range(counts[-1])]
        run(core, warm, 16)
        for count in counts:
            for max_tokens in (16, 64):
                prefix = [rng.randrange(vocab) for _ in range(prefix_len)]
                for warmth in ("cold", "warm"):
                    prompts = [prefix + [rng.randrange(vocab) for _ in range(32)] for _ in range(count)]
                    row = run(core, prompts, max_tokens)
                    core.check()
                    now_used, now_reserved = bytes_in_use()
                    rows.append(
                        {"draft_state": draft_state, "requests": count, "max_tokens": max_tokens}
                        | {"prefix_cache": warmth}
                        | row
                        | {"used_gib": now_used / 2**30, "reserved_growth_bytes": now_reserved - reserved}
                    )
                    print(rows[-1], flush=True)
        rows[-1]["used_at_start_gib"] = used / 2**30
        del core
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    planned = 1.0 if args.small else SHARE * torch.cuda.mem_get_info()[1] / 2**30
    bad = [
        row
        for row in rows
        if row["requests_that_drafted"] < row["requests"]
        or row["reserved_growth_bytes"] > 0
        or row["used_gib"] > planned
    ]
    report: dict[str, Any] = {
        "machine": describe_machine(torch.device("cpu" if args.small else "cuda")),
        "geometry": "qwen3-4b, qwen3-4b-dspark-b7, random weights",
        "accept_length": ACCEPT_LENGTH,
        "gpu_memory_utilization": SHARE,
        "planned_gib": planned,
        "all_drafted_within_memory": not bad,
        "results": rows,
    }
    report["machine"]["command"] = "python benchmarks/shared_prefix_gpu.py"
    Path(args.out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
