"""Lists of sampling parameters as device tables indexed by slot: allowed ids, bias, stop ids, bad words.

Every row of a table is as wide as a request may make it, so that a step can read the lists of its rows with
a few gathers and needs nothing from the host: that is what lets such requests run in captured rounds. Where
an entry stands for nothing, its id is one that no other entry of the row has, so that the entries of a row
can be gathered, changed and scattered back without two of them meeting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.sampling.noise import GOLDEN64, row_keys
from paceline.sampling.params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS_IDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from paceline.sampling.seeds import mix64, signed64

Ids = np.ndarray[Any, np.dtype[np.int64]]


class ListTables:
    """The lists of S slots over a vocabulary of V.

    Attributes:
        allowed: [S, V] bool, what may be drawn.
        bias_ids, bias: [S, B] int64 and fp32; the bias of an id that stands for nothing is 0.
        stop_ids, num_stops: [S, E] int64 and [S, 1] int64: the first so many are masked until min_tokens.
        word_last, word_prefix, word_hash: [S, W] int64: a bad word's last token, how many tokens stand before
            it, -1 for no word, and their ``suffix_hashes``.
    """

    def __init__(self, num_slots: int, vocab_size: int, eos: Sequence[int], device: torch.device) -> None:
        def table(width: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(num_slots, width, dtype=dtype, device=device)

        self._eos = list(eos)
        self._vocab_size = vocab_size
        self.allowed = table(vocab_size, torch.bool).fill_(True)
        num_bias = min(MAX_LOGIT_BIAS, vocab_size)
        self.bias_ids, self.bias = table(num_bias), table(num_bias, torch.float32)
        self.bias_ids += torch.arange(num_bias, device=device)
        self.stop_ids = table(min(MAX_STOP_TOKEN_IDS + len(self._eos), vocab_size))
        self.stop_ids += torch.arange(self.stop_ids.shape[1], device=device)
        self.num_stops = table(1)
        self.word_last, self.word_hash = table(MAX_BAD_WORDS_IDS), table(MAX_BAD_WORDS_IDS)
        self.word_prefix = table(MAX_BAD_WORDS_IDS) - 1

    def set(self, slot: int, p: SamplingParams) -> None:
        """Store the lists of a slot's new tenant, none included."""
        allowed = np.full(self._vocab_size, p.allowed_token_ids is None)
        allowed[p.allowed_token_ids or []] = True
        bias = p.logit_bias or {}
        values = np.zeros(self.bias.shape[1], dtype=np.float32)
        values[: len(bias)] = list(bias.values())
        stops = np.unique(np.array([*self._eos, *p.stop_ids] if p.min_tokens else [], dtype=np.int64))
        words = np.zeros((3, MAX_BAD_WORDS_IDS), dtype=np.int64)
        words[1] = -1
        for i, word in enumerate(p.bad_words_ids):
            words[:, i] = word[-1], len(word) - 1, _suffix_hash(word[:-1])
        for target, row in (
            (self.allowed, allowed),
            (self.bias_ids, self._padded(list(bias), self.bias_ids.shape[1])),
            (self.bias, values),
            (self.stop_ids, self._padded(stops, self.stop_ids.shape[1])),
            (self.num_stops, np.array([len(stops)])),
            (self.word_last, words[0]),
            (self.word_prefix, words[1]),
            (self.word_hash, words[2]),
        ):
            host = torch.from_numpy(row)
            target[slot].copy_(host.pin_memory() if target.is_cuda else host, non_blocking=True)

    def _padded(self, ids: Sequence[int] | Ids, width: int) -> Ids:
        """``ids``, which are distinct, followed by others up to ``width``."""
        given = np.asarray(ids, dtype=np.int64)
        free = np.ones(width, dtype=np.bool_)  # as many are given as are not free among the first, at least
        free[given[given < width]] = False
        return np.concatenate([given, np.flatnonzero(free)])[:width]


def suffix_hashes(tokens: Tensor) -> Tensor:
    """64-bit hashes of a row's last 0, 1, …, w tokens: a sum of mixed (token, distance from the end).

    Equal suffixes have equal hashes; two different ones do with chance 2^-64.

    Args:
        tokens: [n, w] int64, the last one first.

    Returns:
        [n, w + 1] int64.
    """
    n, width = tokens.shape
    distance = torch.arange(width, device=tokens.device).expand(n, -1)
    mixed = row_keys(tokens.reshape(-1), distance.reshape(-1)).view(torch.int64).view(n, width)
    return torch.cat([mixed.new_zeros(n, 1), mixed.cumsum(-1)], dim=1)


def _suffix_hash(prefix: Sequence[int]) -> int:
    """``suffix_hashes`` of all of a word's tokens but its last, on the host."""
    return signed64(sum(mix64(token + (i + 1) * GOLDEN64) for i, token in enumerate(reversed(prefix))))


LONGEST_PREFIX = MAX_BAD_WORD_TOKENS - 1
"""Most tokens that stand before the last one of a bad word."""
