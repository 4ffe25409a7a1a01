"""The persistent kernel against the layered passes, and against itself: any number of rows, the same bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from paceline.bench.geometry import geometry_folder
from paceline.json_files import read_json
from paceline.models.attention import KVCache, PagedContext
from paceline.models.config import Qwen3Config
from paceline.models.drafter import Drafter
from paceline.models.drafter_dialects import read_drafter_config
from paceline.models.qwen3 import Qwen3ForCausalLM
from paceline.ops import RowLayout
from paceline.runtime.few_rows import FewRows, TargetPass

pytestmark = pytest.mark.gpu

BLOCK, BLOCKS, SLOTS, VOCAB = 16, 1024, 9, 32000
TOLERANCE = 0.03
"""Relative error of logits after four layers in bf16: two roundings of the same sums."""


class Models(NamedTuple):
    target: Qwen3ForCausalLM
    drafter: Drafter


class Scene(NamedTuple):
    """Sequences in a cache of noise."""

    cache: KVCache
    draft_cache: KVCache
    tables: Tensor
    num_computed: Tensor
    slots: Tensor

    def layout(self, span: int) -> RowLayout:
        """The next ``span`` rows of each."""
        n = len(self.slots)
        row_seq = torch.arange(n, device="cuda", dtype=torch.int32).repeat_interleave(span)
        offset = torch.arange(span, device="cuda", dtype=torch.int32)
        positions = (self.num_computed[self.slots.long()][:, None] + offset).view(-1)
        blocks = self.tables[self.slots[row_seq.long()].long(), (positions // BLOCK).long()]
        return RowLayout(
            slots=self.slots,
            row_start=torch.arange(0, n * span + 1, span, device="cuda", dtype=torch.int32),
            row_seq=row_seq,
            positions=positions,
            kv_slots=blocks.long() * BLOCK + positions % BLOCK,
            block_tables=self.tables,
            num_computed=self.num_computed,
            host_rows=(span,) * n,
            host_max_context=8192,
        )


def fill(module: nn.Module) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.02, generator=generator)
            if parameter.dim() == 1:
                parameter.mul_(5).add_(1)
    module.requires_grad_(False).eval()


@pytest.fixture(scope="module")
def models() -> Models:
    """Four layers of Qwen3-4B's shape and a drafter's two."""
    full = Qwen3Config.from_pretrained(geometry_folder("qwen3-4b"))
    config = dataclasses.replace(full, num_hidden_layers=4, windows=full.windows[:4], vocab_size=VOCAB)
    target = Qwen3ForCausalLM(config, device="cuda", dtype=torch.bfloat16)
    fill(target)
    values = read_json(geometry_folder("qwen3-4b-dspark-b7") / "config.json")
    values |= {
        "num_hidden_layers": 2,
        "num_target_layers": 4,
        "target_layer_ids": [0, 1, 2],
        "vocab_size": VOCAB,
    }
    values |= {"layer_types": values["layer_types"][:2], "mask_token_id": 5}
    drafter = Drafter(read_drafter_config(values, config), target, device="cuda", dtype=torch.bfloat16)
    fill(drafter)
    drafter.freeze()
    return Models(target, drafter)


def noise_cache(config: Qwen3Config) -> KVCache:
    cache = KVCache.allocate(
        config.num_hidden_layers,
        BLOCKS,
        BLOCK,
        config.num_key_value_heads,
        config.head_dim,
        dtype=torch.bfloat16,
        device="cuda",
    )
    cache.k.normal_()
    cache.v.normal_()
    return cache


def scene(models: Models, contexts: Sequence[int]) -> Scene:
    torch.manual_seed(sum(contexts) + len(contexts))
    cache, draft_cache = (
        noise_cache(config) for config in (models.target.config, models.drafter.config.layers)
    )
    tables = torch.zeros(SLOTS, 512, dtype=torch.int32, device="cuda")
    num_computed = torch.zeros(SLOTS, dtype=torch.int32, device="cuda")
    blocks = torch.randperm(BLOCKS, device="cuda").to(torch.int32)
    used = 0
    for slot, context in enumerate(contexts, start=1 if len(contexts) < SLOTS else 0):
        count = (context + 64) // BLOCK + 1
        tables[slot, :count] = blocks[used : used + count]
        num_computed[slot] = context
        used += count
    first = 1 if len(contexts) < SLOTS else 0
    slots = torch.arange(first, first + len(contexts), dtype=torch.int32, device="cuda")
    return Scene(cache, draft_cache, tables, num_computed, slots)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def few_rows(models: Models, world: Scene) -> FewRows:
    assert FewRows.runs_on(models.target, BLOCK)
    return FewRows(models.target, world.cache, models.drafter, world.draft_cache)


def the_pass(models: Models, world: Scene, num_seqs: int, span: int) -> TargetPass:
    found = few_rows(models, world).target(num_seqs, span)
    assert found is not None
    return found


SHAPES = [
    (1, [0]),
    (1, [5]),
    (1, [15]),
    (1, [16]),
    (1, [255]),
    (1, [256]),
    (1, [257]),
    (1, [4100]),
    (8, [0]),
    (8, [11]),
    (8, [131]),
    (8, [249]),
    (8, [4090]),
    (5, [77]),
    (4, [33, 300]),
    (2, [15, 16, 17, 1000]),
    (1, [0, 1, 15, 16, 100, 555, 1023, 1024]),
]


@pytest.mark.parametrize(("span", "contexts"), SHAPES)
@torch.inference_mode()
def test_a_pass_is_the_layered_pass(models: Models, span: int, contexts: list[int]) -> None:
    world = scene(models, contexts)
    target, drafter = models
    layout = world.layout(span)
    tokens = torch.randint(0, VOCAB, (span * len(contexts),), device="cuda")
    before = [cache.clone() for cache in (*vars(world.cache).values(), *vars(world.draft_cache).values())]
    caches = [*vars(world.cache).values(), *vars(world.draft_cache).values()]

    taps = drafter.config.tap_layer_ids
    hidden, tapped = target(tokens, layout.positions, PagedContext(world.cache, layout), taps)
    assert tapped is not None
    drafter.write_context(tapped, layout.positions, layout.kv_slots, world.draft_cache)
    want = target.logits(hidden).float()
    wanted = [cache.clone() for cache in caches]
    for cache, old in zip(caches, before, strict=True):
        cache.copy_(old)

    run = the_pass(models, world, len(contexts), span)
    got = run(tokens, layout).clone()
    assert run.taps is not None and run.writes_context
    assert error(got, want) < TOLERANCE
    assert error(run.taps, tapped) < TOLERANCE
    for cache, old, new in zip(caches, before, wanted, strict=True):
        assert not torch.equal(new, old)
        assert error(cache.float() - old.float(), new.float() - old.float()) < TOLERANCE
    for _ in range(10):  # the rows' own keys are written again, to the same values
        assert torch.equal(run(tokens, layout), got)


@pytest.mark.parametrize("context", [0, 9, 131, 250, 1020, 4000])
@torch.inference_mode()
def test_a_span_is_the_same_bits_as_its_rows_one_by_one(models: Models, context: int) -> None:
    world = scene(models, [context])
    tokens = torch.randint(0, VOCAB, (8,), device="cuda")
    at_once = the_pass(models, world, 1, 8)(tokens, world.layout(8)).clone()
    single = the_pass(models, world, 1, 1)
    for i in range(8):
        assert torch.equal(single(tokens[i : i + 1], world.layout(1))[0], at_once[i]), i
        world.num_computed.add_(1)


@torch.inference_mode()
def test_what_stands_beside_a_row_changes_nothing_of_it(models: Models) -> None:
    contexts = [7, 100, 300, 640, 15, 16, 2, 1000]
    world = scene(models, contexts)
    tokens = torch.randint(0, VOCAB, (8,), device="cuda")
    run = the_pass(models, world, 8, 1)
    want = run(tokens, world.layout(1)).clone()
    for i in range(8):
        others = torch.randint(0, VOCAB, (8,), device="cuda")
        others[i] = tokens[i]
        assert torch.equal(run(others, world.layout(1))[i], want[i]), i


@torch.inference_mode()
def test_a_nan_is_a_result_like_any(models: Models) -> None:
    """Blocks wait for anything but one NaN, which no result is, not even that of the same NaN."""
    world = scene(models, [100])
    run, layout = the_pass(models, world, 1, 2), world.layout(2)
    weight = models.target.embed_tokens.weight
    before = weight[5].clone()
    fine = run(torch.tensor([6, 7], device="cuda"), layout).clone()
    weight[5].view(torch.int16).fill_(-1)
    try:
        assert run(torch.tensor([6, 5], device="cuda"), layout)[1].isnan().all()
    finally:
        weight[5] = before
    assert torch.equal(run(torch.tensor([6, 7], device="cuda"), layout), fine)


@pytest.mark.parametrize("context", [0, 3, 130, 255, 3000])
@torch.inference_mode()
def test_a_drafters_pass_is_the_layered_pass(models: Models, context: int) -> None:
    world = scene(models, [context])
    drafter = models.drafter
    width = drafter.config.block_size
    layout = world.layout(width)
    anchors, starts = torch.tensor([77], device="cuda"), world.num_computed[world.slots.long()]
    hidden = drafter(anchors, starts, PagedContext(world.draft_cache, layout))
    run = few_rows(models, world).draft(1)
    assert run is not None
    got_hidden, got = run(drafter.block_tokens(anchors).view(-1), layout)
    assert error(got_hidden, hidden.view(width, -1)) < TOLERANCE
    assert error(got, drafter.head(hidden).float().view(width, -1)) < TOLERANCE


@torch.inference_mode()
def test_a_wider_model(models: Models) -> None:
    """Qwen3-8B's shape: another variant of the kernel."""
    full = Qwen3Config.from_pretrained(geometry_folder("qwen3-8b"))
    config = dataclasses.replace(full, num_hidden_layers=2, windows=full.windows[:2], vocab_size=VOCAB)
    target = Qwen3ForCausalLM(config, device="cuda", dtype=torch.bfloat16)
    fill(target)
    world = scene(models._replace(target=target), [130])
    layout, tokens = world.layout(8), torch.randint(0, VOCAB, (8,), device="cuda")
    hidden, _ = target(tokens, layout.positions, PagedContext(world.cache, layout))
    run = FewRows(target, world.cache).target(1, 8)
    assert run is not None
    assert error(run(tokens, layout), target.logits(hidden)) < TOLERANCE


@torch.inference_mode()
def test_what_does_not_fit_is_left_to_the_layers(models: Models) -> None:
    world = scene(models, [10, 10])
    made = few_rows(models, world)
    assert made.target(2, 8) is None and made.target(9, 1) is None and made.draft(2) is None
    assert not FewRows.runs_on(models.target, 8)
