"""Which kernel multiplies: measured, not guessed.

A table per GPU says, for each weight shape and number of rows, which cut of our own kernel was faster than
the vendor's library. Tables for known GPUs are shipped beside this file; one that was measured on the machine
(``benchmarks/tune_matmul.py``) lies in the user's cache, under the versions it was measured with, and comes
first. Where a table says nothing, the library multiplies: a missing or stale table costs speed, never
correctness.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from paceline.ops.folders import cache_folder

logger = logging.getLogger(__name__)

Op = Literal["linear", "swiglu", "parts"]
"""``linear``: the product alone; ``swiglu``: with silu(gate) * up; ``parts``: the sum left to the norm after
it."""


@dataclass(frozen=True)
class MatmulConfig:
    """How a product is cut up.

    Attributes:
        block_m, block_n, block_k: rows, columns and depth of a tile, powers of two, at least 16.
        splits: programs that share the depth of one tile.
        chunks: parts of a program's depth that are summed on their own first.
        swap: weights as the left operand of the tensor core.
        tma: tiles are fetched by the tensor memory accelerator (NVIDIA Hopper and later).
        num_warps, num_stages: of the kernel.
    """

    block_m: int
    block_n: int
    block_k: int
    splits: int = 1
    chunks: int = 1
    swap: bool = False
    num_warps: int = 4
    num_stages: int = 4
    tma: bool = False


Table = Mapping[tuple[Op, int, int], Mapping[int, MatmulConfig | None]]
"""(op, N, K) -> most rows -> the cut, or None where the library is faster."""


def choose(
    op: Op, rows: int, width: int, depth: int, dtype: torch.dtype, device: torch.device
) -> MatmulConfig | None:
    """The cut of our kernel for a product [rows, depth] x [width, depth], or None: the library's."""
    if dtype.itemsize != 2 or device.type != "cuda":
        return None
    return _choose(op, rows, width, depth, device)


@cache
def _choose(op: Op, rows: int, width: int, depth: int, device: torch.device) -> MatmulConfig | None:
    by_rows = _table(torch.cuda.get_device_name(device)).get((op, width, depth), {})
    fitting = [most for most in by_rows if most >= rows]
    return by_rows[min(fitting)] if fitting else None


@cache
def _table(gpu: str) -> Table:
    for path in (cache_path(gpu), Path(__file__).parent / f"{_file_name(gpu)}.json"):
        if path.is_file():
            try:
                return parse(path.read_text())
            except (ValueError, TypeError, KeyError) as error:
                logger.warning("%s is not a table of matmul choices (%s); it is ignored", path, error)
    return {}


def cache_path(gpu: str) -> Path:
    """Where a table measured on this machine lies."""
    import triton

    versions = f"torch{torch.__version__}_triton{triton.__version__}"
    return cache_folder("matmul") / f"{_file_name(gpu)}_{versions}.json"


def _file_name(gpu: str) -> str:
    return re.sub(r"\W+", "_", gpu)


def parse(text: str) -> Table:
    """A table from its JSON.

    Raises:
        ValueError, TypeError, KeyError: it is none.
    """
    return {
        (entry["op"], int(entry["width"]), int(entry["depth"])): {
            int(rows): None if config is None else MatmulConfig(**config)
            for rows, config in entry["rows"].items()
        }
        for entry in json.loads(text)["choices"]
    }


def dump(table: Table, **about: str) -> str:
    """A table's JSON; ``about`` says how it was made."""
    entries = [
        {
            "op": op,
            "width": width,
            "depth": depth,
            "rows": {str(rows): None if c is None else asdict(c) for rows, c in by_rows.items()},
        }
        for (op, width, depth), by_rows in table.items()
    ]
    return json.dumps({**about, "choices": entries}, indent=1) + "\n"
