"""The proof as tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from paceline.proving.closeness import MAX_REGRET_NATS, ScoredResult
from paceline.proving.lossless import ModeResult

if TYPE_CHECKING:
    from paceline.proving.prove import Check, Proof


def show_modes(console: Console, title: str, results: Sequence[ModeResult]) -> None:
    """Print the modes: one row each, or one per mode and sampling when output was scored."""
    scored = [result for result in results if isinstance(result, ScoredResult)]
    if scored:
        _show_scored(console, title, scored)
    else:
        _show_exact(console, title, results)


def _table(title: str, names: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(name, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _show_exact(console: Console, title: str, results: Sequence[ModeResult]) -> None:
    modes = list(dict.fromkeys(result.mode for result in results))
    table = _table(title, ["mode"], ["requests", "tokens", "differing", "accept length"])
    for mode in modes:
        rows = [result for result in results if result.mode == mode]
        lengths = [result.accept_length for result in rows if result.accept_length is not None]
        table.add_row(
            _mark([item for row in rows for item in row.violations]),
            mode,
            f"{sum(row.num_prompts for row in rows):,}",
            f"{sum(row.num_tokens for row in rows):,}",
            f"{sum(row.num_differing for row in rows):,}",
            f"{min(lengths):.2f} - {max(lengths):.2f}" if lengths else "-",
        )
    console.print(table)
    samplings = "; ".join(dict.fromkeys(result.sampling for result in results))
    console.print(f"[dim]Samplings: {samplings}. Accept length: least and greatest of them.[/]\n")


def _show_scored(console: Console, title: str, results: Sequence[ScoredResult]) -> None:
    numbers = ["tokens", "accept", "regret", "law"]
    table = _table(title, ["mode", "sampling"], numbers)
    for result in results:
        table.add_row(
            _mark(result.violations),
            result.mode,
            result.sampling,
            f"{result.num_tokens:,}",
            "-" if result.accept_length is None else f"{result.accept_length:.2f}",
            f"{result.max_regret:.3f}",
            _law(result),
        )
    console.print(table)
    console.print(
        f"[dim]Regret: greatest, nats; {MAX_REGRET_NATS:.2f} allowed. Law: least p-value of its tests.[/]\n"
    )


def _law(result: ScoredResult) -> str:
    if result.verdict is None:
        return "-"
    least = min(item.p_value for item in result.verdict.results)
    return f"{least:.3f}" if least >= 0.001 else "<.001"


def _mark(violations: Sequence[object]) -> str:
    return "[green]ok[/]" if not violations else f"[red]{len(violations)} bad[/]"


def show_checks(console: Console, checks: Sequence[Check]) -> None:
    """Print one row per check."""
    table = _table("Checks", ["check"], ["on"])
    for check in checks:
        table.add_row(_mark(check.violations), check.name, check.detail)
    console.print(table)


def as_json(proof: Proof) -> dict[str, Any]:
    """Plain values of everything in a proof."""
    return {
        "level": proof.level,
        "proved": not proof.violations,
        "modes": [_mode(result) for result in proof.modes],
        "checks": [
            {"name": check.name, "on": check.detail, "violations": [str(item) for item in check.violations]}
            for check in proof.checks
        ],
    }


def _mode(result: ModeResult) -> dict[str, Any]:
    values: dict[str, Any] = {
        "mode": result.mode,
        "sampling": result.sampling,
        "num_prompts": result.num_prompts,
        "num_tokens": result.num_tokens,
        "num_differing": result.num_differing,
        "accept_length": result.accept_length,
        "num_cached_tokens": result.num_cached_tokens,
        "num_preemptions": result.num_preemptions,
        "hedge_wins": result.hedge_wins,
        "hedge_losses": result.hedge_losses,
        "violations": [str(item) for item in result.violations],
    }
    if isinstance(result, ScoredResult):
        values["max_regret_nats"] = result.max_regret
        values["mean_regret_nats"] = result.mean_regret
        if result.verdict is not None:
            values["tests"] = {item.name: item.p_value for item in result.verdict.results}
            values["planted_bias_found"] = result.verdict.planted_found
    return values
