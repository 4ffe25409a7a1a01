"""The Triton sampler: interpreted on the CPU, and, with ``-m gpu``, compiled on a device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sampling_harness import set_slot
from test_sampler import VARIETY, mixed_cases, normal

from paceline.sampling.filters import kept_prefix, ordered_top
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import SampleRows
from paceline.sampling.sampler import SampleOutput, sample
from paceline.sampling.state import INV_TEMPERATURE, SamplingState, SlotSampling


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
        set_slot(state, slot, case.params, case.seed, 2)
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


FILTERS: list[tuple[dict[str, Any], int]] = [
    ({}, 0),
    ({"temperature": 0.0, "top_k": 5}, 0),
    ({"top_k": 1}, 0),
    ({"top_k": 20}, 0),
    ({"top_k": 1024}, 0),
    ({"top_k": 5000}, 0),  # too many to gather
    ({"top_k": 151936}, 0),
    ({"top_k": 20, "top_p": 0.95, "temperature": 0.6}, 1),
    ({"top_k": 500, "top_p": 0.5, "min_p": 0.001}, 1),
    ({"top_p": 1e-9}, 0),
    ({"top_p": 0.95, "temperature": 0.6}, 1),
    ({"top_p": 0.95, "temperature": 2.0}, 20),  # most of the row
    ({"top_p": 1 - 1e-9}, 20),
    ({"min_p": 0.05}, 1),
    ({"min_p": 1e-7, "top_p": 0.9}, 20),
]
"""And how many tokens at the edge of a mass may fall on its other side by rounding."""


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["random", "bf16", "few allowed"])
def test_a_device_keeps_what_the_cpu_keeps(kind: str) -> None:
    """In a graph, whose slots get parameters after it was captured; the same every time and in any batch."""
    from paceline.sampling.triton_filters import last_kept

    vocab_size, count = 151936, len(FILTERS)
    logits = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(3)) * 3
    if kind == "bf16":
        logits = logits.bfloat16().float()
    elif kind == "few allowed":
        logits[:, 5000:] = -torch.inf
    states = {device: SamplingState(count, vocab_size, device=device) for device in ("cpu", "cuda")}
    state, x = states["cuda"], logits.cuda()
    slots = torch.arange(count, dtype=torch.int32, device="cuda")
    last_kept(x, slots, state.floats, state.ints)  # compiles
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        last = last_kept(x, slots, state.floats, state.ints)
    entries = [SlotSampling(slot, SamplingParams(**fields), 0, 1) for slot, (fields, _) in enumerate(FILTERS)]
    for each in states.values():
        each.set_slots(entries)
    seen = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        seen.append((last.logits.tolist(), last.tokens.tolist()))
    assert seen[0] == seen[1] == seen[2]
    for row in range(count):
        alone = last_kept(x[[row]], slots[[row]], state.floats, state.ints)
        assert (alone.logits.item(), alone.tokens.item()) == (
            last.logits[row].item(),
            last.tokens[row].item(),
        )

    floats, ints = states["cpu"].floats, states["cpu"].ints
    values, ids = ordered_top(logits, vocab_size)
    kept, _ = kept_prefix(values * floats[:, INV_TEMPERATURE, None].float(), floats, ints)
    kept[floats[:, INV_TEMPERATURE] == 0] = True
    last_logit, last_token = last.logits.cpu()[:, None], last.tokens.cpu()[:, None]
    got = (values > last_logit) | ((values == last_logit) & (ids <= last_token))
    off = ((got != kept) & (values > -torch.inf)).sum(1).tolist()
    assert all(n <= most for n, (_, most) in zip(off, FILTERS, strict=True)), off
