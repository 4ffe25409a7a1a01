"""What matching costs as the prefix index grows, and what the cache adds to a decode step.

    python benchmarks/cache_matching.py --json benchmarks/results/cache_matching.json

Two pools are filled with distinct cached prompts, one to 1,000 blocks, one to 100,000. The same measurements
then alternate between them, so that both see the same machine; the medians are compared:

* ``match``: a new request's prompt is hashed, looked up and taken. The same number of prompts, 33, is asked
  for in both pools: only the size of the index differs.
* ``match, any prompt``: 33 prompts picked at random from the whole index each time. In the large one their
  entries have left the processor's caches: the cost of touching that much memory, not of searching it.
* ``lookup``: the same request asked again (a waiting one, at admission): no hashing.
* ``miss``: a prompt that is not there.
* ``decode``: one row reserved and committed, block registration included, averaged over a block.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from paceline import __version__
from paceline.cache import BlockPool, SequenceBlocks

BLOCK_SIZE = 16
PROMPT_BLOCKS = 31
PROMPT_LEN = PROMPT_BLOCKS * BLOCK_SIZE + 1  # one token is always left to forward
SIZES = (1_000, 100_000)
NUM_ASKED = -(-SIZES[0] // PROMPT_BLOCKS)  # prompts per sample: all that the small index has


class Filled:
    """A pool whose index holds at least ``num_cached`` blocks of distinct prompts, all free."""

    def __init__(self, num_cached: int) -> None:
        rng = random.Random(num_cached)
        num_prompts = -(-num_cached // PROMPT_BLOCKS)
        self.pool = BlockPool(num_prompts * PROMPT_BLOCKS + 2 * PROMPT_BLOCKS, BLOCK_SIZE)
        self.prompts = [[rng.randrange(150_000) for _ in range(PROMPT_LEN)] for _ in range(num_prompts)]
        for tokens in self.prompts:
            blocks = SequenceBlocks(self.pool)
            blocks.reserve(PROMPT_LEN)
            blocks.commit(PROMPT_LEN, PROMPT_LEN, tokens)
            blocks.release()
        self.rng = rng

    def few(self) -> list[list[int]]:
        """The first prompts cached."""
        return [list(array("I", tokens)) for tokens in self.prompts[:NUM_ASKED]]

    def any(self) -> list[list[int]]:
        """As many, from anywhere in the index."""
        picked = self.rng.sample(self.prompts, NUM_ASKED)
        return [list(array("I", tokens)) for tokens in picked]  # fresh objects, as a request's are


def per_call_us(calls: Sequence[Callable[[], object]]) -> float:
    """Mean microseconds of these calls, made once each."""
    start = time.perf_counter_ns()
    for call in calls:
        call()
    return (time.perf_counter_ns() - start) / len(calls) / 1e3


def match_us(filled: Filled, prompts: list[list[int]]) -> float:
    """Hash, look up and take each prompt; taking back is not timed."""
    sequences = [SequenceBlocks(filled.pool) for _ in prompts]
    calls = [partial(s.match, t) for s, t in zip(sequences, prompts, strict=True)]
    spent = per_call_us(calls)
    for sequence in sequences:
        if sequence.computed != PROMPT_LEN - 1:
            raise RuntimeError(f"{sequence.computed} of {PROMPT_LEN - 1} tokens were cached")
        sequence.release()
    return spent


def lookup_us(filled: Filled) -> float:
    """Ask again about prompts that were hashed before."""
    calls: list[Callable[[], object]] = []
    for tokens in filled.few():
        sequence = SequenceBlocks(filled.pool)
        sequence.match_length(tokens)
        calls.append(partial(sequence.match_length, tokens))
    return per_call_us(calls)


def miss_us(filled: Filled) -> float:
    """Ask about prompts whose first block is nowhere."""
    sequences = [SequenceBlocks(filled.pool) for _ in range(NUM_ASKED)]
    tokens = [filled.rng.randrange(150_000, 151_000) for _ in range(PROMPT_LEN)]
    return per_call_us([partial(s.match, tokens) for s in sequences])


def decode_us(filled: Filled) -> float:
    """Reserve and commit single rows for four blocks; blocks are taken and registered on the way."""
    sequence, tokens = SequenceBlocks(filled.pool), [filled.rng.randrange(150_000)]
    num_rows = 4 * BLOCK_SIZE

    def decode() -> None:
        for _ in range(num_rows):
            sequence.reserve(1)
            tokens.append(7)
            sequence.commit(1, 1, tokens)

    spent = per_call_us([decode]) / num_rows
    sequence.release()
    return spent


MEASURES: dict[str, Callable[[Filled], float]] = {
    "match": lambda filled: match_us(filled, filled.few()),
    "match, any prompt": lambda filled: match_us(filled, filled.any()),
    "lookup": lookup_us,
    "miss": miss_us,
    "decode": decode_us,
}


def measure(repeats: int) -> dict[str, dict[str, float]]:
    """Medians in microseconds by measure and index size."""
    pools = {size: Filled(size) for size in SIZES}
    results: dict[str, dict[str, float]] = {}
    for name, run in MEASURES.items():
        samples: dict[int, list[float]] = {size: [] for size in SIZES}
        for _ in range(repeats):
            for size, filled in pools.items():
                samples[size].append(run(filled))
        medians = {f"{size}_blocks_us": round(statistics.median(samples[size]), 3) for size in SIZES}
        small, large = medians.values()
        results[name] = {**medians, "ratio": round(large / small, 3)}
    return results


def machine() -> dict[str, str]:
    """Where this ran."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        cpu = f"{len(names)} x {names[0]}" if names else cpu
    return {
        "cpu": cpu,
        "system": platform.platform(),
        "python": platform.python_version(),
        "paceline": __version__,
    }


def main() -> None:
    """Measure, print a table, and write it as JSON if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file to write the result to")
    parser.add_argument("--repeats", type=int, default=200, help="samples per measure and index size")
    args = parser.parse_args()
    result = {
        "command": f"python {' '.join(sys.argv)}",
        "machine": machine(),
        "block_size": BLOCK_SIZE,
        "prompt_tokens": PROMPT_LEN,
        "repeats": args.repeats,
        "results": measure(args.repeats),
    }
    print(f"{'':20}" + "".join(f"{size:>12,} blocks" for size in SIZES) + f"{'ratio':>10}")
    for name, row in result["results"].items():
        small, large, ratio = row.values()
        print(f"{name:20}{small:16.2f} us{large:16.2f} us{ratio:10.3f}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
