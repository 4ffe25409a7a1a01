"""A first start compiles every kernel ahead, in threads, and runs none of them meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

PROGRAM = """
import json, sys, threading
import triton
from paceline.config import EngineConfig
from paceline.engine.factory import make_core
from paceline.ops.ahead import compiles_only
from paceline.runtime import precompile
from paceline.sampling.params import SamplingParams
from support.engines import GOLDEN, complete, tokens_of

main = threading.get_ident()
ahead, at_launch, launched, passes = [], [], [], []

def listen(src, cache_hit, **_):
    if not cache_hit:
        (at_launch if threading.get_ident() == main else ahead).append(src.name)

def counted(*args, **options):
    passes.append(1)
    go_through(*args, **options)

triton.knobs.compilation.listener = listen
triton.knobs.runtime.launch_enter_hook = lambda metadata: launched.append(compiles_only())
go_through, precompile.go_through = precompile.go_through, counted
config = EngineConfig.of(
    model=str(GOLDEN / "qwen3_tiny"),
    device="cuda",
    dtype="float32",
    load_format="dummy",
    max_num_seqs=16,
    gpu_memory_utilization=0.3,
    speculative_config={"model": str(GOLDEN / "dspark_tiny_b7"), "verify_planner": sys.argv[1]},
)
late, tokens = [], []
for _ in range(2):
    core = make_core(config)
    late.append(list(at_launch))
    params = [SamplingParams(max_tokens=40, ignore_eos=True, temperature=t, seed=1) for t in (0.0, 1.0)]
    tokens.append(tokens_of(complete(core, [[5, 6, 7, 8] * 9] * 2, params)))
    del core
print(json.dumps([ahead, late[0], launched, len(passes), tokens]))
"""


@pytest.mark.parametrize("planner", ["auto", "off"])
def test_a_first_start(planner: str, tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    caches = {"XDG_CACHE_HOME": str(tmp_path / "ours"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    path = os.pathsep.join([str(tests), *filter(None, sys.path)])
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, planner],
        env={**os.environ, **caches, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    ahead, late, launched, passes, tokens = json.loads(run.stdout.splitlines()[-1])
    assert "could not be compiled side by side" not in run.stderr
    assert passes == 1, "the second start knows"
    assert len(ahead) > 30
    assert late == [], "kernels of a start that were not found ahead"
    assert launched and not any(launched)
    assert tokens[0] == tokens[1]
