"""``x @ weight.T`` for few rows: the weights are read once, at the speed of memory.

With R rows a product of an [N, K] weight does 2 R flops for every 2 bytes it reads, so up to some 128 rows
an H200 waits for memory alone: N * K * 2 bytes at 4.2 TB/s (Qwen3-4B: qkv 7.5 us, o 5.0, gate and up 23.7,
down 11.9, head 185). What a kernel can lose there is programs that do not fill the device (*splits* of K make
more of them), loads that are not in flight early enough (*stages*), and the kernels around it (fused
epilogues). *Swapped* operands put the weights where the tensor core wants 64 rows, and the few rows of x
where it takes 16. With *TMA* the tensor memory accelerator fetches whole tiles, without a register for any
address.

K is summed in fp32, chunk by chunk; the chunks' sums are added in their order, whoever computed them. So with
chunks that depend on the weight alone, a row's result does not depend on the other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.ops.choices import MatmulConfig
from paceline.ops.triton.arrival import MAX_COUNTERS, arrive, counters
from paceline.ops.triton.dependent import EARLY_ROWS, await_previous, dependent_launch

GROUP_ROWS = tl.constexpr(16)
"""Tiles of rows that pass the weights together: 2,048 rows of Qwen3-4B take a fifth of an H200's L2 cache."""


@triton.jit
def _load(source, at, first, k, depth, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr):
    """A tile of BLOCK_K columns from k on: of a descriptor, rows ``first`` and following, or of memory whose
    rows start at ``at``.
    """
    if TMA:
        tile = source.load([first, k])
    else:
        column = k + tl.arange(0, BLOCK_K)
        mask = None if EVEN else column[None, :] < depth
        tile = tl.load(source + at[:, None] + column[None, :], mask=mask, other=None if EVEN else 0.0)
    return tile


@triton.jit
def _dot(x, w, acc, SWAP: tl.constexpr):
    if SWAP:
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    else:
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit
def _sum(
    x, weight, up_weight, x_at, w_at, first_row, first_column, first_up, begin, chunk, depth,
    SWIGLU: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr, SWAP: tl.constexpr,
    HEIGHT: tl.constexpr, BREADTH: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The products of one chunk of the depth: with the weight, and with SWIGLU's second one."""
    acc = tl.zeros((HEIGHT, BREADTH), tl.float32)
    up = tl.zeros((HEIGHT, BREADTH), tl.float32)
    for k in range(begin, tl.minimum(begin + chunk, depth), BLOCK_K):
        tile = _load(x, x_at, first_row, k, depth, BLOCK_K, EVEN, TMA)
        acc = _dot(tile, _load(weight, w_at, first_column, k, depth, BLOCK_K, EVEN, TMA), acc, SWAP)
        if SWIGLU:
            up = _dot(tile, _load(up_weight, w_at, first_up, k, depth, BLOCK_K, EVEN, TMA), up, SWAP)
    return acc, up


@triton.jit(do_not_specialize=["num_rows", "splits"])
def _matmul_kernel(
    x,  # [R, K], rows x_stride apart: a pointer, or with TMA a descriptor
    weight,  # [N, K], with SWIGLU [2 N, K]; the same
    bias_ptr,  # [N]
    out_ptr,  # [R, N], with PARTS [splits, R, N] fp32
    parts_ptr,  # without PARTS: [splits (twice with SWIGLU), R, N] fp32, not used by one split
    counter_ptr,
    num_rows,
    width,
    depth,
    x_stride,
    chunk,
    splits,
    CHUNKS: tl.constexpr,
    BIAS: tl.constexpr,
    SWIGLU: tl.constexpr,
    SPLIT: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,  # whether tiles of the depth are all full
    TMA: tl.constexpr,
    SWAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    tile = tl.program_id(0)
    split = tl.program_id(1)
    # neighbours share a weight tile, and those of a group the rows, through the L2 cache
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    group_tiles = GROUP_ROWS * tl.cdiv(width, BLOCK_N)
    group_row = tile // group_tiles * GROUP_ROWS
    group_rows = tl.minimum(row_tiles - group_row, GROUP_ROWS)
    first_row = (group_row + tile % group_tiles % group_rows) * BLOCK_M
    first_column = tile % group_tiles // group_rows * BLOCK_N
    row = first_row + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    # beyond the edges the last row is read again: what it yields is not stored
    x_at = tl.minimum(row, num_rows - 1).to(tl.int64) * x_stride
    w_at = tl.minimum(column, width - 1).to(tl.int64) * depth
    up_weight = weight if TMA else weight + width.to(tl.int64) * depth

    HEIGHT: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
    BREADTH: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    begin = split * CHUNKS * chunk
    await_previous(DEPENDENT)
    total, up_total = _sum(
        x, weight, up_weight, x_at, w_at, first_row, first_column, first_column + width, begin, chunk, depth,
        SWIGLU, EVEN, TMA, SWAP, HEIGHT, BREADTH, BLOCK_K,
    )  # fmt: skip
    if CHUNKS > 1:
        for i in range(1, CHUNKS):
            # not carried from chunk to chunk: Triton 3.6 loses a number that only an inner loop's bounds need
            start = begin + i * chunk
            acc, up_acc = _sum(
                x, weight, up_weight, x_at, w_at, first_row, first_column, first_column + width, start, chunk,
                depth, SWIGLU, EVEN, TMA, SWAP, HEIGHT, BREADTH, BLOCK_K,
            )  # fmt: skip
            total += acc
            if SWIGLU:
                up_total += up_acc

    if SWAP:
        at = column[:, None] + row[None, :].to(tl.int64) * width
        inside = (column < width)[:, None] & (row < num_rows)[None, :]
    else:
        at = column[None, :] + row[:, None].to(tl.int64) * width
        inside = (column < width)[None, :] & (row < num_rows)[:, None]
    size = num_rows.to(tl.int64) * width
    if PARTS:
        tl.store(out_ptr + split * size + at, total, mask=inside)
        return
    if SPLIT:
        tl.store(parts_ptr + split * size + at, total, mask=inside)
        if SWIGLU:
            tl.store(parts_ptr + (splits + split) * size + at, up_total, mask=inside)
        if not arrive(counter_ptr + tile, splits):
            return
        total = tl.load(parts_ptr + at, mask=inside, other=0.0, cache_modifier=".cg")
        for i in range(1, splits):
            total += tl.load(parts_ptr + i * size + at, mask=inside, other=0.0, cache_modifier=".cg")
        if SWIGLU:
            up_at = parts_ptr + splits * size + at
            up_total = tl.load(up_at, mask=inside, other=0.0, cache_modifier=".cg")
            for i in range(1, splits):
                up_total += tl.load(up_at + i * size, mask=inside, other=0.0, cache_modifier=".cg")
    if BIAS:
        bias = tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
        total += bias[:, None] if SWAP else bias[None, :]
    dtype = out_ptr.dtype.element_ty
    out = total.to(dtype)
    if SWIGLU:
        # rounded where the unfused ops round: after the product, and after silu
        gate = out.to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        out = (silu * up_total.to(dtype).to(tl.float32)).to(dtype)
    tl.store(out_ptr + at, out, mask=inside)


def matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    config: MatmulConfig,
    swiglu: bool = False,
    parts: bool = False,
) -> Tensor:
    """``x @ weight.T + bias``, cut up as the config says.

    Args:
        x: [R, K], rows contiguous.
        weight: [N, K] contiguous; with ``swiglu`` [2 N, K], gate and then up.
        bias: [N]; neither with ``swiglu`` nor with ``parts``.
        swiglu: return ``silu(gate) * up``.
        parts: return the splits' sums, to be added by whoever reads them.

    Returns:
        [R, N] in x's dtype, or [splits, R, N] fp32.
    """
    rows, depth = x.shape
    width = weight.shape[0] // 2 if swiglu else weight.shape[0]
    assert weight.is_contiguous() and x.stride(1) == 1 and not (bias is not None and (swiglu or parts))
    splits = config.splits
    tiles = triton.cdiv(width, config.block_n) * triton.cdiv(rows, config.block_m)
    split = splits > 1 and not parts
    assert not split or tiles <= MAX_COUNTERS
    shape = (splits, rows, width) if parts else (rows, width)
    out = torch.empty(shape, dtype=torch.float32 if parts else x.dtype, device=x.device)
    if rows == 0:
        return out
    scratch = out
    if split:
        scratch_shape = ((1 + swiglu) * splits, rows, width)
        scratch = torch.empty(scratch_shape, dtype=torch.float32, device=x.device)
    operands: tuple[object, object] = (x, weight)
    if config.tma:
        operands = (
            TensorDescriptor.from_tensor(x, [config.block_m, config.block_k]),
            TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]),
        )
    chunk = triton.cdiv(triton.cdiv(depth, config.block_k), splits * config.chunks) * config.block_k
    _matmul_kernel[(tiles, splits)](
        *operands,
        weight if bias is None else bias,
        out,
        scratch,
        counters(x.device),
        rows,
        width,
        depth,
        x.stride(0),
        chunk,
        splits,
        CHUNKS=config.chunks,
        BIAS=bias is not None,
        SWIGLU=swiglu,
        SPLIT=split,
        PARTS=parts,
        EVEN=depth % config.block_k == 0,
        TMA=config.tma,
        SWAP=config.swap,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **dependent_launch(x.device, rows <= EARLY_ROWS),
    )
    return out
