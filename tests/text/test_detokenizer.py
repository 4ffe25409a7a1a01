"""Incremental decoding equals decoding at once, and never shows what later tokens would change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from paceline.text import IncrementalDetokenizer, Tokenizer
from support.text_cases import build_backend, valid_text


def _pushed(tokenizer: Tokenizer, ids: list[int], cuts: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    parts, start = [], 0
    for end in [*sorted(c for c in cuts if c <= len(ids)), len(ids)]:
        parts.append(detokenizer.push(ids[start:end]))
        start = end
    return [*parts, detokenizer.flush()]


@given(data=st.data(), skip=st.booleans())
def test_any_ids_in_any_split_give_the_full_decode(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    # random ids of a byte-level vocabulary are mostly invalid UTF-8: the hard case
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=10))
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(_pushed(tokenizer, ids, cuts, skip=skip)) == expected


@given(text=valid_text)
def test_valid_text_never_shows_a_replacement_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    expected = tokenizer.decode(ids, skip_special_tokens=False)
    shown = ""
    for part in _pushed(tokenizer, ids, list(range(len(ids))), skip=False):
        shown += part
        assert expected.startswith(shown)
    assert shown == expected


def test_split_character_waits_for_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂b")
    detokenizer = IncrementalDetokenizer(tokenizer)
    parts = [detokenizer.push([i]) for i in ids]
    assert "".join(parts) == "a🙂b"
    assert parts.index("🙂") == len(ids) - 2
    assert detokenizer.flush() == ""


def test_a_character_cut_off_at_the_end_is_one_replacement_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x🙂")[:-1]
    assert "".join(_pushed(tokenizer, ids, [1])) == "x\ufffd" == tokenizer.decode(ids)


def test_nothing_is_kept_of_finished_characters(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    ids = tokenizer.encode("the quick brown fox 東京 ") * 20
    sizes = set()
    for _ in range(200):
        detokenizer.push(ids)
        sizes.add(len(detokenizer._context) + len(detokenizer._pending))
    assert sizes == {0}


@pytest.fixture(scope="module")
def metaspace() -> Tokenizer:
    """A SentencePiece-like vocabulary: words with a leading mark, bytes as a fallback."""
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    trained = Backend(models.BPE(unk_token=None, byte_fallback=True))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[], show_progress=False)
    trained.train_from_iterator(["hello world the quick brown fox jumps over it all"] * 4, trainer)
    vocab = trained.get_vocab()
    first = len(vocab)
    vocab.update({token: first + b for b, token in enumerate(byte_tokens)})
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
    return Tokenizer(backend)


@given(text=st.lists(st.sampled_from(["hello", " ", "world", "🙂", "é", "東", "fox "])).map("".join))
def test_other_vocabularies_decode_valid_text_exactly(metaspace: Tokenizer, text: str) -> None:
    ids = metaspace.encode(text)
    assert not metaspace.byte_level
    parts = _pushed(metaspace, ids, list(range(len(ids))))
    assert "".join(parts) == metaspace.decode(ids)
    assert "\ufffd" not in "".join(parts)


def test_other_vocabularies_do_not_wait_for_ever_on_invalid_bytes(metaspace: Tokenizer) -> None:
    bad = metaspace.token_to_id("<0xFF>")
    assert bad is not None
    detokenizer = IncrementalDetokenizer(metaspace)
    shown = "".join(detokenizer.push([bad]) for _ in range(40))
    assert shown.count("\ufffd") >= 32
    assert len(detokenizer._context) + len(detokenizer._pending) <= 16


def test_byte_level_is_recognised_inside_a_sequence() -> None:
    backend = build_backend()
    backend.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert Tokenizer(backend).byte_level
