"""Short passes of fixed size: the same tokens, whatever part of a pass is padding."""

from __future__ import annotations

import random
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_rounds import round_core

from paceline.config import EngineConfig
from paceline.engine.factory import make_core
from paceline.models.qwen3 import ForwardOutput
from paceline.proving.drive import runner_of
from paceline.runtime import passes
from paceline.runtime.passes import PASS_ROWS, PASS_SEQS, PassSet, RowPass, smallest_pass
from paceline.runtime.plan import Span
from paceline.runtime.rows import StepRows, build_rows
from paceline.sampling.params import SamplingParams
from support.engines import GOLDEN, complete, tokens_of


@given(st.integers(1, 600), st.integers(1, 6))
def test_the_smallest_pass_that_holds_the_rows(num_rows: int, num_seqs: int) -> None:
    found = smallest_pass(num_rows, num_seqs)
    fitting = [(r, s) for r in PASS_ROWS for s in PASS_SEQS if r >= num_rows and s >= num_seqs]
    assert found == (min(fitting) if fitting else None)


@pytest.mark.parametrize("drafter", [None, "dspark_tiny_b7"])
def test_passes_change_no_token(drafter: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cold, behind a prefix hit, several prompts in a step, beside decode rounds; with prompt logprobs."""
    monkeypatch.setattr(passes, "PASS_ROWS", (4, 16, 40))
    monkeypatch.setattr(passes, "PASS_SEQS", (1, 3))
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
    made = runner.passes = runner.make_passes(512)
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
    assert set(made._passes) == {(r, s) for r in (4, 16, 40) for s in (1, 3)} - set(made.missing)
    assert len(made._passes) >= 3 and any(seqs > 1 for _, seqs in ran)


def test_what_is_captured_first() -> None:
    seen: list[tuple[int, int]] = []

    def make(num_rows: int, num_seqs: int) -> RowPass:
        seen.append((num_rows, num_seqs))
        return Mock(RowPass)

    made = PassSet(make, None)
    made.capture_largest()
    made.capture_first()
    assert seen == [(512, 4), *((rows, 1) for rows in PASS_ROWS)]
    while made.prepare():
        pass
    assert sorted(seen) == sorted((rows, seqs) for rows in PASS_ROWS for seqs in PASS_SEQS)


def test_padding_belongs_to_nobody() -> None:
    """The second filling leaves nothing of the first: no sequence, no place for K and V."""
    runner = runner_of(round_core(None, 0))
    state = runner.state
    made = RowPass(16, 4, runner.model, runner.cache, state, (), 512)
    for spans in ([Span(0, 5), Span(1, 6), Span(2, 3)], [Span(1, 2)]):
        made.fill(build_rows(spans, state, runner._staging, 512))
    assert made._row_start.tolist() == [0, 2, 2, 2, 2]
    assert made._slots.tolist() == [1, state.spare, state.spare, state.spare]
    assert made._kv_slots.tolist()[2:] == [-1] * 14
