"""``paceline bench``: one command per question, all of them with the engine's flags."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.options import engine_options
from paceline.config import EngineConfig

app = typer.Typer(help="Measure this machine.", no_args_is_help=True, rich_markup_mode=None)

Geometry = Annotated[
    str | None,
    typer.Option(help="Random weights at the geometry of this model, such as qwen3-4b, instead of --model."),
]
DraftGeometry = Annotated[
    str | None, typer.Option(help="Draft with random weights at this geometry: dspark-b7 or dflash-b16.")
]
BatchSizes = Annotated[str, typer.Option(help="Comma-separated numbers of sequences.")]
Repeats = Annotated[int, typer.Option(help="Runs of each measurement; medians are reported.", min=1)]
Json = Annotated[str | None, typer.Option("--json", help="Write the results to this file.")]
Plot = Annotated[str | None, typer.Option("--plot", help="Draw the results into this file.")]


@app.command("latency")
@engine_options
def latency(
    *,
    engine: EngineConfig,
    geometry: Geometry = None,
    draft_geometry: DraftGeometry = None,
    batch_sizes: BatchSizes = "1,2,4,8,16,32",
    lens: Annotated[str, typer.Option(help="PROMPT:OUTPUT tokens, comma-separated pairs.")] = "128:128",
    repeats: Repeats = 5,
    json_path: Json = None,
    plot_path: Plot = None,
) -> None:
    """Decode speed of batches whose prompts are in the cache, beside the memory limit."""
    from paceline.bench.geometry import with_geometry
    from paceline.bench.latency import parse_shapes, run_latency
    from paceline.bench.report import Output

    output = Output.checked(json_path, plot_path)
    shapes = parse_shapes(batch_sizes, lens)
    output.write(run_latency(with_geometry(engine, geometry, draft_geometry), shapes, repeats))


@app.command("throughput")
@engine_options
def throughput(
    *,
    engine: EngineConfig,
    geometry: Geometry = None,
    draft_geometry: DraftGeometry = None,
    num_requests: Annotated[int, typer.Option(help="Requests of each run.", min=1)] = 64,
    input_len: Annotated[int, typer.Option(help="Prompt tokens of each.", min=1)] = 256,
    output_len: Annotated[int, typer.Option(help="Tokens to generate for each.", min=1)] = 64,
    request_rates: Annotated[
        str | None,
        typer.Option(
            help="Requests per second, comma-separated; they arrive at random. Default: all at once."
        ),
    ] = None,
    repeats: Repeats = 3,
    json_path: Json = None,
    plot_path: Plot = None,
) -> None:
    """Many distinct requests on a cold cache: total rate, and what each of them sees."""
    from paceline.bench.geometry import with_geometry
    from paceline.bench.report import Output
    from paceline.bench.throughput import parse_rates, run_throughput

    output = Output.checked(json_path, plot_path)
    rates = parse_rates(request_rates)
    engine = with_geometry(engine, geometry, draft_geometry)
    output.write(run_throughput(engine, num_requests, input_len, output_len, rates, repeats))


@app.command("prefix")
@engine_options
def prefix(
    *,
    engine: EngineConfig,
    geometry: Geometry = None,
    draft_geometry: DraftGeometry = None,
    shared_requests: Annotated[int, typer.Option(help="Requests at once on a new prefix.", min=1)] = 16,
    shared_len: Annotated[int, typer.Option(help="Tokens of that prefix.", min=1)] = 1024,
    tail_len: Annotated[int, typer.Option(help="Tokens each request and each turn adds.", min=1)] = 64,
    output_len: Annotated[int, typer.Option(help="Tokens to generate for each.", min=1)] = 16,
    warm_len: Annotated[
        int, typer.Option(help="Prefix of the requests that hit the cache; 0: none.", min=0)
    ] = 2048,
    turns: Annotated[int, typer.Option(help="Turns of a conversation; 0: none.", min=0)] = 6,
    repeats: Repeats = 3,
    json_path: Json = None,
    plot_path: Plot = None,
) -> None:
    """Requests that begin alike: one prefix for many, a hit on a long one, conversations; with the drafter
    and without.
    """
    from paceline.bench.geometry import with_geometry
    from paceline.bench.prefix import PrefixCases, run_prefix
    from paceline.bench.report import Output

    output = Output.checked(json_path, plot_path)
    cases = PrefixCases(shared_requests, shared_len, tail_len, output_len, warm_len, turns)
    output.write(run_prefix(with_geometry(engine, geometry, draft_geometry), cases, repeats))


@app.command("startup")
@engine_options
def startup(
    *,
    engine: EngineConfig,
    geometry: Geometry = None,
    draft_geometry: DraftGeometry = None,
    repeats: Repeats = 3,
    json_path: Json = None,
    plot_path: Plot = None,
) -> None:
    """From a new process to the first token, phase by phase."""
    from paceline.bench.geometry import with_geometry
    from paceline.bench.report import Output
    from paceline.bench.startup import run_startup

    output = Output.checked(json_path, plot_path)
    output.write(run_startup(with_geometry(engine, geometry, draft_geometry), repeats))


@app.command("round")
@engine_options
def decode_round(
    *,
    engine: EngineConfig,
    geometry: Geometry = None,
    draft_geometry: DraftGeometry = None,
    batch_size: Annotated[int, typer.Option(help="Sequences in the round.", min=1)] = 1,
    context_len: Annotated[int, typer.Option(help="Tokens each of them has.", min=1)] = 128,
    num_rounds: Annotated[int, typer.Option(help="Rounds to take apart.", min=2)] = 16,
    json_path: Json = None,
    plot_path: Plot = None,
) -> None:
    """One decode round taken apart: time, bytes and share of the memory limit of each stage."""
    from paceline.bench.geometry import with_geometry
    from paceline.bench.report import Output
    from paceline.bench.round import run_round

    output = Output.checked(json_path, plot_path)
    engine = with_geometry(engine, geometry, draft_geometry)
    output.write(run_round(engine, batch_size, context_len, num_rounds))


@app.command("speculation")
@engine_options
def speculation(
    *,
    engine: EngineConfig,
    prompts: Annotated[
        str | None, typer.Option(help="File with one prompt per line. Default: built-in ones.")
    ] = None,
    output_len: Annotated[int, typer.Option(help="Tokens to generate per prompt.", min=2)] = 96,
    temperature: Annotated[float, typer.Option(help="Of every request.", min=0.0)] = 0.0,
    batch_sizes: BatchSizes = "1,4",
    repeats: Repeats = 3,
    json_path: Json = None,
    plot_path: Plot = None,
) -> None:
    """The same real prompts with and without drafts: tokens per second, accept length, whether the tokens are
    equal.
    """
    from paceline.bench.report import Output
    from paceline.bench.speculation import run_speculation

    output = Output.checked(json_path, plot_path)
    output.write(run_speculation(engine, prompts, output_len, temperature, batch_sizes, repeats))


@app.command("breaks")
@engine_options
def breaks(
    *,
    engine: EngineConfig,
    prompts: Annotated[
        str | None, typer.Option(help="File with one prompt per line. Default: built-in ones.")
    ] = None,
    output_len: Annotated[int, typer.Option(help="Tokens to generate per prompt.", min=2)] = 256,
    json_path: Json = None,
    plot_path: Plot = None,
) -> None:
    """Where greedy rounds break, how often the drafter's next best was right there, and what hedges would
    gain.
    """
    from paceline.bench.breaks import run_breaks
    from paceline.bench.report import Output

    output = Output.checked(json_path, plot_path)
    output.write(run_breaks(engine, prompts, output_len))
