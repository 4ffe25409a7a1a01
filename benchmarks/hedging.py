"""Accept length with hedges, beside what the break study expects of them.

Usage: python benchmarks/hedging.py [--json FILE] [--output-len 256]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from paceline.bench.machine import describe_machine
from paceline.bench.prompts import read_prompts
from paceline.config import EngineConfig
from paceline.engine.factory import make_core
from paceline.proving.drive import complete, tokens_of
from paceline.sampling.params import SamplingParams
from paceline.text.tokenizer import Tokenizer

RESULTS = Path(__file__).parent / "results"
MAX_SEQS = 8
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
    for first in range(0, len(texts), MAX_SEQS):
        prompts = [tokenizer.encode(text) for text in texts[first : first + MAX_SEQS]]
        params = [
            SamplingParams(temperature=temperature, seed=first + i, max_tokens=output_len, ignore_eos=True)
            for i in range(len(prompts))
        ]
        tokens += tokens_of(complete(core, prompts, params))
    stats = core.stats()
    found = {"accept_length": 1 + stats.num_accepted_tokens / stats.num_drafts, "tokens": tokens}
    if stats.hedging is not None:
        names = ("num_rounds", "num_chains", "num_wins", "num_losses", "num_tokens")
        found |= {name: getattr(stats.hedging, name) for name in names}
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--output-len", type=int, default=256)
    options = parser.parse_args()
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
