"""What the benchmark of the ops is made of: a world of sizes, cases on it, and plans to build them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ops_attention import AttentionScene

EPS = 1e-6
MAX_CONTEXT = 40960
"""Positions there can be; captured rounds are laid out for so many, whatever their sequences' lengths."""


@dataclass(frozen=True)
class World:
    """Device, dtype and geometry of a run.

    Attributes:
        hidden, intermediate, heads, kv_heads, head_dim, vocab, layers: of the target and, but for the number
            of layers, of its drafter.
        draft_layers, taps, rank: the drafter's layers, the target layers it sees, and its Markov head's rank.
        shrink: rows and lengths above 16 are divided by it.
    """

    device: torch.device
    dtype: torch.dtype
    hidden: int = 2560
    intermediate: int = 9728
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 151936
    layers: int = 36
    draft_layers: int = 5
    taps: int = 5
    rank: int = 256
    shrink: int = 1

    @staticmethod
    def small(dtype: torch.dtype) -> World:
        """A world for the CPU, where every case takes some milliseconds."""
        return World(
            torch.device("cpu"),
            dtype,
            hidden=128,
            intermediate=256,
            heads=4,
            kv_heads=2,
            head_dim=32,
            vocab=2048,
            layers=2,
            draft_layers=2,
            taps=2,
            rank=16,
            shrink=32,
        )

    @property
    def size(self) -> int:
        """Bytes of a number."""
        return self.dtype.itemsize

    @property
    def qkv(self) -> int:
        """Columns of q, k and v side by side."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def fewer(self, count: int) -> int:
        """So many rows or keys, in this world."""
        return count if count <= 16 else max(16, count // self.shrink)

    def each(self, *counts: int) -> tuple[int, ...]:
        """Counts of rows, in this world: each once."""
        return tuple(dict.fromkeys(self.fewer(count) for count in counts))

    def tensor(self, *shape: int) -> Tensor:
        """Normal noise."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def ids(self, bound: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Integers in 0..bound - 1."""
        return torch.randint(bound, shape, device=self.device, dtype=dtype)

    def whole(self, values: Sequence[int] | Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
        """These integers."""
        return torch.as_tensor(values).to(self.device, dtype)


@dataclass
class Case:
    """One op on one set of operands.

    Attributes:
        run: the op, as the engine calls it; any number of times.
        exact: what ``outcome`` makes of a right result, in float64. Integers must be equal.
        num_bytes: read and written once.
        flops: of the matrix products; 0 where there are none.
        peer: the same work by torch's own kernels, or None.
        outcome: what is compared, of what ``run`` returned: itself, what was written in place, or what the
            result is worth.
        tolerance: of the largest difference over the largest value; None for some roundings of the dtype.
        others: ``run`` on other operands of the same shapes, which together do not fit into the L2 cache.
        scene: the operands, where the op is attention.
    """

    run: Callable[[], tuple[Tensor, ...]]
    exact: Callable[[], tuple[Tensor, ...]]
    num_bytes: int
    flops: int = 0
    peer: Callable[[], object] | None = None
    outcome: Callable[..., tuple[Tensor, ...]] = lambda *outs: outs
    tolerance: float | None = None
    others: Sequence[Callable[[], object]] = ()
    scene: AttentionScene | None = None


class Plan(NamedTuple):
    """A case to be: its operands are made when its turn comes."""

    op: str
    shape: str
    build: Callable[[], Case]


def score_of(scores: Tensor, tokens: Tensor) -> Tensor:
    """Scores [N, V] of tokens [N], as [N, 1]; a token that never was written is somebody's, too."""
    return scores.gather(1, tokens.long().clamp(0, scores.shape[1] - 1)[:, None])


def num_bytes(*tensors: Tensor) -> int:
    """Bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
