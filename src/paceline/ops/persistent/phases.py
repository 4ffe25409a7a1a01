"""What a pass consists of: phases, which read what those before them wrote. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class Product:
    """``out = norm(source) @ weight.T``, or what ``epilogue`` makes of it.

    Attributes:
        weight: [n, k]; with ``swiglu`` [2 n, k], gates then ups.
        source: [R, k].
        out: [R, n]; fp32 for logits, which are rounded to the weights' dtype all the same.
        norm: [k], RMSNorm weight; None for none.
        epilogue: ``store``, ``add`` to ``before``, or store ``silu(gate) * up``.
        before: [R, n], what is added to; laid out as ``out``, and another tensor.
        tap: [R, n], gets the sum too when it is added.
        forgets: tensors whose readers have all given results that this phase awaits; the next phase is the
            first that may write them anew.
    """

    weight: Tensor
    source: Tensor
    out: Tensor
    norm: Tensor | None = None
    epilogue: Literal["store", "add", "swiglu"] = "store"
    before: Tensor | None = None
    tap: Tensor | None = None
    forgets: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Attend:
    """Norm and rotate q and k, write k and v, and attend.

    Attributes:
        num_heads: H.
        bidirectional: whether rows of a sequence also see the later ones of this pass.
        qkv: [R, (H + 2 KV) * D] contiguous.
        out: [R, H * D] contiguous.
        q_norm, k_norm: [D].
        k_cache, v_cache: [blocks, P, KV, D].
    """

    num_heads: int
    bidirectional: bool
    qkv: Tensor
    out: Tensor
    q_norm: Tensor
    k_norm: Tensor
    k_cache: Tensor
    v_cache: Tensor


@dataclass(frozen=True)
class WriteContext:
    """Norm and rotate keys of a drafter's layer and write them with their values.

    Attributes:
        kv: [R, 2 KV * D], which may be a slice of wider rows.
        k_norm: [D].
        k_cache, v_cache: [blocks, P, KV, D].
        cos_sin: [positions, D] fp32.
    """

    kv: Tensor
    k_norm: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cos_sin: Tensor


Phase = Product | Attend | WriteContext
