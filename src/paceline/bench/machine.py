"""What a measurement was taken on, and how fast its memory is."""

from __future__ import annotations

import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import paceline


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Machine and versions, as they stand beside every result."""
    info: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "paceline": paceline.__version__,
        "command": " ".join(["paceline", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
    }
    if device.type == "cuda":
        import triton

        properties = torch.cuda.get_device_properties(device)
        info["gpu"] = properties.name
        info["gpu_memory_bytes"] = properties.total_memory
        info["cuda"] = torch.version.cuda
        info["triton"] = triton.__version__
    return info


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def read_bandwidth(device: torch.device, repeats: int = 9) -> float:
    """Bytes per second at which weights can be read: a matrix-vector product over 256 MB (CPU) or 4 GB (GPU).

    A decode step at batch 1 is such products one after the other, so this is the ceiling it is compared with.
    Median of ``repeats``.
    """
    rows = 2**14 if device.type == "cpu" else 2**18
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    columns = 4096 if device.type == "cpu" else 8192
    matrix = torch.randn(rows, columns, device=device, dtype=dtype)
    vector = torch.randn(columns, device=device, dtype=dtype)
    seconds = []
    for i in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        torch.mv(matrix, vector)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i >= 2:
            seconds.append(time.perf_counter() - start)
    return matrix.numel() * matrix.element_size() / statistics.median(seconds)
