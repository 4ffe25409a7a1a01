"""Phases as ``kernel.cu`` reads them, and its launch."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from functools import cache
from importlib.resources import files
from itertools import chain

import torch
from torch import Tensor

from paceline.ops.ahead import compiles_only
from paceline.ops.layout import RowLayout
from paceline.ops.persistent.compiler import CudaKernel, start_compiling
from paceline.ops.persistent.flow import Range, awaited, blank_at_first, ranges
from paceline.ops.persistent.phases import Attend, Phase, Product

MAX_ROWS = 8
"""Rows of a pass: the width of one matrix instruction."""
HEAD_DIM = 128
MAX_QUERIES = 32
"""Query rows that may share a key head: rows of a sequence times heads per key head."""
KEYS = 16
"""Keys that are scored at once; blocks of the cache hold a multiple of them."""
MAX_SPLITS = 16
"""Blocks of the grid that share the keys of one head, at most."""
_REGISTER_GROUP = 128
"""Threads that registers are dealt out to at once: producers are rounded up to them."""

_RING_BYTES, _WINDOW_BYTES = 194_560, 90_000
_CHUNK_UNITS, _MAX_GROUPS = 5, 2
_CHUNKS = (2, 4)
"""Chunks of the input that a warp may hold at once, by variant of the kernel: the fewer the faster."""
_WARPS = 8
_UNIT = _WARPS * 32
_TILE_ROWS = 16
MAX_HIDDEN = _CHUNKS[-1] * _CHUNK_UNITS * _UNIT
"""Columns that can be normed: all of a row's are held at once."""
_REST_BYTES = 2 * _MAX_GROUPS * _WARPS * MAX_ROWS * 20 * 4 + 2 * MAX_HIDDEN  # partial sums, a norm's weight
_MATMUL, _ATTENTION, _CONTEXT = range(3)
_STORE, _ADD, _SILU, _LOGITS = range(4)
_WORDS, _MAX_RANGES = 32, 6


def matrices_fit(hidden_size: int, depths: Collection[int], grid: int) -> bool:
    """Whether the kernel can multiply matrices of a model's layers: those that read ``hidden_size`` normed
    columns, and those that have as many rows and read ``depths`` columns.
    """
    more_passes = max(depths) > _CHUNKS[0] * _CHUNK_UNITS * _UNIT
    return (
        grid <= _UNIT  # every block has rows of every matrix, which has some units of rows
        and all(depth % _UNIT == 0 for depth in (hidden_size, *depths))
        and hidden_size <= MAX_HIDDEN
        and (not more_passes or -(-hidden_size // grid) <= _MAX_GROUPS * _TILE_ROWS)
    )


class Machine:
    """What launches share: the grid, the kernel's variant, and scratch. One launch at a time.

    Args:
        device: a GPU.
        hidden_size: columns of what is normed.
    """

    def __init__(self, device: torch.device, hidden_size: int) -> None:
        self.grid = torch.cuda.get_device_properties(device).multi_processor_count
        self.max_chunks = _max_chunks(hidden_size)
        self.barrier = torch.zeros(1, dtype=torch.int32, device=device)
        self.parts = torch.empty(self.grid, MAX_QUERIES, HEAD_DIM, device=device)
        self.peaks = torch.empty(self.grid, MAX_QUERIES, 2, device=device)


class Launch:
    """A list of phases on the device, ready to be launched as often as wanted.

    Args:
        phases: in order; their tensors must outlive this.
        machine: grid and scratch.
        num_seqs, span: rows of a pass.
        eps: of all norms.
        cos_sin: [positions, D] fp32, contiguous.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        machine: Machine,
        *,
        num_seqs: int,
        span: int,
        eps: float,
        cos_sin: Tensor,
    ) -> None:
        assert cos_sin.is_contiguous() and cos_sin.shape[1] == HEAD_DIM
        self._machine, self._eps, self._cos_sin = machine, eps, cos_sin
        self._num_seqs, self._span = num_seqs, span
        k_cache = next(phase.k_cache for phase in phases if isinstance(phase, Attend))
        _, self._block_size, self._num_kv_heads, _ = k_cache.shape
        self._splits = max(1, min(MAX_SPLITS, machine.grid // (num_seqs * self._num_kv_heads)))
        self._group = (
            next(phase.num_heads for phase in phases if isinstance(phase, Attend)) // self._num_kv_heads
        )
        blank = blank_at_first(phases)
        self._num_blank = len(blank)
        self._blank = torch.tensor(_sizes(blank), dtype=torch.int64).to(cos_sin.device)
        words = [
            _words(phase, waits, machine, self._num_kv_heads)
            for phase, waits in zip(phases, awaited(phases), strict=True)
        ]
        for row in words:
            row += [0] * (_WORDS - len(row))
        # The matrices once more by themselves: the warps that fetch weights look at nothing else.
        matrices = [row for row, phase in zip(words, phases, strict=True) if isinstance(phase, Product)]
        self._count, self._num_matrices = len(words), len(matrices)
        self._phases = torch.tensor(words + matrices, dtype=torch.int64).to(cos_sin.device)

    def __call__(self, layout: RowLayout) -> None:
        """Launch on torch's current stream."""
        if compiles_only():  # the kernel is one for all phases: somebody waits for it soon enough
            return
        phases = self._phases.data_ptr()
        rows = _Rows(
            layout.slots.data_ptr(),
            layout.num_computed.data_ptr(),
            layout.block_tables.data_ptr(),
            layout.kv_slots.data_ptr(),
            layout.positions.data_ptr(),
            self._cos_sin.data_ptr(),
            layout.block_tables.stride(0),
            self._num_seqs * self._span,
            self._num_seqs,
            self._span,
            self._block_size,
            self._num_kv_heads,
            self._splits,
            self._group * self._span,
        )
        machine = self._machine
        scratch = _Scratch(
            machine.barrier.data_ptr(),
            machine.parts.data_ptr(),
            machine.peaks.data_ptr(),
            self._blank.data_ptr(),
            self._num_blank,
        )
        _kernel(machine.max_chunks, torch.cuda.current_device()).launch_together(
            machine.grid,
            _WARPS * 32 + _REGISTER_GROUP,
            [
                ctypes.c_void_p(phases),
                ctypes.c_int(self._count),
                ctypes.c_void_p(phases + 8 * _WORDS * self._count),
                ctypes.c_int(self._num_matrices),
                rows,
                scratch,
                ctypes.c_float(self._eps),
            ],
        )


def _words(phase: Phase, waits: bool, machine: Machine, num_kv_heads: int) -> list[int]:
    """The kernel's ``struct`` of a phase, as 64-bit words; ``waits``: whether its source is awaited."""
    if isinstance(phase, Product):
        return _product_words(phase, waits, machine)
    caches = [phase.k_cache.data_ptr(), phase.v_cache.data_ptr()]
    if isinstance(phase, Attend):
        assert phase.qkv.is_contiguous() and phase.out.is_contiguous()
        assert phase.k_cache.shape[2] == num_kv_heads
        words = [_pair(_ATTENTION, waits), phase.num_heads, num_kv_heads, int(phase.bidirectional)]
        words += [phase.qkv.data_ptr(), phase.q_norm.data_ptr(), phase.k_norm.data_ptr()]
        return [*words, phase.out.data_ptr(), *caches]
    words = [_pair(_CONTEXT, waits), 0, phase.k_cache.shape[2], 0]
    words += [phase.kv.data_ptr(), 0, phase.k_norm.data_ptr(), 0]
    return [*words, *caches, phase.cos_sin.data_ptr(), phase.kv.stride(0)]


def _product_words(phase: Product, waits: bool, machine: Machine) -> list[int]:
    pairs = phase.epilogue == "swiglu"
    n, k = phase.weight.shape[0] // (2 if pairs else 1), phase.weight.shape[1]
    source, out, tap, before = phase.source, phase.out, phase.tap, phase.before
    assert (before is not None) == (phase.epilogue == "add")
    assert before is None or before.stride() == out.stride()
    forgets = _sizes(ranges(phase.forgets))
    assert not forgets or (waits and phase.norm is not None)  # all blocks' results are seen at once
    assert len(forgets) <= _MAX_RANGES
    assert phase.weight.stride() == (k, 1) and source.stride(1) == out.stride(1) == 1 and k % _UNIT == 0
    tile_rows = _TILE_ROWS // (2 if pairs else 1)
    share = -(-n // machine.grid)  # the most rows a block of the grid has
    group_rows = -(-share // -(-share // tile_rows))
    units = -(-k // _UNIT)
    passes = -(-units // (machine.max_chunks * _CHUNK_UNITS))
    pass_units = -(-units // passes)
    chunk_units = -(-pass_units // -(-pass_units // _CHUNK_UNITS))
    assert passes == 1 or (phase.norm is None and share <= _MAX_GROUPS * group_rows)
    stored = _LOGITS if out.dtype == torch.float32 else _STORE
    epilogue = {"store": stored, "add": _ADD, "swiglu": _SILU}[phase.epilogue]
    words = [_pair(_MATMUL, waits), _pair(n, k), _pair(epilogue, group_rows)]
    words += [_pair(units, pass_units), _pair(chunk_units, len(forgets))]
    words += [phase.weight.data_ptr(), source.data_ptr()]
    words += [0 if phase.norm is None else phase.norm.data_ptr(), out.data_ptr()]
    words += [source.stride(0), out.stride(0)]
    words += [0, 0] if tap is None else [tap.data_ptr(), tap.stride(0)]
    return [*words, 0 if before is None else before.data_ptr(), *chain(*forgets)]


def _sizes(places: Sequence[Range]) -> list[tuple[int, int]]:
    """Starts and lengths in bytes."""
    assert all(address % 16 == 0 for place in places for address in place)
    return [(start, end - start) for start, end in places]


def _pair(low: int, high: int) -> int:
    """Two 32-bit numbers in one word."""
    return low | high << 32


class _Rows(ctypes.Structure):
    _fields_ = [
        ("slots", ctypes.c_void_p),
        ("num_computed", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("kv_slots", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("table_stride", ctypes.c_longlong),
        ("num_rows", ctypes.c_int),
        ("num_seqs", ctypes.c_int),
        ("span", ctypes.c_int),
        ("block_size", ctypes.c_int),
        ("kv_heads", ctypes.c_int),
        ("splits", ctypes.c_int),
        ("queries", ctypes.c_int),
    ]


class _Scratch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("barrier", "parts", "peaks", "blank")),
        ("num_blank", ctypes.c_longlong),
    ]


def compile_early(hidden_size: int) -> None:
    """Begin to compile the kernel's variant for a model, for the current device; its first launch waits."""
    start_compiling(*_source(_max_chunks(hidden_size)))


@cache
def _kernel(max_chunks: int, device: int) -> CudaKernel:
    """A variant of the kernel, loaded on a device: the current one."""
    assert device == torch.cuda.current_device()
    source, defines = _source(max_chunks)
    return CudaKernel(source, "run_phases", defines, _RING_BYTES + _REST_BYTES)


def _max_chunks(hidden_size: int) -> int:
    """The kernel's variant."""
    return next(n for n in _CHUNKS if hidden_size <= n * _CHUNK_UNITS * _UNIT)


def _source(max_chunks: int) -> tuple[str, dict[str, int]]:
    """A variant's source and macros."""
    defines = {
        "RING_BYTES": _RING_BYTES,
        "WINDOW_BYTES": _WINDOW_BYTES,
        "CHUNK_UNITS": _CHUNK_UNITS,
        "MAX_CHUNKS": max_chunks,
    }
    return files("paceline.ops.persistent").joinpath("kernel.cu").read_text(), defines
