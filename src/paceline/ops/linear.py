"""Matrix products with weights that do not change.

On a CPU a product of few rows spends most of its time rearranging the weights for the kernel: with 8 rows, a
verify span, oneDNN takes 3.4 ms for the bundled model's weights when they were rearranged once at load,
against 8 ms otherwise (fp32, one core of a Zen 4). So weights are packed at load there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_PACKED_ROWS = 8
"""Rows the packing is tuned for; other counts, one row and long prefills included, are no slower than
unpacked.
"""


def pack_linear(weight: Tensor) -> Tensor | None:
    """``weight`` [out, in] in oneDNN's layout for ``linear``, or None where there is nothing to gain: not on
    a CPU, not fp32, or a torch without the op.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.requires_grad:
        return None
    pack = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
    if pack is None or not torch.backends.mkldnn.is_available():
        return None
    packed: Tensor = pack(weight.contiguous(), _PACKED_ROWS)
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``.

    Args:
        x: [*, in].
        weight: [out, in].
        bias: [out].
        packed: ``pack_linear(weight)``, used instead of the weight when given.

    Returns:
        [*, out].
    """
    if packed is None or (torch.is_grad_enabled() and x.requires_grad):  # oneDNN's op has no gradient
        return F.linear(x, weight, bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out
