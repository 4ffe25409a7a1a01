"""How many kernels a captured round launches, each of which costs a GPU a microsecond or two beside its work:
counted on a CPU, where an op that has a kernel of its own counts as that, whatever its reference does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline import ops
from paceline.engine.core import EngineCore
from paceline.models import drafter as drafters
from paceline.ops.persistent.program import Program
from paceline.proving.drive import runner_of
from paceline.runtime import round as rounds
from paceline.runtime.few_rows import FewRows
from paceline.runtime.graphs import RoundSet
from paceline.runtime.round import DecodeRound
from paceline.runtime.shapes import RoundShape
from paceline.sampling.fixed import sample_fixed
from paceline.sampling.state import FixedKind
from support.engines import golden_core

KERNELS = {"draft_best": 2}
"""Launches of the ops that have several."""

FREE = {
    "alias",
    "as_strided",
    "detach",
    "empty",
    "empty_like",
    "expand",
    "lift_fresh",
    "new_empty",
    "permute",
}
FREE |= {"select", "slice", "split", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "view_as"}
"""Torch ops that launch nothing."""


class Launches(TorchDispatchMode):
    """Counts launches by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self._inside and name not in FREE:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    def one(self, name: str, launches: int, function: Any) -> Any:
        """The function, as so many launches."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self.counts[name] += launches
            self._inside = True
            try:
                return function(*args, **kwargs)
            finally:
                self._inside = False

        return run


@contextmanager
def counted() -> Iterator[Launches]:
    """What is launched until it ends."""
    launches = Launches()
    with pytest.MonkeyPatch.context() as patch, launches:
        for name in ops.__all__:
            found = getattr(ops, name)
            if not isinstance(found, type):
                patch.setattr(ops, name, launches.one(name, KERNELS.get(name, 1), found))
        patch.setattr(Program, "__call__", launches.one("pass", 1, Program.__call__))
        patch.setattr(rounds, "sample_fixed", launches.one("sampling", 2, sample_fixed))
        yield launches


def decode_round(core: EngineCore, num_drafts: int, kind: FixedKind) -> DecodeRound:
    """A round of one sequence."""
    runner = runner_of(core)
    assert isinstance(runner.rounds, RoundSet)
    return runner.rounds.graphs.get(RoundShape.even(1, num_drafts, num_drafts > 0, kind))[0]


@torch.inference_mode()
def launches_of(core: EngineCore, num_drafts: int, kind: FixedKind = "greedy") -> Counter[str]:
    """Launches of a round that was made before, as a graph holds them."""
    run = decode_round(core, num_drafts, kind)
    run()
    with counted() as launches:
        run()
    return launches.counts


@pytest.fixture(autouse=True)
def one_kernel_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FewRows, "runs_on", staticmethod(lambda model, block_size: True))


def test_a_plain_round() -> None:
    counts = launches_of(golden_core("qwen3_tiny"), 0)
    assert counts["pass"] == 1 and counts.total() == 7


@pytest.mark.parametrize("kind", ["greedy", "filtered"])
@pytest.mark.parametrize("synthetic", [None, 3.0])
def test_a_round_of_dspark(monkeypatch: pytest.MonkeyPatch, synthetic: float | None, kind: FixedKind) -> None:
    """Noise costs no launch; the filters of the second kind are counted as the sampling without."""
    monkeypatch.setattr(drafters, "WHOLE_VOCABULARY", 1)
    config = {"synthetic_accept_length": synthetic}
    core = golden_core("qwen3_tiny", drafter="dspark_tiny_b7", speculative_config=config)
    stage = runner_of(core).drafting
    assert stage is not None and stage.drafter.restrict(16)
    counts = launches_of(core, 7, kind)
    assert counts["pass"] == 2 and counts.total() == 14 + (synthetic is not None)


def test_a_round_of_dflash() -> None:
    counts = launches_of(golden_core("qwen3_tiny", drafter="dflash_tiny_b7_deepspec"), 7)
    assert counts["pass"] == 2 and counts.total() == 14
