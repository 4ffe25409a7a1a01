"""The Qwen3 model against the independent fp64 numbers of ``tests/golden``."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from model_cases import TARGETS, TOLERANCE, GoldenSet, new_cache, paged_forward
from torch import Tensor

from paceline.models.attention import DenseCausalContext
from paceline.models.loader import load_model
from paceline.models.qwen3 import ForwardOutput, Qwen3ForCausalLM


@cache
def golden(name: str) -> tuple[GoldenSet, Qwen3ForCausalLM]:
    """Loaded once per process."""
    found = GoldenSet(name)
    return found, load_model(found.folder, dtype="float32")


CASES = [(name, case) for name in TARGETS for case in GoldenSet(name).cases]


def dense(model: Qwen3ForCausalLM, tokens: Tensor, taps: list[int]) -> ForwardOutput:
    """Whole sequence at once, batch of one."""
    out = model(tokens[None], torch.arange(len(tokens))[None], DenseCausalContext(), taps)
    assert out.taps is not None
    return ForwardOutput(out.hidden[0], out.taps[0])


def paged(model: Qwen3ForCausalLM, tokens: Tensor, taps: list[int], chunk: int) -> ForwardOutput:
    """In chunks through a paged cache whose block table is scattered."""
    num_blocks = -(-len(tokens) // 16)
    table = [(7 * i + 3) % 17 for i in range(num_blocks)]
    kv = new_cache(model.config, 17)
    parts = []
    for start in range(0, len(tokens), chunk):
        rows = min(chunk, len(tokens) - start)
        parts.append(paged_forward(model, kv, [tokens], [(0, start, rows)], [table], taps))
    return ForwardOutput(
        torch.cat([part.hidden for part in parts]),
        torch.cat([part.taps for part in parts if part.taps is not None]),
    )


def assert_golden(found: GoldenSet, case: str, model: Qwen3ForCausalLM, out: ForwardOutput) -> None:
    """Logits of every row and every stored tap."""
    torch.testing.assert_close(model.logits(out.hidden), found[f"{case}.logits"], atol=TOLERANCE, rtol=0)
    ids = found.meta["tap_layer_ids"]
    expected = torch.cat([found[f"{case}.tap_{i}"] for i in ids], dim=-1)
    assert out.taps is not None
    torch.testing.assert_close(out.taps, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_dense_prefill(name: str, case: str) -> None:
    found, model = golden(name)
    assert_golden(found, case, model, dense(model, found[f"{case}.input_ids"], found.meta["tap_layer_ids"]))


@pytest.mark.parametrize("chunk", [1, 7, 16, 4096], ids=["1", "7", "16", "cold"])
@pytest.mark.parametrize(("name", "case"), CASES)
def test_paged_prefill(name: str, case: str, chunk: int) -> None:
    found, model = golden(name)
    out = paged(model, found[f"{case}.input_ids"], found.meta["tap_layer_ids"], chunk)
    assert_golden(found, case, model, out)


@pytest.mark.parametrize("name", TARGETS)
def test_greedy_continuations_of_all_cases_in_one_batch(name: str) -> None:
    """Prefill and decode rows of sequences of different lengths share every step."""
    found, model = golden(name)
    prompts = [found[f"{case}.input_ids"] for case in found.cases]
    sequences = [prompt.clone() for prompt in prompts]
    num_new = len(found["case0.greedy_ids"])
    kv = new_cache(model.config, 128)
    per_sequence = 12
    tables = [[1 + i * per_sequence + j for j in range(per_sequence)] for i in range(len(prompts))]
    computed = [0] * len(prompts)
    for step in range(num_new + len(prompts) - 1):
        active = [i for i in range(len(prompts)) if i <= step < i + num_new]  # sequence i joins at step i
        spans = [(i, computed[i], len(sequences[i]) - computed[i]) for i in active]
        out = paged_forward(model, kv, sequences, spans, tables)
        ends = torch.tensor([rows for _, _, rows in spans]).cumsum(0) - 1
        next_ids = model.logits(out.hidden[ends]).argmax(-1)
        for i, token in zip(active, next_ids, strict=True):
            computed[i] = len(sequences[i])
            sequences[i] = torch.cat((sequences[i], token[None]))
    for case, prompt, sequence in zip(found.cases, prompts, sequences, strict=True):
        expected, gap = found[f"{case}.greedy_ids"], found[f"{case}.greedy_gap"]
        assert gap.min() > 1e-3  # else a tie could go either way and this test would say nothing
        assert sequence[len(prompt) :].tolist() == expected.tolist()


def test_prefix_rows_of_another_sequence_are_read_through_the_table() -> None:
    """A second sequence that lists the first one's block gets the logits it would get from its own."""
    found, model = golden("qwen3_tiny")
    tokens = found["case5.input_ids"]  # 70 tokens
    kv = new_cache(model.config, 12)
    paged_forward(model, kv, [tokens], [(0, 0, 70)], [[1, 2, 3, 4, 5]])
    shared = [1, 2, 3, 9, 10]  # 48 tokens found, the rest its own
    out = paged_forward(model, kv, [tokens, tokens], [(1, 48, 22)], [[1, 2, 3, 4, 5], shared])
    torch.testing.assert_close(model.logits(out.hidden), found["case5.logits"][48:], atol=TOLERANCE, rtol=0)


def test_tap_of_the_embedding() -> None:
    found, model = golden("qwen3_tiny")
    tokens = found["case1.input_ids"]
    out = dense(model, tokens, [-1, 2])
    assert out.taps is not None
    assert torch.equal(out.taps[:, : model.config.hidden_size], model.embed_tokens(tokens))
    torch.testing.assert_close(
        out.taps[:, model.config.hidden_size :], found["case1.tap_2"], atol=TOLERANCE, rtol=0
    )


def test_no_taps_asked_for() -> None:
    _, model = golden("qwen3_tiny")
    assert model(torch.tensor([3]), torch.tensor([0]), DenseCausalContext()).taps is None
