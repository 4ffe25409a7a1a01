"""Qwen3, the dense model (Qwen3 Technical Report, arXiv:2505.09388).

Pre-norm decoder: grouped-query attention with RMSNorm on each head's q and k before the rotation, SwiGLU, no
biases but the optional attention bias. Projections that read the same input are fused: qkv_proj,
gate_up_proj.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from paceline import ops
from paceline.models.attention import AttentionContext, AttentionSpec
from paceline.models.config import Qwen3Config
from paceline.models.rope import RopeTable


class ForwardOutput(NamedTuple):
    """What a forward pass returns.

    Attributes:
        hidden: [*rows, d] after the final norm; feed it to ``logits``.
        taps: [*rows, n * d], the residual stream after each tapped layer, side by side in the order asked
            for; None when no tap was asked for.
    """

    hidden: Tensor
    taps: Tensor | None


class Linear(nn.Linear):
    """nn.Linear whose weights start unset: a loader, or ``init_weights``, fills them. ``freeze`` packs
    them.
    """

    packed: Tensor | None = None
    deterministic = False

    def freeze(self) -> None:
        """Prepare for inference: the weights will not change any more."""
        self.packed = ops.pack_linear(self.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        """[*, in] -> [*, out]."""
        return ops.linear(x, self.weight, self.bias, self.packed, deterministic=self.deterministic)

    def parts(self, x: Tensor) -> Tensor:
        """The same for ``RMSNorm.add``, which may be left to do the last sum; see ``ops.linear_parts``."""
        if self.deterministic:
            return self(x)  # type: ignore[no-any-return]
        return ops.linear_parts(x, self.weight, self.bias, self.packed)

    def silu_mul(self, x: Tensor) -> Tensor:
        """[*, in] -> [*, out / 2]: ``ops.silu_mul`` of the product."""
        if self.deterministic:
            return ops.silu_mul(self(x))
        return ops.linear_silu_mul(x, self.weight, self.packed)

    def reset_parameters(self) -> None:
        """Leave the memory untouched: filling 4B values that will be overwritten takes half a minute."""


def freeze(module: nn.Module) -> None:
    """Make a loaded module ready to serve: no gradients, evaluation mode, weights packed where that pays."""
    module.requires_grad_(False).eval()
    for part in module.modules():
        if isinstance(part, Linear):
            part.freeze()


def make_deterministic(model: Qwen3ForCausalLM) -> None:
    """From now on a row's result depends on that row and its sequence's keys alone, bit for bit: not on the
    other rows, nor on how the sequence was cut into steps. Slower.
    """
    for part in model.modules():
        if isinstance(part, Linear):
            part.deterministic = True
        elif isinstance(part, Attention):
            part.spec = replace(part.spec, deterministic=True)


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467), weight [dim]."""

    def __init__(
        self, dim: int, eps: float, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Norm over the last axis; [..., dim] -> [..., dim]."""
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual) in one pass; x may come from ``Linear.parts``."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention; norms of q and k, rotation, cache and scores are the context's."""

    def __init__(
        self, config: Qwen3Config, layer: int, *, device: torch.device | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.layer = layer
        self.spec = AttentionSpec(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.rms_norm_eps,
            config.windows[layer],
        )
        d, bias = config.hidden_size, config.attention_bias
        self.qkv_proj = Linear(d, config.q_size + 2 * config.kv_size, bias=bias, device=device, dtype=dtype)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, device=device, dtype=dtype)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, device=device, dtype=dtype)
        self.o_proj = Linear(config.q_size, d, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, positions: Tensor, cos_sin: Tensor, context: AttentionContext) -> Tensor:
        """[*rows, d] -> [*rows, d], for ``RMSNorm.add``."""
        qkv = self.qkv_proj(x)  # [*rows, (H + 2 KV) * D]
        out = context.attend(
            self.layer, qkv, self.q_norm.weight, self.k_norm.weight, positions, cos_sin, self.spec
        )
        return self.o_proj.parts(out)


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(
        self, config: Qwen3Config, *, device: torch.device | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        d, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = Linear(d, 2 * inner, bias=False, device=device, dtype=dtype)
        self.down_proj = Linear(inner, d, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[*rows, d] -> [*rows, d], for ``RMSNorm.add``."""
        return self.down_proj.parts(self.gate_up_proj.silu_mul(x))


class DecoderLayer(nn.Module):
    """One pre-norm layer.

    Its input norm is applied by whoever adds the previous sublayer to the residual stream.
    """

    def __init__(
        self, config: Qwen3Config, layer: int, *, device: torch.device | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(d, eps, device=device, dtype=dtype)
        self.self_attn = Attention(config, layer, device=device, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(d, eps, device=device, dtype=dtype)
        self.mlp = MLP(config, device=device, dtype=dtype)

    def forward(
        self, x: Tensor, residual: Tensor, positions: Tensor, cos_sin: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """(normed input, residual) -> (output of the MLP, residual before it is added); all [*rows, d]."""
        x = self.self_attn(x, positions, cos_sin, context)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


class Qwen3ForCausalLM(nn.Module):
    """A Qwen3 language model.

    Parameters are allocated, not initialised: load a checkpoint (:mod:`paceline.models.checkpoint`) or call
    :meth:`init_weights`.

    Args:
        config: geometry.
        device: where parameters live; None = torch's default.
        dtype: weight dtype; None = torch's default. The rope table is always fp32.
    """

    def __init__(
        self,
        config: Qwen3Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        device = torch.device(device) if device is not None else None
        self.config = config
        d, vocab = config.hidden_size, config.vocab_size
        self.embed_tokens = nn.Embedding(vocab, d, _weight=torch.empty(vocab, d, device=device, dtype=dtype))
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, device=device, dtype=dtype) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(d, config.rms_norm_eps, device=device, dtype=dtype)
        self.lm_head = Linear(
            d, vocab, bias=False, device="meta" if config.tie_word_embeddings else device, dtype=dtype
        )
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rope = RopeTable(config.rope, config.head_dim, config.max_context_len, device)

    def forward(
        self, tokens: Tensor, positions: Tensor, context: AttentionContext, taps: Sequence[int] = ()
    ) -> ForwardOutput:
        """Run the layers.

        Args:
            tokens, positions: int [*rows]; [R] when serving, [B, S] when training.
            context: where K and V are.
            taps: layers whose output is wanted: the residual stream after layer l, before any norm (0-based;
                -1 is the embedding output).
        """
        cos_sin = self.rope()
        residual = self.embed_tokens(tokens)  # [*rows, d]
        tapped = {-1: residual} if -1 in taps else {}  # only what is asked for is kept alive
        norms = [*(layer.input_layernorm for layer in self.decoder_layers()), self.norm]
        x = norms[0](residual)
        for i, (layer, norm) in enumerate(zip(self.decoder_layers(), norms[1:], strict=True)):
            x, residual = layer(x, residual, positions, cos_sin, context)
            x, residual = norm.add(x, residual)
            if i in taps:
                tapped[i] = residual
        return ForwardOutput(x, torch.cat([tapped[tap] for tap in taps], dim=-1) if taps else None)

    def decoder_layers(self) -> Sequence[DecoderLayer]:
        """The layers, typed."""
        return cast(Sequence[DecoderLayer], self.layers)

    def logits(self, hidden: Tensor) -> Tensor:
        """[*, d] -> [*, V] in the weights' dtype; callers that sample or take a loss convert to fp32."""
        return self.lm_head(hidden)  # type: ignore[no-any-return]

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Training start: matrices and embedding ~ N(0, initializer_range), norms 1, biases 0."""
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.weight.fill_(1.0)
            elif isinstance(module, nn.Linear | nn.Embedding):
                module.weight.normal_(0.0, self.config.initializer_range, generator=generator)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    module.bias.zero_()
