"""An inflated pair computes what the small one does: logits, greedy tokens, accept lengths."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import rms_norm

from paceline.bench import inflate, padding
from paceline.bench.geometry import geometry_folder
from paceline.config import BUNDLED_DRAFTERS, BUNDLED_MODEL
from paceline.errors import CheckpointError, ConfigError
from paceline.models.attention import DenseCausalContext
from paceline.models.config import Qwen3Config
from paceline.models.drafter_dialects import load_drafter_config
from paceline.models.drafter_loader import load_drafter
from paceline.models.loader import load_model
from paceline.sampling.params import SamplingParams
from support.engines import GOLDEN, complete, golden_core, golden_prompts, tokens_of

SIZES = {
    "hidden_size": 160,
    "intermediate_size": 224,
    "num_hidden_layers": 10,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "vocab_size": 520,
}
DRAFT_SIZES = {"num_hidden_layers": 3, "target_layer_ids": [0, 2, 3, 6, 8], "markov_rank": 24}


def geometry(folder: Path, source: Path, **sizes: object) -> Path:
    """A geometry: the config of a checkpoint with other sizes."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text()) | sizes
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def inflated(root: Path, target: Path, drafter: Path, pad: bool) -> tuple[Path, Path]:
    """A pair at ``SIZES``; fp32, so that nothing but the order of sums differs."""
    shape = geometry(root / "target-geometry", target, **SIZES)
    draft_sizes = SIZES | DRAFT_SIZES | {"num_target_layers": SIZES["num_hidden_layers"]}
    draft_shape = geometry(root / "draft-geometry", drafter, **draft_sizes)
    large = inflate.inflate_target(target, shape, root / "target", pad_vocab=pad, dtype=torch.float32)
    draft = inflate.inflate_drafter(
        drafter, target, draft_shape, root / "drafter", large, dtype=torch.float32
    )
    return large, draft


@pytest.fixture(scope="module", params=[False, True], ids=["vocab", "padded-vocab"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The golden pair, inflated."""
    root = tmp_path_factory.mktemp("inflate")
    return inflated(root, GOLDEN / "qwen3_tiny", GOLDEN / "dspark_tiny_b7", bool(request.param))


def logits(folder: Path, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [R, V] and taps of every layer."""
    model = load_model(folder, dtype="float32")
    ids = torch.tensor(tokens)
    out = model(ids, torch.arange(len(tokens)), DenseCausalContext(), [0, model.config.num_hidden_layers - 1])
    assert out.taps is not None
    return model.logits(out.hidden), out.taps


def test_logits_are_those_of_the_small_model(pair: tuple[Path, Path]) -> None:
    tokens = golden_prompts(1)[0] + list(range(40, 80))
    small, large = logits(GOLDEN / "qwen3_tiny", tokens)[0], logits(pair[0], tokens)[0]
    vocab = small.shape[1]
    shift = (large[:, :vocab] - small).mean(-1, keepdim=True)  # with a padded vocabulary, equal for all
    torch.testing.assert_close(large[:, :vocab] - shift, small, atol=2e-4, rtol=1e-4)
    if large.shape[1] > vocab:
        assert float(large[:, vocab:].max()) < float(large[:, :vocab].min()) - 100
    else:
        assert float(shift.abs().max()) < 1e-4


def test_the_engine_draws_the_same_tokens_and_accepts_the_same_drafts(pair: tuple[Path, Path]) -> None:
    results = []
    for target, drafter in ((GOLDEN / "qwen3_tiny", GOLDEN / "dspark_tiny_b7"), pair):
        core = golden_core(str(target), drafter=str(drafter))
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        tokens = tokens_of(complete(core, golden_prompts(8), params, check=False))
        results.append((tokens, core.stats().accept_lengths))
    assert results[0] == results[1]
    assert sum(results[0][1][2:]) > 10, "too few drafts stand for this to show anything"


@pytest.mark.parametrize("pad", [False, True])
def test_norms_are_exact_whatever_epsilon(pad: bool) -> None:
    """Real activations hide a wrong epsilon; values as small as it is do not."""
    small = replace(Qwen3Config.from_pretrained(BUNDLED_MODEL), rms_norm_eps=0.01)
    shape = replace(small, hidden_size=500, vocab_size=9000)
    plan = padding.Padding.of(small, shape, pad_vocab=pad, dtype=torch.float32)
    x, weight = 0.1 * torch.randn(5, small.hidden_size), torch.randn(small.hidden_size)
    wide = torch.zeros(5, 500)
    wide[:, : small.hidden_size], wide[:, small.hidden_size] = x, plan.constant
    want = rms_norm(x, (small.hidden_size,), weight, small.rms_norm_eps)
    got = rms_norm(wide, (500,), plan.norm(weight), plan.epsilon(small))
    torch.testing.assert_close(got[:, : small.hidden_size], want)
    assert not got[:, small.hidden_size :].any()


@pytest.mark.parametrize("pad", [False, True])
def test_what_the_drafter_knows_is_exact_whatever_epsilon(tmp_path: Path, pad: bool) -> None:
    """The features of taps are normed over the spare channel too."""
    eps = {"rms_norm_eps": 0.05}
    target = copied(tmp_path / "a", GOLDEN / "qwen3_tiny", **eps)
    drafter = copied(tmp_path / "b", GOLDEN / "dspark_tiny_b7", **eps)
    large, draft = inflated(tmp_path, target, drafter, pad)
    few = load_drafter(drafter, load_model(target, dtype="float32"))
    many = load_drafter(draft, load_model(large, dtype="float32"))
    d, width, taps = 64, SIZES["hidden_size"], few.config.tap_layer_ids
    rows = 0.1 * torch.randn(4, len(taps), d)
    wide = torch.randn(4, len(many.config.tap_layer_ids), width)  # unused taps hold anything
    places = padding.spread(6, SIZES["num_hidden_layers"])
    _, chosen = inflate.place_taps(taps, places, many.config.tap_layer_ids)
    wide[:, chosen] = 0.0
    wide[:, chosen, :d] = rows
    wide[:, chosen, d] = many.target.embed_tokens.weight[0, d]
    torch.testing.assert_close(
        many.context_features(wide.flatten(1))[:, :d], few.context_features(rows.flatten(1))
    )


def copied(folder: Path, source: Path, **changes: object) -> Path:
    """A checkpoint with a changed config."""
    geometry(folder, source, **changes)
    shutil.copy(source / "model.safetensors", folder)
    return folder


def test_every_layer_and_head_of_the_geometry_is_there(pair: tuple[Path, Path]) -> None:
    config = Qwen3Config.from_pretrained(pair[0])
    for name, size in SIZES.items():
        if name != "vocab_size":
            assert getattr(config, name) == size


def test_the_bundled_drafters_fit_the_4b_geometry() -> None:
    """Sizes, heads and taps only: writing 8 GB is not for tests."""
    small, sizes = (
        Qwen3Config.from_pretrained(BUNDLED_MODEL),
        Qwen3Config.from_pretrained(geometry_folder("qwen3-4b")),
    )
    padding.head_places(small, sizes)
    for method, name in (("dspark", "qwen3-4b-dspark-b7"), ("dflash", "qwen3-4b-dflash-b16")):
        drafter = load_drafter_config(BUNDLED_DRAFTERS[method], small)
        shape = load_drafter_config(geometry_folder(name), sizes)
        places = padding.spread(small.num_hidden_layers, sizes.num_hidden_layers)
        taps, chosen = inflate.place_taps(drafter.tap_layer_ids, places, shape.tap_layer_ids)
        assert len(taps) == 5
        for tap, place in zip(drafter.tap_layer_ids, chosen, strict=True):
            assert places[tap] <= taps[place] < places[tap + 1]


@pytest.mark.parametrize(
    ("small", "large", "queries", "kv"),
    [
        ((3, 1), (32, 8), [0, 1, 2], [0]),
        ((3, 1), (4, 2), [0, 1, 2], [0, 0]),
        ((4, 2), (10, 5), [0, 1, 2, 3], [0, 1]),
        ((6, 2), (8, 4), [0, 1, 2, 4, 5, 6], [0, 0, 1, 1]),
        ((4, 2), (12, 3), [0, 1, 4, 5], [0, 1]),
    ],
)
def test_heads_keep_their_kv(
    small: tuple[int, int], large: tuple[int, int], queries: list[int], kv: list[int]
) -> None:
    base = Qwen3Config.from_pretrained(BUNDLED_MODEL)
    configs = [replace(base, num_attention_heads=h, num_key_value_heads=g) for h, g in (small, large)]
    assert padding.head_places(*configs) == (queries, kv)
    room, group = large[0] // large[1], small[0] // small[1]
    assert [kv[query // room] for query in queries] == [head // group for head in range(small[0])]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"intermediate_size": 32}, "intermediate_size is 32 in the geometry, less than"),
        ({"num_key_value_heads": 1, "num_attention_heads": 4}, None),
        ({"num_key_value_heads": 4, "num_attention_heads": 4, "head_dim": 64}, "head_dim is 64"),
        ({"vocab_size": 300}, "both must grow"),
    ],
)
def test_a_geometry_that_does_not_hold_the_checkpoint_is_refused(
    tmp_path: Path, sizes: dict[str, int], message: str | None
) -> None:
    source = GOLDEN / "qwen3_tiny"
    shape = geometry(tmp_path / "geometry", source, **(SIZES | sizes))
    with pytest.raises(ConfigError, match=message or "KV heads"):
        inflate.inflate_target(source, shape, tmp_path / "out", pad_vocab=True, dtype=torch.float32)


def test_shards_are_written_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflate, "SHARD_BYTES", 200_000)
    source = GOLDEN / "qwen3_tiny"
    shape = geometry(tmp_path / "geometry", source, **SIZES)
    out = inflate.inflate_target(source, shape, tmp_path / "out", pad_vocab=False, dtype=torch.bfloat16)
    assert len(list(out.glob("model-*.safetensors"))) > 3
    load_model(out)
    with pytest.raises(CheckpointError, match="is not empty"):
        inflate.inflate_target(source, shape, out, pad_vocab=False, dtype=torch.bfloat16)


def test_a_size_without_a_drafter_names_those_with_one(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"dspark drafter for qwen3-0\.6b\. There is for qwen3-14b, qwen3-4b"
    ):
        inflate.inflate_pair(None, None, "qwen3-0.6b", str(tmp_path), pad_vocab=False, dtype="bfloat16")


def test_folders_are_made_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflate, "inflate_target", lambda *args, **named: pytest.fail("it was written"))
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "x").touch()
    for out, error, message in (
        (tmp_path, CheckpointError, "drafter is not empty"),
        (tmp_path / "drafter" / "x", ConfigError, "target cannot be made: Not a directory"),
    ):
        with pytest.raises(error, match=message):
            inflate.inflate_pair(None, None, "qwen3-4b", str(out), pad_vocab=False, dtype="bfloat16")
