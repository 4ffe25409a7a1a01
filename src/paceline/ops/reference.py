"""Torch versions of the ops: what the kernels must equal, and what runs on CPU and in training.

Attention has its own file, ``reference_attention.py``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.sampling.noise import row_keys


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang & Sennrich, arXiv:1910.07467).

    ``weight`` may be anything that broadcasts against x.
    """
    # the weight stays out of F.rms_norm: Qwen3 rounds the normalised value to x's dtype before it
    return weight * F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of ``x + residual``, and that sum."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` (SwiGLU, Shazeer, arXiv:2002.05202)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al., arXiv:2104.09864) of the pairs (i, i + D/2), in fp32, cast to x's dtype.

    Args:
        x: [*, D].
        cos, sin: fp32, broadcasting against [*, D/2].
    """
    halves = x.float().unflatten(-1, (2, -1))  # [*, 2, D/2]
    signed_sin = torch.stack((-sin, sin), dim=-2)
    rotated = torch.addcmul(halves * cos.unsqueeze(-2), halves.flip(-2), signed_sin)
    return rotated.flatten(-2).to(x.dtype)


def cache_slots(tables: Tensor, block_size: int, slots: Tensor, positions: Tensor) -> Tensor:
    """Blocks looked up in the tables, and the offset in them."""
    slot, position = slots.long(), positions.long()
    blocks = tables.view(-1)[slot * tables.shape[1] + position // block_size]
    return blocks.long() * block_size + position % block_size


def _owned_slots(
    owned: Tensor, tables: Tensor, block_size: int, slots: Tensor, positions: Tensor, scratch: int
) -> Tensor:
    """Where rows' K and V go: to their own places where they are ``owned``, else into the scratch block."""
    own = cache_slots(tables, block_size, slots, positions)
    return torch.where(owned, own, scratch + positions % block_size)


def span_rows(
    slots: Tensor,
    drafts: Tensor,
    num_computed: Tensor,
    tokens: Tensor,
    block_tables: Tensor,
    width: int,
    block_size: int,
    last: int,
    scratch: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions, tokens, cache slots and slots of spans' rows."""
    offset = torch.arange(width, dtype=torch.int32, device=slots.device)
    row_slot = slots.repeat_interleave(width, output_size=len(slots) * width)
    positions = (num_computed[slots][:, None] + offset).view(-1).clamp(max=last)
    fed = tokens.view(-1)[row_slot.long() * tokens.shape[1] + positions]
    real = (offset <= drafts[:, None]).view(-1)
    kv_slots = _owned_slots(real, block_tables, block_size, row_slot, positions, scratch)
    return positions, fed, kv_slots, row_slot


def allot_drafts(slots: Tensor, limits: Tensor, leads: Tensor, chances: Tensor, num_rows: int) -> Tensor:
    """Drafts of each sequence, the likeliest first."""
    column = torch.arange(chances.shape[1], device=slots.device)
    keys = (
        ((chances[slots].double() * 2**24).long() << 25)
        + ((31 - column) << 20)
        + (2**20 - 1 - slots)[:, None]
    )
    keys = torch.where(column < limits[:, None], keys, -1).view(-1)
    room = max(0, num_rows - int((leads + 1)[limits >= 0].sum()))
    best, index = keys.topk(min(room, len(keys)))
    taken = torch.zeros_like(keys).index_copy_(0, index, (best >= 0).long())
    drafts = taken.view(len(slots), -1).sum(1)
    return torch.where(limits < 0, limits, drafts).int()


def packed_rows(
    slots: Tensor,
    drafts: Tensor,
    leads: Tensor,
    num_computed: Tensor,
    tokens: Tensor,
    block_tables: Tensor,
    num_rows: int,
    block_size: int,
    spare: int,
    last: int,
    scratch: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """First rows; sequences, positions, tokens, cache slots and slots of rows that lie side by side."""
    ends = torch.where(drafts < 0, 0, leads + 1 + drafts).cumsum(0).int()
    row_start = torch.cat((ends.new_zeros(1), ends))
    row = torch.arange(num_rows, dtype=torch.int32, device=slots.device)
    row_seq = torch.searchsorted(ends, row, right=True, out_int32=True)
    row_slot = torch.cat((slots, slots.new_full((1,), spare)))[row_seq]
    positions = (num_computed[row_slot] + row - row_start[row_seq]).clamp(max=last)
    fed = tokens.view(-1)[row_slot.long() * tokens.shape[1] + positions]
    kv_slots = _owned_slots(row_seq < len(slots), block_tables, block_size, row_slot, positions, scratch)
    return row_start, row_seq, positions, fed, kv_slots, row_slot


def block_rows(
    slots: Tensor,
    reserved: Tensor,
    num_computed: Tensor,
    tokens: Tensor,
    tables: Tensor,
    width: int,
    block_size: int,
    mask_id: int,
    scratch: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Anchors' positions, and positions, tokens and cache slots of drafter's blocks."""
    offset = torch.arange(width, dtype=torch.int32, device=slots.device)
    starts = num_computed[slots]
    positions = (starts[:, None] + offset).view(-1)
    anchors = tokens.view(-1)[slots.long() * tokens.shape[1] + starts]
    fed = torch.where(offset == 0, anchors[:, None], mask_id).view(-1)
    row_slot, there = slots.repeat_interleave(width), (reserved != 0).repeat_interleave(width)
    return starts, positions, fed, _owned_slots(there, tables, block_size, row_slot, positions, scratch)


def place_drafts(slots: Tensor, drafts: Tensor, num_computed: Tensor, tokens: Tensor) -> None:
    """Write drafts behind the anchors."""
    offset = torch.arange(1, drafts.shape[1] + 1, device=drafts.device)
    first = slots.long() * tokens.shape[1] + num_computed[slots].long()
    tokens.view(-1).index_copy_(0, (first[:, None] + offset).view(-1), drafts.reshape(-1).to(torch.int32))


def synthetic_matches(
    seed_keys: Tensor, slots: Tensor, anchors: Tensor, limits: Tensor, num_columns: int, bound: Tensor
) -> Tensor:
    """Leading columns whose uniform number lies below the bound."""
    column = torch.arange(num_columns, device=anchors.device, dtype=limits.dtype)
    positions = anchors[:, None] + 1 + column  # [N, K]
    keys = row_keys(seed_keys[slots].repeat_interleave(num_columns), positions.view(-1))
    uniform = (keys[:, 1].long() & 0x7FFFFFFF).view_as(positions)  # 31 bits
    stands = (uniform < bound) & (column < limits[:, None])
    return stands.to(torch.int32).cumprod(dim=1).sum(dim=1, dtype=torch.int32)


def leading_matches(left: Tensor, right: Tensor, limits: Tensor) -> Tensor:
    """How many of the first columns are equal."""
    num_columns = right.shape[1]
    column = torch.arange(num_columns, device=right.device, dtype=limits.dtype)
    match = (left[:, :num_columns] == right) & (column < limits[:, None])
    return match.to(torch.int32).cumprod(dim=1).sum(dim=1, dtype=torch.int32)


def advance(
    slots: Tensor,
    drafts: Tensor,
    sampled: Tensor,
    accepted: Tensor,
    num_computed: Tensor,
    tokens: Tensor,
    leads: Tensor | None = None,
) -> None:
    """Write draws behind the anchors, and move the lengths."""
    if leads is not None:
        num_computed.index_add_(0, slots, torch.where(drafts >= 0, leads, 0))
    offset = torch.arange(sampled.shape[1], device=sampled.device)
    first = slots.long() * tokens.shape[1] + num_computed[slots].long() + 1
    tokens.view(-1).index_copy_(0, (first[:, None] + offset).view(-1), sampled.reshape(-1))
    num_computed.index_add_(0, slots, torch.where(drafts >= 0, accepted + 1, 0))


def qk_norm_rope_write(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    keep_keys: bool = False,
) -> Tensor:
    """Norm and rotate the heads of q and k, write k and v to the cache; returns q."""
    _, _, num_kv_heads, head_dim = k_cache.shape
    heads = qkv.view(qkv.shape[0], -1, head_dim)  # [R, H + 2 KV, D]
    num_heads = heads.shape[1] - 2 * num_kv_heads
    # q and k heads together: on CPU the cost of a small step is its number of torch calls
    weight = torch.cat((q_norm.expand(num_heads, head_dim), k_norm.expand(num_kv_heads, head_dim)))
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)  # [R, 1, D/2]
    qk = rotate(rms_norm(heads[:, :-num_kv_heads], weight, eps), cos, sin)
    q, k, v = qk[:, :num_heads], qk[:, num_heads:], heads[:, -num_kv_heads:]
    if keep_keys:
        heads[:, num_heads:-num_kv_heads] = k
    if kv_slots.numel() and int(kv_slots.min()) < 0:
        kept = kv_slots >= 0
        kv_slots, k, v = kv_slots[kept], k[kept], v[kept]
    # view, not reshape: writing to a silent copy of a non-contiguous cache would lose the rows
    k_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, kv_slots, k.to(k_cache.dtype))
    v_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, kv_slots, v.to(v_cache.dtype))
    return q.contiguous()


def kv_norm_rope_write(
    kv: Tensor,
    k_norms: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> None:
    """Norm and rotate the keys of several layers, write k and v to their caches."""
    layers, _, _, num_kv_heads, head_dim = k_cache.shape
    k, v = kv.view(layers, -1, 2, num_kv_heads, head_dim).unbind(2)  # [layers, R, KV, D]
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)  # [R, 1, D/2]
    k = rotate(rms_norm(k, k_norms[:, None, None], eps), cos, sin)
    if kv_slots.numel() and int(kv_slots.min()) < 0:
        kept = kv_slots >= 0
        kv_slots, k, v = kv_slots[kept], k[:, kept], v[:, kept]
    for cache, rows in ((k_cache, k), (v_cache, v)):
        cache.view(layers, -1, num_kv_heads, head_dim).index_copy_(1, kv_slots, rows.to(cache.dtype))
