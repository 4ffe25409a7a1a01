"""One decode round taken apart: what each stage takes, what it must read, how near the two are.

The round as it is served is timed first, whole. Then rounds of the same size run uncaptured with their stages
recorded (:mod:`paceline.bench.stages`). On a GPU kernels take the same time in a graph and out of it, so the
difference between the whole round and the sum of its kernels is gaps between them. On a GPU rounds are also
profiled as they are served, for the gaps within them and between them.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from typing import Any

import torch

from paceline.bench import stages
from paceline.bench.driver import Driver, random_prompts, with_every_draft
from paceline.bench.floor import Floor, read_floor
from paceline.bench.machine import describe_engine, describe_machine, read_bandwidth
from paceline.bench.report import Column, Plot, Report
from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.proving.drive import runner_of
from paceline.runtime.graphs import RoundSet

COLUMNS = (
    Column("stage", "stage"),
    Column("ms", "ms", ".3f"),
    Column("share", "of the\nround", ".0%"),
    Column("kernels", "kernels", ".0f"),
    Column("mb", "MB to\nread", ",.1f"),
    Column("floor_ms", "floor\nms", ".3f"),
    Column("limit_share", "of the\nlimit", ".0%"),
)


def stage_bytes(floor: Floor, context_tokens: float, present: Collection[str]) -> dict[str, float]:
    """Bytes each of the ``present`` stages reads at the least, where that is more than activations."""
    needed: dict[str, float] = {
        stages.MATMULS: floor.matmuls,
        stages.ATTENTION: floor.kv_per_token * context_tokens,
        stages.HEAD: floor.head,
        stages.DRAFT_CONTEXT: floor.draft_context,
        stages.DRAFT_LAYERS: floor.draft_layers + floor.draft_kv_per_token * context_tokens,
        stages.DRAFT_HEAD: floor.draft_head,
        stages.MARKOV: floor.markov,
    }
    if stages.ONE_KERNEL in present:
        parts = [stages.MATMULS, stages.ATTENTION, stages.HEAD]
        parts += [] if stages.DRAFT_CONTEXT in present else [stages.DRAFT_CONTEXT]
        needed[stages.ONE_KERNEL] = sum(needed.pop(part) for part in parts)
    if stages.DRAFT_KERNEL in present:
        parts = [stages.DRAFT_LAYERS, stages.DRAFT_HEAD]
        needed[stages.DRAFT_KERNEL] = sum(needed.pop(part) for part in parts)
    return needed


def stage_rows(
    seconds: Mapping[str, float],
    kernels: Mapping[str, float],
    round_s: float,
    needed: Mapping[str, float],
    bytes_per_s: float,
    gaps: stages.Gaps | None = None,
) -> list[dict[str, Any]]:
    """The rows of the report: every stage, what lies between them, the whole, and the gaps in it.

    Args:
        seconds, kernels: of one round, by stage; no kernels on a CPU.
        round_s: of a whole round as it is served.
        needed: bytes each stage must read.
        bytes_per_s: at which memory can be read.
        gaps: of the rounds as they are served, if they were profiled; shares are of the profiled rounds.
    """
    kernels = {**kernels, "round": sum(kernels.values())} if kernels else kernels
    rest = round_s - sum(seconds.values())
    parts = [(stage, seconds[stage], needed.get(stage, 0.0)) for stage in stages.STAGES if stage in seconds]
    parts.append(("between stages", rest, 0.0))
    parts.append(("round", round_s, sum(needed.values())))
    idle = [] if gaps is None else [("idle within rounds", gaps.within_s), ("idle between", gaps.between_s)]
    return [
        {
            "stage": stage,
            "ms": 1e3 * taken,
            "share": taken / round_s,
            "kernels": kernels.get(stage),
            "mb": size / 1e6 if size else None,
            "floor_ms": 1e3 * size / bytes_per_s if size else None,
            "limit_share": size / bytes_per_s / taken if size else None,
        }
        for stage, taken, size in parts
    ] + [
        {"stage": stage, "ms": 1e3 * taken, "share": taken / gaps.period_s}
        for stage, taken in idle
        if gaps is not None
    ]


def measure_round(
    driver: Driver, batch_size: int, context_len: int, num_rounds: int, bytes_per_s: float
) -> list[dict[str, Any]]:
    """Take a round apart; see :func:`stage_rows`.

    Args:
        batch_size: sequences.
        context_len: tokens each has when the first of the rounds begins.
        num_rounds: rounds to average over, at least.
        bytes_per_s: at which memory can be read.

    Raises:
        ConfigError: the engine has no rounds, the batch does not fit it, or its first sequence ends before
            its last begins.
    """
    if driver.engine.enforce_eager:
        raise ConfigError("enforce_eager is set, so there are no decode rounds to take apart. Drop it.")
    output_len = 2 + (num_rounds + 2) * (1 + driver.num_drafts)  # enough if every draft stands
    driver.check_fits(batch_size, context_len + output_len)
    prompts = random_prompts(batch_size, context_len, driver.info.vocab_size, seed=0)
    driver.run(prompts, output_len)
    rounds = driver.run(prompts, output_len).full_rounds_s()
    if not rounds:
        raise ConfigError(
            f"{batch_size} sequences never decoded all at once: the first had its {output_len} tokens before "
            "the last prompt was read. Raise --num-rounds or --max-num-batched-tokens, or leave the prefix "
            "cache on."
        )
    round_s = statistics.median(rounds)
    gaps = _record_gaps(driver, prompts, output_len)
    seconds, kernels = _record(driver, prompts, output_len)
    floor = read_floor(driver.engine, driver.item_bytes, driver.num_drafts, driver.tokens_scored)
    needed = stage_bytes(floor, batch_size * (context_len + output_len / 2), seconds.keys())
    return stage_rows(seconds, kernels, round_s, needed, bytes_per_s, gaps)


def run_round(engine: EngineConfig, batch_size: int, context_len: int, num_rounds: int) -> Report:
    """Take a round of one engine apart; see :func:`measure_round`."""
    driver = Driver(with_every_draft(engine))
    device = torch.device(driver.info.device)
    bytes_per_s = read_bandwidth(device)
    return Report(
        bench="round",
        machine=describe_machine(device),
        settings={
            **describe_engine(driver),
            "batch_size": batch_size,
            "context_len": context_len,
            "num_rounds": num_rounds,
            "read_bytes_per_s": bytes_per_s,
        },
        columns=COLUMNS,
        plot=Plot("stage", "ms", bars=True),
        results=measure_round(driver, batch_size, context_len, num_rounds, bytes_per_s),
    )


def _record_gaps(driver: Driver, prompts: list[list[int]], output_len: int) -> stages.Gaps | None:
    """Gaps between the kernels of rounds as they are served; None on a CPU."""
    if runner_of(driver.core).device.type != "cuda":
        return None
    recorder = stages.GapRecorder()
    driver.run_recorded(prompts, output_len, recorder.profiled())
    return recorder.gaps


def _record(
    driver: Driver, prompts: list[list[int]], output_len: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds and kernels of one round by stage."""
    runner = runner_of(driver.core)
    served = runner.rounds
    runner.rounds = RoundSet(
        runner.model,
        runner.cache,
        runner.state,
        runner.drafting,
        max_num_seqs=driver.info.max_num_seqs,
        max_model_len=driver.info.max_model_len,
        capture=False,
        few_rows=runner.few_rows,
    )
    try:
        driver.run(prompts, output_len)
        if runner.device.type == "cuda":
            profiler = stages.ProfilerRecorder()
            driver.run_recorded(prompts, output_len, profiler.profiled())
            rounds = profiler.num_rounds
            kernels = {stage: count / rounds for stage, count in profiler.kernels.items()}
            return {stage: taken / rounds for stage, taken in profiler.seconds.items()}, kernels
        clock = stages.ClockRecorder()
        driver.run_recorded(prompts, output_len, clock.active())
        return {stage: taken / clock.num_rounds for stage, taken in clock.seconds.items()}, {}
    finally:
        runner.rounds = served
