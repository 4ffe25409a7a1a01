"""Tables of measured matmul choices: found, read, preferred, and ignored when they are broken."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.ops import choices
from paceline.ops.choices import MatmulConfig, Table, dump, parse

GPU = "NVIDIA Test (1)"
CUDA = torch.device("cuda", 0)
SMALL, LARGE = MatmulConfig(16, 64, 128, splits=3, swap=True), MatmulConfig(128, 128, 64, tma=True)
TABLE: Table = {
    ("linear", 640, 320): {16: SMALL, 64: None, 256: LARGE},
    ("swiglu", 640, 320): {16: LARGE},
}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A GPU nobody ships a table for, with an empty cache; yields where its table goes."""
    path = tmp_path / "cache" / "table.json"
    path.parent.mkdir()
    monkeypatch.setattr(choices, "cache_path", lambda gpu: path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    for cached in (choices._choose, choices._table):
        cached.cache_clear()
    yield path
    for cached in (choices._choose, choices._table):
        cached.cache_clear()


def chosen(rows: int, op: choices.Op = "linear", dtype: torch.dtype = torch.bfloat16) -> MatmulConfig | None:
    return choices.choose(op, rows, 640, 320, dtype, CUDA)


def test_a_table_survives_its_file() -> None:
    assert parse(dump(TABLE, gpu=GPU)) == TABLE


def test_the_smallest_measured_number_of_rows_that_holds_them_decides(machine: Path) -> None:
    machine.write_text(dump(TABLE))
    found = {rows: chosen(rows) for rows in (1, 16, 17, 64, 65, 256, 257)}
    assert found == {1: SMALL, 16: SMALL, 17: None, 64: None, 65: LARGE, 256: LARGE, 257: None}
    assert chosen(3, "swiglu") == LARGE and chosen(3, "parts") is None
    assert choices.choose("linear", 1, 640, 321, torch.bfloat16, CUDA) is None


def test_the_library_multiplies_where_nothing_was_measured(machine: Path) -> None:
    assert chosen(1) is None
    machine.write_text(dump(TABLE))
    assert chosen(1, dtype=torch.float32) is None
    assert choices.choose("linear", 1, 640, 320, torch.bfloat16, torch.device("cpu")) is None


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"choices": [{"op": "linear"}]}', dump(TABLE).replace("swap", "x")]
)
def test_a_broken_table_is_named_and_ignored(
    machine: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    machine.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert chosen(1) is None
    assert str(machine) in caplog.text and "ignored" in caplog.text


def test_shipped_tables_can_be_read() -> None:
    for path in Path(choices.__file__).parent.glob("*.json"):
        assert parse(path.read_text())
