"""Thousands of random rounds: CUDA graphs against the same rounds launched kernel by kernel, bit for bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from paceline.bench.geometry import geometry_folder
from paceline.json_files import read_json
from paceline.models.config import Qwen3Config
from paceline.models.drafter import Drafter
from paceline.models.drafter_dialects import read_drafter_config
from paceline.models.drafter_loader import load_drafter
from paceline.models.loader import load_model
from paceline.models.qwen3 import Qwen3ForCausalLM
from paceline.runtime.shapes import MEMORY_BOUND_ROWS
from support.engines import GOLDEN
from support.random_rounds import RandomRounds, Shape, make_runner, run_both

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def check(model: Qwen3ForCausalLM, drafter: Drafter, shape: Shape, count: int, seed: int) -> None:
    captured = make_runner(model, drafter, shape, "captured")
    eager = make_runner(model, drafter, shape, "eager")
    num_drafts, depths = drafter.config.max_drafts, (None, None, 3, 5)
    rounds = RandomRounds(shape, num_drafts, model.config.vocab_size, seed, depths)
    mixed, packed = run_both(captured, eager, rounds, count, exact=True)
    assert mixed > count // 10, "truncated spans beside full ones"
    assert packed > count // 10 or shape.slots * (num_drafts + 1) <= MEMORY_BOUND_ROWS


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("drafter_name", "slots", "hedge", "count"),
    [
        ("dspark_tiny_b7", 8, False, 2000),
        ("dspark_tiny_b7", 24, False, 300),
        ("dspark_tiny_b7", 24, True, 300),
        ("dflash_tiny_b16", 8, False, 300),
    ],
)
def test_graphs_do_what_their_kernels_do(drafter_name: str, slots: int, hedge: bool, count: int) -> None:
    """With short sequences after long ones in the same graphs, and contexts across every tile and split."""
    model = load_model(GOLDEN / "qwen3_tiny", device=DEVICE, dtype="bfloat16")
    drafter = load_drafter(GOLDEN / drafter_name, model)
    check(model, drafter, Shape(slots=slots, length=512, hedge=hedge), count, seed=1)


def fill(module: nn.Module) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.02, generator=generator)
            if parameter.dim() == 1:
                parameter.mul_(5).add_(1)
    module.requires_grad_(False).eval()


@pytest.mark.timeout(240)
def test_so_do_those_of_a_4b_shape() -> None:
    """Three layers of it and contexts up to 9,000 tokens: the persistent kernel, and keys in many splits."""
    vocab = 32_000
    full = Qwen3Config.from_pretrained(geometry_folder("qwen3-4b"))
    config = dataclasses.replace(full, num_hidden_layers=3, windows=full.windows[:3], vocab_size=vocab)
    model = Qwen3ForCausalLM(config, device=DEVICE, dtype=torch.bfloat16)
    fill(model)
    values = read_json(geometry_folder("qwen3-4b-dspark-b7") / "config.json") | {
        "num_hidden_layers": 1,
        "num_target_layers": 3,
        "target_layer_ids": [0, 1],
        "vocab_size": vocab,
        "mask_token_id": 5,
    }
    values["layer_types"] = values["layer_types"][:1]
    drafter = Drafter(read_drafter_config(values, config), model, device=DEVICE, dtype=torch.bfloat16)
    fill(drafter)
    drafter.freeze()
    check(model, drafter, Shape(slots=8, length=9_000), 300, seed=2)
