"""The engine: requests in, tokens out, one step at a time. No text, no sockets, no threads.

``step`` plans, launches, and commits the oldest launched step. With ``lookahead`` 1 the device already runs
the next step while the host commits the last one; with 0 (CPU) each step is committed at once.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import Counter, deque

import msgspec

from paceline.cache import BlockPool, SequenceBlocks
from paceline.engine.messages import (
    EngineInfo,
    EngineRequest,
    EngineStats,
    HedgeStats,
    PlannerStats,
    SequenceOutput,
)
from paceline.engine.planned import DraftLimits, PlannedStep, Progress
from paceline.engine.prompt import prompt_array
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import Sequence, Status
from paceline.errors import ContextLengthError, EngineDeadError, RequestError
from paceline.runtime.plan import DoneStep, PendingStep, SpanResult, StepRunner
from paceline.sampling.params import validate
from paceline.sampling.seeds import mix64, sequence_seed
from paceline.speculation.draft_state import DraftState
from paceline.speculation.hedging import Hedger
from paceline.speculation.planner import Planner

logger = logging.getLogger(__name__)


class EngineCore:
    """Admission, the step loop, and results.

    Args:
        runner: the device.
        pool: blocks the runner's cache has room for.
        info: limits of what is served.
        max_num_batched_tokens: rows per step.
        lookahead: steps that may be in flight while the host goes on; 0 or 1.
        seed: seed of requests that name none.
        drafting: the drafter's limits; None drafts nothing.
        draft_state: how the drafter's knowledge of the past is kept; None for paged.
        planner: how many drafts are verified in a step, and whether any are made; None for all that fit.
        hedger: which sequences have hedge chains beside their drafts; None for none.
    """

    def __init__(
        self,
        runner: StepRunner,
        pool: BlockPool,
        info: EngineInfo,
        *,
        max_num_batched_tokens: int,
        lookahead: int,
        seed: int = 0,
        drafting: DraftLimits | None = None,
        draft_state: DraftState | None = None,
        planner: Planner | None = None,
        hedger: Hedger | None = None,
    ) -> None:
        self.info = info
        self.pool = pool
        self.scheduler = Scheduler(
            pool,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            drafting=drafting,
            draft_state=draft_state,
            planner=planner,
            hedger=hedger,
        )
        self.runner = runner
        self._lookahead = lookahead
        self._seed = seed
        self._launched: deque[tuple[PlannedStep, PendingStep, float]] = deque()
        self._whole = True  # not in the middle of a change
        self._last_commit_s = 0.0
        self._requests: dict[str, list[Sequence]] = {}
        self._arrivals = 0
        self._stats = EngineStats()
        self._finished: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do."""
        return self.scheduler.has_work or bool(self._launched)

    # ------------------------------------------------------------------ requests

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: the request can never run here; nothing was changed.
        """
        tokens = self._checked(request)
        params = request.params
        seed = params.seed if params.seed is not None else mix64(mix64(self._seed) + self._arrivals)
        stop_ids = frozenset(params.stop_ids) | (
            frozenset() if params.ignore_eos else frozenset(self.info.eos_token_ids)
        )
        sequences: list[Sequence] = []
        for index in range(params.n):
            sequences.append(
                Sequence(
                    request=request,
                    index=index,
                    arrival=self._arrivals,
                    tokens=tokens[:],
                    prompt_len=len(tokens),
                    seed=sequence_seed(seed, index),
                    blocks=SequenceBlocks(self.pool, salt=request.cache_salt.encode()),
                    stop_ids=stop_ids,
                    leader=sequences[0] if sequences else None,
                )
            )
        self._arrivals += 1
        self._requests[request.request_id] = sequences
        for sequence in sequences:
            self.scheduler.add(sequence)
        self._stats.prompt_tokens += len(tokens)

    def _checked(self, request: EngineRequest) -> array[int]:
        """The prompt of a request that can run here."""
        info = self.info
        params = request.params
        validate(params, vocab_size=info.vocab_size, max_logprobs=info.max_logprobs)
        prompt = request.prompt_token_ids
        if request.request_id in self._requests:
            raise RequestError(f"Request id {request.request_id!r} is already in use.", param="request_id")
        tokens = prompt_array(prompt, info.vocab_size)
        if params.max_tokens is None:
            raise RequestError(
                "max_tokens must be resolved before a request reaches the engine.", param="max_tokens"
            )
        total = len(prompt) + params.max_tokens
        if total > info.max_model_len:
            raise ContextLengthError(
                f"This model's maximum context length is {info.max_model_len} tokens. However, you requested "
                f"{total} tokens ({len(prompt)} in the prompt, {params.max_tokens} for the output). "
                "Shorten the prompt or lower max_tokens.",
                param="max_tokens" if len(prompt) < info.max_model_len else "prompt",
            )
        blocks = -(-total // info.block_size)
        if blocks > info.num_blocks:
            raise ContextLengthError(
                f"The request needs {blocks} K/V blocks of {info.block_size} tokens at its maximum context "
                "length of "
                f"{total} tokens, but the whole cache has {info.num_blocks}. Shorten the prompt, lower "
                "max_tokens, or "
                "start the engine with more K/V memory.",
                param="max_tokens",
            )
        return tokens

    def abort(self, request_ids: list[str]) -> None:
        """End requests at once. Unknown ids are ignored: they may just have finished."""
        sequences = [s for request_id in request_ids for s in self._requests.pop(request_id, [])]
        alive = [s for s in sequences if s.status is not Status.FINISHED]
        self.scheduler.finish(alive)
        self._finished["abort"] += len(alive)

    def stop_sequence(self, request_id: str, index: int) -> None:
        """End one continuation because the text side found a stop string in it."""
        for sequence in self._requests.get(request_id, []):
            if sequence.index == index and sequence.status is not Status.FINISHED:
                self.scheduler.finish([sequence])
                self._finished["stop"] += 1
        self._forget_if_done(request_id)

    def _forget_if_done(self, request_id: str) -> None:
        sequences = self._requests.get(request_id, [])
        if sequences and all(s.status is Status.FINISHED for s in sequences):
            del self._requests[request_id]

    # ------------------------------------------------------------------ the loop

    def step(self) -> list[SequenceOutput]:
        """Plan and launch a step, then commit the oldest one that is due. Returns what it produced.

        What interrupts it while the device works (Ctrl-C) ends the sequences of a step that was not launched
        whole, and loses nothing else.

        Raises:
            EngineDeadError: the device failed; or an earlier step was interrupted while queues changed.
        """
        if not self._whole:
            raise EngineDeadError("A step was interrupted while its plan or results were taken over.")
        # One more than may be in flight is there after an interruption.
        launched = len(self._launched) <= self._lookahead and self._launch_next()
        if not self._launched or (launched and len(self._launched) <= self._lookahead):
            return []
        return self._commit_oldest()

    def _launch_next(self) -> bool:
        """Plan a step and launch it; False when nothing can run."""
        start = time.perf_counter()
        self._whole = False
        planned = self.scheduler.plan()
        self._whole = True
        self._stats.schedule_s += time.perf_counter() - start
        if planned is None:
            return False
        now = time.monotonic()
        for entry in planned.entries:
            if entry.sequence.first_scheduled_s is None:
                entry.sequence.first_scheduled_s = now
        self._stats.num_steps += 1
        try:
            pending = self._launch(planned)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            failed = SpanResult.failed(RuntimeError("interrupted"))
            self._launched.append((planned, DoneStep([failed] * len(planned.entries)), start))
            raise
        self._launched.append((planned, pending, start))
        return True

    def _commit_oldest(self) -> list[SequenceOutput]:
        """Take over the results of the step that was launched first."""
        planned, pending, begun = self._launched[0]
        results = pending.result()
        start = time.perf_counter()
        self._whole = False
        self._launched.popleft()
        progress = self.scheduler.commit(planned, results)
        self._stats.num_rows += planned.rows_run(results, self.scheduler.chain_rows)
        outputs = [self._output(item) for item in progress]
        now = time.perf_counter()
        self._stats.schedule_s += now - start
        # What one more step costs: since the last one was done, or since this was begun if there was a pause.
        begun = max(begun, self._last_commit_s)
        self.scheduler.timed(planned, now - begun)
        self.scheduler.round_done(planned, begun, now, sum(len(item.tokens) for item in progress))
        self._last_commit_s = now
        self._whole = True
        return outputs

    def _launch(self, planned: PlannedStep) -> PendingStep:
        try:
            return self.runner.launch(planned.plan)
        except EngineDeadError:
            raise
        except Exception:
            # A launch changes a slot's lengths only as its very last act, so its spans can be launched again,
            # one by one, and only the one at fault fails. What reached the device and failed there surfaces
            # in result() and is fatal.
            logger.exception("A step of %d sequences failed; running them one by one.", len(planned.entries))
        results: list[SpanResult] = []
        for plan in planned.plan.split():
            try:
                results.extend(self.runner.launch(plan).result())
            except EngineDeadError:
                raise
            except Exception as error:
                logger.exception("One request failed.")
                results.append(SpanResult.failed(error))
        return DoneStep(results)

    def _output(self, progress: Progress) -> SequenceOutput:
        sequence = progress.sequence
        request_id = sequence.request.request_id
        output = SequenceOutput(
            request_id=request_id,
            index=sequence.index,
            token_ids=progress.tokens,
            logprobs=progress.logprobs,
            num_cached_tokens=sequence.num_cached_tokens or 0,
            num_draft_tokens=progress.num_drafts,
            num_accepted_tokens=progress.num_accepted,
            first_scheduled_s=sequence.first_scheduled_s or 0.0,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            error=sequence.error,
        )
        first = sequence.num_output_tokens == len(progress.tokens)
        if first and sequence.index == 0 and sequence.request.params.prompt_logprobs is not None:
            output.prompt_logprobs = [None, *sequence.prompt_logprobs]  # the first token has no predecessor
        self._stats.generation_tokens += len(progress.tokens)
        if sequence.finish_reason is not None:
            self._finished[sequence.finish_reason] += 1
            self._forget_if_done(request_id)
        return output

    # ------------------------------------------------------------------ observation

    def stats(self) -> EngineStats:
        """A snapshot of gauges and counters."""
        stats = msgspec.structs.replace(self._stats)
        stats.num_running = self.scheduler.num_running
        stats.num_waiting = self.scheduler.num_waiting
        stats.num_preemptions = self.scheduler.num_preemptions
        stats.kv_cache_usage = self.pool.usage
        stats.prefix_queries = self.pool.num_queried_tokens
        stats.prefix_hits = self.pool.num_hit_tokens
        stats.finished = dict(self._finished)
        speculation = self.scheduler.speculation
        stats.num_drafts = speculation.num_drafts
        stats.num_draft_tokens = speculation.num_draft_tokens
        stats.num_accepted_tokens = speculation.num_accepted_tokens
        stats.accepted_per_position = list(speculation.accepted_per_position)
        stats.accept_lengths = list(speculation.accept_lengths)
        stats.draft_refusals = dict(speculation.refused)
        if self.runner.num_draft_failures:
            stats.draft_refusals["failure"] = self.runner.num_draft_failures
        stats.draft_state = dict(speculation.draft_state)
        hedger = self.scheduler.hedger
        if hedger is not None:
            stats.hedging = HedgeStats(
                chains=hedger.chains,
                num_rounds=hedger.num_rounds,
                num_chains=hedger.num_chains,
                num_wins=hedger.num_wins,
                num_losses=hedger.num_losses,
                num_tokens=hedger.num_tokens,
            )
        planner = self.scheduler.planner
        if planner is not None:
            stats.planner = PlannerStats(
                rounds=[(depth, reason, count) for (depth, reason), count in planner.rounds.items()],
                expected_tokens=planner.expected_tokens,
                realised_tokens=planner.realised_tokens,
                survival=planner.survival.overall().tolist(),
                slope=planner.survival.slope,
            )
        return stats

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False (and nothing done) while blocks are in use."""
        if not self.pool.reset():
            return False
        self.scheduler.draft_state.reset()
        return True

    def check(self) -> None:
        """Raise InvariantError unless queues, slots and blocks agree."""
        self.scheduler.check()
