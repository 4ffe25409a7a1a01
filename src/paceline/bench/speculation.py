"""What a drafter is worth on real text: the same prompts with and without it."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass

import msgspec
import torch

from paceline.bench.geometry import plain
from paceline.bench.latency import parse_batch_sizes
from paceline.bench.machine import describe_machine, describe_speculation
from paceline.bench.report import Column, Plot, Report
from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.llm import LLM
from paceline.proving.prompts import read_prompts
from paceline.sampling.params import SamplingParams


@dataclass(frozen=True)
class SpeculationResult:
    """Medians over the repeats of one batch size; both modes run in turn, so that both see the same machine.

    Attributes:
        plain_tokens_per_s, drafted_tokens_per_s: generated tokens over wall time, prefill of short prompts
            included.
        speedup: median of the ratios of paired runs.
        accept_length: committed tokens per verify span, the bonus included.
        equal: whether every token was the same in both modes.
    """

    batch_size: int
    plain_tokens_per_s: float
    drafted_tokens_per_s: float
    speedup: float
    accept_length: float
    equal: bool


COLUMNS = (
    Column("batch_size", "batch"),
    Column("plain_tokens_per_s", "plain\ntok/s", ",.0f"),
    Column("drafted_tokens_per_s", "drafted\ntok/s", ",.0f"),
    Column("speedup", "times\nplain", ".2f"),
    Column("accept_length", "accept\nlength", ".2f"),
    Column("equal", "same\ntokens"),
)


def run_speculation(
    engine: EngineConfig,
    prompts_path: str | None,
    output_len: int,
    temperature: float,
    batch_sizes: str,
    repeats: int,
) -> Report:
    """Measure both modes.

    Raises:
        ConfigError: no drafter, prompts that cannot be read, or a batch of more than there are or run at
            once.
    """
    if engine.speculation is None:
        raise ConfigError("There is no drafter to measure. Name one with --speculative-config.")
    sizes = parse_batch_sizes(batch_sizes)
    prompts = read_prompts(prompts_path)
    if max(sizes) > len(prompts):
        raise ConfigError(
            f"A batch of {max(sizes)} needs as many prompts; there are {len(prompts)}. Lower --batch-sizes "
            "or give a longer file with --prompts."
        )
    # Side by side: on a GPU each gets half of the memory.
    half = msgspec.structs.replace(engine, gpu_memory_utilization=engine.gpu_memory_utilization / 2)
    drafted, undrafted = _load(half), _load(plain(engine))
    if max(sizes) > drafted.info.max_num_seqs:
        raise ConfigError(
            f"{max(sizes)} sequences at once, but this engine runs {drafted.info.max_num_seqs} "
            "(max_num_seqs). Lower --batch-sizes or raise --max-num-seqs."
        )
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=output_len, ignore_eos=True)
        for i in range(len(prompts))
    ]
    return Report(
        bench="speculation",
        machine=describe_machine(torch.device(drafted.info.device)),
        settings={
            "model": drafted.info.model,
            "speculation": describe_speculation(engine.speculation),
            "dtype": drafted.info.dtype,
            "prompts": len(prompts),
            "output_len": output_len,
            "temperature": temperature,
            "repeats": repeats,
        },
        columns=COLUMNS,
        plot=Plot("batch_size", "speedup"),
        results=[asdict(_compare(undrafted, drafted, prompts, params, size, repeats)) for size in sizes],
    )


def _load(engine: EngineConfig) -> LLM:
    return LLM(**msgspec.structs.asdict(engine))


def _run(
    llm: LLM, prompts: list[str], params: list[SamplingParams], size: int
) -> tuple[float, list[list[int]]]:
    """Seconds and tokens of all prompts, ``size`` at a time."""
    llm.reset_prefix_cache()
    tokens: list[list[int]] = []
    start = time.perf_counter()
    for i in range(0, len(prompts), size):
        outputs = llm.generate(prompts[i : i + size], params[i : i + size], use_tqdm=False)
        tokens += [output.outputs[0].token_ids for output in outputs]
    return time.perf_counter() - start, tokens


def _compare(
    undrafted: LLM, drafted: LLM, prompts: list[str], params: list[SamplingParams], size: int, repeats: int
) -> SpeculationResult:
    before = drafted.stats()
    spans, accepted = before.num_drafts, before.num_accepted_tokens
    pairs, equal = [], True
    for _ in range(repeats):
        plain_s, want = _run(undrafted, prompts, params, size)
        drafted_s, got = _run(drafted, prompts, params, size)
        pairs.append((plain_s, drafted_s))
        equal &= want == got
    total = sum(len(tokens) for tokens in want)
    after = drafted.stats()
    rounds = after.num_drafts - spans
    return SpeculationResult(
        batch_size=size,
        plain_tokens_per_s=total / statistics.median(plain_s for plain_s, _ in pairs),
        drafted_tokens_per_s=total / statistics.median(drafted_s for _, drafted_s in pairs),
        speedup=statistics.median(plain_s / drafted_s for plain_s, drafted_s in pairs),
        accept_length=1 + (after.num_accepted_tokens - accepted) / max(rounds, 1),
        equal=equal,
    )
