"""Which version of an op runs."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor


@cache
def kernels() -> ModuleType:
    """The Triton versions. Imported late: Triton is not there on a CPU-only install."""
    from paceline.ops import triton

    return triton


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether it is a GPU of compute capability 9.0 (NVIDIA Hopper) or later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def differentiated(*tensors: Tensor) -> bool:
    """Whether a gradient may be asked for, or torch.compile is tracing: the reference then runs."""
    if torch.compiler.is_compiling():
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
