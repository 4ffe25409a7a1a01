"""Commands that run the engine in this process: generate, chat, the demo."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console

from paceline.cli.explain import coloured, legend
from paceline.config import EngineConfig
from paceline.engine.outputs import RequestOutput
from paceline.errors import ContextLengthError, RequestError
from paceline.llm import LLM

# Text of users and models goes through ``out.out``: ``print`` would read markup and emoji codes into it.
out = Console(highlight=False)
note = Console(stderr=True, highlight=False)

DEMO_PROMPTS = (
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    'class Stack:\n    """A last-in, first-out collection."""\n\n    def __init__(self):\n',
    "import os\n\n\ndef read_lines(path):\n",
)
CHAT_HELP = "/reset begins a new conversation, /exit or an empty line ends it, /help says this again."
DEMO_QUESTION = "Write a function that returns the largest item of a list."


def _rate(output: RequestOutput) -> float:
    """Decode rate of a finished request, tokens per second."""
    metrics = output.metrics
    assert metrics is not None and metrics.first_token_s is not None and metrics.last_token_s is not None
    tokens = sum(len(completion.token_ids) for completion in output.outputs)
    seconds = metrics.last_token_s - metrics.first_token_s
    return (tokens - 1) / seconds if seconds > 0 else 0.0


def generate(
    engine: EngineConfig,
    prompts: list[str],
    sampling: dict[str, Any],
    generation_config: str,
    explain: bool = False,
) -> None:
    """Continue ``prompts`` and print each continuation after its prompt; with ``explain`` each token in the
    colour of how it came.
    """
    llm = _load(engine, generation_config=generation_config)
    params = llm.make_sampling_params(**{"max_tokens": 128, **sampling})
    for output in llm.generate(prompts, params, use_tqdm=len(prompts) > 1):
        for completion in output.outputs:
            out.out(output.prompt or "", end="", style="dim")
            if explain:
                out.print(coloured(completion, llm.get_tokenizer()), soft_wrap=True)
            else:
                out.out(completion.text)
        if explain and output.metrics is not None:
            note.print(legend(output.outputs, output.metrics), soft_wrap=True)


def chat(
    engine: EngineConfig,
    sampling: dict[str, Any],
    system: str | None,
    chat_template: str | None,
    generation_config: str,
) -> None:
    """A conversation in the terminal; ``/exit``, an empty line or end of input ends it, ``/reset`` begins
    another.
    """
    llm = _load(engine, generation_config=generation_config, chat_template=chat_template)
    params = llm.make_sampling_params(**{"max_tokens": None, **sampling})
    beginning: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    messages = [*beginning]
    note.print(f"[dim]Type a message. {CHAT_HELP}[/]")
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if text in ("", "/exit"):
            return
        if text == "/help":
            note.print(f"[dim]{CHAT_HELP}[/]")
            continue
        if text == "/reset":
            messages = [*beginning]
            note.print("[dim]A new conversation.[/]")
            continue
        messages.append({"role": "user", "content": text})
        answer, end = "", None
        try:
            for output in llm.stream(messages, params):
                piece, end = output.outputs[0].text, output.outputs[0].finish_reason
                answer += piece
                out.out(piece, end="")
        except RequestError as error:
            note.out(str(error), style="red")
            if isinstance(error, ContextLengthError):
                note.print("[dim]/reset begins a new conversation.[/]")
            messages.pop()
            continue
        out.print()
        if end == "length":
            limit = (
                "the context is full, /reset begins a new one" if params.max_tokens is None else "max_tokens"
            )
            note.print(f"[dim](cut off: {limit})[/]")
        messages.append({"role": "assistant", "content": answer})


def demo(engine: EngineConfig) -> None:
    """Real text from the model, its speed, and what to try next."""
    started = time.perf_counter()
    llm = _load(engine)
    note.print(f"[dim]Loaded in {time.perf_counter() - started:.1f} s.[/]\n")
    greedy = llm.make_sampling_params(temperature=0.0, max_tokens=96)
    for prompt in DEMO_PROMPTS:
        output = _show(llm, prompt, greedy)
        length = None if output.metrics is None else output.metrics.accept_length
        drafted = "" if length is None else f", {length:.1f} tokens per round with drafts"
        count = len(output.outputs[0].token_ids)
        out.print(f"[dim]  -- {count} tokens, {_rate(output):.0f} tok/s{drafted}[/]\n")
    out.print(f"[bold]user:[/] {DEMO_QUESTION}\n[bold]assistant:[/] ", end="")
    for piece in llm.stream([{"role": "user", "content": DEMO_QUESTION}], greedy):
        out.out(piece.outputs[0].text, end="")
    started = time.perf_counter()
    batch = llm.generate(list(DEMO_PROMPTS) * 5, greedy, use_tqdm=False)
    tokens = sum(len(output.outputs[0].token_ids) for output in batch)
    out.print(
        f"\n\n[dim]15 prompts at once: {tokens / (time.perf_counter() - started):.0f} tok/s in all.[/]\n"
    )
    out.print(
        "[bold]Next[/]\n"
        "  .venv/bin/paceline chat                        talk to it\n"
        "  .venv/bin/paceline serve                       OpenAI API on http://127.0.0.1:8000\n"
        "  .venv/bin/paceline serve Qwen/Qwen3-4B         another model, from a folder or the hub\n"
        "  .venv/bin/paceline bench speculation           what the drafter is worth on this machine\n"
        "  .venv/bin/paceline generate --explain 'def f'  which tokens were drafted\n"
        "  make test                                      all checks",
        soft_wrap=True,
    )


def _show(llm: LLM, prompt: str, params: Any) -> RequestOutput:
    """Print a prompt and its continuation as it comes; returns the whole output."""
    out.out(prompt, end="", style="dim")
    last: RequestOutput | None = None
    tokens: list[int] = []
    for last in llm.stream(prompt, params):
        tokens += last.outputs[0].token_ids
        out.out(last.outputs[0].text, end="")
    out.print()
    assert last is not None
    last.outputs[0].token_ids = tokens
    return last


def _load(engine: EngineConfig, **options: Any) -> LLM:
    """An ``LLM`` with these engine options."""
    fields = {name: getattr(engine, name) for name in EngineConfig.__struct_fields__}
    return LLM(**fields, **options)
