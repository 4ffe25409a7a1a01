"""Command-line flags made from typed options, so that no option exists in one place and not in the other."""

from __future__ import annotations

import functools
import inspect
import json
import types
from collections.abc import Callable
from typing import Any, Literal, Optional, Union, get_args, get_origin, get_type_hints

import typer

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.sampling.params import SamplingParams

ENGINE_HELP = {
    "device": "Where to run; auto prefers a GPU.",
    "revision": "Revision of a hub model.",
    "dtype": "Type of weights and K/V; auto: the checkpoint's on a GPU, float32 on a CPU.",
    "load_format": "dummy draws random weights at the checkpoint's geometry.",
    "max_model_len": "Longest sequence in tokens, prompt plus output. Default: what the checkpoint allows.",
    "max_num_seqs": "Sequences that may run at once. Default: 32 on a CPU, 256 on a GPU.",
    "max_num_batched_tokens": "Rows per step over all sequences. Default: 512 on a CPU, 8192 on a GPU.",
    "block_size": "Tokens per K/V block.",
    "num_blocks": "Blocks in the K/V pool; overrides the memory options.",
    "kv_cache_memory_bytes": "Bytes for K/V. Default: 512 MiB on a CPU; GPU: --gpu-memory-utilization.",
    "gpu_memory_utilization": "Share of the GPU's memory to use in all.",
    "enable_prefix_caching": "Reuse the K/V of prompts with a common beginning.",
    "prefix_hash_key": "Secret of 16 to 64 bytes for block hashes, to share them between engines.",
    "deterministic": "Bit-identical logits whatever else runs; slower.",
    "enforce_eager": "No decode rounds, so no CUDA graphs: slower, sooner ready.",
    "max_logprobs": "Most alternatives a request may ask for per position.",
    "seed": "Seed of requests that name none.",
    "threads": "CPU threads. Default: torch's choice.",
}
"""Flags of the engine: fields of ``EngineConfig`` and what each does."""

SPECULATION_HELP: dict[str, tuple[Any, str]] = {
    "speculative_config": (
        str,
        'How to draft, as JSON: {"model": ..., "num_speculative_tokens": ...}; {} switches it off. '
        "Default: the bundled drafter for the bundled model.",
    ),
    "draft_state": (Literal["paged", "capture"], 'Same as "draft_state" in --speculative-config.'),
    "draft_window": (int, 'Same as "draft_window" in --speculative-config.'),
    "draft_capture_mb": (float, 'Same as "draft_capture_mb" in --speculative-config.'),
    "verify_planner": (Literal["auto", "off"], 'Same as "verify_planner" in --speculative-config.'),
    "hedge": (int, 'Same as "hedge" in --speculative-config: sequences of a round that are hedged at most.'),
    "hedge_positions": (str, 'Same as "hedge_positions" in --speculative-config, as in 0,1,2.'),
    "hedge_auto": (bool, 'Same as "hedge_auto" in --speculative-config: as many chains as pay.'),
    "synthetic_accept_length": (float, 'Same as "synthetic_accept_length" in --speculative-config.'),
}
"""Flags of speculation: the whole config, and short forms of some of its fields."""

SAMPLING_HELP = {
    "max_tokens": "Tokens to generate at most.",
    "temperature": "Randomness; 0 is greedy. Default: the checkpoint's.",
    "top_p": "Smallest set of tokens with this probability mass. Default: the checkpoint's.",
    "top_k": "Most likely tokens to draw from; 0 is all. Default: the checkpoint's.",
    "min_p": "Least probability relative to the most likely token.",
    "repetition_penalty": "Over 1 discourages tokens already in prompt or output.",
    "stop": "Text that ends the output; may be given several times.",
    "ignore_eos": "Go on after the end-of-sequence token.",
}
"""Flags of one request: fields of ``SamplingParams`` and what each does."""


def _flag(name: str, hint: Any, default: Any, help_text: str, prefix: str = "") -> inspect.Parameter:
    """One keyword parameter that typer turns into a flag."""
    flag = "--" + prefix + name.replace("_", "-")
    kind = _plain_type(hint)
    if kind is bool:
        flag = f"{flag}/--no-{prefix}{name.replace('_', '-')}"
    annotation = kind if default is not None else Optional[kind]  # noqa: UP045 -- kind is a value here
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=typer.Option(
            str(default) if get_origin(kind) is Literal and default is not None else default,
            flag,
            show_default=default is not None,
            help=help_text,
        ),
        annotation=annotation,
    )


def _plain_type(hint: Any) -> Any:
    """The type behind ``X | None``; choices become text, which is what a command line holds."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(item for item in get_args(hint) if item is not type(None))
    if get_origin(hint) is Literal:
        return Literal[tuple(str(value) for value in get_args(hint))]
    return hint


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command a model argument and a flag per engine option; it receives ``engine: EngineConfig``."""
    hints = get_type_hints(EngineConfig)
    defaults = dict(
        zip(
            reversed(EngineConfig.__struct_fields__), reversed(EngineConfig.__struct_defaults__), strict=False
        )
    )
    flags = [_flag(name, hints[name], defaults[name], text) for name, text in ENGINE_HELP.items()]
    model = inspect.Parameter(
        "model_name",
        inspect.Parameter.KEYWORD_ONLY,
        default=typer.Option(
            None,
            "--model",
            help="Checkpoint folder or hub name. Default: the bundled model.",
            show_default=False,
        ),
        annotation=str | None,
    )

    speculation = [_flag(name, hint, None, text) for name, (hint, text) in SPECULATION_HELP.items()]

    def make(values: dict[str, Any]) -> dict[str, Any]:
        fields = {name: values.pop(name) for name in ENGINE_HELP}
        fields["block_size"] = int(fields["block_size"])
        fields["model"] = values.pop("model_name")
        fields["speculative_config"] = _speculation({name: values.pop(name) for name in SPECULATION_HELP})
        return {"engine": EngineConfig.of(show_progress=True, **fields)}

    return _extended(command, [model, *flags, *speculation], make, "engine")


def _speculation(given: dict[str, Any]) -> dict[str, Any] | str | None:
    """The speculative config of a command line: its JSON with the short forms filled in."""
    text: str | None = given.pop("speculative_config")
    short = {name: value for name, value in given.items() if value is not None}
    if "hedge_positions" in short:
        short["hedge_positions"] = _positions(short["hedge_positions"])
    if not short:
        return text
    config: Any = {"method": "dspark"}
    if text is not None:
        try:
            config = json.loads(text)
        except json.JSONDecodeError:
            return text  # refused, with what is wrong, where every config is read
        if not isinstance(config, dict):
            return text
    if config in ({}, {"method": None}):
        flag = next(iter(short)).replace("_", "-")
        raise ConfigError(
            f"--speculative-config {text} switches drafting off, but --{flag} is given. Drop one."
        )
    both = sorted(set(short) & set(config))
    if both:
        raise ConfigError(f"{both[0]} is given both as a flag and in --speculative-config. Give it once.")
    return {**config, **short}


def _positions(text: str) -> list[int]:
    """Numbers between commas."""
    try:
        return [int(item) for item in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"--hedge-positions is {text!r}; give positions between commas, as in 0,1,2."
        ) from error


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command a flag per common sampling parameter; it receives ``sampling``: what was given, as a
    dict.
    """
    hints = get_type_hints(SamplingParams)
    flags = []
    for name, text in SAMPLING_HELP.items():
        if name == "stop":
            hint, default = list[str] | None, None
        else:
            hint, default = hints[name], (False if name == "ignore_eos" else None)
        flags.append(_flag(name, hint, default, text))
    request_seed = inspect.Parameter(
        "request_seed",
        inspect.Parameter.KEYWORD_ONLY,
        default=typer.Option(None, "--sampling-seed", help="Seed of the request.", show_default=False),
        annotation=int | None,
    )

    def make(values: dict[str, Any]) -> dict[str, Any]:
        given = {name: values.pop(name) for name in SAMPLING_HELP}
        given["seed"] = values.pop("request_seed")
        # What was not given is None, or an empty list; 0 was given, though it equals False.
        return {
            "sampling": {name: value for name, value in given.items() if value is not None and value != []}
        }

    return _extended(command, [*flags, request_seed], make, "sampling")


def _extended(
    command: Callable[..., Any],
    flags: list[inspect.Parameter],
    make: Callable[[dict[str, Any]], dict[str, Any]],
    replaces: str,
) -> Callable[..., Any]:
    """``command`` with the parameter ``replaces`` swapped for ``flags``."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for name, p in signature.parameters.items() if name != replaces]

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        return command(**make(values), **values)

    own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    parameters = [*own, *flags]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run
