"""Hedged verification: beside a span, chains that take the second best draft at one position and go on from
there.

A round commits little when its first draft does not stand, and the token that is drawn instead is often the
drafter's second choice. A *chain* bets on that: it replaces the draft at its branch by the second best, and
all drafts after it by what follows then. Its rows share the span's history up to the branch, the rows of the
round before it included (``ops.Branches``), and write their K/V to scratch slots behind the pool. When a
chain wins (``acceptance.accept_chains``), its rows take the place of the span's own in everything that
follows: K/V are copied to the span's slots, and taps, draws and log-probabilities are read from the chain's
rows. Nothing outside this module knows which rows won; those that lost are never read again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.models.attention import KVCache, PagedContext
from paceline.models.qwen3 import Qwen3ForCausalLM
from paceline.ops import Branches, RowLayout
from paceline.runtime.acceptance import Chains, Verified, accept_chains, count_accepted
from paceline.runtime.drafting import DraftStage
from paceline.runtime.state import SlotState
from paceline.sampling.fixed import sample_fixed
from paceline.sampling.sampler import LogprobTensors, SampleRows
from paceline.sampling.state import FixedKind


@dataclass(frozen=True)
class HedgeShape:
    """What is fixed about a round's chains.

    Attributes:
        num_places: sequences that may be hedged.
        positions: branches of each one's chains, ascending, all below ``num_drafts``.
        num_seqs, num_drafts: N and K of the round.
    """

    num_places: int
    positions: tuple[int, ...]
    num_seqs: int
    num_drafts: int

    @property
    def width(self) -> int:
        """W, rows of a chain: those the earliest branch needs."""
        return self.num_drafts - self.positions[0]

    @property
    def num_chains(self) -> int:
        """C."""
        return self.num_places * len(self.positions)


class HedgedVerify:
    """The target's half of a round in which some spans have chains beside them.

    Args:
        shape: what is fixed.
        kind: sampling it can do.
        model: the target.
        cache: its K/V; the chains write behind the pool, before the last block.
        state: the slots.
        drafting: the drafter, which has the chains' tokens.
        last: last position of any sequence.
    """

    def __init__(
        self,
        shape: HedgeShape,
        kind: FixedKind,
        model: Qwen3ForCausalLM,
        cache: KVCache,
        state: SlotState,
        drafting: DraftStage,
        last: int,
    ) -> None:
        device, n, width = state.device, shape.num_seqs, shape.num_drafts + 1
        chains, rows = shape.num_chains, shape.width
        self._shape, self._kind, self._last = shape, kind, last
        self._model, self._cache, self._state, self._drafting = model, cache, state, drafting
        self._index = torch.arange(len(shape.positions), device=device).repeat(shape.num_places)  # [C]
        self._branches = torch.tensor(shape.positions, device=device).repeat(shape.num_places)  # [C]
        self._offset = torch.arange(rows, device=device)
        ends = [*range(0, n * width, width), *range(n * width, n * width + chains * rows + 1, rows)]
        self._row_start = torch.tensor(ends, dtype=torch.int32, device=device)
        owner = torch.arange(n + chains, dtype=torch.int32, device=device)
        self._row_seq = torch.cat((owner[:n].repeat_interleave(width), owner[n:].repeat_interleave(rows)))
        first = (cache.k.shape[1] - 1) * state.block_size - chains * rows
        self._own = first + rows * torch.arange(chains, device=device)  # [C] cache slot of each chain
        self._natural = torch.arange(n * width + 1, device=device)
        self._chain_rows = n * width + torch.arange(chains * rows, device=device)

    def __call__(
        self, slots: Tensor, drafts: Tensor, places: Tensor, layout: RowLayout, tokens: Tensor
    ) -> Verified:
        """Forward, draw and accept; the drafter's context is written for the rows that stand.

        Args:
            slots, drafts: [N] int32, as the round has them.
            places: [places] int32, which of the sequences have chains to verify; -1 for none.
            layout: the spans' own rows.
            tokens: [N * (K + 1)] int32, what these are fed.
        """
        state, shape = self._state, self._shape
        parents = places.clamp(min=0).long().repeat_interleave(len(shape.positions))  # [C]
        given = (places >= 0).repeat_interleave(len(shape.positions))
        chain_slots = torch.where(given, slots[parents], state.spare)
        active = given & (self._branches < drafts[parents])
        chain_tokens = self._tokens(chain_slots)  # [C, W]
        everything = self._layout(layout, chain_slots)
        fed = torch.cat((tokens, chain_tokens.view(-1)))
        hidden, tapped = self._model(
            fed, everything.positions, PagedContext(self._cache, everything), self._drafting.taps
        )
        logits, own = self._model.logits(hidden), len(tokens)
        rows = SampleRows(slots[layout.row_seq], layout.positions, state.tokens, state.tokens.shape[1])
        spans = tokens.view(shape.num_seqs, -1)
        drawn = sample_fixed(logits[:own], rows, spans, state.sampling, self._kind)
        chain_rows = self._sample_rows(chain_slots, everything, chain_tokens)
        redrawn = sample_fixed(logits[own:], chain_rows, chain_tokens, state.sampling, self._kind)
        sampled = drawn.tokens.view_as(spans)
        alone = count_accepted(sampled, spans[:, 1:], drafts.clamp(min=0))
        chains = Chains(parents, self._branches, active, chain_tokens, redrawn.tokens.view_as(chain_tokens))
        accepted, won = accept_chains(alone, sampled, drafts, chains)

        replaced = self._replaced(parents, won)  # [C * W]
        self._copy_kv(everything.kv_slots, replaced)
        source = self._natural.index_copy(0, replaced, self._chain_rows)[:-1]  # row that stands for each
        assert tapped is not None
        self._drafting.write_context(tapped[source], layout)
        return Verified(
            torch.cat((drawn.tokens, redrawn.tokens))[source].view_as(sampled),
            accepted,
            _picked(drawn.logprobs, redrawn.logprobs, source),
            won=accepted - alone,
        )

    def _tokens(self, chain_slots: Tensor) -> Tensor:
        """What the chains are fed, [C, W] int32: from the branch on; repeated at the end where W is more."""
        found = self._drafting.hedges[chain_slots, self._index]  # [C, g]
        column = self._branches[:, None] + self._offset
        return found.gather(1, column.clamp(max=found.shape[1] - 1))

    def _layout(self, layout: RowLayout, chain_slots: Tensor) -> RowLayout:
        """The rows of spans and chains."""
        state, shape = self._state, self._shape
        starts = (state.num_computed[chain_slots] + self._branches + 1).int()
        positions = starts[:, None] + self._offset.int()
        return RowLayout(
            slots=torch.cat((layout.slots, chain_slots)),
            row_start=self._row_start,
            row_seq=self._row_seq,
            positions=torch.cat((layout.positions, positions.view(-1).clamp(max=self._last))),
            kv_slots=torch.cat((layout.kv_slots, (self._own[:, None] + self._offset).view(-1))),
            block_tables=layout.block_tables,
            num_computed=layout.num_computed,
            host_rows=(*layout.host_rows, *(shape.width,) * shape.num_chains),
            host_max_context=layout.host_max_context + shape.width,
            branches=Branches(
                torch.cat((state.num_computed[layout.slots], starts)),
                torch.cat((torch.full_like(layout.slots, -1).long(), self._own)),
            ),
        )

    def _sample_rows(self, chain_slots: Tensor, everything: RowLayout, chain_tokens: Tensor) -> SampleRows:
        """The chains' rows; where parameters look at tokens, these are the chain's own."""
        state, width = self._state, self._shape.width
        positions = everything.positions[-chain_tokens.numel() :]
        tokens, owners = state.tokens, None
        if self._kind == "full":
            at = (state.num_computed[chain_slots] + self._branches + 1)[:, None] + self._offset
            tokens = state.tokens[chain_slots].scatter(1, at, chain_tokens)
            owners = torch.arange(len(chain_slots), device=state.device).repeat_interleave(width)
        return SampleRows(
            chain_slots.repeat_interleave(width), positions, tokens, state.tokens.shape[1], owners
        )

    def _replaced(self, parents: Tensor, won: Tensor) -> Tensor:
        """Which of the spans' rows each chain row stands for, [C * W]; N * (K + 1) for none."""
        width, nobody = self._shape.num_drafts + 1, self._shape.num_seqs * (self._shape.num_drafts + 1)
        column = self._branches[:, None] + 1 + self._offset  # [C, W]
        row = parents[:, None] * width + column
        return torch.where(won[:, None] & (column < width), row, nobody).view(-1)

    def _copy_kv(self, kv_slots: Tensor, replaced: Tensor) -> None:
        """Copy the winners' K and V to where the spans' own rows have theirs; all others stay."""
        own = kv_slots[self._chain_rows]
        target = torch.where(replaced < len(self._natural) - 1, kv_slots[replaced], own)
        for cache in (self._cache.k, self._cache.v):
            rows = cache.flatten(1, 2)  # [layers, slots, KV, D], a view
            rows.index_copy_(1, target, rows.index_select(1, own))


def _picked(
    first: LogprobTensors | None, second: LogprobTensors | None, source: Tensor
) -> LogprobTensors | None:
    """The log-probabilities of some rows of two parts."""
    if first is None or second is None:
        return None
    return LogprobTensors(
        first.rows,
        torch.cat((first.token_ids, second.token_ids))[source],
        torch.cat((first.logprobs, second.logprobs))[source],
        torch.cat((first.ranks, second.ranks))[source],
    )
