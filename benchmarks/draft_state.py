"""The two ways to keep draft state, side by side: what a prefix hit costs, accept length cold and warm,
memory.

    python benchmarks/draft_state.py --out benchmarks/results/draft_state.json

Runs the bundled model and DSpark on this machine's CPU. For each prefix length and strategy: a request fills
the cache, then others with the same prefix and a new last line hit it. Measured per request: time to its
first token (the step that forwards the rest of the prompt, restores or not, and drafts) and to the end of its
first verify round. Strategies take turns within one run; medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from paceline.bench.machine import describe_machine
from paceline.config import EngineConfig
from paceline.engine.core import EngineCore
from paceline.engine.factory import make_core
from paceline.engine.messages import EngineRequest
from paceline.sampling.params import SamplingParams
from paceline.text.tokenizer import Tokenizer

PREFIX_LENS = (256, 1024, 2048, 3500)
STRATEGIES = ("paged", "capture")
PARAMS = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)


def prefix_text() -> str:
    """Enough real text for the longest prefix: this project's own sources."""
    root = Path(__file__).parent.parent / "src" / "paceline"
    return "\n".join(path.read_text() for path in sorted(root.glob("engine/*.py")))


def first_steps_ms(core: EngineCore, name: str, prompt: list[int]) -> tuple[float, float]:
    """Milliseconds to the first token and from there to the end of the first verify round; then runs to the
    end.
    """
    core.add(EngineRequest(request_id=name, prompt_token_ids=prompt, params=PARAMS))
    marks = [time.perf_counter()]
    while core.has_work:
        if core.step() and len(marks) < 3:
            marks.append(time.perf_counter())
    return 1e3 * (marks[1] - marks[0]), 1e3 * (marks[2] - marks[1])


def accept_length(core: EngineCore, run: tuple[str, list[int]]) -> float:
    """Accept length of one request."""
    before = core.stats()
    spans, accepted = before.num_drafts, before.num_accepted_tokens
    first_steps_ms(core, *run)
    after = core.stats()
    return 1 + (after.num_accepted_tokens - accepted) / max(after.num_drafts - spans, 1)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    cores = {
        name: make_core(
            EngineConfig.of(device="cpu", speculative_config={"method": "dspark", "draft_state": name})
        )
        for name in STRATEGIES
    }
    tokenizer = Tokenizer.from_folder(cores["paged"].info.folder)
    tokens = tokenizer.encode(prefix_text())
    rows = []
    for length in PREFIX_LENS:
        prefix = tokens[:length]
        tails = [tokenizer.encode(f"\n\ndef function_{i}(values):\n") for i in range(args.repeats + 1)]
        cold = {name: accept_length(core, ("cold", prefix + tails[0])) for name, core in cores.items()}
        warm = {name: accept_length(core, ("warm", prefix + tails[0])) for name, core in cores.items()}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in STRATEGIES}
        for i, tail in enumerate(tails[1:]):
            for name, core in cores.items():
                times[name].append(first_steps_ms(core, f"hit-{i}", prefix + tail))
        for name in STRATEGIES:
            rows.append(
                {
                    "prefix_len": length,
                    "draft_state": name,
                    "first_token_ms": statistics.median(first for first, _ in times[name]),
                    "first_round_ms": statistics.median(second for _, second in times[name]),
                    "accept_length_cold": cold[name],
                    "accept_length_warm": warm[name],
                }
            )
            print(rows[-1])
    machine = describe_machine(torch.device("cpu"))
    machine["command"] = "python benchmarks/draft_state.py"
    report = {"machine": machine, "model": "paceline-mini", "results": rows}
    Path(args.out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
