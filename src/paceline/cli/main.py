"""The ``paceline`` command."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from paceline.cli import bench
from paceline.cli.inflate import inflate
from paceline.cli.options import engine_options, sampling_options
from paceline.cli.prove import prove
from paceline.cli.train import train_drafter
from paceline.config import EngineConfig
from paceline.errors import PacelineError
from paceline.threads import sleep_at_barriers

app = typer.Typer(
    name="paceline",
    help="Serve and run Qwen3-family language models. Without --model the bundled model is used.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # its tables cut flags short in a terminal of 80 columns
    pretty_exceptions_enable=False,
)
stderr = Console(stderr=True, highlight=False)


def _version(show: bool) -> None:
    if show:
        from paceline import __version__

        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""


@app.command()
@engine_options
@sampling_options
def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Texts to continue. Without any, standard input is the prompt.")
    ] = None,
    *,
    engine: EngineConfig,
    sampling: dict[str, Any],
    n: Annotated[int, typer.Option(help="Continuations per prompt.")] = 1,
    generation_config: Annotated[
        str, typer.Option(help="auto applies the checkpoint's sampling defaults, none does not.")
    ] = "auto",
    explain: Annotated[
        bool, typer.Option("--explain", help="Colour each token by how it came: drafted, bonus or plain.")
    ] = False,
    demo: Annotated[bool, typer.Option("--demo", help="Run a few prompts and show the speed.")] = False,
) -> None:
    """Continue texts and print them."""
    from paceline.cli import local

    if demo:
        local.demo(engine)
        return
    texts = prompts or [sys.stdin.read()]
    local.generate(engine, texts, {**sampling, "n": n}, generation_config, explain)


@app.command()
@engine_options
@sampling_options
def chat(
    *,
    engine: EngineConfig,
    sampling: dict[str, Any],
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="Template to use instead of the checkpoint's.")
    ] = None,
    generation_config: Annotated[
        str, typer.Option(help="auto applies the checkpoint's sampling defaults, none does not.")
    ] = "auto",
) -> None:
    """Talk to a model in the terminal."""
    from paceline.cli import local

    local.chat(engine, sampling, system, chat_template, generation_config)


@app.command()
@engine_options
def serve(
    model: Annotated[
        str | None, typer.Argument(help="Checkpoint folder or hub name; same as --model.")
    ] = None,
    *,
    engine: EngineConfig,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Names clients may use for the model; may be given several times."),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Require one of these keys as a bearer token; may be given several times."),
    ] = None,
    api_key_file: Annotated[
        str | None, typer.Option(help="Text file with more keys, one on each line.")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="Template to use instead of the checkpoint's.")
    ] = None,
    generation_config: Annotated[
        str, typer.Option(help="auto applies the checkpoint's sampling defaults, none does not.")
    ] = "auto",
    skip_tokenizer_init: Annotated[bool, typer.Option(help="Serve token ids only.")] = False,
    uvicorn_log_level: Annotated[str, typer.Option(help="Log level of the HTTP server.")] = "warning",
    log_level: Annotated[str, typer.Option(help="Log level of Paceline.")] = "info",
) -> None:
    """Serve the OpenAI API over HTTP."""
    import msgspec

    from paceline.engine.client import FrontendOptions
    from paceline.errors import ConfigError
    from paceline.server.options import ServeOptions, read_keys
    from paceline.server.run import serve_forever

    if model is not None:
        if engine.model is not None and engine.model != model:
            raise ConfigError(f"Two models are named: {model!r} and --model {engine.model!r}. Name one.")
        engine = msgspec.structs.replace(engine, model=model)
    serve_forever(
        engine,
        FrontendOptions(
            skip_tokenizer_init=skip_tokenizer_init,
            generation_config=generation_config,
            chat_template=chat_template,
        ),
        ServeOptions(
            host=host,
            port=port,
            served_model_names=tuple(served_model_name or ()),
            api_keys=read_keys(api_key or (), api_key_file),
            uvicorn_log_level=uvicorn_log_level,
            log_level=log_level,
        ),
    )


app.add_typer(bench.app, name="bench")
app.command()(train_drafter)
app.command()(prove)
app.command()(inflate)


def main() -> None:
    """Entry point: errors made for users are printed as one line, not as a traceback."""
    sleep_at_barriers()
    try:
        app()
    except PacelineError as error:
        stderr.print("[bold red]error:[/] ", end="")
        stderr.out(str(error))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
