"""Accept length in the engine beside what is computed offline on the same answers, for the bundled drafters.

    python benchmarks/accept_length.py [--json FILE] [--seeds 6] [--output-len 160]

The bundled prompts are answered greedily and, several times, at temperature 1, every draft verified. The
engine's figure counts rounds with all drafts, whose block lies in the answer: offline no other can be judged.
Offline the answers are tried anchor by anchor (``paceline.training.evaluate``); at temperature 1 the chance
that a draft stands is exact there, not drawn. Both should agree within 3 %; the standard error of the
engine's mean is beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from paceline.bench.machine import describe_machine
from paceline.config import EngineConfig
from paceline.engine.factory import make_core
from paceline.proving.drive import RoundRecorder, complete, runner_of, tokens_of
from paceline.proving.prompts import read_prompts
from paceline.sampling.params import SamplingParams
from paceline.text.tokenizer import Tokenizer
from paceline.training.documents import Documents
from paceline.training.evaluate import evaluate


def measure(method: str, num_seeds: int, output_len: int) -> list[dict[str, Any]]:
    """A row for greedy answers and one for those at temperature 1."""
    speculative = {"method": method, "verify_planner": "off"}
    core = make_core(EngineConfig.of(device="cpu", max_num_seqs=32, speculative_config=speculative))
    tokenizer = Tokenizer.from_folder(Path(core.info.folder))
    prompts = [tokenizer.encode(text) for text in read_prompts(None)]
    stage = runner_of(core).drafting
    assert stage is not None
    rows = []
    for temperature, asked in ((0.0, prompts), (1.0, prompts * num_seeds)):
        recorder = RoundRecorder.on(core)
        params = [
            SamplingParams(temperature=temperature, seed=i, max_tokens=output_len, ignore_eos=True)
            for i in range(len(asked))
        ]
        answers = tokens_of(complete(core, asked, params))
        core.runner = recorder.runner
        texts = [[*prompt, *answer] for prompt, answer in zip(asked, answers, strict=True)]
        full = [r for r in recorder.rounds if len(r.drafts) == core.scheduler.drafting.num_drafts]
        tokens = [len(r.tokens) for r in full]
        documents = Documents.of(
            texts,
            core.info.vocab_size,
            [len(prompt) for prompt in asked],
            [temperature] * len(texts),
            [i % len(prompts) for i in range(len(texts))],
        )
        report = evaluate(stage.drafter, documents).report()
        offline = report["sampled"]["shared_noise"] if temperature else report["greedy"]
        engine = statistics.mean(tokens)
        rows.append(
            {
                "method": method,
                "temperature": temperature,
                "answers": len(texts),
                "rounds": len(full),
                "engine": engine,
                "standard_error": statistics.stdev(tokens) / len(tokens) ** 0.5,
                "offline": offline["accept_length"],
                "ratio": engine / offline["accept_length"],
            }
        )
    return rows


def main() -> None:
    """Measure both drafters, print, and write JSON if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--output-len", type=int, default=160)
    args = parser.parse_args()
    rows = []
    for method in ("dspark", "dflash"):
        for row in measure(method, args.seeds, args.output_len):
            rows.append(row)
            print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
    if args.json:
        machine = describe_machine(torch.device("cpu"))
        machine["command"] = (
            f"python benchmarks/accept_length.py --seeds {args.seeds} --output-len {args.output_len}"
        )
        report = {"bench": "accept length", "machine": machine, "results": rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
