"""Stage 3, a check: how much of the held-out source occurs verbatim in the training text.

Counts runs of four non-blank lines (indentation ignored, 110 characters or more together) of the held-out
files that occur in any document of the training streams.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pretrain.common import RECIPE

LINES = 4
MIN_CHARS = 110


def runs(text: str) -> Iterator[int]:
    """Hashes of the runs of ``LINES`` lines."""
    lines = [stripped for line in text.split("\n") if (stripped := line.strip())]
    for start in range(len(lines) - LINES + 1):
        run = "\n".join(lines[start : start + LINES])
        if len(run) >= MIN_CHARS:
            yield hash(run)


def main() -> None:
    """Command line of the check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    args = parser.parse_args()
    corpus = args.data / "corpus"
    heldout: list[tuple[str, list[int]]] = []
    with (corpus / "heldout.jsonl").open() as lines:
        for line in lines:
            row = json.loads(line)
            heldout.append((row["package"], list(runs(row["text"]))))
    wanted = {run for _, found in heldout for run in found}
    seen: set[int] = set()
    sources: Counter[str] = Counter()
    for stream in ("code", "prose", "instruct"):
        with (corpus / f"{stream}.jsonl").open() as lines:
            for line in lines:
                row = json.loads(line)
                hits = wanted.intersection(runs(row["text"]))
                seen |= hits
                sources[row["package"]] += len(hits)
    total, shared = Counter[str](), Counter[str]()
    for package, found in heldout:
        total[package] += len(found)
        shared[package] += sum(run in seen for run in found)
    report = {
        "lines_per_run": LINES,
        "min_chars": MIN_CHARS,
        "share": round(sum(shared.values()) / sum(total.values()), 4),
        "by_package": {name: round(shared[name] / total[name], 4) for name in sorted(total)},
        "training_packages": dict(sources.most_common(8)),
    }
    (RECIPE / "results" / "overlap.json").write_text(json.dumps(report, indent=1) + "\n")
    print("overlap:", json.dumps(report))


if __name__ == "__main__":
    main()
