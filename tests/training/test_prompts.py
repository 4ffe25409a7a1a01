"""Prompt files of every kind, token files, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.training.documents import Documents
from paceline.training.prompts import PromptReader, split
from paceline.training.regenerate import plan_requests


def reader(folder: Path, max_len: int = 100) -> PromptReader:
    return PromptReader(folder, 300, max_len, seed=0)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A folder with a byte-level tokenizer and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    folder = tmp_path / "target"
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}{% endfor %}<s>"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def test_every_kind_of_line(target: Path, tmp_path: Path) -> None:
    text = "abcdefghij" * 40
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "dropped"}]
    rows = [{"prompt": "ab"}, {"prompt_token_ids": [1, 2, 3]}, {"messages": chat}, {"text": text}]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "note.txt").write_text(text)
    found = reader(target).read([path, tmp_path / "note.txt"])
    assert not found.answered and len(found) == 5
    assert found.lengths[:2].tolist() == [2, 3]
    assert len(found[2]) == len("user:hi") + 2  # two control tokens, the answer left out
    whole = reader(target, 10_000)
    for i in (3, 4):
        assert (
            8 <= len(found[i]) <= 100
            and found[i].tolist() == whole._text_side().encode(text)[: len(found[i])]
        )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ('{"prompt": "\udcff"}', "not JSON: 'utf-8' codec"),
        ('{"prompt": "a", "text": "b"}', "exactly one of"),
        ('{"prompt_token_ids": ["a"]}', "integers"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "no user message"),
        ('{"prompt": ""}', "not empty"),
    ],
)
def test_bad_lines_are_named(target: Path, tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "ok"}\n' + os.fsencode(line) + b"\n")
    with pytest.raises(ConfigError, match=rf"data\.jsonl:2: ?.*{message}|data\.jsonl:2 is {message}"):
        reader(target).read([path])


def test_token_files_round_trip_and_do_not_mix(target: Path, tmp_path: Path) -> None:
    docs = Documents.of([[1, 2, 3], [4, 5]], 300, [1, 1], [0.0, 1.0], [7, 7])
    docs.save(tmp_path / "a.safetensors")
    prompts = Documents.of([[9, 9]], 300)
    prompts.save(tmp_path / "p.safetensors")
    found = reader(target).read([tmp_path / "a.safetensors", tmp_path / "a.safetensors"])
    assert found.answered and found.tokens.dtype == np.uint16
    assert [found[i].tolist() for i in range(4)] == [[1, 2, 3], [4, 5]] * 2
    assert found.source.tolist() == [7] * 4
    assert Documents.of([[70_000]], 100_000).tokens.dtype == np.int32
    with pytest.raises(ConfigError, match="mixed"):
        reader(target).read([tmp_path / "a.safetensors", tmp_path / "p.safetensors"])
    with pytest.raises(ConfigError, match="does not exist"):
        reader(target).read([tmp_path / "none.jsonl"])
    with pytest.raises(ConfigError, match="outside the target's vocabulary"):
        docs.check(5, 100, "the data")


def test_held_out_prompts_share_nothing_with_training() -> None:
    docs = Documents.of([[i] for i in range(40)], 300, [0] * 40, [1.0] * 40, [i // 2 for i in range(40)])
    train, held = split(docs, 0.2, seed=1)
    assert len(held) == 8 and not set(held.source) & set(train.source)
    assert set(split(docs, 0.2, seed=2)[1].source) != set(held.source)
    with pytest.raises(ConfigError, match="too few"):
        split(docs.subset(np.array([0, 1])), 0.1, seed=0)


def test_temperatures_in_turn_or_all() -> None:
    assert plan_requests(3, (0.0, 1.0), every=False) == [(0, 0.0), (1, 1.0), (2, 0.0)]
    assert plan_requests(1, (0.0, 1.0), every=True) == [(0, 0.0), (0, 1.0)]
