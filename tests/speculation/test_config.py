"""Numbers in a speculative config: what lies outside their range is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.speculation.config import SpeculativeConfig

CAPTURE = {"draft_state": "capture"}


@pytest.mark.parametrize("method", ["eagle3", "ngram", 5])
def test_another_method_is_refused_with_those_there_are(method: Any) -> None:
    with pytest.raises(ConfigError, match=f"method is {method!r}; .*'dspark' and 'dflash'"):
        SpeculativeConfig.of({"method": method})


@pytest.mark.parametrize(
    ("name", "value", "others"),
    [
        ("num_speculative_tokens", 0, {}),
        ("num_speculative_tokens", 2**31, {}),
        ("draft_window", 0, {}),
        ("draft_window", 2**63 - 1, {}),
        ("draft_capture_mb", -1.0, CAPTURE),
        ("draft_capture_mb", math.nan, CAPTURE),
        ("draft_capture_mb", math.inf, CAPTURE),
        ("synthetic_accept_length", 0.5, {}),
        ("synthetic_accept_length", math.nan, {}),
        ("hedge", -1, {}),
        ("markov_candidates", 12, {}),
        ("markov_candidates", 258, {}),
        ("markov_candidates", 8192, {}),
    ],
)
def test_numbers_out_of_range_are_refused(name: str, value: float, others: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is {value}"):
        SpeculativeConfig.of({name: value, **others})


@pytest.mark.parametrize(
    ("name", "value", "others"),
    [("num_speculative_tokens", 1, {}), ("draft_window", 2**31 - 1, {}), ("draft_capture_mb", 0.0, CAPTURE)],
)
def test_the_ends_of_ranges_are_not(name: str, value: float, others: dict[str, Any]) -> None:
    config = SpeculativeConfig.of({name: value, **others})
    assert config is not None and getattr(config, name) == value
