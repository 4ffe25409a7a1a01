"""The Triton sampler: interpreted on the CPU, and, with ``-m gpu``, compiled on a device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_sampler import VARIETY, mixed_cases, normal

from paceline.sampling.processors import SampleRows
from paceline.sampling.sampler import SampleOutput, sample
from paceline.sampling.state import SamplingState


def test_interpreted() -> None:
    pytest.importorskip("triton")
    path = Path(__file__).with_name("interpreted_sampler.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(path)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def run_on(device: str, vocab_size: int) -> SampleOutput:
    """Every kind of row in one batch."""
    cases = mixed_cases()
    state = SamplingState(len(cases), vocab_size, eos_token_ids=[0], device=device)
    tokens = torch.zeros(len(cases), 16, dtype=torch.int32)
    for slot, case in enumerate(cases):
        tokens[slot, : len(case.tokens)] = torch.tensor(case.tokens)
        state.set_slot(slot, case.params, case.seed, 2)
    rows = SampleRows(
        torch.arange(len(cases), dtype=torch.int32, device=device),
        torch.tensor([len(case.tokens) - 1 for case in cases], dtype=torch.int32, device=device),
        tokens.to(device),
        12,
    )
    logits = normal(len(cases), vocab_size, seed=1).to(device)
    features = state.features(np.arange(len(cases)))
    if device == "cpu":
        return sample(logits, rows, state, features)
    sample(logits.clone(), rows, state, features)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        return sample(logits, rows, state, features)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [1501, 7680, 151936])
def test_a_device_draws_what_the_cpu_draws_without_waiting(vocab_size: int) -> None:
    """Equal but for near ties: fp32 rounding differs between the two."""
    here, there = run_on("cpu", vocab_size), run_on("cuda", vocab_size)
    different = (here.tokens != there.tokens.cpu()).sum()
    assert different <= 1, (here.tokens, there.tokens)
    assert here.logprobs is not None and there.logprobs is not None
    same = here.tokens[here.logprobs.rows] == there.tokens.cpu()[here.logprobs.rows]
    torch.testing.assert_close(
        here.logprobs.logprobs[same], there.logprobs.logprobs.cpu()[same], rtol=0, atol=1e-4
    )
    assert len(VARIETY) * 3 == len(here.tokens)
