"""The Triton kernels against the definitions: on a GPU, or in the interpreter (test_ops_interpreted.py)."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ops_scenes import (
    Scene,
    make_branched_scene,
    make_common_scene,
    make_scene,
    normed_and_rotated,
    rope_table,
)
from torch import Tensor

from paceline.ops import (
    BlockNoise,
    Candidates,
    ChainHead,
    LowRank,
    best_of_buckets,
    draft_best,
    draft_candidates,
    draft_chain,
    reference,
)
from paceline.ops.choices import MatmulConfig
from paceline.ops.linear import fixed_config
from paceline.sampling.state import INV_TEMPERATURE, NUM_FLOATS, NUM_INTS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]
EPS = 1e-6

if not INTERPRETED:
    pytestmark = pytest.mark.gpu


@pytest.fixture
def kernels() -> Any:
    from paceline.ops import triton

    return triton


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory the kernels are handed holds NaN, or -1, so an element they fail to write is seen."""

    def poisoned(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(size, torch.nan if dtype.is_floating_point else -1, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, torch.nan))


def close(out: Tensor, expected: Tensor) -> None:
    """To the rounding of out's dtype."""
    bound = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[out.dtype]
    torch.testing.assert_close(out.cpu().double(), expected.cpu().double(), atol=bound, rtol=bound)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 100), (2, 3, 320), (0, 64)])
def test_norms(kernels: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype)
    weight = random(shape[-1], dtype=dtype)
    close(kernels.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))
    normed, total = kernels.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    close(normed, reference.rms_norm(x + residual, weight, EPS))


def test_norm_of_a_slice_reads_only_the_slice(kernels: Any) -> None:
    wide, weight = random(5, 96, dtype=torch.float32), random(32, dtype=torch.float32)
    x = wide[:, 32:64]
    close(kernels.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (2, 3, 2100), (0, 64)])
def test_silu_mul(kernels: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate_up = 4 * random(*shape, dtype=dtype)
    close(kernels.silu_mul(gate_up), reference.silu_mul(gate_up))


def block_noise(num_blocks: int, vocab: int) -> BlockNoise:
    """Noise of blocks, the last of which is greedy."""
    floats = torch.rand(9, NUM_FLOATS, dtype=torch.float64, device=DEVICE)
    ints = torch.randint(-(2**62), 2**62, (9, NUM_INTS), device=DEVICE)
    slots = torch.randperm(9, device=DEVICE)[:num_blocks].to(torch.int32)
    floats[slots[-1].long(), INV_TEMPERATURE] = 0.0
    starts = torch.arange(30, 30 + num_blocks, dtype=torch.int32, device=DEVICE)
    return BlockNoise(slots, starts, floats, ints, torch.randperm(vocab, device=DEVICE).to(torch.int32))


def on_cpu(operands: Any) -> Any:
    return operands and type(operands)(*(x if x is None else x.cpu() for x in operands))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize(
    ("blocks", "slots", "vocab", "rank"), [(1, 1, 100, 0), (5, 1, 700, 24), (7, 1, 64, 32), (3, 6, 130, 0)]
)
def test_draft_best(
    kernels: Any,
    monkeypatch: pytest.MonkeyPatch,
    blocks: int,
    slots: int,
    vocab: int,
    rank: int,
    noisy: bool,
    dtype: torch.dtype,
) -> None:
    """Also a best score that several tokens share, and a row of NaN."""
    monkeypatch.setattr("paceline.ops.triton.drafts.PROGRAMS", 2)
    logits = random(blocks, slots + 2, vocab, dtype=dtype)[:, 1:-1]
    tied = [7, min(71, vocab - 1), vocab - 1]  # the same place of neighbouring tiles, and another
    logits[-1, -1, tied] = 99.0
    low_rank = None
    if rank:
        table, weight = random(9, rank, dtype=dtype), random(vocab, rank, dtype=dtype) / rank**0.5
        weight[tied] = weight[7].clone()
        previous = torch.randint(9, (blocks, 2), device=DEVICE)[:, 0]  # as the best of two is kept
        low_rank = LowRank(table, previous, weight)
    noise = block_noise(blocks, vocab) if noisy else None
    best, two = (kernels.draft_best(logits, low_rank, noise, first=2, count=n) for n in (1, 2))
    on_host = logits.cpu(), on_cpu(low_rank), on_cpu(noise)
    expected = draft_best(*on_host, first=2, count=2)
    assert torch.equal(expected[..., :1], draft_best(*on_host, first=2))
    assert best.dtype == two.dtype == torch.int64 and two[-1, -1].tolist() == [7, tied[1]]
    assert torch.equal(best, two[..., :1]) and bool((two[..., 0] != two[..., 1]).all())
    if dtype == torch.float32:
        assert torch.equal(two.cpu(), expected)
    else:  # sums of another order may round a correction differently
        assert (two.cpu() == expected).double().mean() > 0.8
    logits[0, 0] = torch.nan
    assert int(kernels.draft_best(logits, low_rank, noise)[0, 0]) == vocab - 1
    assert int(kernels.draft_best(logits, low_rank, noise, count=2).max()) < vocab


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize(
    ("blocks", "slots", "vocab", "count"), [(1, 7, 700, 64), (3, 2, 1500, 24), (2, 1, 40, 40)]
)
def test_candidates(
    kernels: Any,
    monkeypatch: pytest.MonkeyPatch,
    blocks: int,
    slots: int,
    vocab: int,
    count: int,
    noisy: bool,
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr("paceline.ops.triton.drafts.BUCKET_CELLS", 64)  # the best two often share a place
    monkeypatch.setattr("paceline.ops.triton.drafts.MANY_SLOTS", 7)
    monkeypatch.setattr("paceline.ops.triton.drafts.MANY_BUCKETS", 32)
    logits = random(blocks, slots + 1, vocab, dtype=dtype)[:, :-1].round(decimals=1)  # ties
    noise = block_noise(blocks, vocab) if noisy else None
    got = kernels.draft_candidates(logits, noise, count)
    assert got.dtype == torch.int32
    assert torch.equal(got.cpu(), draft_candidates(logits.cpu(), on_cpu(noise), count))
    if not noisy:
        assert torch.equal(got.cpu(), best_of_buckets(logits.cpu().float(), count))
    logits[0, 0] = torch.nan
    got = kernels.draft_candidates(logits, noise, count)
    assert int(got.min()) >= 0 and int(got.max()) < vocab


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("reduced", [False, True])
def test_draft_chain(
    kernels: Any, monkeypatch: pytest.MonkeyPatch, noisy: bool, given: bool, reduced: bool, dtype: torch.dtype
) -> None:
    """Candidates and successors overlap, scores tie, and what is chosen from does not fill whole parts."""
    monkeypatch.setattr("paceline.ops.triton.drafts.CHAIN_ROWS", 16)
    blocks, slots, vocab, rank, count, more = 5, 4, 300, 24, 28, 12
    logits = (3 * random(blocks, slots, vocab, dtype=dtype)).round()
    logits[::2] -= 60.0  # every score is negative
    table, weight = random(400, rank, dtype=dtype), random(vocab, rank, dtype=dtype) / rank**0.5
    weight[::2] = 0.0
    after = (table @ weight.T).topk(more).indices[:, torch.randperm(more)].to(torch.int32)
    noise = block_noise(blocks, vocab) if noisy else None
    ids = torch.randperm(400, device=DEVICE)[:vocab].sort().values if reduced else None
    head = ChainHead(table, weight, after, ids)
    candidates = Candidates(logits, kernels.draft_candidates(logits, noise, count), noise)
    anchors = torch.randint(300, (blocks, 2), dtype=torch.int32, device=DEVICE)[:, 0]
    owners = fixed = None
    if given:
        owners = torch.tensor([4, 0, 4], device=DEVICE)
        fixed = torch.randint(300, (3, 2, slots), device=DEVICE)
        fixed = torch.where(torch.rand(fixed.shape, device=DEVICE) < 0.6, -1, fixed)
    got = kernels.draft_chain(candidates, anchors, head, owners, fixed)
    on_host = Candidates(logits.cpu(), candidates.ids.cpu(), on_cpu(noise))
    host_owners, host_fixed = (None, None) if fixed is None or owners is None else (owners.cpu(), fixed.cpu())
    want = draft_chain(on_host, anchors.cpu(), on_cpu(head), host_owners, host_fixed)
    assert got.dtype == torch.int64 and got.shape == want.shape
    if dtype == torch.float32:
        assert torch.equal(got.cpu(), want)
    else:
        assert (got[..., 0, :].cpu() == want[..., 0, :]).double().mean() > 0.8
    logits[:, 1] = torch.nan
    got = kernels.draft_chain(candidates, anchors, head, owners, fixed)
    assert int(got.min()) >= 0 and int(got.max()) < 400


def multiplied(x: Tensor, weight: Tensor, bias: Tensor | None, mode: str) -> Tensor:
    """What a product with this epilogue is, by torch."""
    out = F.linear(x, weight, bias)
    return reference.silu_mul(out) if mode == "swiglu" else out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("splits", "chunks", "tma"), [(1, 1, False), (3, 1, True), (1, 2, True), (2, 2, False)]
)
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("mode", ["linear", "bias", "swiglu", "parts"])
def test_matmul(
    kernels: Any, mode: str, swap: bool, splits: int, chunks: int, tma: bool, dtype: torch.dtype
) -> None:
    """Also with rows, columns and a depth that fill no tile, and fewer tiles of depth than splits."""
    block = 16 if INTERPRETED else 64
    config = MatmulConfig(16, block, 16, splits, chunks, swap, num_stages=2, tma=tma)
    for rows, width, depth in [(1, 40, 64), (19, 72, 40), (33, 64, 16)]:
        x = random(rows, 2 * depth, dtype=dtype)[:, :depth]
        weight = random(2 * width if mode == "swiglu" else width, depth, dtype=dtype) / depth**0.5
        bias = random(width, dtype=dtype) if mode == "bias" else None
        out = kernels.matmul(x, weight, bias, config=config, swiglu=mode == "swiglu", parts=mode == "parts")
        if mode == "parts":
            assert out.shape == (splits, rows, width) and out.dtype == torch.float32
            out = out.sum(0).to(dtype)
        assert out.dtype == dtype
        close(out, multiplied(x, weight, bias, mode))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_adds_the_parts_of_a_product(kernels: Any, dtype: torch.dtype) -> None:
    parts = random(3, 2, 5, 100, dtype=torch.float32)
    residual, weight = random(2, 5, 100, dtype=dtype), random(100, dtype=dtype)
    normed, total = kernels.add_rms_norm(parts, residual, weight, EPS)
    whole = (parts[0] + parts[1] + parts[2]).to(dtype)
    assert torch.equal(total, whole + residual)
    close(normed, reference.rms_norm(whole + residual, weight, EPS))


def test_counters_are_back_at_zero(kernels: Any) -> None:
    from paceline.ops.triton.arrival import counters

    config = MatmulConfig(16, 16, 16, splits=3)
    x, weight = random(20, 64, dtype=torch.float32), random(40, 64, dtype=torch.float32)
    kernels.matmul(x, weight, config=config)
    attend(kernels, make_scene([(130, 1), (40, 9)], device=DEVICE), config=configs()[2])
    assert not counters(x.device).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(3, 1, 128), (4, 2, 32), (7, 1, 64), (14, 2, 32), (30, 2, 32)])
def test_qk_norm_rope_write(kernels: Any, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_heads, num_kv_heads, head_dim = heads
    qkv = random(6, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    q_norm, k_norm = random(head_dim, dtype=dtype), random(head_dim, dtype=dtype)
    table = rope_table(50, head_dim)
    positions = torch.tensor([3, 0, 49, 7, 8, 9], dtype=torch.int32, device=DEVICE)
    kv_slots = torch.tensor([5, -1, 31, 0, -7, 16], device=DEVICE)
    caches = torch.full((2, 2, 16, num_kv_heads, head_dim), 7.0, dtype=dtype, device=DEVICE)
    args = (qkv, q_norm, k_norm, EPS, table.to(DEVICE), positions, kv_slots)
    q = kernels.qk_norm_rope_write(*args, caches[0], caches[1])

    by_reference = torch.full_like(caches, 7.0)
    close(q, reference.qk_norm_rope_write(*args, by_reference[0], by_reference[1]))
    close(caches, by_reference)
    written = kv_slots >= 0
    kept, kept_by_reference = qkv.clone(), qkv.clone()
    assert torch.equal(kernels.qk_norm_rope_write(kept, *args[1:], *caches, keep_keys=True), q)
    reference.qk_norm_rope_write(kept_by_reference, *args[1:], *by_reference, keep_keys=True)
    close(kept, kept_by_reference)
    keys = torch.arange(qkv.shape[1] // head_dim, device=DEVICE) // num_heads == 1
    keys[num_heads + num_kv_heads :] = False
    changed = kept.view(6, -1, head_dim) != qkv.view(6, -1, head_dim)
    assert changed[:, keys].any(dim=-1).all() and not changed[:, ~keys].any()
    k = kept.view(6, -1, head_dim)[written, num_heads:-num_kv_heads]
    assert torch.equal(caches[0].view(32, num_kv_heads, head_dim)[kv_slots[written]], k)
    v = qkv.view(6, -1, head_dim)[written, -num_kv_heads:]
    assert torch.equal(caches[1].view(32, num_kv_heads, head_dim)[kv_slots[written]], v)
    if dtype == torch.float32:
        q_heads = qkv.view(6, -1, head_dim)[:, :num_heads]
        close(q, normed_and_rotated(q_heads, q_norm, EPS, positions, table))


@pytest.mark.parametrize("keep_keys", [False, True])
def test_heads_of_a_row_are_the_same_bit_for_bit_in_any_company(kernels: Any, keep_keys: bool) -> None:
    """Among a thousand rows, alone, and whenever it is done again."""
    dtype, num_rows = (torch.float32, 20) if INTERPRETED else (torch.bfloat16, 1000)
    num_heads, num_kv_heads, head_dim = 8, 2, 128
    qkv = random(num_rows, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    norm, table = random(head_dim, dtype=dtype), rope_table(num_rows, head_dim).to(DEVICE)
    positions = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    slots = torch.randperm(num_rows, device=DEVICE)

    def rotated(start: int, end: int, keep: bool) -> list[Tensor]:
        caches = torch.zeros(2, -(-num_rows // 16), 16, num_kv_heads, head_dim, dtype=dtype, device=DEVICE)
        rows = qkv[start:end].clone(), norm, norm, EPS, table, positions[start:end], slots[start:end]
        q = kernels.qk_norm_rope_write(*rows, *caches, keep_keys=keep)
        return [q, *caches.view(2, -1, num_kv_heads, head_dim)[:, slots[start:end]]]

    whole = rotated(0, num_rows, keep_keys)
    for start, end in ((0, num_rows), (3, 4), (5, 13), (0, num_rows // 2)):
        for got, part in zip(rotated(start, end, False), whole, strict=True):
            assert torch.equal(got, part[start:end])


@pytest.mark.parametrize(("num_seqs", "num_drafts"), [(1, 1), (3, 7), (66, 15)])
def test_rows_go_to_the_likeliest_drafts(kernels: Any, num_seqs: int, num_drafts: int) -> None:
    slots = torch.randperm(140, device=DEVICE)[:num_seqs].to(torch.int32)
    limits = torch.randint(-1, num_drafts + 1, (num_seqs,), dtype=torch.int32, device=DEVICE)
    chances = (torch.rand(140, num_drafts, device=DEVICE) * 8).round().div(8).cumprod(1)  # many are equal
    chances[slots[0].long()] = 1.0
    leads = torch.where(limits == 0, torch.randint(0, 9, (num_seqs,), device=DEVICE), 0).int()
    given, wanted = int((leads + 1)[limits >= 0].sum()), int(limits.clamp(min=0).sum())
    order = torch.randperm(num_seqs, device=DEVICE)
    for num_rows in {given, given + 1, given + wanted // 2, given + wanted, 4000}:
        drafts = kernels.allot_drafts(slots, limits, leads, chances, num_rows)
        assert torch.equal(drafts, reference.allot_drafts(slots, limits, leads, chances, num_rows))
        assert int(drafts.clamp(min=0).sum()) == min(wanted, num_rows - given)
        taken = torch.arange(num_drafts, device=DEVICE) < drafts[:, None]
        left = (torch.arange(num_drafts, device=DEVICE) < limits[:, None]) & ~taken
        least = torch.where(taken, chances[slots.long()], 1.0).min()
        assert (chances[slots.long()][left] <= least).all()
    num_rows = given + wanted // 2
    shuffled = slots[order], limits[order], leads[order]
    drafts = kernels.allot_drafts(slots, limits, leads, chances, num_rows)
    assert torch.equal(drafts[order], kernels.allot_drafts(*shuffled, chances, num_rows))


@pytest.mark.parametrize(("num_seqs", "width", "spare_rows"), [(1, 1, 3), (1, 8, 0), (3, 5, 70), (70, 4, 0)])
def test_rows_of_packed_spans(kernels: Any, num_seqs: int, width: int, spare_rows: int) -> None:
    slots = torch.randperm(80, device=DEVICE)[:num_seqs].to(torch.int32)
    drafts = torch.randint(-1, width, (num_seqs,), dtype=torch.int32, device=DEVICE)
    leads = torch.where(drafts == 0, torch.randint(0, 9, (num_seqs,), device=DEVICE), 0).int()
    leads[drafts < 0] = 5  # nobody's, and not to be looked at
    computed = torch.randint(0, 200, (81,), dtype=torch.int32, device=DEVICE)
    tokens = torch.randint(0, 1000, (81, 220), dtype=torch.int32, device=DEVICE)
    tables = torch.randint(0, 2**31 - 1, (81, 14), dtype=torch.int32, device=DEVICE)
    last = torch.where(drafts < 0, -1, drafts + leads)  # each span's last row
    num_rows = int((last + 1).sum()) + spare_rows + (not (last + 1).any())
    operands = (slots, drafts, leads, computed, tokens, tables, num_rows, 16, 80, 197, 5 * 16)
    packed = kernels.packed_rows(*operands)
    for got, want in zip(packed, reference.packed_rows(*operands), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)
    # the same rows as in spans of one length
    most = width + 8
    whole = reference.span_rows(slots, last, computed, tokens, tables, most, 16, 197, 5 * 16)
    there = (torch.arange(most, device=DEVICE) <= last[:, None]).view(-1)
    for got, want in zip(packed[2:], whole, strict=True):
        assert torch.equal(got[: int(there.sum())], want[there])


@pytest.mark.parametrize(("num_seqs", "width"), [(1, 1), (1, 8), (3, 5), (70, 4)])
def test_rows_of_spans(kernels: Any, num_seqs: int, width: int) -> None:
    slots = torch.randperm(80, device=DEVICE)[:num_seqs].to(torch.int32)
    drafts = torch.randint(-1, width, (num_seqs,), dtype=torch.int32, device=DEVICE)
    computed = torch.randint(0, 200, (80,), dtype=torch.int32, device=DEVICE)
    tokens = torch.randint(0, 1000, (80, 220), dtype=torch.int32, device=DEVICE)
    tables = torch.randint(0, 2**31 - 1, (80, 14), dtype=torch.int32, device=DEVICE)
    operands = (slots, drafts, computed, tokens, tables, width, 16, 197, 5 * 16)
    for got, want in zip(kernels.span_rows(*operands), reference.span_rows(*operands), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)

    sampled = torch.randint(0, 1000, (num_seqs, width), dtype=torch.int32, device=DEVICE)
    accepted = torch.randint(0, width, (num_seqs,), dtype=torch.int32, device=DEVICE)
    there = drafts >= 0
    moved, wanted = (computed.clone(), tokens.clone()), (computed.clone(), tokens.clone())
    kernels.advance(slots, drafts, sampled, accepted, *moved)
    reference.advance(slots[there], drafts[there], sampled[there], accepted[there], *wanted)
    for got, want in zip(moved, wanted, strict=True):
        assert torch.equal(got, want)

    leads = torch.randint(0, 3, (num_seqs,), dtype=torch.int32, device=DEVICE)
    ahead, led = (computed.clone(), tokens.clone()), (computed.clone(), tokens.clone())
    ahead[0][slots[there].long()] += leads[there]
    kernels.advance(slots, drafts, sampled, accepted, *led, leads)
    kernels.advance(slots, drafts, sampled, accepted, *ahead)
    for got, want in zip(led, ahead, strict=True):
        assert torch.equal(got, want)
    led = computed.clone(), tokens.clone()
    reference.advance(slots[there], drafts[there], sampled[there], accepted[there], *led, leads[there])
    for got, want in zip(led, ahead, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("num_columns", [0, 1, 7, 15])
def test_leading_matches(kernels: Any, num_columns: int) -> None:
    left = torch.randint(0, 2, (50, num_columns + 1), dtype=torch.int32, device=DEVICE)
    right = left[:, :num_columns].clone()
    if num_columns:
        right[torch.arange(40), torch.randint(0, num_columns, (40,))] += 1  # ten rows match all the way
    limits = torch.randint(-1, num_columns + 2, (50,), dtype=torch.int32, device=DEVICE)
    wide = torch.cat((right, right), dim=1)[:, :num_columns]  # a slice of wider rows
    want = [
        next(
            (j for j in range(max(min(limit, num_columns), 0)) if a[j] != b[j]),
            max(min(limit, num_columns), 0),
        )
        for a, b, limit in zip(left.tolist(), right.tolist(), limits.tolist(), strict=True)
    ]
    assert kernels.leading_matches(left, wide, limits).tolist() == want
    assert reference.leading_matches(left, right, limits).tolist() == want


@pytest.mark.parametrize(("num_seqs", "width"), [(1, 7), (3, 16), (70, 4)])
def test_rows_of_blocks_and_drafts_behind_them(kernels: Any, num_seqs: int, width: int) -> None:
    slots = torch.randperm(80, device=DEVICE)[:num_seqs].to(torch.int32)
    reserved = torch.randint(2, (num_seqs,), dtype=torch.int32, device=DEVICE)
    computed = torch.randint(0, 200, (80,), dtype=torch.int32, device=DEVICE)
    tokens = torch.randint(0, 1000, (80, 230), dtype=torch.int32, device=DEVICE)
    tables = torch.randint(0, 2**31 - 1, (80, 14), dtype=torch.int32, device=DEVICE)
    operands = (slots, reserved, computed, tokens, tables, width, 16, 77, 5 * 16)
    for got, want in zip(kernels.block_rows(*operands), reference.block_rows(*operands), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)
    drafts = torch.randint(1000, (num_seqs, width, 2), device=DEVICE)[..., 0]
    placed, wanted = tokens.clone(), tokens.clone()
    kernels.place_drafts(slots, drafts, computed, placed)
    reference.place_drafts(slots, drafts, computed, wanted)
    assert torch.equal(placed, wanted) and not torch.equal(placed, tokens)


@pytest.mark.parametrize("rate", [0.0, 0.7, 1.0])
def test_synthetic_matches(kernels: Any, rate: float) -> None:
    keys = torch.randint(-(2**62), 2**62, (60, 3), device=DEVICE)[:, 1]
    slots = torch.randperm(60, device=DEVICE)[:40].to(torch.int32)
    anchors = torch.randint(4000, (40, 2), dtype=torch.int32, device=DEVICE)[:, 0]
    limits = torch.randint(-1, 8, (40,), dtype=torch.int32, device=DEVICE)
    bound = torch.tensor(round(rate * 2**31), device=DEVICE)
    operands = (keys, slots, anchors, limits, 7, bound)
    got, want = kernels.synthetic_matches(*operands), reference.synthetic_matches(*operands)
    assert got.dtype == want.dtype and got.tolist() == want.tolist()


@pytest.mark.parametrize("num_rows", [0, 1, 255, 300])
def test_cache_slots(kernels: Any, num_rows: int) -> None:
    tables = torch.randint(0, 2**31 - 1, (5, 40), dtype=torch.int32, device=DEVICE)  # slots beyond 32 bits
    slots = torch.randint(0, 5, (num_rows,), dtype=torch.int32, device=DEVICE)
    positions = torch.randint(0, 40 * 16, (num_rows,), dtype=torch.int32, device=DEVICE)
    want = reference.cache_slots(tables, 16, slots, positions)
    assert torch.equal(kernels.cache_slots(tables, 16, slots, positions), want)
    if num_rows:
        block = int(tables[int(slots[0]), int(positions[0]) // 16])
        assert int(want[0]) == block * 16 + int(positions[0]) % 16


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_norm_rope_write(kernels: Any, dtype: torch.dtype) -> None:
    """Several layers at once are several single ones; what is not named stays."""
    layers, num_kv_heads, head_dim = 3, 3, 32
    kv = random(layers, 4, 2 * num_kv_heads * head_dim, dtype=dtype)
    norms, table = random(layers, head_dim, dtype=dtype), rope_table(50, head_dim).to(DEVICE)
    positions = torch.tensor([3, 0, 49, 7], dtype=torch.int32, device=DEVICE)
    kv_slots = torch.tensor([5, -1, 31, 0], device=DEVICE)
    caches = torch.full((2, layers, 2, 16, num_kv_heads, head_dim), 7.0, dtype=dtype, device=DEVICE)
    single, by_reference = caches.clone(), caches.clone()
    kernels.kv_norm_rope_write(kv, norms, EPS, table, positions, kv_slots, caches[0], caches[1])
    reference.kv_norm_rope_write(kv, norms, EPS, table, positions, kv_slots, by_reference[0], by_reference[1])
    close(caches, by_reference)
    for layer in range(layers):
        arguments = (kv[layer], norms[layer], norms[layer], EPS, table, positions, kv_slots)
        kernels.qk_norm_rope_write(*arguments, single[0, layer], single[1, layer])
    assert torch.equal(caches, single) and bool((caches != 7).any())


def attend(
    kernels: Any, scene: Scene, window: int | None = None, bidirectional: bool = False, config: Any = None
) -> Tensor:
    out: Tensor = kernels.paged_attention(
        scene.q, scene.k_cache, scene.v_cache, scene.layout, scene.scale, window, bidirectional, config=config
    )
    return out


def configs() -> list[Any]:
    """The chooser's own, small tiles that force the search, and more splits than there are keys to share."""
    from paceline.ops.triton.attention_config import AttentionConfig

    return [
        None,
        AttentionConfig(block_m=16, block_n=16, num_splits=1, num_warps=4, num_stages=2),
        AttentionConfig(block_m=16, block_n=32, num_splits=3, num_warps=4, num_stages=2, split_keys=32),
        AttentionConfig(block_m=64, block_n=16, num_splits=9, num_warps=4, num_stages=2, split_keys=1),
        AttentionConfig(block_m=16, block_n=16, num_splits=1, num_warps=4, num_stages=2, whole=True),
        AttentionConfig(16, 32, num_splits=3, num_warps=4, num_stages=2, split_keys=32, whole=True),
    ]


BORDERS = [(length - 1, 1) for length in (1, 15, 16, 17, 31, 32, 33, 64, 65, 130)]
MIXED = [(0, 37), (50, 1), (15, 8), (0, 1), (16, 1), (3, 21)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("config", "window"),
    [(0, None), (0, 1), (0, 20), (1, None), (2, None), (2, 20), (3, None), (4, None), (5, None), (5, 20)],
)
@pytest.mark.parametrize("spans", [BORDERS, MIXED], ids=["borders", "mixed"])
def test_attention(
    kernels: Any, spans: list[tuple[int, int]], config: int, window: int | None, dtype: torch.dtype
) -> None:
    scene = make_scene(spans, dtype=dtype, device=DEVICE)
    close(attend(kernels, scene, window, config=configs()[config]), scene.expected(window))


@pytest.mark.parametrize(
    ("dtype", "block_size"),
    [(torch.float32, 16), (torch.float32, 64)]
    if INTERPRETED
    else [(torch.bfloat16, 16), (torch.bfloat16, 64), (torch.float16, 16)],
)
@pytest.mark.parametrize("heads", [(3, 1, 128), (4, 4, 64), (8, 2, 128), (5, 1, 32)])
def test_attention_geometries(
    kernels: Any, heads: tuple[int, int, int], block_size: int, dtype: torch.dtype
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    for spans in ([(70, 1), (0, 21), (20, 8)], [(65, 1)]):
        scene = make_scene(
            spans,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            dtype=dtype,
            device=DEVICE,
        )
        for config in configs()[:3:2]:
            close(attend(kernels, scene, config=config), scene.expected())


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("config", [0, 1, 2, 5])
def test_bidirectional_attention(kernels: Any, config: int, window: int | None) -> None:
    """A drafter's block: rows see the later rows of their own sequence."""
    scene = make_scene([(33, 8), (0, 21), (15, 1)], device=DEVICE)
    out = attend(kernels, scene, window, bidirectional=True, config=configs()[config])
    close(out, scene.expected(window, bidirectional=True))


FRESH = [(0, 70), (0, 64), (0, 1), (0, 130)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 2, 32), (3, 1, 128), (4, 4, 64)])
@pytest.mark.parametrize("others", [[], [(50, 1)], [(15, 8), (3, 77), (64, 1)]])
def test_attention_of_prompts_that_begin(
    kernels: Any, others: list[tuple[int, int]], heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Their keys are rows of the step: what the cache holds for them is not read, nor any other row."""
    if dtype == torch.float32 and not INTERPRETED:
        dtype = torch.float16
    num_heads, num_kv_heads, head_dim = heads
    scene = make_scene(
        [*others, *FRESH],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=DEVICE,
    )
    layout, expected = scene.layout, scene.expected()
    caches = [cache.view(-1, num_kv_heads, head_dim) for cache in (scene.k_cache, scene.v_cache)]
    own = torch.full_like(scene.q[:, :1], torch.nan).repeat(1, num_heads + 2 * num_kv_heads, 1)
    own[:, num_heads:] = torch.cat([cache[layout.kv_slots] for cache in caches], dim=1)
    first_row = sum(layout.host_rows[: len(others)])
    own[:first_row] = torch.nan
    for cache in caches:
        cache[layout.kv_slots[first_row:]] = torch.nan
    layout.num_fresh = len(FRESH)

    def attended() -> Tensor:
        out: Tensor = kernels.paged_attention(
            scene.q, scene.k_cache, scene.v_cache, layout, scene.scale, own=own.flatten(1)
        )
        return out

    out = attended()
    close(out, expected)
    own[first_row + 70 : first_row + 134, -num_kv_heads:] = torch.nan  # the second prompt's own failure
    assert torch.equal(attended()[: first_row + 70], out[: first_row + 70])
    assert torch.equal(attended()[first_row + 134 :], out[first_row + 134 :])


@pytest.mark.parametrize("span", [1, 4, 9])
@pytest.mark.parametrize("common", [False, True])
def test_attention_of_a_few_long_spans_among_many(kernels: Any, span: int, common: bool) -> None:
    """Tiles are cut for the many, whatever bound is given for the few; rows behind the last are nobody's."""
    spans = [(64, 1), (70, 4), (64, 37), (96, 1), (0, 21), (130, 9), (17, 1)]
    groups = [(4, 64), (3, 0)]
    scene = make_common_scene(spans, groups, device=DEVICE) if common else make_scene(spans, device=DEVICE)
    expected = scene.expected()
    num_rows = len(scene.q) + 30
    scene.q = torch.cat((scene.q, torch.full_like(scene.q[:1], torch.nan).expand(30, -1, -1))).contiguous()
    scene.layout = replace(scene.layout, host_rows=(num_rows,) * len(spans), host_span=span)
    close(attend(kernels, scene)[:-30], expected)


COMMON = ([(32, 1), (33, 8), (50, 3), (7, 2), (40, 1), (65, 1), (64, 9)], [(3, 32), (2, 0), (2, 64)])


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("config", range(6))
def test_attention_of_sequences_with_common_keys(kernels: Any, config: int, bidirectional: bool) -> None:
    """Groups end within tiles; a group without common keys lies between two with some."""
    scene = make_common_scene(*COMMON, device=DEVICE)
    out = attend(kernels, scene, bidirectional=bidirectional, config=configs()[config])
    close(out, scene.expected(bidirectional=bidirectional))
    assert scene.layout.common is not None
    scene.layout.common.lens.zero_()  # none left: a captured launch goes on working
    scene.layout.common.of_seqs.zero_()
    close(attend(kernels, scene, bidirectional=bidirectional, config=configs()[config]), out)


def test_common_keys_are_attended_to_once(kernels: Any) -> None:
    """In the table of the group's slot, and in nobody else's."""
    scene = make_common_scene(*COMMON, device=DEVICE)
    out = attend(kernels, scene)
    layout = scene.layout
    assert layout.common is not None
    for seq, keys in enumerate(layout.common.of_seqs.tolist()):
        if seq not in (0, 5):  # whose tables the groups name
            layout.block_tables[layout.slots[seq], : keys // 16] = -(10**6)
    assert torch.equal(attend(kernels, scene), out)


def test_deterministic_attention_takes_no_account_of_common_keys(kernels: Any) -> None:
    scene, alone = (make_common_scene(*COMMON, device=DEVICE) for _ in range(2))
    alone.layout.common = None
    one, other = (
        kernels.paged_attention(s.q, s.k_cache, s.v_cache, s.layout, s.scale, deterministic=True)
        for s in (scene, alone)
    )
    assert torch.equal(one, other)


BRANCHED = ([(15, 8), (50, 8), (0, 8), (3, 1)], [(0, 0, 7), (0, 2, 7), (1, 1, 5), (2, 0, 1), (1, 6, 7)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("config", "window"), [(0, None), (0, 6), (1, None), (2, 20), (3, None), (5, None)])
def test_attention_of_chains(kernels: Any, config: int, window: int | None, dtype: torch.dtype) -> None:
    """Chains see their parent's rows up to the branch, then their own."""
    scene = make_branched_scene(*BRANCHED, dtype=dtype, device=DEVICE)
    close(attend(kernels, scene, window, config=configs()[config]), scene.expected(window))


@pytest.mark.parametrize("programs", [0, 8192])
def test_a_chain_is_the_same_bit_for_bit_as_the_sequence_it_stands_for(
    kernels: Any, monkeypatch: pytest.MonkeyPatch, programs: int
) -> None:
    """Where attention is deterministic: the same keys in another place."""
    from paceline.ops.triton import attention_config

    monkeypatch.setattr(attention_config, "CHUNK_KEYS", 32)
    monkeypatch.setattr(attention_config, "CHUNK_PROGRAMS", programs)
    scene = make_branched_scene([(50, 8)], [(0, 1, 6)], device=DEVICE)
    straight = make_scene([(50, 8)], device=DEVICE)
    in_table, own = straight.layout.kv_slots[2:], scene.layout.kv_slots[8:]
    for cache, branched in ((straight.k_cache, scene.k_cache), (straight.v_cache, scene.v_cache)):
        cache.flatten(0, 1)[in_table] = branched.flatten(0, 1)[own]
    q = torch.cat((scene.q[:2], scene.q[8:]))
    results = [
        kernels.paged_attention(
            queries, item.k_cache, item.v_cache, item.layout, item.scale, deterministic=True
        )
        for queries, item in ((scene.q, scene), (q, straight))
    ]
    assert torch.equal(results[0][8:], results[1][2:])


def test_attention_of_shuffled_sequences_is_shuffled(kernels: Any) -> None:
    order = [3, 0, 5, 4, 2, 1]
    straight, shuffled = make_scene(MIXED, device=DEVICE), make_scene(MIXED, device=DEVICE, order=order)
    for config in configs()[1:3]:
        parts = attend(kernels, straight, config=config).split(straight.layout.host_rows)
        shuffled_parts = attend(kernels, shuffled, config=config).split(shuffled.layout.host_rows)
        for place, seq in enumerate(order):
            close(shuffled_parts[place], parts[seq])


@pytest.mark.parametrize("config", range(4))
def test_attention_follows_the_device_when_rows_shrink(kernels: Any, config: int) -> None:
    """A captured grid is right for every layout within its bounds: fewer rows, none, or padding."""
    scene = make_scene([(20, 5), (3, 8), (33, 1)], device=DEVICE)
    scene.layout.host_rows = (21, 21, 21, 21)
    scene.layout.host_max_context = 4000
    last = scene.layout.row_start[-1:]
    scene.layout.row_start = torch.cat((scene.layout.row_start, last))
    scene.layout.slots = torch.cat((scene.layout.slots, scene.layout.slots[:1]))
    rows = scene.q.shape[0]
    expected = scene.expected()
    scene.q = torch.cat((scene.q, torch.full_like(scene.q[:4], torch.nan)))
    close(attend(kernels, scene, config=configs()[config])[:rows], expected)


@pytest.mark.parametrize("window", [None, 90])
def test_deterministic_attention_is_the_same_in_a_chunk_and_row_by_row(
    kernels: Any, monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    """Bit for bit, with chunks of keys in one program and in many, beside other sequences."""
    from paceline.ops.triton import attention_config

    monkeypatch.setattr(attention_config, "CHUNK_KEYS", 128)  # two blocks of keys and more
    total, dtype = 300, DTYPES[-1]

    def attend_rows(first: int, rows: int, programs: int) -> Tensor:
        monkeypatch.setattr(attention_config, "CHUNK_PROGRAMS", programs)
        scene = make_scene([(0, total), (37, 9)], dtype=dtype, device=DEVICE)
        layout = scene.layout
        layout.num_computed = layout.num_computed.clone()
        layout.num_computed[layout.slots[0].long()] = first
        layout.row_start = torch.tensor([0, rows, rows + 9], dtype=torch.int32, device=DEVICE)
        layout.host_rows = (rows, 9)
        scene.q = torch.cat((scene.q[first : first + rows], scene.q[total:]))
        out: Tensor = kernels.paged_attention(
            scene.q, scene.k_cache, scene.v_cache, layout, scene.scale, window, deterministic=True
        )
        return out[:rows]

    whole = attend_rows(0, total, programs=0)
    close(whole, make_scene([(0, total), (37, 9)], dtype=dtype, device=DEVICE).expected(window)[:total])
    for first, rows, programs in [(128, 1, 1024), (253, 8, 1024), (299, 1, 0), (120, 40, 0)]:
        assert torch.equal(attend_rows(first, rows, programs), whole[first : first + rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "chunks"), [((200, 512), 2), ((64, 1024), 4), ((64, 832), 3)])
def test_deterministic_products_are_the_same_for_few_rows_and_many(
    kernels: Any, shape: tuple[int, int], chunks: int, dtype: torch.dtype
) -> None:
    """Bit for bit, and right: Triton 3.6 once left out all but two of a program's chunks."""
    width, depth = shape
    x, weight = random(130, depth, dtype=dtype), random(width, depth, dtype=dtype) * depth**-0.5
    many = kernels.matmul(x, weight, config=fixed_config(130, width, depth, dtype))
    close(many, x.double() @ weight.double().T)
    for first, rows in [(0, 1), (5, 8), (66, 64), (1, 129)]:
        part = x[first : first + rows]
        config = fixed_config(rows, width, depth, dtype)
        assert config.splits * config.chunks == chunks
        assert torch.equal(kernels.matmul(part, weight, config=config), many[first : first + rows])


def test_attention_refuses_what_it_has_no_kernel_for(kernels: Any) -> None:
    from paceline.errors import ConfigError

    scene = make_scene([(3, 1)], head_dim=48, device=DEVICE)
    with pytest.raises(ConfigError, match=r"head_dim 48 .* allowed: 32, 64, 128"):
        attend(kernels, scene)
    scene = make_scene([(3, 1)], device=DEVICE)
    scene.q = scene.q.to(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"q is torch\.bfloat16, the cache is torch\.float32"):
        attend(kernels, scene)


def test_few_tiles_are_split_and_many_are_not(kernels: Any) -> None:
    from paceline.ops.triton.attention_config import choose_config, common_config

    def cut(
        spans: list[tuple[int, int]], max_context: int = 32768, span: int | None = None, spare_rows: int = 0
    ) -> tuple[int, int, int]:
        layout = make_scene(spans).layout
        layout.host_max_context, layout.host_span = max_context, span
        num_rows = sum(layout.host_rows) + spare_rows
        if span is not None:
            layout.host_rows = (num_rows,) * len(spans)
        config = choose_config(layout, num_rows, 4, 8, torch.bfloat16, num_processors=132)
        return config.block_m, config.num_splits, config.num_stages

    assert cut([(1000, 1)], 1024) == (16, 4, 3)  # bounded by the keys worth a split
    assert cut([(1000, 1)]) == (16, 16, 3)  # by what merging costs
    assert cut([(1, 1)] * 8) == (16, 4, 3)  # fills 132 processors twice
    assert cut([(1, 8)] * 8) == (32, 4, 3)
    assert cut([(1, 8)] * 32) == (64, 1, 3)  # nothing to fill: the tensor core's tile
    assert cut([(1, 1)] * 48) == (16, 1, 3)
    assert cut([(1, 1)] * 64) == (16, 1, 2)  # four on a processor
    assert cut([(0, 1024)]) == (128, 1, 3)
    # rows that a few spans may have do not cut everybody's tiles, nor leave the device empty
    assert cut([(1000, 16)], span=8, spare_rows=56) == (32, 16, 3)
    assert cut([(1, 1)] * 7 + [(1, 40)], span=1) == (16, 4, 3)
    assert cut([(1, 5)] * 128, span=8, spare_rows=128) == (64, 1, 3)

    def splits(rows: int) -> int:
        return common_config(rows, 4, 8, torch.bfloat16, num_processors=132).num_splits

    assert [splits(rows) for rows in (32, 96, 256, 512, 768)] == [8, 5, 2, 1, 2]


if not INTERPRETED:

    def test_steps_never_wait_for_the_device_and_can_be_captured(
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        from paceline import ops

        monkeypatch.undo()
        table = rope_table(4096, 128).to(DEVICE)
        weight, norm = random(1024, dtype=torch.bfloat16), random(128, dtype=torch.bfloat16)
        x = random(46, 1024, dtype=torch.bfloat16)
        qkv = random(46, 16 * 128, dtype=torch.bfloat16)
        scene = make_scene(
            [(0, 37), (50, 1), (15, 8)],
            num_heads=8,
            num_kv_heads=4,
            head_dim=128,
            dtype=torch.bfloat16,
            device=DEVICE,
        )
        layout, k_cache, v_cache = scene.layout, scene.k_cache, scene.v_cache

        def step() -> Tensor:
            normed, total = ops.add_rms_norm(x, x, weight, EPS)
            ops.silu_mul(ops.rms_norm(normed, weight, EPS) + total)
            q = ops.qk_norm_rope_write(
                qkv, norm, norm, EPS, table, layout.positions, layout.kv_slots, k_cache, v_cache
            )
            return ops.paged_attention(q, k_cache, v_cache, layout, scene.scale)

        with torch.inference_mode():
            eager = step()  # compiles
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = step()
            captured.fill_(torch.nan)
            graph.replay()
            assert torch.equal(captured, eager)

    @pytest.mark.parametrize("shape", [(5, 320), (2, 40, 320)])
    def test_products_by_our_kernel_are_the_librarys(
        monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
    ) -> None:
        """Each op with a table that always names a kernel, and with one that never does."""
        from paceline import ops

        module = importlib.import_module("paceline.ops.linear")  # the package's attribute is the function
        dtype = torch.bfloat16
        x, wide, narrow = (
            random(*size, dtype=dtype) / size[-1] ** 0.5 for size in (shape, (640, 320), (320, 320))
        )
        residual, norm, bias = random(*shape, dtype=dtype), random(320, dtype=dtype), random(320, dtype=dtype)

        def run() -> list[Tensor]:
            parts = ops.linear_parts(x, narrow)
            assert parts.shape == ((3, *shape) if named else shape)
            return [
                ops.linear(x, narrow, bias),
                ops.linear_silu_mul(x, wide),
                *ops.add_rms_norm(parts, residual, norm, EPS),
                ops.linear_parts(x, narrow, bias),
            ]

        results = []
        for named in (MatmulConfig(16, 64, 64, splits=3, swap=True), None):
            monkeypatch.setattr(module, "choose", lambda *_, named=named: named)
            results.append(run())
        for ours, library in zip(*results, strict=True):
            close(ours, library)

    def test_gradients_flow_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
        from paceline import ops

        monkeypatch.undo()
        x = torch.randn(4, 64, device=DEVICE, requires_grad=True)
        weight = torch.randn(64, device=DEVICE, requires_grad=True)
        ops.silu_mul(ops.add_rms_norm(ops.rms_norm(x, weight, EPS), x, weight, EPS)[0]).sum().backward()
        assert x.grad is not None and weight.grad is not None
