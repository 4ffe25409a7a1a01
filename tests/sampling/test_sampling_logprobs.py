"""Log-probabilities: of the raw logits, for the chosen token and the most likely ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sampling_harness import Case, draw
from torch import Tensor

from paceline.sampling.logprobs import Logprob, position_logprobs
from paceline.sampling.params import SamplingParams
from paceline.sampling.sampler import LogprobTensors, score


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 3


def rows_of(item: LogprobTensors, num_top: list[int]) -> list[dict[int, Logprob]]:
    ids, values, ranks = item.token_ids.numpy(), item.logprobs.numpy(), item.ranks.tolist()
    return [position_logprobs(ids[i], values[i], ranks[i], n) for i, n in enumerate(num_top)]


@pytest.mark.parametrize("num_rows", [1, 3, 40])  # 40 rows of this width are scored in parts
def test_score(num_rows: int) -> None:
    V = 7680
    logits = normal(num_rows, V)
    chosen = torch.arange(num_rows, dtype=torch.int32) * 7
    got = score(logits, chosen, 4)
    expected = logits.double().log_softmax(-1)
    order = logits.argsort(dim=-1, descending=True, stable=True)
    assert got.rows.tolist() == list(range(num_rows))
    assert got.token_ids.tolist() == torch.cat([chosen[:, None], order[:, :4]], dim=1).tolist()
    torch.testing.assert_close(
        got.logprobs.double(), expected.gather(1, got.token_ids.long()), rtol=0, atol=1e-5
    )
    assert got.ranks.tolist() == [(order[i] == chosen[i]).nonzero().item() + 1 for i in range(num_rows)]
    assert torch.equal(score(logits[:1], chosen[:1], 4).logprobs, got.logprobs[:1])


def test_ties_rank_by_token_id() -> None:
    got = score(torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]]).repeat(5, 1), torch.arange(5), 5)
    assert got.ranks.tolist() == [3, 1, 4, 2, 5]
    assert got.token_ids[:, 1:].tolist() == [[1, 3, 0, 2, 4]] * 5


def test_a_map_per_position_with_the_chosen_token_first() -> None:
    ids, values = np.array([9, 4, 9, 2]), np.array([-2.0, -0.5, -2.0, -3.0])
    assert position_logprobs(ids, values, 2, 3) == {
        9: Logprob(-2.0, 2),
        4: Logprob(-0.5, 1),
        2: Logprob(-3.0, 3),
    }
    assert list(position_logprobs(ids, values, 2, 3)) == [9, 4, 2]
    assert position_logprobs(ids, values, 2, 0) == {9: Logprob(-2.0, 2)}


def test_each_row_gets_as_many_as_it_asked_for() -> None:
    logits = normal(4, 60)
    asked = [0, None, 3, -1]
    output = draw(logits, [Case(SamplingParams(logprobs=n), seed=i) for i, n in enumerate(asked)])
    assert output.logprobs is not None
    assert output.logprobs.rows.tolist() == [0, 2, 3]
    maps = rows_of(output.logprobs, [0, 3, 60])
    tokens = output.tokens.tolist()
    assert list(maps[0]) == [tokens[0]]
    assert set(maps[1]) == {tokens[2], *logits[2].topk(3).indices.tolist()}
    assert set(maps[2]) == set(range(60))
    assert sum(np.exp(each.logprob) for each in maps[2].values()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 3.0},
        {"top_k": 2},
        {"top_p": 0.5},
        {"min_p": 0.3},
        {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 1.0},
        {"logit_bias": {3: 50.0}},
        {"allowed_token_ids": [5]},
        {"bad_words_ids": [[1]], "min_tokens": 2, "stop_token_ids": [2]},
    ],
    ids=str,
)
def test_they_are_those_of_the_raw_logits(fields: dict[str, Any]) -> None:
    logits = normal(6, 60)
    cases = [
        Case(SamplingParams(logprobs=3, **fields), tokens=[1, 2, 3], prompt_len=1, seed=i) for i in range(6)
    ]
    output = draw(logits, cases, eos=[0])
    assert output.logprobs is not None
    plain = score(logits, output.tokens, 3)
    assert torch.equal(output.logprobs.token_ids, plain.token_ids)
    assert torch.equal(output.logprobs.logprobs, plain.logprobs)
    assert torch.equal(output.logprobs.ranks, plain.ranks)
    assert output.logprobs.token_ids[:, 0].tolist() == output.tokens.tolist()


def test_no_one_asked() -> None:
    assert draw(normal(2, 60), [Case(SamplingParams())] * 2).logprobs is None
