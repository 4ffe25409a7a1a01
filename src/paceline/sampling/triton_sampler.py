# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# (Triton kernels are a language of their own inside Python's syntax.)
"""The sampler's last step in Triton: temperature, position-keyed noise and argmax, with nothing materialised.

Each program reads one piece of one row's logits, makes the noise in registers and leaves its best score and
token; a second, tiny kernel picks among the pieces. A maximum is exact, so the number of pieces cannot change
the result. The noise is ``noise.py``'s, with the same hash bits; log1p is built from log (Kahan), which may
differ by a few ulp.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.sampling import noise, seeds, state
from paceline.sampling.triton_filters import LastKept

BLOCK = 2048
BLOCKS_PER_PIECE = 4

_GOLDEN64 = tl.constexpr(noise.GOLDEN64)
_MIX1 = tl.constexpr(seeds.MIX1)
_MIX2 = tl.constexpr(seeds.MIX2)
_GOLDEN32 = tl.constexpr(noise.GOLDEN32)
_MUL1 = tl.constexpr(noise.MUL1)
_MUL2 = tl.constexpr(noise.MUL2)
_SCALE = tl.constexpr(noise.SCALE)
_INV_TEMPERATURE = tl.constexpr(state.INV_TEMPERATURE)
_NUM_FLOATS = tl.constexpr(state.NUM_FLOATS)
_SEED_KEY = tl.constexpr(state.SEED_KEY)
_NUM_INTS = tl.constexpr(state.NUM_INTS)


@triton.jit
def row_key(seed_key, position):
    """``noise.row_keys`` of one row: uint64. ``position`` is where the sampled token will stand."""
    z = seed_key.to(tl.uint64, bitcast=True) + (position + 1).to(tl.uint64) * tl.full(
        (), _GOLDEN64, tl.uint64
    )
    z = (z ^ (z >> 30)) * tl.full((), _MIX1, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full((), _MIX2, tl.uint64)
    return z ^ (z >> 31)


@triton.jit
def gumbel(key, token_ids):
    """``noise.gumbel`` of the tokens (int32) at the row with this key; fp32."""
    lo = key.to(tl.uint32)
    hi = (key >> 32).to(tl.uint32)
    x = (token_ids.to(tl.uint32) * tl.full((), _GOLDEN32, tl.uint32)) ^ lo
    x = ((x ^ (x >> 16)) * tl.full((), _MUL1, tl.uint32)) ^ hi
    shifted = (x.to(tl.int32, bitcast=True) >> 15).to(tl.uint32, bitcast=True)
    x = (x ^ shifted) * tl.full((), _MUL2, tl.uint32)
    y = x.to(tl.int32, bitcast=True)
    v = ((y ^ (y >> 15)).to(tl.float32) + 0.5) * _SCALE
    # log1p(-v) after Kahan: the rounding error of u = 1 - v cancels in log(u) / (u - 1); v is tiny when u = 1
    u = 1.0 - v
    tiny = u == 1.0
    exponential = tl.where(tiny, v, tl.log(u) * (v / tl.where(tiny, 1.0, u - 1.0)))
    return -tl.log(exponential)


@triton.jit
def _piece_kernel(
    logits_ptr,  # [Q, V]
    slots_ptr,  # [Q]
    positions_ptr,  # [Q]
    last_logit_ptr,  # [Q] fp32 and int32: the last token to draw from, or None: all are
    last_token_ptr,
    floats_ptr,  # [num_slots, NUM_FLOATS] float64
    ints_ptr,  # [num_slots, NUM_INTS] int64
    best_score_ptr,  # [Q, pieces] fp32
    best_token_ptr,  # [Q, pieces] int32
    vocab_size,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    inv_temperature = tl.load(floats_ptr + slot * _NUM_FLOATS + _INV_TEMPERATURE).to(tl.float32)
    greedy = inv_temperature == 0.0
    position = tl.load(positions_ptr + row).to(tl.int64) + 1
    key = row_key(tl.load(ints_ptr + slot * _NUM_INTS + _SEED_KEY), position)

    if last_logit_ptr is not None:
        last_logit = tl.load(last_logit_ptr + row)
        last_token = tl.load(last_token_ptr + row)

    best_score = -float("inf")
    best_token = vocab_size - 1
    for block in range(BLOCKS):
        start = (piece * BLOCKS + block) * BLOCK
        tokens = start + tl.arange(0, BLOCK)
        inside = tokens < vocab_size
        score = tl.load(logits_ptr + row * vocab_size + tokens, mask=inside, other=-float("inf")).to(
            tl.float32
        )
        drawn = not greedy
        if last_logit_ptr is not None:
            kept = (score > last_logit) | ((score == last_logit) & (tokens <= last_token))
            score = tl.where(kept, score, -float("inf"))
            drawn = drawn & (tl.max(score, axis=0) > -float("inf"))  # few blocks have any when top_k is small
        if drawn:
            score = score * inv_temperature + gumbel(key, tokens)
        score = tl.where(score == score, score, -float("inf"))  # NaN loses
        block_score = tl.max(score, axis=0)
        block_token = tl.min(tl.where(inside & (score == block_score), tokens, vocab_size - 1), axis=0)
        better = block_score > best_score  # strict: an earlier block keeps a tie, so the lowest id wins
        best_score = tl.where(better, block_score, best_score)
        best_token = tl.where(better, block_token, best_token)
    tl.store(best_score_ptr + row * tl.num_programs(1) + piece, best_score)
    tl.store(best_token_ptr + row * tl.num_programs(1) + piece, best_token)


@triton.jit
def _pick_kernel(best_score_ptr, best_token_ptr, out_ptr, pieces, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    inside = index < pieces
    score = tl.load(best_score_ptr + row * pieces + index, mask=inside, other=-float("inf"))
    token = tl.load(best_token_ptr + row * pieces + index, mask=inside, other=2147483647)
    tl.store(out_ptr + row, tl.min(tl.where(score == tl.max(score, axis=0), token, 2147483647), axis=0))


def sample_argmax(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    floats: Tensor,
    ints: Tensor,
    *,
    last: LastKept | None = None,
    out: Tensor,
) -> None:
    """``argmax(logits / T + gumbel)`` of each row, ``argmax(logits)`` of greedy ones; lowest id on a tie.

    Args:
        logits: [Q, V] floating, contiguous.
        slots, positions: [Q] integer: slot and absolute position p of a row; its token will stand at p + 1.
        floats, ints: the state's tables.
        last: of fp32 logits, what the filters keep; None: everything.
        out: [Q] int32, overwritten.
    """
    Q, V = logits.shape
    assert all(x.is_contiguous() for x in (logits, slots, positions, floats, ints, out, *(last or ())))
    pieces = triton.cdiv(V, BLOCK * BLOCKS_PER_PIECE)
    best_score = torch.empty(Q, pieces, dtype=torch.float32, device=logits.device)
    best_token = torch.empty(Q, pieces, dtype=torch.int32, device=logits.device)
    _piece_kernel[(Q, pieces)](
        logits,
        slots,
        positions,
        None if last is None else last.logits,
        None if last is None else last.tokens,
        floats,
        ints,
        best_score,
        best_token,
        V,
        BLOCK=BLOCK,
        BLOCKS=BLOCKS_PER_PIECE,
    )
    _pick_kernel[(Q,)](best_score, best_token, out, pieces, BLOCK=triton.next_power_of_2(pieces))
