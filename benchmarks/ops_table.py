"""Results as lines of text, and as a table in Markdown."""

from __future__ import annotations

from collections.abc import Iterable

from ops_measure import Result

COLUMNS = ("error", "cold us", "graph us", "torch us", "MiB", "limit", "TFLOP/s")
OP, SHAPE, NUMBER = 25, 38, 9
"""Widths of the columns."""


def cells(result: Result) -> list[str]:
    """The numbers of a result, in the order of the columns."""
    forms = {
        "error": "{:.1e}",
        "cold_us": "{:.1f}",
        "graph_us": "{:.1f}",
        "peer_us": "{:.1f}",
        "mebibytes": "{:.1f}",
        "limit": "{:.1%}",
        "tflops": "{:.1f}",
    }
    values = {name: getattr(result, name) for name in forms}
    if not values["tflops"]:  # there are no products in it
        values["tflops"] = None
    return ["-" if values[name] is None else form.format(values[name]) for name, form in forms.items()]


def heading() -> str:
    """The line over the results'."""
    return f"{'op':{OP}}{'shape':{SHAPE}}" + "".join(f"{name:>{NUMBER}}" for name in COLUMNS)


def line(result: Result) -> str:
    """One result."""
    numbers = "".join(f"{cell:>{NUMBER}}" for cell in cells(result))
    return f"{result.op:{OP}}{result.shape:{SHAPE}}{numbers}{verdict(result)}"


def verdict(result: Result) -> str:
    """Nothing, if all is well."""
    return "" if result.passed else f"  FAILED {result.failure.splitlines()[0] if result.failure else ''}"


def markdown(results: Iterable[Result]) -> str:
    """All results as one table."""
    names = ("op", "shape", *(name.replace("us", "µs") for name in COLUMNS))
    rows = [names, ["-", "-", *("-:" for _ in COLUMNS)]]
    for result in results:
        error, *others = cells(result)
        rows.append([result.op, result.shape, error + verdict(result), *others])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
