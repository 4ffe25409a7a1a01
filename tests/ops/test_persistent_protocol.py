"""How blocks of the persistent kernel give each other results without meeting, as a small model.

The phases are those of a real pass; the blocks are generators, run in any order; and memory is as bad as can
be: stores of a block reach it in any order, but for fences and stores to one place. Nobody may see results of
another phase than he should, and nobody may wait for ever.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from paceline.models.attention import KVCache
from paceline.models.config import Qwen3Config
from paceline.models.fields import Fields
from paceline.models.qwen3 import Qwen3ForCausalLM
from paceline.ops.persistent.flow import blank_at_first, ranges, results, source
from paceline.ops.persistent.phases import Attend, Phase, Product
from paceline.runtime.few_rows import TargetPass, Workspace

BLOCKS = 4
LAYERS = 4
BLANK = -1
THERE = -2
"""What a launch finds: the embeddings of its tokens."""

Cell = tuple[int, int]
"""A tensor's address, and the part of it that one block writes."""
Step = tuple[str, Cell, int]


@pytest.fixture(scope="module")
def phases() -> list[Phase]:
    """A pass of some layers as it is written down for the kernel."""
    fields = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 64,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
    }
    config = Qwen3Config.from_fields(Fields(fields | {"model_type": "qwen3"}, "a test"))
    model = Qwen3ForCausalLM(config, device="cpu", dtype=torch.float32)
    cache = KVCache.allocate(LAYERS, 2, 16, 2, 16, dtype=torch.float32, device="cpu")
    made = TargetPass(model, cache, Workspace(model, None), 1, 1)
    return made._program._phases


def at(tensor: Tensor) -> int:
    return tensor.data_ptr()


def block(phases: Sequence[Phase], me: int, fences: bool) -> Iterator[Step]:
    """What one block does, step by step: await a cell's value, store one, or let all stores arrive.

    Each of two blocks attends to what three have written, and the others are idle; all else is read whole.
    """
    last: dict[int, int] = {}  # by tensor: the phase whose results it should hold
    for number, phase in enumerate(phases):
        heads = range(2)
        attends = isinstance(phase, Attend)
        if not attends or me in heads:
            input = source(phase)
            halves = heads if number and isinstance(phases[number - 1], Attend) else range(BLOCKS)
            for part in [me, me + 1, me + 2] if attends else random.sample(halves, len(halves)):
                yield "await", (at(input), part), last.get(at(input), THERE)
        if isinstance(phase, Product) and phase.forgets:
            for tensor in phase.forgets:  # not this block's own part: whose does not matter
                yield "store", (at(tensor), (me + 1) % BLOCKS), BLANK
            if fences:
                yield "fence", (0, 0), 0
        if isinstance(phase, Product) and phase.before is not None:
            yield "await", (at(phase.before), me), last.get(at(phase.before), THERE)
        for tensor in results(phase):
            if not attends or me in heads:
                yield "store", (at(tensor), me), number
            last[at(tensor)] = number


def launch(phases: Sequence[Phase], seed: int, fences: bool = True) -> str:
    """Run the phases once in an order drawn from ``seed``: ``fine``, or what went wrong."""
    draw = random.Random(seed)
    random.seed(seed)
    blank = blank_at_first(phases)
    first = {
        at(source(phase))
        for phase in phases
        if not any(start <= at(source(phase)) < end for start, end in blank)
    }
    memory: dict[Cell, int] = {(tensor, part): THERE for tensor in first for part in range(BLOCKS)}
    blocks = [block(phases, me, fences) for me in range(BLOCKS)]
    steps: list[Step | None] = [next(each) for each in blocks]
    stores: list[list[tuple[Cell, int]]] = [[] for _ in blocks]  # on their way
    pace = [draw.choice([1, 5, 30]) for _ in range(2 * BLOCKS)]  # some blocks and memories are slow

    def can(me: int) -> bool:
        step = steps[me]
        if step is None:
            return False
        kind, cell, _ = step
        own = [value for place, value in stores[me] if place == cell]  # a block sees its own stores
        return {
            "await": bool(own) or memory.get(cell, BLANK) != BLANK,
            "store": True,
            "fence": not stores[me],
        }[kind]

    while any(step is not None for step in steps):
        acts: list[tuple[Callable[[int], str | None], int]] = []
        weights = []

        def arrive(me: int) -> None:
            cell, _ = draw.choice(stores[me])
            i = next(i for i, (place, _) in enumerate(stores[me]) if place == cell)
            memory[cell] = stores[me].pop(i)[1]

        def advance(me: int) -> str | None:
            step = steps[me]
            assert step is not None
            kind, cell, value = step
            if kind == "store":
                stores[me].append((cell, value))
            elif kind == "await":
                own = [there for place, there in stores[me] if place == cell]
                seen = own[-1] if own else memory[cell]
                if seen != value:
                    return f"block {me} wanted results of phase {value} and saw those of {seen}"
            steps[me] = next(blocks[me], None)
            return None

        for me in range(BLOCKS):
            if stores[me]:
                acts.append((arrive, me))
                weights.append(pace[me])
            if can(me):
                acts.append((advance, me))
                weights.append(pace[BLOCKS + me])
        if not acts:
            return "all wait for ever"
        act, me = draw.choices(acts, weights)[0]
        if wrong := act(me):
            return wrong
    return "fine"


def outcomes(phases: Sequence[Phase], fences: bool = True) -> set[str]:
    return {launch(phases, seed, fences) for seed in range(60)}


def test_no_block_sees_what_it_should_not(phases: list[Phase]) -> None:
    assert outcomes(phases) == {"fine"}


def early(phases: Sequence[Phase]) -> list[Phase]:
    """The same, but what is forgotten is forgotten a phase too early."""
    products = list(phases)
    for i, phase in enumerate(phases):
        if isinstance(phase, Product) and phase.forgets:
            before = products[i - 1]
            assert isinstance(before, Product)
            products[i - 1] = dataclasses.replace(before, forgets=phase.forgets)
            products[i] = dataclasses.replace(phase, forgets=())
    return products


def single(phases: Sequence[Phase]) -> list[Phase]:
    """The same, but without two buffers for what is between attention and MLP."""
    middles = list(
        dict.fromkeys(at(p.out) for p in phases if isinstance(p, Product) and p.before is not None)
    )
    kept = {at(p.out): p.out for p in phases if isinstance(p, Product)}

    def swap(tensor: Tensor) -> Tensor:
        return kept[middles[0]] if at(tensor) == middles[2] else tensor

    assert len(middles) == 3, "two in turn, and the residual stream"
    return [
        dataclasses.replace(
            p,
            source=swap(p.source),
            out=swap(p.out),
            before=None if p.before is None else swap(p.before),
            forgets=tuple(map(swap, p.forgets)),
        )
        if isinstance(p, Product)
        else p
        for p in phases
    ]


def never(phases: Sequence[Phase]) -> list[Phase]:
    """The same, but nothing is forgotten."""
    return [dataclasses.replace(p, forgets=()) if isinstance(p, Product) else p for p in phases]


@pytest.mark.parametrize("mutant", [early, single, never])
def test_the_model_sees_a_mistake(
    phases: list[Phase], mutant: Callable[[Sequence[Phase]], list[Phase]]
) -> None:
    assert outcomes(mutant(phases)) != {"fine"}


def test_the_model_sees_a_missing_fence(phases: list[Phase]) -> None:
    assert outcomes(phases, fences=False) != {"fine"}


def test_what_is_blank_at_first(phases: list[Phase]) -> None:
    """All that blocks give each other, but the embeddings, which are there, and the logits, which go out."""
    blank = blank_at_first(phases)
    found = ranges([source(phases[0])])[0]
    assert all(end <= found[0] or found[1] <= start for start, end in blank)
    given = [tensor for phase in phases[:-1] for tensor in results(phase) if at(tensor) != found[0]]
    assert blank == ranges(given)
