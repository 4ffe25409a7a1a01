"""Acceptance at a given rate instead of by the rule: what a round costs, measured without a trained drafter.

A synthetic engine drafts, verifies and commits as always, but how many drafts stand is drawn: each stands
with the same chance when all before it do. Its tokens mean nothing.
"""

from __future__ import annotations

from paceline.errors import ConfigError


def conditional_rate(accept_length: float, num_drafts: int) -> float:
    """The chance p of a draft to stand, if all before it do, for which rounds commit ``accept_length`` tokens
    on average: 1 + p + p^2 + ... + p^num_drafts.

    Raises:
        ConfigError: a length that no p in [0, 1] gives.
    """
    if not 1 <= accept_length <= num_drafts + 1:
        raise ConfigError(
            f"synthetic_accept_length is {accept_length}; with {num_drafts} drafts per round it must lie in "
            f"1..{num_drafts + 1}."
        )
    low, high = 0.0, 1.0
    for _ in range(60):  # the sum grows with p
        rate = (low + high) / 2
        if sum(rate**j for j in range(num_drafts + 1)) < accept_length:
            low = rate
        else:
            high = rate
    return high
