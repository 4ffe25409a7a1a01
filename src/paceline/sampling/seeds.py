"""Seeds of sequences: where the randomness of a request begins. Pure Python, so that the engine can call it.

``mix64`` is the output function of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
generators", OOPSLA 2014, with the constants of Stafford's variant 13): a bijection of 64-bit integers that
changes about half of the output bits when any input bit changes.
"""

from __future__ import annotations

MASK64 = 2**64 - 1
MIX1 = 0xBF58476D1CE4E5B9
MIX2 = 0x94D049BB133111EB


def signed64(x: int) -> int:
    """The two's complement reading of the low 64 bits of x."""
    x &= MASK64
    return x - 2**64 if x >> 63 else x


def mix64(x: int) -> int:
    """SplitMix64's finaliser on the low 64 bits of x; returns a signed 64-bit integer. ``mix64(0) == 0``."""
    z = x & MASK64
    z = (z ^ (z >> 30)) * MIX1 & MASK64
    z = (z ^ (z >> 27)) * MIX2 & MASK64
    return signed64(z ^ (z >> 31))


def sequence_seed(seed: int, index: int) -> int:
    """Seed of the ``index``-th of a request's ``n`` sequences, a signed 64-bit integer.

    The first sequence keeps the request's seed, so asking for more samples does not change the first one.
    The others are far from the seeds a user would write next (seed + index would make request 1's second
    sequence equal to request 2's first).
    """
    return signed64(seed ^ mix64(index))
