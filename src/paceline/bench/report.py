"""What every benchmark hands back: rows under named columns, as a table, as JSON and as a plot."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from paceline.errors import ConfigError
from paceline.proving.out_file import check_writable

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A value of each row worth showing.

    Attributes:
        key: its name in the row.
        title: over the column, unit included; with line breaks, for a terminal has few columns.
        form: format specification of a number.
        wrap: may be broken over lines.
    """

    key: str
    title: str
    form: str = ""
    wrap: bool = False

    def shown(self, row: Row) -> str:
        """The value of a row as text; nothing where there is none."""
        value = row.get(self.key)
        return "" if value is None else format(value, self.form)


@dataclass(frozen=True)
class Plot:
    """How to draw rows: one line per ``series`` over numbers ``x``, or bars over names ``x``."""

    x: str
    y: str
    series: str | None = None
    bars: bool = False


@dataclass
class Report:
    """Results of one benchmark.

    Attributes:
        bench: its command, such as ``latency``.
        machine: machine, versions and command (:func:`paceline.bench.machine.describe_machine`).
        settings: everything that was chosen.
        columns: what of the rows the table shows.
        plot: what of the rows the plot shows.
        results: rows of plain values.
    """

    bench: str
    machine: Row
    settings: Row
    columns: Sequence[Column]
    plot: Plot
    results: list[Row] = field(default_factory=list)

    def to_json(self) -> str:
        """Everything but how to show it."""
        whole = {
            "bench": self.bench,
            "machine": self.machine,
            "settings": self.settings,
            "results": self.results,
        }
        return json.dumps(whole, indent=1) + "\n"

    @property
    def title(self) -> str:
        """What was measured, on what."""
        model = Path(str(self.settings.get("model", ""))).name
        return f"{self.bench}: {model} on {self.machine.get('gpu', self.machine['cpu'])}"

    def table(self) -> Table:
        """The rows for a terminal."""
        table = Table(title=self.title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for column in self.columns:
            table.add_column(
                column.title, justify="right" if column.form else "left", no_wrap=not column.wrap
            )
        for row in self.results:
            table.add_row(*(column.shown(row) for column in self.columns))
        return table

    def draw(self, path: str) -> None:
        """Write the plot; the file's ending picks the format.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        _require_matplotlib()
        from matplotlib.figure import Figure  # draws without a display

        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.add_subplot()
        plot = self.plot
        titles = {column.key: column.title.replace("\n", " ") for column in self.columns}
        if plot.bars:
            names = [textwrap.shorten(str(row[plot.x]), 48, placeholder=" …") for row in self.results]
            axes.barh(names, [row[plot.y] or 0.0 for row in self.results])
            axes.invert_yaxis()
            axes.set_xlabel(titles.get(plot.y, plot.y))
        else:
            for name, rows in self._series().items():
                axes.plot([r[plot.x] for r in rows], [r[plot.y] for r in rows], marker="o", label=name)
            axes.set_xlabel(titles.get(plot.x, plot.x))
            axes.set_ylabel(titles.get(plot.y, plot.y))
            axes.set_ylim(bottom=0)
            if plot.series is not None:
                axes.legend()
        axes.set_title(self.title)
        axes.grid(alpha=0.3)
        figure.savefig(path)

    def _series(self) -> dict[str, list[Row]]:
        groups: dict[str, list[Row]] = {}
        for row in self.results:
            groups.setdefault(str(row[self.plot.series]) if self.plot.series else "", []).append(row)
        return groups


@dataclass(frozen=True)
class Output:
    """Where results go beside the terminal.

    Attributes:
        json_path, plot_path: files to write; None for none.
    """

    json_path: str | None = None
    plot_path: str | None = None

    @classmethod
    def checked(cls, json_path: str | None, plot_path: str | None) -> Output:
        """Refuse, before anything is measured, what could not be written after it.

        Raises:
            ConfigError: a file that cannot be written, no matplotlib, or a format it does not know.
        """
        if json_path is not None:
            check_writable("--json", json_path)
        if plot_path is not None:
            _require_matplotlib()
            _check_format(plot_path)
            check_writable("--plot", plot_path)
        return cls(json_path, plot_path)

    def write(self, report: Report) -> None:
        """Print the table and write the files."""
        Console().print(report.table())
        if self.json_path is not None:
            Path(self.json_path).write_text(report.to_json(), encoding="utf-8")
        if self.plot_path is not None:
            report.draw(self.plot_path)


def _check_format(path: str) -> None:
    from matplotlib.backend_bases import FigureCanvasBase

    ending, known = Path(path).suffix[1:].lower(), FigureCanvasBase.get_supported_filetypes()
    if ending and ending not in known:  # without an ending matplotlib writes PNG
        raise ConfigError(
            f"--plot {path}: there is no format {ending!r}. There are {', '.join(sorted(known))}."
        )


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed: pip install 'paceline[bench]'."
        ) from error
