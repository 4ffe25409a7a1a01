from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ops_scenes import Scene, make_branched_scene, make_scene, normed_and_rotated, rope_table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline import ops

EPS = 1e-6


def attend(scene: Scene, window: int | None = None, bidirectional: bool = False) -> Tensor:
    return ops.paged_attention(
        scene.q, scene.k_cache, scene.v_cache, scene.layout, scene.scale, window, bidirectional
    )


class Products(TorchDispatchMode):
    """Names of the operators that multiply matrices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket._qualified_op_name.split("::")[1] in ("mm", "bmm", "addmm", "matmul"):
            self.names.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("bias", [False, True])
def test_rows_of_larger_rows_are_multiplied_at_once(device: str, bias: bool) -> None:
    """Drafts are the last slots of their blocks. Of such a view torch makes a product for each block, which
    reads the weights for each: a drafter's head took 5.9 ms for 32 blocks, where reading them takes 0.19.
    """
    blocks, weight = torch.randn(4, 5, 64, device=device), torch.randn(300, 64, device=device)
    x, offset = blocks[:, 1:], torch.randn(300, device=device) if bias else None
    with Products() as products:
        out = ops.linear(x, weight, offset)
    assert products.names == ["aten.addmm" if bias else "aten.mm"]
    torch.testing.assert_close(out, F.linear(x, weight, offset))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_rounds_where_qwen3_rounds(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 3, 64).to(dtype), torch.randn(64).to(dtype)
    normed = x.float() / (x.float().pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    out = ops.rms_norm(x, weight, EPS)
    assert out.dtype == dtype
    torch.testing.assert_close(out, weight * normed.to(dtype))


def test_add_rms_norm_is_the_sum_and_its_norm() -> None:
    x, residual, weight = torch.randn(7, 64), torch.randn(7, 64), torch.randn(64)
    before = x.clone(), residual.clone()
    normed, total = ops.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, ops.rms_norm(x + residual, weight, EPS))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def test_a_row_of_a_norm_is_the_same_alone_and_in_a_batch() -> None:
    x, weight = torch.randn(33, 320), torch.randn(320)
    together = ops.rms_norm(x, weight, EPS)
    assert all(torch.equal(together[i : i + 1], ops.rms_norm(x[i : i + 1], weight, EPS)) for i in range(33))


def test_silu_mul() -> None:
    gate_up = torch.randn(2, 3, 20)
    gate, up = gate_up[..., :10], gate_up[..., 10:]
    torch.testing.assert_close(ops.silu_mul(gate_up), gate * torch.sigmoid(gate) * up)


def test_norm_has_the_right_gradient() -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    x64, weight64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    direct = x64 / (x64.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight64
    seed = torch.randn(3, 8)
    gradients = torch.autograd.grad(ops.rms_norm(x, weight, EPS), (x, weight), seed)
    expected = torch.autograd.grad(direct, (x64, weight64), seed.double())
    for gradient, exact in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient.double(), exact, atol=1e-5, rtol=1e-5)


def test_norm_and_silu_compile_to_one_graph_with_gradients() -> None:
    def block(x: Tensor, weight: Tensor) -> Tensor:
        normed, total = ops.add_rms_norm(x, x, weight, EPS)
        return ops.silu_mul(ops.rms_norm(normed, weight, EPS)).sum() + total.sum()

    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    eager = torch.autograd.grad(block(x, weight), (x, weight))
    for a, b in zip(torch.autograd.grad(compiled(x, weight), (x, weight)), eager, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_qk_norm_rope_write(num_kv_heads: int) -> None:
    rows, num_heads, head_dim = 6, 4, 32
    qkv = torch.randn(rows, (num_heads + 2 * num_kv_heads) * head_dim)
    q_norm, k_norm, table = torch.randn(head_dim), torch.randn(head_dim), rope_table(50, head_dim)
    positions = torch.tensor([3, 0, 49, 7, 8, 9], dtype=torch.int32)
    kv_slots = torch.tensor([5, -1, 31, 0, -7, 16])
    k_cache, v_cache = torch.full((2, 2, 16, num_kv_heads, head_dim), 7.0).unbind()
    q = ops.qk_norm_rope_write(qkv, q_norm, k_norm, EPS, table, positions, kv_slots, k_cache, v_cache)

    heads = qkv.view(rows, -1, head_dim)
    expected_q = normed_and_rotated(heads[:, :num_heads], q_norm, EPS, positions, table)
    expected_k = normed_and_rotated(heads[:, num_heads:-num_kv_heads], k_norm, EPS, positions, table)
    torch.testing.assert_close(q.double(), expected_q, atol=1e-5, rtol=1e-5)
    k_rows, v_rows = k_cache.view(32, num_kv_heads, head_dim), v_cache.view(32, num_kv_heads, head_dim)
    written = kv_slots >= 0
    torch.testing.assert_close(k_rows[kv_slots[written]].double(), expected_k[written], atol=1e-5, rtol=1e-5)
    assert torch.equal(v_rows[kv_slots[written]], heads[written, -num_kv_heads:])
    untouched = torch.ones(32, dtype=torch.bool)
    untouched[kv_slots[written]] = False
    assert bool((k_rows[untouched] == 7).all()) and bool((v_rows[untouched] == 7).all())


spans = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 70, 79]),
        st.sampled_from([1, 1, 1, 2, 8, 16, 17, 37]),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(
    spans=spans,
    heads=st.sampled_from([(3, 1), (4, 2), (2, 2)]),
    block_size=st.sampled_from([16, 64]),
    window=st.sampled_from([None, 1, 5, 16, 33, 1000]),
    bidirectional=st.booleans(),
)
@example([(0, 37), (16, 17), (0, 8)], (4, 2), 16, 5, False)
@example([(0, 37), (16, 17), (0, 8)], (4, 2), 16, None, True)
@example([(0, 37), (33, 8), (31, 8), (16, 8)], (4, 2), 16, 16, True)
@example([(70, 1), (31, 1), (0, 1), (15, 2), (32, 2)], (3, 1), 16, 33, False)
def test_paged_attention_equals_the_definition(
    spans: list[tuple[int, int]],
    heads: tuple[int, int],
    block_size: int,
    window: int | None,
    bidirectional: bool,
) -> None:
    scene = make_scene(spans, num_heads=heads[0], num_kv_heads=heads[1], block_size=block_size)
    out, expected = attend(scene, window, bidirectional), scene.expected(window, bidirectional)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)


def test_windows_at_different_places_of_the_tables() -> None:
    """The longest sequence reads the fewest blocks: its padding lies beyond the last column of the table."""
    scene = make_scene([(79, 1), (70, 1)])
    torch.testing.assert_close(attend(scene, 16).double(), scene.expected(16), atol=2e-6, rtol=1e-5)


def test_sequences_are_independent_of_their_order() -> None:
    spans, order = [(5, 1), (0, 37), (40, 8), (16, 1), (15, 8)], [3, 0, 4, 2, 1]
    straight, shuffled = make_scene(spans), make_scene(spans, order=order)
    parts, shuffled_parts = (attend(s).split(s.layout.host_rows) for s in (straight, shuffled))
    for place, seq in enumerate(order):
        torch.testing.assert_close(shuffled_parts[place], parts[seq])


@pytest.mark.parametrize("rows", [1, 4])
def test_a_decode_row_is_the_same_alone_and_in_a_batch(rows: int) -> None:
    """Greedy tokens must not change with the batch: bit for bit for single rows, to rounding for spans."""
    spans = [(computed, rows) for computed in (0, 1, 15, 16, 40, 200, 333, 700)]

    def scene_of(order: Sequence[int]) -> Scene:
        return make_scene(spans, num_heads=3, num_kv_heads=1, head_dim=128, order=order)

    together = attend(scene_of(range(len(spans)))).split(rows)
    for seq in range(len(spans)):
        alone = attend(scene_of([seq]))
        if rows == 1:
            assert torch.equal(alone, together[seq])
        torch.testing.assert_close(alone, together[seq], atol=2e-6, rtol=1e-5)


def test_sequences_without_rows_and_padding_rows_change_nothing() -> None:
    scene = make_scene([(20, 1), (3, 8)])
    expected = attend(scene)
    layout = scene.layout
    padded = ops.RowLayout(
        slots=torch.cat((layout.slots[:1], layout.slots[:1], layout.slots[1:], layout.slots[:1])),
        row_start=torch.tensor([0, 1, 1, 9, 9], dtype=torch.int32),
        row_seq=layout.row_seq,
        positions=layout.positions,
        kv_slots=layout.kv_slots,
        block_tables=layout.block_tables,
        num_computed=layout.num_computed,
        host_rows=(1, 0, 8, 0),
        host_max_context=21,
    )
    q = torch.cat((scene.q, scene.q[:3]))
    out = ops.paged_attention(q, scene.k_cache, scene.v_cache, padded, scene.scale)
    assert out.shape == q.shape
    assert torch.equal(out[:9], expected)


def test_one_layout_serves_two_geometries() -> None:
    """A target and its drafter may share the rows of a step but not the number of heads."""
    spans = [(20, 1), (3, 8)]
    first, second = make_scene(spans), make_scene(spans, num_heads=3, num_kv_heads=1)
    attend(first)
    second.layout = first.layout
    torch.testing.assert_close(attend(second).double(), second.expected(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [None, 1, 6, 40])
def test_chains_see_the_rows_before_their_branch_and_their_own(
    window: int | None, deterministic: bool
) -> None:
    spans = [(15, 8), (50, 8), (0, 8), (3, 1), (0, 20)]
    chains = [(0, 0, 7), (0, 2, 7), (1, 1, 5), (2, 0, 1), (1, 6, 7), (4, 15, 18)]
    scene = make_branched_scene(spans, chains)
    out = ops.paged_attention(
        scene.q, scene.k_cache, scene.v_cache, scene.layout, scene.scale, window, deterministic=deterministic
    )
    torch.testing.assert_close(out.double(), scene.expected(window), rtol=1e-5, atol=1e-5)


def test_bfloat16_attention_is_rounded_once() -> None:
    scene = make_scene([(40, 1), (0, 37), (9, 4)], dtype=torch.bfloat16)
    out = attend(scene)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), scene.expected(), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("packed", [False, True])
def test_a_row_of_a_deterministic_product_is_the_same_in_any_batch(packed: bool) -> None:
    x, weight = torch.randn(40, 2560), torch.randn(64, 2560)
    pack = ops.pack_linear(weight) if packed else None
    together = ops.linear(x, weight, packed=pack, deterministic=True)
    torch.testing.assert_close(together, x @ weight.T, atol=1e-3, rtol=1e-4)
    for first, rows in [(0, 1), (3, 1), (5, 7), (8, 9), (1, 39)]:
        part = ops.linear(x[first : first + rows], weight, packed=pack, deterministic=True)
        assert torch.equal(part, together[first : first + rows])
    assert ops.linear(x[:0], weight, packed=pack, deterministic=True).shape == (0, 64)
