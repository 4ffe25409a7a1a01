"""Prompts that begin are attended to through the step's own rows, where there is a kernel for that: here a
stand-in that reads nothing else.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline import ops
from paceline.models.attention import PagedContext
from paceline.ops import RowLayout
from paceline.proving.drive import runner_of
from paceline.runtime.plan import Span
from paceline.runtime.rows import build_rows
from paceline.runtime.staging import Staging
from paceline.sampling.params import SamplingParams
from support.engines import complete, golden_core, tokens_of


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of every layer's attention through own rows: sequences attended to, and others in the step."""
    seen: list[tuple[int, int]] = []
    by_cache = ops.paged_attention

    def attend(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        layout: RowLayout,
        *args: Any,
        own: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        out = by_cache(q, k_cache, v_cache, layout, *args, **options)
        if own is None:
            return out
        num_kv_heads = k_cache.shape[2]
        heads = own.view(len(q), -1, q.shape[2]).transpose(0, 1)  # [H + 2 KV, R, D]
        k, v = heads[-2 * num_kv_heads : -num_kv_heads], heads[-num_kv_heads:]
        starts, others = layout.row_start.tolist(), len(layout.host_rows) - layout.num_fresh
        for first, end in zip(starts[others:], starts[others + 1 :], strict=False):
            queries, keys, values = (x[:, first:end] for x in (q.transpose(0, 1), k, v))
            result = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
            out[first:end] = result.transpose(0, 1)
        seen.append((layout.num_fresh, others))
        return out

    monkeypatch.setattr(ops, "paged_attention", attend)
    monkeypatch.setattr(ops, "reads_own_keys", lambda qkv: True)
    return seen


def outputs(drafter: str | None, blocks: int) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens, and those of prompt log-probabilities, of prompts cold, chunked, or sharing a prefix."""
    core = golden_core(
        "qwen3_tiny", drafter=drafter, num_blocks=blocks, max_num_batched_tokens=48, max_num_seqs=4
    )
    rng = random.Random(1)
    shared = [rng.randrange(3, 320) for _ in range(32)]
    prompts = [[rng.randrange(3, 320) for _ in range(n)] for n in (5, 70, 1, 17, 40)]
    prompts += [[*shared, *prompt[:9]] for prompt in prompts]
    params = [
        SamplingParams(
            temperature=0.0, max_tokens=30, ignore_eos=True, prompt_logprobs=2 if i in (1, 3) else None
        )
        for i in range(len(prompts))
    ]
    groups = [*complete(core, prompts, params), *complete(core, prompts, params)]
    assert (core.scheduler.num_preemptions > 0) == (blocks < 16)
    entries = [entry or {} for group in groups for output in group for entry in output.prompt_logprobs or []]
    return tokens_of(groups), [list(entry) for entry in entries]


@pytest.mark.parametrize("drafter", [None, "dspark_tiny_b7"])
@pytest.mark.parametrize("blocks", [100, 11])
def test_prompts_that_begin_need_no_cache(
    drafter: str | None, blocks: int, request: pytest.FixtureRequest
) -> None:
    expected = outputs(drafter, blocks)
    seen = request.getfixturevalue("fresh")
    assert outputs(drafter, blocks) == expected
    assert any(count > 1 for count, _ in seen) and any(others for _, others in seen)


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"bidirectional": True}, {"deterministic": True}])
def test_only_plain_causal_attention_reads_own_rows(
    options: dict[str, Any], fresh: list[tuple[int, int]]
) -> None:
    runner = runner_of(golden_core("qwen3_tiny"))
    spans = [Span(0, 1), Span(1, 9, fresh=True)]
    layout = build_rows(spans, runner.state, Staging(1024, runner.device), 64).layout
    spec = replace(runner.model.decoder_layers()[0].self_attn.spec, **options)
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    norm, table = torch.ones(spec.head_dim), torch.ones(64, spec.head_dim)
    PagedContext(runner.cache, layout).attend(
        0, torch.randn(10, width), norm, norm, layout.positions, table, spec
    )
    assert fresh == ([] if options else [(1, 1)])
