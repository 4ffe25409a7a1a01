"""Runs a plan on the device: rows in, accepted tokens out, nothing waits in between."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from paceline.errors import EngineDeadError
from paceline.models.attention import KVCache, PagedContext
from paceline.models.drafter import Drafter
from paceline.models.qwen3 import ForwardOutput, Qwen3ForCausalLM
from paceline.runtime.acceptance import Verified, count_accepted
from paceline.runtime.deferred import DeferredContext
from paceline.runtime.division import Part, divide, divide_exactly
from paceline.runtime.drafting import DraftStage
from paceline.runtime.failures import FailureLog
from paceline.runtime.few_rows import FewRows
from paceline.runtime.graphs import RoundSet
from paceline.runtime.passes import LAUNCH_ROWS, PassSet, RowPass, pass_sizes
from paceline.runtime.plan import DoneStep, PendingStep, Span, SpanResult, StepPlan
from paceline.runtime.rows import StepRows, build_rows
from paceline.runtime.staging import Staging, to_host
from paceline.runtime.state import SlotState
from paceline.sampling.logprobs import Logprob, position_logprobs
from paceline.sampling.sampler import LogprobTensors, SampleRows, sample, score
from paceline.sampling.state import SamplingState
from paceline.speculation.hedging import HedgeLimits

logger = logging.getLogger(__name__)

PROMPT_LOGPROB_ROWS = 128
"""Rows whose full-vocabulary logits exist at once while prompt logprobs are gathered."""


@dataclass(slots=True)
class _Copies:
    """A step's results on their way to the host."""

    drawn: tuple[Tensor, Tensor] | None  # sampled [N, K + 1] int32, accepted [N] int32
    verified: Tensor | None  # [N] int32; all drafts of each span where it is not asked
    won: Tensor | None  # [N] int32
    predicted: Tensor | None  # [N, g] fp32
    logprobs: LogprobTensors | None  # of the sampled rows that asked
    prompt: list[list[LogprobTensors]]  # per span, in parts; empty where no prompt reports any
    done: torch.cuda.Event | None


class Runner:
    """The device step over a paged cache.

    Args:
        model: the target.
        cache: its K/V blocks.
        max_num_seqs: slots.
        max_model_len: longest sequence in tokens.
        max_num_batched_tokens: rows of a step at most.
        device: where model and cache are.
        eos_token_ids: tokens that end a sequence; not drawn before a request's ``min_tokens``.
        drafter: drafts beside the target; None for none.
        num_drafts: drafts per round.
        draft_cache: the drafter's K/V, under the same block ids unless there are ``captures``.
        draft_window: last tokens the drafter attends to; None for all.
        captures: where tap rows are captured, [capture slots, P, n * d]; None for paged draft state.
        synthetic_rate: accept each draft with this chance instead of by the rule; None for the rule.
        predict: whether anyone asks how likely drafts are to stand: a planner that has rows for some only.
        rounds: whether spans that are simple enough run as fixed-shape rounds, and those as CUDA graphs. The
            target's last block is then scratch and must not be in the pool; so is the drafter's last, or with
            ``captures`` its first.
        hedging: hedge chains that rounds may have; None for none. They need ``max_rows`` slots before the
            target's last block.
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int = LAUNCH_ROWS,
        device: torch.device,
        eos_token_ids: Sequence[int] = (),
        drafter: Drafter | None = None,
        num_drafts: int = 0,
        draft_cache: KVCache | None = None,
        draft_window: int | None = None,
        captures: Tensor | None = None,
        synthetic_rate: float | None = None,
        predict: bool = True,
        rounds: Literal["none", "eager", "captured"] = "none",
        hedging: HedgeLimits | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.block_size = cache.k.shape[2]
        sampling = SamplingState(
            max_num_seqs + 1, model.config.vocab_size, eos_token_ids=eos_token_ids, device=device
        )
        # Two steps may be in flight, and each may have a drafter's block reserved behind its rows.
        lookahead = 0 if drafter is None else 2 * max(drafter.config.block_size, num_drafts)
        self.state = SlotState(max_num_seqs, max_model_len, self.block_size, sampling, device, lookahead)
        self.drafting: DraftStage | None = None
        self.few_rows: FewRows | None = None
        if rounds != "none" and FewRows.runs_on(model, self.block_size):
            self.few_rows = FewRows(model, cache, drafter, draft_cache, paged=captures is None)
        if drafter is not None and draft_cache is not None:
            self.drafting = DraftStage(
                drafter,
                draft_cache,
                self.state,
                num_drafts=num_drafts,
                window=draft_window,
                captures=captures,
                synthetic_rate=synthetic_rate,
                few_rows=self.few_rows,
                hedge_positions=() if hedging is None else hedging.positions,
                predict=predict,
            )
        self.device = device
        self._staging = Staging(16384, device)
        self._log_failed_round = FailureLog(logger, "A decode round failed; its sequences run row by row.")
        self.rounds: RoundSet | None = None
        if rounds != "none":
            self.rounds = RoundSet(
                model,
                cache,
                self.state,
                self.drafting,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                capture=rounds == "captured",
                few_rows=self.few_rows,
                hedging=hedging,
            )
        self.passes: PassSet | None = None
        if self.rounds is not None and self.rounds.shapes.captured:
            self.passes = self.make_passes(max_model_len, max_num_batched_tokens)

    @property
    def deferred(self) -> DeferredContext | None:
        """Draft context that is still to be written, where any is left for later."""
        return None if self.rounds is None else self.rounds.deferred

    @property
    def num_draft_failures(self) -> int:
        """See :class:`paceline.runtime.plan.StepRunner`."""
        return 0 if self.drafting is None else self.drafting.num_failures

    @torch.inference_mode()
    def launch(self, plan: StepPlan, *, by_rows: bool = False) -> PendingStep:
        """Start a step. See :class:`paceline.runtime.plan.StepRunner`. With ``by_rows`` no span runs as a
        round.

        The slots' lengths advance after everything that may fail for one request alone: a launch that raises
        has changed nothing that a second one would not redo. What fails for the drafter costs only drafts.

        Raises:
            EngineDeadError: it failed after lengths had advanced, and cannot be run again.
        """
        if self.deferred is not None:
            self.deferred.write_before(plan)
        self.state.apply(plan.inits, plan.table)
        if self.drafting is not None:
            self.drafting.begin(plan.draft)
        parts = [Part(list(range(len(plan.spans))), None)]
        if self.rounds is not None and not by_rows:
            kinds = [self.rounds.kind(span) for span in plan.spans]
            kinds = self.rounds.with_prompts(plan.spans, kinds, plan.depth)
            rows = [span.rows - _excess(span, plan.depth) for span in plan.spans]
            parts = divide(rows, kinds) if self.rounds.shapes.captured else divide_exactly(kinds)
        pending: list[PendingStep] = []
        for part in parts:
            pending.append(self._run_part(plan, part, is_first=not pending))
        return pending[0] if len(pending) == 1 else _Merged(parts, pending)

    def make_passes(self, max_model_len: int, max_num_batched_tokens: int) -> PassSet:
        """Passes over rows of fixed sizes, captured where rounds are."""
        taps = () if self.drafting is None else tuple(self.drafting.taps)
        most, _ = pass_sizes(max_num_batched_tokens)[-1]
        weight = self.model.embed_tokens.weight  # [V, d]
        hidden = weight.new_empty(most, weight.shape[1])
        tapped = weight.new_empty(most, len(taps) * weight.shape[1]) if taps else None
        make = partial(
            RowPass,
            model=self.model,
            cache=self.cache,
            state=self.state,
            taps=taps,
            max_model_len=max_model_len,
            output=ForwardOutput(hidden, tapped),
        )
        where = None if self.rounds is None else self.rounds.graphs.where
        return PassSet(make, max_num_batched_tokens, where)

    def _run_part(self, plan: StepPlan, part: Part, *, is_first: bool) -> PendingStep:
        """Run some spans of a step: as a round where that works, else by rows. Once others have run, the step
        as a whole cannot be run again.
        """
        spans = [plan.spans[i] for i in part.spans]
        if part.kind is None or part.kind == "full":  # which know no choice of drafts
            spans = _shortened(spans, plan.depth)
        if part.kind is not None and self.rounds is not None:
            try:
                output, chains = self.rounds.run(spans, part.kind, plan.depth)
            except EngineDeadError:
                raise
            except Exception:
                self._log_failed_round()
                spans = _shortened(spans, plan.depth)
            else:
                return self._round_results(spans, output, chains)
        try:
            return self._run_rows(spans, plan.max_context)
        except Exception as error:
            if is_first or isinstance(error, EngineDeadError):
                raise
            logger.exception("Rows beside a decode round failed; running their sequences one by one.")
            return DoneStep([self._run_alone(span, plan.max_context) for span in spans])

    def _run_alone(self, span: Span, max_context: int) -> SpanResult:
        """One span, whose failure is its own."""
        try:
            (result,) = self._run_rows([span], max_context).result()
        except EngineDeadError:
            raise
        except Exception as error:
            logger.exception("One request failed.")
            return SpanResult.failed(error)
        return result

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Capture one more decode round, or short pass. See :class:`paceline.runtime.plan.StepRunner`."""
        parts = (self.rounds, self.passes, self.deferred)
        try:
            return any(part is not None and part.graphs.prepare() for part in parts)
        except EngineDeadError:
            raise
        except Exception:
            logger.exception("A graph could not be captured; steps that need it try again, or run without.")
            return True

    def _round_results(self, spans: Sequence[Span], output: Verified, chains: Sequence[int]) -> _Pending:
        """Of spans of anchors and drafts that ran as one fixed-shape round."""
        count, width = len(spans), output.sampled.shape[1]
        logprobs = None
        if output.logprobs is not None and any(self.state.sampling.reports(span.slot) for span in spans):
            logprobs = _reported(output.logprobs, spans, width, self.state.sampling)
        drawn = output.sampled[:count], output.accepted[:count]
        more = output.drafts, output.won, output.predicted
        verified, won, predicted = (None if x is None else x[:count] for x in more)
        copies = self._to_host(drawn, logprobs, [], verified, won, predicted)
        return _Pending(spans, list(range(count)), copies, chains)

    def _run_rows(self, spans: Sequence[Span], max_context: int) -> _Pending:
        """Spans of any kind, laid out row by row."""
        state, drafting = self.state, self.drafting
        if self.rounds is not None:
            self.rounds.forget_chains(spans)
        if self.deferred is not None:
            self.deferred.write()
        rows = build_rows(spans, state, self._staging, max_context)
        hidden, tapped = self._forward(rows)  # [R, d], [R, n * d]
        prompt = [self._prompt_logprobs(hidden, rows, i, span) for i, span in enumerate(spans)]
        if not rows.host_sampled:
            self._advance(rows, tapped, None)
            return _Pending(spans, [], self._to_host(None, None, prompt))
        logits = self.model.logits(hidden[rows.sample_rows]).float()  # [Q, V]
        slots = [spans[i].slot for i in rows.host_sampled for _ in range(spans[i].drafts + 1)]
        sample_rows = SampleRows(rows.sample_slots, rows.sample_positions, state.tokens, max_context)
        output = sample(logits, sample_rows, state.sampling, state.sampling.features(slots))
        drawn = self._accept(rows, output.tokens)
        predicted = None
        if drafting is not None and drafting.predicts and rows.max_drafts:
            predicted = drafting.chances[rows.sample_slots[rows.first_sample]]
        self._advance(rows, tapped, drawn)
        if drafting is not None and rows.host_proposing:
            slots_at_random = state.sampling.any_random(rows.host_proposing)
            drafting.propose(rows.proposing, len(rows.host_proposing), max_context, noise=slots_at_random)
        copies = self._to_host(drawn, output.logprobs, prompt, predicted=predicted)
        return _Pending(spans, rows.host_sampled, copies)

    def _forward(self, rows: StepRows) -> ForwardOutput:
        """The target's layers."""
        if self.passes is not None and (output := self.passes.forward(rows)) is not None:
            return output
        taps = () if self.drafting is None else self.drafting.taps
        context = PagedContext(self.cache, rows.layout)
        return self.model(rows.tokens, rows.layout.positions, context, taps)  # type: ignore[no-any-return]

    def _accept(self, rows: StepRows, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Draws [Q] -> per span [N, K + 1], and how many drafts of each span stand [N]."""
        width = rows.max_drafts
        if width == 0:
            return drawn[:, None], torch.zeros_like(drawn)
        column = torch.arange(width + 1, device=drawn.device)
        index = rows.first_sample[:, None] + torch.minimum(column, rows.num_drafts[:, None])  # [N, K + 1]
        sampled = drawn[index]
        fed = rows.tokens[rows.sample_rows]  # [Q]: what each sampled row was fed
        accepted = count_accepted(sampled, fed[index[:, 1:]], rows.num_drafts)
        if self.drafting is not None:
            first = rows.first_sample
            slots, anchors = rows.sample_slots[first], rows.sample_positions[first]
            accepted = self.drafting.override(accepted, slots, anchors, rows.num_drafts)
        return sampled, accepted

    def _advance(self, rows: StepRows, tapped: Tensor | None, drawn: tuple[Tensor, Tensor] | None) -> None:
        """Write draft state and the tokens that stand, and move every slot's length past the rows that stand.

        Draft state comes this late because capturing rows is the one thing a failed launch could not redo: a
        capture slot may be reused by the very step that restores what it held before.
        """
        state, layout = self.state, rows.layout
        if self.drafting is not None and tapped is not None:
            self.drafting.write_context(tapped, layout)
        stands = rows.span_rows
        if drawn is not None:
            sampled, accepted = drawn
            slots = layout.slots[rows.sampled_spans].long()  # [N]
            anchor = (
                state.num_computed[slots] + rows.span_rows[rows.sampled_spans] - rows.num_drafts - 1
            )  # [N] position of each anchor row
            # All K + 1 draws are written: those past the accepted ones are tentative like drafts, and are
            # overwritten before they are read as known.
            column = torch.arange(sampled.shape[1], device=sampled.device, dtype=torch.int32)
            target = slots[:, None] * state.tokens.shape[1] + (anchor[:, None] + 1 + column)
            state.tokens.view(-1).index_copy_(0, target.view(-1), sampled.reshape(-1))
            stands = stands.index_add(0, rows.sampled_spans, accepted - rows.num_drafts)
        state.num_computed.index_add_(0, layout.slots, stands)

    def _prompt_logprobs(
        self, hidden: Tensor, rows: StepRows, index: int, span: Span
    ) -> list[LogprobTensors]:
        """Logprobs of the prompt tokens that follow the span's first ``prompt_rows`` rows, in parts."""
        if span.prompt_rows == 0:
            return []
        start = sum(rows.layout.host_rows[:index])
        stop = start + span.prompt_rows
        successors = self.state.tokens[span.slot][rows.layout.positions[start:stop].long() + 1]
        return [
            score(self.model.logits(part).float(), following, span.prompt_top)
            for part, following in zip(
                hidden[start:stop].split(PROMPT_LOGPROB_ROWS),
                successors.split(PROMPT_LOGPROB_ROWS),
                strict=True,
            )
        ]

    def _to_host(
        self,
        drawn: tuple[Tensor, Tensor] | None,
        logprobs: LogprobTensors | None,
        prompt: list[list[LogprobTensors]],
        verified: Tensor | None = None,
        won: Tensor | None = None,
        predicted: Tensor | None = None,
    ) -> _Copies:
        """Start copying a step's results to the host. Its tokens stand already."""
        try:
            copies = _Copies(
                drawn=None if drawn is None else (to_host(drawn[0]), to_host(drawn[1])),
                verified=None if verified is None else to_host(verified),
                won=None if won is None else to_host(won),
                predicted=None if predicted is None else to_host(predicted),
                logprobs=None if logprobs is None else _logprobs_to_host(logprobs),
                prompt=[[_logprobs_to_host(part) for part in parts] for parts in prompt],
                done=None,
            )
        except Exception as error:
            raise EngineDeadError("The results of a step are lost, and its tokens stand.") from error
        if self.device.type == "cuda":
            copies.done = torch.cuda.Event()
            copies.done.record()
        return copies


class _Merged:
    """The results of a step that ran in parts, in plan order."""

    def __init__(self, parts: Sequence[Part], pending: Sequence[PendingStep]) -> None:
        self._parts, self._pending = parts, pending

    def result(self) -> list[SpanResult]:
        found = {
            index: result
            for part, pending in zip(self._parts, self._pending, strict=True)
            for index, result in zip(part.spans, pending.result(), strict=True)
        }
        return [found[index] for index in range(len(found))]


def _shortened(spans: Sequence[Span], depth: int | None) -> list[Span]:
    """The same with at most ``depth`` drafts each."""
    return [
        replace(span, rows=span.rows - cut, drafts=span.drafts - cut) if cut else span
        for span, cut in ((span, _excess(span, depth)) for span in spans)
    ]


def _excess(span: Span, depth: int | None) -> int:
    """Drafts of a span beyond ``depth``."""
    return 0 if depth is None else max(0, span.drafts - depth)


def _reported(
    item: LogprobTensors, spans: Sequence[Span], width: int, state: SamplingState
) -> LogprobTensors:
    """Of a round's log-probabilities, ``width`` rows to a span, those of spans that report them; other rows,
    and those beyond a span's drafts, are nobody's: -1.
    """
    count = len(spans) * width
    rows = np.full(count, -1, dtype=np.int64)
    sampled = 0
    for i, span in enumerate(spans):
        if state.reports(span.slot):
            rows[i * width : i * width + span.drafts + 1] = np.arange(sampled, sampled + span.drafts + 1)
        sampled += span.drafts + 1
    return LogprobTensors(rows, item.token_ids[:count], item.logprobs[:count], item.ranks[:count])


def _logprobs_to_host(item: LogprobTensors) -> LogprobTensors:
    return LogprobTensors(item.rows, to_host(item.token_ids), to_host(item.logprobs), to_host(item.ranks))


def _reader(item: LogprobTensors) -> Callable[[int, int], dict[int, Logprob]]:
    """Maps a row's index, and how many alternatives were asked for, to what the user sees of it."""
    ids, values, ranks = item.token_ids.numpy(), item.logprobs.numpy(), item.ranks.tolist()
    return lambda index, top: position_logprobs(ids[index], values[index], ranks[index], top)


class _Pending:
    """See :class:`paceline.runtime.plan.PendingStep`."""

    def __init__(
        self,
        spans: Sequence[Span],
        host_sampled: list[int],
        copies: _Copies,
        chains: Sequence[int] = (),
    ) -> None:
        self._spans = spans
        self._chains = chains
        self._host_sampled = host_sampled
        self._copies = copies

    def result(self) -> list[SpanResult]:
        copies = self._copies
        if copies.done is not None:
            copies.done.synchronize()
        results = [SpanResult([]) for _ in self._spans]
        for result, span, parts in zip(results, self._spans, copies.prompt, strict=bool(copies.prompt)):
            if span.prompt_rows:
                result.prompt_logprobs = [
                    read(i, span.prompt_top)
                    for part, read in ((part, _reader(part)) for part in parts)
                    for i in range(len(part.rows))
                ]
        if copies.drawn is not None:
            sampled, accepted = copies.drawn[0].tolist(), copies.drawn[1].tolist()
            for i, tokens, count in zip(self._host_sampled, sampled, accepted, strict=True):
                drafts = min(self._spans[i].drafts, len(tokens) - 1)  # those there were rows for
                results[i].tokens, results[i].verified = tokens[: count + 1], drafts
            if copies.verified is not None:
                for i, drafts in zip(self._host_sampled, copies.verified.tolist(), strict=True):
                    results[i].verified = drafts
            if copies.predicted is not None:
                for i, chances in zip(self._host_sampled, copies.predicted.tolist(), strict=True):
                    results[i].predicted = chances
            if copies.won is not None:
                for i, chains, won in zip(self._host_sampled, self._chains, copies.won.tolist(), strict=True):
                    results[i].chains, results[i].won = chains, won
            if copies.logprobs is not None:
                self._add_logprobs(results, copies.logprobs)
        return results

    def _add_logprobs(self, results: list[SpanResult], logprobs: LogprobTensors) -> None:
        owner = [
            i for i in self._host_sampled for _ in range(self._spans[i].drafts + 1)
        ]  # span of each sampled row
        read = _reader(logprobs)
        for i, row in enumerate(logprobs.rows.tolist()):
            if row < 0:
                continue
            result, span = results[owner[row]], self._spans[owner[row]]
            if result.logprobs is None:
                result.logprobs = []
            if len(result.logprobs) < len(result.tokens):  # rows of rejected drafts have logprobs nobody sees
                result.logprobs.append(read(i, span.top))
