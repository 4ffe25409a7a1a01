"""Tokenizer: equal to the reference library where text is trusted, free of control tokens where it is not."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, processors
from tokenizers import Tokenizer as Backend

from paceline.errors import CheckpointError, RequestError
from paceline.text import Tokenizer
from support.text_cases import SPECIALS, build_backend, hostile_text, ordinary_text, write_checkpoint


@pytest.fixture(scope="module")
def reference(text_folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(text_folder)


@given(text=hostile_text)
def test_trusted_text_encodes_as_in_transformers(tokenizer: Tokenizer, reference: Any, text: str) -> None:
    assert tokenizer.encode(text) == reference.encode(text)


@given(data=st.data())
def test_decodes_as_transformers(tokenizer: Tokenizer, reference: Any, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(
            ids, skip_special_tokens=skip
        )


@given(text=hostile_text)
def test_untrusted_text_yields_no_control_token_and_keeps_its_characters(
    tokenizer: Tokenizer, text: str
) -> None:
    ids = tokenizer.encode(text, allow_special=False)
    assert tokenizer.control_ids.isdisjoint(ids)
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    assert unicodedata.normalize("NFC", decoded) == unicodedata.normalize("NFC", text)


@given(text=ordinary_text)
def test_ordinary_text_encodes_the_same_trusted_or_not(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text, allow_special=False) == tokenizer.encode(text)


def test_tags_the_model_writes_as_text_stay_tokens_in_untrusted_text(tokenizer: Tokenizer) -> None:
    # </think> in an assistant's turn must come back as the token the model produced
    assert tokenizer.token_to_id("</think>") in tokenizer.encode("a</think>b", allow_special=False)


def test_named_facts(tokenizer: Tokenizer) -> None:
    assert [tokenizer.id_to_token(i) for i in sorted(tokenizer.control_ids)] == list(SPECIALS)
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert "bos_token" not in tokenizer.special_tokens
    assert tokenizer.id_to_token(tokenizer.vocab_size - 1) is not None
    for beyond in (-1, tokenizer.vocab_size, 2**31, 2**63):
        assert tokenizer.id_to_token(beyond) is None
        assert tokenizer.token_bytes(beyond) == b""


def test_a_named_token_is_a_control_token_whatever_its_flag() -> None:
    tokenizer = Tokenizer(build_backend(), {"eos_token": "<think>"})
    assert tokenizer.token_to_id("<think>") in tokenizer.control_ids
    assert tokenizer.token_to_id("<think>") not in tokenizer.encode("<think>", allow_special=False)


def test_token_bytes_are_the_bytes_of_the_text(tokenizer: Tokenizer) -> None:
    text = "naïve 東京 🙂 \x00\x7f"
    assert b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode(text)) == text.encode()
    part = tokenizer.encode("🙂")[-1]
    assert tokenizer.token_text(part) == "\ufffd" * len(tokenizer.token_bytes(part))


def test_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    for allow in (True, False):
        with pytest.raises(RequestError, match="surrogate"):
            tokenizer.encode("a\ud800b", allow_special=allow)


def test_post_processor_applies_to_untrusted_text_too() -> None:
    backend = build_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", backend.token_to_id("<|endoftext|>"))]
    )
    tokenizer = Tokenizer(backend)
    bos = tokenizer.token_to_id("<|endoftext|>")
    for text in ("plain", "not <|im_end|> plain"):
        ids = tokenizer.encode(text, allow_special=False)
        assert ids[0] == bos and tokenizer.control_ids.isdisjoint(ids[1:])
        assert ids[1:] == tokenizer.encode(text, allow_special=False, add_special_tokens=False)


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    backend = build_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.from_folder(write_checkpoint(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("hello " * 20)) == "hello " * 20
    assert len(tokenizer.encode("a")) == 1


def test_look_alikes_cannot_slip_through_a_normalizer() -> None:
    backend = build_backend()
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    backend.add_special_tokens([AddedToken("<|secret|>", special=True, normalized=True)])
    tokenizer = Tokenizer(backend)
    secret = tokenizer.token_to_id("<|secret|>")
    for text in ("＜|secret|＞", "<|SECRET|>"):
        assert secret in tokenizer.encode(text)  # the danger is real
        assert secret not in tokenizer.encode(text, allow_special=False)


def test_a_control_token_of_one_character_is_refused_not_produced() -> None:
    backend = build_backend()
    backend.add_special_tokens([AddedToken("§", special=True, normalized=False)])
    tokenizer = Tokenizer(backend)
    with pytest.raises(RequestError, match="control token"):
        tokenizer.encode("see § 5", allow_special=False)


def test_config_adds_and_reflags_tokens(tmp_path: Path) -> None:
    backend = build_backend()
    size = max(backend.get_added_tokens_decoder()) + 1
    think = backend.token_to_id("<think>")
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = {
        str(size): {"content": "<|extra|>", "special": True, **plain},
        str(think): {"content": "<think>", "special": True, **plain},
    }
    tokenizer = Tokenizer.from_folder(write_checkpoint(tmp_path / "a", backend, added_tokens_decoder=added))
    assert tokenizer.encode("<|extra|>") == [size]
    assert {size, think} <= tokenizer.control_ids
    assert tokenizer.vocab_size == size + 1

    added = {str(size + 3): {"content": "<|extra|>", "special": True, **plain}}
    with pytest.raises(CheckpointError, match="do not belong together"):
        Tokenizer.from_folder(write_checkpoint(tmp_path / "b", build_backend(), added_tokens_decoder=added))


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json.*skip_tokenizer_init"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read as a tokenizer"):
        Tokenizer.from_folder(tmp_path)
    write_checkpoint(tmp_path, build_backend())
    (tmp_path / "tokenizer_config.json").write_text("[1, 2]")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json holds a list"):
        Tokenizer.from_folder(tmp_path)


def test_specials_come_from_the_map_file_when_the_config_has_none(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, build_backend(), eos_token=None)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    assert Tokenizer.from_folder(tmp_path).special_tokens["eos_token"] == "<|endoftext|>"


def test_other_vocabularies_work() -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer = Tokenizer(backend)
    assert not tokenizer.byte_level
    assert tokenizer.encode("a") == [0]
    assert tokenizer.token_bytes(1) == b"b"
