"""L4: planted mistakes. Each must be caught by a gate; the unharmed engine passes them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.cache import BlockPool, SequenceBlocks
from paceline.engine.core import EngineCore
from paceline.errors import InvariantError
from paceline.models.drafter import Drafter
from paceline.models.drafter_config import DrafterConfig
from paceline.models.drafter_loader import load_drafter
from paceline.models.rope import RopeTable
from paceline.ops import RowLayout
from paceline.proving.drive import Round, RoundRecorder
from paceline.proving.gates import (
    Violation,
    accepted_as_coupled,
    drafts_as_recomputed,
    same_rounds,
    same_tokens,
    second_turns,
)
from paceline.proving.redraft import redraft
from paceline.runtime.acceptance import count_accepted
from paceline.runtime.captures import CaptureStore
from paceline.runtime.drafting import DraftStage
from paceline.runtime.plan import Restore
from paceline.sampling.noise import row_keys
from paceline.sampling.params import SamplingParams
from support.engines import (
    complete,
    drafter_of,
    golden_cases,
    golden_core,
    golden_meta,
    golden_prompts,
    tokens_of,
)

DRAFTER = "dspark_tiny_b7"
PROMPTS = golden_prompts(8, seed=6)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def spec_core(**options: Any) -> EngineCore:
    return golden_core("qwen3_tiny", drafter=DRAFTER, **options)


# ---------------------------------------------------------------------- the gates, as one runs them


def gate_tokens() -> list[Violation]:
    """Greedy and sampled output, cold and cached."""
    violations = []
    for params in (GREEDY, SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)):
        expected = tokens_of(complete(golden_core("qwen3_tiny"), PROMPTS, params))
        core = spec_core()
        for _ in range(2):
            violations += same_tokens(expected, tokens_of(complete(core, PROMPTS, params)))
    return violations


def gate_trace() -> list[Violation]:
    """The rounds of an independent reference."""
    core = spec_core()
    recorder = RoundRecorder.on(core)
    trace = golden_meta(DRAFTER)["cases"][3]["trace"]
    prompt = golden_cases(DRAFTER)[3]["input_ids"].tolist()
    complete(core, [prompt], greedy(len(trace) * 8 + 8))
    expected = [
        Round(0, [0] * (t["start"] + 1), t["drafts"], [*t["drafts"][: t["accepted"]], t["next"]])
        for t in trace
    ]
    return same_rounds(expected, recorder.rounds)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def gate_drafts(draft_state: str = "paged") -> list[Violation]:
    """Drafts against those made from the whole text, cold and cached."""
    core = spec_core(speculative_config={"draft_state": draft_state})
    recorder = RoundRecorder.on(core)
    for _ in range(2):
        complete(core, PROMPTS, GREEDY)
    return drafts_as_recomputed(redraft(drafter_of(core), recorder.rounds))


def gate_coupling() -> list[Violation]:
    """Drafts at temperature 1 stand as often as they should."""
    core = spec_core(max_num_seqs=40)
    recorder = RoundRecorder.on(core)
    prompts = golden_prompts(36, seed=7)
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=32, ignore_eos=True) for i in range(len(prompts))
    ]
    complete(core, prompts, params)
    return accepted_as_coupled(redraft(drafter_of(core), recorder.rounds))


def gate_turns() -> list[Violation]:
    """Conversations around a block border."""
    prompt = golden_cases("qwen3_tiny")[4]["input_ids"].tolist()
    conversations = [([20 + i, *prompt], greedy(14 + i - len(prompt) + 32)) for i in range(-3, 4)]
    probe = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=20)
    return second_turns(spec_core(), spec_core(), conversations, [46, 151, 298], probe)


GATES: tuple[Callable[[], list[Violation]], ...] = (
    gate_tokens,
    gate_trace,
    gate_drafts,
    gate_coupling,
    gate_turns,
)


@pytest.mark.parametrize("gate", GATES)
def test_the_unharmed_engine_passes(gate: Callable[[], list[Violation]]) -> None:
    assert not gate()


# ---------------------------------------------------------------------- mistakes in the cache


def register_the_bonus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block counts as full when its last token is known, forwarded or not."""
    monkeypatch.setattr(
        SequenceBlocks, "_num_full", lambda self: (self.computed + 1) // self._pool.block_size
    )


def test_a_registered_bonus_is_refused_by_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    register_the_bonus(monkeypatch)
    with pytest.raises(InvariantError):
        gate_turns()


def test_a_registered_bonus_shows_in_second_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a pool that believes what it is told."""
    register_the_bonus(monkeypatch)
    register = BlockPool.register
    monkeypatch.setattr(BlockPool, "check_writable", lambda self, ids: None)
    monkeypatch.setattr(
        BlockPool,
        "register",
        lambda self, block, lineage, computed: register(self, block, lineage, computed + 1),
    )
    assert any(item.gate == "second turn" for item in gate_turns())


# ---------------------------------------------------------------------- mistakes in the drafter


def with_config(change: Callable[[DrafterConfig], DrafterConfig]) -> Callable[..., Drafter]:
    """A loader whose drafters have the right weights under another config."""
    load = load_drafter

    def loader(*args: Any, **kwargs: Any) -> Drafter:
        drafter = load(*args, **kwargs)
        changed = Drafter(change(drafter.config), drafter.target)
        changed.load_state_dict(drafter.state_dict())
        changed.freeze()
        return changed

    return loader


def shift_taps(shift: int) -> Callable[[DrafterConfig], DrafterConfig]:
    return lambda config: replace(config, tap_layer_ids=tuple(t + shift for t in config.tap_layer_ids))


def other_rope(config: DrafterConfig) -> DrafterConfig:
    return replace(config, layers=replace(config.layers, rope=replace(config.layers.rope, theta=1e4)))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda config: replace(config, anchor_first=not config.anchor_first), id="layout"),
        pytest.param(shift_taps(1), id="taps + 1"),
        pytest.param(shift_taps(-1), id="taps - 1"),
        pytest.param(other_rope, id="rope base"),
    ],
)
def test_a_misread_checkpoint_drafts_other_rounds(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[DrafterConfig], DrafterConfig]
) -> None:
    monkeypatch.setattr("paceline.runtime.build.load_drafter", with_config(change))
    assert gate_trace()


def test_a_rope_base_on_one_side_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's rotation is off, the recomputation's is not."""
    core = spec_core()
    drafter = drafter_of(core)
    recorder = RoundRecorder.on(core)
    right = drafter.rope
    shape = drafter.config.layers
    drafter.rope = RopeTable(replace(shape.rope, theta=1e4), shape.head_dim, 512, torch.device("cpu"))
    complete(core, PROMPTS, GREEDY)
    drafter.rope = right
    assert drafts_as_recomputed(redraft(drafter, recorder.rounds))


# ---------------------------------------------------------------------- mistakes in the draft state


@pytest.mark.parametrize("shift", [-1, 1])
def test_draft_state_in_shifted_rows(monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    write = DraftStage.write_context

    def shifted(self: DraftStage, taps: Tensor, layout: RowLayout) -> None:
        write(self, taps.roll(shift, dims=0), layout)

    monkeypatch.setattr(DraftStage, "write_context", shifted)
    assert gate_drafts()
    assert gate_trace()
    assert not gate_tokens(), "a poor drafter must never change the output"


def test_a_restore_that_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CaptureStore, "restored", lambda self, restores: iter(()))
    assert gate_drafts("capture")


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_restore_of_the_neighbouring_slot(monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    index = CaptureStore._restore_index

    def shifted(self: CaptureStore, restores: list[Restore]) -> np.ndarray[Any, Any]:
        found = index(self, restores)
        found[0] = (found[0] + shift).clip(min=1)
        return found

    monkeypatch.setattr(CaptureStore, "_restore_index", shifted)
    assert gate_drafts("capture")


def test_captured_rows_as_they_are_pass() -> None:
    assert not gate_drafts("capture")


# ---------------------------------------------------------------------- mistakes in acceptance and noise


def test_one_draft_too_many_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    count = count_accepted

    def generous(sampled: Tensor, drafts: Tensor, num_drafts: Tensor) -> Tensor:
        return torch.minimum(count(sampled, drafts, num_drafts) + 1, num_drafts)

    for module in ("runner", "round"):
        monkeypatch.setattr(f"paceline.runtime.{module}.count_accepted", generous)
    assert gate_tokens()


def test_one_draft_too_few_accepted_costs_speed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    count = count_accepted

    def stingy(sampled: Tensor, drafts: Tensor, num_drafts: Tensor) -> Tensor:
        return (count(sampled, drafts, num_drafts) - 1).clamp(min=0)

    for module in ("runner", "round"):
        monkeypatch.setattr(f"paceline.runtime.{module}.count_accepted", stingy)
    assert not gate_tokens()
    assert gate_trace()


@pytest.mark.parametrize("shift", [-1, 1])
def test_draft_noise_of_another_position(monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    monkeypatch.setattr(
        "paceline.ops.drafts.row_keys", lambda seeds, positions: row_keys(seeds, positions + shift)
    )
    violations = gate_coupling()
    assert [item.gate for item in violations] == ["coupling"]
    assert not gate_tokens()


def test_sampling_noise_keyed_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise of the row's place in the step, not of the position in the sequence."""

    def by_row(seeds: Tensor, positions: Tensor) -> Tensor:
        return row_keys(seeds, torch.arange(len(positions)))

    monkeypatch.setattr("paceline.sampling.sampler.row_keys", by_row)
    assert gate_tokens()


def test_penalties_that_do_not_see_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a span penalised by the tokens before the span alone."""
    from paceline.sampling import processors

    right = processors._penalise_rows

    def short_sighted(logits: Tensor, rows: Any, state: Any) -> None:
        first = torch.zeros_like(rows.positions)
        for slot in rows.slots.unique():
            own = rows.slots == slot
            first[own] = rows.positions[own].min()
        right(logits, replace(rows, positions=first), state)

    monkeypatch.setattr(processors, "_penalise_rows", short_sighted)
    params = SamplingParams(temperature=0.0, frequency_penalty=0.4, max_tokens=24, ignore_eos=True)
    expected = tokens_of(complete(golden_core("qwen3_tiny"), PROMPTS, params))
    assert same_tokens(expected, tokens_of(complete(spec_core(), PROMPTS, params)))
