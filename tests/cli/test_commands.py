"""The command line as a whole: which commands there are, and how flags become options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from paceline.cli import main, options
from paceline.config import BUNDLED_DRAFTERS, EngineConfig
from paceline.errors import ConfigError
from paceline.server.options import ServeOptions
from paceline.speculation.config import SpeculativeConfig


def test_every_command_is_there_and_explains_itself() -> None:
    listing = CliRunner().invoke(main.app, ["--help"]).output
    for command in ("generate", "chat", "serve", "bench", "train-drafter"):
        assert f" {command} " in listing
        assert CliRunner().invoke(main.app, [command, "--help"]).exit_code == 0


@pytest.mark.parametrize("text", ["[1]", "5", '"dspark"', "{bad"])
def test_a_speculative_config_that_is_no_object_is_left_to_the_reader(text: str) -> None:
    given = {"speculative_config": text, "draft_state": "paged"}
    assert options._speculation(given) == text


def test_short_forms_join_the_config_and_must_not_repeat_it() -> None:
    given = {"speculative_config": '{"model": "a"}', "draft_window": 64, "draft_state": None}
    assert options._speculation(given) == {"model": "a", "draft_window": 64}
    with pytest.raises(ConfigError, match="draft_window is given both"):
        options._speculation({"speculative_config": '{"draft_window": 1}', "draft_window": 64})
    for nothing in ("{}", '{"method": null}'):
        with pytest.raises(ConfigError, match=r"\} switches drafting off, but --verify-planner is given"):
            options._speculation({"speculative_config": nothing, "verify_planner": "auto"})
    half = {"speculative_config": '{"hedge_positions": [0]}', "hedge": 4}
    assert options._speculation(half) == {"hedge_positions": [0], "hedge": 4}
    assert options._speculation({"speculative_config": "{}", "verify_planner": None}) == "{}"
    given = {"speculative_config": None, "hedge": 4, "hedge_positions": "0,2", "hedge_auto": True}
    config = EngineConfig.of(speculative_config=options._speculation(given)).speculation
    assert config is not None and (config.hedge, config.hedge_positions, config.hedge_auto) == (
        4,
        (0, 2),
        True,
    )
    with pytest.raises(ConfigError, match="--hedge-positions is '0;2'; give positions between commas"):
        options._speculation({"speculative_config": None, "hedge_positions": "0;2"})


@pytest.mark.parametrize(
    "fields",
    [
        {"num_speculative_tokens": 3},
        {"draft_window": 64},
        {"method": "dflash"},
        *({field.name: field.default} for field in msgspec.structs.fields(SpeculativeConfig)[1:]),
    ],
    ids=str,
)
def test_a_config_without_a_drafter_takes_the_bundled_one_or_is_refused(fields: dict[str, object]) -> None:
    """It must not switch drafting off: only an empty config does."""
    speculation = EngineConfig.of(speculative_config=fields).speculation
    assert speculation is not None
    assert speculation.model == str(BUNDLED_DRAFTERS[str(fields.get("method", "dspark"))])
    with pytest.raises(ConfigError, match="names no drafter, and org/other brings none"):
        _ = EngineConfig.of(model="org/other", speculative_config=fields).speculation
    for nothing in ({}, "{}", {"method": None}, '{"method": null}'):
        assert EngineConfig.of(speculative_config=nothing).speculation is None
    assert EngineConfig.of(model="org/other").speculation is None


def given_sampling(*flags: str) -> dict[str, Any]:
    """What a command receives of the sampling flags."""
    seen: list[dict[str, Any]] = []

    @options.sampling_options
    def command(*, sampling: dict[str, Any]) -> None:
        seen.append(sampling)

    app = typer.Typer()
    app.command()(command)
    assert CliRunner().invoke(app, flags).exit_code == 0
    return seen[0]


@pytest.mark.parametrize(
    ("flag", "field"),
    [
        *(
            (f"--{name.replace('_', '-')}", name)
            for name in options.SAMPLING_HELP
            if name not in ("stop", "ignore_eos")
        ),
        ("--sampling-seed", "seed"),
    ],
)
def test_a_zero_on_the_command_line_is_given(flag: str, field: str) -> None:
    """``--temperature 0`` asks for greedy decoding; it must not mean the checkpoint's temperature."""
    assert given_sampling(flag, "0")[field] == 0


def test_sampling_flags_that_are_left_out_leave_the_defaults() -> None:
    assert given_sampling() in ({}, {"ignore_eos": False})
    assert given_sampling("--ignore-eos", "--stop", "a", "--stop", "b") == {
        "ignore_eos": True,
        "stop": ["a", "b"],
    }


@pytest.mark.parametrize(("name", "value"), [("threads", 10**6), ("max_num_seqs", 10**8)])
def test_sizes_that_would_crash_libraries_are_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}; it must be at most"):
        EngineConfig.of(**{name: value})


def test_a_key_for_hashes_that_nobody_makes_is_refused() -> None:
    key = "0123456789abcdef"
    assert EngineConfig.of(prefix_hash_key=key).prefix_hash_key == key
    with pytest.raises(ConfigError, match="enable_prefix_caching is off: nothing is hashed") as caught:
        EngineConfig.of(prefix_hash_key=key, enable_prefix_caching=False)
    assert key not in str(caught.value)


def test_keys_of_serve_reach_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServeOptions] = []
    monkeypatch.setattr("paceline.server.run.serve_forever", lambda engine, frontend, own: seen.append(own))
    monkeypatch.setenv("PACELINE_API_KEY", "c")
    (tmp_path / "keys").write_text("b\n")
    flags = ["serve", "--api-key", "a", "--api-key-file", str(tmp_path / "keys")]
    assert CliRunner().invoke(main.app, flags).exit_code == 0
    assert seen[0].api_keys == ("a", "b", "c")


@pytest.mark.parametrize(("flag", "value"), [("--taps", "1.5"), ("--taps", "1,x"), ("--temperatures", "0;1")])
def test_lists_of_train_drafter_that_are_none_are_refused(flag: str, value: str) -> None:
    words = ["train-drafter", "--target", "t", "--data", "d", "--out", "o", flag, value]
    error = CliRunner().invoke(main.app, words).exception
    assert isinstance(error, ConfigError) and f"{flag[2:]} is {value!r}" in str(error)
