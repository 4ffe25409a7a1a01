# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# (Triton kernels are a language of their own inside Python's syntax.)
"""Kernels that start before the one they wait for has ended (programmatic dependent launch, NVIDIA Hopper and
later).

A decode round is a chain of some three hundred kernels of a few microseconds, and each that waits to be
launched until its predecessor has ended loses one or two. Here it is launched as soon as every program of the
predecessor runs, and waits for the predecessor's end on the device (CUDA programming guide, "Programmatic
Dependent Launch and Synchronization").

The rule that keeps this right: a kernel launched with ``dependent_launch`` calls ``await_previous`` in every
program, before it reads or writes anything. The wait is for the predecessor's end, all its writes included,
and the predecessor had waited likewise: whatever came earlier has ended too.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from paceline.ops.dispatch import is_hopper
from paceline.ops.early import launched_early

EARLY_ROWS = 32
"""Rows up to which kernels with much shared memory, products and attention, are launched early: larger ones
then crowd on the processors that happen to be free. A pass of 64 rows of Qwen3-4B took 3.41 ms with early
attention and 3.59 with early products too on an H200, 3.31 without; one of 32 rows 3.19 instead of 3.32.
"""


def dependent_launch(device: torch.device, pays: bool = True) -> dict[str, Any]:
    """Arguments of a launch: ``DEPENDENT`` for the kernel, and what the launcher must be told.

    Args:
        device: of the tensors.
        pays: whether an early launch is worth it.
    """
    if pays and launched_early() and is_hopper(device):
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}


@triton.jit
def await_previous(DEPENDENT: tl.constexpr):
    """Wait until the kernel before this one has ended, and let the one after this one be launched."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
