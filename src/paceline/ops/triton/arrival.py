"""Who finishes last: programs that share one result leave their parts, and the last to arrive adds them up.

That saves a second launch. The order of the sum is the parts' order, not the order of arrival, so the result
does not depend on timing.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_COUNTERS = 1 << 16


@lru_cache
def counters(device: torch.device) -> Tensor:
    """[MAX_COUNTERS] int32 zeros, one for each result under way on the device.

    Every kernel leaves them at zero, so all kernels of a stream share them, captured ones included. Work on
    two streams at once must not.
    """
    return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)


@triton.jit
def arrive(counter_ptr, expected):
    """Whether this program is the last of ``expected`` ones; what they stored before is then visible to it,
    past the first cache level (``.cg``). The counter is back at zero afterwards.
    """
    tl.debug_barrier()  # the counter is raised by one thread: all others' stores come before it
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    last = arrived == expected - 1
    if last:
        tl.store(counter_ptr, 0)
    return last
