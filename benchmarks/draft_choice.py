"""What it brings to choose whose drafts are verified: tokens of rounds at equal rows, chosen in several ways.

    python benchmarks/draft_choice.py --json benchmarks/results/draft_choice_mini.json [--temperature 1]

The bundled prompts are continued with every draft verified, so that it is known of each round how many stand.
Rounds of many sequences are then made up of rounds drawn at random, with rows for so many drafts of each on
average. *even*: as many for each; *counts*: by what stood in the sequence before; *probability*: by what the
drafter gave its own tokens; *confidence*: by its confidence head; *known*: by what stands. What each verifies
is cut from what stood, for that does not depend on who verifies what.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.bench.driver import Driver, with_every_draft
from paceline.bench.machine import describe_machine
from paceline.config import EngineConfig
from paceline.models.drafter import Drafter
from paceline.proving.drive import Round, RoundRecorder, complete, runner_of
from paceline.proving.prompts import read_prompts
from paceline.proving.redraft import by_life, dense_blocks
from paceline.sampling.params import SamplingParams
from paceline.speculation.planner import UNIT, allot
from paceline.text.tokenizer import Tokenizer

SEQUENCES, DRAWN = 32, 300
OUTPUT_LEN, BATCH = 200, 8
MEMORY, SHRINKAGE = 0.9, 8
"""What a round keeps of what stood before it, and rounds that the average over all counts for."""

FloatArray = NDArray[np.float64]


def rounds_of(temperature: float, repeats: int) -> tuple[Drafter, list[list[Round]]]:
    """Whole rounds of every text, in order."""
    speculative = {"method": "dspark"}
    driver = Driver(with_every_draft(EngineConfig.of(device="cpu", speculative_config=speculative)))
    tokenizer = Tokenizer.from_folder(Path(driver.info.folder))
    recorder, texts = RoundRecorder.on(driver.core), read_prompts(None)
    for repeat in range(repeats):
        for first in range(0, len(texts), BATCH):
            prompts = [tokenizer.encode(text) for text in texts[first : first + BATCH]]
            params = [
                SamplingParams(
                    temperature=temperature,
                    seed=100 * repeat + first + i,
                    max_tokens=OUTPUT_LEN,
                    ignore_eos=True,
                )
                for i in range(len(prompts))
            ]
            complete(driver.core, prompts, params)
    stage = runner_of(driver.core).drafting
    assert stage is not None
    return stage.drafter, by_life(item for item in recorder.rounds if len(item.drafts) == stage.num_drafts)


@torch.inference_mode()
def said(drafter: Drafter, rounds: list[Round]) -> tuple[FloatArray, FloatArray]:
    """That each draft and all before it stand, by the drafter's confidence and by its probabilities: [N, g]
    each.
    """
    blocks = dense_blocks(drafter, rounds[-1].text, [item.start for item in rounds])
    drafts = torch.tensor([[item.drafts for item in rounds]])
    chain = drafter.chain(blocks.slots, blocks.anchors, drafts)
    assert chain.confidence is not None
    probability = chain.logits.softmax(-1).gather(-1, drafts[..., None])[0, ..., 0].cumprod(-1)
    return drafter.survival(chain.confidence)[0].double().numpy(), probability.double().numpy()


def counted(stood: NDArray[np.int64], overall: FloatArray) -> FloatArray:
    """The same by what stood in a text before each of its rounds."""
    position, found = np.arange(len(overall)), []
    for i in range(len(stood)):
        weight = MEMORY ** np.arange(i)[::-1]
        before = (weight[:, None] * (position < stood[:i, None])).sum(0)
        found.append((SHRINKAGE * overall + before) / (SHRINKAGE + weight.sum()))
    return np.array(found)


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=1, help="times each prompt is continued")
    args = parser.parse_args()
    drafter, lives = rounds_of(args.temperature, args.repeats)
    stood = [np.array([item.num_standing for item in life]) for life in lives]
    num_drafts = len(lives[0][0].drafts)
    position = np.arange(num_drafts)
    overall = (position < np.concatenate(stood)[:, None]).mean(0)
    pairs = [said(drafter, life) for life in lives]
    ways: dict[str, FloatArray] = {
        "counts": np.concatenate([counted(part, overall) for part in stood]),
        "probability": np.concatenate([probability for _, probability in pairs]),
        "confidence": np.concatenate([confidence for confidence, _ in pairs]),
        "known": (position < np.concatenate(stood)[:, None]).astype(np.float64),
    }
    every, rng = np.concatenate(stood), random.Random(0)
    totals: dict[int, dict[str, int]] = {depth: defaultdict(int) for depth in range(1, num_drafts + 1)}
    for _ in range(DRAWN):
        drawn = np.array([rng.randrange(len(every)) for _ in range(SEQUENCES)])
        for depth, total in totals.items():
            total["even"] += int(np.minimum(every[drawn], depth).sum())
            for name, chances in ways.items():
                units = (np.minimum.accumulate(chances[drawn], 1) * UNIT).astype(np.int64)
                given = allot(units, range(SEQUENCES), [num_drafts] * SEQUENCES, SEQUENCES * depth)
                total[name] += int(np.minimum(every[drawn], given).sum())
    rows: list[dict[str, Any]] = []
    for depth, total in totals.items():
        anchors = DRAWN * SEQUENCES
        even = anchors + total["even"]
        row: dict[str, Any] = {"drafts": depth, "even_tokens_per_sequence": even / anchors}
        row |= {name: (anchors + total[name]) / even for name in ways}
        rows.append(row)
        print({name: round(value, 3) for name, value in row.items()})
    if args.json:
        machine = describe_machine(torch.device("cpu"))
        machine["command"] = f"python benchmarks/draft_choice.py --temperature {args.temperature}"
        report = {"machine": machine, "rounds": len(every), "sequences": SEQUENCES, "results": rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
