"""The whole engine against the independent reference: cold, chunked, and after prefix hits of every kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.sampling.logprobs import Logprob
from paceline.sampling.params import SamplingParams
from support.engines import complete, golden_cases, golden_core

TOLERANCE = 2e-4
SETS = ["qwen3_tiny", "qwen3_tiny_untied", "qwen3_yarn"]


def log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    x = logits.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    result: np.ndarray[Any, Any] = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return result


def dense(entry: dict[int, Logprob], vocab_size: int) -> np.ndarray[Any, Any]:
    assert len(entry) == vocab_size
    return np.array([entry[i].logprob for i in range(vocab_size)])


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("budget", [7, 16, 512], ids=lambda b: f"chunks of {b}")
def test_every_prompt_logit_and_the_greedy_text(name: str, budget: int) -> None:
    core = golden_core(name, max_num_batched_tokens=budget, max_num_seqs=4, max_logprobs=400)
    cases = golden_cases(name)
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, prompt_logprobs=-1, logprobs=-1)
    outputs = complete(core, [case["input_ids"].tolist() for case in cases], greedy)
    for case, (output,) in zip(cases, outputs, strict=True):
        want = log_softmax(case["logits"])
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        for row, entry in zip(want[:-1], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            np.testing.assert_allclose(dense(entry, len(row)), row, atol=TOLERANCE, rtol=0)
        assert output.logprobs is not None
        np.testing.assert_allclose(dense(output.logprobs[0], len(want[-1])), want[-1], atol=TOLERANCE, rtol=0)
        assert output.token_ids == case["greedy_ids"].tolist()


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("block_size", [16, 64])
def test_logits_after_a_prefix_hit(name: str, block_size: int) -> None:
    """Warm prefixes of block - 1, block, block + 1, two blocks, all but one token, and the whole prompt."""
    core = golden_core(name, block_size=block_size, max_logprobs=400, num_blocks=64)
    case = max(golden_cases(name), key=lambda c: len(c["input_ids"]))
    prompt = case["input_ids"].tolist()
    last = log_softmax(case["last_logits"])
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    full = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=-1)
    lengths = {block_size - 1, block_size, block_size + 1, 2 * block_size, len(prompt) - 1, len(prompt)}
    for warm in sorted(lengths):
        if warm > len(prompt):
            continue
        assert core.reset_prefix_cache()
        complete(core, [prompt[:warm]], one)
        ((output,),) = complete(core, [prompt], full)
        cached = min(warm, len(prompt) - 1) // block_size * block_size
        assert output.num_cached_tokens == cached, f"warm {warm}"
        assert output.logprobs is not None
        got = dense(output.logprobs[0], len(last))
        np.testing.assert_allclose(got, last, atol=TOLERANCE, rtol=0, err_msg=f"warm {warm}")
        assert output.token_ids == case["greedy_ids"].tolist()


def test_prompt_logprobs_are_whole_after_a_hit() -> None:
    """A cached prompt is forwarded again for them: never a hole, never something uninitialised."""
    core = golden_core("qwen3_tiny", max_logprobs=400, max_num_batched_tokens=9, max_num_seqs=4)
    case = golden_cases("qwen3_tiny")[-1]
    prompt = case["input_ids"].tolist()
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=-1)
    cold = complete(core, [prompt], params)[0][0]
    warm = complete(core, [prompt], params)[0][0]
    assert warm.num_cached_tokens == 0
    assert cold.prompt_logprobs is not None and warm.prompt_logprobs is not None
    assert len(warm.prompt_logprobs) == len(prompt)
    want = log_softmax(case["logits"])
    for row, entry in zip(want[:-1], warm.prompt_logprobs[1:], strict=True):
        assert entry is not None
        np.testing.assert_allclose(dense(entry, len(row)), row, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("offset", range(-2, 3))
def test_a_second_turn_equals_a_fresh_engine(offset: int) -> None:
    """First turns that end around a block border: the hit covers forwarded rows only, and the logits
    agree.
    """
    core = golden_core("qwen3_tiny", max_logprobs=400)
    prompt = golden_cases("qwen3_tiny")[4]["input_ids"].tolist()
    first = SamplingParams(temperature=0.0, max_tokens=48 - len(prompt) + offset, ignore_eos=True)
    answer = complete(core, [prompt], first)[0][0].token_ids
    second = [*prompt, *answer, 5, 6, 7]
    probe = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=-1)
    warm = complete(core, [second], probe)[0][0]
    # The answer's last token was never forwarded: it completes no block.
    assert warm.num_cached_tokens == (len(prompt) + len(answer) - 1) // 16 * 16
    fresh = complete(golden_core("qwen3_tiny", max_logprobs=400), [second], probe)[0][0]
    assert warm.token_ids == fresh.token_ids
    assert warm.logprobs is not None and fresh.logprobs is not None
    for a, b in zip(warm.logprobs, fresh.logprobs, strict=True):
        np.testing.assert_allclose(dense(a, 320), dense(b, 320), atol=TOLERANCE, rtol=0)
