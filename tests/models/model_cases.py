"""Shared by the model tests: golden sets, and layouts made by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.models.attention import KVCache, PagedContext
from paceline.models.config import Qwen3Config
from paceline.models.qwen3 import ForwardOutput, Qwen3ForCausalLM
from paceline.ops import RowLayout

GOLDEN = Path(__file__).parents[1] / "golden"
TARGETS = ("qwen3_tiny", "qwen3_tiny_untied", "qwen3_yarn")
TOLERANCE = 2e-4


class GoldenSet:
    """One folder of ``tests/golden``: its checkpoint path, meta data and expected tensors."""

    def __init__(self, name: str) -> None:
        self.folder = GOLDEN / name
        self.meta: dict[str, Any] = json.loads((self.folder / "cases.json").read_text())
        self.tensors: dict[str, Tensor] = load_file(self.folder / "cases.safetensors")
        self.cases: list[str] = [case["name"] for case in self.meta["cases"]]

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[key]


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A small, valid config.json of a Qwen3 target, with changes; a change to None removes the key."""
    values: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": [2, 5],
    }
    values.update(changes)
    return {key: value for key, value in values.items() if value is not None}


def new_cache(config: Qwen3Config, num_blocks: int, block_size: int = 16) -> KVCache:
    """A cache whose blocks hold noise, so that reading a row nobody wrote is visible."""
    cache = KVCache.allocate(
        config.num_hidden_layers,
        num_blocks,
        block_size,
        config.num_key_value_heads,
        config.head_dim,
        dtype=torch.float32,
        device="cpu",
    )
    generator = torch.Generator().manual_seed(5)
    cache.k.normal_(generator=generator)
    cache.v.normal_(generator=generator)
    return cache


def make_layout(
    spans: Sequence[tuple[int, int, int]], tables: Sequence[Sequence[int]], block_size: int = 16
) -> RowLayout:
    """The layout of one step.

    Args:
        spans: (slot, computed, rows) per sequence.
        tables: block ids by slot.
    """
    width = max(len(table) for table in tables)
    block_tables = torch.tensor([list(t) + [0] * (width - len(t)) for t in tables], dtype=torch.int32)
    num_computed = torch.zeros(len(tables), dtype=torch.int32)
    row_start, row_seq, positions, kv_slots = [0], [], [], []
    for index, (slot, computed, rows) in enumerate(spans):
        num_computed[slot] = computed
        row_start.append(row_start[-1] + rows)
        for position in range(computed, computed + rows):
            row_seq.append(index)
            positions.append(position)
            kv_slots.append(tables[slot][position // block_size] * block_size + position % block_size)
    return RowLayout(
        slots=torch.tensor([slot for slot, _, _ in spans], dtype=torch.int32),
        row_start=torch.tensor(row_start, dtype=torch.int32),
        row_seq=torch.tensor(row_seq, dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int32),
        kv_slots=torch.tensor(kv_slots, dtype=torch.int64),
        block_tables=block_tables,
        num_computed=num_computed,
        host_rows=tuple(rows for _, _, rows in spans),
        host_max_context=max(computed + rows for _, computed, rows in spans),
    )


@torch.no_grad()
def paged_forward(
    model: Qwen3ForCausalLM,
    cache: KVCache,
    tokens: Sequence[Tensor],
    spans: Sequence[tuple[int, int, int]],
    tables: Sequence[Sequence[int]],
    taps: Sequence[int] = (),
) -> ForwardOutput:
    """One step over the rows ``spans`` says, of the sequences ``tokens`` (by slot)."""
    layout = make_layout(spans, tables, cache.k.shape[2])
    rows = torch.cat([tokens[slot][computed : computed + rows] for slot, computed, rows in spans])
    out: ForwardOutput = model(rows, layout.positions, PagedContext(cache, layout), taps)
    return out
