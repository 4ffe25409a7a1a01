"""The Triton sampler against the torch one. Run by ``test_triton_sampler.py`` in an interpreter of its own.

Triton decides at import whether it compiles or interprets, hence the separate process.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.sampling import noise, triton_sampler
from paceline.sampling.filters import kept_prefix, ordered_top
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import SampleRows
from paceline.sampling.sampler import sample
from paceline.sampling.seeds import mix64
from paceline.sampling.state import INV_TEMPERATURE, SamplingState
from paceline.sampling.triton_filters import keep_likely
from paceline.sampling.triton_sampler import sample_argmax


@triton.jit  # type: ignore[untyped-decorator]
def noise_kernel(seed_ptr, position_ptr, token_ptr, out_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    key = triton_sampler.row_key(tl.load(seed_ptr + row), tl.load(position_ptr + row))
    index = tl.arange(0, SIZE)
    tl.store(out_ptr + row * SIZE + index, triton_sampler.gumbel(key, tl.load(token_ptr + index)))


def test_the_noise_is_the_same() -> None:
    seeds = torch.tensor([mix64(s) for s in (0, 1, -1, 2**63 - 1, -(2**63), 123456789)])
    positions = torch.tensor([0, 1, 7, 40960, 2**31 - 2, 3])
    tokens = torch.cat([torch.arange(1000), torch.arange(151936 - 24, 151936)]).int()
    got = torch.empty(6, 1024)
    noise_kernel[(6,)](seeds, positions, tokens, got, SIZE=1024)
    torch.testing.assert_close(
        got, noise.gumbel(noise.row_keys(seeds, positions), tokens), rtol=2e-6, atol=2e-6
    )


def test_the_largest_noise_is_the_same() -> None:
    """Where 1 - v is 1 in fp32: tokens of seed 0 found by search, about one in 30 million."""
    positions, tokens = torch.tensor([115, 302, 393, 1122]), torch.tensor([147084, 92957, 65008, 46200]).int()
    seeds = torch.full((4,), mix64(0))
    got = torch.empty(4, 4)
    noise_kernel[(4,)](seeds, positions, tokens, got, SIZE=4)
    assert got.diagonal().min() > 17.3
    torch.testing.assert_close(
        got, noise.gumbel(noise.row_keys(seeds, positions), tokens), rtol=2e-6, atol=2e-6
    )


def both(logits: Tensor, temperatures: list[float], start: int = 0) -> tuple[list[int], list[int]]:
    """Tokens of the kernel and of the CPU sampler for rows of different slots and positions."""
    Q, V = logits.shape
    state = SamplingState(Q, V, device="cpu")
    for slot in range(Q):
        temperature = temperatures[slot % len(temperatures)]
        state.set_slot(slot, SamplingParams(temperature=temperature), slot * 10**15 - 5, 1)
    slots = torch.arange(Q - 1, -1, -1, dtype=torch.int32)
    positions = torch.arange(start, start + Q, dtype=torch.int32)
    out = torch.full((Q,), -1, dtype=torch.int32)
    sample_argmax(logits, slots, positions, state.floats, state.ints, out=out)
    rows = SampleRows(slots, positions, torch.zeros(Q, 1, dtype=torch.int32), 1)
    expected = sample(logits.clone(), rows, state, state.features(slots.numpy())).tokens
    return out.tolist(), expected.tolist()


@pytest.mark.parametrize("vocab_size", [1, 5, 2047, 2048, 2049, 8192, 20001])
def test_tokens_are_the_same(vocab_size: int) -> None:
    logits = torch.randn(12, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 4
    got, expected = both(logits, [0.0, 1.0, 0.3, 2.5])
    assert got == expected


def test_qwen3_vocabulary() -> None:
    logits = torch.randn(3, 151936, generator=torch.Generator().manual_seed(1)) * 2
    got, expected = both(logits, [1.0], start=40000)
    assert got == expected


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((8, 9000), -torch.inf)
    logits[:, 8500] = -3.0
    got, expected = both(logits, [0.0, 1.0])
    assert got == expected == [8500] * 8


def test_ties_go_to_the_lowest_id_across_pieces() -> None:
    logits = torch.zeros(2, 20000)
    logits[0, [3000, 9000, 19999]] = 1.0
    assert both(logits, [0.0])[0] == [3000, 0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_broken_logits_give_a_token_in_range(value: float) -> None:
    logits = torch.randn(4, 9000)
    logits[1] = value
    got, expected = both(logits, [0.0, 1.0])
    assert [got[0], *got[2:]] == [expected[0], *expected[2:]]
    assert 0 <= got[1] < 9000


FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 0.0, "top_k": 3},
    {"top_k": 1},
    {"top_k": 7, "temperature": 0.6},
    {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    {"top_k": 300, "top_p": 0.3, "min_p": 0.001},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 3.0},
    {"top_p": 1e-6},
    {"min_p": 0.02},
    {"top_p": 0.8, "min_p": 0.1},
]


@pytest.mark.parametrize("vocab_size", [1, 37, 5000])
@pytest.mark.parametrize("kind", ["random", "grid", "equal"])
def test_filters_keep_the_same_tokens(vocab_size: int, kind: str) -> None:
    """Ties of every size: the lowest ids stay."""
    state = SamplingState(len(FILTERS), vocab_size, device="cpu")
    for slot, fields in enumerate(FILTERS):
        state.set_slot(slot, SamplingParams(**fields), 0, 1)  # type: ignore[arg-type]
    slots = torch.arange(len(FILTERS), dtype=torch.int32).flip(0)
    logits = torch.randn(len(slots), vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    if kind == "grid":
        logits = (logits * 2).round() / 2  # -0.0 beside 0.0, too
    elif kind == "equal":
        logits = torch.zeros(len(slots), vocab_size)
        logits[:, vocab_size // 2] = 1.0
    floats, ints = state.floats[slots], state.ints[slots]
    values, ids = ordered_top(logits, vocab_size)
    kept, _ = kept_prefix(values * floats[:, INV_TEMPERATURE, None].float(), floats, ints)
    kept[floats[:, INV_TEMPERATURE] == 0] = True
    expected = logits.masked_fill(~torch.zeros_like(kept).scatter(1, ids.long(), kept), -torch.inf)
    keep_likely(logits, slots, state.floats, state.ints)
    assert torch.equal(logits, expected)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_filters_end_on_broken_logits(value: float) -> None:
    state = SamplingState(1, 50, device="cpu")
    state.set_slot(0, SamplingParams(top_k=5, top_p=0.9, min_p=0.1), 0, 1)
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    expected = logits.clone()
    logits[1] = value
    slots = torch.zeros(3, dtype=torch.int32)
    keep_likely(logits, slots, state.floats, state.ints)
    alone = expected[[0]].clone()
    keep_likely(alone, slots[:1], state.floats, state.ints)
    assert torch.equal(logits[:1], alone)
