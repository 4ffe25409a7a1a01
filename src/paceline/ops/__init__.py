"""Every kernel: a torch reference and a Triton version behind one function.

The tensors' device decides: CUDA runs the Triton version, anything else the reference. Where a gradient is
needed, or under torch.compile, the differentiable ops run the reference on every device.
"""

from __future__ import annotations

from torch import Tensor

from paceline.ops import reference, reference_attention
from paceline.ops.activation import silu_mul
from paceline.ops.dispatch import differentiated, is_hopper, kernels
from paceline.ops.drafts import (
    BlockNoise,
    Candidates,
    ChainHead,
    LowRank,
    best_of_buckets,
    draft_best,
    draft_candidates,
    draft_chain,
)
from paceline.ops.layout import Branches, CommonKeys, RowLayout
from paceline.ops.linear import linear, linear_parts, linear_silu_mul, pack_linear

__all__ = [
    "BlockNoise",
    "Branches",
    "Candidates",
    "ChainHead",
    "CommonKeys",
    "LowRank",
    "RowLayout",
    "add_rms_norm",
    "advance",
    "allot_drafts",
    "best_of_buckets",
    "block_rows",
    "cache_slots",
    "draft_best",
    "draft_candidates",
    "draft_chain",
    "kv_norm_rope_write",
    "leading_matches",
    "linear",
    "linear_parts",
    "linear_silu_mul",
    "pack_linear",
    "packed_rows",
    "paged_attention",
    "place_drafts",
    "qk_norm_rope_write",
    "reads_own_keys",
    "rms_norm",
    "silu_mul",
    "span_rows",
    "synthetic_matches",
]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension.

    Computed in fp32; the normalised value is cast to x's dtype before the weight is applied, as Qwen3 does.
    Differentiable and traceable by torch.compile.

    Args:
        x: [*, d].
        weight: [d], in x's dtype.

    Returns:
        [*, d] in x's dtype.
    """
    if x.is_cuda and not differentiated(x, weight):
        return kernels().rms_norm(x, weight, eps)  # type: ignore[no-any-return]
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add ``x`` to the residual stream and norm the sum: ``(rms_norm(x + residual), x + residual)``.

    Neither input is changed. The sum is rounded to its dtype before the norm reads it.

    Args:
        x, residual: [*, d], of one dtype. On a GPU x may also be what ``linear_parts`` returns, [S, *, d]
            fp32: the parts are added in their order and rounded to the residual's dtype first.
        weight: [d].

    Returns:
        The normed sum and the sum, both [*, d].
    """
    if x.is_cuda and not differentiated(x, residual, weight):
        return kernels().add_rms_norm(x, residual, weight, eps)  # type: ignore[no-any-return]
    return reference.add_rms_norm(x, residual, weight, eps)


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
    """Norm and rotate the heads of q and k, and write k and v into the paged cache.

    Args:
        qkv: [R, (H + 2 KV) * D], contiguous: query heads, then key heads, then value heads.
        q_norm, k_norm: [D], RMS norm weights shared by all heads.
        cos_sin: [max_position, D] fp32: cosines of the D/2 angles, then sines; an attention factor, if
            any, is multiplied in. Pairs are (i, i + D/2), as in Hugging Face's rotate_half.
        positions: [R] int32.
        kv_slots: [R] int64, ``block * P + offset``; rows with a negative slot are not written.
        k_cache, v_cache: [num_blocks, P, KV, D] contiguous, written in place.
        keep_keys: the keys in ``qkv`` are replaced by the normed and rotated ones.

    Returns:
        q [R, H, D], normed and rotated, in qkv's dtype.
    """
    write = kernels().qk_norm_rope_write if qkv.is_cuda else reference.qk_norm_rope_write
    operands = (qkv, q_norm, k_norm, eps, cos_sin, positions, kv_slots, k_cache, v_cache)
    return write(*operands, keep_keys=keep_keys)


def cache_slots(tables: Tensor, block_size: int, slots: Tensor, positions: Tensor) -> Tensor:
    """Where rows lie in a paged cache: ``block * P + offset``.

    Args:
        tables: [S, M] int32 contiguous, block ids by slot and block of the sequence.
        block_size: P.
        slots, positions: [R] integer, contiguous; of each row.

    Returns:
        [R] int64.
    """
    look_up = kernels().cache_slots if positions.is_cuda else reference.cache_slots
    return look_up(tables, block_size, slots, positions)


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
    """The rows of N spans of W: anchors and drafts.

    A row that nobody asked for (beyond the drafts, or of no sequence) writes to the scratch block, and reads
    what it likes: its result is not used.

    Args:
        slots: [N] int32.
        drafts: [N] int32, drafts of each span; -1 where there is no sequence.
        num_computed: [S] int32, position of each slot's anchor.
        tokens: [S, L] int32 contiguous, known and tentative tokens.
        block_tables: [S, M] int32 contiguous.
        width: W.
        block_size: P.
        last: rows beyond this position are taken to stand at it.
        scratch: first cache slot of the scratch block.

    Returns:
        positions and tokens [N * W] int32, cache slots [N * W] int64, slots [N * W] int32.
    """
    lay_out = kernels().span_rows if slots.is_cuda else reference.span_rows
    return lay_out(slots, drafts, num_computed, tokens, block_tables, width, block_size, last, scratch)


def allot_drafts(slots: Tensor, limits: Tensor, leads: Tensor, chances: Tensor, num_rows: int) -> Tensor:
    """Which drafts are verified where there are rows for some only: those most likely to stand. What is
    chosen depends on the set of sequences, never on their order.

    Args:
        slots: [N] int32; a slot of a sequence stands there once.
        limits: [N] int32, most drafts of each sequence; -1 where there is none.
        leads: [N] int32, rows of each sequence before its anchor.
        chances: [S, g] fp32 in 0..1 by slot, rows contiguous, that a draft and all before it stand: falling
            along each row, so that what is chosen of a sequence are its first drafts. g is at most 32 and S
            2**20.
        num_rows: rows there are. Each sequence takes one and its lead, each draft another.

    Returns:
        [N] int32, drafts of each sequence; -1 where there is none.
    """
    choose = kernels().allot_drafts if slots.is_cuda else reference.allot_drafts
    return choose(slots, limits, leads, chances, num_rows)


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
    """The rows of N spans of different lengths, side by side: known tokens, of which the anchor is the last,
    and drafts. Rows behind the last span's are nobody's, and write to the scratch block.

    Args:
        slots: [N] int32.
        drafts: [N] int32, drafts of each span; -1 where there is no sequence, which takes no row.
        leads: [N] int32, rows of each span before its anchor.
        num_computed: [S] int32, position of each slot's first row.
        tokens: [S, L] int32 contiguous, known and tentative tokens.
        block_tables: [S, M] int32 contiguous.
        num_rows: R, at least the spans' rows.
        block_size: P.
        spare: slot that nobody's rows take.
        last: rows beyond this position are taken to stand at it.
        scratch: first cache slot of the scratch block.

    Returns:
        the spans' first rows, and the first of nobody's, [N + 1] int32; sequences (N for nobody's), positions
        and tokens [R] int32, cache slots [R] int64, slots [R] int32.
    """
    lay_out = kernels().packed_rows if slots.is_cuda else reference.packed_rows
    return lay_out(
        slots, drafts, leads, num_computed, tokens, block_tables, num_rows, block_size, spare, last, scratch
    )


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
    """The rows of N drafter's blocks of W: anchors, the newest tokens, and mask tokens behind them.

    Args:
        slots: [N] int32.
        reserved: [N] int32; where it is 0, rows write to the scratch block.
        num_computed: [S] int32, position of each slot's anchor.
        tokens: [S, L] int32 contiguous, known and tentative tokens.
        tables: [S, M] int32 contiguous, blocks of the drafter's K/V.
        width: W.
        block_size: P.
        mask_id: the mask token.
        scratch: first cache slot of the scratch block.

    Returns:
        the anchors' positions [N] int32; positions and tokens [N * W] int32, cache slots [N * W] int64.
    """
    lay_out = kernels().block_rows if slots.is_cuda else reference.block_rows
    return lay_out(slots, reserved, num_computed, tokens, tables, width, block_size, mask_id, scratch)


def place_drafts(slots: Tensor, drafts: Tensor, num_computed: Tensor, tokens: Tensor) -> None:
    """Write drafts behind the newest tokens, as tentative ones.

    Args:
        slots: [N] int32; no slot twice, but where there is no sequence.
        drafts: [N, g] int64, columns of any stride.
        num_computed: [S] int32, position of each slot's newest token.
        tokens: [S, L] int32 contiguous, written.
    """
    place = kernels().place_drafts if slots.is_cuda else reference.place_drafts
    place(slots, drafts, num_computed, tokens)


def synthetic_matches(
    seed_keys: Tensor, slots: Tensor, anchors: Tensor, limits: Tensor, num_columns: int, bound: Tensor
) -> Tensor:
    """How many of the first columns stand when each does with a given chance: a function of sequence seed and
    position.

    Args:
        seed_keys: [S] int64 of any stride, ``mix64`` of the slots' sequence seeds.
        slots: [N] int32.
        anchors: [N] int32 of any stride; column j is drawn for position ``anchor + 1 + j``.
        limits: [N] integer, columns of each row that count; less than none is none.
        num_columns: K.
        bound: [] int64, the chance of a column to stand if all before it do, in units of 2**-31. On the
            device, so that it can change between replays of a captured round.

    Returns:
        [N] int32 in 0..min(limits, K).
    """
    count = kernels().synthetic_matches if slots.is_cuda else reference.synthetic_matches
    return count(seed_keys, slots, anchors, limits, num_columns, bound)


def leading_matches(left: Tensor, right: Tensor, limits: Tensor) -> Tensor:
    """How many of the first columns are equal.

    Args:
        left: [N, at least K] int32.
        right: [N, K] int32.
        limits: [N] integer, columns of each row that count; less than none is none.

    Returns:
        [N] int32 in 0..min(limits, K).
    """
    count = kernels().leading_matches if left.is_cuda else reference.leading_matches
    return count(left, right, limits)


def advance(
    slots: Tensor,
    drafts: Tensor,
    sampled: Tensor,
    accepted: Tensor,
    num_computed: Tensor,
    tokens: Tensor,
    leads: Tensor | None = None,
) -> None:
    """Write N spans' draws behind their anchors and move their lengths past the rows that stand.

    Args:
        slots, drafts: [N] int32, as for :func:`span_rows`; no slot twice, but where there is no sequence.
        sampled: [N, W] int32 contiguous, each row's draw.
        accepted: [N] int32, drafts that stand.
        num_computed: [S] int32, moved on.
        tokens: [S, L] int32 contiguous, written.
        leads: [N] int32, rows of each span before its anchor, which stand; None for none.
    """
    move = kernels().advance if slots.is_cuda else reference.advance
    move(slots, drafts, sampled, accepted, num_computed, tokens, leads)


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
    """Norm and rotate keys of several layers, and write them and their values into the layers' paged caches.

    Args:
        kv: [layers, R, 2 KV * D], rows contiguous: key heads, then value heads.
        k_norms: [layers, D] contiguous, RMS norm weights shared by all heads of a layer.
        cos_sin, positions, kv_slots: as for ``qk_norm_rope_write``; the same rows in every layer.
        k_cache, v_cache: [layers, num_blocks, P, KV, D] contiguous, written in place.
    """
    write = kernels().kv_norm_rope_write if kv.is_cuda else reference.kv_norm_rope_write
    write(kv, k_norms, eps, cos_sin, positions, kv_slots, k_cache, v_cache)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    layout: RowLayout,
    scale: float,
    window: int | None = None,
    bidirectional: bool = False,
    *,
    own: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Causal attention of every row over its own sequence's keys, its own position included.

    Rows of prefill chunks, decode rows and verify spans may be mixed freely. The rows' own K/V must have been
    written to the cache before.

    Args:
        q: [R, H, D] contiguous.
        k_cache, v_cache: [num_blocks, P, KV, D] contiguous; H is a multiple of KV.
        layout: whose rows these are.
        scale: factor of the scores before the softmax.
        window: a row at position p sees positions above ``p - window`` only; None sees all.
        bidirectional: a row also sees the later rows of its own sequence in this layout: a drafter's block.
        own: [R, (H + 2 KV) * D] contiguous, the rows' own projections with the keys normed and rotated, as
            ``qk_norm_rope_write`` keeps them: the layout's ``num_fresh`` sequences are attended to through
            these instead of the cache. Only where :func:`reads_own_keys` says so, and neither with a window
            nor bidirectional nor deterministic.
        deterministic: a row's result depends on it and its keys alone, bit for bit. Slower.

    Returns:
        [R, H, D] in q's dtype; padding rows (from ``row_start[B]`` on) hold unspecified values.
    """
    operands = (q, k_cache, v_cache, layout, scale, window, bidirectional)
    if q.is_cuda:
        return kernels().paged_attention(*operands, own=own, deterministic=deterministic)  # type: ignore[no-any-return]
    return reference_attention.paged_attention(*operands, deterministic=deterministic)


def reads_own_keys(qkv: Tensor) -> bool:
    """Whether :func:`paged_attention` has a kernel that reads keys from the rows' own projections: for half
    precision on GPUs that fetch tiles of a matrix (NVIDIA Hopper and later).
    """
    return qkv.dtype.itemsize == 2 and is_hopper(qkv.device)
