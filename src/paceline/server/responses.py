"""Responses and stream chunks, as OpenAI shapes them, with vLLM's extra fields.

One writer per request. It reads the request states, which hold everything generated so far, for a whole
response, and engine outputs, which hold what is new, for chunks.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, ClassVar

from paceline import __version__
from paceline.engine.frontend import Frontend, RequestState
from paceline.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from paceline.errors import RequestError
from paceline.sampling.logprobs import Logprob
from paceline.server.logprobs import (
    TextOffsets,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    echo_offsets,
    prompt_logprobs,
)
from paceline.server.requests import chat_names, response_id
from paceline.server.schema import ChatCompletionRequest, CompletionRequest, SamplingFields

SYSTEM_FINGERPRINT = f"paceline-{__version__}"

Json = dict[str, Any]


def spec_decode_usage(metrics: Sequence[RequestMetrics]) -> Json:
    """What was drafted for a response, over all its prompts and choices."""
    rounds = sum(item.num_drafts for item in metrics)
    accepted = sum(item.num_accepted_tokens for item in metrics)
    by_position = [item.accepted_per_position for item in metrics]
    return {
        "num_drafts": rounds,
        "num_draft_tokens": sum(item.num_draft_tokens for item in metrics),
        "num_accepted_tokens": accepted,
        "num_accepted_tokens_per_pos": [sum(counts) for counts in zip_longest(*by_position, fillvalue=0)],
        "mean_accept_length": 1 + accepted / rounds if rounds else None,
    }


class Writer(ABC):
    """What both kinds of responses share.

    Args:
        body: the request.
        states: its engine requests, one per prompt.
        frontend: names tokens.
        model: model name to report.
    """

    object_name: ClassVar[str]
    chunk_name: ClassVar[str]
    id_prefix: ClassVar[str]

    def __init__(
        self, body: SamplingFields, states: Sequence[RequestState], frontend: Frontend, model: str
    ) -> None:
        self._body = body
        self._states = states
        self._names = TokenNames(frontend.tokenizer, as_ids=body.return_tokens_as_token_ids is True)
        self._model = model
        self._id = response_id(self.id_prefix, body)
        self._created = int(time.time())
        self._num_choices = body.n or 1
        options = body.stream_options
        self._final_usage = options is not None and options.include_usage is True
        self._running_usage = options is not None and options.continuous_usage_stats is True

    def response(self) -> Json:
        """The whole response, when every sequence has ended."""
        choices = [
            self._whole(state, output, self._choice_index(index, output))
            for index, state in enumerate(self._states)
            for output in state.outputs
        ]
        return {**self._envelope(self.object_name), "choices": choices, "usage": self._usage()}

    def first_chunks(self) -> Iterator[Json]:
        """Chunks that precede all text."""
        return iter(())

    def chunks(self, index: int, output: RequestOutput) -> Iterator[Json]:
        """Chunks for what is new of prompt ``index``."""
        for completion in output.outputs:
            silent = not completion.text and not completion.finished and completion.logprobs is None
            if silent and not self._running_usage and not self._body.return_token_ids:
                continue  # tokens without certain text yet: a part of a character, or of a stop string
            yield self._chunk([self._delta(index, completion)])

    def last_chunks(self) -> Iterator[Json]:
        """Chunks that follow all text: the usage, when asked for."""
        if self._final_usage:
            yield {**self._envelope(self.chunk_name), "choices": [], "usage": self._usage()}

    def refusal(self, error: RequestError) -> RequestError:
        """A refusal of the engine in the names of the body's fields."""
        return error

    @abstractmethod
    def _whole(self, state: RequestState, output: CompletionOutput, index: int) -> Json:
        """A choice of a whole response."""

    @abstractmethod
    def _delta(self, prompt_index: int, output: CompletionOutput) -> Json:
        """A choice of a chunk."""

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._envelope(self.chunk_name), "choices": choices}
        if self._running_usage:
            chunk["usage"] = self._usage()
        elif self._final_usage:
            chunk["usage"] = None
        return chunk

    def _choice_index(self, prompt_index: int, output: CompletionOutput) -> int:
        return prompt_index * self._num_choices + output.index

    def _envelope(self, object_name: str) -> Json:
        return {
            "id": self._id,
            "object": object_name,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }

    def _usage(self) -> Json:
        prompt = sum(len(state.request.prompt_token_ids) for state in self._states)
        completion = sum(len(output.token_ids) for state in self._states for output in state.outputs)
        cached = sum(state.num_cached_tokens for state in self._states)
        usage: Json = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if self._body.return_spec_decode_metrics:
            usage["spec_decode"] = spec_decode_usage([state.metrics for state in self._states])
        return usage

    @staticmethod
    def _ending(output: CompletionOutput) -> Json:
        return {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}

    def _token_ids(self, output: CompletionOutput) -> Json:
        return {"token_ids": output.token_ids} if self._body.return_token_ids else {}


class ChatWriter(Writer):
    """Chat completions: one prompt, messages out."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(
        self, body: ChatCompletionRequest, state: RequestState, frontend: Frontend, model: str
    ) -> None:
        super().__init__(body, [state], frontend, model)
        self._chat = body
        self._top = body.top_logprobs or 0

    def response(self) -> Json:
        """The whole response, with vLLM's ``prompt_logprobs`` beside the choices."""
        response = super().response()
        state = self._states[0]
        if self._body.prompt_logprobs is not None and state.prompt_logprobs is not None:
            response["prompt_logprobs"] = prompt_logprobs(state.prompt_logprobs)
        if self._body.return_token_ids:
            response["prompt_token_ids"] = state.request.prompt_token_ids
        return response

    def refusal(self, error: RequestError) -> RequestError:
        """A refusal of the engine in the names of a chat completion's fields."""
        return chat_names(self._chat, error)

    def first_chunks(self) -> Iterator[Json]:
        """The role, for every choice."""
        for index in range(self._num_choices):
            delta = {"role": "assistant", "content": ""}
            yield self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _whole(self, state: RequestState, output: CompletionOutput, index: int) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self._logprobs(output),
            **self._ending(output),
            **self._token_ids(output),
        }

    def _delta(self, prompt_index: int, output: CompletionOutput) -> Json:
        return {
            "index": output.index,
            "delta": {"content": output.text} if output.text else {},
            "logprobs": self._logprobs(output),
            **self._ending(output),
            **self._token_ids(output),
        }

    def _logprobs(self, output: CompletionOutput) -> Json | None:
        if output.logprobs is None:
            return None
        return chat_logprobs(self._names, output.token_ids, output.logprobs, self._top)


class CompletionWriter(Writer):
    """Completions: one or more prompts, texts out."""

    object_name = "text_completion"
    chunk_name = "text_completion"
    id_prefix = "cmpl"

    def __init__(
        self, body: CompletionRequest, states: Sequence[RequestState], frontend: Frontend, model: str
    ) -> None:
        super().__init__(body, states, frontend, model)
        self._frontend = frontend
        self._echo = body.echo is True
        self._begun: set[int] = set()
        """Choices of which something was sent."""
        self._offsets: defaultdict[int, TextOffsets] = defaultdict(self._text_offsets)

    def _whole(self, state: RequestState, output: CompletionOutput, index: int) -> Json:
        echo = self._prompt_text(state) if self._echo else ""
        choice: Json = {"index": index, "text": echo + output.text, "logprobs": None, **self._ending(output)}
        if output.logprobs is not None:
            tokens = output.token_ids
            entries: list[dict[int, Logprob] | None] = [*output.logprobs]
            offsets = self._text_offsets(len(echo)).push(tokens)
            if self._echo:
                assert state.prompt_logprobs is not None
                prompt = state.request.prompt_token_ids
                tokens, entries = [*prompt, *tokens], [*state.prompt_logprobs, *entries]
                offsets = [*echo_offsets(self._frontend.tokenizer, prompt, echo), *offsets]
            choice["logprobs"] = completion_logprobs(self._names, tokens, entries, offsets)
        if self._body.prompt_logprobs is not None and state.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(state.prompt_logprobs)
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = state.request.prompt_token_ids
        return {**choice, **self._token_ids(output)}

    def _delta(self, prompt_index: int, output: CompletionOutput) -> Json:
        index = self._choice_index(prompt_index, output)
        text = output.text
        if index not in self._begun and self._echo:
            text = self._prompt_text(self._states[prompt_index]) + text
        self._begun.add(index)
        logprobs = None
        if output.logprobs is not None:
            offsets = self._offsets[index].push(output.token_ids)
            logprobs = completion_logprobs(self._names, output.token_ids, output.logprobs, offsets)
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            **self._ending(output),
            **self._token_ids(output),
        }

    def _text_offsets(self, begin: int = 0) -> TextOffsets:
        skip = self._body.skip_special_tokens is not False
        return TextOffsets(self._frontend.tokenizer, begin, skip_special_tokens=skip)

    def _prompt_text(self, state: RequestState) -> str:
        if state.prompt is not None:
            return state.prompt
        tokenizer = self._frontend.tokenizer
        return "" if tokenizer is None else tokenizer.decode(state.request.prompt_token_ids)
