"""Make the bundled model: fetch, extract, tokenizer, pack, train, evaluate, export.

One command, from the package registries alone: ``python recipes/mini/run.py``. Stages whose outputs are
already there can be skipped with ``--from STAGE``. Training wants a GPU; everything else runs on a CPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

RECIPE = Path(__file__).resolve().parent
STAGES = ("fetch", "extract", "overlap", "tokenizer", "pack", "train", "evaluate", "export")


def commands(data: Path, seconds: float, tiny: bool) -> dict[str, list[str]]:
    """The arguments of each stage's module."""
    model = str(data / "out" / "model")
    shards, tokenizer = str(data / "shards"), str(data / "tokenizer" / "tokenizer.json")
    report = str(data / "out" / "eval.json")
    return {
        "fetch": ["--data", str(data)],
        "extract": ["--data", str(data)],
        "overlap": ["--data", str(data)],
        "tokenizer": ["--data", str(data)],
        "pack": ["--data", str(data)],
        "train": ["--shards", shards, "--out", str(data / "out"), "--state", str(data / "state"), "--resume"]
        + ["--seconds", str(seconds)]
        + (["--tiny"] if tiny else []),
        "evaluate": ["--shards", shards, "--model", model, "--tokenizer", tokenizer, "--out", report],
        "export": ["--data", str(data)],
    }


def main() -> None:
    """Command line of the recipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=RECIPE.parent.parent / ".data" / "mini")
    parser.add_argument(
        "--from", dest="first", choices=STAGES, default=STAGES[0], help="skip the stages before it"
    )
    parser.add_argument(
        "--to", dest="last", choices=STAGES, default=STAGES[-1], help="skip the stages after it"
    )
    parser.add_argument("--seconds", type=float, default=450.0, help="training time, compilation not counted")
    parser.add_argument(
        "--tiny", action="store_true", help="a small model and batch, to try the recipe on a CPU"
    )
    args = parser.parse_args()
    todo = STAGES[STAGES.index(args.first) : STAGES.index(args.last) + 1]
    for stage in todo:
        arguments = commands(args.data.resolve(), args.seconds, args.tiny)[stage]
        print(f"== {stage}", flush=True)
        subprocess.run([sys.executable, "-m", f"pretrain.{stage}", *arguments], cwd=RECIPE, check=True)


if __name__ == "__main__":
    main()
