"""Cases of the sampler in a captured round.

A greedy row's token must be the likeliest, the lowest id on a tie. A drawn one must have the largest score,
noise included, of what the filters keep by ``filters.kept_prefix``; to a rounding of the score, for
logarithms differ by some between devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from ops_case import Case, Plan, World, num_bytes, score_of
from torch import Tensor

from paceline.sampling.filters import kept_prefix, ordered_top
from paceline.sampling.fixed import sample_fixed
from paceline.sampling.noise import gumbel, row_keys
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import SampleRows
from paceline.sampling.sampler import draw_ordered, draw_plain
from paceline.sampling.state import INV_TEMPERATURE, SEED_KEY, FixedKind, SamplingState, SlotSampling

WAYS: dict[FixedKind, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}],
    "random": [{"temperature": 0.8}],
    "filtered": [
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        {"temperature": 0.6, "top_p": 0.95},
        {"min_p": 0.05},
        {"top_k": 1000},
    ],
}
"""Parameters, in turn of the rows."""

ROUNDING = 1e-5
PROMPT = 16


def plans(world: World) -> Iterator[Plan]:
    """Every kind at 1 to 512 rows."""
    for kind in WAYS:
        for num_rows in world.each(1, 8, 64, 512):
            yield Plan("sample_fixed", f"{kind} R={num_rows}", partial(sample, world, kind, num_rows))


def some_logits(world: World, num_rows: int) -> Tensor:
    """[R, V] like a model's: a few tokens stand out."""
    logits = torch.randn(num_rows, world.vocab, device=world.device) * 2
    height = torch.rand(num_rows, 60, device=world.device) * 8 + 5
    likely = world.ids(world.vocab, num_rows, 60, dtype=torch.int64)
    return logits.scatter_(1, likely, height).to(world.dtype)


def sample(world: World, kind: FixedKind, num_rows: int) -> Case:
    """One token for each of R rows, of as many sequences."""
    logits, ways = some_logits(world, num_rows), WAYS[kind]
    state = SamplingState(num_rows, world.vocab, device=world.device)
    state.set_slots(
        [SlotSampling(i, SamplingParams(**ways[i % len(ways)]), i, PROMPT) for i in range(num_rows)]
    )
    slots = world.whole(range(num_rows))
    positions = slots + PROMPT
    tokens = world.ids(world.vocab, num_rows, PROMPT + num_rows + 1)
    rows, fed = SampleRows(slots, positions, tokens, tokens.shape[1]), tokens[:, :1]

    def run() -> tuple[Tensor, ...]:
        return (sample_fixed(logits, rows, fed, state, kind).tokens,)

    def scores() -> Tensor:
        floats, ints = state.floats[slots], state.ints[slots]
        inverse = floats[:, INV_TEMPERATURE, None].float()
        noise = gumbel(row_keys(ints[:, SEED_KEY], positions + 1), state.token_ids)
        values, ids = ordered_top(logits.float(), world.vocab)
        kept, _ = kept_prefix(values * inverse, floats, ints)
        left = torch.zeros_like(kept).scatter_(1, ids.long(), kept)
        return (logits.float() * inverse + noise).double().masked_fill_(~left, -torch.inf)

    def peer() -> Tensor:
        if kind == "random":
            return draw_plain(logits.float(), rows, state)
        return draw_ordered(logits.float(), rows, state, world.vocab)

    if kind == "greedy":
        return Case(
            run,
            lambda: (logits.argmax(-1).to(torch.int32),),
            num_bytes(logits),
            peer=lambda: logits.argmax(-1),
        )
    return Case(
        run,
        lambda: (scores().amax(1, keepdim=True),),
        num_bytes(logits),
        peer=peer,
        outcome=lambda drawn: (score_of(scores(), drawn),),
        tolerance=ROUNDING,
    )
