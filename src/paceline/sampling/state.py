"""Sampling parameters of the running sequences, indexed by slot, and what a step's rows need of them.

Parameters live on the device in tables, so a step reads its rows' values with a few gathers: numbers in two
dense ones, lists (logit bias, stop ids, bad words, allowed ids) in those of ``lists.py``. The host also keeps
a word of flags per slot, so a feature no row uses costs nothing and nothing is ever read back from the
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from paceline.sampling.lists import ListTables
from paceline.sampling.params import SamplingParams
from paceline.sampling.seeds import mix64

IntArray = np.ndarray[Any, np.dtype[np.int64]]

# Flags of a slot. A filter that cannot change a greedy choice is not set for a greedy slot.
RANDOM = 1
SHORT = 2  # a top_k of at most SHORT_K: its row is served from its top_k largest tokens
LARGE = 4  # a larger top_k
NUCLEUS = 8  # top_p alone
TRUNCATED = SHORT | LARGE | NUCLEUS  # at most one of the three
MIN_P = 16
PENALTY = 32
BIAS = 64
ALLOWED = 128
BAD_WORDS = 256
MIN_TOKENS = 512
LISTS = BIAS | ALLOWED | BAD_WORDS | MIN_TOKENS

SHORT_K = 1024
"""A top_k up to here is served from the row's ``top_k`` largest tokens; above, the row is sorted."""

# Columns of the float64 table. Not fp32: its 0.8 is above 0.8, and of ten equal tokens would keep nine.
INV_TEMPERATURE, TOP_P, MIN_P_COLUMN, PRESENCE, FREQUENCY, REPETITION, NUM_FLOATS = range(7)
# Columns of the int64 table.
SEED_KEY, TOP_K, PROMPT_LEN, MIN_LEN, NUM_INTS = range(5)

NO_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class SlotSampling:
    """What ``SamplingState.set_slots`` stores for one sequence.

    Attributes:
        slot: row of the tables.
        params: validated parameters.
        seed: of this sequence, any 64-bit integer (``seeds.sequence_seed``).
        prompt_len: tokens of the prompt; later ones are output, also after a preemption.
    """

    slot: int
    params: SamplingParams
    seed: int
    prompt_len: int


@dataclass(frozen=True)
class SamplingFeatures:
    """What the rows of one step need, known to the host. Row sets are indices into the step's sampled rows.

    Attributes:
        slots: [Q] slot of each sampled row.
        greedy: rows that take the most likely token.
        plain: rows that draw from all (unmasked) tokens.
        plain_min_p: one of the plain rows uses min_p.
        short: rows that draw from at most ``short_k`` tokens in order (a small top_k).
        short_k: the largest top_k among ``short``.
        nucleus: rows with top_p and no top_k.
        large: rows with a large top_k.
        penalty, bias, allowed, bad_words, min_tokens: rows that use the parameter.
        logprobs: rows that report log-probabilities.
        num_top: the largest number of them asked for.
    """

    slots: IntArray
    greedy: IntArray
    plain: IntArray
    plain_min_p: bool
    short: IntArray
    short_k: int
    nucleus: IntArray
    large: IntArray
    penalty: IntArray
    bias: IntArray
    allowed: IntArray
    bad_words: IntArray
    min_tokens: IntArray
    logprobs: IntArray
    num_top: int

    @property
    def num_rows(self) -> int:
        return len(self.slots)


FixedKind = Literal["greedy", "random", "short", "filtered", "full"]
"""What sampling without the host's help must be able to do: no draws at random; draws from all tokens; draws
from at most ``FIXED_K`` tokens in order (top_k, with top_p and min_p); any filter; every parameter, with up
to ``FIXED_TOP`` log-probabilities. Each can do what those before it can."""

FIXED_KINDS: tuple[FixedKind, ...] = ("greedy", "random", "short", "filtered", "full")

FIXED_K = 64
FIXED_TOP = 20

NO_ROWS: IntArray = np.zeros(0, dtype=np.int64)


CPU_PART_BYTES = 2**18
"""On the CPU, rows are worked on in parts of about so many bytes of logits, so that temporaries stay in the
cache: several times faster at 64 rows of 7,680 than all at once."""
GPU_PART_BYTES = 2**26
"""The same on a GPU, where it bounds memory: a full sort needs twenty times its logits."""


def part_rows(logits: Tensor) -> int:
    """How many rows of ``logits`` [n, V] fp32 are worked on together."""
    size = CPU_PART_BYTES if logits.device.type == "cpu" else GPU_PART_BYTES
    return max(size // (4 * logits.shape[1]), 1)


def parts(members: IntArray, logits: Tensor) -> list[IntArray]:
    """Rows in pieces that are worked on together."""
    size = part_rows(logits)
    return [members[i : i + size] for i in range(0, len(members), size)]


def upload(array: np.ndarray[Any, Any] | Sequence[Any], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Host array to device tensor without waiting for the device."""
    host = torch.as_tensor(array, dtype=dtype)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


class SamplingState:
    """Slot-indexed sampling parameters.

    Attributes:
        floats: [num_slots, NUM_FLOATS] float64 on the device; inverse temperature 0 stands for greedy.
        ints: [num_slots, NUM_INTS] int64 on the device.
        token_ids: [V] int32 on the device: 0, 1, 2, …
        lists: the lists of all slots.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        *,
        eos_token_ids: Sequence[int] = (),
        device: torch.device | str,
    ) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.floats = torch.zeros(num_slots, NUM_FLOATS, dtype=torch.float64, device=self.device)
        self.ints = torch.zeros(num_slots, NUM_INTS, dtype=torch.int64, device=self.device)
        self.token_ids = torch.arange(vocab_size, dtype=torch.int32, device=self.device)
        self.lists = ListTables(num_slots, vocab_size, eos_token_ids, self.device)
        self._flags = np.zeros(num_slots, dtype=np.int64)
        self._top_k = np.full(num_slots, NO_LIMIT, dtype=np.int64)
        self._num_top = np.full(num_slots, -1, dtype=np.int64)

    def set_slots(self, entries: Sequence[SlotSampling]) -> None:
        """Store the parameters of sequences that (re)enter; one upload per table, no wait for the device."""
        if not entries:
            return
        for e in entries:
            flags, before = _flags(e.params, self.vocab_size), int(self._flags[e.slot])
            if (flags | before) & LISTS:
                self.lists.set(e.slot, e.params)
            self._flags[e.slot] = flags
            self._top_k[e.slot] = _top_k(e.params, self.vocab_size)
            asked = e.params.logprobs
            self._num_top[e.slot] = -1 if asked is None else self.vocab_size if asked == -1 else asked
        slots = upload([e.slot for e in entries], self.device, torch.int64)
        floats = upload([_float_row(e.params) for e in entries], self.device, torch.float64)
        ints = upload([_int_row(e, self.vocab_size) for e in entries], self.device, torch.int64)
        self.floats.index_copy_(0, slots, floats)
        self.ints.index_copy_(0, slots, ints)

    def fixed_kind(self, slot: int) -> FixedKind | None:
        """What ``sample_fixed`` must be able to do for a slot; None when it cannot report so many
        log-probabilities.
        """
        flags = int(self._flags[slot])
        if self._num_top[slot] > FIXED_TOP:
            return None
        if self._num_top[slot] >= 0 or flags & (LISTS | PENALTY):
            return "full"
        if flags & SHORT and self._top_k[slot] <= FIXED_K:
            return "short"
        if flags & (TRUNCATED | MIN_P):
            return "filtered"
        return "random" if flags & RANDOM else "greedy"

    def reports(self, slot: int) -> bool:
        """Whether a slot's rows report log-probabilities."""
        return bool(self._num_top[slot] >= 0)

    def any_random(self, slots: Sequence[int]) -> bool:
        """Whether any of these slots draws at random rather than greedily."""
        return bool((self._flags[np.asarray(slots, dtype=np.int64)] & RANDOM).any())

    def features(self, slots: Sequence[int] | IntArray) -> SamplingFeatures:
        """What a step needs whose sampled rows, in order, belong to these slots."""
        slots = np.asarray(slots, dtype=np.int64)
        flags, num_top = self._flags[slots], self._num_top[slots]
        union = int(np.bitwise_or.reduce(flags, initial=0))

        def having(mask: int, value: int) -> IntArray:
            return np.flatnonzero((flags & mask) == value) if union & value == value else NO_ROWS

        short = having(SHORT, SHORT)
        plain = having(RANDOM | TRUNCATED, RANDOM)
        most = int(num_top.max(initial=-1))
        return SamplingFeatures(
            slots=slots,
            greedy=having(RANDOM, 0),
            plain=plain,
            plain_min_p=bool((flags[plain] & MIN_P).any()) if union & MIN_P else False,
            short=short,
            short_k=int(self._top_k[slots[short]].max(initial=0)),
            nucleus=having(TRUNCATED, NUCLEUS),
            large=having(TRUNCATED, LARGE),
            penalty=having(PENALTY, PENALTY),
            bias=having(BIAS, BIAS),
            allowed=having(ALLOWED, ALLOWED),
            bad_words=having(BAD_WORDS, BAD_WORDS),
            min_tokens=having(MIN_TOKENS, MIN_TOKENS),
            logprobs=np.flatnonzero(num_top >= 0) if most >= 0 else NO_ROWS,
            num_top=max(most, 0),
        )


def _top_k(p: SamplingParams, vocab_size: int) -> int:
    return p.top_k if 0 < p.top_k < vocab_size else NO_LIMIT


def _flags(p: SamplingParams, vocab_size: int) -> int:
    flags = 0
    if not p.greedy:
        flags |= RANDOM
        top_k = _top_k(p, vocab_size)
        if top_k < NO_LIMIT:
            flags |= SHORT if top_k <= SHORT_K else LARGE
        elif p.top_p < 1.0:
            flags |= NUCLEUS
        flags |= MIN_P * (p.min_p > 0.0)
    flags |= PENALTY * (p.presence_penalty != 0 or p.frequency_penalty != 0 or p.repetition_penalty != 1)
    flags |= BIAS * bool(p.logit_bias)
    flags |= ALLOWED * (p.allowed_token_ids is not None)
    flags |= BAD_WORDS * bool(p.bad_words_ids)
    flags |= MIN_TOKENS * (p.min_tokens > 0)
    return flags


def _float_row(p: SamplingParams) -> list[float]:
    row = [0.0] * NUM_FLOATS
    row[INV_TEMPERATURE] = 0.0 if p.greedy else 1.0 / p.temperature
    row[TOP_P] = p.top_p
    row[MIN_P_COLUMN] = p.min_p
    row[PRESENCE] = p.presence_penalty
    row[FREQUENCY] = p.frequency_penalty
    row[REPETITION] = p.repetition_penalty
    return row


def _int_row(e: SlotSampling, vocab_size: int) -> list[int]:
    row = [0] * NUM_INTS
    row[SEED_KEY] = mix64(e.seed)
    row[TOP_K] = _top_k(e.params, vocab_size)
    row[PROMPT_LEN] = e.prompt_len
    row[MIN_LEN] = e.prompt_len + e.params.min_tokens
    return row
