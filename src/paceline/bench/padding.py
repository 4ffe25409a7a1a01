"""A trained pair at the size of a larger model, computing the same function: real acceptance at real cost.

Everything is padded with zeros where a value could reach the result, and with random values where none can,
so that the arithmetic is honest. Let d be the width of the small model and D that of the large one.

- **Width.** Channels d..D-1 of the residual stream stay zero. A norm over D channels then sees the mean
  square m of the small model as m d / D; with epsilon and weights rescaled (epsilon d / D, weights
  sqrt(d / D)) it gives the same values.
- **Layers.** The small model's layers are spread over the large one's; those between them add nothing to the
  residual stream (their output projections are zero), so that a tap anywhere between two of them sees the
  same values.
- **Heads.** A KV head serves no more query heads than in the large model; where the small model has more, it
  is copied. What other heads compute meets zero columns of the output projection.
- **Vocabulary** (if padded). One spare channel holds the same b in every row of the embedding. The final norm
  raises it, and head rows beyond the small vocabulary hold a large negative number there and nothing else:
  their logits lie far below all others. With a tied embedding the other rows hold b there too, which adds the
  same to each of their logits. In other norms the channel takes the place of a part of epsilon.

The norm of query and key heads shares epsilon with the others, although its width does not change: that is
off by a fraction of epsilon (1e-6) against a mean square near 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.models.config import Qwen3Config

RAISE: Final = 1000.0
"""The final norm's weight of the spare channel."""
PADDED_ROW: Final = -1000.0
"""Of the head rows beyond the small vocabulary, in the spare channel."""

Named = Iterator[tuple[str, Tensor]]


def spread(num_small: int, num_large: int) -> list[int]:
    """Which layer of the large model each of the small one becomes: evenly, the last at the end."""
    return [(i + 1) * num_large // num_small - 1 for i in range(num_small)]


def head_places(small: Qwen3Config, large: Qwen3Config) -> tuple[list[int], list[int]]:
    """Where heads go.

    Returns:
        The large model's query head of each small one; and the small model's KV head behind each of the large
        model's first KV heads.

    Raises:
        ConfigError: there are not enough.
    """
    group = small.num_attention_heads // small.num_key_value_heads
    room = large.num_attention_heads // large.num_key_value_heads
    copies = -(-group // room)
    if copies * small.num_key_value_heads > large.num_key_value_heads:
        raise ConfigError(
            f"The geometry has {large.num_key_value_heads} KV heads with {room} query heads each; the "
            f"checkpoint's {small.num_key_value_heads} with {group} each do not fit. Take a larger geometry."
        )
    queries = [
        (head // group * copies + head % group // room) * room + head % group % room
        for head in range(small.num_attention_heads)
    ]
    return queries, [kv // copies for kv in range(copies * small.num_key_value_heads)]


@dataclass(frozen=True)
class Padding:
    """What the padded models of a pair have in common.

    Attributes:
        small, large: width d and D.
        small_vocab, vocab_size: tokens before and after.
        dtype: of the stored weights.
        constant: b, what the spare channel d holds; 0 if the vocabulary is not padded.
    """

    small: int
    large: int
    small_vocab: int
    vocab_size: int
    dtype: torch.dtype
    constant: float

    @classmethod
    def of(cls, small: Qwen3Config, geometry: Qwen3Config, *, pad_vocab: bool, dtype: torch.dtype) -> Padding:
        """The padding from a checkpoint to a geometry.

        Raises:
            ConfigError: the vocabulary is to be padded, and there is no room for it.
        """
        vocab = geometry.vocab_size if pad_vocab else small.vocab_size
        constant = 0.0
        if pad_vocab:
            if vocab < small.vocab_size or geometry.hidden_size <= small.hidden_size:
                raise ConfigError(
                    f"A vocabulary of {small.vocab_size} in {small.hidden_size} channels cannot be padded to "
                    f"{vocab} in {geometry.hidden_size}: both must grow. Drop --pad-vocab."
                )
            half = math.sqrt(small.rms_norm_eps * small.hidden_size / 2)  # half of epsilon's part
            constant = float(torch.tensor(half).to(dtype))
        return cls(small.hidden_size, geometry.hidden_size, small.vocab_size, vocab, dtype, constant)

    def epsilon(self, small: Qwen3Config) -> float:
        """Epsilon of the norms over D channels: with the spare channel's square it gives d / D of the old."""
        return (small.rms_norm_eps * self.small - self.constant**2) / self.large

    def norm(self, weight: Tensor, *, spare: float = 0.0) -> Tensor:
        """A norm's weight [d] -> [D]."""
        result = torch.zeros(self.large)
        result[: self.small] = weight.float() * math.sqrt(self.small / self.large)
        if self.constant:
            result[self.small] = spare
        return result

    def embedding(self, table: Tensor) -> Tensor:
        """[V, d] -> [V', D]."""
        result = torch.zeros(self.vocab_size, self.large, dtype=self.dtype)
        result[: self.small_vocab, : self.small] = table
        if self.constant:
            result[: self.small_vocab, self.small] = self.constant
            result[self.small_vocab :, self.small] = PADDED_ROW
        return result

    def head(self, table: Tensor) -> Tensor:
        """[V, d] -> [V', D] of a head that is not the embedding."""
        result = self.embedding(table)
        if self.constant:
            result[: self.small_vocab, self.small] = 0.0
        return result


class Noise:
    """Random values for weights that meet zeros: drawn once, reused from varying offsets."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._pool = torch.randn(2**22, generator=torch.Generator().manual_seed(0)).to(dtype)
        self._offset = 0

    def matrix(self, rows: int, columns: int) -> Tensor:
        """[rows, columns], about N(0, 1 / columns)."""
        result = torch.empty(rows * columns, dtype=self._pool.dtype)
        done = 0
        while done < len(result):
            part = self._pool[self._offset :][: len(result) - done]
            result[done : done + len(part)] = part
            done += len(part)
            self._offset = (self._offset + 7919) % (len(self._pool) // 2)
        return result.mul_(columns**-0.5).view(rows, columns)


class Layers:
    """Decoder layers of one model, target or drafter, from small to large.

    Args:
        small, large: their geometries.
        padding: of the pair.
        noise: for what no result depends on.
        tensors: the small checkpoint.
        prefix: before ``layers.``.
    """

    def __init__(
        self,
        small: Qwen3Config,
        large: Qwen3Config,
        padding: Padding,
        noise: Noise,
        tensors: Mapping[str, Tensor],
        prefix: str,
    ) -> None:
        self._small, self._large = small, large
        self._padding, self._noise = padding, noise
        self._tensors, self._prefix = tensors, prefix
        self._queries, self._kv = head_places(small, large)
        self._places = spread(small.num_hidden_layers, large.num_hidden_layers)

    def __iter__(self) -> Named:
        origin = {place: i for i, place in enumerate(self._places)}
        for layer in range(self._large.num_hidden_layers):
            for name, tensor in self._layer(origin.get(layer)):
                yield f"{self._prefix}layers.{layer}.{name}.weight", tensor

    def _layer(self, origin: int | None) -> Named:
        """One layer: the small model's layer ``origin``, or one that adds nothing."""
        d, inner = self._padding.small, self._small.intermediate_size
        width, dim = self._padding.large, self._large.head_dim
        queries, keys = _rows(self._queries, dim), torch.arange(len(self._kv) * dim)
        kv_rows, channels = _rows(self._kv, dim), torch.arange(inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield name, torch.ones(width) if origin is None else self._padding.norm(self._of(origin, name))
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            yield name, torch.ones(dim) if origin is None else self._of(origin, name)
        into = [
            ("self_attn.q_proj", self._large.q_size, queries, torch.arange(self._small.q_size)),
            ("self_attn.k_proj", self._large.kv_size, keys, kv_rows),
            ("self_attn.v_proj", self._large.kv_size, keys, kv_rows),
            ("mlp.gate_proj", self._large.intermediate_size, channels, channels),
            ("mlp.up_proj", self._large.intermediate_size, channels, channels),
        ]
        for name, rows, places, source in into:
            matrix = self._noise.matrix(rows, width)
            if origin is not None:
                matrix[places, :d] = self._of(origin, name)[source].to(matrix.dtype)
            yield name, matrix
        for name, columns, places in (
            ("self_attn.o_proj", self._large.q_size, queries),
            ("mlp.down_proj", self._large.intermediate_size, channels),
        ):
            matrix = torch.zeros(width, columns, dtype=self._padding.dtype)
            if origin is not None:
                matrix[:d, places] = self._of(origin, name).to(matrix.dtype)
            yield name, matrix

    def _of(self, layer: int, name: str) -> Tensor:
        return self._tensors[f"{self._prefix}layers.{layer}.{name}.weight"]


def _rows(heads: Sequence[int], dim: int) -> Tensor:
    """The rows of heads, each ``dim`` long."""
    return (torch.tensor(heads)[:, None] * dim + torch.arange(dim)).view(-1)
