"""Random steps to run the ops on, and what they must compute, written the slow and obvious way in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.ops import Branches, CommonKeys, RowLayout


@dataclass
class Scene:
    """A paged cache that holds NaN wherever no sequence's key stands, and the rows of a step over it."""

    layout: RowLayout
    q: Tensor  # [R, H, D]
    k_cache: Tensor  # [num_blocks, P, KV, D]
    v_cache: Tensor
    scale: float

    def expected(self, window: int | None = None, bidirectional: bool = False) -> Tensor:
        """[R, H, D] float64 on the CPU, one row at a time."""
        layout = self.layout
        _, block_size, num_kv_heads, head_dim = self.k_cache.shape
        group = self.q.shape[1] // num_kv_heads
        k_rows = self.k_cache.reshape(-1, num_kv_heads, head_dim).cpu().double()
        v_rows = self.v_cache.reshape(-1, num_kv_heads, head_dim).cpu().double()
        slots, tables = layout.slots.cpu(), layout.block_tables.cpu().long()
        starts, own_slots = layout.num_computed[layout.slots].cpu(), None
        if layout.branches is not None:
            starts, own_slots = (part.cpu() for part in layout.branches)
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        for row, (seq, position) in enumerate(
            zip(layout.row_seq.tolist(), layout.positions.tolist(), strict=True)
        ):
            first = 0 if window is None else max(0, position - window + 1)
            last = position
            if bidirectional:
                last = int(starts[seq]) + layout.host_rows[seq] - 1
            keys = torch.arange(first, last + 1)
            own = torch.zeros(len(keys), dtype=torch.bool) if own_slots is None else keys >= starts[seq]
            if own_slots is not None and own_slots[seq] < 0:
                own[:] = False
            in_table = keys.clamp(max=int(starts[seq]) - 1) if bool(own.any()) else keys
            cache_rows = tables[slots[seq], in_table // block_size] * block_size + in_table % block_size
            if own_slots is not None:
                cache_rows = torch.where(own, own_slots[seq] + keys - starts[seq], cache_rows)
            k = k_rows[cache_rows].repeat_interleave(group, dim=1)  # [keys, H, D]
            v = v_rows[cache_rows].repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,nhd->hn", self.q[row].cpu().double(), k) * self.scale
            out[row] = torch.einsum("hn,nhd->hd", scores.softmax(dim=-1), v)
        return out


def make_scene(
    spans: Sequence[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    order: Sequence[int] | None = None,
) -> Scene:
    """A step over sequences given as (tokens computed before the step, rows in it).

    Slots, block ids and their order are random; unused table entries are -1. ``order`` lists the same
    sequences in another order, with the same contents.
    """
    gen = torch.Generator().manual_seed(seed)
    blocks_of = [-(-(computed + rows) // block_size) for computed, rows in spans]
    num_blocks, num_slots = sum(blocks_of) + 3, len(spans) + 2
    free = torch.randperm(num_blocks, generator=gen).tolist()
    slot_of = torch.randperm(num_slots, generator=gen).tolist()
    tables = torch.full((num_slots, max(blocks_of)), -1, dtype=torch.int32)
    num_computed = torch.full((num_slots,), 10**6, dtype=torch.int32)
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    queries = []
    for seq, (computed, rows) in enumerate(spans):
        blocks = [free.pop() for _ in range(blocks_of[seq])]
        tables[slot_of[seq], : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        num_computed[slot_of[seq]] = computed
        for cache in (k_cache, v_cache):
            flat = torch.full((len(blocks) * block_size, num_kv_heads, head_dim), torch.nan)
            flat[: computed + rows] = torch.randn(computed + rows, num_kv_heads, head_dim, generator=gen)
            cache[blocks] = flat.view(len(blocks), block_size, num_kv_heads, head_dim)
        queries.append(torch.randn(rows, num_heads, head_dim, generator=gen))
    order = range(len(spans)) if order is None else order
    rows_of = [spans[seq][1] for seq in order]
    positions = torch.cat([torch.arange(spans[seq][0], sum(spans[seq])) for seq in order]).int()
    row_seq = torch.repeat_interleave(torch.arange(len(order)), torch.tensor(rows_of)).int()
    slots = torch.tensor([slot_of[seq] for seq in order], dtype=torch.int32)
    blocks_at = tables[slots[row_seq], positions // block_size].long()
    layout = RowLayout(
        slots=slots.to(device),
        row_start=torch.tensor([0, *rows_of]).cumsum(0).int().to(device),
        row_seq=row_seq.to(device),
        positions=positions.to(device),
        kv_slots=(blocks_at * block_size + positions % block_size).to(device),
        block_tables=tables.to(device),
        num_computed=num_computed.to(device),
        host_rows=tuple(rows_of),
        host_max_context=max(computed + rows for computed, rows in spans),
    )
    q = torch.cat([queries[seq] for seq in order]).to(device, dtype)
    return Scene(layout, q, k_cache.to(device, dtype), v_cache.to(device, dtype), head_dim**-0.5)


def make_branched_scene(
    spans: Sequence[tuple[int, int]], chains: Sequence[tuple[int, int, int]], **options: Any
) -> Scene:
    """A step over sequences and chains beside them, given as (sequence, branch, rows): the chain shares the
    sequence's rows 0 … branch of this step. Its own keys lie in a last few blocks, across their borders.
    """
    scene = make_scene(spans, **options)
    layout, device = scene.layout, scene.q.device
    block_size, num_kv_heads, head_dim = scene.k_cache.shape[1:]
    rows_of = [rows for _, _, rows in chains]
    first = scene.k_cache.shape[0] * block_size + 5
    own = torch.tensor([first + sum(rows_of[:i]) for i in range(len(chains))])
    gen = torch.Generator().manual_seed(99)
    extra = -(-(5 + sum(rows_of)) // block_size)
    caches = []
    for cache in (scene.k_cache, scene.v_cache):
        room = torch.full((extra * block_size, num_kv_heads, head_dim), torch.nan)
        room[5 : 5 + sum(rows_of)] = torch.randn(sum(rows_of), num_kv_heads, head_dim, generator=gen)
        caches.append(torch.cat((cache, room.view(extra, block_size, num_kv_heads, head_dim).to(cache))))
    parents = torch.tensor([parent for parent, _, _ in chains])
    before = layout.num_computed[layout.slots].cpu()
    starts = before[parents] + torch.tensor([branch + 1 for _, branch, _ in chains])
    offset = torch.cat([torch.arange(rows) for rows in rows_of])
    chain = torch.arange(len(chains)).repeat_interleave(torch.tensor(rows_of))
    q = torch.randn(sum(rows_of), *scene.q.shape[1:], generator=gen)

    def joined(first: Tensor, second: Tensor) -> Tensor:
        return torch.cat((first, second.to(first)))

    layout = RowLayout(
        slots=joined(layout.slots, layout.slots.cpu()[parents]),
        row_start=joined(layout.row_start, layout.row_start[-1].cpu() + torch.tensor(rows_of).cumsum(0)),
        row_seq=joined(layout.row_seq, chain + len(spans)),
        positions=joined(layout.positions, starts[chain] + offset),
        kv_slots=joined(layout.kv_slots, own[chain] + offset),
        block_tables=layout.block_tables,
        num_computed=layout.num_computed,
        host_rows=(*layout.host_rows, *rows_of),
        host_max_context=layout.host_max_context + max(rows_of),
        branches=Branches(
            joined(before.to(device), starts).int(), joined(torch.full((len(spans),), -1).to(device), own)
        ),
    )
    return Scene(layout, joined(scene.q, q), caches[0], caches[1], scene.scale)


def make_common_scene(
    spans: Sequence[tuple[int, int]], groups: Sequence[tuple[int, int]], **options: Any
) -> Scene:
    """A step over sequences of which neighbours share their first keys, given as (sequences, keys)."""
    scene = make_scene(spans, **options)
    layout, block_size = scene.layout, scene.k_cache.shape[1]
    slots = layout.slots.tolist()
    first, firsts, lens = 0, [0], []
    for count, keys in groups:
        assert keys % block_size == 0
        for seq in range(first + 1, first + count):
            head = layout.block_tables[slots[first], : keys // block_size]
            layout.block_tables[slots[seq], : keys // block_size] = head
        first += count
        firsts.append(first)
        lens += [keys] * count
    device = scene.q.device
    layout.common = CommonKeys(
        row_start=layout.row_start[torch.tensor(firsts, device=device)],
        slots=layout.slots[torch.tensor(firsts[:-1], device=device)],
        lens=torch.tensor([keys for _, keys in groups], dtype=torch.int32, device=device),
        of_seqs=torch.tensor(lens, dtype=torch.int32, device=device),
    )
    return scene


def rope_table(num_positions: int, head_dim: int) -> Tensor:
    """cat(cos, sin) [num_positions, head_dim] fp32."""
    frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


def normed_and_rotated(x: Tensor, weight: Tensor, eps: float, positions: Tensor, table: Tensor) -> Tensor:
    """[R, heads, D] -> the same in float64: norm, then rotation by complex numbers."""
    x, weight = x.cpu().double(), weight.cpu().double()
    normed = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight
    half = x.shape[-1] // 2
    turn = torch.complex(table[:, :half].double(), table[:, half:].double())[positions.cpu().long()]
    turned = torch.complex(normed[..., :half], normed[..., half:]) * turn[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)
