"""A drafter's choices, with nothing of the size of the vocabulary written.

*Of the whole vocabulary* (``draft_best``): each program walks over a piece of it: a tile of the weights
times the rows' vectors, plus the logits, plus noise made in registers. The best so far is kept for each place
in the tile and each row, so that the loop compares but never reduces; a program leaves one score and index
per row, and a second, tiny kernel picks among the pieces. A maximum is exact: the cut cannot change the
result. Where the second best is wanted as well, each place and each piece keeps its best two.

*Of candidates*: ``draft_candidates`` finds them for all slots at once, a program for a few buckets of a slot;
``draft_chain`` then walks down a chain in one program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.drafts import BlockNoise, Candidates, ChainHead, LowRank
from paceline.sampling import state
from paceline.sampling.triton_sampler import gumbel, row_key

BLOCK_V = 64
PROGRAMS = 264  # two for each processor of an H200: while one compares, the other loads
MOST_ROWS = 64  # of a program; more share the weights through the L2 cache

BUCKETS = 16  # of a program of draft_candidates, side by side
MANY_BUCKETS = 64  # the same for so many slots that they fill the GPU: whole cache lines
MANY_SLOTS = 128
BUCKET_CELLS = 2048  # looked at together
CHAIN_ROWS = 128  # candidates of a chain looked at together

_INV_TEMPERATURE = tl.constexpr(state.INV_TEMPERATURE)
_NUM_FLOATS = tl.constexpr(state.NUM_FLOATS)
_SEED_KEY = tl.constexpr(state.SEED_KEY)
_NUM_INTS = tl.constexpr(state.NUM_INTS)
_NOBODY = tl.constexpr(2147483647)


@triton.jit
def _noise_of(slots_ptr, starts_ptr, floats_ptr, ints_ptr, block, draft, mask):
    """Factor of the logits (0: no noise) and key of the noise, of drafts of blocks."""
    slot = tl.load(slots_ptr + block, mask=mask, other=0).to(tl.int64)
    position = tl.load(starts_ptr + block, mask=mask, other=0).to(tl.int64) + 1 + draft
    scale = tl.load(floats_ptr + slot * _NUM_FLOATS + _INV_TEMPERATURE, mask=mask, other=0.0)
    seed_key = tl.load(ints_ptr + slot * _NUM_INTS + _SEED_KEY, mask=mask, other=0)
    return scale.to(tl.float32), row_key(seed_key, position)


@triton.jit(do_not_specialize=["num_rows", "pieces", "first", "table_row_stride"])
def _piece_kernel(
    logits_ptr,  # [N, G, V], R = N * G rows
    table_ptr,  # [*, RANK]
    table_row_ptr,  # [N] int64, table_row_stride apart
    weight_ptr,  # [V, RANK]
    slots_ptr,  # [N]; with the next four, the noise
    starts_ptr,  # [N]
    floats_ptr,
    ints_ptr,
    token_ids_ptr,  # [V] int32
    score_ptr,  # [R, pieces * COUNT] fp32
    best_ptr,  # [R, pieces * COUNT] int32
    block_stride,
    slot_stride,
    table_row_stride,
    first,
    num_rows,
    vocab_size,
    piece_size,
    pieces,
    RANK: tl.constexpr,  # 0: no correction
    RANK_BLOCK: tl.constexpr,  # RANK in whole blocks of a power of two
    NOISE: tl.constexpr,
    COUNT: tl.constexpr,  # 1 or 2
    G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    piece = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = row < num_rows
    block = row // G
    row_at = block.to(tl.int64) * block_stride + (row % G).to(tl.int64) * slot_stride
    rank = tl.arange(0, RANK_BLOCK)
    if RANK > 0:
        z_at = tl.load(table_row_ptr + block * table_row_stride, mask=exists, other=0).to(tl.int64) * RANK
        z_inside = exists[:, None] & (rank < RANK)[None, :]
        z = tl.load(table_ptr + z_at[:, None] + rank[None, :], mask=z_inside, other=0.0)  # [BLOCK_M, r]
    if NOISE:
        scale, key = _noise_of(slots_ptr, starts_ptr, floats_ptr, ints_ptr, block, first + row % G, exists)
        random = scale[None, :] > 0
        scale = tl.where(scale > 0, scale, 1.0)[None, :]
        key = key[None, :]

    place = tl.arange(0, BLOCK_V)
    best_score = tl.full((BLOCK_V, BLOCK_M), float("-inf"), tl.float32)
    best = tl.full((BLOCK_V, BLOCK_M), _NOBODY, tl.int32)
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
    first_best = tl.min(tl.where(best_score == top[None, :], best, _NOBODY), axis=0)
    out_at = (row.to(tl.int64) * pieces + piece) * COUNT
    tl.store(score_ptr + out_at, top, mask=exists)
    tl.store(best_ptr + out_at, first_best, mask=exists)
    if COUNT == 2:  # the winner's place has its second best to offer, the others their best
        won = best == first_best[None, :]
        best_score = tl.where(won, second_score, best_score)
        best = tl.where(won, second, best)
        top = tl.max(best_score, axis=0)
        first_best = tl.min(tl.where(best_score == top[None, :], best, _NOBODY), axis=0)
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
    best = tl.load(best_ptr + row * candidates + candidate, mask=inside, other=_NOBODY)
    for place in tl.static_range(COUNT):
        found = tl.min(tl.where(score == tl.max(score, axis=0), best, _NOBODY), axis=0)
        # without any number among the scores, the last index: never one outside the vocabulary
        tl.store(out_ptr + row * COUNT + place, tl.minimum(found, vocab_size - 1).to(tl.int64))
        score = tl.where(best == found, float("-inf"), score)


def draft_best(
    logits: Tensor,
    low_rank: LowRank | None = None,
    noise: BlockNoise | None = None,
    *,
    first: int = 0,
    count: int = 1,
) -> Tensor:
    """See :func:`paceline.ops.draft_best`."""
    num_blocks, num_slots, vocab_size = logits.shape
    num_rows = num_blocks * num_slots
    assert logits.stride(2) == 1
    out = torch.empty((num_blocks, num_slots, count), dtype=torch.int64, device=logits.device)
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
    table, table_rows, weight, _ = low_rank or (None, None, None, None)
    assert low_rank is None or (low_rank.table.is_contiguous() and low_rank.weight.is_contiguous())
    _piece_kernel[(pieces, triton.cdiv(num_rows, block_m))](
        logits,
        table,
        table_rows,
        weight,
        *_tables(noise),
        score,
        best,
        logits.stride(0),
        logits.stride(1),
        0 if table_rows is None else table_rows.stride(0),
        first,
        num_rows,
        vocab_size,
        piece_size,
        pieces,
        RANK=rank,
        RANK_BLOCK=max(16, triton.next_power_of_2(rank)),
        NOISE=noise is not None,
        COUNT=count,
        G=num_slots,
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


@triton.jit
def _bucket_kernel(
    logits_ptr,  # [N, G, V]
    slots_ptr,  # [N]; with the next four, the noise
    starts_ptr,  # [N]
    floats_ptr,
    ints_ptr,
    token_ids_ptr,  # [V] int32
    ids_ptr,  # [N, G, 2 * NUM_BUCKETS] int32
    block_stride,
    slot_stride,
    vocab_size,
    NOISE: tl.constexpr,
    G: tl.constexpr,
    NUM_BUCKETS: tl.constexpr,
    BUCKETS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0)
    bucket = tl.program_id(1) * BUCKETS + tl.arange(0, BUCKETS)
    block = row // G
    logits_ptr += block.to(tl.int64) * block_stride + (row % G).to(tl.int64) * slot_stride
    drawn = False
    if NOISE:
        scale, key = _noise_of(slots_ptr, starts_ptr, floats_ptr, ints_ptr, block, row % G, True)
        drawn = scale > 0

    place = tl.arange(0, ROWS)
    best_score = tl.full((ROWS, BUCKETS), float("-inf"), tl.float32)
    best = tl.full((ROWS, BUCKETS), _NOBODY, tl.int32)
    second_score = best_score
    second = best
    token = place[:, None] * NUM_BUCKETS + bucket[None, :]
    inside = (token < vocab_size) & (bucket < NUM_BUCKETS)[None, :]
    loaded = tl.load(logits_ptr + token, mask=inside, other=float("-inf"))
    for _ in range(0, vocab_size, ROWS * NUM_BUCKETS):
        score = loaded.to(tl.float32)
        following = token + ROWS * NUM_BUCKETS  # already on its way while these are looked at
        there = (following < vocab_size) & (bucket < NUM_BUCKETS)[None, :]
        loaded = tl.load(logits_ptr + following, mask=there, other=float("-inf"))
        if NOISE:  # noqa: SIM102 - the first is decided when compiling
            if drawn:
                ids = tl.load(token_ids_ptr + token, mask=inside, other=0)
                score = score * scale + gumbel(key, ids)
        better = score > best_score  # strict: an earlier one keeps a tie; NaN loses
        next_better = score > second_score
        second = tl.where(better, best, tl.where(next_better, token, second))
        second_score = tl.where(better, best_score, tl.where(next_better, score, second_score))
        best_score = tl.where(better, score, best_score)
        best = tl.where(better, token, best)
        token = following
        inside = there
    out_ptr = ids_ptr + row.to(tl.int64) * (2 * NUM_BUCKETS) + bucket
    top = tl.max(best_score, axis=0)
    found = tl.min(tl.where(best_score == top[None, :], best, _NOBODY), axis=0)
    # without any number among the scores, the bucket's first: never one outside the vocabulary
    tl.store(out_ptr, tl.where(found == _NOBODY, bucket, found), mask=bucket < NUM_BUCKETS)
    won = best == found[None, :]  # the winner's place has its second best to offer, the others their best
    best_score = tl.where(won, second_score, best_score)
    best = tl.where(won, second, best)
    top = tl.max(best_score, axis=0)
    found = tl.min(tl.where(best_score == top[None, :], best, _NOBODY), axis=0)
    tl.store(out_ptr + NUM_BUCKETS, tl.where(found == _NOBODY, bucket, found), mask=bucket < NUM_BUCKETS)


def draft_candidates(logits: Tensor, noise: BlockNoise | None, count: int) -> Tensor:
    """See :func:`paceline.ops.draft_candidates`."""
    num_blocks, num_slots, vocab_size = logits.shape
    assert logits.stride(2) == 1 and count % 2 == 0 and count <= vocab_size
    ids = torch.empty((num_blocks, num_slots, count), dtype=torch.int32, device=logits.device)
    buckets = MANY_BUCKETS if num_blocks * num_slots >= MANY_SLOTS else BUCKETS
    if num_blocks * num_slots:
        _bucket_kernel[(num_blocks * num_slots, triton.cdiv(count // 2, buckets))](
            logits,
            *_tables(noise),
            ids,
            logits.stride(0),
            logits.stride(1),
            vocab_size,
            NOISE=noise is not None,
            G=num_slots,
            NUM_BUCKETS=count // 2,
            BUCKETS=buckets,
            ROWS=BUCKET_CELLS // buckets,
            num_warps=8,
        )
    return ids


@triton.jit
def _scores(
    at,  # [ROWS] which of the slot's candidates, then of the successors
    ids_ptr,  # the slot's candidates
    successors_ptr,  # of the token before
    logits_ptr,  # of the slot
    weight_ptr,
    z,  # [RANK_BLOCK] fp32
    rank,
    token_ids_ptr,
    scale,
    key,
    K: tl.constexpr,
    M: tl.constexpr,
    RANK: tl.constexpr,
    NOISE: tl.constexpr,
):
    """Scores and ids of some of what a slot chooses among, [ROWS] each. Without branches, so that the loads
    of all parts are on their way at once.
    """
    token = tl.load(ids_ptr + at, mask=at < K, other=0)
    after = tl.load(successors_ptr + at - K, mask=(at >= K) & (at < K + M), other=0)
    token = tl.where(at < K, token, after)
    inside = at < K + M
    score = tl.load(logits_ptr + token, mask=inside, other=float("-inf")).to(tl.float32)
    w_at = token.to(tl.int64)[:, None] * RANK + rank[None, :]
    w = tl.load(weight_ptr + w_at, mask=inside[:, None] & (rank < RANK)[None, :], other=0.0)
    bias = tl.sum(w.to(tl.float32) * z[None, :], axis=1)
    score += bias.to(w.dtype).to(tl.float32)
    if NOISE:
        ids = tl.load(token_ids_ptr + token, mask=inside, other=0)
        drawn = scale > 0
        score = score * tl.where(drawn, scale, 1.0) + tl.where(drawn, gumbel(key, ids), 0.0)
    score = tl.where(inside & (score == score), score, float("-inf"))  # NaN loses
    return score, token


@triton.jit
def _best_of(score, token):
    """The token of the largest score, the lowest on a tie, in one reduction."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # no zero is negative
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)  # as the scores are
    return _NOBODY - (tl.max((ordered << 32) | (_NOBODY - token), axis=0) & 0xFFFFFFFF).to(tl.int32)


@triton.jit(do_not_specialize=["num_chains"])
def _chain_kernel(
    logits_ptr,  # [N, G, V]
    ids_ptr,  # [N, G, K] int32
    anchors_ptr,  # [N]
    table_ptr,  # [*, RANK]
    weight_ptr,  # [V, RANK]
    successors_ptr,  # [*, M] int32
    target_ids_ptr,  # [V] int64 or None
    blocks_ptr,  # [chains / num_chains] int64 or None
    given_ptr,  # [chains, G] int64 or None
    slots_ptr,  # [N]; with the next four, the noise
    starts_ptr,  # [N]
    floats_ptr,
    ints_ptr,
    token_ids_ptr,  # [V] int32
    out_ptr,  # [chains, G, 2] int64
    block_stride,
    slot_stride,
    anchor_stride,
    num_chains,
    NOISE: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,  # of ROWS each: K + M
):
    chain = tl.program_id(0).to(tl.int64)
    block = chain // num_chains
    if blocks_ptr is not None:
        block = tl.load(blocks_ptr + block)
    rank = tl.arange(0, RANK_BLOCK)
    previous = tl.load(anchors_ptr + block * anchor_stride).to(tl.int64)
    for slot in range(G):
        scale = 0.0
        key = tl.full((), 0, tl.uint64)
        if NOISE:
            scale, key = _noise_of(slots_ptr, starts_ptr, floats_ptr, ints_ptr, block, slot, True)
        z = tl.load(table_ptr + previous * RANK + rank, mask=rank < RANK, other=0.0).to(tl.float32)
        own_ids_ptr = ids_ptr + (block * G + slot) * K
        own_logits_ptr = logits_ptr + block * block_stride + slot * slot_stride
        after_ptr = successors_ptr + previous * M
        # The best two of each place of a part, then of all. A token may be there twice, as candidate and as
        # successor.
        best_score = tl.full((ROWS,), float("-inf"), tl.float32)
        best = tl.full((ROWS,), _NOBODY, tl.int32)
        second_score = best_score
        second = best
        for part in tl.static_range(PARTS):
            score, token = _scores(
                part * ROWS + tl.arange(0, ROWS),
                own_ids_ptr,
                after_ptr,
                own_logits_ptr,
                weight_ptr,
                z,
                rank,
                token_ids_ptr,
                scale,
                key,
                K,
                M,
                RANK,
                NOISE,
            )
            better = (score > best_score) | ((score == best_score) & (token < best))
            next_better = (score > second_score) | ((score == second_score) & (token < second))
            next_better = next_better & (token != best)
            second = tl.where(better, best, tl.where(next_better, token, second))
            second_score = tl.where(better, best_score, tl.where(next_better, score, second_score))
            best_score = tl.where(better, score, best_score)
            best = tl.where(better, token, best)
        found = _best_of(best_score, best)
        runner_up = _best_of(
            tl.where(best == found, second_score, best_score), tl.where(best == found, second, best)
        )
        taken = found.to(tl.int64)
        runner_up = tl.where(runner_up == _NOBODY, found, runner_up).to(tl.int64)  # without any number
        if target_ids_ptr is not None:
            taken = tl.load(target_ids_ptr + taken)
            runner_up = tl.load(target_ids_ptr + runner_up)
        if given_ptr is not None:
            wanted = tl.load(given_ptr + chain * G + slot)
            taken = tl.where(wanted < 0, taken, wanted)
        at = out_ptr + (chain * G + slot) * 2
        tl.store(at, taken)
        tl.store(at + 1, runner_up)
        previous = taken


def draft_chain(
    candidates: Candidates,
    anchors: Tensor,
    head: ChainHead,
    blocks: Tensor | None = None,
    given: Tensor | None = None,
) -> Tensor:
    """See :func:`paceline.ops.draft_chain`."""
    logits, ids, noise = candidates
    num_blocks, num_slots, _ = logits.shape
    assert logits.stride(2) == 1 and ids.is_contiguous()
    assert head.table.is_contiguous() and head.weight.is_contiguous() and head.successors.is_contiguous()
    assert all(indices is None or indices.is_contiguous() for indices in (blocks, given, head.target_ids))
    num_owners = num_blocks if blocks is None else len(blocks)
    num_chains = 1 if given is None else given.shape[1]
    out = torch.empty((num_owners, num_chains, num_slots, 2), dtype=torch.int64, device=logits.device)
    count, more, rank = ids.shape[2], head.successors.shape[1], head.weight.shape[1]
    if num_owners * num_chains:
        _chain_kernel[(num_owners * num_chains,)](
            logits,
            ids,
            anchors,
            head.table,
            head.weight,
            head.successors,
            head.target_ids,
            blocks,
            given,
            *_tables(noise),
            out,
            logits.stride(0),
            logits.stride(1),
            anchors.stride(0),
            num_chains,
            NOISE=noise is not None,
            G=num_slots,
            K=count,
            M=more,
            RANK=rank,
            RANK_BLOCK=triton.next_power_of_2(rank),
            ROWS=CHAIN_ROWS,
            PARTS=triton.cdiv(count + more, CHAIN_ROWS),
            num_warps=16,
        )
    return out[:, 0] if given is None else out


def _tables(noise: BlockNoise | None) -> tuple[Tensor | None, ...]:
    """The noise as the kernels take it."""
    assert noise is None or all(table.is_contiguous() for table in noise)
    return (None,) * 5 if noise is None else tuple(noise)
