"""Spans with drafts on the real runner: acceptance, lengths and tokens after every outcome, mixed with plain
rows.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.models.attention import KVCache
from paceline.models.loader import load_model
from paceline.runtime.acceptance import count_accepted
from paceline.runtime.plan import SlotInit, Span, StepPlan, TableUpdate
from paceline.runtime.rows import build_rows
from paceline.runtime.runner import Runner
from paceline.sampling.params import SamplingParams
from support.engines import GOLDEN, golden_cases

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, logprobs=0)


@pytest.fixture(scope="module")
def runner() -> Runner:
    model = load_model(GOLDEN / "qwen3_tiny", device="cpu", dtype="float32")
    config = model.config
    cache = KVCache.allocate(
        config.num_hidden_layers,
        64,
        16,
        config.num_key_value_heads,
        config.head_dim,
        dtype=torch.float32,
        device="cpu",
    )
    return Runner(model, cache, max_num_seqs=4, max_model_len=220, device=torch.device("cpu"))


def start(runner: Runner, slot: int, prompt: list[int]) -> int:
    """Prefill a prompt into its own blocks; returns the first token drawn."""
    blocks = list(range(slot * 16, slot * 16 + 12))
    plan = StepPlan(
        0,
        inits=[SlotInit(slot, prompt, 0, len(prompt), GREEDY, 0)],
        table=[TableUpdate(slot, 0, blocks)],
        spans=[Span(slot, len(prompt))],
        max_context=len(prompt),
    )
    return runner.launch(plan).result()[0].tokens[0]


def propose(runner: Runner, slot: int, length: int, drafts: list[int]) -> None:
    """Write tentative tokens behind the anchor at position ``length - 1``."""
    runner.state.tokens[slot, length : length + len(drafts)] = torch.tensor(drafts, dtype=torch.int32)


def test_attention_is_told_of_the_prompts_that_begin(runner: Runner) -> None:
    """Those at the end of the step: whatever stands before other rows is not told of."""

    def told(*fresh: bool) -> int:
        spans = [Span(slot, 2, fresh=begins) for slot, begins in enumerate(fresh)]
        return build_rows(spans, runner.state, runner._staging, 64).layout.num_fresh

    assert [told(False), told(False, True), told(True, True), told(True, False, True, True)] == [0, 1, 2, 2]


@pytest.mark.parametrize("right", range(8))
def test_as_many_drafts_stand_as_are_right(runner: Runner, right: int) -> None:
    case = golden_cases("qwen3_tiny")[4]
    prompt, greedy = case["input_ids"].tolist(), case["greedy_ids"].tolist()
    assert start(runner, 0, prompt) == greedy[0]
    drafts = greedy[1:8]
    if right < 7:
        drafts[right] = (drafts[right] + 1) % 300 + 3
    propose(runner, 0, len(prompt) + 1, drafts)
    plan = StepPlan(1, spans=[Span(0, 8, drafts=7)], max_context=len(prompt) + 8)
    (result,) = runner.launch(plan).result()
    assert result.tokens == greedy[1 : right + 2]
    assert result.logprobs is not None and len(result.logprobs) == right + 1
    assert int(runner.state.num_computed[0]) == len(prompt) + right + 1
    # What follows is decoded plainly from there: rejected rows left no trace.
    for expected in greedy[right + 2 : right + 6]:
        plan = StepPlan(2, spans=[Span(0, 1)], max_context=len(prompt) + 24)
        assert runner.launch(plan).result()[0].tokens == [expected]


def test_spans_plain_rows_and_prefill_chunks_share_a_step(runner: Runner) -> None:
    cases = golden_cases("qwen3_tiny")
    full, part, plain = ((cases[i]["input_ids"].tolist(), cases[i]["greedy_ids"].tolist()) for i in (2, 3, 4))
    for slot, (prompt, greedy) in enumerate((full, part, plain)):
        assert start(runner, slot, prompt) == greedy[0]
    propose(runner, 0, len(full[0]) + 1, full[1][1:6])
    propose(runner, 1, len(part[0]) + 1, [part[1][1], 299, 298])
    prompt, greedy = cases[5]["input_ids"].tolist(), cases[5]["greedy_ids"].tolist()
    plan = StepPlan(
        3,
        inits=[SlotInit(3, prompt, 0, len(prompt), GREEDY, 0)],
        table=[TableUpdate(3, 0, list(range(48, 60)))],
        spans=[Span(1, 4, drafts=3), Span(3, 40, sample=False), Span(0, 6, drafts=5), Span(2, 1)],
        max_context=100,
    )
    results = runner.launch(plan).result()
    assert [r.tokens for r in results] == [part[1][1:3], [], full[1][1:7], [plain[1][1]]]
    rest = StepPlan(4, spans=[Span(3, len(prompt) - 40), Span(1, 1)], max_context=100)
    results = runner.launch(rest).result()
    assert [r.tokens for r in results] == [[greedy[0]], [part[1][3]]]


@settings(max_examples=200, deadline=None)
@given(data=st.data(), spans=st.integers(1, 5), width=st.integers(1, 6))
def test_the_rule_is_the_longest_matching_prefix(data: st.DataObject, spans: int, width: int) -> None:
    draw = st.lists(st.integers(0, 2), min_size=width, max_size=width)
    drafts = [data.draw(draw) for _ in range(spans)]
    sampled = [[*data.draw(draw), 0] for _ in range(spans)]
    counts = [data.draw(st.integers(0, width)) for _ in range(spans)]
    got = count_accepted(
        torch.tensor(sampled, dtype=torch.int32),
        torch.tensor(drafts, dtype=torch.int32),
        torch.tensor(counts, dtype=torch.int32),
    )
    for i in range(spans):
        want = 0
        while want < counts[i] and sampled[i][want] == drafts[i][want]:
            want += 1
        assert int(got[i]) == want
    assert got.dtype == torch.int32 and np.all(got.numpy() >= 0)
