"""Accept length with hedges, beside what the break study expects of them; or what they are worth in time.

The study expects from rounds without hedges. With hedges rounds begin elsewhere, and few are won (some forty
of a thousand), so gains differ by chance. Therefore the study also looks at the hedged run's own rounds: the
tokens it says chains should have won there (``study_tokens``) stand beside those they did (``won_tokens``).

Usage: python benchmarks/hedging.py [--json FILE] [--output-len 256]
       python benchmarks/hedging.py --speed [--json FILE] [--output-len 256]
       python benchmarks/hedging.py --capacity [--json FILE] [--output-len 256]

``--speed`` runs batches of 1, 8, 16 and 32 in one engine: plainly, with every draft, with chains at the first
one, two and three positions, and with chains where the planner finds that they pay. A step has 256 rows: with
32 sequences that have seven drafts each no row is left. ``--capacity`` keeps an engine there, others waiting,
and compares seconds with chains at three positions and seconds without: hedging must cost nothing. On a GPU
with the bundled DSpark pair inflated to Qwen3-4B's geometry, on a CPU with the pair as it is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from paceline.bench.breaks import study
from paceline.bench.inflate import inflate_pair
from paceline.bench.machine import describe_machine
from paceline.bench.traffic import NeverDraft, SteadyTraffic
from paceline.config import EngineConfig
from paceline.engine.core import EngineCore
from paceline.engine.factory import make_core
from paceline.proving.drive import Round, RoundRecorder, complete, runner_of, tokens_of
from paceline.proving.prompts import read_prompts
from paceline.sampling.params import SamplingParams
from paceline.speculation.controller import HedgeController
from paceline.speculation.odds import ChainOdds
from paceline.speculation.planner import Planner
from paceline.text.tokenizer import Tokenizer

RESULTS = Path(__file__).parent / "results"
MAX_SEQS = 8
SPEED_SIZES = (1, 8, 32, 16)
SPEED_ROWS = 8 * max(SPEED_SIZES)
HEDGES: tuple[tuple[int, ...], ...] = ((), (0,), (0, 1, 2))


def expected(method: str, positions: tuple[int, ...]) -> float:
    """What ``paceline bench breaks`` says these hedges would bring, for greedy requests."""
    study = json.loads((RESULTS / f"breaks_mini_{method}.json").read_text())
    name = "{" + ",".join(map(str, positions)) + "}"
    return float(next(row["accept_length"] for row in study["results"] if row["at"] == name))


def measure(method: str, temperature: float, positions: tuple[int, ...], output_len: int) -> dict[str, Any]:
    """Run the bundled prompts; tokens and what the counters say."""
    speculative: dict[str, Any] = {"method": method, "verify_planner": "off"}
    if positions:
        speculative |= {"hedge": MAX_SEQS, "hedge_positions": list(positions)}
    core = make_core(EngineConfig.of(device="cpu", speculative_config=speculative))
    tokenizer, texts, tokens = Tokenizer.from_folder(Path(core.info.folder)), read_prompts(None), []
    stage, recorder = runner_of(core).drafting, RoundRecorder.on(core)
    assert stage is not None
    for first in range(0, len(texts), MAX_SEQS):
        prompts = [tokenizer.encode(text) for text in texts[first : first + MAX_SEQS]]
        params = [
            SamplingParams(temperature=temperature, seed=first + i, max_tokens=output_len, ignore_eos=True)
            for i in range(len(prompts))
        ]
        tokens += tokens_of(complete(core, prompts, params))
    stats = core.stats()
    accept_length = 1 + stats.num_accepted_tokens / stats.num_drafts
    found: dict[str, Any] = {"accept_length": accept_length, "tokens": tokens}
    if stats.hedging is not None:
        names = ("num_rounds", "num_chains", "num_wins", "num_losses", "num_tokens")
        found |= {name: getattr(stats.hedging, name) for name in names}
    if positions and not temperature:
        found["won_tokens"] = found["study_tokens"] = 0
        lives: dict[int, list[Round]] = defaultdict(list)
        for item in recorder.rounds:
            lives[item.life].append(item)
        for rounds in lives.values():  # an answer's first block comes with its prompt, without chains
            breaks = study(stage.drafter, rounds, stage.num_drafts)[1:]
            found["won_tokens"] += sum(r.num_accepted - r.num_standing for r in rounds[1 : len(breaks) + 1])
            found["study_tokens"] += sum(item.gain for item in breaks if item.accepted in positions)
    return found


class Always(HedgeController):
    """So many chains, whatever they bring."""

    def __init__(self, chains: int) -> None:
        super().__init__(chains)
        self.chains = chains

    def round_done(self, began_s: float, now_s: float, tokens: int, executed: int) -> None:
        """Nothing is learnt."""


def speed_engine(folder: str) -> EngineConfig:
    """One that can run with any number of chains."""
    hedge = {"hedge": MAX_SEQS, "hedge_auto": True}
    limits = {"max_num_seqs": max(SPEED_SIZES), "max_num_batched_tokens": SPEED_ROWS}
    if not torch.cuda.is_available():
        return EngineConfig.of(device="cpu", **limits, speculative_config={"method": "dspark", **hedge})
    target, drafter = inflate_pair(
        "mini", "mini-dspark", "qwen3-4b", folder + "/pair", pad_vocab=True, dtype="bfloat16"
    )
    speculative = {"model": str(drafter), **hedge}
    return EngineConfig.of(model=str(target), device="cuda", **limits, speculative_config=speculative)


def measure_speed(output_len: int, limit_s: float) -> list[dict[str, Any]]:
    """Medians of three runs of every mode, in turn."""
    started, rows = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        core = make_core(speed_engine(folder))
        scheduler, planner, hedger = core.scheduler, core.scheduler.planner, core.scheduler.hedger
        assert planner is not None and hedger is not None
        never = NeverDraft(planner.costs, planner.survival)
        planner.odds = ChainOdds(hedger.limits.positions)
        modes: dict[str, tuple[Planner | None, HedgeController | None]] = {
            "plain": (never, Always(0)),
            "no hedge": (None, Always(0)),
            "{0}": (None, Always(1)),
            "{0,1}": (None, Always(2)),
            "{0,1,2}": (None, Always(3)),
            "planned": (planner, None),
        }
        tokenizer = Tokenizer.from_folder(Path(core.info.folder))
        prompts = [tokenizer.encode(text) for text in read_prompts(None)]
        prompts += [prompt[1:] for prompt in prompts]
        for temperature in (0.0, 1.0):
            for size in SPEED_SIZES:
                runs: dict[str, list[tuple[float, float]]] = {name: [] for name in modes}
                for repeat in range(4):
                    for name, (scheduler.planner, hedger.controller) in modes.items():
                        found = run_batches(core, prompts, size, temperature, output_len)
                        if repeat:  # the first captures rounds and fills the prefix cache
                            runs[name].append(found)
                for name, found_runs in runs.items():
                    row = {"temperature": temperature, "batch_size": size, "hedges": name}
                    row["tokens_per_s"] = statistics.median(rate for rate, _ in found_runs)
                    row["accept_length"] = statistics.median(length for _, length in found_runs)
                    rows.append(row)
                    print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
                if time.perf_counter() - started > limit_s:
                    return rows
    return rows


def measure_capacity(output_len: int, limit_s: float) -> list[dict[str, Any]]:
    """Steady traffic with every row of a step in use: seconds with and without hedges, in turn."""
    with tempfile.TemporaryDirectory() as folder:
        core = make_core(speed_engine(folder))
        tokenizer = Tokenizer.from_folder(Path(core.info.folder))
    scheduler, hedger, size = core.scheduler, core.scheduler.hedger, max(SPEED_SIZES)
    assert hedger is not None
    scheduler.planner = None
    prompts = [tokenizer.encode(text) for text in read_prompts(None)]
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    traffic = SteadyTraffic(core, prompts, 2 * size, params)
    modes = {"no hedge": Always(0), "{0,1,2}": Always(3)}
    found: dict[str, list[float]] = {name: [] for name in modes}
    chains = dict.fromkeys(modes, 0)
    rounds = dict.fromkeys(modes, 0)
    started = time.perf_counter()
    while time.perf_counter() - started < limit_s:
        for name, hedger.controller in modes.items():
            traffic.window(0.5)  # what was made in the other mode is gone
            before, hedged = core.stats().num_steps, hedger.num_rounds
            found[name].append(traffic.window(2.0))
            rounds[name] += core.stats().num_steps - before
            chains[name] += hedger.num_rounds - hedged
    return [
        {
            "hedges": name,
            "tokens_per_s": statistics.median(rates),
            "windows": rates,
            "share_of_rounds_with_chains": chains[name] / rounds[name],
        }
        for name, rates in found.items()
    ]


def run_batches(
    core: EngineCore, prompts: list[list[int]], size: int, temperature: float, output_len: int
) -> tuple[float, float]:
    """Tokens per second and accept length of the first prompts, at least four of them, ``size`` at a time."""
    before, start, count = core.stats(), time.perf_counter(), max(size, 4)
    rounds, accepted = before.num_drafts, before.num_accepted_tokens
    for first in range(0, count, size):
        params = [
            SamplingParams(temperature=temperature, seed=first + i, max_tokens=output_len, ignore_eos=True)
            for i in range(size)
        ]
        complete(core, prompts[first : first + size], params)
    rate = count * output_len / (time.perf_counter() - start)
    after = core.stats()
    return rate, 1 + (after.num_accepted_tokens - accepted) / max(after.num_drafts - rounds, 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--capacity", action="store_true")
    parser.add_argument("--limit-s", type=float, default=600.0, help="begin nothing further after this")
    options = parser.parse_args()
    if options.speed or options.capacity:
        measured = measure_speed if options.speed else measure_capacity
        rows = measured(options.output_len, options.limit_s)
        if options.capacity:
            print("\n".join(map(str, rows)))
        if options.json:
            machine = describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
            mode = "speed" if options.speed else "capacity"
            machine["command"] = f"python benchmarks/hedging.py --{mode} --output-len {options.output_len}"
            report = {"bench": f"hedging {mode}", "machine": machine, "results": rows}
            options.json.write_text(json.dumps(report, indent=1) + "\n")
        return
    results = []
    for method in ("dspark", "dflash"):
        for temperature in (0.0, 1.0):
            plain: list[list[int]] | None = None
            for positions in HEDGES:
                row = measure(method, temperature, positions, options.output_len)
                tokens = row.pop("tokens")
                plain = plain or tokens
                row = {
                    "method": method,
                    "temperature": temperature,
                    "positions": list(positions),
                    "expected": None if temperature else expected(method, positions),
                    "tokens_equal": tokens == plain,
                    **row,
                }
                results.append(row)
                print(row, flush=True)
    if options.json:
        machine = describe_machine(torch.device("cpu"))
        machine["command"] = "python benchmarks/hedging.py"
        options.json.write_text(
            json.dumps({"bench": "hedging", "machine": machine, "results": results}, indent=1)
        )


if __name__ == "__main__":
    main()
