"""Launches that compile and do not run. No GPU is needed to compile for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread, current_thread, get_ident
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.ahead import ZeroMode, compile_only, compiles_only


@triton.jit  # type: ignore[untyped-decorator]
def double_kernel(x_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.arange(0, SIZE)
    tl.store(x_ptr + index, tl.load(x_ptr + index) * 2)


@triton.jit  # type: ignore[untyped-decorator]
def broken_kernel(x_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x_ptr, tl.zeros((SIZE, SIZE), tl.float32) + tl.arange(0, 2 * SIZE))


class LaunchedError(Exception):
    """A kernel was about to run."""


class Hopper:
    """A GPU to compile for, on which nothing can run.

    Attributes:
        launchers: made by threads that compile, so far.
    """

    def __init__(self) -> None:
        self.launchers = 0

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        """See ``triton.backends.driver.GPUDriver``; the first that a launch asks for."""
        assert source.fn in (double_kernel, broken_kernel) and metadata.num_warps
        if not current_thread().name.startswith("ThreadPoolExecutor"):
            raise LaunchedError
        self.launchers += 1


@pytest.fixture
def compiled_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Threads that compiled something so far."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns without
    threads: list[int] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **_: threads.append(get_ident()))
    driver = triton.runtime.driver
    before = driver._active
    driver.set_active(Hopper())
    for kernel in (double_kernel, broken_kernel):
        kernel.device_caches.clear()
    yield threads
    driver._active = before


def launch(kernel: Any, x: Tensor, size: int = 4) -> None:
    kernel[(1,)](x, SIZE=size)


def test_launches_compile_elsewhere_and_do_not_run(compiled_by: list[int]) -> None:
    x = torch.ones(16)
    with compile_only() as count:
        assert compiles_only()
        for size in (4, 8, 4, 8):
            launch(double_kernel, x, size)
    assert count == [2] and len(compiled_by) == 2 and get_ident() not in compiled_by
    assert triton.runtime.driver.active.launchers == 2
    assert not compiles_only()
    for size in (4, 8):
        with pytest.raises(LaunchedError):  # at once, and for good
            launch(double_kernel, x, size)
    assert len(compiled_by) == 2


def test_a_kernel_that_does_not_compile_says_so_when_launched(compiled_by: list[int]) -> None:
    x = torch.ones(16)
    with compile_only() as count:
        launch(broken_kernel, x)
        launch(double_kernel, x)
        launch(broken_kernel, x)
        launch(broken_kernel, x, 8)
    assert count == [3]
    with pytest.raises(triton.CompilationError):
        launch(broken_kernel, x)
    with pytest.raises(LaunchedError):
        launch(double_kernel, x)


def test_other_threads_launch_meanwhile(compiled_by: list[int]) -> None:
    launched = []

    def elsewhere() -> None:
        assert not compiles_only()
        with pytest.raises(LaunchedError):
            launch(double_kernel, torch.ones(16))
        launched.append(get_ident())

    with compile_only() as count:
        thread = Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert count == [0] and compiled_by == launched


def test_what_fails_in_between_leaves_nothing_behind(compiled_by: list[int]) -> None:
    with pytest.raises(ZeroDivisionError), compile_only():
        launch(double_kernel, torch.ones(16))
        raise ZeroDivisionError
    assert not compiles_only()
    with pytest.raises(LaunchedError):
        launch(double_kernel, torch.ones(16))
    with compile_only() as count:
        launch(double_kernel, torch.ones(16))
    assert count == [0]


def unwritten() -> list[Tensor]:
    """Memory from everything that gives it out unwritten."""
    like = torch.ones(3, 4)
    return [
        torch.empty(5),
        torch.empty(2, 3, dtype=torch.int64),
        torch.empty_like(like),
        like.new_empty(7),
        torch.empty_strided((2, 3), (3, 1)),
        like.new_empty_strided((2, 3), (3, 1)),
    ]


def test_memory_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)  # fills it with something else
    try:
        with torch.inference_mode():
            assert all(bool((item != 0).all()) for item in unwritten())
            with ZeroMode():  # type: ignore[no-untyped-call]
                assert all(bool((item == 0).all()) for item in unwritten())
                assert torch.ones(3).sum() == 3
    finally:
        torch.use_deterministic_algorithms(False)
