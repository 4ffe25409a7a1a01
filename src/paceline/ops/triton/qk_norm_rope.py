"""Between the projections and attention: norms of q and k, rotation, and the K/V write, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.triton.dependent import await_previous, dependent_launch

HEADS, WARPS = 16, 4
"""Of a program: to a thread 16 bytes of each half of a head. The same for any number of rows, or a row's bits
would depend on it."""


# Not specialised: a buffer's new alignment must not compile a new kernel while serving.
@triton.jit(do_not_specialize=["positions_ptr", "kv_slots_ptr", "row_heads", "layer_heads", "cache_heads"])
def _qk_norm_rope_write_kernel(
    qkv_ptr,  # [layers, R, (H + 2 KV) * D]
    q_norm_ptr,  # [D]
    k_norm_ptr,  # [layers, D]
    cos_sin_ptr,  # [max_position, D]
    positions_ptr,
    kv_slots_ptr,
    q_ptr,  # [R, H, D]; with more than one layer H is 0
    k_cache_ptr,  # [layers, slots, KV, D]
    v_cache_ptr,
    row_heads,  # strides in heads, from which it is seen that heads are aligned: of a row of qkv,
    layer_heads,  # of a layer of it,
    cache_heads,  # and of a layer of a cache
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # D / 2
    HEADS: tl.constexpr,
    KEEP: tl.constexpr,  # leave the keys in qkv, too
    DEPENDENT: tl.constexpr,
):
    await_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    low = tl.arange(0, HALF)[None, :]
    high = low + HALF
    D: tl.constexpr = 2 * HALF
    is_q = head < NUM_HEADS
    is_k = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    exists = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None]

    layer = tl.program_id(2).to(tl.int64)
    source = qkv_ptr + (layer * layer_heads + row * row_heads + head[:, None]) * D
    raw1 = tl.load(source + low, mask=exists, other=0.0)  # [HEADS, D/2]
    raw2 = tl.load(source + high, mask=exists, other=0.0)
    x1, x2 = raw1.to(tl.float32), raw2.to(tl.float32)
    inv_rms = 1.0 / tl.sqrt((tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)) / D + eps)[:, None]
    k_norm = k_norm_ptr + layer * D
    q_weight1, q_weight2 = tl.load(q_norm_ptr + low), tl.load(q_norm_ptr + high)
    k_weight1, k_weight2 = tl.load(k_norm + low), tl.load(k_norm + high)
    weight1 = tl.where(is_q[:, None], q_weight1, k_weight1).to(tl.float32)
    weight2 = tl.where(is_q[:, None], q_weight2, k_weight2).to(tl.float32)
    # rounded where the unfused ops round: after the norm, and after the weight
    n1 = ((x1 * inv_rms).to(raw1.dtype).to(tl.float32) * weight1).to(raw1.dtype).to(tl.float32)
    n2 = ((x2 * inv_rms).to(raw1.dtype).to(tl.float32) * weight2).to(raw1.dtype).to(tl.float32)
    angles = cos_sin_ptr + tl.load(positions_ptr + row).to(tl.int64) * D
    cos, sin = tl.load(angles + low), tl.load(angles + high)
    y1 = (n1 * cos - n2 * sin).to(raw1.dtype)
    y2 = (n2 * cos + n1 * sin).to(raw1.dtype)

    q_out = q_ptr + (row * NUM_HEADS + head[:, None]) * D
    tl.store(q_out + low, y1, mask=is_q[:, None])
    tl.store(q_out + high, y2, mask=is_q[:, None])
    if KEEP:
        tl.store(source + low, y1, mask=is_k[:, None])
        tl.store(source + high, y2, mask=is_k[:, None])
    slot = tl.load(kv_slots_ptr + row)  # int64: a cache may exceed 2^31 elements
    if slot >= 0:
        at = (layer * cache_heads + slot * NUM_KV_HEADS + head[:, None] - NUM_HEADS) * D
        k_out = k_cache_ptr + at
        tl.store(k_out + low, y1, mask=is_k[:, None])
        tl.store(k_out + high, y2, mask=is_k[:, None])
        is_v = exists & (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]
        v_out = v_cache_ptr + at - NUM_KV_HEADS * D
        tl.store(v_out + low, raw1, mask=is_v)
        tl.store(v_out + high, raw2, mask=is_v)


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
    """See :func:`paceline.ops.qk_norm_rope_write`."""
    num_rows, width = qkv.shape
    num_heads = width // k_cache.shape[-1] - 2 * k_cache.shape[-2]
    q = torch.empty((num_rows, num_heads, k_cache.shape[-1]), dtype=qkv.dtype, device=qkv.device)
    caches = k_cache[None], v_cache[None]
    _launch(qkv[None], q, q_norm, k_norm, eps, cos_sin, positions, kv_slots, *caches, keep_keys)
    return q


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
    """See :func:`paceline.ops.kv_norm_rope_write`."""
    no_heads = kv.new_empty((0, 0, k_cache.shape[-1]))
    _launch(kv, no_heads, k_norms, k_norms, eps, cos_sin, positions, kv_slots, k_cache, v_cache)


def _launch(
    qkv: Tensor,  # [layers, R, (H + 2 KV) * D]
    q: Tensor,  # [R, H, D]
    q_norm: Tensor,
    k_norms: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    k_cache: Tensor,  # [layers, num_blocks, P, KV, D]
    v_cache: Tensor,
    keep_keys: bool = False,
) -> None:
    layers, num_rows, _ = qkv.shape
    _, _, _, num_kv_heads, head_dim = k_cache.shape
    num_heads = q.shape[1]
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and cos_sin.is_contiguous()
    assert k_norms.is_contiguous() and qkv.stride(2) == 1
    assert qkv.stride(0) % head_dim == 0 and qkv.stride(1) % head_dim == 0
    if not num_rows:
        return
    grid = (num_rows, triton.cdiv(num_heads + 2 * num_kv_heads, HEADS), layers)
    _qk_norm_rope_write_kernel[grid](
        qkv,
        q_norm,
        k_norms,
        cos_sin,
        positions,
        kv_slots,
        q,
        k_cache,
        v_cache,
        qkv.stride(1) // head_dim,
        qkv.stride(0) // head_dim,
        k_cache.stride(0) // head_dim,
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        HEADS=HEADS,
        KEEP=keep_keys,
        num_warps=WARPS,
        **dependent_launch(qkv.device),
    )
