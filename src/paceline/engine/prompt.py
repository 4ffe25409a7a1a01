"""A prompt as the engine keeps it: token ids in one array, checked all at once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from paceline.errors import RequestError, shown


def prompt_array(token_ids: Sequence[int], vocab_size: int) -> array[int]:
    """The ids as uint32.

    Raises:
        RequestError: there are none, or one is not below ``vocab_size``; names the first.
    """
    if not token_ids:
        raise RequestError("The prompt has no tokens; give at least one.", param="prompt")
    tokens: array[int] | None = None
    with suppress(OverflowError):  # negative, or beyond uint32
        tokens = array("I", token_ids)
    if tokens is None or np.frombuffer(tokens, np.uint32).max() >= vocab_size:
        bad = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise RequestError(
            f"The prompt contains token id {shown(bad)}; ids must lie in 0..{vocab_size - 1}.", param="prompt"
        )
    return tokens
