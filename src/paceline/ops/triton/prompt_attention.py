# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# (Triton kernels are a language of their own inside Python's syntax.)
"""Causal attention of prompts that begin in this step: all their keys are rows of the step itself.

Through the block table every key is a gather of some hundred bytes, with an address of its own. A prompt's
own keys and values lie one after the other in the step's projections instead, so that the tensor memory
accelerator (NVIDIA Hopper and later) fetches whole tiles of them into shared memory, as the tensor core wants
them, without a register for any address. The softmax is that of ``attention.py``; as nobody's keys end in the
middle of a tile that is seen whole, only a tile's last keys are masked.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.ops.triton.tiles import sequence_of

BLOCK, WARPS, STAGES = 64, 4, 3
"""Rows and keys of a tile: the tensor core's own height, and two programs fit on a processor, one of which
multiplies while the other's softmax runs. (One H200, 8 x 1,024 rows of 32 heads: 193 us; 128 x 128: 233.)"""

_LOG2_E = 1.4426950408889634


@triton.jit
def _add_keys(
    peak, total, acc, q, qkv, first, key, k_column, v_column, row, num_rows, scale_log2, LAST: tl.constexpr
):
    """Take BLOCK keys of the prompt whose first row is ``first``, from its ``key``-th on, into a running
    softmax. The LAST are the tile's own rows.
    """
    k = qkv.load([first + key, k_column])
    v = qkv.load([first + key, v_column])
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK, BLOCK]
    if LAST:
        other = key + tl.arange(0, k.shape[0])
        scores = tl.where(other[None, :] <= row[:, None], scores, float("-inf"))
        # rows behind the prompt are somebody else's, and 0 * NaN is NaN
        v = tl.where((other < num_rows)[:, None], v, 0.0)
    new_peak = tl.maximum(peak, tl.max(scores, axis=1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return new_peak, total * decay + tl.sum(weights, axis=1), acc


# Not specialised: a new batch size must not compile a new kernel while serving.
@triton.jit(do_not_specialize=["row_start_ptr", "num_seqs", "first_tile"])
def _prompt_attention_kernel(
    q,  # descriptor of [R, H * D]
    qkv,  # descriptor of [R, (H + 2 KV) * D]
    out_ptr,  # [R, H, D]
    row_start_ptr,  # [B + 1]
    num_seqs,
    first_tile,
    scale_log2,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # the tile's sequence and first row in it; see RowLayout. A prompt's last rows, which see most, come first
    tile = first_tile + tl.num_programs(0) - 1 - tl.program_id(0)
    seq = sequence_of(tile, row_start_ptr, num_seqs, BLOCK)
    first = tl.load(row_start_ptr + seq)
    num_rows = tl.load(row_start_ptr + seq + 1) - first
    begin = (tile - first // BLOCK - seq) * BLOCK
    if begin >= num_rows:
        return

    head = tl.program_id(1)
    k_head = NUM_HEADS + head // (NUM_HEADS // NUM_KV_HEADS)
    k_column, v_column = k_head * D, (k_head + NUM_KV_HEADS) * D
    row = begin + tl.arange(0, BLOCK)
    q_tile = q.load([first + begin, head * D])
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, D), tl.float32)
    for key in range(0, begin, BLOCK):
        peak, total, acc = _add_keys(
            peak, total, acc, q_tile, qkv, first, key, k_column, v_column, row, num_rows, scale_log2, False
        )
    peak, total, acc = _add_keys(
        peak, total, acc, q_tile, qkv, first, begin, k_column, v_column, row, num_rows, scale_log2, True
    )
    at = ((first + row).to(tl.int64) * NUM_HEADS + head) * D
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[:, None] + tl.arange(0, D)[None, :], out, mask=(row < num_rows)[:, None])


def prompt_attention(
    q: Tensor, qkv: Tensor, out: Tensor, row_start: Tensor, first_row: int, scale: float
) -> None:
    """Attention of the last sequences of a step, all of whose keys are rows of the step.

    Args:
        q: [R, H, D] contiguous.
        qkv: [R, (H + 2 KV) * D] contiguous, of which the keys, normed and rotated, and the values are read.
        out: [R, H, D] contiguous; the sequences' rows are written.
        row_start: [B + 1] int32, first row of each of these sequences, and the last one's end.
        first_row: the first of them, known to the host.
        scale: factor of the scores before the softmax; positive.
    """
    num_rows, num_heads, head_dim = q.shape
    num_seqs, first_tile = len(row_start) - 1, first_row // BLOCK
    rows = q.view(num_rows, -1), qkv
    _prompt_attention_kernel[(num_rows // BLOCK - first_tile + num_seqs, num_heads)](
        *(TensorDescriptor.from_tensor(x, [BLOCK, head_dim]) for x in rows),
        out,
        row_start,
        num_seqs,
        first_tile,
        scale * _LOG2_E,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=(qkv.shape[1] // head_dim - num_heads) // 2,
        D=head_dim,
        BLOCK=BLOCK,
        num_warps=WARPS,
        num_stages=STAGES,
    )
