"""The command line as a whole: which commands there are, and how flags become options."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from paceline.cli import main, options
from paceline.config import BUNDLED_DRAFTERS, EngineConfig
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


@pytest.mark.parametrize(
    "fields", [{"num_speculative_tokens": 3}, {"draft_window": 64}, {"method": "dflash"}]
)
def test_a_config_without_a_drafter_takes_the_bundled_one_or_is_refused(fields: dict[str, object]) -> None:
    """It must not switch drafting off: only an empty config does."""
    speculation = EngineConfig.of(speculative_config=fields).speculation
    assert speculation is not None
    assert speculation.model == str(BUNDLED_DRAFTERS[str(fields.get("method", "dspark"))])
    with pytest.raises(ConfigError, match="names no drafter, and org/other brings none"):
        _ = EngineConfig.of(model="org/other", speculative_config=fields).speculation
    assert EngineConfig.of(speculative_config={}).speculation is None
    assert EngineConfig.of(model="org/other").speculation is None
