"""From a checked request body to requests the engine can take."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from paceline.engine.frontend import Frontend, RequestState
from paceline.errors import ContextLengthError, RequestError
from paceline.sampling.params import SamplingParams
from paceline.server.schema import ChatCompletionRequest, CompletionRequest, Message, SamplingFields

DEFAULT_COMPLETION_TOKENS = 16
"""``max_tokens`` of a completions request that names none, as in the OpenAI API. Chat uses what the context
leaves."""

_THREAD_CHARS = 20_000
"""Texts longer than this are tokenised in a thread: it takes milliseconds, in which other streams would stand
still."""

_PASSED = (
    "temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids", "seed", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias", "ignore_eos", "min_tokens", "allowed_token_ids",
    "bad_words", "include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs",
)  # fmt: skip

_T = TypeVar("_T")


def response_id(prefix: str, body: SamplingFields) -> str:
    """The ``id`` of a response: the client's ``request_id``, or a random one."""
    return f"{prefix}-{body.request_id or uuid.uuid4().hex}"


async def chat_state(frontend: Frontend, body: ChatCompletionRequest) -> RequestState:
    """The engine request of a chat completion.

    Raises:
        RequestError: a parameter or the conversation is refused.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: set logprobs to true.", param="top_logprobs")
    top = body.top_logprobs or 0
    most = frontend.info.vocab_size if frontend.info.max_logprobs == -1 else frontend.info.max_logprobs
    if not 0 <= top <= most:
        raise RequestError(
            f"top_logprobs must be from 0 to {most}, got {top}: ask for fewer.",
            param="top_logprobs",
        )
    ids = await render_chat(frontend, body.messages, body.add_generation_prompt, body.chat_template_kwargs)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = _params(frontend, body, ids, asked, None, logprobs=top if body.logprobs else None)
    try:
        return _prepare(frontend, body, "chatcmpl", ids, params, None)
    except RequestError as error:
        raise chat_names(body, error) from error


def chat_names(body: ChatCompletionRequest, error: RequestError) -> RequestError:
    """A refusal in the names of a chat completion's fields, which has messages where the engine has a prompt,
    and may have ``max_completion_tokens``.
    """
    message, param = error.message, error.param
    if isinstance(error, ContextLengthError) and param == "prompt":
        param = "messages"
    if body.max_completion_tokens is not None and "max_tokens" in message:
        message = message.replace("max_tokens", "max_completion_tokens")
        param = "max_completion_tokens" if param == "max_tokens" else param
    return RequestError(message, param=param, code=error.code)


async def completion_states(
    frontend: Frontend, body: CompletionRequest, max_sequences: int
) -> list[RequestState]:
    """The engine requests of a completions body, one per prompt.

    Raises:
        RequestError: a parameter or a prompt is refused.
    """
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError(
            f"best_of must equal n ({body.n or 1}) or be left out, got {body.best_of}: "
            "ask for n candidates and choose among them.",
            param="best_of",
        )
    if body.echo and body.stream and body.logprobs is not None:
        raise RequestError(
            "echo with logprobs cannot be streamed: set stream to false, or leave out one of the two.",
            param="echo",
        )
    prompts = body.prompts()
    count = len(prompts) * (body.n or 1)
    if len(prompts) > 1 and count > max_sequences:
        raise RequestError(
            f"{len(prompts)} prompts with n = {body.n or 1} make {count} sequences; "
            f"at most {max_sequences} are allowed: send several requests.",
            param="prompt" if len(prompts) > max_sequences else "n",
        )
    states = []
    for prompt in prompts:
        ids, text = await _tokenize(frontend, prompt, body.add_special_tokens)
        extra: dict[str, Any] = {"logprobs": body.logprobs}
        if body.echo and body.logprobs is not None:
            extra["prompt_logprobs"] = _wider(body.logprobs, body.prompt_logprobs or 0)
        params = _params(frontend, body, ids, body.max_tokens, DEFAULT_COMPLETION_TOKENS, **extra)
        states.append(_prepare(frontend, body, "cmpl", ids, params, text))
    return states


async def render_chat(
    frontend: Frontend,
    messages: Sequence[Message],
    add_generation_prompt: bool | None,
    template_kwargs: dict[str, Any] | None,
) -> list[int]:
    """Prompt token ids of a conversation."""
    plain = [message.plain(index) for index, message in enumerate(messages)]

    def render() -> list[int]:
        return frontend.render_chat(
            plain,
            add_generation_prompt=add_generation_prompt is not False,
            template_kwargs=template_kwargs,
        )

    return await in_thread_if_long(render, sum(_text_len(message["content"]) for message in plain))


def _text_len(content: str | list[dict[str, Any]]) -> int:
    """Characters of a message: a text, or parts of which some may be texts."""
    if isinstance(content, str):
        return len(content)
    return sum(len(text) for part in content if isinstance(text := part.get("text"), str))


async def _tokenize(
    frontend: Frontend, prompt: str | list[int], add_special_tokens: bool | None
) -> tuple[list[int], str | None]:
    return await in_thread_if_long(
        lambda: frontend.tokenize(prompt, add_special_tokens=add_special_tokens is not False),
        len(prompt) if isinstance(prompt, str) else 0,
    )


async def in_thread_if_long(work: Callable[[], _T], size: int) -> _T:
    """The result of ``work``; in a thread when it is about a text of more than ``_THREAD_CHARS``."""
    return await asyncio.to_thread(work) if size > _THREAD_CHARS else work()


def _wider(one: int, other: int) -> int:
    """The larger of two numbers of log-probabilities, of which -1 is all, and refused ones win."""
    return max(one, other, key=lambda count: (count < 0, abs(count)))


def _params(
    frontend: Frontend,
    body: SamplingFields,
    ids: list[int],
    asked_tokens: int | None,
    default_tokens: int | None,
    **extra: int | None,
) -> SamplingParams:
    given = {name: value for name in _PASSED if (value := getattr(body, name)) is not None}
    if body.logit_bias is not None:
        given["logit_bias"] = {int(key): value for key, value in body.logit_bias.items()}
    given.update({name: value for name, value in extra.items() if value is not None})
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs cannot be streamed: set stream to false, or leave it out.",
            param="prompt_logprobs",
        )
    if asked_tokens is None:
        asked_tokens = frontend.defaults.max_tokens or default_tokens
        if asked_tokens is not None:
            # nobody asked for this many, so a prompt that leaves less room is no error
            asked_tokens = min(asked_tokens, frontend.output_room(len(ids)))
    return frontend.default_params(**given, max_tokens=asked_tokens)


def _prepare(
    frontend: Frontend,
    body: SamplingFields,
    prefix: str,
    ids: list[int],
    params: SamplingParams,
    text: str | None,
) -> RequestState:
    return frontend.prepare(
        f"{prefix}-{uuid.uuid4().hex}",
        ids,
        params,
        prompt=text,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )
