"""The scheduler: which rows run in the next step. Pure logic; no torch, no clock, no I/O.

One step mixes everything: decode rows, prefill chunks and first chunks of newly admitted sequences share one
row budget. Rules, in order:

1. Running sequences that decode get their rows first, the most important first, so that no prefill stalls a
   stream.
2. Running prefills continue with what is left of the budget.
3. Waiting sequences are admitted in order of (priority, arrival) while slots, rows and blocks last. The first
   that does not fit ends admission: nobody overtakes, so nobody starves. Only who lacks a block that a
   running sequence computes right now is passed over until it is there, and a slot is kept for it.

When a running sequence cannot get a block, the least important running sequence is preempted: it gives
everything back and will be recomputed (mostly from the prefix cache). The most important sequence can preempt
all others and admission refuses what the whole pool cannot hold, so every step makes progress.

``plan`` may be called again before the previous plan was committed (see decision 001): rows in flight are
counted through the blocks' reservations.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from operator import attrgetter

from paceline.cache import BlockPool, SequenceBlocks
from paceline.engine.draft_choice import add_chains, executed_chains, teach
from paceline.engine.planned import DraftLimits, Entry, PlannedStep, Progress
from paceline.engine.sequence import Sequence, Status
from paceline.engine.shared_prefixes import SharedPrefixes
from paceline.errors import InvariantError
from paceline.runtime.plan import SlotInit, Span, SpanResult, StepPlan, TableUpdate
from paceline.speculation.counters import SpeculationCounters
from paceline.speculation.decision import Batch, Decision
from paceline.speculation.draft_state import Candidate, DraftState, Offer, PagedDraftState
from paceline.speculation.hedging import Hedger
from paceline.speculation.planner import Planner
from paceline.speculation.vacancies import Vacancies

_order = attrgetter("order")


class Scheduler:
    """Owns the queues, the slots and the block pool.

    Args:
        pool: the block pool.
        max_num_seqs: number of slots.
        max_num_batched_tokens: rows per step.
        max_model_len: positions a sequence may have.
        vocab_size: what a request for all logprobs means.
        drafting: the drafter's limits; None drafts nothing.
        draft_state: how the drafter's knowledge of the past is kept; None for paged.
        planner: how many drafts are verified in a step, and whether any are made; None for all that fit.
        hedger: which sequences have hedge chains beside their drafts; None for none.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
        drafting: DraftLimits | None = None,
        draft_state: DraftState | None = None,
        planner: Planner | None = None,
        hedger: Hedger | None = None,
    ) -> None:
        self.drafting = drafting or DraftLimits()
        self.planner = planner
        self.hedger = hedger
        self.draft_state = draft_state or PagedDraftState(SpeculationCounters(self.drafting.num_drafts))
        self.speculation = self.draft_state.counters
        self.pool = pool
        self.vocab_size = vocab_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.num_preemptions = 0
        self._waiting: list[tuple[tuple[int, int, int], Sequence]] = []
        self._running: list[Sequence] = []
        self._free_slots = list(range(max_num_seqs))[::-1]
        self._queued = False  # whether the last plan had no room for somebody
        self._vacancies = Vacancies()
        self._started = self._ended = 0  # sequences, since ``_vacancies`` was told
        self._prefixes = SharedPrefixes(pool.block_size)
        self._step = 0

    # ------------------------------------------------------------------ queues

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is running or waiting."""
        return bool(self._running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        heapq.heappush(self._waiting, (sequence.order, sequence))

    def finish(self, sequences: Iterable[Sequence]) -> None:
        """End sequences now, wherever they are, and give everything back exactly once.

        Rows still in flight for them may be written later than this. They only touch blocks that were never
        registered, and whoever gets those blocks next writes them in a later step of the same stream.
        """
        dropped = False
        for sequence in sequences:
            if sequence.status is Status.RUNNING:
                self._running.remove(sequence)
                self._vacate(sequence)
                self._ended += 1
            elif sequence.status is Status.WAITING:
                dropped = True
            sequence.status = Status.FINISHED
        if dropped:
            self._waiting = [item for item in self._waiting if item[1].status is Status.WAITING]
            heapq.heapify(self._waiting)

    def _vacate(self, sequence: Sequence) -> None:
        self.draft_state.release(sequence.slot)
        sequence.can_draft = False
        sequence.blocks.release()
        sequence.blocks = SequenceBlocks(self.pool, salt=sequence.request.cache_salt.encode())
        sequence.abandon()
        sequence.table_len = sequence.drafted = 0
        if self._wants_prompt_logprobs(sequence):
            sequence.prompt_logprobs = []  # gathered anew
        sequence.tenancy += 1
        self._prefixes.stale = True
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    # ------------------------------------------------------------------ planning

    def plan(self) -> PlannedStep | None:
        """The next step, or None when nothing can run (all waits on steps in flight, or no work)."""
        step = PlannedStep(StepPlan(self._step), [])
        budget = room = self.max_num_batched_tokens  # rows, and rows for drafts
        self._running.sort(key=_order)
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self._running:
            (decoding if len(sequence.tokens) - sequence.scheduled <= 1 else prefilling).append(sequence)
        if self.planner is not None:
            self._vacancies.step(self._started, self._ended, len(self._running))
            self._started = self._ended = 0
            batch = self._batch(decoding, prefilling)
            step.decision = self.planner.decide(batch)
            step.plan.depth = step.decision.depth
            # More drafts may be in place: whose get these rows is for the device to say.
            room = self.planner.costs.room(len(batch.slots), step.decision.depth)
        scarce = False
        unserved = len(decoding)  # decodes to come: each keeps a row, whatever is drafted before it
        for sequence in (*decoding, *prefilling):
            unserved = max(unserved - 1, 0)
            if sequence.status is not Status.RUNNING:
                continue  # it was a victim earlier in this loop
            span = self._next_span(sequence, step.decision, budget, budget - 1 - unserved)
            if span is None:
                continue
            while not (granted := self._reserve(sequence, span)):
                scarce = True
                victim = max(self._running, key=_order)
                if victim is sequence and sequence.in_flight:
                    break  # of what it reserved for drafts in flight, most is given back when they land
                budget += self._preempt(victim, step)
                if victim is sequence:
                    break
            if granted:
                self._append(step, sequence, span)
                drafts = min(span.drafts, room)
                room -= drafts
                budget -= span.rows - span.drafts + drafts
        self._queued = scarce or self._admit(step, budget)
        if not step.entries:
            return None
        if self.hedger is not None:
            add_chains(step, self.hedger, self.max_num_batched_tokens - step.plan.num_rows)
        self._prefixes.arrange(step, self._running)
        self._step += 1
        return step

    def _batch(self, decoding: Iterable[Sequence], prefilling: Iterable[Sequence]) -> Batch:
        """The sequences that decode, as the planner sees them, and the work beside them."""
        sequences = [s for s in decoding if s.rows_wanted > 0]
        arrived = [s for _, s in self._waiting]  # there is a slot for each, unless others wait for room
        refilled = self._queued or len(arrived) > len(self._free_slots) or self._vacancies.replaced
        return Batch(
            slots=[s.slot for s in sequences],
            available=[self._drafts_in_place(s) for s in sequences],
            can_draft=[s.can_draft for s in sequences],
            context=self._context(sequences),
            row_limit=self.max_num_batched_tokens - len(sequences),
            left=[s.tokens_left for s in sequences],
            coming=[s.tokens_left for s in (*prefilling, *(() if refilled else arrived))],
            refilled=refilled,
            **self._offered(sequences),
        )

    def _context(self, sequences: list[Sequence]) -> float:
        """Tokens whose keys a round reads, on average of a sequence."""
        tokens = sum(s.scheduled for s in sequences)
        if self.planner is not None and self.planner.costs.shares_keys:
            tokens -= self._prefixes.saved_tokens(s.slot for s in sequences)
        return tokens / max(len(sequences), 1)

    def _offered(self, decoding: list[Sequence]) -> dict[str, int]:
        """Chains the planner may have beside all drafts; none where a controller tries how many pay."""
        hedger, width = self.hedger, self.drafting.num_drafts + 1
        if hedger is None or hedger.controller is not None:
            return {}
        wanting = sum(s.can_draft and hedger.eligible(s.tokens_left) for s in decoding)
        places = hedger.places(self.max_num_batched_tokens - width * len(decoding))
        return {"hedged": min(wanting, places), "chains": hedger.chains}

    def _drafts_in_place(self, sequence: Sequence) -> int:
        """Drafts a decoding sequence could have verified now."""
        room = self.max_model_len - sequence.scheduled
        return max(0, min(sequence.drafted, sequence.tokens_left - 1, room - 1))

    def _next_span(self, sequence: Sequence, decision: Decision, budget: int, spare: int) -> Span | None:
        """What ``sequence`` runs next within ``budget`` rows, at most ``spare`` of them drafts."""
        # A span in flight may have ended the sequence already: its successor must not pass the last position.
        scheduled = sequence.scheduled
        rows = min(sequence.rows_wanted, budget, self.max_model_len - scheduled)
        if rows <= 0:
            return None
        known = len(sequence.tokens) - scheduled
        sample = rows >= known
        drafts = 0
        if known <= 1 and sequence.drafted:
            drafts = max(0, min(self._drafts_in_place(sequence), decision.limit(sequence.slot), spare))
        # Worth drafting if the next round may still commit a draft and the token after it.
        propose = (
            sample
            and sequence.can_draft
            and self.drafting.num_drafts > 0
            and decision.propose
            and sequence.tokens_left - 1 >= 2
        )
        return Span(sequence.slot, rows + drafts, drafts, propose, sample)

    def _rows_reserved(self, span: Span) -> int:
        """Rows a span needs in the cache: its own, and the drafter's block if one is proposed behind them."""
        return span.rows + self.drafting.block_rows * span.propose

    def _reserve(self, sequence: Sequence, span: Span) -> bool:
        """Take the blocks for a span; False if there are too few even for its rows.

        When only the drafter's block does not fit, the sequence does not propose and its next round is plain:
        that costs a round of drafts, where preempting somebody would cost a prefill.
        """
        if sequence.blocks.reserve(self._rows_reserved(span)) is not None:
            return True
        if not span.propose:
            return False
        self.speculation.refused["memory"] += 1
        if sequence.blocks.reserve(span.rows) is None:
            return False
        span.propose = False
        return True

    def _preempt(self, victim: Sequence, step: PlannedStep) -> int:
        """Take everything from ``victim`` and queue it again. Returns the rows it had in the plan being
        made, its drafts' left aside: others' may get those.
        """
        rows = sum(entry.span.rows - entry.span.drafts for entry in step.entries if entry.sequence is victim)
        if rows:
            slot = victim.slot
            step.entries = [entry for entry in step.entries if entry.sequence is not victim]
            step.plan.spans = [entry.span for entry in step.entries]
            step.plan.inits = [init for init in step.plan.inits if init.slot != slot]
            step.plan.table = [update for update in step.plan.table if update.slot != slot]
            step.plan.draft.drop(slot)
        self._running.remove(victim)
        self._vacate(victim)
        victim.status = Status.WAITING
        self.add(victim)
        self.num_preemptions += 1
        return rows

    def _admit(self, step: PlannedStep, budget: int) -> bool:
        """Start waiting sequences. Returns whether any wait for room, not for another sequence only."""
        if not self._waiting:
            return False
        held_back: list[Sequence] = []  # each keeps a slot free
        coming = {block for s in self._running if (block := s.blocks.coming(s.tokens)) is not None}
        while self._waiting and budget > 0 and self.pool.num_free > 0:
            if len(held_back) >= len(self._free_slots):
                break
            sequence = self._waiting[0][1]
            if self._should_wait(sequence, coming):
                heapq.heappop(self._waiting)
                held_back.append(sequence)
                continue
            started = self._start(sequence, step.decision, budget)
            if started is None:
                break
            span, offer = started
            heapq.heappop(self._waiting)
            sequence.status = Status.RUNNING
            sequence.slot = self._free_slots.pop()
            self._running.append(sequence)
            self._started += 1
            self._prefixes.stale = True
            if self.planner is not None:
                self.planner.survival.reset(sequence.slot)
            self.draft_state.admit(sequence.slot, offer, step.plan.draft)
            step.plan.inits.append(
                SlotInit(
                    slot=sequence.slot,
                    tokens=sequence.tokens[:],
                    computed=sequence.blocks.computed,
                    prompt_len=sequence.prompt_len,
                    params=sequence.request.params,
                    seed=sequence.seed,
                )
            )
            span.slot = sequence.slot
            self._append(step, sequence, span)
            budget -= span.rows
            if (block := sequence.blocks.coming(sequence.tokens)) is not None:
                coming.add(block)
        crowded = bool(self._waiting)
        for sequence in held_back:
            self.add(sequence)
        return crowded

    def _should_wait(self, sequence: Sequence, coming: set[bytes]) -> bool:
        """Whether the next block it would compute is being computed right now, by its leader or by anyone who
        shares its prefix: sharing is cheaper than racing.
        """
        if sequence.leader is not None and not self._prompt_ready(sequence.leader):
            return True
        if not coming or self._wants_prompt_logprobs(sequence):
            return False
        if sequence.awaited in coming:
            sequence.blocks.hash_prefix(sequence.tokens)  # meanwhile, so that it starts at once
            return True
        sequence.awaited = sequence.blocks.missing(sequence.tokens)
        return sequence.awaited in coming

    @staticmethod
    def _prompt_ready(leader: Sequence) -> bool:
        """Whether waiting for ``leader`` has nothing more to give: its prompt is computed, or it is gone."""
        return leader.status is Status.FINISHED or leader.blocks.computed >= leader.prompt_len - 1

    def _start(self, sequence: Sequence, decision: Decision, budget: int) -> tuple[Span, Offer] | None:
        """Take the cached prefix and the first chunk's blocks; None if they do not fit now."""
        blocks, leader, pool = sequence.blocks, sequence.leader, self.pool
        forks = leader is not None and leader.status is Status.RUNNING and sequence.num_cached_tokens is None
        parent = leader.blocks if forks and leader is not None else None
        offer = self.draft_state.offer(self._candidate(sequence, parent))
        cached = offer.num_blocks * pool.block_size
        missing = len(sequence.tokens) - cached
        rows = min(missing, budget)
        # A newcomer must find room for all its tokens and leave one block for each running sequence, or it
        # would be preempted in its first steps. When nothing else runs there is nobody to make room for, and
        # its first chunk is enough.
        wanted = missing if self._running else rows
        matched = 0 if forks else blocks.admission_cost(sequence.tokens, 0, offer.num_blocks)
        if -(-wanted // pool.block_size) + matched + len(self._running) > pool.num_free:
            return None
        if parent is not None:
            blocks.fork(parent, cached)
        elif not self._wants_prompt_logprobs(sequence):
            blocks.match(sequence.tokens, offer.num_blocks)
        sequence.can_draft = offer.drafts
        span = self._next_span(sequence, decision, budget, 0)
        if span is None or blocks.computed != cached or not self._reserve(sequence, span):
            raise InvariantError(
                f"admission counted on {cached} cached tokens and {rows} rows; the pool disagrees"
            )
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = cached
        return span, offer

    def _candidate(self, sequence: Sequence, parent: SequenceBlocks | None) -> Candidate:
        """What a sequence could share: the blocks of ``parent`` if it forks, else what is cached."""
        size, chain = self.pool.block_size, (parent or sequence.blocks).chain
        if self._wants_prompt_logprobs(sequence):
            matched = 0  # every prompt row's logits are wanted, so every row is forwarded
        elif parent is not None:
            matched = (sequence.prompt_len - 1) // size
        else:
            matched = sequence.blocks.match_length(sequence.tokens) // size
        return Candidate(
            hashes=chain.hashes[:matched],
            num_matched=matched,
            prompt_len=sequence.prompt_len,
            max_tokens=sequence.max_tokens,
            tokens_left=sequence.max_tokens - sequence.num_output_tokens,
        )

    @staticmethod
    def _wants_prompt_logprobs(sequence: Sequence) -> bool:
        params = sequence.request.params
        return params.prompt_logprobs is not None and sequence.index == 0 and sequence.num_output_tokens == 0

    def _top(self, asked: int) -> int:
        return self.vocab_size if asked == -1 else asked

    def _append(self, step: PlannedStep, sequence: Sequence, span: Span) -> None:
        """Put a span whose rows are reserved into the plan."""
        params, scheduled = sequence.request.params, sequence.scheduled
        span.fresh = scheduled == 0
        if params.logprobs is not None:
            span.top = self._top(params.logprobs)
        if params.prompt_logprobs is not None:
            span.prompt_top = self._top(params.prompt_logprobs)
            if self._wants_prompt_logprobs(sequence):
                span.prompt_rows = max(0, min(span.rows, sequence.prompt_len - 1 - scheduled))
        ids = sequence.blocks.ids
        if len(ids) > sequence.table_len:
            step.plan.table.append(TableUpdate(sequence.slot, sequence.table_len, ids[sequence.table_len :]))
            sequence.table_len = len(ids)
        sequence.launched(span)
        sequence.drafted = self.drafting.num_drafts if span.propose else 0
        reached = scheduled + span.rows
        self.draft_state.cover(sequence.slot, reached, step.plan.draft)
        step.plan.max_context = max(step.plan.max_context, reached)
        step.plan.spans.append(span)
        step.entries.append(Entry(sequence, span, sequence.tenancy))

    # ------------------------------------------------------------------ commit

    def commit(self, step: PlannedStep, results: list[SpanResult]) -> list[Progress]:
        """Take over a step's results, in launch order.

        Tokens past a stop or a limit are cut before anything is committed, registered or counted.
        """
        if len(results) != len(step.entries):
            raise InvariantError(f"{len(step.entries)} spans planned, {len(results)} results")
        if self.planner is not None:
            teach(self.planner, step, results)
        progress: list[Progress] = []
        finished: list[Sequence] = []
        hedged: list[tuple[int, int]] = []
        for entry, result in zip(step.entries, results, strict=True):
            sequence = entry.sequence
            if sequence.status is Status.FINISHED:
                continue  # it ended or was aborted while this step was in flight
            if result.error is not None:
                sequence.finish_reason = "error"
                sequence.error = result.error
                finished.append(sequence)
                progress.append(Progress(sequence, [], None))
                continue
            stale = sequence.tenancy != entry.tenancy
            if stale and self._wants_prompt_logprobs(sequence):
                continue  # the prompt is forwarded again; its logprobs and first token come together
            tokens = self._truncate(sequence, result.tokens)
            sequence.tokens.extend(tokens)
            if not stale:
                blocks, span = sequence.blocks, entry.span
                stands = span.rows - span.drafts + max(len(tokens) - 1, 0)
                blocks.commit(self._rows_reserved(sequence.landed()), stands, sequence.tokens)
                sequence.table_len = min(sequence.table_len, len(blocks.ids))
                self.draft_state.commit(sequence.slot, blocks.computed, blocks.chain.hashes)
            if result.prompt_logprobs is not None:
                sequence.prompt_logprobs.extend(result.prompt_logprobs)
            if sequence.finish_reason is not None:
                finished.append(sequence)
            accepted = min(len(tokens), len(result.tokens) - 1) if result.verified else 0
            if result.verified:
                self.speculation.add(result.verified, accepted, len(tokens))
            if result.chains:
                # Without its chain the span would have committed so many tokens.
                alone = len(result.tokens) - result.won
                hedged.append((result.chains, max(0, len(tokens) - alone)))
            if tokens:
                logprobs = result.logprobs[: len(tokens)] if result.logprobs is not None else None
                progress.append(Progress(sequence, tokens, logprobs, result.verified, accepted))
        if self.hedger is not None:
            self.hedger.verified(hedged)
            step.chains = executed_chains(step, results)
        self.finish(finished)
        return progress

    def timed(self, step: PlannedStep, seconds: float) -> None:
        """A committed step took so long: of interest when all it did was a decode round."""
        if self.planner is not None and (round_ := step.round()) is not None:
            self.planner.costs.observe(round_, step.decision.context, seconds)

    @property
    def chain_rows(self) -> int:
        """Rows of a hedge chain."""
        return 0 if self.hedger is None else self.hedger.limits.width

    def round_done(self, step: PlannedStep, began_s: float, now_s: float, tokens: int) -> None:
        """A step that began and was committed at these times brought so many tokens."""
        controller = None if self.hedger is None else self.hedger.controller
        if controller is None or not any(entry.decodes for entry in step.entries):
            return
        if step.decision.hedge and step.chains is not None:
            controller.round_done(began_s, now_s, tokens, step.chains)
        else:
            controller.interrupted(now_s)

    @staticmethod
    def _truncate(sequence: Sequence, tokens: list[int]) -> list[int]:
        """``tokens`` up to and including the first that ends the sequence; sets its finish reason."""
        room = sequence.max_tokens - sequence.num_output_tokens
        if not sequence.stop_ids.isdisjoint(tokens):
            params = sequence.request.params
            for i, token in enumerate(tokens[:room]):
                if token in sequence.stop_ids and sequence.num_output_tokens + i + 1 > params.min_tokens:
                    sequence.finish_reason = "stop"
                    sequence.stop_reason = token if token in params.stop_ids else None
                    return tokens[: i + 1]
        if len(tokens) < room:
            return tokens
        sequence.finish_reason = "length"
        return tokens[:room]

    # ------------------------------------------------------------------ checks

    def check(self) -> None:
        """Raise InvariantError unless slots, blocks and queues agree with each other."""
        self.pool.check()
        self.draft_state.check()
        slots = sorted(self._free_slots + [s.slot for s in self._running])
        if slots != list(range(self.max_num_seqs)):
            raise InvariantError(f"slots are not a partition: {slots}")
        for sequence in self._running:
            spans = sequence.in_flight
            reserved = sum(map(self._rows_reserved, spans))
            if reserved != sequence.blocks.reserved:
                raise InvariantError(f"{reserved} rows in flight, {sequence.blocks.reserved} reserved")
            counted = sum(span.rows for span in spans), sum(span.sample for span in spans)
            if counted != (sequence.rows_in_flight, sequence.sampling):
                raise InvariantError(f"rows and draws in flight are {counted}, the sequence counts others")
            if not sequence.in_flight and sequence.blocks.computed > len(sequence.tokens) - 1:
                raise InvariantError("computed rows must leave one dangling token")
