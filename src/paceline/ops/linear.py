"""Matrix products with weights that do not change.

On a GPU a table of measured choices says whether our kernel or the vendor's library multiplies
(``choices``).

On a CPU a product of few rows spends most of its time rearranging the weights for the kernel: with 8 rows, a
verify span, oneDNN takes 3.4 ms for the bundled model's weights when they were rearranged once at load,
against 8 ms otherwise (fp32, one core of a Zen 4). So weights are packed at load there.

Rows are handed to the library as one matrix, copied if they are part of larger rows: of a view that is none
it makes a batch of products, each of which reads the weights.

*Deterministic* products give a row the same bits whatever the other rows are and however many: K is cut in
chunks that depend on the weight's shape alone, and summed in one order. On a CPU, rows are multiplied in
blocks of a fixed number.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.ops.activation import silu_mul
from paceline.ops.choices import MatmulConfig, choose
from paceline.ops.dispatch import differentiated, kernels

_PACKED_ROWS = 8
"""Rows the packing is tuned for; other counts, one row and long prefills included, are no slower than
unpacked. Also the rows of a block in a deterministic product.
"""

_FEW_ROWS = 64
"""Up to here a deterministic product on a GPU is spread over the device by its depth."""

_PROGRAMS = 132
_MOST_CHUNKS = 8


def pack_linear(weight: Tensor) -> Tensor | None:
    """``weight`` [out, in] in oneDNN's layout for ``linear``, or None where there is nothing to gain: not on
    a CPU, not fp32, or a torch without the op.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.requires_grad:
        return None
    pack = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
    if pack is None or not torch.backends.mkldnn.is_available():
        return None
    packed: Tensor = pack(weight.contiguous(), _PACKED_ROWS)
    return packed


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    packed: Tensor | None = None,
    *,
    deterministic: bool = False,
) -> Tensor:
    """``x @ weight.T + bias``.

    Args:
        x: [*, in].
        weight: [out, in].
        bias: [out].
        packed: ``pack_linear(weight)``, used instead of the weight when given.
        deterministic: a row's result depends on that row alone, bit for bit. Slower.

    Returns:
        [*, out].
    """
    if differentiated(x, weight):  # oneDNN's op has no gradient, nor have our kernels
        return F.linear(x, weight, bias)
    if x.is_cuda:
        rows = x.reshape(-1, x.shape[-1])
        width, depth = weight.shape
        if deterministic:
            config: MatmulConfig | None = fixed_config(len(rows), width, depth, x.dtype)
        else:
            config = choose("linear", len(rows), width, depth, x.dtype, x.device)
        if config is not None:
            out: Tensor = kernels().matmul(rows, weight, bias, config=config)
        else:
            out = F.linear(rows, weight, bias)
        return out.view(*x.shape[:-1], width)
    if deterministic:
        return _in_blocks(x, weight, bias, packed)
    return _on_cpu(x, weight, bias, packed)


def _on_cpu(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None) -> Tensor:
    if packed is None:
        return F.linear(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], len(weight))
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def _in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None) -> Tensor:
    """The product, in blocks of always the same number of rows: how oneDNN sums depends on it."""
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    padded = F.pad(rows, (0, 0, 0, -count % _PACKED_ROWS))
    blocks = [_on_cpu(block, weight, bias, packed) for block in padded.split(_PACKED_ROWS)]
    out = torch.cat(blocks)[:count] if blocks else x.new_empty(0, weight.shape[0])
    return out.view(*x.shape[:-1], weight.shape[0])


def linear_parts(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Tensor | None = None
) -> Tensor:
    """``linear`` for ``add_rms_norm``, which may be left to do the last sum.

    Args:
        x: [*, in].
        weight: [out, in].
        bias, packed: as for ``linear``.

    Returns:
        [*, out] in x's dtype, or [S, *, out] fp32: sums over S parts of ``in``, to be added in this order.
    """
    if x.is_cuda and bias is None and not differentiated(x, weight):
        rows = x.reshape(-1, x.shape[-1])
        width, depth = weight.shape
        config = choose("parts", len(rows), width, depth, x.dtype, x.device)
        if config is not None:
            parts: Tensor = kernels().matmul(rows, weight, config=config, parts=True)
            return parts.view(-1, *x.shape[:-1], width)
    return linear(x, weight, bias, packed)


def linear_silu_mul(x: Tensor, weight: Tensor, packed: Tensor | None = None) -> Tensor:
    """``silu_mul(x @ weight.T)``: SwiGLU with its projections.

    Args:
        x: [*, in].
        weight: [2 I, in]: gate, then up.
        packed: as for ``linear``.

    Returns:
        [*, I].
    """
    if x.is_cuda and not differentiated(x, weight):
        rows = x.reshape(-1, x.shape[-1])
        width, depth = weight.shape[0] // 2, weight.shape[1]
        config = choose("swiglu", len(rows), width, depth, x.dtype, x.device)
        if config is not None:
            out: Tensor = kernels().matmul(rows, weight, config=config, swiglu=True)
            return out.view(*x.shape[:-1], width)
    return silu_mul(linear(x, weight, packed=packed))


def fixed_config(rows: int, width: int, depth: int, dtype: torch.dtype) -> MatmulConfig:
    """The cut of a deterministic product: chunks of the depth by the weight's shape, in few programs or many
    by the number of rows. Tiles are 64 or 128 rows, which the tensor core takes 64 at a time either way;
    fp32, which has no tensor core, is summed in order whatever the tile, and larger ones compile for long.
    """
    chunks = max(1, min(_PROGRAMS // -(-width // 64), _MOST_CHUNKS, depth // 256))
    splits, chunks = (chunks, 1) if rows <= _FEW_ROWS else (1, chunks)
    if dtype == torch.float32:
        return MatmulConfig(64, 64, 32, splits, chunks, num_stages=3)
    if rows <= _FEW_ROWS:
        return MatmulConfig(64, 64, 64, splits)
    return MatmulConfig(128, 128, 64, chunks=chunks, num_warps=8, num_stages=3)
