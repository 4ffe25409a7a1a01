"""Passes written down as phases, run by their torch reference: the same as the layers, and in an engine."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from paceline.models.attention import PagedContext
from paceline.ops import RowLayout
from paceline.ops.persistent.launch import matrices_fit
from paceline.runtime.few_rows import DraftPass, FewRows, TargetPass
from paceline.runtime.runner import Runner
from paceline.sampling.params import SamplingParams
from support.engines import DRAFTERS, complete, golden_cases, golden_core, tokens_of


def prompts() -> list[list[int]]:
    return [case["input_ids"].tolist() for case in golden_cases("qwen3_tiny")][:3]


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Few rows in every engine of the test; counts the passes."""
    calls: Counter[str] = Counter()
    monkeypatch.setattr(FewRows, "runs_on", staticmethod(lambda model, block_size: True))
    for kind in (TargetPass, DraftPass):
        run = kind.__call__

        def counted(self: object, *args: object, run: object = run, name: str = kind.__name__) -> object:
            calls[name] += 1
            assert callable(run)
            return run(self, *args)

        monkeypatch.setattr(kind, "__call__", counted)
    return calls


SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=24),
    SamplingParams(temperature=0.8, seed=3, max_tokens=24),
]


@pytest.mark.parametrize("draft_state", ["paged", "capture"])
@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
def test_an_engine_draws_the_same_tokens(used: Counter[str], drafter: str | None, draft_state: str) -> None:
    plain = golden_core("qwen3_tiny", enforce_eager=True)
    speculation = {"draft_state": draft_state} if drafter is not None else None
    core = golden_core("qwen3_tiny", drafter=drafter, speculative_config=speculation)
    for params in SAMPLINGS:
        for prompt in prompts():  # one at a time: a round's rows are few
            want = tokens_of(complete(plain, [prompt], params))
            assert tokens_of(complete(core, [prompt], params)) == want
    assert used["TargetPass"] > 10
    blocks_fit = drafter is not None and "b16" not in drafter
    assert (used["DraftPass"] > 10) == blocks_fit
    if drafter is not None:
        assert core.scheduler.speculation.num_accepted_tokens > 0, "drafts are as good as the layers'"


@torch.inference_mode()
def test_logits_taps_and_context_are_the_layers() -> None:
    core = golden_core("qwen3_tiny", drafter="dspark_tiny_b7")
    runner = core.runner
    assert isinstance(runner, Runner) and runner.drafting is not None
    model, cache, drafting = runner.model, runner.cache, runner.drafting
    drafter, draft_cache = drafting.drafter, drafting.cache
    caches = [cache.k, cache.v, draft_cache.k, draft_cache.v]
    for tensor in caches:
        tensor.normal_()
    state, device = runner.state, runner.device
    state.block_tables[0, :8] = torch.arange(3, 11)
    state.num_computed[0] = 37
    positions = torch.arange(37, 42, dtype=torch.int32)
    slots = torch.zeros(1, dtype=torch.int32, device=device)

    def layout(num_rows: int = 5) -> RowLayout:
        at = torch.arange(37, 37 + num_rows, dtype=torch.int32)
        row_seq = torch.zeros(num_rows, dtype=torch.int32)
        return RowLayout(
            slots=slots,
            row_start=torch.tensor([0, num_rows], dtype=torch.int32),
            row_seq=row_seq,
            positions=at,
            kv_slots=state.kv_slots(row_seq, at),
            block_tables=state.block_tables,
            num_computed=state.num_computed,
            host_rows=(num_rows,),
            host_max_context=64,
        )

    tokens = torch.tensor([5, 9, 11, 200, 77])
    before = [tensor.clone() for tensor in caches]
    rows = layout()
    hidden, taps = model(tokens, positions, PagedContext(cache, rows), drafter.config.tap_layer_ids)
    assert taps is not None
    drafter.write_context(taps, positions, rows.kv_slots, draft_cache)
    want = model.logits(hidden)
    wanted = [tensor.clone() for tensor in caches]
    for tensor, old in zip(caches, before, strict=True):
        tensor.copy_(old)
    few_rows = FewRows(model, cache, drafter, draft_cache)
    run = few_rows.target(1, 5)
    assert run is not None and run.taps is not None and run.writes_context
    torch.testing.assert_close(run(tokens, layout()), want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(run.taps, taps, atol=1e-4, rtol=1e-4)
    for tensor, new, old in zip(caches, wanted, before, strict=True):
        torch.testing.assert_close(tensor, new, atol=1e-4, rtol=1e-4)
        assert not torch.equal(tensor, old)

    width = drafter.config.block_size
    for norm in (drafter.norm, drafter.hidden_norm):
        norm.weight.copy_(torch.rand_like(norm.weight) + 0.5)  # trained ones may be near 1
    anchors, starts = torch.tensor([7]), torch.tensor([37], dtype=torch.int32)
    hidden = drafter(anchors, starts, PagedContext(draft_cache, layout(width)))[0]
    block = few_rows.draft(1)
    assert block is not None
    got_hidden, got = block(drafter.block_tokens(anchors).view(-1), layout(width))
    torch.testing.assert_close(got_hidden, hidden, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got, drafter.head(hidden), atol=1e-4, rtol=1e-4)


def test_geometries_the_kernel_can_multiply() -> None:
    grid = 132
    assert matrices_fit(1024, [3072, 2048], grid)  # Qwen3-0.6B
    assert matrices_fit(2560, [9728, 4096], grid)
    assert matrices_fit(4096, [12288, 4096], grid)
    assert not matrices_fit(5120, [17408, 5120], grid)  # too many rows for sums kept over several passes
    assert matrices_fit(5120, [17408, 5120], 192)
    assert not matrices_fit(8192, [4096], grid) and not matrices_fit(2560, [9700], grid)
