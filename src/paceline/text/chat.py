"""Chat messages to prompt token ids, through the checkpoint's own Jinja template.

Templates run in Jinja's immutable sandbox with the names Hugging Face templates expect, bounded in output
size. What comes from the request is data to them: its strings can never become control tokens (see
``ChatTemplate.render``).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import CheckpointError, ConfigError, ContextLengthError, RequestError, shown
from paceline.json_files import read_json
from paceline.text.shield import map_strings, strings_in
from paceline.text.tokenizer import Tokenizer

TEMPLATE_FILE = "chat_template.jinja"
_MAX_INTERMEDIATE_LEN = 1 << 24  # characters or items one expression of a template may build
_MAX_NESTING = 64  # of request data handed to a template
_RESERVED = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now")
)


class ChatTemplate:
    """A compiled chat template and the tokenizer whose prompts it writes.

    Safe to share between threads.
    """

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        """Compile.

        Args:
            source: Jinja text, as in ``tokenizer_config.json``.
            tokenizer: encodes the rendering; gives the template ``bos_token`` and the like.

        Raises:
            CheckpointError: the template does not compile.
        """
        self.source = source
        self._tokenizer = tokenizer
        self._environment = _Environment()
        self._template = self._compile(source)

    @classmethod
    def from_folder(
        cls, folder: str | Path, tokenizer: Tokenizer, *, override: str | None = None
    ) -> ChatTemplate | None:
        """The template of a checkpoint: ``chat_template.jinja``, else ``chat_template`` in
        tokenizer_config.json.

        Args:
            folder: checkpoint folder.
            tokenizer: the checkpoint's.
            override: a template to use instead: a path, or the Jinja text itself.

        Returns:
            None when the checkpoint has none; it can then complete text, not chat.

        Raises:
            CheckpointError: the template is malformed.
            ConfigError: ``override`` names a file that does not exist.
        """
        if override is not None:
            return cls(_read_override(override), tokenizer)
        folder = Path(folder)
        if (folder / TEMPLATE_FILE).is_file():
            return cls(_read_template(folder / TEMPLATE_FILE), tokenizer)
        found = tokenizer.config.get("chat_template")
        if found is None:
            found = read_json(folder / "chat_template.json", required=False).get("chat_template")
        if isinstance(found, list):
            named = {entry["name"]: entry["template"] for entry in found}
            if "default" not in named:
                raise CheckpointError(
                    f"{folder} has chat templates named {sorted(named)} but none named 'default': "
                    "choose one and pass it with --chat-template."
                )
            return cls(named["default"], tokenizer)
        return None if found is None else cls(found, tokenizer)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        max_chars: int = 1 << 24,
    ) -> list[int]:
        """Prompt token ids of a conversation.

        **Control tokens come from the template only.** Every string of the request (messages, keyword
        arguments) passes the shield first: where it holds the text of a control token, the first character
        is replaced by a stand-in (``shield.py``), and the rendering is cut there before it is tokenised. All
        ordinary text renders and tokenises exactly as the template's authors see it, merges across the
        border of template and content included.

        Marking whole texts survives stripping, splitting and slicing. A template that *deletes*, *changes* or
        *joins* could still assemble a control token out of harmless parts (``<|im<b>_end|>`` with tags
        removed). So, whenever the request has any character a control token begins with, the conversation is
        rendered a second time with all of these characters marked, which nothing can defeat. The two must
        contain the same control tokens in the same order; if not, the second rendering is used.

        Args:
            messages: dicts with ``role`` and ``content`` (a string, a list of text parts, or None), and
                whatever else the template reads, such as ``tool_calls`` or ``reasoning_content``.
            add_generation_prompt: end with the opening of an assistant message.
            template_kwargs: further names for the template, such as ``enable_thinking``.
            max_chars: longest rendering allowed.

        Raises:
            RequestError: the template refuses the conversation or fails on it, or the result is too long.
        """
        data = {
            "messages": [_plain_message(message, index) for index, message in enumerate(messages)],
            "tools": None,  # templates may ask whether it is none
            **_checked_kwargs(template_kwargs or {}),
        }
        _check_nesting(data)
        tokenizer, shield = self._tokenizer, self._tokenizer.shield
        data = map_strings(data, tokenizer.normalized)
        texts = strings_in(data)

        def run(change: Callable[[str], str]) -> str:
            # keyword arguments keep their names: the template could not find them under others
            marked = {name: map_strings(value, change) for name, value in data.items()}
            return self._run(marked, add_generation_prompt, max_chars)

        if not any(map(shield.concerns, texts)):
            return tokenizer.encode(run(lambda text: text), add_special_tokens=False)
        stand_ins = shield.stand_ins([*texts, self.source])
        marked = run(lambda text: shield.mark_literals(text, stand_ins))
        safe = run(lambda text: shield.mark_all(text, stand_ins))
        same = shield.literals_in(marked, stand_ins) == shield.literals_in(safe, stand_ins)
        return tokenizer.encode_marked(marked if same else safe, stand_ins)

    def _compile(self, source: str) -> jinja2.Template:
        try:
            return self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"the chat template does not compile: {error.message} (line {error.lineno})."
            ) from error

    def _run(self, data: Mapping[str, Any], add_generation_prompt: bool, max_chars: int) -> str:
        names = {**self._tokenizer.special_tokens, **data, "add_generation_prompt": add_generation_prompt}
        parts: list[str] = []
        length = 0
        try:
            for part in self._template.generate(names):
                length += len(part)
                if length > max_chars:
                    raise ContextLengthError(
                        f"the rendered conversation is longer than {max_chars} characters, more than the "
                        "maximum context length can hold: send less text."
                    )
                parts.append(part)
        except RequestError:
            raise
        except _TemplateRefusalError as error:
            raise RequestError(
                f"the chat template refuses this conversation: {error}", param="messages"
            ) from error
        except SecurityError as error:
            raise RequestError(f"the chat template was stopped: {error}", param="messages") from error
        except (
            Exception
        ) as error:  # templates run on request data: whatever they raise concerns this request alone
            raise RequestError(
                f"the chat template fails on this conversation ({type(error).__name__}): "
                "check roles, their order and the fields of the messages.",
                param="messages",
            ) from error
        return "".join(parts)


class _TemplateRefusalError(jinja2.TemplateError):
    """The template called ``raise_exception``."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``: marks assistant text for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 -- the name Jinja reads

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox: no attribute tricks, no mutation of request data, no giant values."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(left) > 1 << 32 or abs(right) > 64):
            raise SecurityError("a power is too large")
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and len(sequence) * times > _MAX_INTERMEDIATE_LEN:
                    raise SecurityError("a repeated value is too long")
        return super().call_binop(context, operator, left, right)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, >, & and ' for HTML; models were trained on plain JSON.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise _TemplateRefusalError(str(message)[:500])


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _plain_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A message with its content as one string: text parts are joined by line breaks."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    texts = []
    for part in content:
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(
                f"messages[{index}].content has a part of type {str(kind)[:40]!r}; this model reads text "
                'only: send parts of the form {"type": "text", "text": "..."}.',
                param="messages",
            )
        texts.append(part["text"])
    return {**message, "content": "\n".join(texts)}


def _checked_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    for name in kwargs:
        if name in _RESERVED:
            raise RequestError(
                f"chat_template_kwargs must not contain {name!r}: it has a field of its own "
                "or is not the client's to set.",
                param="chat_template_kwargs",
            )
    return dict(kwargs)


def _check_nesting(value: Any, depth: int = 0) -> None:
    if depth > _MAX_NESTING:
        raise RequestError(
            f"the conversation is nested deeper than {_MAX_NESTING} levels: flatten it.", param="messages"
        )
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            _check_nesting(item, depth + 1)


def _read_override(override: str) -> str:
    if not isinstance(override, str | Path):
        raise ConfigError(f"chat_template must be a path or Jinja text, got {shown(override)}.")
    override = str(override)
    if "{" in override or "\n" in override:
        return override
    path = Path(override)
    if not path.is_file():
        raise ConfigError(
            f"the chat template {override!r} is neither a file nor Jinja text: "
            "give a path that exists, or the template itself."
        )
    return _read_template(path)


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"the chat template {path} cannot be read: {error}.") from error
