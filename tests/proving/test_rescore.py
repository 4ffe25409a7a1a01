"""Scoring by plain decoding: agrees with the engine, and sees every token that is not the right one."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.models.attention import DenseCausalContext
from paceline.proving.drive import runner_of
from paceline.proving.rescore import Produced, plain_logits, rescore
from paceline.sampling.params import SamplingParams
from support.engines import complete, golden_core, golden_prompts, tokens_of

PROMPTS = golden_prompts(6, seed=8)


def produced(temperature: float) -> list[Produced]:
    params = [
        SamplingParams(temperature=temperature, seed=40 + i, max_tokens=6 + 3 * i, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    tokens = tokens_of(complete(golden_core("qwen3_tiny"), PROMPTS, params))
    seeds = [None if temperature == 0 else chosen.seed for chosen in params]
    return [Produced(p, t, s) for p, t, s in zip(PROMPTS, tokens, seeds, strict=True)]


def test_logits_are_those_of_a_dense_pass() -> None:
    model = runner_of(golden_core("qwen3_tiny")).model
    items = produced(0.0)
    seen = 0
    for going, step, logits in plain_logits(model, items):
        for row, i in enumerate(going):
            text = torch.tensor([*items[i].prompt, *items[i].tokens[:step]])
            with torch.inference_mode():
                hidden = model(text, torch.arange(len(text)), DenseCausalContext()).hidden
                torch.testing.assert_close(logits[row], model.logits(hidden[-1]).float(), atol=2e-4, rtol=0)
            seen += 1
    assert seen == sum(len(item.tokens) for item in items)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_plain_decoding_chose_has_no_regret(temperature: float) -> None:
    model = runner_of(golden_core("qwen3_tiny")).model
    items = produced(temperature)
    scores = rescore(model, items)
    for item, score in zip(items, scores, strict=True):
        assert len(score.regret) == len(item.tokens)
        assert max(score.regret) < 1e-4
        assert all(p <= top + 1e-6 for p, top in zip(score.probability, score.top, strict=True))
        assert all(0 <= a + p <= 1 + 1e-5 for a, p in zip(score.above, score.probability, strict=True))
        if temperature == 0:
            assert all(score.is_top)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("at", [0, 2, 5])
def test_a_wrong_token_anywhere_shows(temperature: float, at: int) -> None:
    model = runner_of(golden_core("qwen3_tiny")).model
    item = produced(temperature)[0]
    other = (item.tokens[at] + 7) % 300 + 3
    wrong = Produced(item.prompt, [*item.tokens[:at], other, *item.tokens[at + 1 :]], item.seed)
    (score,) = rescore(model, [wrong])
    assert score.regret[at] > 0.2
    assert max(score.regret[:at], default=0.0) < 1e-4


def test_another_seeds_token_is_regretted() -> None:
    model = runner_of(golden_core("qwen3_tiny")).model
    items = produced(1.0)
    swapped = [Produced(item.prompt, item.tokens, (item.seed or 0) + 1) for item in items]
    assert all(max(score.regret) > 0.2 for score in rescore(model, swapped))


def test_watched_tokens() -> None:
    model = runner_of(golden_core("qwen3_tiny")).model
    items = produced(0.0)[:2]
    scores = rescore(model, items, [item.tokens for item in items])
    for score in scores:
        assert score.watched == score.probability and score.watched_above == score.above
        assert all(
            math.isclose(p, top, rel_tol=1e-5) for p, top in zip(score.watched, score.top, strict=True)
        )
