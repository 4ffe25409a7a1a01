"""The verify planner against plain decoding and always drafting, over batch sizes and accept lengths.

    python benchmarks/planner_grid.py planner_grid.json             # on a GPU: Qwen3-4B, DSpark b7
    python benchmarks/planner_grid.py --cpu planner_grid_cpu.json   # the bundled pair on a CPU

Acceptance is synthetic, a function of seed and position, so that all modes are given the same text. Every
cell is closed batches of answers of one length behind prompts whose prefix is warm. Modes run in turn:
``alone`` on an engine without a drafter, and on another one ``plain`` (the planner never drafts), ``fixed``
(all drafts are verified) and ``auto``, which forgets what stood and looks around for an untimed run. The
median run of each mode counts; one that is far behind in the first runs has no others. ``--domain``
then changes the accept length under steady traffic, and tells how much of the better mode's tokens each
second had before and after; it may be given several times.

Results are written after every cell; cells that the file has are not measured again. No cell begins after
``--budget-s``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from paceline.bench.driver import Driver, random_prompts
from paceline.bench.geometry import plain, with_geometry
from paceline.bench.machine import describe_machine
from paceline.bench.traffic import NeverDraft, SteadyTraffic
from paceline.config import EngineConfig
from paceline.engine.messages import EngineRequest
from paceline.sampling.params import SamplingParams
from paceline.speculation.planner import Planner
from paceline.speculation.survival import Survival
from paceline.speculation.synthetic import conditional_rate

ACCEPT_LENGTHS = (1.2, 2.0, 3.5, 6.0)
GPU_SIZES = (64, 128, 32, 8, 1, 16, 256, 4, 2)  # the most telling first
CPU_SIZES = (8, 1, 4, 2, 16)
PROMPT_LEN = 128
KV_BYTES = 24 * 2**30
"""Two engines share a GPU."""
MIN_SEQUENCES = 2
"""A run of fewer sequences at once has several batches one after the other."""
REPEATS = 7
"""Runs of a mode; who goes first changes from one to the next."""
FAR_BEHIND = 0.85
"""A mode with less than this share of another's first run cannot be the best."""
WINDOW_S = 1.0
REFERENCE_WINDOWS = 3
"""Seconds of steady traffic whose median is what a mode does there."""


class Grid:
    """Cells in a file.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.cpu: bool = options.cpu
        self.num_tokens: int = options.num_tokens
        self.path = Path(options.json_path)
        self.deadline: float = time.perf_counter() + options.budget_s
        self.sizes: tuple[int, ...] = CPU_SIZES if self.cpu else GPU_SIZES
        self.report: dict[str, Any] = {"results": []}
        if self.path.exists():
            self.report = json.loads(self.path.read_text())
        machine = describe_machine(torch.device("cpu" if self.cpu else "cuda"))
        machine["command"] = "python benchmarks/planner_grid.py " + self.path.name
        self.report["machine"] = machine
        self.report["settings"] = {"prompt_len": PROMPT_LEN, "num_tokens": self.num_tokens}

    @property
    def in_time(self) -> bool:
        """Whether a cell may begin."""
        return bool(time.perf_counter() < self.deadline)

    def save(self) -> None:
        """Write what there is."""
        self.path.write_text(json.dumps(self.report, indent=1) + "\n")

    def engine(self) -> EngineConfig:
        """What is measured."""
        speculative = {"synthetic_accept_length": 3.5}
        if self.cpu:
            bundled = {"method": "dspark", **speculative}
            return EngineConfig.of(device="cpu", max_num_seqs=max(CPU_SIZES), speculative_config=bundled)
        base = EngineConfig.of(
            device="cuda",
            max_num_seqs=max(GPU_SIZES),
            kv_cache_memory_bytes=KV_BYTES,
            speculative_config=speculative,
        )
        return with_geometry(base, "qwen3-4b", "dspark-b7")

    def serve(self, driver: Driver, size: int, num_tokens: int) -> float:
        """Run batches of a size to their ends; tokens per second."""
        batches = -(-MIN_SEQUENCES // size)
        prompts = random_prompts(size, PROMPT_LEN, driver.info.vocab_size, seed=size)
        start = time.perf_counter()
        for batch in range(batches):
            for i, prompt in enumerate(prompts):
                params = SamplingParams(
                    temperature=0.0, max_tokens=num_tokens, ignore_eos=True, seed=1000 * batch + i
                )
                driver.core.add(EngineRequest(request_id=f"{i}", prompt_token_ids=prompt, params=params))
            while driver.core.has_work:
                driver.core.step()
        return batches * size * num_tokens / (time.perf_counter() - start)

    def load(self, engine: EngineConfig) -> Driver:
        """An engine with every round captured that greedy requests need."""
        driver = Driver(engine, prepare=False)
        driver.prepare_greedy()
        return driver

    def measure_cells(self, domains: list[str]) -> None:
        """Every cell that is missing, then changes of domain."""
        done = {(row["batch_size"], row["accept_length"]) for row in self.report["results"]}
        cells = [(size, length) for size in self.sizes for length in ACCEPT_LENGTHS]
        if set(cells) <= done and not domains:
            return
        alone, driver = self.load(plain(self.engine())), self.load(self.engine())
        self.report["ready_s"] = driver.info.ready_s
        for size, accept_length in cells:
            if (size, accept_length) not in done and self.in_time:
                row = self.measure(alone, driver, size, accept_length)
                self.report["results"].append(row)
                self.save()
                print(
                    f"batch {size:4d}  accept {accept_length:.1f}  alone {row['alone']:8.0f}  "
                    f"plain {row['plain']:8.0f}  fixed {row['fixed']:8.0f}  auto {row['auto']:8.0f}  "
                    f"of best {row['of_best']:.3f}  of alone {row['of_alone']:.3f}  {row['rounds']}",
                    flush=True,
                )
        for domain in domains:
            number, first, then, seconds = domain.split(",")
            self.measure_domain(driver, int(number), (float(first), float(then)), float(seconds))
        alone.close()
        driver.close()

    def measure(self, alone: Driver, driver: Driver, size: int, accept_length: float) -> dict[str, Any]:
        """One cell, on the engine without a drafter and on the one with it."""
        planner = planner_of(driver)
        accept(driver, accept_length)
        row: dict[str, Any] = {"batch_size": size, "accept_length": accept_length}
        planner.survival = Survival(driver.info.max_num_seqs, driver.num_drafts)
        driver.core.scheduler.planner = planner
        self.serve(alone, size, 8)  # warms the prefix
        self.serve(driver, size, 8)
        self.serve(driver, size, self.num_tokens)
        before = planner.rounds.copy()
        never = NeverDraft(planner.costs, planner.survival)
        modes: dict[str, tuple[Driver, Planner | None]] = {
            "alone": (alone, None),
            "plain": (driver, never),
            "fixed": (driver, None),
            "auto": (driver, planner),
        }
        runs: dict[str, list[float]] = {name: [] for name in modes}
        steps: dict[str, list[int]] = {name: [] for name in modes}
        for repeat in range(REPEATS):
            best = max((max(found) for found in runs.values() if found), default=0.0)
            first = repeat % len(modes)
            order = [*modes][first:] + [*modes][:first]
            for name in order:
                if repeat == 0 or name == "auto" or runs[name][0] > FAR_BEHIND * best:
                    used, chosen = modes[name]
                    used.core.scheduler.planner = chosen
                    done = used.core.stats().num_steps
                    runs[name].append(self.serve(used, size, self.num_tokens))
                    steps[name].append(used.core.stats().num_steps - done)
        driver.core.scheduler.planner = planner
        row |= {name: statistics.median(found) for name, found in runs.items()}
        row |= {"runs": runs, "steps": steps}
        row["rounds"] = {f"{depth}, {reason}": n for (depth, reason), n in (planner.rounds - before).items()}
        row["spread"] = planner.survival.spread
        row["survival"] = planner.survival.overall().tolist()
        row["of_best"] = row["auto"] / max(row["plain"], row["fixed"])
        row["of_alone"] = row["auto"] / row["alone"]
        return row

    def measure_domain(self, driver: Driver, size: int, lengths: tuple[float, float], seconds: float) -> None:
        """Steady traffic that changes its accept length half-way. What is best then is measured in the same
        traffic, before and after: requests that come one by one cost more than those that come together.
        """
        scheduler, planner = driver.core.scheduler, planner_of(driver)
        never = NeverDraft(planner.costs, planner.survival)
        prompts = random_prompts(size, PROMPT_LEN, driver.info.vocab_size, seed=size)
        params = SamplingParams(temperature=0.0, max_tokens=self.num_tokens, ignore_eos=True)
        traffic = SteadyTraffic(driver.core, prompts, size, params)

        def watch(windows: float) -> list[float]:
            return [traffic.window(WINDOW_S) for _ in range(round(windows))]

        def best() -> float:
            found = []
            for scheduler.planner in (never, None):
                watch(1)  # drafts are in place, or are not
                found.append(statistics.median(watch(REFERENCE_WINDOWS)))
            scheduler.planner = planner
            watch(1)
            return max(found)

        first, then = lengths
        accept(driver, first)
        reference, rates = {first: best()}, {first: watch(seconds / WINDOW_S)}
        accept(driver, then)
        rates[then] = watch(seconds / WINDOW_S)
        reference[then] = best()
        rows = [(length, rate / reference[length]) for length in lengths for rate in rates[length]]
        for length, share in rows:
            print(f"batch {size:4d}  accept {length:.1f}: {share:.3f} of the best", flush=True)
        self.report.setdefault("domain", []).append(
            {"batch_size": size, "window_s": WINDOW_S, "best": reference, "of_best": rows}
        )
        self.save()
        traffic.drain()


def planner_of(driver: Driver) -> Planner:
    """The engine's own."""
    planner = driver.core.scheduler.planner
    assert planner is not None
    return planner


def accept(driver: Driver, accept_length: float) -> None:
    """Let so many tokens a round stand on average from now on."""
    drafting = driver.core.runner.drafting  # type: ignore[attr-defined]
    drafting.change_synthetic_rate(conditional_rate(accept_length, driver.num_drafts))


def main() -> None:
    """Run the grid."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("json_path")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--budget-s", type=float, default=150.0, help="begin no further cell after this")
    parser.add_argument("--num-tokens", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--sizes", help="batch sizes instead of all, with commas between")
    parser.add_argument("--domain", action="append", default=[], help="SIZE,FROM,TO,SECONDS")
    options = parser.parse_args()
    grid = Grid(options)
    if options.sizes is not None:
        grid.sizes = tuple(int(size) for size in options.sizes.split(",") if size)
    grid.measure_cells(options.domain)


if __name__ == "__main__":
    main()
