"""CUDA source is compiled once, in the background, and kept."""

from __future__ import annotations

import sys
from pathlib import Path
from threading import Event, Thread, get_ident
from types import ModuleType, SimpleNamespace

import pytest
import torch

from paceline.errors import ConfigError
from paceline.ops.persistent import compiler


class FakeNVRTC:
    """Compiles when it may, and notes in which thread."""

    def __init__(self) -> None:
        self.may = Event()
        self.threads: list[int] = []
        self.status = 0

    def compile(self, program: bytes, count: int, options: list[bytes]) -> tuple[int]:
        assert self.may.wait(10)
        self.threads.append(get_ident())
        return (self.status,)

    def bindings(self) -> SimpleNamespace:
        """What stands for ``cuda.bindings.nvrtc``; a program is its source."""
        return SimpleNamespace(
            nvrtcVersion=lambda: (0, 13, 0),
            nvrtcCreateProgram=lambda source, *_: (0, source),
            nvrtcCompileProgram=self.compile,
            nvrtcGetProgramLogSize=lambda program: (0, 3),
            nvrtcGetProgramLog=lambda program, log: (0,),
            nvrtcGetCUBINSize=lambda program: (0, len(program)),
            nvrtcGetCUBIN=lambda program, code: (0,),
        )


@pytest.fixture
def nvrtc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNVRTC:
    fake = FakeNVRTC()
    bindings = ModuleType("cuda.bindings")
    bindings.nvrtc = fake.bindings()  # type: ignore[attr-defined]
    for name, module in (("cuda", ModuleType("cuda")), ("cuda.bindings", bindings)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    compiler._begun.cache_clear()
    return fake


def test_it_is_compiled_once_while_others_go_on(nvrtc: FakeNVRTC) -> None:
    begun = compiler.start_compiling("source", {"A": 1})
    assert not begun.done()
    waiting = [Thread(target=compiler.compiled, args=("source", {"A": 1})) for _ in range(3)]
    for thread in waiting:
        thread.start()
    nvrtc.may.set()
    for thread in waiting:
        thread.join()
    assert compiler.compiled("source", {"A": 1}) == b" " * 6
    assert len(nvrtc.threads) == 1 and get_ident() not in nvrtc.threads
    compiler.compiled("source", {"A": 2})
    assert len(nvrtc.threads) == 2


def test_the_next_process_reads_it(nvrtc: FakeNVRTC) -> None:
    nvrtc.may.set()
    code = compiler.compiled("source", {})
    compiler._begun.cache_clear()
    assert compiler.compiled("source", {}) == code and len(nvrtc.threads) == 1


def test_what_does_not_compile_is_told_to_everyone_who_asks(nvrtc: FakeNVRTC) -> None:
    nvrtc.may.set()
    nvrtc.status = 6
    compiler.start_compiling("source", {})
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"CUDA source does not compile with .*sm_90a"):
            compiler.compiled("source", {})
    assert len(nvrtc.threads) == 1


def test_the_kernels_launch_and_an_early_start_mean_the_same_code(
    nvrtc: FakeNVRTC, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.ops.persistent import launch

    asked: list[object] = []
    monkeypatch.setattr(launch, "start_compiling", lambda *source: asked.append(source))
    monkeypatch.setattr(
        launch, "CudaKernel", lambda source, name, defines, _: asked.append((source, defines))
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    for hidden_size in (2560, 4096):
        asked.clear()
        launch.compile_early(hidden_size)
        launch._kernel.__wrapped__(launch.Machine(torch.device("cpu"), hidden_size).max_chunks, 0)
        assert asked[0] == asked[1]
