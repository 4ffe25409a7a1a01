"""``paceline inflate``."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer


def inflate(
    geometry: Annotated[str, typer.Option(help="Size to write, such as qwen3-4b.")],
    out: Annotated[str, typer.Option(help="Folder to write into; target and drafter get one each.")],
    target: Annotated[
        str | None, typer.Option(help="Checkpoint folder or hub name. Default: the bundled model.")
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Drafter's folder or hub name. Default: the bundled one.")
    ] = None,
    pad_vocab: Annotated[
        bool,
        typer.Option("--pad-vocab", help="Also give the vocabulary the geometry's size, with unused tokens."),
    ] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Type of the stored weights.")
    ] = "bfloat16",
) -> None:
    """Write a trained pair at the size of a larger model, computing the same: to measure real drafts at real
    cost.
    """
    from paceline.bench.inflate import inflate_pair

    large, drafts = inflate_pair(target, drafter, geometry, out, pad_vocab=pad_vocab, dtype=dtype)
    config = json.dumps({"model": str(drafts)})
    typer.echo(f"paceline bench speculation --model {large} --speculative-config '{config}'")
