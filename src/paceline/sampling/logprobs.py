"""Log-probabilities as the user sees them. No torch: server and engine build and read these."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:  # a server that reports no logprobs need not load it
    import numpy as np


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """One token's log-probability at one position, before temperature, penalties and filters.

    Attributes:
        logprob: natural logarithm.
        rank: 1 for the most likely token; equal logits rank by ascending token id.
        decoded_token: its text, filled in by whoever holds the tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


def position_logprobs(
    token_ids: np.ndarray[Any, Any], logprobs: np.ndarray[Any, Any], rank: int, num_top: int
) -> dict[int, Logprob]:
    """One row of ``LogprobTensors`` as a map from token id, the chosen token first, then the most likely.

    Args:
        token_ids: [1 + K] ids: chosen, then the K most likely in order.
        logprobs: [1 + K] fp32.
        rank: of the chosen token.
        num_top: how many of the K this row asked for (a batch computes the largest number any row wants).

    Returns:
        num_top + 1 entries, or num_top when the chosen token is one of them.
    """
    ids, values = token_ids[: num_top + 1].tolist(), logprobs[: num_top + 1].tolist()
    result = {ids[0]: Logprob(values[0], rank)}
    for i in range(1, len(ids)):
        result.setdefault(ids[i], Logprob(values[i], i))
    return result
