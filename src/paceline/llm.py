"""``LLM``: the engine in this process, for scripts and notebooks."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.config import EngineConfig
from paceline.engine.factory import make_core
from paceline.engine.frontend import Frontend, Prompt, RequestState
from paceline.engine.messages import EngineInfo, EngineStats, SequenceOutput
from paceline.engine.outputs import CompletionOutput, RequestOutput
from paceline.errors import RequestError, RequestFailedError, shown
from paceline.sampling.params import SamplingParams
from paceline.text.tokenizer import Tokenizer

Message = Mapping[str, Any]


class LLM:
    """A model, ready to generate.

    Args:
        model: checkpoint folder or hub name; None serves the bundled model.
        skip_tokenizer_init: work with token ids alone.
        generation_config: ``auto`` applies the checkpoint's sampling defaults where a call names none;
            ``none`` does not.
        chat_template: path or text of a template that replaces the checkpoint's.
        **options: any field of :class:`paceline.EngineConfig`.

    Raises:
        ConfigError, CheckpointError: with what was given and what would work.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        skip_tokenizer_init: bool = False,
        generation_config: str = "auto",
        chat_template: str | None = None,
        **options: Any,
    ) -> None:
        self._core = make_core(EngineConfig.of(model=None if model is None else str(model), **options))
        self._frontend = Frontend(
            self._core.info,
            skip_tokenizer_init=skip_tokenizer_init,
            generation_config=generation_config,
            chat_template=chat_template,
        )
        self._ids = itertools.count()
        self._runs: dict[str, _Run] = {}
        # Steps serve every open call, whichever thread takes them: calls may overlap.
        self._lock = threading.RLock()

    def make_sampling_params(self, **given: Any) -> SamplingParams:
        """Sampling parameters with the checkpoint's defaults under what is given; with nothing given, a
        call's defaults.

        Raises:
            RequestError: a parameter of the wrong type.
        """
        return self._frontend.default_params(**given)

    @property
    def info(self) -> EngineInfo:
        """What is served and its limits."""
        return self._core.info

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            RequestError: the engine was started without one.
        """
        if self._frontend.tokenizer is None:
            raise RequestError("This engine works with token ids alone: it has no tokenizer.")
        return self._frontend.tokenizer

    def stats(self) -> EngineStats:
        """Counters and gauges of the engine."""
        return self._core.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""
        return self._core.reset_prefix_cache()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, batched; outputs come in the order of the prompts.

        Args:
            prompts: one or many: text, token ids, or dicts as vLLM takes them.
            sampling_params: one for all, one per prompt, or None for the defaults.
            use_tqdm: draw a progress bar on standard error.
            priority: one per prompt; lower runs first.

        Raises:
            RequestError: a prompt or parameter is refused. Nothing was generated, for any prompt.
        """
        many = self._as_list(prompts)
        tokenized = [self._frontend.tokenize(prompt) for prompt in many]
        return self._run(tokenized, sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or many.

        Args:
            messages: a list of ``{"role": ..., "content": ...}``, or a list of such lists.
            sampling_params: as in :meth:`generate`.
            use_tqdm: draw a progress bar on standard error.
            add_generation_prompt: open the assistant's turn at the end of the prompt.
            chat_template_kwargs: extra variables for the template, such as ``enable_thinking``.

        Raises:
            RequestError: a conversation or parameter is refused.
        """
        many = isinstance(messages, list | tuple) and messages and isinstance(messages[0], list | tuple)
        conversations: list[Any] = list(messages) if many else [messages]
        rendered: list[tuple[list[int], str | None]] = [
            (
                self._frontend.render_chat(
                    conversation,
                    add_generation_prompt=add_generation_prompt,
                    template_kwargs=chat_template_kwargs,
                ),
                None,
            )
            for conversation in conversations
        ]
        return self._run(rendered, sampling_params, use_tqdm, None)

    @staticmethod
    def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
        if isinstance(prompts, str | Mapping):
            return [prompts]
        if not isinstance(prompts, list | tuple | range):
            raise RequestError(
                f"prompts must be text, token ids, a dict, or a list of these, got {shown(prompts)}.",
                param="prompts",
            )
        if prompts and all(isinstance(item, int) for item in prompts):
            return [cast(Prompt, prompts)]  # one prompt of token ids
        return list(cast(Sequence[Prompt], prompts))

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Generate one request and yield what is new after every step.

        Args:
            prompt: a prompt as in :meth:`generate`, or a conversation as in :meth:`chat`.
            sampling_params: None takes the defaults.

        Raises:
            RequestError: refused. Closing the iterator aborts the request.
        """
        if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], Mapping):
            ids, text = self._frontend.render_chat(cast(Sequence[Message], prompt)), None
        else:
            ids, text = self._frontend.tokenize(cast(Prompt, prompt))
        params = self._frontend.default_params() if sampling_params is None else sampling_params
        with self._submit([(ids, text)], [params], [0]) as run:
            for state, update in self._updates(run):
                yield state.output([update])

    def _run(
        self,
        prompts: list[tuple[list[int], str | None]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or self._frontend.default_params()] * len(prompts)
        else:
            params = _listed("sampling_params", sampling_params)
        priorities = [0] * len(prompts) if priority is None else _listed("priority", priority)
        for name, count in (("sampling_params", len(params)), ("priority", len(priorities))):
            if count != len(prompts):
                raise RequestError(
                    f"{count} {name} for {len(prompts)} prompts; give one for all, or one each."
                )
        with self._submit(prompts, params, priorities) as run:
            self._drive(run, use_tqdm)
        return [state.output(state.outputs) for state in run.states.values()]

    @contextlib.contextmanager
    def _submit(
        self,
        prompts: Sequence[tuple[list[int], str | None]],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
    ) -> Iterator[_Run]:
        """Queue requests: all, or none if one is refused. At the end nothing of them is left, whatever ended
        it."""
        run = _Run()
        try:
            for (ids, text), chosen, priority in zip(prompts, params, priorities, strict=True):
                request_id = f"llm-{next(self._ids)}"
                state = self._frontend.prepare(request_id, ids, chosen, prompt=text, priority=priority)
                run.states[request_id] = state
            with self._lock:
                for request_id, state in run.states.items():
                    self._runs[request_id] = run
                    self._core.add(state.request)
            yield run
        finally:
            with self._lock:
                self._core.abort(list(run.states))
                for request_id in run.states:
                    self._runs.pop(request_id, None)

    def _updates(self, run: _Run) -> Iterator[tuple[RequestState, CompletionOutput]]:
        """Step until every request of a call has ended, yielding what is new."""
        unfinished = set(run.states)
        while unfinished:
            with self._lock:
                if not run.outputs:  # else another open call has stepped for this one
                    self._step()
            while run.outputs:
                output = run.outputs.popleft()
                state = run.states[output.request_id]
                update, stop = state.take(output)
                if stop:
                    with self._lock:
                        self._core.stop_sequence(output.request_id, output.index)
                if state.error is not None:
                    raise RequestFailedError(f"Request {output.request_id} failed: {state.error}")
                if state.finished:
                    unfinished.discard(output.request_id)
                if update is not None:
                    yield state, update

    def _step(self) -> None:
        """One step of the engine; hands what it produced to the calls it belongs to."""
        for output in self._core.step():
            run = self._runs.get(output.request_id)
            if run is not None:
                run.outputs.append(output)

    def _drive(self, run: _Run, show: bool) -> None:
        """Run to the end with a progress bar."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(
            *columns, TextColumn("{task.fields[rate]}"), console=Console(stderr=True), disable=not show
        ) as bar:
            task = bar.add_task("Prompts", total=len(run.states), rate="")
            tokens = 0
            for state, update in self._updates(run):
                tokens += len(update.token_ids)
                if update.finished and state.finished:
                    elapsed = bar.tasks[task].elapsed or 0.0
                    bar.update(task, advance=1, rate=f"{tokens / elapsed:,.0f} tok/s" if elapsed > 0 else "")


@dataclass(slots=True)
class _Run:
    """The requests of one call, and what the engine has produced for them since it last looked."""

    states: dict[str, RequestState] = field(default_factory=dict)
    outputs: deque[SequenceOutput] = field(default_factory=deque)


def _listed(name: str, values: Any) -> list[Any]:
    if not isinstance(values, list | tuple):
        raise RequestError(f"{name} must be given one for all or as a list, got {shown(values)}.", param=name)
    return list(values)
