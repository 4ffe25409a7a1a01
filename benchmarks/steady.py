"""A trained pair under steady traffic: plain decoding, every draft verified, and the verify planner.

    python benchmarks/steady.py --json FILE [--sizes 32,64,128] [--modes plain,planned] [--limit-s 120]

As many requests are open as there are sequences, a new one whenever one ends, and their ends are spread over
time. Texts are continuations of the bundled prompts, so drafts stand or fall as the drafter has learnt, and
not alike in all sequences. Modes take turns on one engine; each has some seconds before it is timed, in which
a planner forgets what stood before. ``even`` is the planner with as many rows for each sequence as for every
other, to see what it brings to give rows to the likeliest drafts. ``plain beside`` and ``planned beside`` run
prompts beside rounds, never in them, to see what it brings to join them. On a GPU with the bundled pair
inflated to Qwen3-4B's geometry, on a CPU with the pair as it is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.bench.driver import Driver
from paceline.bench.inflate import inflate_pair
from paceline.bench.machine import describe_engine, describe_machine
from paceline.bench.traffic import NeverDraft, SteadyTraffic
from paceline.config import EngineConfig
from paceline.proving.drive import runner_of
from paceline.proving.prompts import read_prompts
from paceline.sampling.params import SamplingParams
from paceline.speculation.decision import Batch, Decision
from paceline.speculation.planner import Planner
from paceline.speculation.survival import Survival
from paceline.text.tokenizer import Tokenizer

MODES = ("plain", "plain beside", "every draft", "even", "planned", "planned beside")
OUTPUT_LEN = 200
WINDOW_S, WARM_WINDOWS, WINDOWS = 0.75, 2, 3
SHIFTS = 12
"""Prompts are made more by leaving out so many of their first tokens."""


class Even(Planner):
    """As many drafts for each sequence as for every other."""

    def decide(self, batch: Batch) -> Decision:
        """See :meth:`Planner.decide`."""
        decision = super().decide(batch)
        drafts = {slot: min(decision.depth, n) for slot, n in zip(batch.slots, batch.available, strict=True)}
        return replace(decision, drafts=drafts)


def engine(folder: str, size: int) -> EngineConfig:
    """The pair, with room for ``size`` sequences."""
    if not torch.cuda.is_available():
        return EngineConfig.of(device="cpu", max_num_seqs=size, speculative_config={"method": "dspark"})
    target, drafter = inflate_pair(
        "mini", "mini-dspark", "qwen3-4b", folder + "/pair", pad_vocab=True, dtype="bfloat16"
    )
    speculative = {"model": str(drafter)}
    return EngineConfig.of(
        model=str(target), device="cuda", max_num_seqs=size, speculative_config=speculative
    )


def measure(driver: Driver, mode: str, size: int, temperature: float) -> dict[str, Any]:
    """One mode: the median second, and what was drafted in it."""
    core, scheduler = driver.core, driver.core.scheduler
    known = scheduler.planner
    assert known is not None
    survival = Survival(core.info.max_num_seqs, driver.num_drafts)
    kinds = {"plain": NeverDraft, "planned": Planner, "even": Even}
    kind, _, beside = mode.partition(" ")
    scheduler.planner = None if kind == "every" else kinds[kind](known.costs, survival)
    rounds = runner_of(core).rounds
    assert rounds is not None
    joins = rounds.with_prompts
    if beside == "beside":
        rounds.with_prompts = lambda spans, kinds, depth: kinds  # type: ignore[method-assign]
    tokenizer = Tokenizer.from_folder(Path(core.info.folder))
    texts = [tokenizer.encode(text) for text in read_prompts(None)]
    prompts = [text[shift:] for shift in range(SHIFTS) for text in texts if len(text) > shift + 2]
    params = SamplingParams(temperature=temperature, max_tokens=OUTPUT_LEN, ignore_eos=True)
    traffic = SteadyTraffic(core, prompts, size, params)
    for _ in range(WARM_WINDOWS):
        traffic.window(WINDOW_S)
    before = core.stats()
    steps, drafts, accepted = before.num_steps, before.num_draft_tokens, before.num_accepted_tokens
    windows = [traffic.window(WINDOW_S) for _ in range(WINDOWS)]
    after = core.stats()
    row = {
        "temperature": temperature,
        "sequences": size,
        "mode": mode,
        "tokens_per_s": statistics.median(windows),
        "windows": windows,
        "steps": after.num_steps - steps,
        "drafts": after.num_draft_tokens - drafts,
        "accepted": after.num_accepted_tokens - accepted,
        "confidence_slope": survival.slope,
    }
    traffic.drain()
    scheduler.planner, rounds.with_prompts = known, joins  # type: ignore[method-assign]
    return row


def main() -> None:
    """Run the modes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--sizes", help="sequences, with commas between; 64,128 on a GPU, 16 on a CPU")
    parser.add_argument("--modes", default=",".join(MODES), help="those of all, with commas between")
    parser.add_argument("--limit-s", type=float, default=300.0, help="begin nothing further after this")
    args = parser.parse_args()
    started = time.perf_counter()
    modes = args.modes.split(",")
    if not set(modes) <= set(MODES):
        parser.error(f"--modes must be among {', '.join(MODES)}")
    on_gpu = torch.cuda.is_available()
    sizes = [int(size) for size in (args.sizes or ("64,128" if on_gpu else "16")).split(",")]
    with tempfile.TemporaryDirectory() as folder:
        driver = Driver(engine(folder, max(sizes)), prepare=False)
        driver.prepare_greedy()
        machine = describe_machine(torch.device(driver.info.device))
        machine["command"] = f"python benchmarks/steady.py --json {args.json.name}"
        report = {"machine": machine, "settings": describe_engine(driver)}
        rows: list[dict[str, Any]] = []
        for temperature in (0.0, 1.0):
            for size in sizes:
                for mode in modes:
                    if time.perf_counter() - started < args.limit_s:
                        rows.append(measure(driver, mode, size, temperature))
                        print({k: v for k, v in rows[-1].items() if k != "windows"}, flush=True)
                        args.json.write_text(json.dumps({**report, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
