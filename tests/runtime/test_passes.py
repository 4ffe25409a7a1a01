"""Short passes of fixed size: the same tokens, whatever part of a pass is padding."""

from __future__ import annotations

import random
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_rounds import round_core

from paceline.config import EngineConfig
from paceline.engine.factory import make_core
from paceline.models.qwen3 import ForwardOutput
from paceline.proving.drive import runner_of
from paceline.runtime import passes
from paceline.runtime.passes import PassSet, RowPass, choose_pass, pass_sizes
from paceline.runtime.plan import Span
from paceline.runtime.rows import StepRows, build_rows
from paceline.sampling.params import SamplingParams
from support.engines import GOLDEN, complete, tokens_of


@given(st.integers(1, 2200), st.integers(1, 18), st.integers(8, 4000))
def test_the_smallest_pass_that_holds_the_rows(num_rows: int, num_seqs: int, max_rows: int) -> None:
    sizes = pass_sizes(max_rows)
    found = choose_pass(num_rows, num_seqs, sizes)
    fitting = [size for size in sizes if size[0] >= num_rows and size[1] >= num_seqs]
    assert found is None or (found == min(fitting) and found[0] <= max_rows)
    if num_rows <= min(max_rows, 512) and num_seqs <= 4:
        assert found is not None  # what takes least time is never launched kernel by kernel


def test_sizes_of_passes() -> None:
    """No pass has more rows than a step; full steps of up to 2,048 rows have one of their own."""
    assert pass_sizes(40) == [(32, 1), (32, 4), (40, 1), (40, 4)]
    assert [rows for rows, seqs in pass_sizes(1000) if seqs != 4] == [32, 64, 128, 256, 512, 768, 1000]
    assert pass_sizes(8192) == pass_sizes(2048)
    assert [seqs for rows, seqs in pass_sizes(8192) if rows >= 256] == [1, 4, 16, 16, 16, 16, 16]


@pytest.mark.parametrize(
    ("num_rows", "padded"),
    [
        (400, 512),
        (520, 768),
        (1000, 1024),
        (1100, 1536),
        (1537, None),
        (2000, None),
        (2048, 2048),
        (2049, None),
    ],
)
def test_padding_costs_no_more_than_launching_would(num_rows: int, padded: int | None) -> None:
    """1,537 rows take three quarters of what they take to launch; padded to 2,048 all of it."""
    found = choose_pass(num_rows, 2, pass_sizes(8192))
    assert (found and found[0]) == padded


@pytest.mark.parametrize("drafter", [None, "dspark_tiny_b7"])
def test_passes_change_no_token(drafter: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cold, behind a prefix hit, several prompts in a step, beside decode rounds; with prompt logprobs."""
    monkeypatch.setattr(passes, "PASS_ROWS", (4, 16, 40))
    monkeypatch.setattr(passes, "FEW_ROWS", 16)
    rng = random.Random(5)
    shared = [rng.randrange(3, 320) for _ in range(32)]
    prompts = [shared + [rng.randrange(3, 320) for _ in range(n)] for n in (1, 3, 9, 25, 2, 14)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, prompt_logprobs=1 if i == 3 else None)
        for i in range(len(prompts))
    ]
    plain = make_core(EngineConfig(model=str(GOLDEN / "qwen3_tiny"), device="cpu", enforce_eager=True))
    expected = complete(plain, prompts, params)
    core = round_core(drafter, 1)
    runner = runner_of(core)
    assert runner.rounds is not None
    monkeypatch.setattr(runner.rounds, "with_prompts", lambda spans, kinds, depth: kinds)
    made = runner.passes = runner.make_passes(512, 40)
    ran: list[tuple[int, int]] = []
    forward = made.forward

    def counted(rows: StepRows) -> ForwardOutput | None:
        ran.append((len(rows.tokens), len(rows.layout.host_rows)))
        return forward(rows)

    monkeypatch.setattr(made, "forward", counted)
    together = complete(core, prompts, params)
    warm = [complete(core, [prompt], [p])[0] for prompt, p in zip(prompts, params, strict=True)]
    core.reset_prefix_cache()
    cold = [complete(core, [prompt], [p])[0] for prompt, p in zip(prompts[:2], params[:2], strict=True)]
    for got in (together, warm, [*cold, *warm[2:]]):
        assert tokens_of(got) == tokens_of(expected)
        (ours,), (theirs,) = (
            [output.prompt_logprobs for output in group[3] if output.prompt_logprobs]
            for group in (got, expected)
        )
        assert [list(entry or []) for entry in ours] == [list(entry or []) for entry in theirs]
    everything = {*((r, s) for r in (4, 16) for s in (1, 4)), (40, 16)}
    there = everything - set(made.graphs.missing)
    assert len(there) >= 3 and any(seqs > 1 for _, seqs in ran)


def test_what_is_captured_first() -> None:
    seen: list[tuple[int, int]] = []

    def make(num_rows: int, num_seqs: int) -> RowPass:
        seen.append((num_rows, num_seqs))
        return Mock(RowPass)

    made = PassSet(make, 700, None)
    made.capture_largest()
    made.capture_first()
    assert seen == [(700, 16), (32, 1), (64, 1), (128, 1), (256, 1)]
    while made.graphs.prepare():
        pass
    assert sorted(seen) == pass_sizes(700)


def test_all_passes_leave_their_output_in_the_same_memory() -> None:
    """Each that had some of its own would keep it."""
    runner = runner_of(round_core("dspark_tiny_b7", 0))
    made = runner.make_passes(512, 64)
    outputs = []
    for spans in ([Span(0, 5)], [Span(0, 7), Span(1, 40)]):
        rows = build_rows(spans, runner.state, runner._staging, 512)
        with torch.inference_mode():
            output = made.forward(rows)
            assert output is not None and output.taps is not None
            outputs.append((output.hidden.data_ptr(), output.taps.data_ptr()))
            assert len(output.hidden) == len(output.taps) == sum(span.rows for span in spans)
    assert outputs[0] == outputs[1] and len(made.graphs.missing) == len(pass_sizes(64)) - 2


def test_padding_belongs_to_nobody() -> None:
    """The second filling leaves nothing of the first: no sequence, no place for K and V."""
    runner = runner_of(round_core(None, 0))
    state = runner.state
    output = ForwardOutput(torch.empty(16, 64), None)
    made = RowPass(16, 4, runner.model, runner.cache, state, (), 512, output)
    for spans in ([Span(0, 5), Span(1, 6), Span(2, 3)], [Span(1, 2)]):
        made.fill(build_rows(spans, state, runner._staging, 512))
    assert made._row_start.tolist() == [0, 2, 2, 2, 2]
    assert made._slots.tolist() == [1, state.spare, state.spare, state.spare]
    assert made._kv_slots.tolist()[2:] == [-1] * 14
