"""What a measurement was taken on, and how fast its memory is."""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

import paceline
from paceline.config import BUNDLED_DRAFTERS
from paceline.speculation.config import SpeculativeConfig

if TYPE_CHECKING:
    from paceline.bench.driver import Driver


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


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second at which weights can be read: a matrix-vector product over 256 MB (CPU) or 4 GB (GPU),
    or on a GPU a copy, whichever is faster.

    A decode round at batch 1 is such products one after the other, so this is the ceiling it is compared
    with. Medians of nine.
    """
    on_gpu = device.type == "cuda"
    rows, columns = (2**18, 8192) if on_gpu else (2**14, 4096)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    matrix = torch.randn(rows, columns, device=device, dtype=dtype)
    vector = torch.randn(columns, device=device, dtype=dtype)
    num_bytes = matrix.numel() * matrix.element_size()
    rate = num_bytes / _median_s(lambda: torch.mv(matrix, vector), device)
    if on_gpu:
        half = matrix.view(2, -1)
        rate = max(rate, num_bytes / _median_s(lambda: half[0].copy_(half[1]), device))
    return rate


def _median_s(action: Callable[[], object], device: torch.device) -> float:
    """Seconds of an action: nine times, after two to warm up."""
    seconds = []
    for i in range(11):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i >= 2:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def describe_speculation(config: SpeculativeConfig | None) -> dict[str, Any] | None:
    """The options, with a bundled drafter by its name: where it is installed is nobody's business."""
    if config is None:
        return None
    bundled = {str(folder): folder.name for folder in BUNDLED_DRAFTERS.values()}
    options: dict[str, Any] = msgspec.to_builtins(config)
    return {**options, "model": bundled.get(str(config.model), config.model)}


def describe_engine(driver: Driver) -> dict[str, Any]:
    """What was measured, as it stands beside every result."""
    info, engine = driver.info, driver.engine
    speculation = engine.speculation
    return {
        "model": Path(info.folder).name if engine.model is None else engine.model_path,
        "dtype": info.dtype,
        "load_format": engine.load_format,
        "weights_bytes": info.weights_bytes,
        "max_num_seqs": info.max_num_seqs,
        "block_size": info.block_size,
        "speculation": describe_speculation(speculation),
        "num_drafts": driver.num_drafts,
    }
