"""Requests run to their ends through an engine core, and what each round of drafts did on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.engine.core import EngineCore
from paceline.engine.messages import EngineRequest, SequenceOutput
from paceline.runtime.plan import PendingStep, SpanResult, StepPlan
from paceline.runtime.runner import Runner
from paceline.sampling.params import SamplingParams


def complete(
    core: EngineCore,
    prompts: Sequence[list[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    after_step: Callable[[], None] | None = None,
) -> list[list[SequenceOutput]]:
    """Run prompts to their end together; per prompt (and continuation) its merged output.

    Args:
        core: an engine with nothing to do.
        prompts: token ids.
        params: one for all, or one each.
        after_step: called after every step.
    """
    many = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    for i, (prompt, chosen) in enumerate(zip(prompts, many, strict=True)):
        core.add(EngineRequest(request_id=str(i), prompt_token_ids=prompt, params=chosen))
    merged: dict[tuple[int, int], SequenceOutput] = {}
    while core.has_work:
        for output in core.step():
            key = (int(output.request_id), output.index)
            if key in merged:
                _add(merged[key], output)
            else:
                merged[key] = output
        if after_step is not None:
            after_step()
    return [[merged[i, j] for j in range(many[i].n)] for i in range(len(prompts))]


def _add(whole: SequenceOutput, output: SequenceOutput) -> None:
    whole.token_ids += output.token_ids
    if output.logprobs is not None:
        whole.logprobs = (whole.logprobs or []) + output.logprobs
    whole.num_draft_tokens += output.num_draft_tokens
    whole.num_accepted_tokens += output.num_accepted_tokens
    whole.finish_reason, whole.stop_reason = output.finish_reason, output.stop_reason
    whole.error = output.error


def tokens_of(outputs: Sequence[Sequence[SequenceOutput]]) -> list[list[int]]:
    """Token ids of every continuation, flattened."""
    return [output.token_ids for group in outputs for output in group]


def runner_of(core: EngineCore) -> Runner:
    """The core's device, under a recorder or not."""
    runner = core.runner.runner if isinstance(core.runner, RoundRecorder) else core.runner
    assert isinstance(runner, Runner)
    return runner


@dataclass(frozen=True, slots=True)
class Round:
    """One verify span.

    Attributes:
        life: which stay of which sequence in a slot it belongs to. Rounds of one life extend each other.
        context: the sequence's tokens up to the anchor, which is the last of them.
        drafts: what was fed behind the anchor.
        tokens: what the span committed, as far as the device is concerned: accepted drafts and the bonus.
    """

    life: int
    context: list[int]
    drafts: list[int]
    tokens: list[int]

    @property
    def text(self) -> list[int]:
        """The sequence's tokens after the round."""
        return [*self.context, *self.tokens]

    @property
    def start(self) -> int:
        """Position of the anchor."""
        return len(self.context) - 1

    @property
    def num_accepted(self) -> int:
        """Drafts that stood, a hedge chain's among them."""
        return len(self.tokens) - 1

    @property
    def num_standing(self) -> int:
        """How many of ``drafts`` themselves stood: a draft that does not differs from what was committed."""
        pairs = zip(self.drafts, self.tokens, strict=False)
        return next((i for i, (draft, token) in enumerate(pairs) if draft != token), self.num_accepted)


class RoundRecorder:
    """A device that writes down every round of the one it wraps. Reads device state: only for checks.

    Attributes:
        runner: the wrapped device.
        rounds: in order of launch.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.rounds: list[Round] = []
        self._lives: dict[int, int] = {}
        self._num_lives = 0

    @staticmethod
    def on(core: EngineCore) -> RoundRecorder:
        """Record the rounds of ``core`` from now on."""
        recorder = RoundRecorder(runner_of(core))
        core.runner = recorder
        return recorder

    def launch(self, plan: StepPlan) -> PendingStep:
        """See :class:`paceline.runtime.plan.StepRunner`."""
        for init in plan.inits:
            self._lives[init.slot] = self._num_lives
            self._num_lives += 1
        state = self.runner.state
        opened: list[tuple[int, int, list[int], list[int]]] = []
        for index, span in enumerate(plan.spans):
            if span.drafts:
                anchor = int(state.num_computed[span.slot]) + span.rows - span.drafts - 1
                tokens: list[int] = state.tokens[span.slot, : anchor + 1 + span.drafts].tolist()
                life = self._lives.get(span.slot, -1 - span.slot)
                opened.append((index, life, tokens[: anchor + 1], tokens[anchor + 1 :]))
        return _Recorded(self.runner.launch(plan), opened, self.rounds)

    @property
    def num_draft_failures(self) -> int:
        """See :class:`paceline.runtime.plan.StepRunner`."""
        return self.runner.num_draft_failures

    def prepare(self) -> bool:
        """See :class:`paceline.runtime.plan.StepRunner`."""
        return self.runner.prepare()


class _Recorded:
    """A launched step whose rounds are written down when its results are read."""

    def __init__(
        self,
        pending: PendingStep,
        opened: list[tuple[int, int, list[int], list[int]]],
        rounds: list[Round],
    ) -> None:
        self._pending = pending
        self._opened = opened
        self._rounds = rounds

    def result(self) -> list[SpanResult]:
        results = self._pending.result()
        for index, life, context, drafts in self._opened:
            self._rounds.append(Round(life, context, drafts, list(results[index].tokens)))
        return results
