"""Sets of captured work: what is made, captured and kept, and when."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.runtime import cuda_graph
from paceline.runtime.cuda_graph import CapturedSet


class Recorded:
    """Makes work, and stands in for its capture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[int] = []
        self.captured: list[int] = []
        self.broken: set[int] = set()
        monkeypatch.setattr(cuda_graph, "Captured", self._capture)
        self.set = CapturedSet[int, Callable[[], int], int](
            self._make,
            object(),  # type: ignore[arg-type]
            [1, 2, 3, 4],
        )

    def _make(self, key: int) -> Callable[[], int]:
        self.made.append(key)
        return lambda: key

    def _capture(self, work: Callable[[], int], where: object) -> Callable[[], int]:
        assert where is self.set.where
        if work() in self.broken:
            raise RuntimeError("out of luck")
        self.captured.append(work())
        return lambda: -work()


def test_each_is_captured_once_in_order_or_when_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)
    captured = recorded.set
    work, run = captured.get(3)
    assert (work(), run()) == (3, -3) and captured.get(3) == (work, run)
    assert captured.missing == [4, 2, 1]
    assert captured.get(9)[1]() == -9, "one that nobody thought of before"
    assert [captured.prepare() for _ in range(4)] == [True, True, True, False]
    assert recorded.captured == recorded.made == [3, 9, 1, 2, 4]


def test_what_fails_is_tried_again_when_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)
    captured = recorded.set
    recorded.broken = {1, 2}
    with pytest.raises(RuntimeError):
        captured.prepare()
    with pytest.raises(RuntimeError):
        captured.get(2)
    assert captured.missing == [4, 3, 2], "what was not captured beforehand is left, what was wanted is not"
    recorded.broken = set()
    while captured.prepare():
        pass
    assert recorded.captured == [2, 3, 4] and captured.get(1)[1]() == -1


def test_what_is_not_captured_runs_as_it_is_and_need_not_be_kept() -> None:
    made: list[int] = []

    def make(key: int) -> Callable[[], int]:
        made.append(key)
        return lambda: key

    plain = CapturedSet[int, Callable[[], int], int](make, None, ())
    for keep in (False, True, False):
        work, run = plain.get(5, keep=keep)
        assert run is work and run() == 5
    assert made == [5, 5] and not plain.prepare()
