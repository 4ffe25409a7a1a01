"""Loading, refusing and writing checkpoints."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_cases import GOLDEN, tiny_config
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.models import checkpoint
from paceline.models.attention import DenseCausalContext
from paceline.models.checkpoint import resolve_folder
from paceline.models.config import Qwen3Config
from paceline.models.loader import load_model, named_tensors, random_model, save_checkpoint

Tensors = dict[str, Tensor]


def write(folder: Path, tensors: Tensors, shards: int = 1, **changes: object) -> Path:
    """A folder as Hugging Face writes it: single, or ``shards`` files and their index."""
    (folder / "config.json").write_text(json.dumps(tiny_config(**changes)))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    names = sorted(tensors)
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def tensors() -> Tensors:
    """The tensors of an untied tiny model."""
    model = random_model(Qwen3Config.from_dict(tiny_config()), seed=3)
    return {name: tensor.clone() for name, tensor in named_tensors(model).items()}


def test_sharded_equals_single(tensors: Tensors, tmp_path: Path) -> None:
    for name, shards in (("one", 1), ("many", 4)):
        (tmp_path / name).mkdir()
        model = load_model(write(tmp_path / name, tensors, shards))
        loaded = named_tensors(model)
        assert loaded.keys() == tensors.keys()
        assert all(torch.equal(loaded[key], tensors[key]) for key in tensors)
        assert not any(parameter.requires_grad for parameter in model.parameters())


def test_fused_order(tensors: Tensors, tmp_path: Path) -> None:
    layer = load_model(write(tmp_path, tensors)).decoder_layers()[1]
    parts = [tensors[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv"]
    assert torch.equal(layer.self_attn.qkv_proj.weight, torch.cat(parts))
    parts = [tensors[f"model.layers.1.mlp.{n}_proj.weight"] for n in ("gate", "up")]
    assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat(parts))


@pytest.mark.parametrize(
    ("stored", "config_dtype", "asked", "expected"),
    [
        (torch.bfloat16, "bfloat16", "auto", torch.bfloat16),
        (torch.bfloat16, "float32", "auto", torch.float32),
        (torch.float16, None, "auto", torch.float16),
        (torch.float32, "float32", "bfloat16", torch.bfloat16),
        (torch.bfloat16, "bfloat16", "float32", torch.float32),
        (torch.float32, "float32", "float16", torch.float16),
    ],
)
def test_dtype(
    stored: torch.dtype,
    config_dtype: str | None,
    asked: str,
    expected: torch.dtype,
    tensors: Tensors,
    tmp_path: Path,
) -> None:
    folder = write(tmp_path, {k: v.to(stored) for k, v in tensors.items()}, torch_dtype=config_dtype)
    model = load_model(folder, dtype=asked)
    assert {parameter.dtype for parameter in model.parameters()} == {expected}
    assert model.rope().dtype == torch.float32
    want = tensors["model.norm.weight"].to(stored).to(expected)
    assert torch.equal(model.norm.weight, want)


def test_unknown_dtype(tensors: Tensors, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'int8' is not one of auto, float32"):
        load_model(write(tmp_path, tensors), dtype="int8")


def test_casting_a_model_leaves_the_rope_table_fp32() -> None:
    model = random_model(Qwen3Config.from_dict(tiny_config()))
    before = model.rope().clone()
    assert torch.equal(model.to(torch.bfloat16).rope(), before)
    assert model.norm.weight.dtype == torch.bfloat16


def drop(tensors: Tensors) -> None:
    del tensors["model.layers.2.mlp.up_proj.weight"]


def add(tensors: Tensors) -> None:
    tensors["model.layers.3.mlp.up_proj.weight"] = torch.zeros(80, 48)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)


def reshape(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(64, 48)


def quantise(tensors: Tensors) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(80, 48, dtype=torch.int8)


def lose_head(tensors: Tensors) -> None:
    del tensors["lm_head.weight"]


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (drop, ["1 missing", "model.layers.2.mlp.up_proj.weight"]),
        (add, ["2 unexpected", "model.layers.3.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"]),
        (reshape, ["1 mis-shaped", "model.layers.0.self_attn.k_proj.weight is [64, 48], expected [32, 48]"]),
        (quantise, ["model.layers.1.mlp.up_proj.weight is I8", "quantised"]),
        (lose_head, ["1 missing", "lm_head.weight"]),
    ],
)
@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_that_do_not_fit(
    damage: Callable[[Tensors], None], parts: list[str], shards: int, tensors: Tensors, tmp_path: Path
) -> None:
    damage(tensors)
    with pytest.raises(CheckpointError) as caught:
        load_model(write(tmp_path, tensors, shards))
    for part in parts:
        assert part in str(caught.value)


def test_long_lists_are_cut(tensors: Tensors, tmp_path: Path) -> None:
    kept = {name: t for name, t in tensors.items() if "layers" not in name}
    with pytest.raises(CheckpointError, match=r"33 missing: .*, and 25 more"):
        load_model(write(tmp_path, kept))


def test_tied_head_in_the_file(tensors: Tensors, tmp_path: Path) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    model = load_model(write(tmp_path, tensors, shards=3, tie_word_embeddings=True))
    assert model.lm_head.weight is model.embed_tokens.weight
    tensors["lm_head.weight"][95, 47] += 1
    with pytest.raises(CheckpointError, match=r"different lm_head\.weight"):
        load_model(write(tmp_path, tensors, shards=3, tie_word_embeddings=True))


def test_old_rotary_buffers_are_skipped(tensors: Tensors, tmp_path: Path) -> None:
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    loaded = named_tensors(load_model(write(tmp_path, {**tensors, **buffers})))
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[key], tensors[key]) for key in tensors)


def test_broken_folders(tensors: Tensors, tmp_path: Path) -> None:
    write(tmp_path, tensors, shards=3)
    index = tmp_path / "model.safetensors.index.json"
    shard = tmp_path / "model-00002-of-00003.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.*cannot be read as safetensors"):
        load_model(tmp_path)
    shard.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        load_model(tmp_path)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"missing: model-00002-of-00003\.safetensors"):
        load_model(tmp_path)
    shard.write_bytes(whole)
    wrong = json.loads(index.read_text())
    wrong["weight_map"]["model.norm.weight"], wrong["weight_map"]["ghost"] = shard.name, shard.name
    index.write_text(json.dumps(wrong))
    with pytest.raises(CheckpointError, match="do not hold") as caught:
        load_model(tmp_path)
    assert "ghost" in str(caught.value)
    index.unlink()
    with pytest.raises(CheckpointError, match=r"found: model-00001-of-00003\.safetensors"):
        load_model(tmp_path)


def test_names_that_are_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve_folder(tmp_path / "nothing")
    (tmp_path / "file.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file"):
        resolve_folder(tmp_path / "file.safetensors")
    monkeypatch.setattr("huggingface_hub.snapshot_download", _offline)
    with pytest.raises(CheckpointError, match=r"'Qwen/Qwen3-4B' is not a local folder.*no route"):
        resolve_folder("Qwen/Qwen3-4B")


def _offline(*_: object, **__: object) -> str:
    raise OSError("no route to host")


def test_hub_names_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns))
        return str(GOLDEN / "qwen3_tiny")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert load_model("someone/qwen3-tiny").config.vocab_size == 320
    resolve_folder("someone/qwen3-tiny", revision="v2")
    assert [call[:2] for call in asked] == [("someone/qwen3-tiny", None), ("someone/qwen3-tiny", "v2")]
    assert "*.safetensors" in asked[0][2]


def test_progress_and_log_line(
    tensors: Tensors, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path, tensors)
    with caplog.at_level(logging.INFO, logger=checkpoint.__name__):
        load_model(folder)
        assert capsys.readouterr() == ("", "")
        load_model(folder, show_progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Loading weights" in err
    assert "GiB/s" in caplog.records[-1].getMessage()


def test_save_and_load(tmp_path: Path) -> None:
    config = Qwen3Config.from_dict(tiny_config(tie_word_embeddings=True, attention_bias=True))
    model = random_model(config, seed=1)
    save_checkpoint(model, tmp_path)
    back = load_model(tmp_path)
    assert back.config == config
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), back.parameters(), strict=True))
    save_checkpoint(model, tmp_path, dtype=torch.bfloat16)  # over the old files
    half = load_model(tmp_path)
    assert (half.config.dtype, half.norm.weight.dtype) == ("bfloat16", torch.bfloat16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")


def test_random_weights(tmp_path: Path) -> None:
    """Finite and of order one at real depth; the same for the same seed; needs no weight file."""
    config = Qwen3Config.from_dict(tiny_config(num_hidden_layers=36, hidden_size=256, intermediate_size=640))
    save_checkpoint(random_model(config), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model = load_model(tmp_path, load_format="dummy", dtype="bfloat16", seed=7)
    same = load_model(tmp_path, load_format="dummy", dtype="bfloat16", seed=7)
    other = load_model(tmp_path, load_format="dummy", dtype="bfloat16", seed=8)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)
    tokens = torch.arange(50)[None]
    logits = model.logits(model(tokens, tokens, DenseCausalContext()).hidden).float()
    assert 0.5 < logits.std() < 2.0


# VmHWM, not getrusage: a child's ru_maxrss starts at what its parent held when it was forked.
MEMORY_PROBE = textwrap.dedent(
    """
    import re, sys
    from pathlib import Path
    from paceline.models.loader import load_model

    def peak_bytes():
        return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

    load_model(sys.argv[1])  # a small one first: lazy imports and allocator start-up are not weights
    before = peak_bytes()
    model = load_model(sys.argv[2])
    print(peak_bytes() - before)
    """
)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux's /proc")
def test_peak_memory_is_weights_plus_one_shard(tensors: Tensors, tmp_path: Path) -> None:
    """Peak resident memory of a fresh process, mapped file pages included, over that before loading."""
    small, big = tmp_path / "small", tmp_path / "big"
    small.mkdir()
    write(small, tensors)
    geometry = {
        "hidden_size": 512,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "torch_dtype": "bfloat16",
    }
    big.mkdir()
    model = random_model(Qwen3Config.from_dict(tiny_config(**geometry)), dtype=torch.bfloat16)
    weights = named_tensors(model)
    write(big, {name: tensor.clone() for name, tensor in weights.items()}, shards=4, **geometry)
    num_bytes = sum(tensor.numel() * 2 for tensor in weights.values())
    shard = max(path.stat().st_size for path in big.glob("*.safetensors"))
    assert num_bytes > 90e6  # large against the slack below
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_PROBE, str(small), str(big)], capture_output=True, text=True, check=True
    )
    assert num_bytes < int(done.stdout) < num_bytes + shard + 16e6
