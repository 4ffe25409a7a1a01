"""When kernels are launched early."""

from __future__ import annotations

import pytest
import torch

from paceline.ops.early import early_launches, launched_early


def test_only_while_something_is_captured() -> None:
    assert not launched_early()
    with pytest.raises(RuntimeError), early_launches():
        assert launched_early()
        with early_launches():
            assert launched_early()
        assert launched_early()
        raise RuntimeError
    assert not launched_early(), "also after a capture that failed"


def test_a_launch_says_so_where_it_pays_on_a_gpu_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from paceline.ops.triton import dependent

    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    monkeypatch.setattr(dependent, "is_hopper", lambda device: device == gpu)
    assert dependent.dependent_launch(gpu) == {"DEPENDENT": False}
    with early_launches():
        assert dependent.dependent_launch(gpu) == {"DEPENDENT": True, "launch_pdl": True}
        assert dependent.dependent_launch(gpu, pays=False) == {"DEPENDENT": False}
        assert dependent.dependent_launch(cpu) == {"DEPENDENT": False}
