"""What the prefix cache is worth: many requests on one prefix, a hit on a long one, and conversations."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.bench.driver import Driver, random_prompts
from paceline.bench.geometry import plain
from paceline.bench.machine import describe_engine, describe_machine
from paceline.bench.report import Column, Plot, Report
from paceline.config import EngineConfig

COLUMNS = (
    Column("case", "case"),
    Column("drafter", "drafter"),
    Column("prompt_len", "prompt\ntokens", ",d"),
    Column("cached_len", "of them\ncached", ",d"),
    Column("first_token_ms", "first\nms", ".2f"),
    Column("seconds", "all\ns", ".3f"),
    Column("accept_length", "accept\nlength", ".2f"),
)


@dataclass(frozen=True)
class PrefixCases:
    """What to measure.

    Attributes:
        shared_requests, shared_len: requests at once on a prefix of so many tokens that nobody has seen.
        tail_len: tokens each of them, each warm request and each turn adds of its own.
        output_len: tokens to generate for each.
        warm_len: prefix of the requests that hit; 0 leaves them out.
        turns: of a conversation; 0 leaves it out.
    """

    shared_requests: int
    shared_len: int
    tail_len: int
    output_len: int
    warm_len: int
    turns: int

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        turn = self.tail_len + self.output_len
        return max(self.shared_len + turn, self.warm_len + turn, self.turns * turn)


def shared_prefix(driver: Driver, cases: PrefixCases, repeats: int) -> dict[str, Any]:
    """Requests that share a prefix, all sent at once to a cold cache; medians."""
    seconds, first, cached, accepts = [], [], [], []
    for repeat in range(repeats + 1):
        driver.forget()
        (prefix,) = random_prompts(1, cases.shared_len, driver.info.vocab_size, seed=2 * repeat)
        tails = random_prompts(
            cases.shared_requests, cases.tail_len, driver.info.vocab_size, seed=2 * repeat + 1
        )
        run = driver.run([prefix + tail for tail in tails], cases.output_len)
        if repeat == 0:
            continue  # what is compiled or captured when first needed is no part of it
        seconds.append(run.seconds)
        first.append(statistics.median(run.first_token_s))
        cached.append(statistics.median_low(state.num_cached_tokens for state in run.states))
        accepts += [] if run.accept_length is None else [run.accept_length]
    return {
        "case": f"{cases.shared_requests} on a new prefix",
        "prompt_len": cases.shared_len + cases.tail_len,
        "cached_len": statistics.median_low(cached),
        "first_token_ms": 1e3 * statistics.median(first),
        "seconds": statistics.median(seconds),
        "accept_length": statistics.mean(accepts) if accepts else None,
    }


def warm_prefix(driver: Driver, cases: PrefixCases, repeats: int) -> dict[str, Any]:
    """One request after the other on a prefix that is in the cache; medians."""
    driver.forget()
    (prefix,) = random_prompts(1, cases.warm_len, driver.info.vocab_size, seed=1000)
    driver.run([prefix], 1)
    tails = random_prompts(repeats + 1, cases.tail_len, driver.info.vocab_size, seed=1001)
    runs = [driver.run([prefix + tail], cases.output_len) for tail in tails][1:]
    accepts = [run.accept_length for run in runs if run.accept_length is not None]
    return {
        "case": "warm prefix",
        "prompt_len": cases.warm_len + cases.tail_len,
        "cached_len": runs[-1].states[0].num_cached_tokens,
        "first_token_ms": 1e3 * statistics.median(run.first_token_s[0] for run in runs),
        "seconds": statistics.median(run.seconds for run in runs),
        "accept_length": statistics.mean(accepts) if accepts else None,
    }


def conversation(driver: Driver, cases: PrefixCases, repeats: int) -> list[dict[str, Any]]:
    """A conversation: each turn's prompt is everything said so far and something new; medians per turn."""
    turns: list[list[tuple[int, int, float, float]]] = [[] for _ in range(cases.turns)]
    for repeat in range(repeats + 1):
        driver.forget()
        history: list[int] = []
        said = random_prompts(cases.turns, cases.tail_len, driver.info.vocab_size, seed=2000 + repeat)
        for turn, message in enumerate(said):
            run = driver.run([history + message], cases.output_len)
            state = run.states[0]
            turns[turn].append(
                (len(history + message), state.num_cached_tokens, run.first_token_s[0], run.seconds)
            )
            history = history + message + state.outputs[0].token_ids
    return [
        {
            "case": f"conversation, turn {turn + 1}",
            "prompt_len": runs[0][0],
            "cached_len": runs[0][1],
            "first_token_ms": 1e3 * statistics.median(run[2] for run in runs[1:]),
            "seconds": statistics.median(run[3] for run in runs[1:]),
            "accept_length": None,
        }
        for turn, runs in enumerate(turns)
    ]


def measure_prefix(driver: Driver, cases: PrefixCases, repeats: int) -> list[dict[str, Any]]:
    """All cases on one engine."""
    driver.check_fits(1, cases.longest)
    rows = [shared_prefix(driver, cases, repeats)]
    if cases.warm_len:
        rows.append(warm_prefix(driver, cases, repeats))
    rows += conversation(driver, cases, repeats)
    name = "no" if driver.num_drafts == 0 else "yes"
    return [{"drafter": name, **row} for row in rows]


def run_prefix(engine: EngineConfig, cases: PrefixCases, repeats: int) -> Report:
    """All cases, with the drafter when there is one, and without."""
    engines: Iterable[EngineConfig] = (engine, plain(engine)) if engine.speculation is not None else (engine,)
    rows, settings, machine = [], None, None
    for options in engines:
        driver = Driver(options)
        rows += measure_prefix(driver, cases, repeats)
        settings = settings or {**describe_engine(driver), **vars(cases), "repeats": repeats}
        machine = machine or describe_machine(torch.device(driver.info.device))
        driver.close()
    assert settings is not None and machine is not None
    return Report(
        bench="prefix",
        machine=machine,
        settings=settings,
        columns=COLUMNS,
        plot=Plot("label", "first_token_ms", bars=True),
        results=[{"label": f"{row['case']}, drafter: {row['drafter']}", **row} for row in rows],
    )
