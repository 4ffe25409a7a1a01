"""The command line as a whole: which commands there are, and how flags become options."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from paceline.cli import main, options
from paceline.errors import ConfigError


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
