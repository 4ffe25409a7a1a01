"""One slot of a drafter's chain in two kernels, with nothing of the size of the vocabulary written.

Each program walks over a piece of the vocabulary: a tile of the weights times the rows' vectors, plus the
logits, plus noise made in registers. The best so far is kept for each place in the tile and each row, so that
the loop compares but never reduces; a program leaves one score and index per row, and a second, tiny kernel
picks among the pieces. A maximum is exact: the cut cannot change the result. Where the second best is wanted
as well, each place and each piece keeps its best two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.drafts import LowRank, RowNoise
from paceline.sampling.triton_sampler import gumbel, row_key

BLOCK_V = 64
PROGRAMS = 264  # two for each processor of an H200: while one compares, the other loads
MOST_ROWS = 64  # of a program; more share the weights through the L2 cache


@triton.jit(do_not_specialize=["num_rows", "pieces"])
def _piece_kernel(
    logits_ptr,  # [R, V], rows logits_stride apart
    table_ptr,  # [*, RANK]
    table_row_ptr,  # [R] int64
    weight_ptr,  # [V, RANK]
    seed_keys_ptr,  # [R] int64
    positions_ptr,  # [R]
    inv_temperature_ptr,  # [R] fp32
    token_ids_ptr,  # [V] int32
    score_ptr,  # [R, pieces * COUNT] fp32
    best_ptr,  # [R, pieces * COUNT] int32
    logits_stride,
    num_rows,
    vocab_size,
    piece_size,
    pieces,
    RANK: tl.constexpr,  # 0: no correction
    RANK_BLOCK: tl.constexpr,  # RANK in whole blocks of a power of two
    NOISE: tl.constexpr,
    COUNT: tl.constexpr,  # 1 or 2
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    piece = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = row < num_rows
    row_at = row.to(tl.int64) * logits_stride
    rank = tl.arange(0, RANK_BLOCK)
    if RANK > 0:
        z_at = tl.load(table_row_ptr + row, mask=exists, other=0).to(tl.int64) * RANK
        z_inside = exists[:, None] & (rank < RANK)[None, :]
        z = tl.load(table_ptr + z_at[:, None] + rank[None, :], mask=z_inside, other=0.0)  # [BLOCK_M, r]
    if NOISE:
        inv_temperature = tl.load(inv_temperature_ptr + row, mask=exists, other=0.0)[None, :]
        random = inv_temperature > 0
        scale = tl.where(random, inv_temperature, 1.0)
        position = tl.load(positions_ptr + row, mask=exists, other=0).to(tl.int64)
        key = row_key(tl.load(seed_keys_ptr + row, mask=exists, other=0), position)[None, :]

    place = tl.arange(0, BLOCK_V)
    best_score = tl.full((BLOCK_V, BLOCK_M), float("-inf"), tl.float32)
    best = tl.full((BLOCK_V, BLOCK_M), 2147483647, tl.int32)
    if COUNT == 2:
        second_score = best_score
        second = best
    for first in range(piece * piece_size, tl.minimum((piece + 1) * piece_size, vocab_size), BLOCK_V):
        token = first + place
        inside = token < vocab_size
        at = logits_ptr + row_at[None, :] + token[:, None]
        score = tl.load(at, mask=inside[:, None] & exists[None, :], other=float("-inf")).to(tl.float32)
        if RANK > 0:
            w_at = token.to(tl.int64)[:, None] * RANK + rank[None, :]
            w_inside = inside[:, None] & (rank < RANK)[None, :]
            w = tl.load(weight_ptr + w_at, mask=w_inside, other=0.0)
            bias = tl.dot(w, tl.trans(z), input_precision="ieee")  # [BLOCK_V, BLOCK_M]
            score += bias.to(w.dtype).to(tl.float32)
        if NOISE:
            ids = tl.load(token_ids_ptr + token, mask=inside, other=0)[:, None]
            score = tl.where(random, score * scale + gumbel(key, ids), score)
        better = score > best_score  # strict: an earlier tile keeps a tie; NaN loses
        if COUNT == 2:
            next_better = score > second_score
            second = tl.where(better, best, tl.where(next_better, token[:, None], second))
            second_score = tl.where(better, best_score, tl.where(next_better, score, second_score))
        best_score = tl.where(better, score, best_score)
        best = tl.where(better, token[:, None], best)
    top = tl.max(best_score, axis=0)
    first_best = tl.min(tl.where(best_score == top[None, :], best, 2147483647), axis=0)
    out_at = (row.to(tl.int64) * pieces + piece) * COUNT
    tl.store(score_ptr + out_at, top, mask=exists)
    tl.store(best_ptr + out_at, first_best, mask=exists)
    if COUNT == 2:  # the winner's place has its second best to offer, the others their best
        won = best == first_best[None, :]
        best_score = tl.where(won, second_score, best_score)
        best = tl.where(won, second, best)
        top = tl.max(best_score, axis=0)
        first_best = tl.min(tl.where(best_score == top[None, :], best, 2147483647), axis=0)
        tl.store(score_ptr + out_at + 1, top, mask=exists)
        tl.store(best_ptr + out_at + 1, first_best, mask=exists)


@triton.jit(do_not_specialize=["candidates", "vocab_size"])
def _pick_kernel(
    score_ptr, best_ptr, out_ptr, candidates, vocab_size, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, BLOCK)
    inside = candidate < candidates
    score = tl.load(score_ptr + row * candidates + candidate, mask=inside, other=float("-inf"))
    best = tl.load(best_ptr + row * candidates + candidate, mask=inside, other=2147483647)
    for place in tl.static_range(COUNT):
        found = tl.min(tl.where(score == tl.max(score, axis=0), best, 2147483647), axis=0)
        # without any number among the scores, the last index: never one outside the vocabulary
        tl.store(out_ptr + row * COUNT + place, tl.minimum(found, vocab_size - 1).to(tl.int64))
        score = tl.where(best == found, float("-inf"), score)


def draft_argmax(logits: Tensor, low_rank: LowRank | None = None, noise: RowNoise | None = None) -> Tensor:
    """See :func:`paceline.ops.draft_argmax`."""
    return _best(logits, low_rank, noise, 1).view(-1)


def draft_best_two(logits: Tensor, low_rank: LowRank | None = None, noise: RowNoise | None = None) -> Tensor:
    """See :func:`paceline.ops.draft_best_two`."""
    return _best(logits, low_rank, noise, 2)


def _best(logits: Tensor, low_rank: LowRank | None, noise: RowNoise | None, count: int) -> Tensor:
    """The best ``count`` indices of each row, [R, count] int64."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    out = torch.empty((num_rows, count), dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    tiles = triton.cdiv(vocab_size, BLOCK_V)
    piece_size = triton.cdiv(tiles, PROGRAMS) * BLOCK_V
    pieces = triton.cdiv(vocab_size, piece_size)
    candidates = pieces * count
    score = torch.empty((num_rows, candidates), dtype=torch.float32, device=logits.device)
    best = torch.empty((num_rows, candidates), dtype=torch.int32, device=logits.device)
    block_m = max(16, min(triton.next_power_of_2(num_rows), MOST_ROWS))
    rank = 0 if low_rank is None else low_rank.weight.shape[1]
    table, table_rows, weight, _ = low_rank or (logits, out, logits, None)  # stand-ins are not read
    seed_keys, positions, inv_temperature, token_ids = noise or (out, out, score, best)
    assert rank == 0 or (table.is_contiguous() and weight.is_contiguous())
    _piece_kernel[(pieces, triton.cdiv(num_rows, block_m))](
        logits,
        table,
        table_rows,
        weight,
        seed_keys,
        positions,
        inv_temperature,
        token_ids,
        score,
        best,
        logits.stride(0),
        num_rows,
        vocab_size,
        piece_size,
        pieces,
        RANK=rank,
        RANK_BLOCK=max(16, triton.next_power_of_2(rank)),
        NOISE=noise is not None,
        COUNT=count,
        BLOCK_M=block_m,
        BLOCK_V=BLOCK_V,
        num_warps=4 if block_m <= 32 else 8,
        num_stages=3 if rank <= 256 else 2,
    )
    _pick_kernel[(num_rows,)](
        score,
        best,
        out,
        candidates,
        vocab_size,
        COUNT=count,
        BLOCK=triton.next_power_of_2(candidates),
        num_warps=4,
    )
    return out
