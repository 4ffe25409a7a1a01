"""Muon for the matrices, AdamW for the embedding and the norms, on fp32 master weights.

Muon: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; weight decay as in
Liu et al. 2025 (arXiv:2502.16982). AdamW: Loshchilov and Hutter 2019 (arXiv:1711.05101).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.models.qwen3 import Qwen3ForCausalLM

# Quintic whose iteration drives all singular values towards 1 (Jordan et al. 2024).
_NS = (3.4445, -4.7750, 2.0315)
_NS_STEPS = 5


def orthogonalize(matrices: Tensor) -> Tensor:
    """Replace each matrix of a stack [n, rows, cols] by (nearly) the closest semi-orthogonal one, in bf16."""
    a, b, c = _NS
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-7)
    for _ in range(_NS_STEPS):
        gram = x @ x.mT  # [n, r, r]
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def matrices_of(model: Qwen3ForCausalLM) -> list[tuple[str, Tensor]]:
    """The hidden matrices as (parameter name, row block); q, k, v, gate, up are maps of their own."""
    config = model.config
    blocks: list[tuple[str, Tensor]] = []
    rows = {
        "qkv_proj": [config.q_size, config.kv_size, config.kv_size],
        "gate_up_proj": [config.intermediate_size] * 2,
    }
    for name, parameter in model.named_parameters():
        if parameter.dim() != 2 or name.startswith("embed_tokens"):
            continue
        sizes = rows.get(name.split(".")[-2], [parameter.shape[0]])
        blocks += [(name, block) for block in torch.split(parameter.data, sizes)]
    return blocks


class Optimizer:
    """Updates a bf16 model from its gradients; the fp32 master weights live here.

    Args:
        model: its parameters are overwritten with the rounded master weights after each step.
        masters: fp32 initial values by parameter name.
        use_muon: False puts every tensor under AdamW.
        matrix_lr: peak step of Muon (spectral norm of the update of a square matrix).
        adam_lr: peak step of AdamW.
        weight_decay: decoupled, relative to the step; norms are not decayed.
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        masters: dict[str, Tensor],
        *,
        use_muon: bool,
        matrix_lr: float,
        adam_lr: float,
        weight_decay: float,
        momentum: float = 0.95,
    ) -> None:
        self._parameters = dict(model.named_parameters())
        self._matrix_lr, self._adam_lr = matrix_lr, adam_lr
        self._weight_decay, self._momentum = weight_decay, momentum
        self.masters = masters
        # Same-shaped matrices are orthogonalised as one stack.
        self._groups: list[list[tuple[str, int, int]]] = []
        self.momenta: list[Tensor] = []
        if use_muon:
            by_shape: dict[tuple[int, ...], list[tuple[str, int, int]]] = {}
            offsets: dict[str, int] = {}
            for name, block in matrices_of(model):
                start = offsets.get(name, 0)
                offsets[name] = start + block.shape[0]
                by_shape.setdefault(tuple(block.shape), []).append((name, start, start + block.shape[0]))
            for shape, members in by_shape.items():
                self._groups.append(members)
                device = model.embed_tokens.weight.device
                self.momenta.append(torch.zeros(len(members), *shape, device=device))
        under_muon = {name for group in self._groups for name, _, _ in group}
        self._adam_names = [name for name in self._parameters if name not in under_muon]
        for name in self._adam_names:
            masters[name].requires_grad_(True)
        decayed = [masters[n] for n in self._adam_names if masters[n].dim() == 2]
        plain = [masters[n] for n in self._adam_names if masters[n].dim() == 1]
        self._adam = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=adam_lr,
            betas=(0.9, 0.95),
            eps=1e-10,
            fused=model.embed_tokens.weight.is_cuda,
        )

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update at ``scale`` (0..1) of the peak steps; gradients are those on the model's parameters."""
        for members, momentum in zip(self._groups, self.momenta, strict=True):
            gradient = torch.stack([self._grad(name)[a:b] for name, a, b in members]).float()
            momentum.lerp_(gradient, 1 - self._momentum)
            update = orthogonalize(gradient.lerp_(momentum, self._momentum)).float()
            rows, cols = update.shape[-2:]
            lr = self._matrix_lr * scale
            update *= -lr * max(1.0, rows / cols) ** 0.5
            targets = [self.masters[name][a:b] for name, a, b in members]
            torch._foreach_mul_(targets, 1 - lr * self._weight_decay)
            torch._foreach_add_(targets, list(update.unbind(0)))
        for group in self._adam.param_groups:
            group["lr"] = self._adam_lr * scale
        for name in self._adam_names:
            self.masters[name].grad = self._grad(name).float()
        self._adam.step()
        names = list(self._parameters)
        torch._foreach_copy_([self._parameters[n].data for n in names], [self.masters[n].data for n in names])

    def _grad(self, name: str) -> Tensor:
        gradient = self._parameters[name].grad
        assert gradient is not None
        return gradient

    def state(self) -> dict[str, Any]:
        """Everything a resumed run needs."""
        return {
            "masters": {name: tensor.detach() for name, tensor in self.masters.items()},
            "momenta": self.momenta,
            "adam": self._adam.state_dict(),
        }

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; the model's weights are set too."""
        for name, tensor in state["masters"].items():
            self.masters[name].copy_(tensor)
            self._parameters[name].copy_(tensor)
        for momentum, tensor in zip(self.momenta, state["momenta"], strict=True):
            momentum.copy_(tensor)
        self._adam.load_state_dict(state["adam"])
