"""The Triton sampler against the torch one. Run by ``test_triton_sampler.py`` in an interpreter of its own.

Triton decides at import whether it compiles or interprets, hence the separate process.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from sampling_harness import set_slot
from torch import Tensor

from paceline.sampling import noise, triton_filters, triton_sampler
from paceline.sampling.filters import kept_prefix, ordered_top
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import SampleRows
from paceline.sampling.sampler import sample
from paceline.sampling.seeds import mix64
from paceline.sampling.state import INV_TEMPERATURE, SamplingState
from paceline.sampling.triton_filters import last_kept
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
        set_slot(state, slot, SamplingParams(temperature=temperature), slot * 10**15 - 5, 1)
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


def kept_by_both(logits: Tensor, slots: Tensor, state: SamplingState) -> tuple[Tensor, Tensor]:
    """[Q, V] bool: tokens up to the last one the kernels keep, and those the CPU keeps; tokens at -inf are
    kept by neither."""
    last = last_kept(logits, slots, state.floats, state.ints)
    last_logit, last_token = last.logits[:, None], last.tokens[:, None]
    got = (logits > last_logit) | ((logits == last_logit) & (torch.arange(logits.shape[1]) <= last_token))
    floats, ints = state.floats[slots], state.ints[slots]
    values, ids = ordered_top(logits, logits.shape[1])
    kept, _ = kept_prefix(values * floats[:, INV_TEMPERATURE, None].float(), floats, ints)
    kept[floats[:, INV_TEMPERATURE] == 0] = True
    drawable = logits > -torch.inf
    return got & drawable, torch.zeros_like(kept).scatter(1, ids.long(), kept) & drawable


def filter_state(filters: list[dict[str, float]], vocab_size: int) -> tuple[SamplingState, Tensor]:
    """A slot for each of these, and the slots of as many rows, last slot first."""
    state = SamplingState(len(filters), vocab_size, device="cpu")
    for slot, fields in enumerate(filters):
        set_slot(state, slot, SamplingParams(**fields), slot, 1)  # type: ignore[arg-type]
    return state, torch.arange(len(filters), dtype=torch.int32).flip(0)


def some_logits(kind: str, num_rows: int, vocab_size: int) -> Tensor:
    """[num_rows, V] of a kind: with ties of every size, with tokens that are not allowed."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    if kind == "grid":
        logits = (logits * 2).round() / 2  # -0.0 beside 0.0, too
    elif kind == "equal":
        logits = torch.zeros(num_rows, vocab_size)
        logits[:, ::2] = -0.0
        logits[:, vocab_size // 2] = 1.0
    elif kind == "few allowed":
        logits[:, torch.arange(vocab_size) % 16 != 5] = -torch.inf
        logits[:, 0] = 0.0
    elif kind == "neighbours":  # all that is likely lies in one chunk
        logits[:, 1:20] += 30.0
    return logits


@pytest.mark.parametrize(
    ("kind", "vocab_size"), [("random", 1), ("random", 5000), ("grid", 5000), ("equal", 5000)]
)
def test_filters_keep_the_same_tokens(kind: str, vocab_size: int) -> None:
    """Ties of every size: the lowest ids stay."""
    state, slots = filter_state(FILTERS, vocab_size)
    got, expected = kept_by_both(some_logits(kind, len(slots), vocab_size), slots, state)
    assert torch.equal(got, expected)


SMALL = {
    "CHUNK": 8,
    "CHUNKS_PER_PROGRAM": 4,
    "NUCLEUS_CHUNKS": 8,
    "CAPACITY": 32,
    "BLOCK": 256,
}
"""The kernels' sizes, so that some hundred tokens are many pieces and a search has to go to the row."""

BORDERS: list[dict[str, float]] = [
    {"top_k": 1},
    {"top_k": 16, "top_p": 0.9},
    {"top_k": 31},
    {"top_k": 32, "min_p": 0.01},
    {"top_k": 5, "min_p": 1e-6},
    {"top_k": 33, "top_p": 0.5},
    {"top_k": 250},
    {"top_k": 251},
    {"top_k": 40, "top_p": 0.99, "min_p": 0.001, "temperature": 0.6},
    {"top_p": 1e-9},
    {"top_p": 0.3, "temperature": 0.5},
    {"top_p": 0.97, "temperature": 2.0},
    {"top_p": 1 - 1e-12},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"min_p": 1e-5},
    {"min_p": 1e-5, "top_p": 0.9},
    {"min_p": 0.2, "top_p": 0.6},
]


@pytest.mark.parametrize("kind", ["grid", "few allowed", "neighbours"])
def test_filters_at_the_borders_of_what_is_gathered(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in SMALL.items():
        monkeypatch.setattr(triton_filters, name, size)
    vocab_size = 251
    state, slots = filter_state(BORDERS, vocab_size)
    logits = some_logits(kind, len(slots), vocab_size)
    got, expected = kept_by_both(logits, slots, state)
    assert [BORDERS[slot] for slot in slots[(got != expected).any(1)].tolist()] == []


@pytest.mark.parametrize("nucleus_chunks", [20, 64])
def test_a_nucleus_that_leaves_out_next_to_nothing(
    nucleus_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its edge is among tokens that weigh less than rounding of the sum of others."""
    monkeypatch.setattr(triton_filters, "NUCLEUS_CHUNKS", nucleus_chunks)
    vocab_size = 64 * 24
    state, slots = filter_state([{"top_p": 1 - 10.0**-digits} for digits in (6.8, 6.9, 7, 7.1)], vocab_size)
    logits = torch.full((len(slots), vocab_size), -1000.0)
    for i in range(5):  # some likely tokens in each of 24 chunks
        logits[:, i::64] = -0.9 * torch.arange(24) - i * 0.37
    got, expected = kept_by_both(logits, slots, state)
    assert got.sum(1).tolist() == expected.sum(1).tolist()


@pytest.mark.parametrize("capacity", [1, 64])
def test_ties_across_pieces(capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (SMALL | {"CAPACITY": capacity}).items():
        monkeypatch.setattr(triton_filters, name, size)
    logits = torch.full((4, 130), -5.0)
    tied = torch.tensor([7, 8, 31, 32, 64, 127, 128, 129])
    logits[:, tied] = 2.0
    logits[:, 100] = 3.0
    state, _ = filter_state([{"top_k": k} for k in (1, 2, 5, 9)], 130)
    last = last_kept(logits, torch.arange(4), state.floats, state.ints)
    assert last.logits.tolist() == [3.0, 2.0, 2.0, 2.0]
    assert last.tokens.tolist() == [100, 7, 32, 129]


def test_what_the_filters_drop_is_not_drawn() -> None:
    vocab_size = 9000
    state, slots = filter_state([*FILTERS, {"top_k": 2, "temperature": 5.0}], vocab_size)
    logits = some_logits("few allowed", len(slots), vocab_size)
    positions = torch.arange(len(slots), dtype=torch.int32)
    out = torch.full((len(slots),), -1, dtype=torch.int32)
    last = last_kept(logits, slots, state.floats, state.ints)
    sample_argmax(logits, slots, positions, state.floats, state.ints, last=last, out=out)
    rows = SampleRows(slots, positions, torch.zeros(len(slots), 1, dtype=torch.int32), 1)
    expected = sample(logits.clone(), rows, state, state.features(slots.numpy())).tokens
    assert out.tolist() == expected.tolist()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_filters_end_on_broken_logits(value: float) -> None:
    """The other rows do not notice, and what is drawn is a token."""
    state, _ = filter_state([{"top_k": 5, "top_p": 0.9, "min_p": 0.1}], 50)
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    slots = torch.zeros(3, dtype=torch.int32)
    alone = last_kept(logits[:1], slots[:1], state.floats, state.ints)
    logits[1] = value
    last = last_kept(logits, slots, state.floats, state.ints)
    assert (last.logits[0], last.tokens[0]) == (alone.logits[0], alone.tokens[0])
    out = torch.full((3,), -1, dtype=torch.int32)
    sample_argmax(logits, slots, slots, state.floats, state.ints, last=last, out=out)
    assert ((out >= 0) & (out < 50)).all()
