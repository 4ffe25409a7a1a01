"""Position-keyed Gumbel noise: the whole randomness of the sampler.

The noise of a token is a function of (sequence seed, absolute position, token id) and nothing else, so a
token can be sampled in any batch, chunk, verify span or hedge and come out the same. It is a counter-based
generator in the sense of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): no state,
any element on its own.

1. **Row key**, once per row, 64-bit wraparound arithmetic. ``seed_key = mix64(seed)`` is made on the host
   (``seeds.py``); here ``key = mix64(seed_key + (position + 1) * GOLDEN64)``, which is SplitMix64 jumped to
   its (position + 1)-th output. ``lo, hi`` are its halves.
2. **Element hash**, 32-bit wraparound arithmetic: two xorshift-multiply rounds with the constants of
   Wellons' "hash prospector" search (a 32-bit finaliser like MurmurHash3's, of lower measured bias), with
   ``lo`` going in before the first and ``hi`` before the second, so that two rows never are shifted copies
   of each other.
3. **Exponential race**: 31 hash bits m make ``v = (m + 1/2) / 2^31`` in (0, 1) and ``E = -log1p(-v)``, a
   unit exponential; the token is ``argmax(logit - log E)`` (the Gumbel-max trick; Maddison et al., "A*
   sampling", 2014). Small v is where a token wins, and there fp32 resolves every one of the 2^31 values:
   noise reaches up to 22.18, so an event of probability 1e-9 still has about its right chance.

The same in Triton, for a token id ``t`` (uint32), row halves ``lo, hi`` (uint32)::

    x = (t * GOLDEN32) ^ lo
    x = (x ^ (x >> 16)) * MUL1 ^ hi
    x = (x ^ asr(x, 15)) * MUL2                  # asr: arithmetic shift, on the int32 reading of x
    m = x ^ asr(x, 15)                           # the sign bit cancels: 0 <= m < 2^31
    v = (m.to(float32) + 0.5) * SCALE
    noise = -log(-log1p(-v))

The arithmetic shifts are deliberate. torch has no logical shift of int32, and masking costs a pass over
[rows, vocab] each. ``x ^ asr(x, s)`` maps exactly two inputs (x and ~x) to each 31-bit output, so it is
uniform; after the key has been mixed in, such pairs are not related in any way a token id could show. The
first shift, where they would be, is a logical one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.sampling.seeds import MIX1, MIX2, signed64

GOLDEN64 = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: SplitMix64's stride
GOLDEN32 = 0x9E3779B1  # 2^32 / golden ratio, odd: spreads neighbouring token ids over all 32 bits
MUL1 = 0x21F0AAAD
MUL2 = 0xD35A2D97
SCALE = 2.0**-31 * (
    1 - 2.0**-23
)  # a hair under 2^-31, so that v stays below 1 after rounding and E is finite


def _signed32(x: int) -> int:
    return x - 2**32 if x >> 31 else x


def _xor_shift64(z: Tensor, bits: int) -> Tensor:
    return z ^ (
        (z >> bits) & ((1 << (64 - bits)) - 1)
    )  # torch shifts arithmetically; the mask makes it logical


def row_keys(seed_keys: Tensor, positions: Tensor) -> Tensor:
    """Keys of rows, to be passed to ``gumbel``.

    Args:
        seed_keys: [Q] int64, ``mix64`` of the sequence seeds. positions: [Q] integer, absolute position at
        which the sampled token will stand (row's own position + 1).

    Returns:
        [Q, 2] int32: the halves (lo, hi) of the 64-bit key.
    """
    z = seed_keys + (positions.to(torch.int64) + 1) * signed64(GOLDEN64)
    z = _xor_shift64(z, 30) * signed64(MIX1)
    z = _xor_shift64(z, 27) * signed64(MIX2)
    z = _xor_shift64(z, 31)
    return z.view(torch.int32).view(-1, 2)  # little-endian: lo first


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise of the given tokens at the given rows.

    Args:
        keys: [Q, 2] int32 from ``row_keys``.
        token_ids: [n] or [Q, n] int32.

    Returns:
        [Q, n] fp32, between -2.8 and 22.2.
    """
    lo, hi = keys[:, :1], keys[:, 1:]
    x = (token_ids * _signed32(GOLDEN32)) ^ lo  # [Q, n]
    shifted = (x >> 16).bitwise_and_(0xFFFF)
    x.bitwise_xor_(shifted).mul_(_signed32(MUL1)).bitwise_xor_(hi)
    torch.bitwise_right_shift(x, 15, out=shifted)
    x.bitwise_xor_(shifted).mul_(_signed32(MUL2))
    torch.bitwise_right_shift(x, 15, out=shifted)
    minus_v = x.bitwise_xor_(shifted).to(torch.float32).add_(0.5).mul_(-SCALE)
    return minus_v.log1p_().neg_().log_().neg_()
