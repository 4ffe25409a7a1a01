"""Phase lists for ``kernel.cu``: a forward pass written down as data."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from paceline.ops.layout import RowLayout
from paceline.ops.persistent.compiler import CudaKernel

MAX_ROWS = 8
"""Rows of a pass: the width of one matrix instruction."""
HEAD_DIM = 128
MAX_QUERIES = 32
"""Query rows that may share a key head: rows of a sequence times heads per key head."""

KEYS = 16
"""Keys that are scored at once; blocks of the cache hold a multiple of them."""
MAX_SPLITS = 16
"""Blocks of the grid that share the keys of one head, at most."""

_RING_BYTES, _WINDOW_BYTES = 194_560, 90_000
_CHUNK_UNITS, _MAX_GROUPS = 5, 2
_CHUNKS = (2, 4)
"""Chunks of the input that a warp may hold at once, by variant of the kernel: the fewer the faster."""
_WARPS, _PRODUCERS = 8, 2
_UNIT = _WARPS * 32
_TILE_ROWS = 16
MAX_HIDDEN = _CHUNKS[-1] * _CHUNK_UNITS * _UNIT
"""Columns that can be normed: all of a row's are held at once."""
_REST_BYTES = 2 * _MAX_GROUPS * _WARPS * MAX_ROWS * 20 * 4 + 2 * MAX_HIDDEN  # partial sums, a norm's weight
_MATMUL, _ATTENTION, _CONTEXT = range(3)
_STORE, _ADD, _SILU, _LOGITS = range(4)
_WORDS = 16


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
    ]


class _Scratch(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("barrier", "arrived", "parts", "peaks")]


@cache
def _kernel(max_chunks: int) -> CudaKernel:
    source = files("paceline.ops.persistent").joinpath("kernel.cu").read_text()
    defines = {
        "RING_BYTES": _RING_BYTES,
        "WINDOW_BYTES": _WINDOW_BYTES,
        "CHUNK_UNITS": _CHUNK_UNITS,
        "MAX_CHUNKS": max_chunks,
    }
    return CudaKernel(source, "run_phases", defines, _RING_BYTES + _REST_BYTES)


def _pair(low: int, high: int) -> int:
    """Two 32-bit numbers in one word."""
    return low | high << 32


class Machine:
    """What launches share: the grid, the kernel's variant, and scratch that is zero between launches. One
    launch at a time.

    Args:
        device: a GPU.
        hidden_size: columns of what is normed.
    """

    def __init__(self, device: torch.device, hidden_size: int) -> None:
        self.device = device
        self.max_chunks = next(n for n in _CHUNKS if hidden_size <= n * _CHUNK_UNITS * _UNIT)
        self.grid = torch.cuda.get_device_properties(device).multi_processor_count
        self._counters = torch.zeros(64 + MAX_ROWS * 64, dtype=torch.int32, device=device)
        self._parts = torch.empty(self.grid, 4, 32, 32, device=device)
        self._peaks = torch.empty(self.grid, 2, 4, 32, device=device)
        self.scratch = _Scratch(
            self._counters.data_ptr(),
            self._counters[64:].data_ptr(),
            self._parts.data_ptr(),
            self._peaks.data_ptr(),
        )


def matrices_fit(hidden_size: int, depths: list[int], grid: int) -> bool:
    """Whether the kernel can multiply matrices of a model's layers: those that read ``hidden_size`` normed
    columns, and those that have as many rows and read ``depths`` columns.
    """
    more_passes = max(depths) > _CHUNKS[0] * _CHUNK_UNITS * _UNIT
    return (
        all(depth % _UNIT == 0 for depth in (hidden_size, *depths))
        and hidden_size <= MAX_HIDDEN
        and (not more_passes or -(-hidden_size // grid) <= _MAX_GROUPS * _TILE_ROWS)
    )


@dataclass(frozen=True)
class AttentionShape:
    """Heads of a layer, and how its rows see each other."""

    num_heads: int
    num_kv_heads: int
    bidirectional: bool = False


class Program:
    """A list of phases, and the launch that runs them.

    Args:
        machine: grid and scratch.
        num_seqs, span: rows of a pass, ``num_seqs * span`` of them, at most ``MAX_ROWS``.
        eps: of all norms.
        block_size: P, a multiple of 16.
        num_kv_heads: key heads of every layer.
        cos_sin: [positions, D] fp32, of every layer's rotation.
    """

    def __init__(
        self,
        machine: Machine,
        num_seqs: int,
        span: int,
        *,
        eps: float,
        block_size: int,
        num_kv_heads: int,
        cos_sin: Tensor,
    ) -> None:
        assert cos_sin.is_contiguous() and cos_sin.shape[1] == HEAD_DIM
        self._block_size, self._num_kv_heads, self._cos_sin = block_size, num_kv_heads, cos_sin
        self._splits = max(1, min(MAX_SPLITS, machine.grid // (num_seqs * num_kv_heads)))
        self.num_seqs, self.span, self.num_rows = num_seqs, span, num_seqs * span
        self._machine = machine
        self._eps = eps
        self._words: list[list[int]] = []
        self._phases: Tensor | None = None
        self._alive: list[Tensor] = []

    def matmul(
        self,
        weight: Tensor,
        source: Tensor,
        out: Tensor,
        *,
        norm: Tensor | None = None,
        add: bool = False,
        tap: Tensor | None = None,
    ) -> None:
        """``out = norm(source) @ weight.T``, or added to ``out``; fp32 when ``out`` is.

        Args:
            weight: [n, k].
            source: [R, k].
            out: [R, n].
            norm: [k], RMSNorm weight.
            add: add to what is there.
            tap: [R, n], gets the sum too.
        """
        epilogue = _ADD if add else _LOGITS if out.dtype == torch.float32 else _STORE
        self._matmul(weight, source, out, norm, epilogue, weight.shape[0], tap)

    def swiglu(self, weight: Tensor, source: Tensor, out: Tensor, *, norm: Tensor) -> None:
        """``silu(gate) * up`` of ``norm(source) @ weight.T``; weight [2 n, k] holds gates, then ups."""
        self._matmul(weight, source, out, norm, _SILU, weight.shape[0] // 2, None)

    def _matmul(
        self,
        weight: Tensor,
        source: Tensor,
        out: Tensor,
        norm: Tensor | None,
        epilogue: int,
        n: int,
        tap: Tensor | None,
    ) -> None:
        k = weight.shape[1]
        assert weight.stride() == (k, 1) and source.stride(1) == out.stride(1) == 1 and k % _UNIT == 0
        tile_rows = _TILE_ROWS // 2 if epilogue == _SILU else _TILE_ROWS
        share = -(-n // self._machine.grid)  # the most rows a block of the grid has
        group_rows = -(-share // -(-share // tile_rows))
        units = -(-k // _UNIT)
        passes = -(-units // (self._machine.max_chunks * _CHUNK_UNITS))
        pass_units = -(-units // passes)
        chunk_units = -(-pass_units // -(-pass_units // _CHUNK_UNITS))
        assert passes == 1 or (norm is None and share <= _MAX_GROUPS * group_rows)
        words = [_MATMUL, _pair(n, k), _pair(epilogue, group_rows), _pair(units, pass_units), chunk_units]
        words += [
            weight.data_ptr(),
            source.data_ptr(),
            0 if norm is None else norm.data_ptr(),
            out.data_ptr(),
        ]
        words += [source.stride(0), out.stride(0)]
        words += [0, 0] if tap is None else [tap.data_ptr(), tap.stride(0)]
        self._append(words, weight, source, out, norm, tap)

    def attention(
        self,
        shape: AttentionShape,
        qkv: Tensor,
        out: Tensor,
        norms: tuple[Tensor, Tensor],
        caches: tuple[Tensor, Tensor],
    ) -> None:
        """Norm and rotate q and k, write k and v, and attend.

        Args:
            shape: heads.
            qkv: [R, (H + 2 KV) * D] contiguous.
            out: [R, H * D] contiguous.
            norms: [D] each, of q and k.
            caches: k and v [blocks, P, KV, D].
        """
        assert qkv.is_contiguous() and out.is_contiguous() and shape.num_kv_heads == self._num_kv_heads
        words = [_ATTENTION, shape.num_heads, shape.num_kv_heads, int(shape.bidirectional), qkv.data_ptr()]
        words += [norms[0].data_ptr(), norms[1].data_ptr(), out.data_ptr()]
        words += [caches[0].data_ptr(), caches[1].data_ptr()]
        self._append(words, qkv, out, *norms, *caches)

    def write_context(
        self, num_kv_heads: int, kv: Tensor, k_norm: Tensor, caches: tuple[Tensor, Tensor], cos_sin: Tensor
    ) -> None:
        """Norm and rotate keys and write them with their values; kv [R, 2 KV * D] may be a slice of wider
        rows.
        """
        words = [_CONTEXT, 0, num_kv_heads, 0, kv.data_ptr(), 0, k_norm.data_ptr(), 0]
        words += [caches[0].data_ptr(), caches[1].data_ptr(), cos_sin.data_ptr(), kv.stride(0)]
        self._append(words, kv, k_norm, *caches, cos_sin)

    def independent(self) -> None:
        """The next phase needs nothing of the last one: no meeting between them."""
        self._words[-1][-1] = 1

    def _append(self, words: list[int], *alive: Tensor | None) -> None:
        self._words.append(words + [0] * (_WORDS - len(words)))
        self._alive += [tensor for tensor in alive if tensor is not None]

    def seal(self) -> None:
        """No more phases: bring the list to the device."""
        matrices = [words for words in self._words if words[0] == _MATMUL]
        self._phases = torch.tensor(self._words + matrices, dtype=torch.int64).to(self._machine.device)

    def __call__(self, layout: RowLayout) -> None:
        """Run all phases on ``layout``'s rows: ``span`` consecutive ones of each sequence."""
        assert self._phases is not None
        machine = self._machine
        phases, count = self._phases.data_ptr(), len(self._words)
        rows = _Rows(
            layout.slots.data_ptr(),
            layout.num_computed.data_ptr(),
            layout.block_tables.data_ptr(),
            layout.kv_slots.data_ptr(),
            layout.positions.data_ptr(),
            self._cos_sin.data_ptr(),
            layout.block_tables.stride(0),
            self.num_rows,
            self.num_seqs,
            self.span,
            self._block_size,
            self._num_kv_heads,
            self._splits,
        )
        _kernel(machine.max_chunks).launch_together(
            machine.grid,
            (_WARPS + _PRODUCERS) * 32,
            [
                ctypes.c_void_p(phases),
                ctypes.c_int(count),
                ctypes.c_void_p(phases + 8 * _WORDS * count),
                ctypes.c_int(len(self._phases) - count),
                rows,
                machine.scratch,
                ctypes.c_float(self._eps),
            ],
        )
