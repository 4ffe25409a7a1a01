"""DSpark's sequential head: what a token does to the logits of the slot after it."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from paceline import ops
from paceline.models.drafter_config import DrafterConfig
from paceline.models.qwen3 import Linear

SUCCESSOR_ROWS: Final = 1024
"""Tokens whose successors are looked for at once: bounds the memory."""


class MarkovHead(nn.Module):
    """Low-rank correction of a slot's logits for the token before it (DSpark).

    With e = W1[previous token], h the slot's hidden state and W2 the way back to the vocabulary, the bias is
    W2 z: *vanilla* z = e; *gated* z = sigmoid(Wg [h; e] + b) * e; *rnn* z = tanh(o), where [a; b; o] = Wj [s;
    e; h] + bj and the state becomes sigmoid(a) * s + (1 - sigmoid(a)) * tanh(b), from 0.

    W1 is indexed by target ids, W2 has a row per draft-vocabulary id.
    """

    def __init__(
        self, config: DrafterConfig, *, device: torch.device | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.kind, rank, d = config.markov, config.markov_rank, config.layers.hidden_size
        vocab = config.layers.vocab_size
        self.markov_w1 = nn.Embedding(
            vocab, rank, _weight=torch.empty(vocab, rank, device=device, dtype=dtype)
        )
        self.markov_w2 = Linear(rank, config.draft_vocab_size, bias=False, device=device, dtype=dtype)
        if self.kind == "gated":
            self.gate_proj = Linear(d + rank, rank, device=device, dtype=dtype)
        elif self.kind == "rnn":
            self.joint_proj = Linear(2 * rank + d, 3 * rank, device=device, dtype=dtype)

    def initial_state(self, hidden: Tensor) -> Tensor:
        """State before the first slot, for hidden [*, d]: zeros [*, r]; only a recurrent head looks at it."""
        return hidden.new_zeros(*hidden.shape[:-1], self.markov_w2.in_features)

    def step(self, embedded: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One slot: (e [*, r], h [*, d], state [*, r]) -> (z [*, r], next state)."""
        if self.kind == "vanilla":
            return embedded, state
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat((hidden, embedded), dim=-1))) * embedded, state
        a, b, o = self.joint_proj(torch.cat((state, embedded, hidden), dim=-1)).chunk(3, dim=-1)
        keep = torch.sigmoid(a)
        return torch.tanh(o), keep * state + (1 - keep) * torch.tanh(b)

    def chain_head(self, num_successors: int, target_ids: Tensor | None) -> ops.ChainHead:
        """The vanilla head for chains that look at candidates only."""
        table, weight = self.markov_w1.weight.detach(), self.markov_w2.weight.detach()
        successors = [
            ops.draft_candidates((rows @ weight.T)[:, None], None, num_successors)[:, 0]
            for rows in table.split(SUCCESSOR_ROWS)
        ]
        return ops.ChainHead(table, weight, torch.cat(successors), target_ids)

    def low_rank(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[ops.LowRank, Tensor]:
        """One slot's correction, not multiplied out: (int [N], [N, d], state [N, r]) -> (it, next state)."""
        table, rows = self.markov_w1.weight, previous
        if self.kind != "vanilla":
            table, state = self.step(self.markov_w1(previous), hidden, state)
            rows = torch.arange(len(previous), device=previous.device)
        return ops.LowRank(table, rows, self.markov_w2.weight, self.markov_w2.packed), state

    def forward(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """Biases of all slots when their predecessors are known (teacher forcing).

        Args:
            previous: int [*, g], target ids.
            hidden: [*, g, d].

        Returns:
            [*, g, draft vocabulary].
        """
        embedded = self.markov_w1(previous)
        state, parts = self.initial_state(hidden[..., 0, :]), []
        for slot in range(previous.shape[-1]):
            z, state = self.step(embedded[..., slot, :], hidden[..., slot, :], state)
            parts.append(z)
        return self.markov_w2(torch.stack(parts, dim=-2))  # type: ignore[no-any-return]
