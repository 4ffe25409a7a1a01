"""The same model file under autograd: gradients, one compiled graph, initialisation."""

from __future__ import annotations

import torch
from model_cases import tiny_config
from torch import Tensor

from paceline.models.attention import DenseCausalContext
from paceline.models.config import Qwen3Config
from paceline.models.qwen3 import ForwardOutput, Qwen3ForCausalLM


def new_model(**changes: object) -> Qwen3ForCausalLM:
    """Initialised for training."""
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(tiny_config(**changes)))
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def loss_of(model: Qwen3ForCausalLM, tokens: Tensor) -> Tensor:
    """Mean next-token cross entropy, tokens [B, S]."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    logits = model.logits(model(tokens, positions, DenseCausalContext()).hidden).float()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def test_gradients_match_finite_differences() -> None:
    """In float64, along a random direction through every parameter at once."""
    model = new_model(
        tie_word_embeddings=True, use_sliding_window=True, sliding_window=4, max_window_layers=1
    )
    model.double()
    tokens = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(1))
    parameters = list(model.parameters())
    for parameter in parameters:
        if parameter.dim() == 2:
            parameter.data *= 10  # at 0.02 attention is all but uniform and its gradients vanish
    loss_of(model, tokens).backward()
    generator = torch.Generator().manual_seed(2)
    direction = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
    slope = sum(
        float((p.grad * d).sum()) for p, d in zip(parameters, direction, strict=True) if p.grad is not None
    )
    losses = []
    with torch.no_grad():
        for sign in (1e-3, -2e-3):  # to +h, then to -h
            for parameter, d in zip(parameters, direction, strict=True):
                parameter.add_(d, alpha=sign)
            losses.append(float(loss_of(model, tokens)))
    assert all(parameter.grad is not None for parameter in parameters)
    # attention runs in float64 but norms and rotation in fp32: agreement to about 1e-3 of the slope
    assert abs((losses[0] - losses[1]) / 2e-3 - slope) < 5e-3 * abs(slope) + 1e-4


def test_a_few_steps_learn() -> None:
    model = new_model(tie_word_embeddings=True)
    tokens = torch.arange(24).repeat(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        loss = loss_of(model, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_padding_after_a_sequence_changes_nothing_before_it() -> None:
    model = new_model()
    tokens = torch.randint(0, 96, (1, 20), generator=torch.Generator().manual_seed(4))
    positions = torch.arange(20)[None]
    whole = model(tokens, positions, DenseCausalContext()).hidden
    head = model(tokens[:, :13], positions[:, :13], DenseCausalContext()).hidden
    torch.testing.assert_close(whole[:, :13], head)


def test_compiles_into_one_graph() -> None:
    model = new_model(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    tokens = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(16).expand_as(tokens)

    def step(tokens: Tensor, positions: Tensor) -> Tensor:
        out: ForwardOutput = model(tokens, positions, DenseCausalContext(), taps=(0, 2))
        assert out.taps is not None
        return model.logits(out.hidden).sum() + out.taps.sum()

    compiled = torch.compile(step, fullgraph=True, backend="eager")  # fullgraph: a graph break raises
    torch.testing.assert_close(compiled(tokens, positions), step(tokens, positions))


def test_initialisation() -> None:
    model = new_model(tie_word_embeddings=True, attention_bias=True, vocab_size=2048)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert abs(model.embed_tokens.weight.std().item() - 0.02) < 5e-4
    layer = model.decoder_layers()[0]
    assert layer.self_attn.q_norm.weight.eq(1).all()
    assert layer.self_attn.qkv_proj.bias.eq(0).all()
    assert abs(layer.mlp.down_proj.weight.std().item() - 0.02) < 2e-3
