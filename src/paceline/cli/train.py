"""``paceline train-drafter``: teach a small drafter what a target is going to say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from paceline.errors import ConfigError

note = Console(stderr=True, highlight=False)


def train_drafter(
    target: Annotated[str, typer.Option(help="Checkpoint folder or hub name of the model to draft for.")],
    data: Annotated[
        list[Path],
        typer.Option(help="Prompts (.jsonl, text) or answers made before (.safetensors); may be repeated."),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder for the drafter. Started again on the same folder, a run goes on.")
    ],
    method: Annotated[Literal["dspark", "dflash"], typer.Option(help="Kind of drafter.")] = "dspark",
    num_layers: Annotated[int, typer.Option(help="Layers of the drafter.")] = 2,
    block_size: Annotated[
        int | None, typer.Option(help="Rows of a block. Default: 7 (dspark), 8 (dflash).", show_default=False)
    ] = None,
    intermediate_size: Annotated[
        int | None, typer.Option(help="Width of its MLPs. Default: the target's.", show_default=False)
    ] = None,
    markov_rank: Annotated[int, typer.Option(help="Rank of the sequential head (dspark).")] = 256,
    markov_head: Annotated[
        Literal["vanilla", "gated", "rnn"], typer.Option(help="Kind of sequential head (dspark).")
    ] = "vanilla",
    taps: Annotated[
        str | None,
        typer.Option(
            help="Target layers it listens to, such as 1,9,17. Default: up to five, spread.",
            show_default=False,
        ),
    ] = None,
    mask_token_id: Annotated[
        int | None,
        typer.Option(help="Token of draft slots. Default: the tokenizer's mask token.", show_default=False),
    ] = None,
    eval_data: Annotated[
        list[Path] | None, typer.Option(help="Held-out prompts or answers. Default: a share of the data.")
    ] = None,
    eval_share: Annotated[float, typer.Option(help="Share of prompts held out.")] = 0.02,
    max_eval_prompts: Annotated[int, typer.Option(help="Held-out prompts used at most.")] = 256,
    temperatures: Annotated[
        str, typer.Option(help="Temperatures of answers, in turn; 0 is greedy.")
    ] = "0,0.7,1",
    answer_len: Annotated[int, typer.Option(help="Tokens per answer at most.")] = 512,
    max_len: Annotated[int, typer.Option(help="Tokens of prompt and answer at most.")] = 2048,
    num_seqs: Annotated[
        int | None,
        typer.Option(help="Answers made at once. Default: 32 (CPU), 512 (GPU).", show_default=False),
    ] = None,
    num_engines: Annotated[
        int, typer.Option(help="Engines side by side; several fill a GPU with a small target.")
    ] = 1,
    regenerate_minutes: Annotated[
        float | None, typer.Option(help="Stop making answers after so long.", show_default=False)
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Training steps. Default: six passes.", show_default=False)
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Training time, instead of steps.", show_default=False)
    ] = None,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 6e-4,
    warmup: Annotated[float, typer.Option(help="Warm-up as a share of the run.")] = 0.04,
    weight_decay: Annotated[float, typer.Option(help="AdamW's.")] = 0.0,
    clip_norm: Annotated[float, typer.Option(help="Largest gradient norm.")] = 1.0,
    tokens_per_step: Annotated[int, typer.Option(help="Padded tokens per step, over all processes.")] = 32768,
    anchor_every: Annotated[int, typer.Option(help="One block per so many tokens.")] = 8,
    decay: Annotated[float, typer.Option(help="Draft j weighs exp(-j / decay).")] = 4.0,
    compile: Annotated[bool, typer.Option("--compile/--no-compile", help="Compile the loss.")] = False,
    with_tables: Annotated[
        bool,
        typer.Option(
            "--with-tables/--no-with-tables", help="Store copies of the target's embedding and head."
        ),
    ] = False,
    checkpoint_minutes: Annotated[float, typer.Option(help="Minutes between states for resuming.")] = 10.0,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to train.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of weights, order and sampling.")] = 0,
) -> None:
    """Train a DSpark or DFlash drafter on the target's own answers. Several GPUs: start it with torchrun."""
    from paceline.training.options import TrainOptions
    from paceline.training.run import train_drafter as run

    report = run(
        TrainOptions(
            target=target,
            data=tuple(data),
            out=out,
            method=method,
            num_layers=num_layers,
            block_size=block_size,
            intermediate_size=intermediate_size,
            markov_rank=markov_rank,
            markov_head=markov_head,
            taps=None if taps is None else _layers(taps),
            mask_token_id=mask_token_id,
            eval_data=tuple(eval_data or ()),
            eval_share=eval_share,
            max_eval_prompts=max_eval_prompts,
            temperatures=_numbers("temperatures", temperatures),
            answer_len=answer_len,
            max_len=max_len,
            num_seqs=num_seqs,
            num_engines=num_engines,
            regenerate_minutes=regenerate_minutes,
            steps=steps,
            minutes=minutes,
            learning_rate=lr,
            warmup=warmup,
            weight_decay=weight_decay,
            clip_norm=clip_norm,
            tokens_per_step=tokens_per_step,
            anchor_every=anchor_every,
            decay=decay,
            compile=compile,
            with_tables=with_tables,
            checkpoint_minutes=checkpoint_minutes,
            device=device,
            seed=seed,
            show_progress=True,
        )
    )
    if report:
        _show(report, out)


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"{name} is {text!r}; give numbers with commas between them, such as 0,0.7,1"
        ) from None


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"taps is {text!r}; give layers with commas between them, such as 1,9,17") from None


def _show(report: dict[str, object], out: Path) -> None:
    """The few numbers that tell whether it worked."""
    heldout = report["heldout"]
    assert isinstance(heldout, dict)
    for kind, rule in (("greedy", None), ("sampled", "shared_noise")):
        if kind in heldout:
            numbers = heldout[kind] if rule is None else heldout[kind][rule]
            by_draft = " ".join(f"{value:.0%}" for value in numbers["conditional_acceptance"])
            note.print(f"{kind:8} accept length {numbers['accept_length']:.2f}, by draft {by_draft}")
    note.print(f"Drafter, report and state are in {out}.")
