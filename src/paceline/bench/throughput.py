"""Many requests through the engine: total rate, and what each of them sees."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass

import torch

from paceline.bench.driver import Driver, Run, random_prompts
from paceline.bench.machine import describe_engine, describe_machine
from paceline.bench.report import Column, Plot, Report
from paceline.config import EngineConfig
from paceline.errors import ConfigError


@dataclass(frozen=True)
class ThroughputResult:
    """The run of median duration.

    Attributes:
        request_rate: arrivals per second; None when all were there from the start.
        seconds: from the first submission to the last token.
        total_tokens_per_s, output_tokens_per_s: prompt and generated tokens, and generated ones alone.
        first_token_p50_ms, first_token_p99_ms: from a request's arrival to its first token.
        per_token_p50_ms, per_token_p99_ms: a request's time after its first token, per token; None for
            requests of one token.
    """

    request_rate: float | None
    num_requests: int
    seconds: float
    total_tokens_per_s: float
    output_tokens_per_s: float
    first_token_p50_ms: float
    first_token_p99_ms: float
    per_token_p50_ms: float | None
    per_token_p99_ms: float | None
    accept_length: float | None


COLUMNS = (
    Column("request_rate", "offered\nper s", "g"),
    Column("num_requests", "sent"),
    Column("seconds", "s", ".3f"),
    Column("total_tokens_per_s", "all\ntok/s", ",.0f"),
    Column("output_tokens_per_s", "output\ntok/s", ",.0f"),
    Column("first_token_p50_ms", "first\np50 ms", ".0f"),
    Column("first_token_p99_ms", "\np99 ms", ".0f"),
    Column("per_token_p50_ms", "token\np50 ms", ".2f"),
    Column("per_token_p99_ms", "\np99 ms", ".2f"),
    Column("accept_length", "accept\nlength", ".2f"),
)


def measure_throughput(
    driver: Driver, num_requests: int, input_len: int, output_len: int, rate: float | None, repeats: int
) -> ThroughputResult:
    """Measure distinct prompts on a cold cache.

    Args:
        rate: requests per second, arriving at random; None sends all at once.
        repeats: runs; the one of median duration is reported.
    """
    runs = []
    for repeat in range(repeats + 1):
        driver.forget()
        prompts = random_prompts(num_requests, input_len, driver.info.vocab_size, seed=repeat)
        runs.append(driver.run(prompts, output_len, rate))
    del runs[0]  # what is compiled or captured when first needed is no part of it
    run = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
    first, per_token = run.first_token_s, _per_token_s(run)
    return ThroughputResult(
        request_rate=rate,
        num_requests=num_requests,
        seconds=run.seconds,
        total_tokens_per_s=(num_requests * input_len + run.num_tokens) / run.seconds,
        output_tokens_per_s=run.num_tokens / run.seconds,
        first_token_p50_ms=1e3 * percentile(first, 50),
        first_token_p99_ms=1e3 * percentile(first, 99),
        per_token_p50_ms=1e3 * percentile(per_token, 50) if per_token else None,
        per_token_p99_ms=1e3 * percentile(per_token, 99) if per_token else None,
        accept_length=run.accept_length,
    )


def _per_token_s(run: Run) -> list[float]:
    """Per request of more than one token, seconds per token after the first."""
    found = []
    for state in run.states:
        first, last = state.metrics.first_token_s, state.metrics.last_token_s
        count = len(state.outputs[0].token_ids) - 1
        if count and first is not None and last is not None:
            found.append((last - first) / count)
    return found


def percentile(values: list[float], percent: int) -> float:
    """The value below which ``percent`` of 100 lie, interpolated."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def parse_rates(text: str | None) -> list[float | None]:
    """Request rates separated by commas; without any, all at once.

    Raises:
        ConfigError: not numbers, or not positive.
    """
    if text is None:
        return [None]
    try:
        rates = [float(rate) for rate in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--request-rates is {text!r}; give numbers such as 1,2.5,5.") from error
    if not all(0 < rate < float("inf") for rate in rates):
        raise ConfigError(f"--request-rates is {text!r}; rates must be positive.")
    return list(rates)


def run_throughput(
    engine: EngineConfig,
    num_requests: int,
    input_len: int,
    output_len: int,
    rates: list[float | None],
    repeats: int,
) -> Report:
    """Measure every request rate on one engine."""
    driver = Driver(engine)
    driver.check_fits(1, input_len + output_len)
    results = [
        measure_throughput(driver, num_requests, input_len, output_len, rate, repeats) for rate in rates
    ]
    return Report(
        bench="throughput",
        machine=describe_machine(torch.device(driver.info.device)),
        settings={
            **describe_engine(driver),
            "input_len": input_len,
            "output_len": output_len,
            "repeats": repeats,
        },
        columns=COLUMNS,
        plot=Plot("request_rate", "first_token_p50_ms")
        if None not in rates
        else Plot("request_rate", "output_tokens_per_s", bars=True),
        results=[asdict(result) for result in results],
    )
