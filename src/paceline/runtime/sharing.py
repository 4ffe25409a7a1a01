"""Keys that spans of a step have in common, as attention wants to hear of them (``ops.CommonKeys``).

A group is worth an attention of its own when that saves enough readings: beside the keys it reads once, it
costs a launch per layer and the merging of two results for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from torch import Tensor

from paceline.cache.sharing import MAX_GROUPS, saves_enough
from paceline.models.qwen3 import Qwen3ForCausalLM
from paceline.ops import CommonKeys
from paceline.runtime.plan import Span

NUM_VALUES = 3 * (MAX_GROUPS + 1) + 1
"""Of :func:`group_values`, beside one for each sequence."""


def attends_together(model: Qwen3ForCausalLM) -> bool:
    """Whether attention makes use of common keys: not where it is deterministic, nor behind a window."""
    specs = [layer.self_attn.spec for layer in model.decoder_layers()]
    return not any(spec.deterministic or spec.window is not None for spec in specs)


def group_values(spans: Sequence[Span], num_seqs: int) -> np.ndarray | None:
    """The groups worth it among the spans, for :class:`Groups`; None if there are none.

    Args:
        num_seqs: sequences of the step, the spans' and others behind them.

    Returns:
        [NUM_VALUES + num_seqs] int32.
    """
    firsts: list[int] = [0]
    slots: list[int] = []
    lens: list[int] = []
    of_seqs = np.zeros(num_seqs, dtype=np.int32)
    first = 0
    for group, members in groupby(spans, key=lambda span: span.group):
        found = list(members)
        common, start, first = found[0].common, first, first + len(found)
        if group and saves_enough(len(found), common) and len(lens) < MAX_GROUPS:
            if start > firsts[-1]:  # those between two groups have nothing in common
                firsts.append(start)
                slots.append(found[0].slot)
                lens.append(0)
            firsts.append(first)
            slots.append(found[0].slot)
            lens.append(common)
            of_seqs[start:first] = common
    if not lens:
        return None
    missing = MAX_GROUPS + 1 - len(lens)
    firsts += [num_seqs] * missing
    values = [*firsts, *slots, *[slots[0]] * missing, *lens, *[0] * missing]
    return np.concatenate((np.array(values, dtype=np.int32), of_seqs))


class Groups(NamedTuple):
    """The groups of a step on the device; see ``ops.CommonKeys``.

    Attributes:
        firsts: [G + 1] int32, first sequence of each group.
        slots, lens: [G] int32.
        of_seqs: [B] int32.
    """

    firsts: Tensor
    slots: Tensor
    lens: Tensor
    of_seqs: Tensor

    @staticmethod
    def of(values: Tensor) -> Groups:
        """From what :func:`group_values` gives."""
        count = MAX_GROUPS + 1
        sizes = [count + 1, count, count, len(values) - NUM_VALUES]
        return Groups(*values.split(sizes))

    def keys(self, row_start: Tensor) -> CommonKeys:
        """For rows that start at ``row_start`` [B + 1] for each sequence."""
        return CommonKeys(row_start[self.firsts], self.slots, self.lens, self.of_seqs)
