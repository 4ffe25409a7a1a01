"""Requests through an engine in this process, as ``LLM`` runs them, with the clock in hand."""

from __future__ import annotations

import gc
import itertools
import random
import time
from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from zlib import crc32

import msgspec
import torch

from paceline.config import EngineConfig
from paceline.engine.core import EngineCore
from paceline.engine.factory import make_core
from paceline.engine.frontend import Frontend, RequestState
from paceline.errors import ConfigError, RequestFailedError
from paceline.proving.drive import runner_of
from paceline.sampling.params import SamplingParams


@dataclass(slots=True)
class Step:
    """What had happened when a step's results were there.

    Attributes:
        end_s: on the performance counter.
        started, finished: requests with a first token, and with their last.
    """

    end_s: float
    started: int
    finished: int


@dataclass(slots=True)
class Run:
    """Requests that ran together.

    Attributes:
        states: in the order of the prompts.
        seconds: from the first submission to the last token.
        steps: those that ended while requests were open.
        host_s: host seconds in scheduler and cache, summed over the steps.
        accept_length: committed tokens per verify span; None when nothing was drafted.
    """

    states: list[RequestState]
    seconds: float = 0.0
    steps: list[Step] = field(default_factory=list)
    host_s: float = 0.0
    accept_length: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return sum(len(state.outputs[0].token_ids) for state in self.states)

    @property
    def first_token_s(self) -> list[float]:
        """Per request, seconds from submission to first token."""
        return [_known(state.metrics.first_token_s) - state.metrics.arrival_s for state in self.states]

    def full_rounds_s(self) -> list[float]:
        """Durations of the steps during which every request was decoding."""
        count = len(self.states)
        full = [step.end_s for step in self.steps if step.started == count and step.finished == 0]
        return [later - earlier for earlier, later in itertools.pairwise(full)]


def _known(value: float | None) -> float:
    assert value is not None
    return value


class Driver:
    """An engine and the requests sent to it, greedy and without text.

    Args:
        engine: its options.
        prepare: first do what a server does while it is idle: capture every decode round.
    """

    def __init__(self, engine: EngineConfig, *, prepare: bool = True) -> None:
        self.engine = engine
        self.core: EngineCore = make_core(engine)
        while prepare and self.core.runner.prepare():
            pass
        self.info = self.core.info
        self._frontend = Frontend(self.info, skip_tokenizer_init=True, generation_config="none")
        self._open: dict[str, RequestState] = {}
        self._count = 0
        gc.collect()
        gc.freeze()  # as a server does: what lives now is not looked at again and again

    def prepare_greedy(self) -> None:
        """Capture every round that greedy requests may need, whatever the planner chooses, and what goes with
        them.
        """
        rounds = runner_of(self.core).rounds
        if rounds is not None:
            missing = rounds.graphs.missing
            rounds.graphs.missing = [shape for shape in missing if shape.kind == "greedy" or shape.together]
        for part in (rounds, runner_of(self.core).deferred):
            while part is not None and part.graphs.prepare():
                pass

    @property
    def num_drafts(self) -> int:
        """Drafts per round; 0 without a drafter."""
        return self.core.scheduler.drafting.num_drafts

    @property
    def tokens_scored(self) -> int:
        """Tokens each step of a drafter's sequential head chooses among; 0 without a drafter."""
        stage = runner_of(self.core).drafting
        return 0 if stage is None else stage.drafter.tokens_scored

    @property
    def item_bytes(self) -> int:
        """Bytes of a weight."""
        dtype: torch.dtype = getattr(torch, self.info.dtype)
        return dtype.itemsize

    def close(self) -> None:
        """Give the engine's memory back, for another engine in this process."""
        del self.core, self._frontend
        gc.unfreeze()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def submit(self, prompt: Sequence[int], output_len: int) -> RequestState:
        """Queue a request for ``output_len`` tokens. Its seed follows from the prompt: drafts that are
        accepted at random are the same ones in every engine, whatever ran before.

        Raises:
            RequestError: it does not fit the engine.
        """
        params = SamplingParams(
            temperature=0.0,
            max_tokens=output_len,
            ignore_eos=True,
            detokenize=False,
            seed=crc32(array("q", prompt).tobytes()),
        )
        state = self._frontend.prepare(f"bench-{self._count}", list(prompt), params)
        self._count += 1
        self.core.add(state.request)
        self._open[state.request.request_id] = state
        return state

    def step(self) -> int:
        """One step of the engine; how many requests got their first token.

        Raises:
            RequestFailedError: a request failed inside the engine: nothing measured would mean anything.
        """
        started = 0
        for output in self.core.step():
            state = self._open[output.request_id]
            started += state.metrics.first_token_s is None
            state.take(output)
            if state.error is not None:
                raise RequestFailedError(f"Request {output.request_id} failed: {state.error}")
            if state.finished:
                del self._open[output.request_id]
        return started

    def drain(self) -> None:
        """Run every open request to its end, and let what is still in flight end."""
        while self._open:
            self.step()
        while self.core.has_work:
            self.core.step()

    def run_recorded(
        self, prompts: Sequence[Sequence[int]], output_len: int, recording: AbstractContextManager[None]
    ) -> None:
        """Run prompts to their ends; ``recording`` is entered while every one of them decodes."""
        states = [self.submit(prompt, output_len) for prompt in prompts]
        started = 0
        while started < len(states):
            started += self.step()
        with recording:
            while not any(state.finished for state in states):
                self.step()
        self.drain()

    def run(self, prompts: Sequence[Sequence[int]], output_len: int, rate: float | None = None) -> Run:
        """Run prompts to their ends.

        Args:
            prompts: token ids.
            output_len: tokens to generate for each.
            rate: requests per second on average, arriving at random (a Poisson process); None sends all at
                once.
        """
        before = self.core.stats()
        host_s, rounds, accepted = before.schedule_s, before.num_drafts, before.num_accepted_tokens
        due = _arrivals(len(prompts), rate)
        run = Run([])
        started = finished = 0
        start = time.perf_counter()
        while finished < len(prompts):
            now = time.perf_counter() - start
            while len(run.states) < len(prompts) and due[len(run.states)] <= now:
                run.states.append(self.submit(prompts[len(run.states)], output_len))
            if not self._open:
                time.sleep(max(0.0, due[len(run.states)] - now))
                continue
            started += self.step()
            finished = len(run.states) - len(self._open)
            run.steps.append(Step(time.perf_counter(), started, finished))
        run.seconds = time.perf_counter() - start
        self.drain()
        after = self.core.stats()
        run.host_s = after.schedule_s - host_s
        if after.num_drafts > rounds:
            run.accept_length = 1 + (after.num_accepted_tokens - accepted) / (after.num_drafts - rounds)
        return run

    def forget(self) -> None:
        """Empty the prefix cache."""
        self.core.reset_prefix_cache()

    def check_fits(self, batch_size: int, total_len: int) -> None:
        """Refuse a measurement the engine would not run as meant.

        Raises:
            ConfigError: more sequences than run at once, or longer ones than fit.
        """
        if batch_size > self.info.max_num_seqs:
            raise ConfigError(
                f"{batch_size} sequences at once, but this engine runs {self.info.max_num_seqs} "
                "(max_num_seqs). Lower the batch size or raise --max-num-seqs."
            )
        if total_len > self.info.max_model_len:
            raise ConfigError(
                f"Sequences of {total_len} tokens, but this engine's longest is {self.info.max_model_len} "
                "(max_model_len). Shorten prompt or output."
            )
        blocks = batch_size * -(-total_len // self.info.block_size)
        if blocks > self.info.num_blocks:
            raise ConfigError(
                f"{batch_size} sequences of {total_len} tokens take {blocks} K/V blocks; the cache has "
                f"{self.info.num_blocks}, so they would not run at once. Give more K/V memory, or lower one "
                "of the two."
            )


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Distinct prompts of uniformly random token ids."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[list[int]] = torch.randint(0, vocab_size, (count, length), generator=generator).tolist()
    return ids


def _arrivals(count: int, rate: float | None) -> list[float]:
    """When requests arrive, in seconds."""
    if rate is None:
        return [0.0] * count
    rng, times, now = random.Random(0), [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return times


def with_every_draft(engine: EngineConfig) -> EngineConfig:
    """The same engine, verifying all drafts whether or not they pay; as it is without a drafter."""
    speculation = engine.speculation
    if speculation is None:
        return engine
    every = msgspec.structs.replace(speculation, verify_planner="off")
    return msgspec.structs.replace(engine, speculative_config=every)
