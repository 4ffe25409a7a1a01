"""The collector is away while an engine starts, and as it was after it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from paceline.collector import collector_paused
from paceline.engine import factory
from paceline.errors import ConfigError
from support.engines import golden_core


class Knot:
    """Holds itself: only the collector takes it away."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_only_what_was_made_meanwhile_is_collected_and_only_on_demand() -> None:
    old = weakref.ref(Knot())
    with collector_paused():
        assert not gc.isenabled()
        new = weakref.ref(Knot())
        gc.collect()
        assert old() is not None and new() is None
    assert gc.isenabled() and gc.get_freeze_count() == 0
    gc.collect()
    assert old() is None


def test_it_may_be_nested() -> None:
    with collector_paused():
        with collector_paused():
            pass
        assert not gc.isenabled() and gc.get_freeze_count() > 0
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    gc.freeze()
    with collector_paused():
        pass
    assert not gc.isenabled() and gc.get_freeze_count() > 0


@pytest.mark.parametrize("fails", [False, True])
def test_it_is_away_while_an_engine_is_made(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def noted(*_: object) -> None:
        seen.append(gc.isenabled())
        if fails:
            raise ConfigError("enough")

    monkeypatch.setattr(factory, "_refuse_failing_drafter", noted)
    if fails:
        with pytest.raises(ConfigError):
            golden_core("qwen3_tiny")
    else:
        golden_core("qwen3_tiny")
    assert seen == [False] and gc.isenabled() and gc.get_freeze_count() == 0
