"""Host time of an engine whose device takes none: what of a step is Python.

    python benchmarks/host_time.py --json benchmarks/results/host_time.json

The device answers every plan at once, so what is left is validation, hashing, scheduling, the cache and
results; one step is in flight, as on a GPU, and seven drafts are verified in a round. Not in it: what the
runner does to bring a plan to the device, the verify planner, and text.

* ``submit``: 96 requests that share 4,000 tokens and have 32 of their own are validated and queued. A device
  has nothing to do meanwhile.
* ``wait``: the step in which 95 of them wait for the prefix, which the first one computes.
* ``admit``: the step that takes them in. The device then has little to do.
* ``all of it``: from the first submission to the last of 16 tokens of each.
* ``round of 64``, ``round of 128``: a step in which so many sequences decode.

Medians in milliseconds of the thread's own time, so that a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from itertools import pairwise
from pathlib import Path

import torch

from paceline.bench.machine import describe_machine
from paceline.cache import BlockPool
from paceline.engine.core import EngineCore
from paceline.engine.frontend import Frontend
from paceline.engine.messages import EngineInfo
from paceline.engine.planned import DraftLimits
from paceline.runtime.plan import DoneStep, SpanResult, StepPlan
from paceline.sampling.params import SamplingParams

VOCAB = 151_936
BLOCK_SIZE = 16
NUM_BLOCKS = 30_000
NUM_DRAFTS = 7
SHARED, SHARED_LEN, OWN_LEN, OUTPUT_LEN = 96, 4000, 32, 16
ROUND_LEN, NUM_ROUNDS = 512, 40


class InstantDevice:
    """Every step is done when it is launched."""

    num_draft_failures = 0

    def launch(self, plan: StepPlan) -> DoneStep:
        """None, one, two ... of the drafts stand, as many as there are in turn."""
        turns = enumerate(plan.spans, plan.step)
        counts = [(1 + i % (span.drafts + 1) if span.sample else 0, span.drafts) for i, span in turns]
        return DoneStep([SpanResult([1] * count, verified=drafts) for count, drafts in counts])

    def prepare(self) -> bool:
        """Nothing is to be made ready."""
        return False


class Host:
    """An engine on such a device."""

    def __init__(self, max_num_seqs: int) -> None:
        info = EngineInfo(
            model="none",
            folder="",
            vocab_size=VOCAB,
            max_model_len=8192,
            max_num_seqs=max_num_seqs,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            eos_token_ids=[0],
            max_logprobs=0,
            device="none",
            dtype="none",
            weights_bytes=0,
            ready_s=0.0,
        )
        self.core = EngineCore(
            InstantDevice(),
            BlockPool(NUM_BLOCKS, BLOCK_SIZE),
            info,
            max_num_batched_tokens=8192,
            lookahead=1,
            drafting=DraftLimits(NUM_DRAFTS, NUM_DRAFTS + 1),
        )
        self._frontend = Frontend(info, skip_tokenizer_init=True, generation_config="none")

    def submit(self, prompts: list[list[int]], output_len: int) -> None:
        """Queue a request for each prompt."""
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        for i, prompt in enumerate(prompts):
            self.core.add(self._frontend.prepare(f"{i}", prompt, params).request)


def random_ids(rng: random.Random, length: int) -> list[int]:
    """Token ids."""
    return [rng.randrange(VOCAB) for _ in range(length)]


def shared_prefix(host: Host, seed: int) -> dict[str, float]:
    """Milliseconds of the parts of requests that share a new prefix."""
    rng = random.Random(seed)
    prefix = random_ids(rng, SHARED_LEN)
    prompts = [prefix + random_ids(rng, OWN_LEN) for _ in range(SHARED)]
    gc.collect()
    times = [time.thread_time()]
    host.submit(prompts, OUTPUT_LEN)
    times.append(time.thread_time())
    while host.core.has_work:
        host.core.step()
        times.append(time.thread_time())
    host.core.reset_prefix_cache()
    submit, _, wait, admit, *_ = (1e3 * (end - start) for start, end in pairwise(times))
    return {"submit": submit, "wait": wait, "admit": admit, "all of it": 1e3 * (times[-1] - times[0])}


def decode_round(num_seqs: int) -> float:
    """Milliseconds of a step in which so many sequences decode."""
    host, rng = Host(num_seqs), random.Random(num_seqs)
    core = host.core
    host.submit([random_ids(rng, ROUND_LEN) for _ in range(num_seqs)], 2048)
    while core.scheduler.num_running < num_seqs:
        core.step()
    core.step()  # every one of them decodes now
    spent = []
    for _ in range(NUM_ROUNDS):
        start = time.thread_time()
        core.step()
        spent.append(1e3 * (time.thread_time() - start))
    return statistics.median(spent)


def main() -> None:
    """Measure, print a table, and write it as JSON if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file to write the result to")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    host = Host(SHARED)
    runs = [shared_prefix(host, seed) for seed in range(args.repeats + 1)][1:]
    found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    for size in (64, 128):
        found[f"round of {size}"] = statistics.median(decode_round(size) for _ in range(args.repeats))
    for name, value in found.items():
        print(f"{name:14}{value:8.2f} ms")
    if args.json:
        machine = {**describe_machine(torch.device("cpu")), "command": "python benchmarks/host_time.py"}
        values = {name: round(value, 3) for name, value in found.items()}
        args.json.write_text(json.dumps({"machine": machine, "ms": values}, indent=1) + "\n")


if __name__ == "__main__":
    main()
