# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# (Triton kernels are a language of their own inside Python's syntax.)
"""top_k, top_p and min_p in Triton: the last token of each row that ``filters.kept_prefix`` keeps, without a
sort.

The kept tokens are a prefix of the order "larger logit first, equal ones by ascending id", so the last of
them says all, and the sampler masks what lies behind it as it reads. Two kernels find it. The first, many
programs for a row, takes the largest logit of every chunk of ``CHUNK`` tokens. The k-th largest of these is
at most the k-th largest logit: the second, one program for a row, gathers the few tokens from that floor up,
in the order of their ids, from the chunks that have any, and searches among them, which takes no memory to
speak of. Where they do not hold the whole answer (a wide nucleus, thousands of ties) it searches the row.

A search narrows the 2^32 keys that order as fp32 numbers do, each pass over the values to a fifth. No row
looks at another, nothing is decided by the host, and a row without filters is left at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.sampling import state

CHUNK = 64
CHUNKS_PER_PROGRAM = 64

NUCLEUS_CHUNKS = 512
"""Without top_k, tokens are gathered from so many chunks' largest logits up."""
CAPACITY = 2048
"""Tokens gathered for a row at most."""
SURE_TOP_P = 0.9999
"""Chunks know their mass to 1e-7 of it, too coarse for a larger top_p: its row is summed and searched."""

BLOCK = 2048
"""Values a pass over a row takes at once."""
NUM_WARPS = 8

_INV_TEMPERATURE = tl.constexpr(state.INV_TEMPERATURE)
_TOP_P = tl.constexpr(state.TOP_P)
_MIN_P = tl.constexpr(state.MIN_P_COLUMN)
_NUM_FLOATS = tl.constexpr(state.NUM_FLOATS)
_TOP_K = tl.constexpr(state.TOP_K)
_NUM_INTS = tl.constexpr(state.NUM_INTS)
_CUTS = tl.constexpr(4)  # of a range of keys, tried in one pass
_BELOW_ALL = tl.constexpr(-(2**31))  # below the key of every number
_LOWEST = tl.constexpr(-(2**31) + 0x7FFFFF + 1)  # key of the lowest finite number; -inf is never drawn
_ALL = tl.constexpr(-(2**63))  # place behind all tokens
_NONE = tl.constexpr(2**63 - 1)


class LastKept(NamedTuple):
    """The last token kept of each row: logits [Q] fp32, tokens [Q] int32; (-inf, 2^31 - 1) keeps all."""

    logits: Tensor
    tokens: Tensor


@triton.jit
def _key(x):
    """int32 of fp32 x that orders as x does; both zeros have one key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    """The fp32 whose key this is."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _place(key, token):
    """int64 that falls along the order in which tokens are kept."""
    return (key.to(tl.int64) << 32) + 0x7FFFFFFF - token


@triton.jit
def _filters(row, slots_ptr, floats_ptr, ints_ptr, vocab_size):
    """Inverse temperature, min_p, top_k and top_p of a row, and whether it uses top_k, top_p and min_p."""
    slot = tl.load(slots_ptr + row).to(tl.int64)
    inv_temperature = tl.load(floats_ptr + slot * _NUM_FLOATS + _INV_TEMPERATURE).to(tl.float32)
    min_p = tl.load(floats_ptr + slot * _NUM_FLOATS + _MIN_P).to(tl.float32)
    top_k = tl.load(ints_ptr + slot * _NUM_INTS + _TOP_K).to(tl.int32)
    top_p = tl.load(floats_ptr + slot * _NUM_FLOATS + _TOP_P)
    random = inv_temperature > 0.0
    by_count, by_mass, by_ratio = (
        random & (top_k < vocab_size),
        random & (top_p < 1.0),
        random & (min_p > 0.0),
    )
    return inv_temperature, min_p, (top_k, top_p, by_count, by_mass, by_ratio)


@triton.jit
def _chunk_kernel(
    logits_ptr,  # [Q, V]
    slots_ptr,  # [Q]
    floats_ptr,
    ints_ptr,
    best_ptr,  # [Q, chunks] fp32, the largest logit
    mass_ptr,  # [Q, chunks] fp32, of the chunk's tokens relative to its largest; where only top_p is used
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    inv_temperature, _, filters = _filters(row, slots_ptr, floats_ptr, ints_ptr, vocab_size)
    _, _, by_count, by_mass, by_ratio = filters
    if by_count | by_mass | by_ratio:
        chunks = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
        tokens = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        x = tl.load(logits_ptr + row * vocab_size + tokens, mask=tokens < vocab_size, other=-float("inf"))
        best = tl.max(x, axis=1)
        out = row * num_chunks + chunks
        tl.store(best_ptr + out, best, mask=chunks < num_chunks)
        if by_mass & (by_count == 0) & (by_ratio == 0):
            base = tl.where(best > -float("inf"), best, 0.0)
            weight = tl.exp((x - base[:, None]) * inv_temperature)
            tl.store(mass_ptr + out, tl.sum(weight, axis=1), mask=chunks < num_chunks)


@triton.jit
def _weight(x, scale):
    """fp32: the probability over the largest one, 0 below min_p. A scale is (the largest logit, inverse
    temperature, min_p)."""
    weight = tl.exp((x - scale[0]) * scale[1])
    return tl.where(weight >= scale[2], weight, 0.0)


@triton.jit
def _read(listed, index):
    """Logits, keys and places of a list at these indices, and which are inside. A list is (values, size,
    gathered, tokens): where it is a row of which 0 are gathered, the tokens are the indices."""
    values_ptr, size, gathered, tokens_ptr = listed
    inside = index < size
    x = tl.load(values_ptr + index, mask=inside, other=-float("inf"))
    key = _key(x)
    token = tl.load(tokens_ptr + index, mask=index < gathered, other=0)
    return x, key, _place(key, tl.where(index < gathered, token, index)), inside


@triton.jit
def _above(listed, scale, limit, keys, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens, or how much weight of those up to the place ``limit``, is above each of [_CUTS]
    keys."""
    dtype: tl.constexpr = tl.int32 if COUNT else tl.float64
    sums = tl.zeros((_CUTS, BLOCK), dtype)
    for start in range(0, listed[1], BLOCK):
        x, key, place, inside = _read(listed, start + tl.arange(0, BLOCK))
        weight = inside.to(dtype)
        if not COUNT:
            weight *= tl.where(place >= limit, _weight(x, scale), 0.0)
        sums += tl.where(key[None, :] > keys[:, None], weight[None, :], 0)
    return tl.sum(sums, axis=1)


@triton.jit
def _mass(listed, scale, limit, BLOCK: tl.constexpr):
    """The weight of the tokens up to the place ``limit``."""
    keys = tl.full((_CUTS,), _BELOW_ALL, tl.int32)
    return tl.max(_above(listed, scale, limit, keys, False, BLOCK), axis=0)


@triton.jit
def _edge(listed, scale, limit, low, goal, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest key above ``low`` (int64) that has less than ``goal`` above it, and how much that is. Where
    there is less than the goal altogether, it is near ``low``, and all of that."""
    high = _key(scale[0]).to(tl.int64)  # nothing is above it
    found = tl.full((), 0, tl.int32 if COUNT else tl.float64)
    while high - low > 1:
        width = high - low
        keys = low + width * (tl.arange(0, _CUTS) + 1) // (_CUTS + 1)
        above = _above(listed, scale, limit, keys.to(tl.int32), COUNT, BLOCK)
        too_low = tl.sum((above >= goal).to(tl.int32), axis=0)  # so many cuts, the first ones
        found = tl.where(too_low < _CUTS, tl.max(tl.where(above < goal, above, 0), axis=0), found)
        high = low + width * (too_low + 1) // (_CUTS + 1)
        low += width * too_low // (_CUTS + 1)
    return high, found


@triton.jit
def _last(listed, scale, limit, edge, above, goal, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Place of the last token up to ``limit`` that is above the edge, or equal to it and within the goal; and
    not below min_p, unless tokens are counted."""
    num_equal = tl.full((), 0, tl.int32)
    last = tl.full((), _NONE, tl.int64)
    for start in range(0, listed[1], BLOCK):
        x, key, place, inside = _read(listed, start + tl.arange(0, BLOCK))
        inside = inside & (place >= limit)
        equal = (inside & (key == edge)).to(tl.int32)
        before = num_equal + tl.cumsum(equal, axis=0) - equal  # equal ones with lower ids
        if COUNT:
            keep = inside & ((key > edge) | ((equal == 1) & (above + before < goal)))
        else:
            weight = _weight(x, scale)
            within = above + before.to(tl.float64) * weight.to(tl.float64) < goal
            keep = inside & ((key > edge) | ((equal == 1) & within)) & (weight >= scale[2])
        last = tl.minimum(last, tl.min(tl.where(keep, place, _NONE), axis=0))
        num_equal += tl.sum(equal, axis=0)
    return last


@triton.jit
def _search(listed, scale, low, total, filters, BLOCK: tl.constexpr):
    """Place of the last token kept of a list. ``low`` is below the keys of all that may be kept; ``total`` is
    the mass of the row where only some of it is listed, or 0."""
    top_k, top_p, by_count, by_mass, by_ratio = filters
    limit = tl.full((), _ALL, tl.int64)
    if by_count:
        edge, above = _edge(listed, scale, limit, low, top_k, True, BLOCK)
        limit = _last(listed, scale, limit, edge, above, top_k, True, BLOCK)
        low = (limit >> 32) - 1
    if by_mass | by_ratio:
        edge = tl.full((), _BELOW_ALL, tl.int64)
        above = tl.full((), 0.0, tl.float64)
        goal = tl.full((), 0.0, tl.float64)
        if by_mass:
            if total == 0.0:
                total = _mass(listed, scale, limit, BLOCK)
            goal = top_p * total
            edge, above = _edge(listed, scale, limit, low, goal, False, BLOCK)
        limit = _last(listed, scale, limit, edge, above, goal, False, BLOCK)
    return limit


@triton.jit
def _gather(
    row,
    bests,
    floor,
    values_ptr,
    tokens_ptr,
    CHUNK: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the tokens of a row with keys from ``floor`` up, by ascending id: how many there are, the first
    CAPACITY of which are written. A row is (logits, size, scratch for the chunks to look into)."""
    row_ptr, vocab_size, list_ptr = row
    best_ptr = bests[0]
    num_chunks = bests[1]
    num_listed = tl.full((), 0, tl.int32)
    for start in range(0, num_chunks, BLOCK):
        chunks = start + tl.arange(0, BLOCK)
        inside = chunks < num_chunks
        best = tl.load(best_ptr + chunks, mask=inside, other=-float("inf"))
        listed = (inside & (_key(best) >= floor)).to(tl.int32)
        tl.store(list_ptr + num_listed + tl.cumsum(listed, axis=0) - 1, chunks, mask=listed == 1)
        num_listed += tl.sum(listed, axis=0)
    tl.debug_barrier()  # what is read next was written here
    size = tl.full((), 0, tl.int32)
    for start in range(0, num_listed * CHUNK, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < num_listed * CHUNK
        tokens = tl.load(list_ptr + index // CHUNK, mask=inside, other=0) * CHUNK + index % CHUNK
        inside = inside & (tokens < vocab_size)
        x = tl.load(row_ptr + tokens, mask=inside, other=-float("inf"))
        taken = (inside & (_key(x) >= floor)).to(tl.int32)
        out = size + tl.cumsum(taken, axis=0) - 1
        fits = (taken == 1) & (out < CAPACITY)
        tl.store(values_ptr + out, x, mask=fits)
        tl.store(tokens_ptr + out, tokens, mask=fits)
        size += tl.sum(taken, axis=0)
    tl.debug_barrier()
    return size


@triton.jit
def _last_kernel(
    logits_ptr,  # [Q, V]
    slots_ptr,  # [Q]
    floats_ptr,
    ints_ptr,
    best_ptr,  # [Q, chunks]
    mass_ptr,  # [Q, chunks]
    list_ptr,  # [Q, chunks] int32, scratch: chunks to look into
    values_ptr,  # [Q, CAPACITY] fp32, scratch: their large logits
    tokens_ptr,  # [Q, CAPACITY] int32, scratch: and whose they are
    last_logit_ptr,  # [Q] fp32
    last_token_ptr,  # [Q] int32
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    NUCLEUS_CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    SURE_TOP_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    inv_temperature, min_p, filters = _filters(row, slots_ptr, floats_ptr, ints_ptr, vocab_size)
    top_k, top_p, by_count, by_mass, by_ratio = filters
    last_logit = -float("inf")
    last_token = 0x7FFFFFFF
    if by_count | by_mass | by_ratio:
        best_ptr += row * num_chunks
        mass_ptr += row * num_chunks
        row_ptr = logits_ptr + row * vocab_size
        values_ptr += row * CAPACITY
        tokens_ptr += row * CAPACITY
        only_mass = by_mass & (by_count == 0) & (by_ratio == 0)
        below_all = tl.full((), _BELOW_ALL, tl.int64)

        best = tl.full((BLOCK,), -float("inf"), tl.float32)
        for start in range(0, num_chunks, BLOCK):
            chunks = start + tl.arange(0, BLOCK)
            here = tl.load(best_ptr + chunks, mask=chunks < num_chunks, other=-float("inf"))
            best = tl.maximum(best, here)
        top = tl.max(best, axis=0)
        scale = (top, inv_temperature, min_p)
        num_best = tl.where(by_count, top_k, NUCLEUS_CHUNKS)
        bests = (best_ptr, num_chunks, 0, tokens_ptr)
        floor = _edge(bests, scale, _ALL, below_all, num_best, True, BLOCK)[0]
        floor = tl.maximum(floor, _LOWEST)
        whole = (row_ptr, vocab_size, list_ptr + row * num_chunks)
        size = _gather(whole, bests, floor, values_ptr, tokens_ptr, CHUNK, CAPACITY, BLOCK)

        total = tl.full((), 0.0, tl.float64)
        if only_mass & (floor > _LOWEST):
            for start in range(0, num_chunks, BLOCK):
                chunks = start + tl.arange(0, BLOCK)
                inside = chunks < num_chunks
                best = tl.load(best_ptr + chunks, mask=inside, other=-float("inf"))
                mass = tl.load(mass_ptr + chunks, mask=inside, other=0.0).to(tl.float64)
                total += tl.sum(mass * tl.exp((best - top) * inv_temperature).to(tl.float64), axis=0)
        enough = size <= CAPACITY
        if enough & (by_count == 0) & (floor > _LOWEST):
            if by_ratio:
                enough = _weight(_value(floor), scale) == 0.0
            else:
                mass = _mass((values_ptr, size, size, tokens_ptr), scale, _ALL, BLOCK)
                enough = (mass >= top_p * total) & (top_p < SURE_TOP_P)
        low = (floor - 1).to(tl.int64)
        gathered = size
        if not enough:
            values_ptr = row_ptr
            size = vocab_size
            gathered = 0
            total = tl.full((), 0.0, tl.float64)
            low = below_all
        last = _search((values_ptr, size, gathered, tokens_ptr), scale, low, total, filters, BLOCK)
        last_logit = _value(last >> 32)
        last_token = (0x7FFFFFFF - (last & 0xFFFFFFFF)).to(tl.int32)
    tl.store(last_logit_ptr + row, last_logit)
    tl.store(last_token_ptr + row, last_token)


def last_kept(logits: Tensor, slots: Tensor, floats: Tensor, ints: Tensor) -> LastKept:
    """The last token that min_p, top_k and top_p keep of each row, those at -inf aside. Rows that are greedy
    or have no filters keep all.

    Args:
        logits: [Q, V] fp32, contiguous.
        slots: [Q] integer: slot of a row.
        floats, ints: the state's tables.
    """
    Q, V = logits.shape
    assert all(x.is_contiguous() for x in (logits, slots, floats, ints))
    num_chunks = triton.cdiv(V, CHUNK)
    best, mass = torch.empty(2, Q, num_chunks, dtype=torch.float32, device=logits.device)
    listed = torch.empty(Q, num_chunks, dtype=torch.int32, device=logits.device)
    values = torch.empty(Q, CAPACITY, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(Q, CAPACITY, dtype=torch.int32, device=logits.device)
    last = LastKept(
        torch.empty(Q, dtype=torch.float32, device=logits.device),
        torch.empty(Q, dtype=torch.int32, device=logits.device),
    )
    _chunk_kernel[(Q, triton.cdiv(num_chunks, CHUNKS_PER_PROGRAM))](
        logits,
        slots,
        floats,
        ints,
        best,
        mass,
        V,
        num_chunks,
        CHUNK=CHUNK,
        CHUNKS=CHUNKS_PER_PROGRAM,
        num_warps=8,
    )
    _last_kernel[(Q,)](
        logits,
        slots,
        floats,
        ints,
        best,
        mass,
        listed,
        values,
        tokens,
        last.logits,
        last.tokens,
        V,
        num_chunks,
        CHUNK=CHUNK,
        NUCLEUS_CHUNKS=NUCLEUS_CHUNKS,
        CAPACITY=CAPACITY,
        SURE_TOP_P=SURE_TOP_P,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return last
