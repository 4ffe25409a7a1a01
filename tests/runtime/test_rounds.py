"""Fixed-shape rounds: the same tokens as the generic step, whatever share of a round is empty.

Rounds are what CUDA graphs are captured from; here they run on the CPU as they stand.
"""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.cache import BlockPool, sharing
from paceline.config import EngineConfig
from paceline.engine.core import EngineCore
from paceline.engine.factory import make_core
from paceline.engine.messages import EngineRequest, SequenceOutput
from paceline.engine.planned import DraftLimits
from paceline.models.attention import KVCache
from paceline.models.config import Qwen3Config
from paceline.models.drafter_loader import load_drafter
from paceline.models.loader import load_model
from paceline.proving.drive import Round, RoundRecorder, runner_of
from paceline.proving.gates import same_rounds
from paceline.runtime import cuda_graph, graphs
from paceline.runtime.graphs import RoundSet
from paceline.runtime.plan import Span
from paceline.runtime.round import DecodeRound
from paceline.runtime.runner import Runner
from paceline.runtime.shapes import RoundShape
from paceline.sampling.params import SamplingParams
from paceline.speculation import costs
from paceline.speculation.capture_cache import CaptureCache
from paceline.speculation.counters import SpeculationCounters
from paceline.speculation.decision import Batch, Decision
from paceline.speculation.draft_reserve import DraftReserve
from paceline.speculation.draft_state import CaptureDraftState
from paceline.speculation.hedging import HedgeLimits, Hedger
from paceline.speculation.planner import Planner
from paceline.speculation.survival import Survival
from support.engines import GOLDEN, complete, golden_core, golden_prompts, tokens_of

NUM_BLOCKS = 96


def cache_for(config: Qwen3Config, chain_rows: int = 0) -> KVCache:
    """A cache with the scratch blocks rounds and hedge chains need behind those of the pool."""
    return KVCache.allocate(
        config.num_hidden_layers,
        NUM_BLOCKS + -(-chain_rows // 16) + 1,
        16,
        config.num_key_value_heads,
        config.head_dim,
        dtype=torch.float32,
        device="cpu",
    )


def round_core(
    drafter_name: str | None,
    lookahead: int,
    slots: int = 6,
    *,
    capture: bool = False,
    hedge: int = 0,
    synthetic_rate: float | None = None,
) -> EngineCore:
    """An engine over the golden model whose simple spans run as rounds, divided up as on a GPU: rounds of a
    few sizes, with empty places, beside a generic step for the rest. Up to ``hedge`` sequences have chains.
    """
    reference = make_core(EngineConfig(model=str(GOLDEN / "qwen3_tiny"), device="cpu", num_blocks=NUM_BLOCKS))
    model = load_model(GOLDEN / "qwen3_tiny", device="cpu", dtype="float32")
    drafter = None if drafter_name is None else load_drafter(GOLDEN / drafter_name, model)
    hedging = None
    if drafter is not None and hedge:
        hedging = HedgeLimits(hedge, (0, 1, 2), drafter.config.max_drafts, (3,))
    chain_rows = 0 if hedging is None else hedging.max_rows
    runner = Runner(
        model,
        cache_for(model.config, chain_rows),
        max_num_seqs=slots,
        max_model_len=reference.info.max_model_len,
        device=torch.device("cpu"),
        eos_token_ids=reference.info.eos_token_ids,
        drafter=drafter,
        num_drafts=0 if drafter is None else drafter.config.max_drafts,
        draft_cache=None if drafter is None else cache_for(drafter.config.layers, chain_rows),
        captures=torch.zeros(100, 16, 3 * 64) if capture else None,
        synthetic_rate=synthetic_rate,
        rounds="eager",
        hedging=hedging,
    )
    assert runner.rounds is not None
    runner.rounds.shapes.captured = True
    runner.passes = runner.make_passes(reference.info.max_model_len, 512)
    limits = (
        DraftLimits()
        if drafter is None
        else DraftLimits(drafter.config.max_drafts, drafter.config.block_size)
    )
    info = reference.info
    info.max_num_seqs = slots
    pool = BlockPool(NUM_BLOCKS, 16)
    state = None
    if capture:
        limits = replace(limits, block_rows=0)
        state = CaptureDraftState(
            DraftReserve(NUM_BLOCKS, 16),
            CaptureCache(80, 19),
            draft_block=16,
            max_positions=600,
            counters=SpeculationCounters(limits.num_drafts),
        )
    return EngineCore(
        runner,
        pool,
        info,
        max_num_batched_tokens=200 if hedge or slots > 6 else 48,
        lookahead=lookahead,
        drafting=limits,
        draft_state=state,
        hedger=None if hedging is None else Hedger(hedging),
    )


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and parameters of every kind a round takes."""
    rng = random.Random(3)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.9, "top_k": 40, "min_p": 0.02},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 0.9, "frequency_penalty": 0.5},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.0, "min_tokens": 4},
        {"temperature": 1.2, "logprobs": 20, "top_k": 100},
        {"temperature": 0.9, "min_p": 0.05, "repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"temperature": 0.0, "bad_words_ids": [[7], [5, 6], [9, 8, 7]], "logit_bias": {11: 3.0, 12: -5.0}},
        {"temperature": 0.8, "allowed_token_ids": list(range(40, 90)), "top_p": 0.9, "logprobs": 0},
    ]
    prompts = [[rng.randrange(3, 320) for _ in range(rng.randrange(1, 60))] for _ in range(12)]
    params = [
        SamplingParams(seed=i, max_tokens=3 + 5 * (i % 6), ignore_eos=True, **kinds[i % len(kinds)])
        for i in range(12)
    ]
    return prompts, params


@functools.cache
def expected() -> list[list[SequenceOutput]]:
    """What the generic step makes of the requests."""
    return complete(generic_core(), *requests())


def generic_core() -> EngineCore:
    """An engine without rounds."""
    return make_core(EngineConfig(model=str(GOLDEN / "qwen3_tiny"), device="cpu", enforce_eager=True))


def assert_reported(got: list[list[SequenceOutput]], want: list[list[SequenceOutput]] | None = None) -> None:
    """The log-probabilities are those of the generic step."""
    for ours, theirs in zip(got, want or expected(), strict=True):
        for a, b in zip(ours[0].logprobs or [], theirs[0].logprobs or [], strict=True):
            assert list(a) == list(b)
            assert [item.rank for item in a.values()] == [item.rank for item in b.values()]
            values = [item.logprob for item in b.values()]
            assert [item.logprob for item in a.values()] == pytest.approx(values, abs=1e-4)


def test_rounds_of_exact_sizes_change_no_token() -> None:
    as_on_a_cpu = make_core(EngineConfig(model=str(GOLDEN / "qwen3_tiny"), device="cpu"))
    got = complete(as_on_a_cpu, *requests())
    assert tokens_of(got) == tokens_of(expected())
    assert_reported(got)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(
    ("drafter", "capture"),
    [
        (None, False),
        ("dspark_tiny_b7", False),
        ("dspark_tiny_b7", True),
        ("dflash_tiny_b16", False),
        ("dflash_tiny_b16", True),
    ],
)
def test_rounds_change_no_token(drafter: str | None, capture: bool, lookahead: int) -> None:
    prompts, params = requests()
    want = tokens_of(expected())
    core = round_core(drafter, lookahead, capture=capture)
    assert isinstance(core.runner, Runner) and core.runner.rounds is not None
    ran: list[tuple[int, str]] = []
    by_rows: list[Span] = []
    run, run_rows = core.runner.rounds.run, core.runner._run_rows

    def counted(spans: Any, kind: Any, depth: Any) -> Any:
        ran.append((len(spans), kind))
        return run(spans, kind, depth)

    def counted_rows(spans: Any, max_context: int) -> Any:
        by_rows.extend(spans)
        return run_rows(spans, max_context)

    core.runner.rounds.run = counted  # type: ignore[method-assign, assignment]
    core.runner._run_rows = counted_rows  # type: ignore[method-assign]
    for _ in range(2):  # cold and warm
        got = complete(core, prompts, params)
        assert tokens_of(got) == want
        assert_reported(got)
    assert len(ran) > 20 and {1, 2, 3} <= {size for size, _ in ran}, "rounds of several sizes must have run"
    assert "full" in {kind for _, kind in ran}
    assert not any(span.drafts for span in by_rows), "all that decodes runs in rounds"
    if drafter is not None:
        assert core.scheduler.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("drafter", "capture", "hedge", "lookahead"),
    [
        ("dspark_tiny_b7", False, 6, 0),
        ("dspark_tiny_b7", True, 2, 1),
        ("dflash_tiny_b16", False, 3, 1),
        ("dflash_tiny_b16", True, 6, 0),
    ],
)
def test_hedged_rounds_change_no_token(drafter: str, capture: bool, hedge: int, lookahead: int) -> None:
    """For every kind of sampling, beside rows that are not hedged and beside prefill."""
    prompts, params = requests()
    texts = golden_prompts(len(prompts), seed=4)  # some of what the drafters were taught
    want = complete(generic_core(), texts, params)
    core = round_core(drafter, lookahead, capture=capture, hedge=hedge)
    assert isinstance(core.runner, Runner) and core.runner.rounds is not None
    won: dict[str, int] = {}
    run = core.runner.rounds.run

    def counted(spans: Any, kind: Any, depth: Any) -> Any:
        output, chains = run(spans, kind, depth)
        if output.won is not None:
            assert sum(count > 0 for count in chains) <= hedge
            won[kind] = won.get(kind, 0) + int(output.won[: len(spans)].sum())
        return output, chains

    core.runner.rounds.run = counted  # type: ignore[method-assign, assignment]
    for _ in range(2):
        got = complete(core, texts, params)
        assert tokens_of(got) == tokens_of(want)
        assert_reported(got, want)
    assert won["full"] > 0
    hedging = core.stats().hedging
    assert hedging is not None and hedging.num_wins and hedging.num_losses and hedging.num_tokens


@pytest.mark.parametrize("hedge", [0, 4])
def test_what_is_nobodys_stays_untouched(hedge: int) -> None:
    """A round bigger than its sequences writes only theirs and the scratch blocks."""
    core = round_core("dspark_tiny_b7", 0, hedge=hedge)
    runner = core.runner
    assert isinstance(runner, Runner) and runner.drafting is not None
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    complete(core, [[5, 6, 7, 8, 9], [7, 8, 9]], greedy)
    for cache in (runner.cache, runner.drafting.cache):
        used = {b for b in range(NUM_BLOCKS) if bool((cache.k[:, b] != 0).any())}
        assert len(used) <= 4, used
    assert int(runner.state.num_computed[runner.state.spare]) == 0


def test_captured_draft_state_is_the_same_in_rounds() -> None:
    """Cold, warm, by rounds and by generic steps: the same drafts, round for round."""
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = [list(range(5, 55)), list(range(60, 97)), [7, 8, 9] * 8]
    seen = []
    for generic in (True, False):
        core = round_core("dspark_tiny_b7", 0, capture=True)
        runner = core.runner
        assert isinstance(runner, Runner)
        if generic:
            runner.rounds = None
        for _ in range(2):
            recorder = RoundRecorder.on(core)
            for prompt in prompts:
                complete(core, [prompt], greedy)
            seen.append([Round(0, r.context, r.drafts, r.tokens) for r in recorder.rounds])
            core.runner = runner
        assert core.stats().draft_state["hits"] == 3
    assert len(seen[0]) > 10
    for other in seen[1:]:
        assert not same_rounds(seen[0], other)


@pytest.mark.parametrize("hedge", [0, 2])
@pytest.mark.parametrize("capture", [False, True])
def test_rounds_at_the_end_of_the_context(capture: bool, hedge: int) -> None:
    """Rows nobody asked for lie past the last position."""
    prompts = [[5 + i % 300 for i in range(500)], [9, 8, 7]]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    plain = make_core(EngineConfig(model=str(GOLDEN / "qwen3_tiny"), device="cpu", num_blocks=NUM_BLOCKS))
    assert plain.info.max_model_len == 512
    want = tokens_of(complete(plain, prompts, greedy))
    core = round_core("dflash_tiny_b16", 1, capture=capture, hedge=hedge)
    for _ in range(2):
        assert tokens_of(complete(core, prompts, greedy)) == want
    hedging = core.stats().hedging
    assert hedging is None or hedging.num_rounds > 0


def test_rows_that_fail_beside_a_round_fail_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round has moved its sequences on: only the rows beside it run again, one sequence at a time."""
    core = round_core("dspark_tiny_b7", 0)
    runner = core.runner
    assert isinstance(runner, Runner)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [[5, 6, 7], [8, 9, 10], [66, 9, 10], [5, 9]]
    want = tokens_of(complete(round_core("dspark_tiny_b7", 0), prompts, greedy))
    run_rows = runner._run_rows

    def fail(spans: Any, max_context: int) -> Any:
        if any(int(runner.state.tokens[span.slot, 0]) == 66 for span in spans):
            raise ValueError("planted")
        return run_rows(spans, max_context)

    monkeypatch.setattr(runner, "_run_rows", fail)
    monkeypatch.setattr(runner.rounds, "with_prompts", lambda spans, kinds, depth: kinds)

    def add(name: str, prompt: list[int]) -> None:
        core.add(EngineRequest(request_id=name, prompt_token_ids=prompt, params=greedy))

    add("first", prompts[0])
    outputs = []
    for _ in range(2):
        outputs += core.step()
    for name, prompt in zip(("second", "broken", "third"), prompts[1:], strict=True):
        add(name, prompt)
    while core.has_work:
        outputs += core.step()
    core.check()
    errors = {output.request_id: output.error for output in outputs if output.error}
    assert list(errors) == ["broken"] and "ValueError" in str(errors["broken"])
    for name, tokens in (("first", want[0]), ("second", want[1]), ("third", want[3])):
        assert [t for o in outputs if o.request_id == name for t in o.token_ids] == tokens


@pytest.mark.parametrize("hedge", [0, 2])
def test_rounds_are_captured_largest_then_smallest_first_and_when_needed(
    monkeypatch: pytest.MonkeyPatch, hedge: int
) -> None:
    seen: list[RoundShape] = []

    def capture(decode_round: DecodeRound, where: object) -> DecodeRound:
        seen.append(decode_round.shape)
        return decode_round

    monkeypatch.setattr(cuda_graph, "Captured", capture)
    monkeypatch.setattr(graphs, "CaptureStream", object)
    core = round_core("dspark_tiny_b7", 0, hedge=hedge)
    runner = runner_of(core)
    assert runner.rounds is not None
    monkeypatch.setattr(sharing, "MIN_SAVED_TOKENS", 5 * core.info.max_model_len)
    rounds = runner.rounds = RoundSet(
        runner.model,
        runner.cache,
        runner.state,
        runner.drafting,
        max_num_seqs=6,
        max_model_len=core.info.max_model_len,
        capture=True,
        hedging=runner.rounds.shapes.hedging,
    )
    everything = rounds.shapes.to_capture()
    rounds.capture_largest()
    assert all(shape.num_seqs == 6 and shape.num_drafts == 7 for shape in seen) and seen
    assert {shape.places for shape in seen} == {0, hedge}
    rounds.capture_first()
    first = [shape.num_seqs for shape in seen if shape.num_seqs < 6]
    assert first == sorted(first) and set(first) == {1, 2}
    assert {shape.num_seqs for shape in rounds.graphs.missing if not shape.packed} == {4, 6}
    before = len(seen)
    prompts = [[5 + i, 6, 7] for i in range(6)]
    complete(core, prompts, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    needed = [shape for shape in seen[before:] if not shape.packed]
    assert needed and all(shape.num_seqs == 6 and shape.kind == "greedy" for shape in needed)
    while runner.prepare():
        pass
    assert sorted(map(repr, seen)) == sorted(map(repr, everything)), "each shape once"


class Shallow(Planner):
    """Rows for some drafts only, now more and now fewer."""

    def __init__(self, survival: Survival) -> None:
        self.survival, self._round = survival, 0
        self.costs = costs.RoundCosts(
            [
                costs.Measured(costs.Round(1, count, propose), 64, 0.01)
                for count, propose in ((0, False), (0, True), (7, True))
            ],
            7,
        )

    def decide(self, batch: Batch) -> Decision:
        """Any depth; every fifth round without drafts."""
        self._round += 1
        few = dict.fromkeys(batch.slots, 1) if self._round % 3 == 0 else None  # some rows are nobody's
        return Decision((3, 5, 7, 3, 0)[self._round % 5], few, self._round % 7 > 0, "drafts pay")

    def committed(self, decision: Decision, *results: Any) -> None:
        """Only how likely drafts are is learnt."""
        slots, drafts, accepted, _, _, predicted = results
        self.survival.observe(slots, drafts, accepted, predicted)


@pytest.mark.parametrize(("capture", "lookahead"), [(False, 0), (True, 1)])
def test_packed_rounds_change_no_token(capture: bool, lookahead: int) -> None:
    """Rows for the likeliest drafts only, drawn greedily, at random and filtered, beside prefill and empty
    places; then all of that beside parameters that look at whole spans, which are cut short.
    """
    simple: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    ]
    params = [SamplingParams(**simple[i % 3], seed=i, max_tokens=20 + i, ignore_eos=True) for i in range(12)]
    texts = golden_prompts(len(params), seed=4)
    want = tokens_of(complete(generic_core(), texts, params))
    core = round_core("dspark_tiny_b7", lookahead, capture=capture, slots=12)
    runner = runner_of(core)
    assert runner.rounds is not None
    core.scheduler.planner = shallow = Shallow(Survival(12, 7))
    run, packed, uneven, verified = runner.rounds.run, 0, 0, 0

    def counted(spans: Any, kind: Any, depth: Any) -> Any:
        nonlocal packed, uneven, verified
        output, chains = run(spans, kind, depth)
        most = output.sampled.shape[1] - 1  # none where a plan has no depth, though drafts are in place
        chosen = [min(span.drafts, most) for span in spans]
        verified += sum(chosen if output.drafts is None else output.drafts[: len(spans)].tolist())
        assert kind != "full" or all(span.drafts <= depth for span in spans), "cut short, all alike"
        if output.drafts is not None:
            drafts = output.drafts[: len(spans)].tolist()
            packed += sum(drafts) < sum(span.drafts for span in spans)
            uneven += len(set(drafts)) > 1
        return output, chains

    runner.rounds.run = counted  # type: ignore[method-assign, assignment]
    for _ in range(2):
        assert tokens_of(complete(core, texts, params)) == want
    assert packed > 5 and uneven > 5
    if lookahead == 0:  # else some end while they are drafted for once more
        assert core.scheduler.speculation.num_draft_tokens == verified
    _, params = requests()
    want = tokens_of(complete(generic_core(), texts, params))
    assert tokens_of(complete(core, texts, params)) == want
    speculation = core.scheduler.speculation
    assert 0 < speculation.num_accepted_tokens < speculation.num_draft_tokens
    assert shallow.survival.slope > 0, "the drafter was taught what it says"
    assert runner.num_draft_failures == 0


def test_packed_rounds_that_are_not_captured_are_not_kept() -> None:
    """There are as many as numbers of rows."""
    core = golden_core("qwen3_tiny", drafter="dspark_tiny_b7", max_num_seqs=8)
    rounds = runner_of(core).rounds
    assert rounds is not None and not rounds.shapes.captured
    core.scheduler.planner = Shallow(Survival(8, 7))
    get, wanted = rounds.graphs.get, []

    def seen(shape: RoundShape, *, keep: bool = True) -> Any:
        wanted.append(shape)
        return get(shape, keep=keep)

    rounds.graphs.get = seen  # type: ignore[method-assign, assignment]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    complete(core, golden_prompts(6, seed=4), [params] * 6)
    packed = {shape for shape in wanted if shape.packed}
    assert packed and rounds.graphs._made.keys() == {*wanted} - packed


def test_rounds_know_whether_the_drafter_is_to_say_how_sure_it_is() -> None:
    rounds = runner_of(round_core("dspark_tiny_b7", 0, slots=24)).rounds
    assert rounds is not None
    made = [rounds.graphs.get(RoundShape.even(size, 7, True, "greedy"))[0] for size in (8, 16)]
    assert [each._predict for each in made] == [False, True]
