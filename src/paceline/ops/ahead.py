"""Compiling kernels before they are needed, side by side.

Triton compiles a kernel when it is first launched, and whoever launches it waits. Here launches compile and
do nothing else: work is run once for the kernels it asks for, and all of them compile in threads meanwhile,
and so do the C functions that launch them, which Triton 3.6 leaves to the C compiler one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_UNWRITTEN = tuple(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
_lock = Lock()
_thread: int | None = None


def compiles_only() -> bool:
    """Whether kernels that this thread launches are compiled and do not run."""
    return _thread == get_ident()


@contextmanager
def compile_only() -> Iterator[list[int]]:
    """Triton kernels that this thread launches in here are compiled and do not run; at the end all are there.
    What a kernel would have written is zero: torch's own operations run, and find indices they can use.

    A kernel that does not compile says so when it is launched for good.

    Returns:
        A list that gets the number of kernels at the end.
    """
    import triton  # not there on a CPU-only install
    from triton.runtime.jit import JITFunction

    global _thread
    count: list[int] = []
    with (
        _lock,
        _Compilers() as threads,
        triton.AsyncCompileMode(threads, ignore_errors=True) as mode,
    ):
        _thread = get_ident()
        JITFunction.__getitem__ = _launcher
        try:
            with ZeroMode():  # type: ignore[no-untyped-call]
                yield count
        finally:
            del JITFunction.__getitem__  # the inherited one is back
            _thread = None
            count.append(len(mode.future_kernels))


class _Compilers(ThreadPoolExecutor):
    """Threads that compile a kernel and what launches it."""

    def submit(self, compile_kernel: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See :meth:`Executor.submit`."""
        from triton.runtime import driver

        def compile_both() -> Any:
            kernel = compile_kernel(*args, **kwargs)
            driver.active.launcher_cls(kernel.src, kernel.metadata)  # kept on disk
            return kernel

        return super().submit(compile_both)


def _launcher(kernel: Any, grid: Any) -> Callable[..., Any]:
    """What stands for ``kernel[grid]``."""
    from triton import FutureKernel, KernelInterface

    if not compiles_only():
        return KernelInterface.__getitem__(kernel, grid)  # type: ignore[no-any-return]

    def compile_it(*args: Any, **options: Any) -> None:
        made = kernel.warmup(*args, grid=grid, **options)
        if isinstance(made, FutureKernel) and _is_compiled(made.future):
            made.result()  # Triton 3.6 finds it sooner from now on

    return compile_it


def _is_compiled(future: Future[Any] | None) -> bool:
    """Whether it is done, and well; Triton drops futures whose result it took."""
    return future is not None and future.done() and future.exception() is None


class ZeroMode(TorchDispatchMode):
    """Memory that torch gives out unwritten is zero."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in _UNWRITTEN and isinstance(made, Tensor):
            made.zero_()
        return made
