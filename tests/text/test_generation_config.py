"""Sampling defaults of a checkpoint."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from paceline.errors import CheckpointError, ConfigError
from paceline.text import GenerationDefaults, load_generation_defaults

QWEN3 = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}


def _write(folder: Path, **values: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_qwen3_defaults_are_read_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        defaults = load_generation_defaults(_write(tmp_path, **QWEN3))
    assert defaults.sampling() == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert defaults.eos_token_ids == (151645, 151643)
    assert "temperature=0.6, top_p=0.95, top_k=20" in caplog.text
    assert "--generation-config none" in caplog.text


@pytest.mark.parametrize("mode", ["none", "vllm"])
def test_ignored_but_for_the_end_of_sequence(
    tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    defaults = load_generation_defaults(_write(tmp_path, **QWEN3), mode)
    assert defaults == GenerationDefaults(eos_token_ids=(151645, 151643))
    assert not caplog.records


def test_no_file_no_defaults(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_generation_defaults(tmp_path) == GenerationDefaults()
    assert not caplog.records


def test_spellings(tmp_path: Path) -> None:
    defaults = load_generation_defaults(
        _write(tmp_path, eos_token_id=7, top_k=-1, max_new_tokens=99, repetition_penalty=1, min_p=None)
    )
    assert defaults.eos_token_ids == (7,)
    assert defaults.sampling() == {"top_k": 0, "max_tokens": 99, "repetition_penalty": 1}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", True),
        ("top_p", 1.5),
        ("top_k", 1.5),
        ("max_new_tokens", 0),
        ("eos_token_id", "x"),
        ("eos_token_id", [1, None]),
    ],
)
def test_bad_values_are_named(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=name):
        load_generation_defaults(_write(tmp_path, **{name: value}))


def test_unknown_mode(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'auto' or 'none'"):
        load_generation_defaults(tmp_path, "some/folder")
