"""Decode speed: batches of distinct prompts whose prefix is warm, beside what reading memory allows.

The prompts run once for one token, which fills the prefix cache; then again for all their tokens, and that is
timed from submission to the last token. So prefill is out of it but for each prompt's last block.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch

from paceline.bench.driver import Driver, random_prompts
from paceline.bench.floor import read_floor
from paceline.bench.machine import describe_engine, describe_machine, read_bandwidth
from paceline.bench.report import Column, Plot, Report
from paceline.config import EngineConfig
from paceline.errors import ConfigError


@dataclass(frozen=True)
class Shape:
    """One cell of the table: sequences at once, prompt and output tokens of each."""

    batch_size: int
    input_len: int
    output_len: int

    @property
    def lens(self) -> str:
        """Prompt and output length, as text."""
        return f"{self.input_len} -> {self.output_len}"


@dataclass(frozen=True)
class LatencyResult:
    """Medians over the repeats of one shape.

    Attributes:
        tokens_per_s: generated tokens of all sequences over the time from submission to the last token.
        round_ms: time of one round while every sequence decodes; None if none was long enough to tell.
        floor_ms: time to read a round's weights and K/V once.
        limit_share: floor_ms / round_ms.
        host_ms: scheduler and cache per round, hidden or not.
        accept_length: committed tokens per verify span; None without a drafter.
    """

    batch_size: int
    lens: str
    tokens_per_s: float
    round_ms: float | None
    floor_ms: float
    limit_share: float | None
    host_ms: float
    accept_length: float | None


COLUMNS = (
    Column("batch_size", "batch"),
    Column("lens", "prompt ->\noutput"),
    Column("tokens_per_s", "tok/s", ",.0f"),
    Column("round_ms", "round\nms", ".3f"),
    Column("floor_ms", "floor\nms", ".3f"),
    Column("limit_share", "of the\nlimit", ".0%"),
    Column("host_ms", "host\nms", ".3f"),
    Column("accept_length", "accept\nlength", ".2f"),
)


def parse_batch_sizes(text: str) -> list[int]:
    """Numbers separated by commas.

    Raises:
        ConfigError: anything else, or less than 1.
    """
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--batch-sizes is {text!r}; give numbers such as 1,2,4.") from error
    if min(sizes) < 1:
        raise ConfigError(f"--batch-sizes is {text!r}; give numbers from 1 on.")
    return sizes


def parse_shapes(batch_sizes: str, lens: str) -> list[Shape]:
    """Every batch size at every pair of lengths.

    Args:
        batch_sizes: numbers separated by commas.
        lens: pairs PROMPT:OUTPUT separated by commas.

    Raises:
        ConfigError: anything else, or an output of fewer than 2 tokens.
    """
    sizes = parse_batch_sizes(batch_sizes)
    try:
        pairs = [
            (int(prompt), int(output)) for prompt, output in (pair.split(":") for pair in lens.split(","))
        ]
    except ValueError as error:
        raise ConfigError(f"--lens is {lens!r}; give PROMPT:OUTPUT pairs such as 128:512.") from error
    if any(prompt < 1 or output < 2 for prompt, output in pairs):
        raise ConfigError(f"--lens is {lens!r}; prompts must have at least 1 token, outputs 2.")
    return [Shape(size, prompt, output) for prompt, output in pairs for size in sizes]


def measure_latency(driver: Driver, shape: Shape, repeats: int, bytes_per_s: float) -> LatencyResult:
    """Measure one shape.

    Args:
        repeats: runs, each with prompts of its own; medians are reported.
        bytes_per_s: at which memory can be read.

    Raises:
        ConfigError: the engine cannot run the shape at once.
    """
    driver.check_fits(shape.batch_size, shape.input_len + shape.output_len)
    rates, rounds, hosts, accepts = [], [], [], []
    for repeat in range(repeats + 1):
        prompts = random_prompts(shape.batch_size, shape.input_len, driver.info.vocab_size, seed=repeat)
        driver.forget()
        driver.run(prompts, 1)
        run = driver.run(prompts, shape.output_len)
        if repeat == 0:
            continue  # what is compiled or captured when first needed is no part of it
        rates.append(run.num_tokens / run.seconds)
        hosts.append(run.host_s / len(run.steps))
        rounds += run.full_rounds_s()
        accepts += [] if run.accept_length is None else [run.accept_length]
    floor = read_floor(driver.engine, driver.item_bytes, driver.num_drafts, driver.tokens_scored)
    context = shape.batch_size * (shape.input_len + shape.output_len / 2)
    floor_s = floor.round_bytes(context) / bytes_per_s
    round_s = statistics.median(rounds) if rounds else None
    return LatencyResult(
        batch_size=shape.batch_size,
        lens=shape.lens,
        tokens_per_s=statistics.median(rates),
        round_ms=None if round_s is None else 1e3 * round_s,
        floor_ms=1e3 * floor_s,
        limit_share=None if round_s is None else floor_s / round_s,
        host_ms=1e3 * statistics.median(hosts),
        accept_length=statistics.mean(accepts) if accepts else None,
    )


def run_latency(engine: EngineConfig, shapes: Iterable[Shape], repeats: int) -> Report:
    """Measure every shape on one engine."""
    driver = Driver(engine)
    bytes_per_s = read_bandwidth(torch.device(driver.info.device))
    return Report(
        bench="latency",
        machine=describe_machine(torch.device(driver.info.device)),
        settings={**describe_engine(driver), "repeats": repeats, "read_bytes_per_s": bytes_per_s},
        columns=COLUMNS,
        plot=Plot("batch_size", "tokens_per_s", "lens"),
        results=[asdict(measure_latency(driver, shape, repeats, bytes_per_s)) for shape in shapes],
    )
