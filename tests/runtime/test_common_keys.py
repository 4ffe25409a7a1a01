"""Groups of spans as the device gets them, and that a whole engine tells attention nothing but the truth."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from paceline import LLM, SamplingParams
from paceline.cache import sharing
from paceline.cache.sharing import MAX_GROUPS, MIN_SAVED_TOKENS
from paceline.ops import RowLayout, reference_attention
from paceline.runtime.plan import Span
from paceline.runtime.sharing import NUM_VALUES, Groups, group_values

TOKENS = MIN_SAVED_TOKENS


def spans(*groups: tuple[int, int, int]) -> list[Span]:
    """Of (group, members, common tokens); their slots are 10, 11, ..."""
    kinds = [(group, common) for group, members, common in groups for _ in range(members)]
    return [Span(10 + i, 1, group=group, common=common) for i, (group, common) in enumerate(kinds)]


@pytest.mark.parametrize(
    ("given", "firsts", "slots", "lens", "of_seqs"),
    [
        (spans((1, 2, TOKENS)), [0, 2], [10], [TOKENS], [TOKENS] * 2),
        (spans((1, 3, TOKENS // 2), (0, 2, 0)), [0, 3], [10], [TOKENS // 2], [TOKENS // 2] * 3 + [0] * 2),
        (spans((1, 2, 9), (2, 2, TOKENS)), [0, 2, 4], [12, 12], [0, TOKENS], [0, 0, TOKENS, TOKENS]),
        (spans((1, 2, TOKENS), (2, 2, TOKENS)), [0, 2, 4], [10, 12], [TOKENS] * 2, [TOKENS] * 4),
    ],
)
def test_groups(
    given: list[Span], firsts: list[int], slots: list[int], lens: list[int], of_seqs: list[int]
) -> None:
    num_seqs = len(given) + 3  # a round with empty places
    values = group_values(given, num_seqs)
    assert values is not None and len(values) == NUM_VALUES + num_seqs
    groups = Groups.of(torch.from_numpy(values))
    count, rest = len(lens), MAX_GROUPS + 1 - len(lens)
    assert groups.firsts.tolist() == firsts + [num_seqs] * rest
    assert groups.slots.tolist()[:count] == slots
    assert groups.lens.tolist() == lens + [0] * rest
    assert groups.of_seqs.tolist() == [*of_seqs, 0, 0, 0]
    row_start = 5 * torch.arange(num_seqs + 1, dtype=torch.int32)
    assert groups.keys(row_start).row_start.tolist() == [5 * first for first in groups.firsts.tolist()]


@pytest.mark.parametrize(
    "given", [[], spans((0, 9, 0)), spans((1, 2, TOKENS - 1)), spans((1, 1, 9 * TOKENS))]
)
def test_groups_that_save_too_little_are_none(given: list[Span]) -> None:
    assert group_values(given, len(given)) is None


def test_more_groups_than_the_device_takes() -> None:
    """The last ones go their own ways."""
    given = spans(*((group, 2, TOKENS + group) for group in range(1, 2 * MAX_GROUPS)))
    values = group_values(given, len(given))
    assert values is not None
    groups = Groups.of(torch.from_numpy(values))
    assert (groups.lens > 0).sum() == MAX_GROUPS
    assert (groups.of_seqs > 0).sum() == 2 * MAX_GROUPS


def test_an_engine_tells_attention_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shared prefixes and a stranger, drafted for: the same tokens, and every layout is right."""
    told: list[int] = []
    attend = reference_attention.paged_attention

    def checked(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, layout: RowLayout, *args: object, **kw: object
    ) -> Tensor:
        if layout.common is not None:
            told.append(check_common(layout, k_cache.shape[1]))
        return attend(q, k_cache, v_cache, layout, *args, **kw)  # type: ignore[arg-type]

    def check_common(layout: RowLayout, block_size: int) -> int:
        common = layout.common
        assert common is not None
        starts, tables = layout.row_start.tolist(), layout.block_tables
        for start, end, slot, keys in zip(
            common.row_start.tolist(),
            common.row_start.tolist()[1:],
            common.slots,
            common.lens.tolist(),
            strict=False,
        ):
            for seq, first in enumerate(starts[:-1]):
                if start <= first < end:
                    assert int(common.of_seqs[seq]) == keys
                    own = int(layout.slots[seq])
                    assert keys <= int(layout.num_computed[own])
                    blocks = keys // block_size
                    assert torch.equal(tables[own, :blocks], tables[int(slot), :blocks])
        return int((common.of_seqs > 0).sum())

    rng = random.Random(0)
    first, second = ([rng.randrange(1000) for _ in range(70)] for _ in "ab")
    prompts = [
        [*prefix, *(rng.randrange(1000) for _ in range(9))] for prefix in (first, second) for _ in range(3)
    ]
    prompts.append([rng.randrange(1000) for _ in range(20)])
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    every = {"verify_planner": "off"}  # small plain rounds know no groups, and may be what is faster
    alone = LLM(enable_prefix_caching=False, device="cpu", speculative_config=every).generate(prompts, params)
    monkeypatch.setattr(sharing, "MIN_SAVED_TOKENS", 1)
    monkeypatch.setattr(reference_attention, "paged_attention", checked)
    together = LLM(device="cpu", speculative_config=every).generate(prompts, params)
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]
    assert max(told) == 6, "all but the stranger"
