"""How the persistent kernel's matrices are cut up: everything once, and nothing that does not fit."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch

from paceline.errors import EngineDeadError
from paceline.ops.persistent import launch
from paceline.ops.persistent.compiler import CudaKernel
from paceline.ops.persistent.phases import Product

GRID = 132
SHAPES = [  # hidden, intermediate, q, qkv of Qwen3-0.6B, 1.7B, 4B, 8B
    (1024, 3072, 2048, 4096),
    (2048, 6144, 2048, 4096),
    (2560, 9728, 4096, 6144),
    (4096, 12288, 4096, 6144),
]


def products(hidden: int, inner: int, attended: int, qkv: int) -> list[Product]:
    def rows(width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(8, width, dtype=dtype)

    def weight(n: int, k: int) -> torch.Tensor:
        return torch.empty(n, k, dtype=torch.bfloat16)

    norm = torch.empty(hidden, dtype=torch.bfloat16)
    return [
        Product(weight(qkv, hidden), rows(hidden), rows(qkv), norm=norm),
        Product(weight(hidden, attended), rows(attended), rows(hidden), epilogue="add", before=rows(hidden)),
        Product(weight(2 * inner, hidden), rows(hidden), rows(inner), norm=norm, epilogue="swiglu"),
        Product(weight(hidden, inner), rows(inner), rows(hidden), epilogue="add", before=rows(hidden)),
        Product(weight(5000, hidden), rows(hidden), rows(5000, torch.float32), norm=norm),
        Product(weight(hidden, 5 * hidden), rows(5 * hidden), rows(hidden)),
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_cover_a_matrix_and_fit(shape: tuple[int, int, int, int]) -> None:
    max_chunks = next(n for n in launch._CHUNKS if shape[0] <= n * launch._CHUNK_UNITS * launch._UNIT)
    machine = SimpleNamespace(grid=GRID, max_chunks=max_chunks)
    for product in products(*shape):
        words = launch._product_words(product, True, machine)  # type: ignore[arg-type]
        n, k = words[1] & 0xFFFFFFFF, words[1] >> 32
        group_rows, units, pass_units, chunk_units = (
            words[2] >> 32,
            words[3] & 0xFFFFFFFF,
            words[3] >> 32,
            words[4],
        )
        pairs = product.epilogue == "swiglu"
        assert (n * (1 + pairs), k) == tuple(product.weight.shape) and units * launch._UNIT == k
        assert group_rows * (1 + pairs) <= 16, "one matrix instruction"
        assert pass_units <= max_chunks * chunk_units and chunk_units <= launch._CHUNK_UNITS
        passes = -(-units // pass_units)
        assert (passes - 1) * pass_units < units <= passes * pass_units
        assert passes == 1 or product.norm is None
        bounds = [n * block // GRID for block in range(GRID + 1)]  # as the kernel deals rows out
        most = max(end - begin for begin, end in itertools.pairwise(bounds))
        groups = -(-most // group_rows)
        assert passes == 1 or groups <= launch._MAX_GROUPS, "sums are kept over passes"
        tile = group_rows * (1 + pairs) * (chunk_units * launch._UNIT * 2 + 64)
        assert tile <= launch._WINDOW_BYTES <= launch._RING_BYTES


def test_shared_memory_suffices() -> None:
    static = 6 * 1024  # what the compiler reports for barriers, descriptions and the like
    assert launch._RING_BYTES + launch._REST_BYTES + static <= 227 * 1024


def test_a_refused_launch_is_the_engines_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    kernel = object.__new__(CudaKernel)
    kernel._driver = SimpleNamespace(cuLaunchCooperativeKernel=lambda *args: (719,))
    kernel._function, kernel._shared_bytes = None, 0
    with pytest.raises(EngineDeadError, match=r"132 blocks with 384 threads: 719.*started again"):
        kernel.launch_together(132, 384, [])
    kernel._driver = SimpleNamespace(cuLaunchCooperativeKernel=lambda *args: (0,))
    kernel.launch_together(132, 384, [])


def test_words_are_where_the_kernel_looks() -> None:
    """The 64-bit words of ``Matmul`` in kernel.cu, one by one."""
    machine = SimpleNamespace(grid=GRID, max_chunks=2)
    _, o, gate_up, *_ = products(*SHAPES[2])
    words = launch._product_words(o, True, machine)  # type: ignore[arg-type]
    assert o.before is not None and gate_up.norm is not None
    pointers = [o.weight.data_ptr(), o.source.data_ptr(), 0, o.out.data_ptr()]
    assert words[0] == 1 << 32 and words[4] == 4 and words[5:9] == pointers
    assert words[9:] == [4096, 2560, 0, 0, o.before.data_ptr()]

    forgets = tuple(torch.empty(3, width, dtype=torch.bfloat16) for width in (64, 80))
    gate_up = dataclasses.replace(gate_up, forgets=forgets)
    words = launch._product_words(gate_up, True, machine)  # type: ignore[arg-type]
    assert gate_up.norm is not None
    assert words[4] == 5 | 2 << 32 and words[7] == gate_up.norm.data_ptr() and words[13] == 0
    assert words[14:] == [
        number
        for address, size in sorted((t.data_ptr(), 2 * t.numel()) for t in forgets)
        for number in (address, size)
    ]
    assert len(words) <= launch._WORDS
