"""DFlash and DSpark block drafters.

A drafter proposes a block of tokens in one parallel pass. Its few layers are Qwen3's, with two differences:
queries come from the block alone (the anchor and mask tokens), and each layer's keys and values come from the
block *and* from context features, which are the target's own hidden states of every earlier position, fused
by one projection (DFlash). DSpark adds what a parallel pass cannot know: a cheap sequential head that
corrects each slot's logits for the token drafted before it, and a confidence per slot (DSpark paper, sections
on the Markov and confidence heads).

The embedding and the head are the target's, never copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, cast

import torch
from torch import Tensor, nn

from paceline import ops
from paceline.models.attention import AttentionContext, AttentionSpec, KVCache
from paceline.models.drafter_config import DrafterConfig
from paceline.models.markov_head import MarkovHead
from paceline.models.qwen3 import MLP, Linear, Qwen3ForCausalLM, RMSNorm, freeze
from paceline.models.rope import RopeTable, apply_rope


class DraftSlots(NamedTuple):
    """The slots of a block that are drafts.

    Attributes:
        hidden: [*, g, d], after the final norm.
        logits: [*, g, draft vocabulary] in the weights' dtype, of the parallel pass alone.
    """

    hidden: Tensor
    logits: Tensor


class Chain(NamedTuple):
    """Drafts along one chain.

    Attributes:
        tokens: int64 [*, g], ids in the target's vocabulary.
        runner_up: int64 [*, g], the second best of what each slot chose from, given the chain before it;
            target ids.
        logits: [*, g, draft vocabulary] fp32, Markov correction included.
        confidence: [*, g] fp32 logits of "accepted, if all before it are"; None without a confidence head.
    """

    tokens: Tensor
    runner_up: Tensor
    logits: Tensor
    confidence: Tensor | None


WHOLE_VOCABULARY: Final = 64
"""Vocabularies of fewer than so many times the candidates are scored whole: it costs as little."""


class _Step(NamedTuple):
    """One slot of a chain: corrected logits, what the choice was made from, the best draft id, the token
    taken.
    """

    logits: Tensor
    scores: Tensor
    best: Tensor
    token: Tensor


class DraftLayer(nn.Module):
    """A Qwen3 decoder layer; its q, k and v projections are rows of the drafter's stacked ``qkv_proj``."""

    def __init__(
        self, config: DrafterConfig, layer: int, *, device: torch.device | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        shape = config.layers
        d, eps, window = shape.hidden_size, shape.rms_norm_eps, shape.windows[layer]
        self.layer = layer
        self.spec = AttentionSpec(
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
            eps,
            window,
            bidirectional=window is None or config.window_non_causal,
        )
        self.input_layernorm = RMSNorm(d, eps, device=device, dtype=dtype)
        self.q_norm = RMSNorm(shape.head_dim, eps, device=device, dtype=dtype)
        self.k_norm = RMSNorm(shape.head_dim, eps, device=device, dtype=dtype)
        self.o_proj = Linear(shape.q_size, d, bias=shape.attention_bias, device=device, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(d, eps, device=device, dtype=dtype)
        self.mlp = MLP(shape, device=device, dtype=dtype)

    def forward(
        self, qkv: Tensor, residual: Tensor, positions: Tensor, cos_sin: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """(qkv [*rows, (H + 2 KV) * D], residual [*rows, d]) -> (MLP output, residual before it is added)."""
        q_norm, k_norm = self.q_norm.weight, self.k_norm.weight
        out = context.attend(self.layer, qkv, q_norm, k_norm, positions, cos_sin, self.spec)
        x, residual = self.post_attention_layernorm.add(self.o_proj.parts(out), residual)
        return self.mlp(x), residual


class Drafter(nn.Module):
    """A DFlash or DSpark drafter bound to its target.

    Parameters are allocated, not initialised: see :mod:`paceline.models.drafter_loader`, or
    :meth:`init_weights`.

    Args:
        config: geometry and layout.
        target: lends its embedding and head, which stay out of this module's parameters.
    """

    def __init__(
        self,
        config: DrafterConfig,
        target: Qwen3ForCausalLM,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        device = torch.device(device) if device is not None else None
        self.config = config
        self._target = (target,)  # a tuple, so that nn.Module does not register it as a part of this one
        shape = config.layers
        d, eps = shape.hidden_size, shape.rms_norm_eps
        rows = shape.q_size + 2 * shape.kv_size
        num_layers = shape.num_hidden_layers
        self.fc = Linear(len(config.tap_layer_ids) * d, d, bias=False, device=device, dtype=dtype)
        self.hidden_norm = RMSNorm(d, eps, device=device, dtype=dtype)
        # Stacked, because the context's keys and values of all layers come from one input: a single product.
        self.qkv_proj = nn.Parameter(torch.empty(num_layers, rows, d, device=device, dtype=dtype))
        self._packed_qkv: list[Tensor | None] = [None] * num_layers
        self._context_weight: Tensor | None = None  # [layers * 2 KV * D, d]: rows of qkv_proj, side by side
        self._packed_context: Tensor | None = None
        self._k_norms: Tensor | None = None  # [layers, D]
        self._candidates = 0  # of each slot of a chain; 0 for the whole vocabulary
        self._chain_head: ops.ChainHead | None = None
        self.qkv_bias = (
            nn.Parameter(torch.empty(num_layers, rows, device=device, dtype=dtype))
            if shape.attention_bias
            else None
        )
        self.layers = nn.ModuleList(
            DraftLayer(config, i, device=device, dtype=dtype) for i in range(num_layers)
        )
        self.norm = RMSNorm(d, eps, device=device, dtype=dtype)
        self.markov_head = (
            MarkovHead(config, device=device, dtype=dtype) if config.markov is not None else None
        )
        width = d + (config.markov_rank if config.confidence_with_markov else 0)
        self.confidence_head = Linear(width, 1, device=device, dtype=dtype) if config.confidence else None
        reduced, vocab = config.reduced_vocab, config.draft_vocab_size
        self.lm_head = Linear(d, vocab, bias=False, device=device, dtype=dtype) if reduced else None
        # The target's id of each draft id, [draft vocabulary]; None when they are the same.
        self.target_ids: Tensor | None
        self.register_buffer("target_ids", torch.arange(vocab, device=device) if reduced else None)
        # Sequential temperature scaling of the confidence logits, one per draft position; 1 = uncalibrated.
        self.sts_temperatures: Tensor
        self.register_buffer(
            "sts_temperatures", torch.ones(config.max_drafts, device=device), persistent=False
        )
        # A block near the end of the target's context overhangs it by up to a block.
        num_positions = target.config.max_context_len + config.block_size
        self.rope = RopeTable(shape.rope, shape.head_dim, num_positions, device)

    def freeze(self) -> None:
        """Make a loaded drafter ready to serve."""
        freeze(self)
        first = self.config.layers.q_size
        weights = self.qkv_proj.detach()
        self._packed_qkv = [ops.pack_linear(weight) for weight in weights]
        self._context_weight = weights[:, first:].flatten(0, 1)
        self._packed_context = ops.pack_linear(self._context_weight)
        self._k_norms = torch.stack([layer.k_norm.weight for layer in self.draft_layers()])

    def restrict(self, num_candidates: int) -> bool:
        """From now on a chain's slot chooses among its ``num_candidates`` best tokens before the correction
        and half as many whose correction is largest, instead of all. What is drafted changes little, and what
        is accepted of it is exact either way.

        Returns:
            Whether that is done: only for a vanilla Markov head over a vocabulary large enough to gain by it.
        """
        head = self.markov_head
        large = self.config.draft_vocab_size >= WHOLE_VOCABULARY * num_candidates
        if head is None or head.kind != "vanilla" or not large:
            return False
        self._candidates = num_candidates
        self._chain_head = head.chain_head(num_candidates // 2, self.target_ids)
        return True

    @property
    def tokens_scored(self) -> int:
        """Tokens a slot of a chain chooses among."""
        if self._chain_head is None:
            return self.config.draft_vocab_size
        return self._candidates + self._chain_head.successors.shape[1]

    @property
    def target(self) -> Qwen3ForCausalLM:
        """The model this drafter drafts for."""
        return self._target[0]

    def draft_layers(self) -> Sequence[DraftLayer]:
        """The layers, typed."""
        return cast(Sequence[DraftLayer], self.layers)

    def context_features(self, taps: Tensor) -> Tensor:
        """What the drafter knows of past positions: [*rows, n * d] target taps -> [*rows, d]."""
        return self.hidden_norm(self.fc(taps))  # type: ignore[no-any-return]

    def project_context(self, features: Tensor) -> Tensor:
        """Keys and values of context rows in all layers, before norm and rotation.

        The features do not pass a layer's input norm: ``hidden_norm`` is theirs.

        Args:
            features: [R, d].

        Returns:
            [layers, R, 2 KV * D], keys then values.
        """
        first = self.config.layers.q_size
        if self._context_weight is None:
            kv = torch.matmul(features, self.qkv_proj[:, first:].transpose(1, 2))
        else:
            flat = ops.linear(features, self._context_weight, packed=self._packed_context)
            kv = flat.view(features.shape[0], len(self.layers), -1).transpose(0, 1)
        return kv if self.qkv_bias is None else kv + self.qkv_bias[:, None, first:]

    def context_kv(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (normed and rotated) and values of context rows in all layers.

        Args:
            features: [*rows, d].
            positions: int [*rows].

        Returns:
            k, v: [layers, *rows, KV, D].
        """
        shape = self.config.layers
        rows = features.shape[:-1]
        kv = self.project_context(features.reshape(-1, features.shape[-1]))
        kv = kv.view(kv.shape[0], *rows, 2, shape.num_key_value_heads, shape.head_dim)
        k, v = kv.unbind(-3)
        normed = [
            ops.rms_norm(k[i], layer.k_norm.weight, shape.rms_norm_eps)
            for i, layer in enumerate(self.draft_layers())
        ]
        return apply_rope(torch.stack(normed), self.rope()[positions]), v

    def write_context(self, taps: Tensor, positions: Tensor, kv_slots: Tensor, cache: KVCache) -> None:
        """``context_kv`` of tap rows, into a paged cache of the drafter's layers. Serving only.

        Args:
            taps: [R, n * d].
            positions: [R] int32.
            kv_slots: [R] int64, as in :class:`paceline.ops.RowLayout`.
        """
        kv = self.project_context(self.context_features(taps))
        assert self._k_norms is not None, "freeze comes first"
        eps = self.config.layers.rms_norm_eps
        ops.kv_norm_rope_write(kv, self._k_norms, eps, self.rope(), positions, kv_slots, cache.k, cache.v)

    def block_tokens(self, anchors: Tensor) -> Tensor:
        """What blocks are fed: int [*blocks] -> [*blocks, W], the anchor and mask tokens."""
        slot = torch.arange(self.config.block_size, device=anchors.device)
        return torch.where(slot == 0, anchors[..., None], self.config.mask_token_id)

    def forward(self, anchors: Tensor, starts: Tensor, context: AttentionContext) -> Tensor:
        """The parallel pass over blocks [anchor, mask, mask, ...].

        Args:
            anchors: int [*blocks], the newest committed token of each.
            starts: int [*blocks], its position.
            context: gives each layer its context rows, at positions before ``starts`` only.

        Returns:
            [*blocks, W, d] after the final norm, for every slot.
        """
        positions = starts[..., None] + torch.arange(self.config.block_size, device=anchors.device)
        return self.forward_rows(self.block_tokens(anchors), positions, context)

    def forward_rows(self, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """:meth:`forward` of blocks whose rows are laid out: what they are fed, where, int [*blocks, W]."""
        cos_sin = self.rope()
        layers = self.draft_layers()
        norms = [*(layer.input_layernorm for layer in layers), self.norm]
        residual = self.target.embed_tokens(tokens)  # [*blocks, W, d]
        x: Tensor = norms[0](residual)
        for i, layer in enumerate(layers):
            bias = None if self.qkv_bias is None else self.qkv_bias[i]
            qkv = ops.linear(x, self.qkv_proj[i], bias, self._packed_qkv[i])
            x, residual = layer(qkv, residual, positions, cos_sin, context)
            x, residual = norms[i + 1].add(x, residual)
        return x

    def head(self, hidden: Tensor) -> Tensor:
        """[*, d] -> [*, draft vocabulary], by the target's head or the part of it the drafter has."""
        logits = self.target.logits(hidden) if self.lm_head is None else self.lm_head(hidden)
        return cast(Tensor, logits)

    def slots(self, hidden: Tensor, num_drafts: int | None = None) -> DraftSlots:
        """The draft slots of blocks [*, W, d], the first ``num_drafts`` of them, with their logits."""
        first = self.config.first_slot
        drafts = hidden[..., first : first + (num_drafts or self.config.max_drafts), :]
        return DraftSlots(drafts, self.head(drafts))

    def draft(
        self,
        slots: DraftSlots,
        anchors: Tensor,
        noise: ops.BlockNoise | None = None,
        *,
        count: int = 1,
    ) -> Tensor:
        """Only the tokens of :meth:`chain`, with as little memory touched as can be.

        Args:
            slots: g slots of N blocks.
            anchors: int [N].
            noise: of the blocks, for sampled requests.
            count: 2 for the second best beside each token, of the very scores, noise included, that the best
                was chosen from.

        Returns:
            int64 [N, g, count], target ids.
        """
        if self.markov_head is None:
            return self._to_target(ops.draft_best(slots.logits, None, noise, count=count))
        if self._chain_head is not None:
            return ops.draft_chain(self._candidates_of(slots, noise), anchors, self._chain_head)[..., :count]
        return self._whole_chain(slots, anchors, None, noise, count)

    def branch_off(
        self,
        slots: DraftSlots,
        anchors: Tensor,
        drafts: Tensor,
        positions: Sequence[int],
        blocks: Tensor,
        noise: ops.BlockNoise | None = None,
    ) -> Tensor:
        """Hedge chains: the drafts before a position, the second best there, and from there on drafted on the
        same logits with the new predecessor. The parallel pass is not repeated.

        Args:
            slots: g slots of N blocks.
            anchors: int [N].
            drafts: [N, g, 2], what :meth:`draft` returned.
            positions: C of them, ascending.
            blocks: int64 [M], those that get chains.
            noise: of the N blocks.

        Returns:
            int64 [M, C, g], target ids.
        """
        best, second = drafts[blocks].unbind(-1)  # [M, g]
        given = torch.full_like(best, -1)[:, None].repeat(1, len(positions), 1)  # [M, C, g]
        for i, position in enumerate(positions):
            given[:, i, :position] = best[:, :position]
            given[:, i, position] = second[:, position]
        if self.markov_head is None:  # a slot's logits do not depend on the token before it
            return torch.where(given < 0, best[:, None], given)
        if self._chain_head is not None:
            candidates = self._candidates_of(slots, noise)
            return ops.draft_chain(candidates, anchors, self._chain_head, blocks, given)[..., 0]
        rows = blocks.repeat_interleave(len(positions))  # [M * C]
        picked = DraftSlots(slots.hidden[rows], slots.logits[rows])
        noise = None if noise is None else noise.pick(rows)
        chains = self._whole_chain(picked, anchors[rows], given.flatten(0, 1), noise, 1)
        return chains.view_as(given)

    def _candidates_of(self, slots: DraftSlots, noise: ops.BlockNoise | None) -> ops.Candidates:
        ids = ops.draft_candidates(slots.logits, noise, self._candidates)
        return ops.Candidates(slots.logits, ids, noise)

    def _whole_chain(
        self,
        slots: DraftSlots,
        anchors: Tensor,
        given: Tensor | None,
        noise: ops.BlockNoise | None,
        count: int,
    ) -> Tensor:
        """Chains [N, g, count] that choose among all tokens where ``given`` [N, g] does not say."""
        head, previous, found = self.markov_head, anchors.long(), []
        assert head is not None
        state = head.initial_state(slots.hidden[:, 0])
        for slot in range(slots.hidden.shape[1]):
            low_rank, state = head.low_rank(previous, slots.hidden[:, slot], state)
            logits = slots.logits[:, slot : slot + 1]
            best = self._to_target(ops.draft_best(logits, low_rank, noise, first=slot, count=count))[:, 0]
            previous = best[:, 0]
            if given is not None:
                previous = torch.where(given[:, slot] < 0, previous, given[:, slot])
                best = torch.cat((previous[:, None], best[:, 1:]), dim=1)
            found.append(best)
        return torch.stack(found, dim=1)

    def chain(
        self,
        slots: DraftSlots,
        anchors: Tensor,
        given: Tensor | None = None,
        *,
        noise: Callable[[int, Tensor], Tensor] | None = None,
    ) -> Chain:
        """Draft greedily, slot by slot, each corrected for the token before it.

        A hedge at position p is the chain whose ``given`` holds the first chain's tokens before p, its
        runner-up at p and -1 after that: the parallel pass is not repeated.

        Args:
            slots: g slots per block.
            anchors: int [*], the token before the first slot.
            given: int [*, g], target ids that are taken as drafted; -1 where the drafter chooses.
            noise: maps (slot, corrected logits) to what the choice is made from, for sampled requests.
        """
        steps = list(self._walk(slots, anchors, given, noise))
        seconds = [step.scores.scatter(-1, step.best[..., None], float("-inf")).argmax(-1) for step in steps]
        before = torch.stack([anchors.long(), *(step.token for step in steps[:-1])], dim=-1)
        return Chain(
            torch.stack([step.token for step in steps], dim=-1),
            self._to_target(torch.stack(seconds, dim=-1)),
            torch.stack([step.logits for step in steps], dim=-2),
            self.confidence_logits(slots.hidden, before),
        )

    def _walk(
        self,
        slots: DraftSlots,
        anchors: Tensor,
        given: Tensor | None,
        noise: Callable[[int, Tensor], Tensor] | None,
    ) -> Iterator[_Step]:
        """The sequential part: one slot after the other, each seeing the token chosen before it."""
        previous = anchors.long()
        head = self.markov_head
        state = None if head is None else head.initial_state(slots.hidden[..., 0, :])
        for slot in range(slots.hidden.shape[-2]):
            logits = slots.logits[..., slot, :].float()
            if head is not None and state is not None:
                z, state = head.step(head.markov_w1(previous), slots.hidden[..., slot, :], state)
                logits = logits + head.markov_w2(z).float()
            scores = logits if noise is None else noise(slot, logits)
            if self._chain_head is not None:
                alone = slots.logits[..., slot, :].float()
                own = ops.best_of_buckets(alone if noise is None else noise(slot, alone), self._candidates)
                known = torch.cat((own, self._chain_head.successors[previous]), dim=-1).long()
                among = torch.full_like(scores, -torch.inf)
                scores = among.scatter_(-1, known, scores.gather(-1, known))
            best = scores.argmax(-1)
            previous = self._to_target(best)
            if given is not None:
                previous = torch.where(given[..., slot] < 0, previous, given[..., slot].long())
            yield _Step(logits, scores, best, previous)

    def teacher_forced(self, slots: DraftSlots, previous: Tensor) -> Tensor:
        """Corrected logits [*, g, draft vocabulary] when the token before each slot is known: int [*, g]."""
        if self.markov_head is None:
            return slots.logits.float()
        return slots.logits.float() + cast(Tensor, self.markov_head(previous, slots.hidden)).float()

    def confidence_logits(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """Raw confidence per slot, [*, g] fp32, for hidden [*, g, d] and the token before each slot, int
        [*, g].
        """
        if self.confidence_head is None:
            return None
        if self.config.confidence_with_markov and self.markov_head is not None:
            hidden = torch.cat((hidden, self.markov_head.markov_w1(previous)), dim=-1)
        return cast(Tensor, self.confidence_head(hidden)).squeeze(-1).float()

    def survival(self, confidence: Tensor) -> Tensor:
        """Chance that each draft and all before it are accepted, [*, g], from confidence logits [*, g].

        Logits are divided by the position's STS temperature first (sequential temperature scaling, DSpark).
        """
        temperatures = self.sts_temperatures[: confidence.shape[-1]]
        return torch.sigmoid(confidence / temperatures).cumprod(-1)

    def _to_target(self, ids: Tensor) -> Tensor:
        return ids if self.target_ids is None else self.target_ids[ids]

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Training start: matrices ~ N(0, initializer_range), norms 1, biases 0.

        W2 starts at 0, so that the sequential head begins as "no correction".
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, self.config.layers.initializer_range, generator=generator)
        if self.markov_head is not None:
            self.markov_head.markov_w2.weight.zero_()
