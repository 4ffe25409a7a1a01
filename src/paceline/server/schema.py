"""Request bodies of the API, field by field.

A field is in one of four classes, and none is dropped in silence: *served*; *metadata* of OpenAI's platform,
which has no effect here (``user`` and the like); *unsupported*, refused by name unless its value asks for
nothing; and unknown, refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from paceline.errors import RequestError, shown
from paceline.server.errors import from_validation

MAX_SALT_LEN = 256
"""Characters of a ``cache_salt``."""
_INTEGER = re.compile("-?(0|[1-9][0-9]{0,18})")
_REQUEST_ID = re.compile("[A-Za-z0-9._:-]{1,128}")
_LONE_SURROGATE = re.compile(
    rb"""\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"""
)
"""Half of a UTF-16 pair in JSON's escapes."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``stream_options``."""

    include_usage: bool | None = None
    """End with a chunk that holds the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """vLLM: the usage so far in every chunk."""
    include_obfuscation: bool | None = None
    """OpenAI pads chunks against traffic analysis; there is no padding here."""


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat completions have in common. None is "not given" everywhere."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    return_tokens_as_token_ids: bool | None = None
    """Show tokens in log-probabilities as ``token_id:N``, which is exact where their text is not."""
    return_token_ids: bool | None = None
    """Add ``token_ids`` to choices and ``prompt_token_ids`` to the response."""
    return_spec_decode_metrics: bool | None = None
    """Add ``spec_decode`` to the usage: drafts, and how many of them were accepted."""
    request_id: str | None = None
    """Part of the response's ``id``."""

    # Metadata of OpenAI's platform: accepted, without effect.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    # Unsupported: see ``_UNSUPPORTED``.
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    truncate_prompt_tokens: Any = None
    spaces_between_special_tokens: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None

    def __post_init__(self) -> None:
        for key in self.logit_bias or ():
            if not _INTEGER.fullmatch(key):
                raise RequestError(
                    f"logit_bias maps token ids to numbers, got the key {shown(key)}: "
                    'write ids as decimal integers, such as {"7": 1.5}.',
                    param="logit_bias",
                )
        if self.cache_salt is not None and not 1 <= len(self.cache_salt) <= MAX_SALT_LEN:
            raise RequestError(
                f"cache_salt must have 1 to {MAX_SALT_LEN} characters, got {len(self.cache_salt)}: "
                "give another, or leave it out.",
                param="cache_salt",
            )
        if self.request_id is not None and not _REQUEST_ID.fullmatch(self.request_id):
            raise RequestError(
                "request_id must be 1 to 128 of the characters A-Z a-z 0-9 . _ : -, got "
                f"{shown(self.request_id)}: give another, or leave it out.",
                param="request_id",
            )


class CompletionRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    best_of: int | None = None

    suffix: Any = None
    prompt_embeds: Any = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each text or token ids.

        Raises:
            RequestError: the list mixes kinds, or is empty.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and all(isinstance(item, int) for item in prompt):
            return [[item for item in prompt if isinstance(item, int)]]
        texts = [item for item in prompt if isinstance(item, str)]
        lists = [item for item in prompt if isinstance(item, list)]
        if not prompt or max(len(texts), len(lists)) != len(prompt):
            raise RequestError(
                "prompt must be a string, a list of strings, a list of token ids, or a list of such lists, "
                "and not empty.",
                param="prompt",
            )
        return [*texts, *lists]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of a conversation. A message this server returned can be sent back as it is."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None

    # fields of the official client's message objects; refused unless empty
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    tool_calls: Any = None

    def plain(self, index: int) -> dict[str, Any]:
        """The message as a template sees it.

        Raises:
            RequestError: it has a part this server cannot serve, or no content.
        """
        for field in ("refusal", "annotations", "audio", "function_call", "tool_calls"):
            if getattr(self, field):
                raise _unsupported(f"messages[{index}].{field}", "Leave it out.")
        content = self.content
        if content is None:
            if self.role != "assistant":
                raise RequestError(
                    f"messages[{index}].content is required for the role {self.role!r}.",
                    param=f"messages[{index}].content",
                )
            content = ""
        message: dict[str, Any] = {"role": self.role, "content": content}
        for field in ("name", "reasoning_content", "tool_call_id"):
            value = getattr(self, field)
            if value is not None:
                message[field] = value
        return message


class ChatCompletionRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/chat/completions``."""

    messages: list[Message]
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    """Wins over ``max_tokens``."""
    logprobs: bool | None = None
    top_logprobs: int | None = None

    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    reasoning_effort: Any = None
    include_reasoning: Any = None
    verbosity: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    moderation: Any = None
    documents: Any = None
    chat_template: Any = None
    continue_final_message: Any = None
    add_special_tokens: Any = None
    echo: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /tokenize``: either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


# Field: (values that ask for nothing besides None, what to do instead)
_UNSUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "response_format": (({"type": "text"},), "Only plain text is produced."),
    "structured_outputs": (({},), "Only plain text is produced."),
    "guided_json": ((), "Only plain text is produced."),
    "guided_regex": ((), "Only plain text is produced."),
    "guided_choice": ((), "Only plain text is produced."),
    "guided_grammar": ((), "Only plain text is produced."),
    "use_beam_search": ((False,), "Use sampling, with n for several candidates."),
    "length_penalty": ((1,), "It belongs to beam search, which is not available."),
    "logits_processors": (([],), "Use logit_bias, allowed_token_ids or bad_words."),
    "truncate_prompt_tokens": ((), "Send a prompt that fits."),
    "spaces_between_special_tokens": ((True,), "Leave it out."),
    "kv_transfer_params": (({},), "Leave it out."),
    "vllm_xargs": (({},), "Leave it out."),
    "suffix": (("",), "The model completes forwards only; put everything in prompt."),
    "prompt_embeds": (([],), "Send text or token ids."),
    "tools": (([],), "Describe tools in the system message and read calls from the text."),
    "tool_choice": (("none", "auto"), "Without tools there is nothing to choose."),
    "parallel_tool_calls": ((True, False), "Without tools there is nothing to call."),
    "functions": (([],), "Describe tools in the system message and read calls from the text."),
    "function_call": (("none", "auto"), "Without functions there is nothing to call."),
    "reasoning_effort": ((), 'Use chat_template_kwargs, such as {"enable_thinking": false}.'),
    "include_reasoning": ((True,), "Reasoning is part of the text."),
    "verbosity": (("medium",), "Ask for it in a message."),
    "modalities": ((["text"],), "Only text is produced."),
    "audio": ((), "Only text is produced."),
    "prediction": ((), "Leave it out."),
    "web_search_options": ((), "The server fetches nothing."),
    "moderation": ((), "Leave it out."),
    "documents": (([],), "Put them into a message."),
    "chat_template": ((), "The server's operator chooses it: paceline serve --chat-template."),
    "continue_final_message": ((False,), "Use /v1/completions to continue a text."),
    "add_special_tokens": ((False,), "The chat template writes all special tokens."),
    "echo": ((False,), "Use /v1/completions to have the prompt repeated."),
    "mm_processor_kwargs": (({},), "Only text is read."),
    "media_io_kwargs": (({},), "Only text is read."),
}
_SERVED_IN_COMPLETIONS = frozenset(("echo", "add_special_tokens"))

_Body = TypeVar("_Body", bound=msgspec.Struct)


def parse(body: bytes, kind: type[_Body]) -> _Body:
    """Decode and check a request body.

    Raises:
        RequestError: not JSON, not the schema, or a field that is not supported.
    """
    if not body.strip():
        raise RequestError("The body is empty: send a JSON object.", code="invalid_json")
    try:
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise from_validation(error) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        what = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        if _LONE_SURROGATE.search(body):
            what = "it has a lone surrogate (half of a UTF-16 pair), which is no character: send whole pairs"
        raise RequestError(f"The body is not valid JSON: {what}.", code="invalid_json") from error
    names: Iterable[str] = _UNSUPPORTED
    if kind is CompletionRequest:
        names = [name for name in names if name not in _SERVED_IN_COMPLETIONS]
    for name in names:
        value = getattr(request, name, None)
        neutral, advice = _UNSUPPORTED[name]
        if value is not None and value not in neutral:
            raise _unsupported(name, advice)
    if isinstance(request, SamplingFields) and request.stream_options is not None and not request.stream:
        raise RequestError(
            "stream_options is only allowed together with stream: set stream to true.", param="stream_options"
        )
    return request


def _unsupported(param: str, advice: str) -> RequestError:
    return RequestError(
        f"{param} is not supported by this server. {advice}", param=param, code="unsupported_parameter"
    )
