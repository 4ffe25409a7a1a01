"""``paceline prove``."""

from __future__ import annotations

from typing import Annotated, Literal

import typer


def prove(
    target: Annotated[
        str | None, typer.Option(help="Checkpoint folder or hub name. Default: the bundled model.")
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Drafter's folder or hub name. Default: the bundled one.")
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="File with one prompt per line, text or a JSON list of token ids. Default: built-in ones, "
            "each continued by the model itself."
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Prompts to run in every mode.", min=1)] = 32,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.", min=4)] = 48,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where to run; auto prefers a GPU.")
    ] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="Type of weights and K/V.")
    ] = "auto",
    json_path: Annotated[str | None, typer.Option("--json", help="Write the results to this file.")] = None,
) -> None:
    """Show that a drafter changes no output: token for token on a CPU in float32, by scoring every token
    against plain decoding elsewhere. Exit code 1 when a gate is violated.
    """
    from paceline.proving.prove import ProveOptions, run_prove

    options = ProveOptions(target, drafter, device, dtype, prompts, num_prompts, max_tokens)
    if not run_prove(options, json_path):
        raise typer.Exit(1)
