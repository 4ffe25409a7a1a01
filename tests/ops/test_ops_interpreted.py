"""Runs test_ops_kernels.py in Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", "test_ops_kernels.py"]
    run = subprocess.run(
        command,
        cwd=Path(__file__).parent,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]


def test_a_cpu_process_never_imports_triton() -> None:
    program = (
        "import sys, torch; before = 'triton' in sys.modules; from paceline import ops; "
        "ops.rms_norm(torch.randn(2, 8), torch.ones(8), 1e-6); "
        "assert before or 'triton' not in sys.modules; assert 'paceline.ops.triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
