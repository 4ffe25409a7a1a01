"""Forward passes of a few rows through one persistent kernel (``ops/persistent``).

The same mathematics as :mod:`paceline.models`, which stays the reference: weights, caches and layouts are
theirs. What changes is that a whole pass is one launch, during which memory is never idle.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline import ops
from paceline.models.attention import AttentionSpec, KVCache
from paceline.models.config import Qwen3Config
from paceline.models.drafter import Drafter
from paceline.models.qwen3 import MLP, Linear, Qwen3ForCausalLM, RMSNorm
from paceline.ops import RowLayout
from paceline.ops.dispatch import is_hopper
from paceline.ops.persistent.compiler import can_compile
from paceline.ops.persistent.launch import (
    HEAD_DIM,
    KEYS,
    MAX_HIDDEN,
    MAX_QUERIES,
    MAX_ROWS,
    Machine,
    compile_early,
    matrices_fit,
)
from paceline.ops.persistent.phases import Attend, Product, WriteContext
from paceline.ops.persistent.program import Program


class Workspace:
    """Activations of a pass of at most ``MAX_ROWS`` rows, shared by all passes of an engine."""

    def __init__(self, model: Qwen3ForCausalLM, drafter: Drafter | None) -> None:
        weight = model.embed_tokens.weight
        self.machine = Machine(weight.device, model.config.hidden_size) if weight.is_cuda else None
        configs = [model.config, *([drafter.config.layers] if drafter is not None else [])]

        def rows(width: int, dtype: torch.dtype = weight.dtype) -> Tensor:
            return torch.zeros(MAX_ROWS, width, dtype=dtype, device=weight.device)

        self.residual = rows(model.config.hidden_size)
        # One for even layers and one for odd: what is left of a layer is forgotten in the middle of the next.
        self.middle = [rows(model.config.hidden_size) for _ in range(2)]
        self.qkv = rows(max(c.q_size + 2 * c.kv_size for c in configs))
        self.attended = rows(max(c.q_size for c in configs))
        self.inner = [rows(max(c.intermediate_size for c in configs)) for _ in range(2)]
        self.logits = rows(model.config.vocab_size, torch.float32)
        if drafter is not None:
            self.taps = rows(len(drafter.config.tap_layer_ids) * model.config.hidden_size)
            self.features = rows(model.config.hidden_size)
            self.context = rows(drafter.config.layers.num_hidden_layers * 2 * drafter.config.layers.kv_size)


def view(buffer: Tensor, num_rows: int, width: int) -> Tensor:
    """The first ``num_rows * width`` elements of a buffer as [num_rows, width]."""
    return buffer.view(-1)[: num_rows * width].view(num_rows, width)


def add_layer(
    program: Program,
    space: Workspace,
    index: int,
    *,
    spec: AttentionSpec,
    qkv_weight: Tensor,
    input_norm: RMSNorm,
    q_norm: RMSNorm,
    k_norm: RMSNorm,
    o_proj: Linear,
    post_norm: RMSNorm,
    mlp: MLP,
    caches: tuple[Tensor, Tensor],
    tap: Tensor | None,
) -> None:
    """Append a decoder layer's phases; the residual stream is ``space.residual``, and ``space.middle`` before
    the MLP.
    """
    n, this, other = program.num_rows, index % 2, 1 - index % 2
    residual, middle = space.residual[:n], space.middle[this][:n]
    qkv = view(space.qkv, n, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
    attended = view(space.attended, n, spec.num_heads * spec.head_dim)
    inner, other_inner = (view(space.inner[i], n, mlp.down_proj.in_features) for i in (this, other))
    k_cache, v_cache = caches
    program.add(Product(qkv_weight, residual, qkv, norm=input_norm.weight))
    norms = q_norm.weight, k_norm.weight
    program.add(Attend(spec.num_heads, spec.bidirectional, qkv, attended, *norms, k_cache, v_cache))
    program.add(Product(o_proj.weight, attended, middle, epilogue="add", before=residual))
    # Here every block has done o, so all have read what came before it; what it gives, every block awaits.
    forgets = residual, qkv, attended, space.middle[other][:n], other_inner
    gate_up = mlp.gate_up_proj.weight
    program.add(Product(gate_up, middle, inner, norm=post_norm.weight, epilogue="swiglu", forgets=forgets))
    program.add(Product(mlp.down_proj.weight, inner, residual, epilogue="add", before=middle, tap=tap))


class TargetPass:
    """The target's forward over ``num_seqs`` spans of ``span`` rows, logits and all.

    Args:
        model, cache: the target and its K/V.
        space: activations.
        num_seqs, span: rows.
        drafter: whose taps are kept; None for none.
        draft_cache: where their draft K/V is written; None leaves that to the caller.

    Attributes:
        taps: [R, n * d] of the last pass, with a drafter.
        writes_context: whether the pass writes their draft K/V.
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        cache: KVCache,
        space: Workspace,
        num_seqs: int,
        span: int,
        drafter: Drafter | None = None,
        draft_cache: KVCache | None = None,
    ) -> None:
        config = model.config
        self._model, self._space = model, space
        self._num_rows = n = num_seqs * span
        self._program = program = Program(
            space.machine,
            num_seqs,
            span,
            eps=config.rms_norm_eps,
            cos_sin=model.rope(),
        )
        taps = [] if drafter is None else list(drafter.config.tap_layer_ids)
        d = config.hidden_size
        self.taps = None if drafter is None else view(space.taps, n, len(taps) * d)
        for i, layer in enumerate(model.decoder_layers()):
            attention = layer.self_attn
            tap = None
            if i in taps and self.taps is not None:
                tap = self.taps[:, taps.index(i) * d : (taps.index(i) + 1) * d]
            add_layer(
                program,
                space,
                i,
                spec=attention.spec,
                qkv_weight=attention.qkv_proj.weight,
                input_norm=layer.input_layernorm,
                q_norm=attention.q_norm,
                k_norm=attention.k_norm,
                o_proj=attention.o_proj,
                post_norm=layer.post_attention_layernorm,
                mlp=layer.mlp,
                caches=(cache.k[i], cache.v[i]),
                tap=tap,
            )
        self.writes_context = draft_cache is not None
        self.logits = view(space.logits, n, config.vocab_size)
        head = Product(model.lm_head.weight, space.residual[:n], self.logits, norm=model.norm.weight)
        program.add(head)
        if drafter is not None and draft_cache is not None and self.taps is not None:
            self._add_context(program, drafter, draft_cache, self.taps)
        program.seal()

    def _add_context(self, program: Program, drafter: Drafter, cache: KVCache, taps: Tensor) -> None:
        space, n, shape = self._space, self._num_rows, drafter.config.layers
        features = space.features[:n]
        program.add(Product(drafter.fc.weight, taps, features))
        width = 2 * shape.kv_size
        context = view(space.context, n, shape.num_hidden_layers * width)
        layers = drafter.draft_layers()
        parts = [context[:, i * width : (i + 1) * width] for i in range(len(layers))]
        for i, part in enumerate(parts):
            weight, norm = drafter.qkv_proj[i, shape.q_size :], drafter.hidden_norm.weight
            program.add(Product(weight, features, part, norm=norm))
        for i, (layer, part) in enumerate(zip(layers, parts, strict=True)):
            write = WriteContext(part, layer.k_norm.weight, cache.k[i], cache.v[i], drafter.rope())
            program.add(write)

    def __call__(self, tokens: Tensor, layout: RowLayout) -> Tensor:
        """Logits [R, V] fp32, rounded to the weights' dtype as the layered pass rounds them; overwritten by
        the next pass.

        Args:
            tokens: [R] integer.
            layout: their rows, ``span`` of each sequence.
        """
        torch.index_select(
            self._model.embed_tokens.weight, 0, tokens, out=self._space.residual[: self._num_rows]
        )
        self._program(layout)
        return self.logits


class DraftPass:
    """The drafter's parallel pass over ``num_seqs`` blocks.

    Args:
        drafter, cache: the drafter and its K/V.
        space: activations.
        num_seqs: blocks.
    """

    def __init__(self, drafter: Drafter, cache: KVCache, space: Workspace, num_seqs: int) -> None:
        config, shape = drafter.config, drafter.config.layers
        self._drafter, self._space = drafter, space
        self._num_rows = n = num_seqs * config.block_size
        self._program = program = Program(
            space.machine,
            num_seqs,
            config.block_size,
            eps=shape.rms_norm_eps,
            cos_sin=drafter.rope(),
        )
        for i, layer in enumerate(drafter.draft_layers()):
            add_layer(
                program,
                space,
                i,
                spec=layer.spec,
                qkv_weight=drafter.qkv_proj[i],
                input_norm=layer.input_layernorm,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                o_proj=layer.o_proj,
                post_norm=layer.post_attention_layernorm,
                mlp=layer.mlp,
                caches=(cache.k[i], cache.v[i]),
                tap=None,
            )
        head = drafter.target.lm_head if drafter.lm_head is None else drafter.lm_head
        self._logits = view(space.logits, n, config.draft_vocab_size)
        program.add(Product(head.weight, space.residual[:n], self._logits, norm=drafter.norm.weight))
        program.seal()

    def __call__(self, tokens: Tensor, layout: RowLayout) -> tuple[Tensor, Tensor]:
        """Hidden states [R, d] after the final norm and logits [R, draft vocabulary] fp32.

        Args:
            tokens: [R], the blocks' anchors and mask tokens.
            layout: their rows.
        """
        residual = self._space.residual[: self._num_rows]
        torch.index_select(self._drafter.target.embed_tokens.weight, 0, tokens, out=residual)
        self._program(layout)
        return ops.rms_norm(residual, self._drafter.norm.weight, self._drafter.norm.eps), self._logits


class FewRows:
    """The passes of one engine, made as rounds ask for them.

    Args:
        model, cache: the target and its K/V.
        drafter, draft_cache: the drafter and its K/V; None for none.
        paged: whether the draft K/V lies in the target's blocks; the target's pass then writes it.
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        cache: KVCache,
        drafter: Drafter | None = None,
        draft_cache: KVCache | None = None,
        *,
        paged: bool = True,
    ) -> None:
        self._model, self._cache = model, cache
        self._drafter, self._draft_cache, self._paged = drafter, draft_cache, paged
        self._space = Workspace(model, drafter)
        self._drafts: dict[int, DraftPass] = {}

    @staticmethod
    def runs_on(model: Qwen3ForCausalLM, block_size: int) -> bool:
        """Whether the kernel can be used at all: compute capability 9.0 or more, bf16, head dimension 128, no
        biases, no windows, and no promise of the same bits from passes of any size.
        """
        weight = model.embed_tokens.weight
        varies = not any(layer.self_attn.spec.deterministic for layer in model.decoder_layers())
        return varies and _can_run(model.config, weight.device, weight.dtype, block_size)

    @staticmethod
    def compile_early(config: Qwen3Config, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
        """Begin to compile the kernel, if a model like this can be run by it; the first pass waits for it."""
        if not _can_run(config, device, dtype, block_size):
            return
        grid = torch.cuda.get_device_properties(device).multi_processor_count
        if matrices_fit(config.hidden_size, [config.intermediate_size, config.q_size], grid):
            compile_early(config.hidden_size)

    def target(self, num_seqs: int, span: int, *, writes_context: bool = True) -> TargetPass | None:
        """The target's pass over spans; None when they do not fit the kernel. It writes the drafter's context
        where that can be, unless told not to.
        """
        config, drafter = self._model.config, self._drafter
        taps_embedding = drafter is not None and min(drafter.config.tap_layer_ids) < 0
        if taps_embedding or not self._fits(num_seqs, span, config):
            return None
        return TargetPass(
            self._model,
            self._cache,
            self._space,
            num_seqs,
            span,
            drafter,
            self._draft_cache if writes_context and self._paged and self._drafter_fits() else None,
        )

    def draft(self, num_seqs: int) -> DraftPass | None:
        """The drafter's pass over blocks; None when they do not fit the kernel."""
        drafter, cache = self._drafter, self._draft_cache
        if drafter is None or cache is None or not self._drafter_fits():
            return None
        if not self._fits(num_seqs, drafter.config.block_size, drafter.config.layers):
            return None
        if num_seqs not in self._drafts:
            self._drafts[num_seqs] = DraftPass(drafter, cache, self._space, num_seqs)
        return self._drafts[num_seqs]

    def _drafter_fits(self) -> bool:
        drafter = self._drafter
        return (
            drafter is not None
            and (self._space.machine is None or drafter.config.layers.head_dim == HEAD_DIM)
            and drafter.qkv_bias is None
            and drafter.config.layers.rms_norm_eps == self._model.config.rms_norm_eps
            and all(layer.spec.window is None for layer in drafter.draft_layers())
        )

    def _fits(self, num_seqs: int, span: int, config: Qwen3Config) -> bool:
        machine, kv_heads = self._space.machine, config.num_key_value_heads
        if machine is None:
            return num_seqs * span <= MAX_ROWS
        grid = machine.grid
        return (
            num_seqs * span <= MAX_ROWS
            and config.num_attention_heads // kv_heads * span <= MAX_QUERIES
            and num_seqs * kv_heads <= grid
            and matrices_fit(config.hidden_size, [config.intermediate_size, config.q_size], grid)
        )


def _can_run(config: Qwen3Config, device: torch.device, dtype: torch.dtype, block_size: int) -> bool:
    """Whether the kernel is for such a model and device, as far as that can be said without weights."""
    return (
        is_hopper(device)
        and dtype == torch.bfloat16
        and can_compile()
        and config.hidden_size <= MAX_HIDDEN
        and block_size % KEYS == 0
        and config.head_dim == HEAD_DIM
        and not config.attention_bias
        and all(window is None for window in config.windows)
    )
