"""The verify planner against plain decoding and always drafting, over batch sizes and accept lengths.

    python benchmarks/planner_grid.py planner_grid.json             # on a GPU: Qwen3-4B, DSpark b7
    python benchmarks/planner_grid.py --cpu planner_grid_cpu.json   # the bundled pair on a CPU

Acceptance is synthetic. One engine per accept length runs all three modes in turn, the planner after one run
in which it looks around; ``plain`` is that engine without drafting. Results are written after every row.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from paceline.bench.driver import Driver, random_prompts
from paceline.bench.geometry import with_geometry
from paceline.bench.machine import describe_machine
from paceline.config import EngineConfig
from paceline.speculation.decision import Batch, Decision
from paceline.speculation.planner import Planner

ACCEPT_LENGTHS = (1.2, 2.0, 3.5, 6.0)
PROMPT_LEN = 128
MAX_TOKENS = 400
ROUNDS = 48


class Plain(Planner):
    """Never drafts."""

    def decide(self, batch: Batch) -> Decision:
        return Decision(0, None, False, "plain is faster")


def engine(cpu: bool, accept_length: float) -> EngineConfig:
    """What is measured."""
    speculative: dict[str, Any] = {"synthetic_accept_length": accept_length}
    if cpu:
        bundled = {"method": "dspark", **speculative}
        return EngineConfig.of(device="cpu", max_num_seqs=32, speculative_config=bundled)
    base = EngineConfig.of(device="cuda", max_num_seqs=256, speculative_config=speculative)
    return with_geometry(base, "qwen3-4b", "dspark-b7")


def measure(driver: Driver, batch_size: int, accept_length: float, rounds: int) -> dict[str, Any]:
    """Tokens per second of the three modes."""
    scheduler = driver.core.scheduler
    planner = scheduler.planner
    assert planner is not None
    plain = Plain(planner.costs, planner.survival)
    prompts = random_prompts(batch_size, PROMPT_LEN, driver.info.vocab_size, seed=batch_size)
    driver.forget()
    driver.run(prompts, 1)
    row: dict[str, Any] = {"batch_size": batch_size, "accept_length": accept_length}
    drafted = round(accept_length * rounds)
    planned = min(2 * drafted, MAX_TOKENS)
    for name, chosen, tokens in (
        ("plain", plain, rounds),
        ("fixed", None, drafted),
        ("look", planner, planned),
        ("auto", planner, planned),
    ):
        scheduler.planner = chosen
        before = planner.rounds.copy()
        run = driver.run(prompts, tokens)
        row[name] = run.num_tokens / run.seconds
        if name == "auto":
            done = {f"{depth}, {reason}": n for (depth, reason), n in (planner.rounds - before).items()}
            row["rounds"] = done
            row["accept_length_seen"] = run.accept_length
    scheduler.planner = planner
    row["ratio"] = row["auto"] / max(row["plain"], row["fixed"])
    return row


def main() -> None:
    """Run the grid."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json_path")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--limit-s", type=float, default=280.0, help="begin no further cell after this")
    options = parser.parse_args()
    start = time.perf_counter()
    sizes = (1, 2, 4, 8, 16, 32) if options.cpu else (1, 2, 4, 8, 16, 32, 64, 128, 256)
    report: dict[str, Any] = {"machine": describe_machine(torch.device("cpu" if options.cpu else "cuda"))}
    report["results"] = []
    for accept_length in ACCEPT_LENGTHS:
        driver = Driver(engine(options.cpu, accept_length), prepare=False)
        report["ready_s"] = driver.info.ready_s
        for size in sizes:
            if time.perf_counter() - start > options.limit_s:
                break
            row = measure(driver, size, accept_length, ROUNDS)
            report["results"].append(row)
            print(
                f"batch {size:4d}  accept {accept_length:.1f}  plain {row['plain']:8.0f}  "
                f"fixed {row['fixed']:8.0f}  auto {row['auto']:8.0f}  auto/best {row['ratio']:.3f}  "
                f"{row['rounds']}",
                flush=True,
            )
            Path(options.json_path).write_text(json.dumps(report, indent=1) + "\n")
        driver.close()


if __name__ == "__main__":
    main()
