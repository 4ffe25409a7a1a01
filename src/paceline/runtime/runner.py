"""Runs a plan on the device: rows in, accepted tokens out, nothing waits in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.models.attention import KVCache, PagedContext
from paceline.models.qwen3 import Qwen3ForCausalLM
from paceline.runtime.acceptance import count_accepted
from paceline.runtime.plan import PendingStep, Span, SpanResult, StepPlan
from paceline.runtime.rows import StepRows, build_rows
from paceline.runtime.staging import Staging, to_host
from paceline.runtime.state import SlotState
from paceline.sampling.logprobs import Logprob, position_logprobs
from paceline.sampling.sampler import LogprobTensors, SampleRows, sample, score
from paceline.sampling.state import SamplingState

PROMPT_LOGPROB_ROWS = 128
"""Rows whose full-vocabulary logits exist at once while prompt logprobs are gathered."""


@dataclass(slots=True)
class _Copies:
    """A step's results on their way to the host."""

    sampled: Tensor | None  # [N, K + 1] int32
    accepted: Tensor | None  # [N] int32
    logprobs: LogprobTensors | None  # over the sampled rows
    prompt: list[LogprobTensors | None]  # per span
    done: torch.cuda.Event | None


class Runner:
    """The device step over a paged cache.

    Args:
        model: the target.
        cache: its K/V blocks.
        max_num_seqs: slots.
        max_model_len: longest sequence in tokens.
        device: where model and cache are.
        eos_token_ids: tokens that end a sequence; not drawn before a request's ``min_tokens``.
        max_drafts: most tentative tokens per span.
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        eos_token_ids: Sequence[int] = (),
        max_drafts: int = 0,
    ) -> None:
        self.model = model
        self.cache = cache
        self.block_size = cache.k.shape[2]
        sampling = SamplingState(
            max_num_seqs, model.config.vocab_size, eos_token_ids=eos_token_ids, device=device
        )
        self.state = SlotState(max_num_seqs, max_model_len, self.block_size, sampling, device, max_drafts)
        self._device = device
        self._staging = Staging(16384, device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step. See :class:`paceline.runtime.plan.StepRunner`.

        The slots' lengths advance as the last act: a launch that raises has changed nothing that a second one would not redo.
        """
        state = self.state
        state.apply(plan.inits, plan.table)
        rows = build_rows(plan.spans, state, self._staging, self.block_size, plan.max_context)
        context = PagedContext(self.cache, rows.layout)
        hidden = self.model(rows.tokens, rows.layout.positions, context).hidden  # [R, d]
        prompt = [self._prompt_logprobs(hidden, rows, i, span) for i, span in enumerate(plan.spans)]
        if not rows.host_sampled:
            self._advance(rows, None)
            return _Pending(plan.spans, rows, self._to_host(None, None, None, prompt))
        logits = self.model.logits(hidden[rows.sample_rows]).float()  # [Q, V]
        slots = [plan.spans[i].slot for i in rows.host_sampled for _ in range(plan.spans[i].drafts + 1)]
        sample_rows = SampleRows(rows.sample_slots, rows.sample_positions, state.tokens, plan.max_context)
        output = sample(logits, sample_rows, state.sampling, state.sampling.features(slots))
        sampled, accepted = self._accept(rows, output.tokens)
        self._advance(rows, (sampled, accepted))
        return _Pending(plan.spans, rows, self._to_host(sampled, accepted, output.logprobs, prompt))

    def _accept(self, rows: StepRows, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Draws [Q] -> per span [N, K + 1], and how many drafts of each span stand [N]."""
        width = rows.max_drafts
        if width == 0:
            return drawn[:, None], torch.zeros_like(drawn)
        column = torch.arange(width + 1, device=drawn.device)
        index = rows.first_sample[:, None] + torch.minimum(column, rows.num_drafts[:, None])  # [N, K + 1]
        sampled = drawn[index]
        fed = rows.tokens[rows.sample_rows]  # [Q]: what each sampled row was fed
        return sampled, count_accepted(sampled, fed[index[:, 1:]], rows.num_drafts)

    def _advance(self, rows: StepRows, drawn: tuple[Tensor, Tensor] | None) -> None:
        """Write the tokens that stand and move every slot's length past the rows that stand."""
        state, layout = self.state, rows.layout
        stands = rows.span_rows
        if drawn is not None:
            sampled, accepted = drawn
            slots = layout.slots[rows.sampled_spans].long()  # [N]
            anchor = (
                state.num_computed[slots] + rows.span_rows[rows.sampled_spans] - rows.num_drafts - 1
            )  # [N] position of each anchor row
            # All K + 1 draws are written: those past the accepted ones are tentative like drafts, and are overwritten before they
            # are read as known.
            column = torch.arange(sampled.shape[1], device=sampled.device, dtype=torch.int32)
            target = slots[:, None] * state.tokens.shape[1] + (anchor[:, None] + 1 + column)
            state.tokens.view(-1).index_copy_(0, target.view(-1), sampled.reshape(-1))
            stands = stands.index_add(0, rows.sampled_spans, accepted - rows.num_drafts)
        state.num_computed.index_add_(0, layout.slots, stands)

    def _prompt_logprobs(self, hidden: Tensor, rows: StepRows, index: int, span: Span) -> LogprobTensors | None:
        """Logprobs of the prompt tokens that follow the span's first ``prompt_rows`` rows."""
        if span.prompt_rows == 0:
            return None
        start = sum(rows.layout.host_rows[:index])
        positions = rows.layout.positions[start : start + span.prompt_rows].long()
        successors = self.state.tokens[span.slot][positions + 1]
        top = self.state.sampling.params(span.slot).prompt_logprobs
        assert top is not None, "prompt rows are planned only for requests that ask"
        parts = [
            gather_logprobs(self.model.logits(part).float(), following, top)
            for part, following in zip(
                hidden[start : start + span.prompt_rows].split(PROMPT_LOGPROB_ROWS),
                successors.split(PROMPT_LOGPROB_ROWS),
                strict=True,
            )
        ]
        return LogprobTensors.cat(parts)

    def _to_host(
        self,
        sampled: Tensor | None,
        accepted: Tensor | None,
        logprobs: LogprobTensors | None,
        prompt: list[LogprobTensors | None],
    ) -> _Copies:
        if self._device.type != "cuda":
            return _Copies(sampled, accepted, logprobs, prompt, None)
        copies = _Copies(
            None if sampled is None else to_host(sampled),
            None if accepted is None else to_host(accepted),
            None if logprobs is None else logprobs.to_host(),
            [None if item is None else item.to_host() for item in prompt],
            torch.cuda.Event(),
        )
        assert copies.done is not None
        copies.done.record()
        return copies


class _Pending:
    """See :class:`paceline.runtime.plan.PendingStep`."""

    def __init__(self, spans: Sequence[Span], rows: StepRows, copies: _Copies) -> None:
        self._spans = spans
        self._rows = rows
        self._copies = copies

    def result(self) -> list[SpanResult]:
        copies = self._copies
        if copies.done is not None:
            copies.done.synchronize()
        results = [
            SpanResult([], prompt_logprobs=None if item is None else item.to_python())
            for item in copies.prompt
        ]
        if copies.sampled is None or copies.accepted is None:
            return results
        sampled = copies.sampled.tolist()
        accepted = copies.accepted.tolist()
        logprobs: list[dict[int, Logprob]] | None = None
        if copies.logprobs is not None:
            logprobs = copies.logprobs.to_python()
        first = 0
        for i, tokens, count in zip(self._rows.host_sampled, sampled, accepted, strict=True):
            results[i].tokens = tokens[: count + 1]
            if logprobs is not None:
                results[i].logprobs = logprobs[first : first + count + 1]
            first += self._spans[i].drafts + 1
        return results
