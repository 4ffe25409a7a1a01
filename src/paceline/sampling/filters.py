"""Filters: which tokens of a row may be drawn.

All filters keep a prefix of one order: larger logit first, equal logits by ascending token id. Because the
order has no ties, the set kept by a row is the same however it is computed: from the few largest tokens, or
from a full sort.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.sampling.state import INV_TEMPERATURE, MIN_P_COLUMN, TOP_K, TOP_P


def ordered_top(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of each row, larger first, equal ones by ascending token id.

    ``torch.topk`` alone picks and orders equal values as it likes, and logits that come from bf16 weights
    have many. Here the token id is the low half of a 64-bit sort key whose high half orders as the logit
    does.

    Args:
        logits: [n, V] fp32 without NaN (a NaN sorts somewhere; ids stay in range).
        k: 1 to V.

    Returns:
        values [n, k] fp32 and token ids [n, k] int32.
    """
    V = logits.shape[-1]
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    high = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # IEEE-754 order as signed integers
    low = torch.arange(V - 1, -1, -1, dtype=torch.int64, device=logits.device)
    keys = (high.to(torch.int64) << 32) | low
    top = keys.topk(k).values if k < V else keys.sort(descending=True).values
    ids = (V - 1) - (top & 0xFFFFFFFF)
    return logits.gather(-1, ids), ids.to(torch.int32)


def kept_prefix(
    scaled: Tensor, floats: Tensor, ints: Tensor, total: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Which of a row's tokens, in order, min_p, top_k and top_p keep.

    top_p is taken over the probabilities that remain after min_p and top_k, renormalised, and keeps the
    smallest prefix whose mass reaches it: the token that crosses is included (Holtzman et al., 2020). The
    first token is always kept.

    Args:
        scaled: [n, K] fp32 logits over temperature, in order; K >= the row's top_k, or all of the
            vocabulary, or a part of it with ``total`` given.
        floats, ints: [n, ...] rows of the state's tables.
        total: [n] float64, when K is only a part of what min_p and top_k keep: the mass of that, relative to
            exp(the first logit).

    Returns:
        kept [n, K] bool, and complete [n] bool: the kept prefix ends within these K.
    """
    K = scaled.shape[1]
    weights = (scaled - scaled[:, :1]).exp()  # [n, K], relative to the most likely token
    kept = torch.arange(K, device=scaled.device) < ints[:, TOP_K, None]
    kept &= weights >= floats[:, MIN_P_COLUMN, None].float()
    # Sums are sequential in float64: the same whatever K is, and exact enough for a vocabulary of any size.
    mass = torch.where(kept, weights, 0.0).double()
    upto = mass.cumsum(-1)
    top_p = floats[:, TOP_P]
    goal = torch.where(top_p < 1.0, top_p * (upto[:, -1] if total is None else total), torch.inf)
    kept &= (upto - mass) < goal[:, None]
    kept[:, 0] = True
    return kept, upto[:, -1] >= goal


def mask_min_p(logits: Tensor, floats: Tensor) -> Tensor:
    """Logits [n, V] with every token less likely than min_p times the most likely one at -inf."""
    return logits.masked_fill(_min_p_weights(logits, floats) == 0.0, -torch.inf)


def min_p_mass(logits: Tensor, floats: Tensor) -> Tensor:
    """[n] float64: mass of the tokens of ``logits`` [n, V] min_p keeps; the most likely one has mass 1."""
    return _min_p_weights(logits, floats).double().cumsum(-1)[:, -1]


def _min_p_weights(logits: Tensor, floats: Tensor) -> Tensor:
    """[n, V] probabilities over the largest one, 0 where that is below min_p."""
    scaled = logits * floats[:, INV_TEMPERATURE, None].float()
    weights = scaled.sub_(scaled.amax(-1, keepdim=True)).exp_()
    return weights.masked_fill_(weights < floats[:, MIN_P_COLUMN, None].float(), 0.0)
