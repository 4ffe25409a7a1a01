"""Cases of attention: decode rows, verify spans, prompts, drafter's blocks, shared keys, deterministic."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from ops_case import MAX_CONTEXT, Case, Plan, World
from torch import Tensor

from paceline import ops
from paceline.ops import CommonKeys, RowLayout

if TYPE_CHECKING:
    from paceline.ops.triton.attention_config import AttentionConfig

Spans = list[tuple[int, int]]
"""(computed, rows) of each sequence."""

STEPS: dict[str, Spans] = {
    "decode 1 x 1k": [(1023, 1)],
    "decode 1 x 8k": [(8191, 1)],
    "decode 1 x 32k": [(32767, 1)],
    "decode 8 x 4k": [(4095, 1)] * 8,
    "decode 32 x 2k": [(2047, 1)] * 32,
    "decode 128 x 1k": [(1023, 1)] * 128,
    "span 1 x 8 at 4k": [(4088, 8)],
    "span 1 x 16 at 4k": [(4080, 16)],
    "span 16 x 8 at 2k": [(2040, 8)] * 16,
    "prefill 2048": [(0, 2048)],
    "prefill 512 after 8k": [(8192, 512)],
    "mixed 512 + 32 x 2k": [(0, 512)] + [(2047, 1)] * 32,
}
ROUNDS: dict[str, Spans] = {
    "verify 64 x 8 at 1,100": [(1100, 8)] * 64,
    "verify 128 x 8 at 1,100": [(1100, 8)] * 128,
    "verify 8 x 16 at 600": [(600, 16)] * 8,
    "verify 32 x 16 at 600": [(600, 16)] * 32,
}
"""Of captured rounds, which are laid out for any context."""

PROMPTS: dict[str, Spans] = {
    "1 x 1024": [(0, 1024)],
    "8 x 1024": [(0, 1024)] * 8,
    "1 x 8192": [(0, 8192)],
}
DETERMINISTIC: dict[str, Spans] = {"decode 1 x 1k": [(1023, 1)], "decode 32 x 1k": [(1023, 1)] * 32}
BLOCKS, BLOCK_SEQS, BLOCK_CONTEXT, WINDOW = (7, 8, 16), (1, 8, 64), 1024, 512
"""Rows of DSpark's (7, and 8 with an anchor that is no draft) and DFlash's blocks; ``draft_window``."""


@dataclass(frozen=True)
class Options:
    """How a scene is laid out and attended to.

    Attributes:
        block_size: keys of a block of the cache.
        max_context: what the layout says keys are bound by; None for the longest sequence.
        common: keys at the head of all sequences that are the same.
        window, bidirectional, deterministic: as for ``ops.paged_attention``.
        fresh: all sequences begin in this step, and are attended to through their own projections where
            there is a kernel for it.
    """

    block_size: int = 16
    max_context: int | None = None
    common: int = 0
    window: int | None = None
    bidirectional: bool = False
    deterministic: bool = False
    fresh: bool = False


def plans(world: World) -> Iterator[Plan]:
    """All of attention."""
    in_rounds = Options(max_context=MAX_CONTEXT)
    for name, spans in STEPS.items():
        yield plan(world, "paged_attention", name, spans)
    yield plan(world, "paged_attention", "decode 1 x 1k, bound 40k", [(1023, 1)], in_rounds)
    yield plan(
        world, "paged_attention", "decode 32 x 2k, blocks of 64", [(2047, 1)] * 32, Options(block_size=64)
    )
    for name, spans in ROUNDS.items():
        yield plan(world, "paged_attention", name, spans, in_rounds)
    for rows in (1, 8):
        name = f"96 x {rows} at 4k, 4,000 keys in common"
        yield plan(world, "paged_attention", name, [(4020, rows)] * 96, Options(common=4000))
    for name, spans in PROMPTS.items():
        yield plan(world, "prompt_attention", name, spans, Options(fresh=True))
    for window, rows, count in itertools.product((None, WINDOW), BLOCKS, BLOCK_SEQS):
        name = f"{count} x {rows} at 1k" + (f", window {window}" if window else "")
        options = Options(max_context=MAX_CONTEXT, window=window, bidirectional=True)
        yield plan(world, "block attention", name, [(BLOCK_CONTEXT, rows)] * count, options)
    for name, spans in DETERMINISTIC.items():
        yield plan(world, "deterministic attention", name, spans, Options(deterministic=True))


def plan(world: World, op: str, name: str, spans: Spans, options: Options | None = None) -> Plan:
    """Attention over spans of these sizes, as they are in this world."""
    options = options or Options()
    spans = [(world.fewer(computed), world.fewer(rows)) for computed, rows in spans]
    return Plan(op, name, lambda: case_of(AttentionScene.make(world, spans, options)))


@dataclass
class AttentionScene:
    """Paged operands of one attention call.

    Attributes:
        q: [R, H, D].
        k_cache, v_cache: [num_blocks, P, KV, D].
        own: [R, (H + 2 KV) * D], the rows' own projections; None where they are not read.
        common: as in the options, in whole blocks.
        window: as in the options, in this world.
    """

    spans: Spans
    options: Options
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    layout: RowLayout
    own: Tensor | None
    common: int
    window: int | None

    @staticmethod
    def make(world: World, spans: Spans, options: Options) -> AttentionScene:
        """Sequences whose blocks are scattered over the cache at random, but for the keys they share."""
        block_size = options.block_size
        lengths = [computed + rows for computed, rows in spans]
        blocks_of = [-(-length // block_size) for length in lengths]
        ids = iter(torch.randperm(sum(blocks_of)).tolist())
        tables = torch.zeros(len(spans), max(blocks_of), dtype=torch.int32)
        for seq, count in enumerate(blocks_of):
            tables[seq, :count] = torch.tensor(list(itertools.islice(ids, count)), dtype=torch.int32)
        shared = world.fewer(options.common) // block_size
        tables[:, :shared] = tables[0, :shared]
        rows = torch.tensor([rows for _, rows in spans])
        num_rows = int(rows.sum())
        row_seq = torch.repeat_interleave(torch.arange(len(spans)), rows)
        positions = torch.cat([torch.arange(computed, computed + n) for computed, n in spans])
        blocks = tables[row_seq, positions // block_size].long()
        layout = RowLayout(
            slots=world.whole(torch.arange(len(spans))),
            row_start=world.whole(F.pad(rows.cumsum(0), (1, 0))),
            row_seq=world.whole(row_seq),
            positions=world.whole(positions),
            kv_slots=world.whole(blocks * block_size + positions % block_size, torch.int64),
            block_tables=world.whole(tables),
            num_computed=world.whole([computed for computed, _ in spans]),
            host_rows=tuple(rows.tolist()),
            host_max_context=options.max_context or max(lengths),
            num_fresh=len(spans) if options.fresh else 0,
        )
        common = shared * block_size
        if common:
            groups = [0, num_rows], [0], [common], [common] * len(spans)
            layout.common = CommonKeys(*(world.whole(group) for group in groups))
        k_cache, v_cache = (
            world.tensor(sum(blocks_of), block_size, world.kv_heads, world.head_dim) for _ in range(2)
        )
        own = None
        if options.fresh:
            heads = world.tensor(num_rows, world.qkv).view(num_rows, -1, world.head_dim)
            for cache, part in zip((k_cache, v_cache), heads[:, world.heads :].chunk(2, dim=1), strict=True):
                cache.flatten(0, 1)[layout.kv_slots] = part
            own = heads.view(num_rows, -1) if ops.reads_own_keys(heads) else None
        q = world.tensor(num_rows, world.heads, world.head_dim)
        window = None if options.window is None else world.fewer(options.window)
        return AttentionScene(spans, options, q, k_cache, v_cache, layout, own, common, window)

    @property
    def scale(self) -> float:
        """Of the scores."""
        return float(self.q.shape[-1] ** -0.5)

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.q.shape[1] // self.k_cache.shape[2]

    def run(self, config: AttentionConfig | None = None) -> tuple[Tensor, ...]:
        """Attention as the engine has it, or cut as the config says."""
        options = self.options
        operands = (self.q, self.k_cache, self.v_cache, self.layout, self.scale, self.window)
        if config is None:
            return (
                ops.paged_attention(
                    *operands, options.bidirectional, own=self.own, deterministic=options.deterministic
                ),
            )
        from paceline.ops.triton.attention import paged_attention

        return (paged_attention(*operands, options.bidirectional, config=config),)

    def dense(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """q [H, rows, D], k and v [KV, keys, D] of each sequence."""
        starts, block_size = self.layout.row_start.tolist(), self.k_cache.shape[1]
        for seq, (computed, rows) in enumerate(self.spans):
            num_blocks = -(-(computed + rows) // block_size)
            blocks = self.layout.block_tables[seq, :num_blocks].long()
            k, v = (
                cache[blocks].flatten(0, 1)[: computed + rows].transpose(0, 1)
                for cache in (self.k_cache, self.v_cache)
            )
            yield self.q[starts[seq] : starts[seq] + rows].transpose(0, 1), k, v

    def seen(self, computed: int, rows: int) -> tuple[Tensor, Tensor]:
        """The first position each of a sequence's rows sees, and the last, [rows]."""
        position = torch.arange(computed, computed + rows, device=self.q.device)
        first = torch.zeros_like(position)
        if self.window is not None:
            first = (position - self.window + 1).clamp(min=0)
        last = torch.full_like(position, computed + rows - 1) if self.options.bidirectional else position
        return first, last

    def exact(self) -> tuple[Tensor, ...]:
        """[R, H, D] float64; a key head at a time, for the scores of long prompts take gigabytes."""
        outs = []
        for (computed, rows), (q, k, v) in zip(self.spans, self.dense(), strict=True):
            first, last = self.seen(computed, rows)
            key = torch.arange(computed + rows, device=q.device)
            hidden = (key < first[:, None]) | (key > last[:, None])
            heads = [
                ((queries.double() @ keys.double().T) * self.scale)
                .masked_fill_(hidden, -torch.inf)
                .softmax(-1)
                @ values.double()
                for queries, keys, values in zip(q.split(self.group), k, v, strict=True)
            ]
            outs.append(torch.cat(heads).transpose(0, 1))
        return (torch.cat(outs),)

    def peer(self) -> Callable[[], object] | None:
        """torch's attention over dense copies, where it takes no mask."""
        computed, rows = self.spans[0]
        plain = rows == 1 or computed == 0 or self.options.bidirectional
        if len(set(self.spans)) > 1 or not plain or self.window is not None:
            return None
        q, k, v = (torch.stack(parts) for parts in zip(*self.dense(), strict=True))
        causal = rows > 1 and not self.options.bidirectional
        return partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal, enable_gqa=True)


def case_of(scene: AttentionScene) -> Case:
    """Attention of a scene. A key is read once by its sequence, and common ones once by all."""
    num_rows, num_heads, head_dim = scene.q.shape
    keys, pairs = scene.common, 0
    for computed, rows in scene.spans:
        first, last = scene.seen(computed, rows)
        keys += computed + rows - max(scene.common, int(first[0]))
        pairs += int((last - first + 1).sum())
    numbers = (2 * num_rows * num_heads + 2 * keys * scene.k_cache.shape[2]) * head_dim
    return Case(
        scene.run,
        scene.exact,
        numbers * scene.q.element_size(),
        flops=4 * pairs * num_heads * head_dim,
        peer=scene.peer(),
        scene=scene,
    )
