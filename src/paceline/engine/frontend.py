"""The text side of the engine: prompts and messages to token ids, tokens back to text, stop strings,
defaults.

Holds what a process that never sees the model needs: tokenizer, chat template, the checkpoint's sampling
defaults, and one ``RequestState`` per request. No torch, no I/O: :class:`paceline.LLM` and the server's
client both drive it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from paceline.engine.messages import EngineInfo, EngineRequest, SequenceOutput
from paceline.engine.outputs import BONUS, PLAIN, CompletionOutput, RequestMetrics, RequestOutput
from paceline.engine.prompt import prompt_array
from paceline.errors import ConfigError, ContextLengthError, RequestError, shown
from paceline.sampling.logprobs import Logprob
from paceline.sampling.params import SamplingParams, check_candidates, validate
from paceline.text.chat import ChatTemplate
from paceline.text.generation_config import GenerationDefaults, load_generation_defaults
from paceline.text.stop import TextStream
from paceline.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Prompts that cannot fit are refused by their length in characters: tokenising 30 MB takes half a minute.
_MAX_CHARS = 1 << 24
_NORMALIZED = 4
"""How much longer a text may be than what its tokens spell: Unicode normalisation composes up to three
characters into one."""
_PRIORITIES = range(-(2**31), 2**31)

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Whose a message of a conversation may be."""

WITHOUT_TOKENIZER = (
    "The engine runs without a tokenizer (--skip-tokenizer-init): pass token ids, or start it with one."
)

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or ``{"prompt": ...}`` / ``{"prompt_token_ids": ...}`` as vLLM takes them."""


class RequestState:
    """A request between admission and its last output.

    Attributes:
        request: what the engine was given.
        prompt: its text, when it came as text.
        outputs: every continuation so far, complete (not increments).
    """

    def __init__(self, request: EngineRequest, prompt: str | None, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.request = request
        self.prompt = prompt
        self.outputs = [
            CompletionOutput(
                i,
                "",
                [],
                logprobs=None if params.logprobs is None else [],
                cumulative_logprob=None if params.logprobs is None else 0.0,
            )
            for i in range(params.n)
        ]
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.num_cached_tokens = 0
        self.metrics = RequestMetrics(arrival_s=time.monotonic())
        self.error: str | None = None
        self._tokenizer = tokenizer if params.detokenize else None
        self._streams = [
            None
            if self._tokenizer is None
            else TextStream(
                self._tokenizer,
                stop=params.stop_strings,
                include_stop_str_in_output=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )
            for _ in range(params.n)
        ]

    @property
    def finished(self) -> bool:
        """Whether every continuation has ended."""
        return all(output.finished for output in self.outputs)

    def take(self, output: SequenceOutput) -> tuple[CompletionOutput | None, bool]:
        """Add a step's tokens.

        Returns:
            What is new (None when the continuation had already ended here), and whether the engine must be
            told to stop this continuation because a stop string was found.
        """
        whole = self.outputs[output.index]
        if whole.finished:
            return None, False  # ended here by a stop string; the engine had already gone one step further
        self._note(output)
        update = self._read(output)
        count = len(update.token_ids)
        whole.text += update.text
        whole.token_ids += update.token_ids
        self._note_origins(output, update)
        whole.origins += update.origins
        whole.finish_reason, whole.stop_reason = update.finish_reason, update.stop_reason
        if whole.logprobs is not None and update.logprobs is not None:
            whole.logprobs += update.logprobs
            for token, entry in zip(update.token_ids, update.logprobs, strict=True):
                whole.cumulative_logprob = (whole.cumulative_logprob or 0.0) + entry[token].logprob
        update.cumulative_logprob = whole.cumulative_logprob
        by_string = isinstance(update.stop_reason, str) and output.finish_reason is None
        assert count <= len(output.token_ids)
        return update, by_string

    def _note(self, output: SequenceOutput) -> None:
        """Bookkeeping that does not depend on text."""
        now = time.monotonic()
        if self.metrics.first_token_s is None:
            self.metrics.first_token_s = now
            self.metrics.first_scheduled_s = output.first_scheduled_s
        self.metrics.last_token_s = now
        if output.index == 0:
            self.num_cached_tokens = output.num_cached_tokens
            if output.prompt_logprobs is not None:
                self.prompt_logprobs = [
                    None if entry is None else self._with_text(entry) for entry in output.prompt_logprobs
                ]
        if output.error is not None:
            self.error = output.error

    def _note_origins(self, output: SequenceOutput, update: CompletionOutput) -> None:
        """Where the tokens came from. Drafts cut off by a stop string are not counted as accepted."""
        count = len(update.token_ids)
        if output.num_draft_tokens == 0:
            update.origins = [PLAIN] * count
            return
        accepted = min(output.num_accepted_tokens, count)
        update.origins = [*range(1, accepted + 1), *[BONUS] * (count - accepted)]
        self.metrics.add_round(output.num_draft_tokens, accepted)

    def _read(self, output: SequenceOutput) -> CompletionOutput:
        """Tokens to text, cut at a stop string."""
        tokens = output.token_ids
        text, stop_reason, finish_reason = "", output.stop_reason, output.finish_reason
        result_stop: int | str | None = stop_reason
        stream = self._streams[output.index]
        if stream is not None:
            update = stream.push(tokens, ends_with_stop_token=finish_reason == "stop")
            text = update.text
            tokens = tokens[: update.num_tokens]
            stop = update.stop
            if stop is None and finish_reason is not None:
                tail = stream.flush()
                text += tail.text
                stop = tail.stop
            if stop is not None:
                finish_reason, result_stop = "stop", stop
        logprobs = None
        if output.logprobs is not None:
            logprobs = [self._with_text(entry) for entry in output.logprobs[: len(tokens)]]
        return CompletionOutput(
            index=output.index,
            text=text,
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=result_stop,
        )

    def _with_text(self, entry: dict[int, Logprob]) -> dict[int, Logprob]:
        if self._tokenizer is None:
            return entry
        text = self._tokenizer.token_text
        return {
            token: Logprob(logprob=item.logprob, rank=item.rank, decoded_token=text(token))
            for token, item in entry.items()
        }

    def output(self, completions: list[CompletionOutput]) -> RequestOutput:
        """A request output with ``completions``: increments, or ``self.outputs`` for everything so far."""
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=completions,
            finished=self.finished,
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
        )


class Frontend:
    """Turns what callers pass into engine requests.

    Args:
        info: what the engine serves. An attribute too, to be replaced when the engine is.
        skip_tokenizer_init: work with token ids alone (checkpoints without a tokenizer).
        generation_config: ``auto`` applies the checkpoint's sampling defaults, ``none`` does not.
        chat_template: path or text of a template that replaces the checkpoint's.
    """

    def __init__(
        self,
        info: EngineInfo,
        *,
        skip_tokenizer_init: bool = False,
        generation_config: str = "auto",
        chat_template: str | None = None,
    ) -> None:
        self.info = info
        self.defaults: GenerationDefaults = load_generation_defaults(info.folder, generation_config)
        self.tokenizer = None if skip_tokenizer_init else Tokenizer.from_folder(info.folder)
        self.chat_template: ChatTemplate | None = None
        if self.tokenizer is not None:
            self.chat_template = ChatTemplate.from_folder(info.folder, self.tokenizer, override=chat_template)
        elif chat_template is not None:
            raise ConfigError(
                "chat_template needs a tokenizer, but skip_tokenizer_init is set. Drop one of them."
            )

    @property
    def _max_chars(self) -> int:
        """Characters that no prompt exceeds."""
        per_token = None if self.tokenizer is None else self.tokenizer.max_token_chars
        return _MAX_CHARS if per_token is None else _NORMALIZED * self.info.max_model_len * per_token

    def default_params(self, **given: Any) -> SamplingParams:
        """Sampling parameters with the checkpoint's defaults under what was given explicitly.

        ``max_tokens`` of None means "what the context leaves".
        """
        fields = {**self.defaults.sampling(), **given}
        try:
            return msgspec.convert(fields, SamplingParams)
        except msgspec.ValidationError as error:
            raise RequestError(f"A sampling parameter has the wrong type: {error}.") from error

    # ------------------------------------------------------------------ prompts

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation under the chat template.

        Raises:
            RequestError: there is no template, a role is not one of ``ROLES``, or the template refuses the
                conversation.
        """
        if self.tokenizer is None:
            raise RequestError(WITHOUT_TOKENIZER, param="messages")
        if self.chat_template is None:
            raise RequestError(
                f"{self.info.model} has no chat template. Use completions, or start with a chat template.",
                param="messages",
            )
        if not isinstance(messages, list | tuple) or not all(isinstance(item, Mapping) for item in messages):
            raise RequestError(
                'A conversation must be a list of messages such as {"role": "user", "content": "Hi"}, got '
                f"{shown(messages)}.",
                param="messages",
            )
        if not messages:
            raise RequestError("messages is empty; give at least one message.", param="messages")
        if template_kwargs is not None and not isinstance(template_kwargs, Mapping):
            raise RequestError(
                f"chat_template_kwargs must map names to values, got {shown(template_kwargs)}.",
                param="chat_template_kwargs",
            )
        _check_messages(messages)
        if "developer" not in self.chat_template.source:
            # OpenAI's newer name of the system role; templates of this model family know the old one
            messages = [
                {**message, "role": "system"} if message["role"] == "developer" else message
                for message in messages
            ]
        return self.chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
            max_chars=self._max_chars,
        )

    def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> tuple[list[int], str | None]:
        """Token ids of a prompt, and its text when it is text.

        Args:
            prompt: text, token ids, or a dict of either.
            add_special_tokens: apply the tokenizer's post-processor to text.

        Raises:
            RequestError: neither text nor token ids, or text without a tokenizer.
        """
        if isinstance(prompt, Mapping):
            keys = sorted(set(prompt) & {"prompt", "prompt_token_ids"})
            if len(prompt) != 1 or len(keys) != 1:
                raise RequestError(
                    "A prompt dict must have exactly one key, 'prompt' or 'prompt_token_ids'; got "
                    f"{sorted(prompt)}.",
                    param="prompt",
                )
            prompt = prompt[keys[0]]
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(WITHOUT_TOKENIZER, param="prompt")
            if len(prompt) > self._max_chars:
                raise ContextLengthError(
                    f"This model's maximum context length is {self.info.max_model_len} tokens. However, your "
                    f"prompt has {len(prompt)} characters; no text of more than {self._max_chars} can fit. "
                    "Shorten the prompt.",
                    param="prompt",
                )
            return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens), prompt
        return _token_ids(prompt), None

    # ------------------------------------------------------------------ requests

    def output_room(self, prompt_len: int) -> int:
        """Most output tokens after a prompt for a request that names no number: what the context leaves, and
        no more than the whole K/V pool holds. At least 1.
        """
        longest = min(self.info.max_model_len, self.info.num_blocks * self.info.block_size)
        return max(1, longest - prompt_len)

    def prepare(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> RequestState:
        """A request the engine can take: validated, with ``max_tokens`` and bad words resolved.

        Raises:
            RequestError: names the parameter, what was given and what is allowed.
        """
        info = self.info
        for name, value in (("request_id", request_id), ("cache_salt", cache_salt)):
            _check_text(name, value)
        if not isinstance(priority, int) or isinstance(priority, bool) or priority not in _PRIORITIES:
            raise RequestError(
                f"priority must be an integer from {_PRIORITIES[0]} to {_PRIORITIES[-1]}, got "
                f"{shown(priority)}.",
                param="priority",
            )
        validate(params, vocab_size=info.vocab_size, max_logprobs=info.max_logprobs)
        changes: dict[str, Any] = {}
        prompt_array(prompt_token_ids, info.vocab_size)  # raises unless all of them exist
        room = info.max_model_len - len(prompt_token_ids)
        if room < 1:
            raise ContextLengthError(
                f"This model's maximum context length is {info.max_model_len} tokens. However, your prompt "
                "has "
                f"{len(prompt_token_ids)} tokens, which leaves no room for output. Shorten the prompt.",
                param="prompt",
            )
        if params.max_tokens is None:
            changes["max_tokens"] = self.output_room(len(prompt_token_ids))
        elif params.max_tokens > room:
            raise ContextLengthError(
                f"This model's maximum context length is {info.max_model_len} tokens. However, you requested "
                f"{len(prompt_token_ids) + params.max_tokens} tokens ({len(prompt_token_ids)} in the prompt, "
                f"{params.max_tokens} for the output). Shorten the prompt or lower max_tokens.",
                param="max_tokens",
            )
        if (params.stop_strings or params.bad_words) and (self.tokenizer is None or not params.detokenize):
            name = "stop" if params.stop_strings else "bad_words"
            raise RequestError(
                f"{name} needs text, but this request runs without a detokenizer. Use stop_token_ids or "
                "logit_bias.",
                param=name,
            )
        if params.bad_words and self.tokenizer is not None:
            changes["bad_words_ids"] = self._spellings(params.bad_words)
        params = msgspec.structs.replace(params, **changes)
        check_candidates(params, info.eos_token_ids)
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            params=params,
            priority=priority,
            cache_salt=cache_salt,
        )
        return RequestState(request, prompt, self.tokenizer)

    def _spellings(self, words: Sequence[str]) -> list[list[int]]:
        """Each word as tokens, at the start of a text and after a space."""
        assert self.tokenizer is not None
        spellings: list[list[int]] = []
        for word in words:
            for text in (word, " " + word.lstrip()):
                ids = self.tokenizer.encode(text, add_special_tokens=False, allow_special=False)
                if ids and ids not in spellings:
                    spellings.append(ids)
        return spellings


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    for index, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            raise RequestError(
                f"messages[{index}].role must be one of {', '.join(ROLES)}, got {shown(role)}.",
                param=f"messages[{index}].role",
            )
        content = message.get("content")
        for place, part in enumerate(content if isinstance(content, list | tuple) else ()):
            if isinstance(part, Mapping) and part.get("type") == "text" and "text" not in part:
                raise RequestError(
                    f"messages[{index}].content[{place}] is a text part without text: send it in the form "
                    '{"type": "text", "text": "..."}.',
                    param=f"messages[{index}].content[{place}]",
                )


def _token_ids(prompt: object) -> list[int]:
    # Anything that can be iterated would do, but bytes, sets and arrays are never meant as token ids.
    if isinstance(prompt, list | tuple | range):
        ids = list(prompt)
        if all(issubclass(kind, int) and kind is not bool for kind in set(map(type, ids))):
            return ids
    raise RequestError(
        "A prompt must be text or a list of integer token ids (of an array, use tolist()), got "
        f"{shown(prompt)}.",
        param="prompt",
    )


def _check_text(name: str, value: object) -> None:
    well_formed = isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)
    if not well_formed:
        raise RequestError(
            f"{name} must be a string without lone surrogates, got {shown(value)}.", param=name
        )
