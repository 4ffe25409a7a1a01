"""Make the bundled drafters: prompts, the target's answers, DSpark, DFlash, export.

Needs the data folder of ``recipes/mini`` and the bundled model. Answers and training want a GPU. Times are
those of the bundled drafters; a run that is started again goes on where it stopped.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

RECIPE = Path(__file__).resolve().parent
REPOSITORY = RECIPE.parent.parent
ASSETS = Path("src/paceline/assets")
STAGES = ("prompts", "dspark", "dflash", "export")

SHARED = "--intermediate-size 640 --taps 0,2,4 --max-len 4096 --lr 1e-3 --compile --checkpoint-minutes 60"
DSPARK = (
    "--method dspark --markov-rank 64 --temperatures 0,0,0.7,1,1 --answer-len 384 --num-engines 8 "
    "--num-seqs 512 --regenerate-minutes 1.25 --minutes 3.75"
)
DFLASH = "--method dflash --minutes 1.1"


def train(options: str, data: list[str], out: Path) -> None:
    """One ``paceline train-drafter``; the target's path is relative, so that reports name no machine."""
    command = [sys.executable, "-m", "paceline.cli.main", "train-drafter", "--target", str(ASSETS / "mini")]
    command += [*SHARED.split(), *options.split(), *data, "--out", str(out)]
    subprocess.run(command, cwd=REPOSITORY, check=True)


def export(work: Path) -> None:
    """Checkpoints into the package, reports beside the recipe."""
    for method in ("dspark", "dflash"):
        folder = REPOSITORY / ASSETS / f"mini-{method}"
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "model.safetensors", "sts.json"):
            if (work / method / name).is_file():
                shutil.copyfile(work / method / name, folder / name)
        shutil.copyfile(work / method / "report.json", RECIPE / "results" / f"{method}_report.json")


def main() -> None:
    """Command line of the recipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=REPOSITORY / ".data" / "mini", help="of recipes/mini")
    parser.add_argument("--work", type=Path, default=REPOSITORY / ".data" / "drafters")
    parser.add_argument(
        "--from", dest="first", choices=STAGES, default=STAGES[0], help="skip stages before it"
    )
    parser.add_argument("--to", dest="last", choices=STAGES, default=STAGES[-1], help="skip stages after it")
    args = parser.parse_args()
    work, data = args.work.resolve(), args.data.resolve()
    for stage in STAGES[STAGES.index(args.first) : STAGES.index(args.last) + 1]:
        print(f"== {stage}", flush=True)
        if stage == "prompts":
            command = [sys.executable, str(RECIPE / "prompts.py"), "--data", str(data), "--out", str(work)]
            subprocess.run(command, check=True)
        elif stage == "dspark":
            prompts = [
                "--data",
                str(work / "train.safetensors"),
                "--eval-data",
                str(work / "heldout.safetensors"),
            ]
            train(DSPARK, prompts, work / "dspark")
        elif stage == "dflash":
            answers = work / "dspark" / "answers"
            made = ["--data", str(answers / "train"), "--eval-data", str(answers / "heldout")]
            train(DFLASH, made, work / "dflash")
        else:
            export(work)


if __name__ == "__main__":
    main()
