"""Output scored again, teacher-forced, by plain decoding: one row per sequence and step, no drafts, no cache.

What an engine produced is right if, at every position, the token it chose is one that plain decoding could
have chosen there, up to rounding. That is asked at every position, not only at the first difference, so that
neither a long agreement nor one early near-tie hides what comes later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.models.attention import KVCache, PagedContext
from paceline.models.qwen3 import Qwen3ForCausalLM
from paceline.ops import RowLayout
from paceline.sampling.noise import gumbel, row_keys
from paceline.sampling.seeds import mix64

PREFILL_ROWS = 512
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Produced:
    """One continuation an engine produced.

    Attributes:
        prompt: its prompt.
        tokens: its output.
        seed: the sequence's seed, with temperature 1; None when greedy.
    """

    prompt: list[int]
    tokens: list[int]
    seed: int | None = None


@dataclass(slots=True)
class Scores:
    """What plain decoding thinks of one continuation; each list has one entry per output token.

    Attributes:
        regret: best score minus the chosen token's, in nats. The score is the log-probability; for a sampled
            token with the position's noise on it, as the sampler adds it.
        probability: of the chosen token.
        above: total probability of the tokens likelier than it.
        top: largest probability.
        is_top: whether the chosen token has it.
        watched: probability of the token in question, where one was given.
        watched_above: total probability of the tokens likelier than that.
    """

    regret: list[float] = field(default_factory=list)
    probability: list[float] = field(default_factory=list)
    above: list[float] = field(default_factory=list)
    top: list[float] = field(default_factory=list)
    is_top: list[bool] = field(default_factory=list)
    watched: list[float] = field(default_factory=list)
    watched_above: list[float] = field(default_factory=list)


class _Cache:
    """K/V of some sequences in blocks of their own."""

    def __init__(self, model: Qwen3ForCausalLM, lengths: Sequence[int]) -> None:
        weight = model.embed_tokens.weight
        config = model.config
        width = -(-max(lengths) // BLOCK)
        self._device = weight.device
        self._kv = KVCache.allocate(
            config.num_hidden_layers,
            width * len(lengths),
            BLOCK,
            config.num_key_value_heads,
            config.head_dim,
            dtype=weight.dtype,
            device=weight.device,
        )
        self._tables = torch.arange(width * len(lengths), device=weight.device, dtype=torch.int32).view(
            -1, width
        )
        self._computed = torch.zeros(len(lengths), device=weight.device, dtype=torch.int32)

    def context(
        self, sequences: Sequence[int], start: Sequence[int], rows: int
    ) -> tuple[PagedContext, Tensor]:
        """Attention for ``rows`` rows of each of ``sequences`` from their ``start`` on, and the positions."""

        def ints(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, device=self._device, dtype=torch.int32)

        slots, first = ints(sequences), ints(start)
        self._computed[slots.long()] = first
        count = len(sequences)
        row_seq = torch.arange(count, device=self._device, dtype=torch.int32).repeat_interleave(rows)
        offset = torch.arange(rows, device=self._device, dtype=torch.int32)
        positions = (first[:, None] + offset).view(-1)
        blocks = self._tables[slots[row_seq].long(), positions.long() // BLOCK].long()
        layout = RowLayout(
            slots=slots,
            row_start=torch.arange(count + 1, device=self._device, dtype=torch.int32) * rows,
            row_seq=row_seq,
            positions=positions,
            kv_slots=blocks * BLOCK + positions % BLOCK,
            block_tables=self._tables,
            num_computed=self._computed,
            host_rows=(rows,) * count,
            host_max_context=max(start) + rows,
        )
        return PagedContext(self._kv, layout), positions


@torch.inference_mode()
def plain_logits(
    model: Qwen3ForCausalLM, items: Sequence[Produced]
) -> Iterator[tuple[list[int], int, Tensor]]:
    """Logits that plain decoding has at every output position, all sequences in step.

    Yields:
        Indices of the sequences that are still going, the index of the output token in question, and the
        logits [sequences, V] fp32 it is drawn from.
    """
    cache = _Cache(model, [len(item.prompt) + len(item.tokens) for item in items])
    device = model.embed_tokens.weight.device

    def forward(tokens: list[int], sequences: list[int], start: list[int], rows: int) -> Tensor:
        context, positions = cache.context(sequences, start, rows)
        fed = torch.tensor(tokens, device=device, dtype=torch.int32)
        hidden: Tensor = model(fed, positions, context).hidden
        return hidden

    for index, item in enumerate(items):
        for start in range(0, len(item.prompt) - 1, PREFILL_ROWS):
            part = item.prompt[:-1][start : start + PREFILL_ROWS]
            forward(part, [index], [start], len(part))
    for step in range(max(len(item.tokens) for item in items)):
        going = [i for i, item in enumerate(items) if step < len(item.tokens)]
        fed = [items[i].tokens[step - 1] if step else items[i].prompt[-1] for i in going]
        hidden = forward(fed, going, [len(items[i].prompt) - 1 + step for i in going], 1)
        yield going, step, model.logits(hidden).float()


def rescore(
    model: Qwen3ForCausalLM, items: Sequence[Produced], watch: Sequence[Sequence[int]] | None = None
) -> list[Scores]:
    """Score continuations position by position.

    Args:
        model: the target.
        items: what was produced, greedily or at temperature 1 without filters.
        watch: per continuation and output position a token whose probability is wanted; -1 for none.
    """
    scores = [Scores() for _ in items]
    device = model.embed_tokens.weight.device
    vocabulary = torch.arange(model.config.vocab_size, device=device, dtype=torch.int32)
    for going, step, logits in plain_logits(model, items):
        log_p = logits.log_softmax(-1)
        chosen = torch.tensor([items[i].tokens[step] for i in going], device=device)[:, None]
        watched = torch.tensor([-1 if watch is None else watch[i][step] for i in going], device=device)[
            :, None
        ]
        values = log_p + _noise([items[i] for i in going], step, vocabulary)
        regret = values.amax(-1) - values.gather(-1, chosen)[:, 0]
        p = log_p.exp()
        columns = [regret]
        for token in (chosen, watched.clamp(min=0)):
            own = p.gather(-1, token)
            columns += [own[:, 0], p.where(p > own, 0.0).sum(-1)]
        columns.append(p.amax(-1))
        rows = torch.stack(columns, dim=1).double().tolist()
        hits = (log_p.argmax(-1) == chosen[:, 0]).tolist()
        for i, row, hit in zip(going, rows, hits, strict=True):
            item = scores[i]
            item.regret.append(row[0])
            item.probability.append(row[1])
            item.above.append(row[2])
            item.watched.append(row[3])
            item.watched_above.append(row[4])
            item.top.append(row[5])
            item.is_top.append(hit)
    return scores


def _noise(items: Sequence[Produced], step: int, vocabulary: Tensor) -> Tensor:
    """What the sampler adds at that output position, [n, V]; zero for greedy sequences."""
    device = vocabulary.device
    keys = torch.tensor([mix64(item.seed or 0) for item in items], device=device)
    positions = torch.tensor([len(item.prompt) + step for item in items], device=device)
    sampled = torch.tensor([item.seed is not None for item in items], device=device)
    return torch.where(sampled[:, None], gumbel(row_keys(keys, positions), vocabulary), 0.0)
