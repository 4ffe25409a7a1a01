# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# (Triton kernels are a language of their own inside Python's syntax.)
"""top_k, top_p and min_p in Triton: the tokens ``filters.kept_prefix`` drops become -inf, without a sort.

The kept tokens are a prefix of the order "larger logit first, equal ones by ascending id", so they are known
once the logit at the edge is known, and how many of the tokens equal to it are in. One program per row finds
the edge by searching the 2^32 keys that order as fp32 numbers do: sixteen passes over the row, which lies in
the L2 cache, each narrowing the range to a quarter. Nothing is materialised, no row looks at another, and a
row without filters is left at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline.sampling import state

BLOCK = 4096

_INV_TEMPERATURE = tl.constexpr(state.INV_TEMPERATURE)
_TOP_P = tl.constexpr(state.TOP_P)
_MIN_P = tl.constexpr(state.MIN_P_COLUMN)
_NUM_FLOATS = tl.constexpr(state.NUM_FLOATS)
_TOP_K = tl.constexpr(state.TOP_K)
_NUM_INTS = tl.constexpr(state.NUM_INTS)
_BELOW_ALL = tl.constexpr(-(2**31) - 1)  # below the key of every number


@triton.jit
def _key(x):
    """int64 of fp32 x that orders as x does; both zeros have one key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _weight(x, top, inv_temperature, min_p, COUNT: tl.constexpr):
    """fp64: 1 each to count tokens, else the probability over the largest one, 0 below min_p."""
    if COUNT:
        return tl.where(x == x, 1.0, 1.0).to(tl.float64)
    weight = tl.exp((x - top) * inv_temperature)
    return tl.where(weight >= min_p, weight, 0.0).to(tl.float64)


@triton.jit
def _above(
    row_ptr, vocab_size, top, inv_temperature, min_p, t1, t2, t3, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """Weight of the tokens with keys above each of three thresholds."""
    sum1 = tl.zeros((BLOCK,), tl.float64)
    sum2 = tl.zeros((BLOCK,), tl.float64)
    sum3 = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        inside = tokens < vocab_size
        x = tl.load(row_ptr + tokens, mask=inside, other=-float("inf"))
        key = _key(x)
        weight = tl.where(inside, _weight(x, top, inv_temperature, min_p, COUNT), 0.0)
        sum1 += tl.where(key > t1, weight, 0.0)
        sum2 += tl.where(key > t2, weight, 0.0)
        sum3 += tl.where(key > t3, weight, 0.0)
    return tl.sum(sum1, axis=0), tl.sum(sum2, axis=0), tl.sum(sum3, axis=0)


@triton.jit
def _edge(row_ptr, vocab_size, top, inv_temperature, min_p, goal, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest key above which there is less than ``goal``, and how much there is."""
    high = _key(top)  # nothing is above it
    low = tl.full((), _BELOW_ALL, tl.int64)
    found = tl.full((), 0.0, tl.float64)
    while high - low > 1:
        width = high - low
        t1 = low + width // 4
        t2 = low + width // 2
        t3 = low + (3 * width) // 4
        m1, m2, m3 = _above(
            row_ptr, vocab_size, top, inv_temperature, min_p, t1, t2, t3, COUNT=COUNT, BLOCK=BLOCK
        )
        # t1 may be low itself, which is known not to do (or is below all keys, and then all tokens are kept).
        in1, in2, in3 = m1 < goal, m2 < goal, m3 < goal
        found = tl.where(in1, m1, tl.where(in2, m2, tl.where(in3, m3, found)))
        high = tl.where(in1, t1, tl.where(in2, t2, tl.where(in3, t3, high)))
        low = tl.where(in1, low, tl.where(in2, t1, tl.where(in3, t2, t3)))
    return high, found


@triton.jit
def _drop(
    row_ptr,
    vocab_size,
    top,
    inv_temperature,
    min_p,
    edge,
    above,
    goal,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write -inf over the tokens behind the edge, and over those below min_p."""
    num_equal = tl.full((), 0, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        inside = tokens < vocab_size
        x = tl.load(row_ptr + tokens, mask=inside, other=-float("inf"))
        key = _key(x)
        weight = _weight(x, top, inv_temperature, min_p, COUNT)
        equal = (inside & (key == edge)).to(tl.int32)
        before = num_equal + tl.cumsum(equal, axis=0) - equal  # equal ones with lower ids
        keep = (key > edge) | ((equal == 1) & (above + before.to(tl.float64) * weight < goal))
        if not COUNT:
            keep = keep & (tl.exp((x - top) * inv_temperature) >= min_p)
        tl.store(row_ptr + tokens, -float("inf"), mask=inside & (keep == 0))
        num_equal += tl.sum(equal, axis=0)


@triton.jit
def _keep_kernel(logits_ptr, slots_ptr, floats_ptr, ints_ptr, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    inv_temperature = tl.load(floats_ptr + slot * _NUM_FLOATS + _INV_TEMPERATURE).to(tl.float32)
    top_p = tl.load(floats_ptr + slot * _NUM_FLOATS + _TOP_P)
    min_p = tl.load(floats_ptr + slot * _NUM_FLOATS + _MIN_P).to(tl.float32)
    top_k = tl.load(ints_ptr + slot * _NUM_INTS + _TOP_K)
    row_ptr = logits_ptr + row * vocab_size
    random = inv_temperature > 0.0
    by_count = random & (top_k < vocab_size)
    by_mass = random & (top_p < 1.0)
    by_ratio = random & (min_p > 0.0)
    if by_count | by_mass | by_ratio:
        best = tl.full((BLOCK,), -float("inf"), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            best = tl.maximum(best, tl.load(row_ptr + tokens, mask=tokens < vocab_size, other=-float("inf")))
        top = tl.max(best, axis=0)
        if by_count:
            goal = top_k.to(tl.float64)
            edge, above = _edge(row_ptr, vocab_size, top, inv_temperature, min_p, goal, True, BLOCK)
            _drop(row_ptr, vocab_size, top, inv_temperature, min_p, edge, above, goal, True, BLOCK)
            tl.debug_barrier()  # what is read next was written here
        if by_mass | by_ratio:
            edge = tl.full((), _BELOW_ALL, tl.int64)
            above = tl.full((), 0.0, tl.float64)
            goal = tl.full((), 0.0, tl.float64)
            if by_mass:
                total, _, _ = _above(
                    row_ptr, vocab_size, top, inv_temperature, min_p, edge, edge, edge, False, BLOCK
                )
                goal = top_p * total
                edge, above = _edge(row_ptr, vocab_size, top, inv_temperature, min_p, goal, False, BLOCK)
            _drop(row_ptr, vocab_size, top, inv_temperature, min_p, edge, above, goal, False, BLOCK)


def keep_likely(logits: Tensor, slots: Tensor, floats: Tensor, ints: Tensor) -> None:
    """Set the tokens that min_p, top_k and top_p drop to -inf; rows that are greedy or have none stay.

    Args:
        logits: [Q, V] fp32, contiguous, changed in place.
        slots: [Q] integer: slot of a row.
        floats, ints: the state's tables.
    """
    Q, V = logits.shape
    _keep_kernel[(Q,)](logits, slots, floats, ints, V, BLOCK=BLOCK, num_warps=16)
