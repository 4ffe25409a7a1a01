"""CUDA C++ compiled at run time by NVRTC, which comes with torch: a user needs no compiler.

Compiled code is kept on disk, by source, options, compiler and device. Compiling takes many seconds and no
interpreter lock: it can be started before the code is needed.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future
from functools import cache
from threading import Lock, Thread
from typing import Any

import torch

from paceline.errors import ConfigError, EngineDeadError
from paceline.ops.folders import cache_folder

logger = logging.getLogger(__name__)


def can_compile() -> bool:
    """Whether NVRTC and the driver can be called: torch's CUDA builds bring the bindings."""
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError:
        return False
    return driver is not None and nvrtc is not None


class CudaKernel:
    """One function of a compiled source.

    Args:
        source: CUDA C++; includes nothing.
        name: an ``extern "C"`` kernel in it.
        defines: macros.
        shared_bytes: dynamic shared memory per block.

    Raises:
        ConfigError: it does not compile, or the device refuses it.
    """

    def __init__(self, source: str, name: str, defines: Mapping[str, int], shared_bytes: int) -> None:
        from cuda.bindings import driver  # with torch's CUDA builds

        self._driver = driver
        self._shared_bytes = shared_bytes
        torch.cuda.current_stream()  # a context must exist
        self._module = _checked(driver.cuModuleLoadData(compiled(source, defines)))
        self._function = _checked(driver.cuModuleGetFunction(self._module, name.encode()))
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(self._function, limit, shared_bytes))

    def launch_together(
        self, grid: int, threads: int, arguments: list[ctypes._SimpleCData[Any] | ctypes.Structure]
    ) -> None:
        """Launch ``grid`` blocks on torch's current stream, all of them resident at once.

        Args:
            grid, threads: blocks, and threads of each.
            arguments: the kernel's, by value; copied before this returns.

        Raises:
            EngineDeadError: the device refuses: it has failed before, or cannot hold so many blocks.
        """
        pointers = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(item) for item in arguments])
        (status,) = self._driver.cuLaunchCooperativeKernel(
            self._function,
            grid,
            1,
            1,
            threads,
            1,
            1,
            self._shared_bytes,
            torch.cuda.current_stream().cuda_stream,
            ctypes.addressof(pointers),
        )
        if int(status) != 0:
            raise EngineDeadError(
                f"The GPU refuses a kernel of {grid} blocks with {threads} threads: {status!r}. The cause "
                "may be an earlier kernel, or another process on this GPU; the engine must be started again."
            )


def compiled(source: str, defines: Mapping[str, int]) -> bytes:
    """Machine code of ``source`` for the current device, from the cache where it is there.

    Raises:
        ConfigError: it does not compile.
    """
    return start_compiling(source, defines).result()


def start_compiling(source: str, defines: Mapping[str, int]) -> Future[bytes]:
    """Begin to compile ``source`` for the current device in a thread of its own; only once in a process.

    The thread is waited for when Python exits: code that is nearly there is kept for the next start.
    """
    major, minor = torch.cuda.get_device_capability()
    options = [f"--gpu-architecture=sm_{major}{minor}{'a' if major >= 9 else ''}", "-std=c++17"]
    options += [f"-D{name}={value}" for name, value in sorted(defines.items())]
    with _lock:  # not to begin it twice
        return _begun(source, tuple(options))


_lock = Lock()


@cache
def _begun(source: str, options: tuple[str, ...]) -> Future[bytes]:
    code: Future[bytes] = Future()

    def run() -> None:
        try:
            code.set_result(_read_or_compile(source, options))
        except BaseException as error:
            code.set_exception(error)

    Thread(target=run, name="compile CUDA source").start()
    return code


def _read_or_compile(source: str, options: tuple[str, ...]) -> bytes:
    from cuda.bindings import nvrtc

    version = _checked(nvrtc.nvrtcVersion())
    key = hashlib.sha256(repr((source, list(options), version)).encode()).hexdigest()[:32]
    path = cache_folder("cubin") / f"{key}.cubin"
    if path.exists():
        return path.read_bytes()
    started = time.perf_counter()
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    status = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(status[0]) != 0:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise ConfigError(f"CUDA source does not compile with {list(options)}: {log.decode()}")
    code: bytes = b" " * int(_checked(nvrtc.nvrtcGetCUBINSize(program)))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(code)
    unfinished.replace(path)  # whole or not at all: engines may start side by side
    logger.info("Compiled the kernel for few rows in %.2f s", time.perf_counter() - started)
    return code


def _checked(result: tuple[Any, ...]) -> Any:
    """The value of a CUDA call.

    Raises:
        ConfigError: it failed.
    """
    status, *values = result
    if int(status) != 0:
        raise ConfigError(f"A CUDA call failed: {status!r}.")
    return values[0] if values else None
