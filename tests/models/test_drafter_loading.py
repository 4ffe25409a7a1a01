"""Drafter checkpoints: what is loaded, shared, compared, refused, and written."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import GOLDEN, tiny_config
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.models.config import Qwen3Config
from paceline.models.draft_attention import DenseDraftContext
from paceline.models.drafter import Chain, Drafter
from paceline.models.drafter_config import DrafterConfig
from paceline.models.drafter_loader import load_drafter, named_tensors, random_drafter, read_sts, save_drafter
from paceline.models.loader import load_model, random_model
from paceline.models.qwen3 import Qwen3ForCausalLM


@pytest.fixture(scope="module")
def target() -> Qwen3ForCausalLM:
    """The target of the golden drafters."""
    return load_model(GOLDEN / "qwen3_tiny")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a DSpark checkpoint, to be damaged."""
    copy = tmp_path / "drafter"
    shutil.copytree(GOLDEN / "dspark_tiny_b7", copy)
    return copy


def edit(folder: Path, **tensors: Tensor | None) -> Path:
    """Replace or (None) remove tensors; "__" in a keyword stands for "."."""
    stored = load_file(folder / "model.safetensors")
    for key, tensor in tensors.items():
        name = key.replace("__", ".")
        stored.pop(name, None)
        if tensor is not None:
            stored[name] = tensor
    save_file(stored, folder / "model.safetensors")
    return folder


def draft(drafter: Drafter, given: Tensor | None = None) -> Chain:
    """A round of two sequences over a random context, freely or along a given chain."""
    generator = torch.Generator().manual_seed(0)
    taps = torch.randn(2, 9, drafter.fc.in_features, generator=generator)
    positions = torch.arange(9).expand(2, -1)
    with torch.no_grad():
        k, v = drafter.context_kv(drafter.context_features(taps), positions)
        starts = torch.tensor([[9], [4]])
        hidden = drafter(torch.tensor([[5], [6]]), starts, DenseDraftContext(k, v, starts))[:, 0]
        return drafter.chain(drafter.slots(hidden), torch.tensor([5, 6]), given)


def test_embedding_and_head_are_the_targets(target: Qwen3ForCausalLM, folder: Path) -> None:
    drafter = load_drafter(folder, target)
    assert drafter.lm_head is None
    ours = {parameter.data_ptr() for parameter in drafter.parameters()}
    assert target.embed_tokens.weight.data_ptr() not in ours
    stored = load_file(folder / "model.safetensors")
    expected = sum(t.numel() for n, t in stored.items() if n not in ("embed_tokens.weight", "lm_head.weight"))
    assert sum(parameter.numel() for parameter in drafter.parameters()) == expected
    assert not any(parameter.requires_grad for parameter in drafter.parameters())


def test_follows_the_targets_dtype(folder: Path) -> None:
    half = load_model(GOLDEN / "qwen3_tiny", dtype="bfloat16")
    drafter = load_drafter(folder, half)
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.bfloat16}
    assert (drafter.rope().dtype, drafter.sts_temperatures.dtype) == (torch.float32, torch.float32)
    taps = torch.randn(1, 4, drafter.fc.in_features, dtype=torch.bfloat16)
    k, v = drafter.context_kv(drafter.context_features(taps), torch.arange(4)[None])
    starts = torch.tensor([[4]])
    hidden = drafter(torch.tensor([[5]]), starts, DenseDraftContext(k, v, starts))
    assert (hidden.dtype, drafter.slots(hidden).logits.dtype) == (torch.bfloat16, torch.bfloat16)


def test_tables_of_another_target_are_refused(target: Qwen3ForCausalLM, folder: Path) -> None:
    head = target.lm_head.weight.data.clone()
    load_drafter(edit(folder, lm_head__weight=head * 1.001), target)  # rounding of another dtype passes
    other = torch.randn(head.shape, generator=torch.Generator().manual_seed(1))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from the target's"):
        load_drafter(edit(folder, lm_head__weight=other), target)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is \[8, 64\], the target's is \[320, 64\]"):
        load_drafter(edit(folder, lm_head__weight=torch.zeros(8, 64)), target)
    trained_mask = target.embed_tokens.weight.data.clone()
    trained_mask[317] += 1
    load_drafter(edit(folder, lm_head__weight=None, embed_tokens__weight=trained_mask), target)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("fc.weight", (64, 128), r"fc\.weight is \[64, 128\], expected \[64, 192\]"),
        ("markov_head.markov_w1.weight", None, r"missing: markov_head\.markov_w1\.weight"),
        ("markov_head.gate_proj.weight", (16, 80), r"unexpected: markov_head\.gate_proj\.weight"),
        (
            "confidence_head.proj.weight",
            (1, 64),
            r"confidence_head\.proj\.weight is \[1, 64\], expected \[1, 80\]",
        ),
        ("layers.2.mlp.up_proj.weight", (96, 64), r"unexpected: layers\.2\.mlp\.up_proj\.weight"),
    ],
)
def test_tensors_that_do_not_fit(
    name: str, shape: tuple[int, ...] | None, message: str, target: Qwen3ForCausalLM, folder: Path
) -> None:
    edit(folder, **{name.replace(".", "__"): None if shape is None else torch.zeros(shape)})
    with pytest.raises(CheckpointError, match=message):
        load_drafter(folder, target)


def test_a_target_of_another_size_is_refused(folder: Path) -> None:
    other = random_model(Qwen3Config.from_dict(tiny_config(vocab_size=320)))
    with pytest.raises(CheckpointError, match="hidden_size is 64 in the drafter and 48 in the target"):
        load_drafter(folder, other)


def drafter_config(target: Qwen3ForCausalLM, **changes: Any) -> DrafterConfig:
    """A two-layer DSpark drafter for the golden target."""
    layers = replace(target.config, num_hidden_layers=2, windows=(None, None), tie_word_embeddings=False)
    values: dict[str, Any] = {
        "method": "dspark",
        "dialect": "deepspec",
        "layers": layers,
        "block_size": 5,
        "anchor_first": True,
        "mask_token_id": 317,
        "tap_layer_ids": (-1, 2, 4),
        "draft_vocab_size": 320,
        "markov": "vanilla",
        "markov_rank": 8,
        "confidence": True,
        "confidence_with_markov": True,
        "num_target_layers": 6,
        **changes,
    }
    return DrafterConfig(**values)


@pytest.mark.parametrize("with_tables", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"markov": "gated"},
        {"markov": "rnn", "confidence_with_markov": False},
        {"anchor_first": False, "method": "dflash", "markov": None, "markov_rank": 0, "confidence": False,
         "confidence_with_markov": False, "dialect": "z-lab"},
    ],
)  # fmt: skip
def test_save_and_load(
    changes: dict[str, Any], with_tables: bool, target: Qwen3ForCausalLM, tmp_path: Path
) -> None:
    drafter = random_drafter(drafter_config(target, **changes), target, seed=4)
    save_drafter(drafter, tmp_path, with_tables=with_tables)
    back = load_drafter(tmp_path, target)
    assert back.config == replace(drafter.config, layers=replace(drafter.config.layers, dtype="float32"))
    ours, theirs = named_tensors(drafter), named_tensors(back)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == with_tables
    assert draft(back).tokens.tolist() == draft(drafter).tokens.tolist()


def test_attention_bias(target: Qwen3ForCausalLM, tmp_path: Path) -> None:
    """Biases reach q, k and v of the block and k and v of the context."""
    layers = replace(drafter_config(target).layers, attention_bias=True)
    drafter = random_drafter(drafter_config(target, layers=layers), target)
    assert drafter.qkv_bias is not None
    before = draft(drafter).logits
    drafter.qkv_bias.normal_(generator=torch.Generator().manual_seed(2))
    assert not torch.allclose(draft(drafter).logits, before)
    features = torch.randn(3, 64)
    q_size, kv_size = layers.q_size, layers.kv_size
    _, v = drafter.context_kv(features, torch.arange(3))
    for i in range(2):
        rows = slice(q_size + kv_size, None)
        expected = features @ drafter.qkv_proj[i, rows].T + drafter.qkv_bias[i, rows]
        torch.testing.assert_close(v[i].flatten(1), expected)
    save_drafter(drafter, tmp_path)
    assert "layers.1.self_attn.k_proj.bias" in load_file(tmp_path / "model.safetensors")
    torch.testing.assert_close(draft(load_drafter(tmp_path, target)).logits, draft(drafter).logits)


def write_reduced(folder: Path, drafter: Drafter, kept: Tensor, **edits: Tensor | None) -> Path:
    """A speculators checkpoint over a reduced vocabulary, made by hand."""
    source = json.loads((GOLDEN / "dspark_tiny_b6_speculators" / "config.json").read_text())
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(source | {"draft_vocab_size": len(kept)}))
    tensors: dict[str, Tensor | None] = {
        name: tensor.clone() for name, tensor in named_tensors(drafter).items()
    }
    assert drafter.markov_head is not None
    tensors["markov_head.markov_w2.weight"] = drafter.markov_head.markov_w2.weight[kept].clone()
    tensors["lm_head.weight"] = drafter.target.lm_head.weight[kept].clone()
    tensors["d2t"] = kept - torch.arange(len(kept))
    tensors["t2d"] = torch.zeros(320, dtype=torch.bool).index_fill_(0, kept, True)
    tensors |= edits
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors"
    )
    return folder


def test_reduced_vocabulary(target: Qwen3ForCausalLM, tmp_path: Path) -> None:
    """On the kept tokens everything is as in the full drafter; ids are the target's."""
    full = load_drafter(GOLDEN / "dspark_tiny_b6_speculators", target)
    generator = torch.Generator().manual_seed(3)
    kept = torch.randperm(320, generator=generator)[:100].sort().values
    drafter = load_drafter(write_reduced(tmp_path / "reduced", full, kept), target)
    chain = draft(drafter)
    assert chain.logits.shape == (2, 6, 100)
    assert set(chain.tokens.flatten().tolist()) | set(chain.runner_up.flatten().tolist()) <= set(
        kept.tolist()
    )
    # the full drafter, made to follow the same chain, has the same logits on the kept tokens
    same = draft(full, given=chain.tokens)
    torch.testing.assert_close(chain.logits, same.logits[..., kept])
    assert chain.confidence is not None
    assert same.confidence is not None
    torch.testing.assert_close(chain.confidence, same.confidence)
    expected = same.logits[..., kept].topk(2).indices
    assert torch.equal(torch.stack((chain.tokens, chain.runner_up), dim=-1), kept[expected])


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"d2t": None}, "'d2t', which maps draft ids to the target's, is missing"),
        ({"d2t": torch.zeros(99, dtype=torch.long)}, r"'d2t' is \[99\], expected \[100\]"),
        ({"d2t": torch.zeros(100, dtype=torch.long) + 300}, "one to one"),
        ({"d2t": -torch.arange(100)}, "one to one"),
        ({"t2d": torch.ones(320, dtype=torch.bool)}, "different draft vocabularies"),
        ({"lm_head.weight": None}, r"missing: lm_head\.weight"),
    ],
)
def test_broken_vocabulary_maps(
    edits: dict[str, Tensor | None], message: str, target: Qwen3ForCausalLM, tmp_path: Path
) -> None:
    full = load_drafter(GOLDEN / "dspark_tiny_b6_speculators", target)
    folder = write_reduced(tmp_path / "reduced", full, torch.arange(0, 300, 3), **edits)
    with pytest.raises(CheckpointError, match=message):
        load_drafter(folder, target)


def test_dummy_weights_need_no_file(target: Qwen3ForCausalLM, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    first = draft(load_drafter(folder, target, load_format="dummy", seed=1))
    again = draft(load_drafter(folder, target, load_format="dummy", seed=1))
    other = draft(load_drafter(folder, target, load_format="dummy", seed=2))
    assert torch.equal(first.logits, again.logits)
    assert not torch.equal(first.logits, other.logits)
    assert first.logits.isfinite().all()


def test_sts_file(target: Qwen3ForCausalLM, tmp_path: Path) -> None:
    path = tmp_path / "sts.json"
    path.write_text(
        json.dumps({"temperatures": [0.5, 1.0, 2.0, 1.0, 1.5], "dataset": "x", "ece_before": 0.1})
    )
    drafter = random_drafter(drafter_config(target), target)
    logits = torch.tensor([[2.0, -1.0, 1.0]])
    torch.testing.assert_close(drafter.survival(logits), torch.sigmoid(logits).cumprod(-1))
    drafter.sts_temperatures.copy_(read_sts(path, drafter.config.max_drafts))
    expected = torch.sigmoid(torch.tensor([[4.0, -1.0, 0.5]])).cumprod(-1)
    torch.testing.assert_close(drafter.survival(logits), expected)
    with pytest.raises(CheckpointError, match="5 temperatures for a drafter that drafts 7"):
        read_sts(path, 7)
    for bad in ([1.0, 0.0], ["1"], None, [True]):
        path.write_text(json.dumps({"temperatures": bad}))
        with pytest.raises(CheckpointError, match="positive numbers"):
            read_sts(path, 1)
