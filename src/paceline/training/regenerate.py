"""The target answers prompts with our own engine: a drafter is taught the text it will have to predict.

Answers are flushed to files as they end, a few hundred at a time, each with the number of its prompt. A run
that was interrupted reads them back and goes on with the prompts that are missing.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any, Final

import numpy as np
import torch

from paceline.config import EngineConfig
from paceline.engine.factory import make_core
from paceline.engine.messages import EngineRequest
from paceline.errors import PacelineError
from paceline.models.config import Qwen3Config
from paceline.sampling.params import SamplingParams
from paceline.sampling.seeds import mix64
from paceline.training.distributed import World
from paceline.training.documents import Documents, IntArray
from paceline.training.options import TrainOptions

FLUSH_EVERY: Final = 512  # answers per file
_BLOCK: Final = 16
Advance = Callable[[int, int], None]  # (answers ended, tokens made) since the last call


@dataclass(frozen=True)
class Job:
    """What one engine is to do; crosses process borders.

    Attributes:
        target: local checkpoint folder.
        folder: where answer files go.
        name: of this engine, unique among those that share the folder.
        first_file: number of the first file to write.
        prompts: all prompts, of all engines.
        todo: (prompt, temperature) pairs: [T] indices and [T] temperatures.
    """

    target: str
    folder: Path
    name: str
    first_file: int
    prompts: Documents
    todo: IntArray
    temperatures: tuple[float, ...]
    answer_len: int
    max_len: int
    engine: EngineConfig
    seed: int
    deadline_s: float | None


def plan_requests(num_prompts: int, temperatures: Sequence[float], every: bool) -> list[tuple[int, float]]:
    """(prompt, temperature) of every answer: temperatures in turn, or ``every`` one for each prompt."""
    if every:
        return [(i, t) for i in range(num_prompts) for t in temperatures]
    return [(i, temperatures[i % len(temperatures)]) for i in range(num_prompts)]


def regenerate(
    target: Path,
    prompts: Documents,
    folder: Path,
    options: TrainOptions,
    world: World,
    device: torch.device,
    *,
    every_temperature: Sequence[float] | None = None,
    minutes: float | None = None,
) -> Documents:
    """Answers to all prompts, made or read back.

    Args:
        folder: of the answer files.
        every_temperature: answer every prompt at each of these; None: ``options.temperatures`` in turn.
        minutes: stop after so long; answers that were under way are kept as far as they got.

    Raises:
        PacelineError: an engine failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    requests = plan_requests(
        len(prompts), every_temperature or options.temperatures, every_temperature is not None
    )
    made = load_answers(folder)
    have = set() if made is None else set(zip(made.source.tolist(), made.temperature.tolist(), strict=True))
    todo = [(i, t) for i, t in requests if (i, float(np.float32(t))) not in have]
    world.barrier()  # everyone has seen the same files before anyone adds to them
    if todo:
        engine = engine_config(target, options, device)
        # An engine that cannot fill its slots is not worth its start.
        assert engine.max_num_seqs is not None
        share = -(-len(todo) // world.size)
        per_process = max(1, min(options.num_engines, share // engine.max_num_seqs))
        total = world.size * per_process
        jobs = []
        for local in range(per_process):
            number = world.rank * per_process + local
            mine = todo[number::total]
            jobs.append(
                Job(
                    str(target),
                    folder,
                    f"{number:03d}",
                    len(list(folder.glob(f"{number:03d}-*.safetensors"))),
                    prompts,
                    np.array([i for i, _ in mine], np.int64),
                    tuple(t for _, t in mine),
                    options.answer_len,
                    options.max_len,
                    engine,
                    options.seed,
                    None if minutes is None else minutes * 60,
                )
            )
        with _progress(sum(len(job.todo) for job in jobs), options.show_progress and world.leads) as advance:
            if len(jobs) == 1:
                answer(jobs[0], advance)
            else:
                _side_by_side(jobs, advance)
    world.barrier()
    made = load_answers(folder)
    if made is None:
        raise PacelineError(f"no answers were made in {folder}; give regenerate_minutes more time")
    return made


def load_answers(folder: Path) -> Documents | None:
    """All answers of a folder, in the order of their prompts; None when there are none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    whole = Documents.concatenate([Documents.load(file) for file in files])
    order = np.lexsort((whole.temperature, whole.source))
    return whole.subset(order)


def engine_config(target: Path, options: TrainOptions, device: torch.device) -> EngineConfig:
    """An engine with K/V for all sequences it may run at once, as far as memory goes."""
    on_gpu = device.type == "cuda"
    num_seqs = options.num_seqs or (512 if on_gpu else 32)
    config = Qwen3Config.from_pretrained(target)
    values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    size = values * _BLOCK * (2 if on_gpu else 4)  # bytes of a K/V block
    budget = torch.cuda.mem_get_info(device)[0] * 0.8 / options.num_engines if on_gpu else 2**30
    blocks = max(1, min(num_seqs * -(-options.max_len // _BLOCK), int(budget // size)))
    return EngineConfig.of(
        model=str(target),
        device=device.type,
        max_model_len=options.max_len,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(8192 if on_gpu else 512, num_seqs),
        num_blocks=blocks,
        seed=options.seed,
        threads=1 if options.num_engines > 1 else None,
    )


def answer(job: Job, advance: Advance) -> None:
    """Run one engine until its prompts are answered or its time is up; writes files into ``job.folder``."""
    core = make_core(job.engine)
    started = time.monotonic()
    context: dict[str, list[int]] = {}
    answers: dict[str, list[int]] = {}
    ended: list[str] = []
    file = job.first_file
    for number, (index, temperature) in enumerate(zip(job.todo, job.temperatures, strict=True)):
        prompt = job.prompts[int(index)].tolist()[-(job.max_len - 2) :]
        name = str(number)
        context[name], answers[name] = prompt, []
        params = SamplingParams(
            temperature=temperature,
            max_tokens=min(job.answer_len, job.max_len - len(prompt)),
            seed=mix64(mix64(job.seed) + 2 * int(index) + 1),
        )
        core.add(EngineRequest(request_id=name, prompt_token_ids=prompt, params=params))

    def flush() -> None:
        nonlocal file
        kept = [name for name in ended if answers[name]]
        if kept:
            Documents.of(
                [context[name] + answers[name] for name in kept],
                core.info.vocab_size,
                [len(context[name]) for name in kept],
                [job.temperatures[int(name)] for name in kept],
                [int(job.todo[int(name)]) for name in kept],
            ).save(job.folder / f"{job.name}-{file:04d}.safetensors")
            file += 1
        for name in ended:
            del answers[name], context[name]
        ended.clear()

    while core.has_work:
        if job.deadline_s is not None and time.monotonic() - started > job.deadline_s:
            break
        num_ended = num_tokens = 0
        for output in core.step():
            if output.error is not None:
                raise PacelineError(f"prompt {job.todo[int(output.request_id)]} failed: {output.error}")
            answers[output.request_id] += output.token_ids
            num_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                ended.append(output.request_id)
                num_ended += 1
        advance(num_ended, num_tokens)
        if len(ended) >= FLUSH_EVERY:
            flush()
    ended += [name for name in answers if name not in set(ended)]  # out of time: keep what there is
    flush()


def _side_by_side(jobs: Sequence[Job], advance: Advance) -> None:
    """One process per job; raises what any of them raised."""
    spawn = multiprocessing.get_context("spawn")
    reports: Any = spawn.Queue()
    processes = [spawn.Process(target=_worker, args=(job, reports), daemon=True) for job in jobs]
    for process in processes:
        process.start()
    running, failure = len(processes), None
    while running and failure is None:
        try:
            message = reports.get(timeout=1.0)
        except Empty:
            dead = [p for p in processes if p.exitcode not in (None, 0)]
            failure = f"exit code {dead[0].exitcode}" if dead else None
            continue
        if isinstance(message, str):
            failure = message
        elif message is None:
            running -= 1
        else:
            advance(*message)
    for process in processes:
        if failure is not None:
            process.terminate()
        process.join()
    if failure is not None:
        raise PacelineError(f"an engine that answers prompts failed: {failure}")


def _worker(job: Job, reports: Any) -> None:
    pending = [0, 0]
    last = time.monotonic()

    def advance(num_ended: int, num_tokens: int) -> None:
        nonlocal last
        pending[0] += num_ended
        pending[1] += num_tokens
        if time.monotonic() - last > 0.5:
            reports.put((pending[0], pending[1]))
            pending[:] = 0, 0
            last = time.monotonic()

    try:
        answer(job, advance)
        reports.put((pending[0], pending[1]))
        reports.put(None)
    except BaseException:
        reports.put(traceback.format_exc())
        raise


@contextmanager
def _progress(total: int, show: bool) -> Iterator[Advance]:
    """A bar over answers with the rate in tokens per second."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rate = TextColumn("{task.fields[rate]}")
    with Progress(*columns, rate, console=Console(stderr=True), disable=not show) as bar:
        task = bar.add_task("Answers", total=total, rate="")
        tokens = 0

        def advance(num_ended: int, num_tokens: int) -> None:
            nonlocal tokens
            tokens += num_tokens
            elapsed = bar.tasks[task].elapsed or 0.0
            speed = f"{tokens:,} tokens, {tokens / elapsed:,.0f} tok/s" if elapsed else ""
            bar.update(task, advance=num_ended, rate=speed)

        yield advance
