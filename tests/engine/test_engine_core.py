"""The engine loop over a simulated device: every life a request can have, with and without lookahead."""

from __future__ import annotations

import itertools
import logging
import random
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.cache import BlockPool
from paceline.engine.core import EngineCore
from paceline.engine.messages import EngineRequest, SequenceOutput
from paceline.errors import ContextLengthError, RequestError
from paceline.runtime.plan import StepPlan
from paceline.sampling.params import SamplingParams
from paceline.sampling.seeds import sequence_seed
from support.info import engine_info
from support.simulated_device import SimulatedDevice, expected_output

VOCAB = 97


def make_core(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    slots: int = 8,
    budget: int = 16,
    lookahead: int = 0,
    caching: bool = True,
    device: SimulatedDevice | None = None,
) -> tuple[EngineCore, SimulatedDevice]:
    device = device or SimulatedDevice(block_size, VOCAB)
    pool = BlockPool(num_blocks, block_size, enable_caching=caching, hash_key=b"test" * 4)
    info = engine_info(vocab_size=VOCAB, max_num_seqs=slots, block_size=block_size, num_blocks=num_blocks)
    return EngineCore(device, pool, info, max_num_batched_tokens=budget, lookahead=lookahead), device


def request(
    name: str, prompt: list[int], max_tokens: int = 8, priority: int = 0, **params: object
) -> EngineRequest:
    fields = {"ignore_eos": True, "seed": 7, **params}
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=max_tokens, **fields),  # type: ignore[arg-type]
        priority=priority,
    )


class Collected:
    """Everything an engine put out."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.reasons: dict[tuple[str, int], str] = {}
        self.cached: dict[str, int] = {}

    def take(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            key = (output.request_id, output.index)
            assert key not in self.reasons, f"output after the end of {key}"
            self.tokens[key] += output.token_ids
            self.cached.setdefault(output.request_id, output.num_cached_tokens)
            if output.finish_reason is not None:
                self.reasons[key] = output.finish_reason


def run(core: EngineCore, collected: Collected | None = None, limit: int = 5000) -> Collected:
    collected = collected or Collected()
    for _ in range(limit):
        if not core.has_work:
            assert core.pool.num_free == core.pool.num_blocks
            return collected
        collected.take(core.step())
        core.check()
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize("lookahead", [0, 1])
def test_one_request_runs_to_its_limit(lookahead: int) -> None:
    core, _ = make_core(lookahead=lookahead)
    core.add(request("a", [5, 6, 7], max_tokens=9))
    out = run(core)
    assert out.tokens["a", 0] == expected_output([5, 6, 7], sequence_seed(7, 0), 9, VOCAB)
    assert out.reasons["a", 0] == "length"


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_stop_token_ends_it_and_nothing_follows(lookahead: int) -> None:
    want = expected_output([5, 6, 7], sequence_seed(7, 0), 30, VOCAB)
    stop = want[6]
    first = want.index(stop)
    core, device = make_core(lookahead=lookahead)
    core.add(request("a", [5, 6, 7], max_tokens=30, stop_token_ids=[stop]))
    out = run(core)
    assert out.tokens["a", 0] == want[: first + 1]
    assert out.reasons["a", 0] == "stop"
    # With lookahead one more row may have run on the device; it must not have become anybody's.
    assert len(device.plans) <= first + 1 + lookahead + 1


@pytest.mark.parametrize("lookahead", [0, 1])
def test_min_tokens_outlives_a_stop_token(lookahead: int) -> None:
    want = expected_output([5, 6, 7], sequence_seed(7, 0), 30, VOCAB)
    core, _ = make_core(lookahead=lookahead)
    core.add(request("a", [5, 6, 7], max_tokens=30, stop_token_ids=[want[2]], min_tokens=5))
    out = run(core)
    later = [i for i, token in enumerate(want) if token == want[2] and i >= 5]
    assert out.tokens["a", 0] == want[: later[0] + 1 if later else 30]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_prefill_chunks_and_decodes_share_steps(lookahead: int) -> None:
    core, device = make_core(budget=8, lookahead=lookahead)
    core.add(request("chat", [1, 2], max_tokens=12))
    collected = Collected()
    for _ in range(3):
        collected.take(core.step())
    prompt = list(range(10, 50))
    core.add(request("long", prompt, max_tokens=3))
    run(core, collected)
    mixed = [p for p in device.plans if len(p.spans) == 2 and {s.sample for s in p.spans} == {True, False}]
    assert mixed, "no step mixed a decode row with a prefill chunk"
    assert all(p.num_rows <= 8 for p in device.plans)
    assert collected.tokens["long", 0] == expected_output(prompt, sequence_seed(7, 0), 3, VOCAB)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_n_samples_share_the_prompts_blocks(caching: bool, lookahead: int) -> None:
    core, device = make_core(lookahead=lookahead, caching=caching)
    prompt = list(range(1, 22))
    core.add(request("a", prompt, max_tokens=6, n=4))
    out = run(core)
    for index in range(4):
        assert out.tokens["a", index] == expected_output(prompt, sequence_seed(7, index), 6, VOCAB)
    assert len({tuple(out.tokens["a", i]) for i in range(4)}) == 4
    prompt_rows = sum(s.rows for p in device.plans for s in p.spans) - 4 * 5
    assert prompt_rows == 21 + 3 * 1, "the siblings must forward only the last prompt row"


def test_a_prefix_hit_skips_full_blocks_only() -> None:
    core, _ = make_core(budget=64)
    shared = list(range(1, 17))
    core.add(request("a", shared, max_tokens=2))
    run(core)
    for name, prompt, cached in [
        ("same", shared, 12),  # the whole prompt is cached; one row must be forwarded
        ("longer", [*shared, 50], 16),
        ("shorter", shared[:9], 8),
        ("other", [9, 9, 9, 9, 9], 0),
    ]:
        core.add(request(name, prompt, max_tokens=2))
        assert run(core).cached[name] == cached, name


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("budget", [16, 64])
def test_a_prefix_that_many_bring_at_once_is_computed_once(budget: int, lookahead: int) -> None:
    """Whoever comes second waits for the first one's blocks, chunk by chunk, and goes its own way where they
    part; a stranger behind them does not wait.
    """
    core, device = make_core(num_blocks=256, budget=budget, lookahead=lookahead)
    shared = [i % 90 for i in range(40)]
    prompts = {f"r{i}": [*shared, 50 + i, 51 + i] for i in range(6)}
    prompts["half"] = [*shared[:20], 91, 92, 93, 94, 95]
    for name, prompt in prompts.items():
        core.add(request(name, prompt, max_tokens=3))
    prompts["stranger"] = [95, 94]
    core.add(request("stranger", prompts["stranger"], max_tokens=3))
    out = run(core)
    for name, prompt in prompts.items():
        assert out.tokens[name, 0] == expected_output(prompt, sequence_seed(7, 0), 3, VOCAB)
    assert [out.cached[name] for name in prompts] == [0, 40, 40, 40, 40, 40, 20, 0]
    first = device.plans[0].spans
    assert len(first) == 2 if budget == 64 else len(first) == 1  # the first, and who shares nothing
    prefill = sum(span.rows for plan in device.plans for span in plan.spans) - 8 * 2
    assert prefill == 42 + 5 * 2 + 5 + 2


def test_who_shares_a_prefix_stands_side_by_side() -> None:
    """Those that share most come first, strangers last; the plan says how much (the device checks it)."""
    core, device = make_core(num_blocks=256, budget=128)
    prefixes = [[10 * family + i % 9 for i in range(16 + 8 * family)] for family in range(2)]
    prompts = [[*prefixes[i % 2], 50 + i] for i in range(6)]
    for i, prompt in enumerate([[95, 94], *prompts]):
        core.add(request(f"r{i}", prompt, max_tokens=6))
    run(core)
    best = max(device.plans, key=lambda plan: sum(span.common for span in plan.spans))
    assert [(span.group, span.common) for span in best.spans] == [(1, 24)] * 3 + [(2, 16)] * 3 + [(0, 0)]


def test_prompts_that_begin_stand_last() -> None:
    """Behind those that decode, go on, or have a cached prefix, wherever they stood in the queue. (The device
    checks every plan, those with preempted sequences too.)
    """
    core, device = make_core(num_blocks=256, budget=64)
    shared = [i % 90 for i in range(16)]
    core.add(request("first", [*shared, 91], max_tokens=3))
    run(core)
    device.plans.clear()
    core.add(request("decoding", [95, 94], max_tokens=9))
    core.step()
    for name, prompt in (
        ("new", [80, 81, 82]),
        ("hit", [*shared, 92]),
        ("long", [70 + i % 9 for i in range(90)]),
    ):
        core.add(request(name, prompt, max_tokens=3))
    run(core)
    flags = [[(span.rows, span.fresh) for span in plan.spans] for plan in device.plans[:3]]
    assert flags == [
        [(2, True)],
        [(1, False), (1, False), (3, True), (59, True)],
        [*[(1, False)] * 3, (31, False)],
    ]


def test_nobody_waits_for_a_prefix_that_will_not_be_shared() -> None:
    """Without a cache, for a request that needs every row itself, and once the one waited for is gone."""
    shared = [i % 90 for i in range(40)]
    core, device = make_core(budget=128, caching=False)
    for name in "ab":
        core.add(request(name, shared, max_tokens=1))
    run(core)
    assert [len(plan.spans) for plan in device.plans] == [2]

    core, device = make_core(budget=128)
    core.add(request("a", shared, max_tokens=1))
    core.add(request("b", shared, max_tokens=1, prompt_logprobs=1))
    core.step()
    assert [len(plan.spans) for plan in device.plans] == [2]

    core, device = make_core(budget=16)
    for name in "ab":
        core.add(request(name, shared, max_tokens=1))
    core.step()
    core.abort(["a"])
    assert run(core).cached["b"] == 16, "what was computed stays"


def test_nobody_waits_for_a_block_that_is_computed_a_second_time() -> None:
    """Requests that need every row themselves keep coming; one who waited for their first block starts when
    the first of them has computed it.
    """
    shared = list(range(1, 31))
    core, _ = make_core(num_blocks=512, budget=200, lookahead=1)
    core.add(request("first", shared, max_tokens=1, prompt_logprobs=0))
    out = Collected()
    out.take(core.step())
    core.add(request("waits", shared, max_tokens=1))
    for i in range(20):
        core.add(request(f"r{i}", shared, max_tokens=1, prompt_logprobs=0))
        out.take(core.step())
        if ("waits", 0) in out.reasons:
            break
    assert i <= 4 and out.cached["waits"] == 28
    run(core, out)


def test_first_come_first_served_and_priority() -> None:
    core, device = make_core(slots=1)
    core.add(request("first", [1, 2], max_tokens=2))
    core.add(request("second", [3, 4], max_tokens=2))
    core.add(request("urgent", [5, 6], max_tokens=2, priority=-1))
    order: list[str] = []
    while core.has_work:
        order += [o.request_id for o in core.step() if o.finish_reason]
    assert order == ["urgent", "first", "second"]
    assert device.clock_s == 6.0


def test_nobody_starves_behind_a_long_prompt() -> None:
    """A decode gets its row in every step while a prompt of 40 chunks is prefilled beside it."""
    core, device = make_core(num_blocks=128, budget=9, device=SimulatedDevice(4, VOCAB, row_s=0.1))
    core.add(request("chat", [1, 2], max_tokens=40))
    core.step()
    core.add(request("long", [i % 90 for i in range(320)], max_tokens=1))
    times = []
    while core.has_work:
        if any(o.request_id == "chat" for o in core.step()):
            times.append(device.clock_s)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert max(gaps) <= 1.0 + 9 * 0.1 + 1e-9


@pytest.mark.parametrize("lookahead", [0, 1])
def test_memory_pressure_preempts_the_least_important_and_changes_no_token(lookahead: int) -> None:
    core, _ = make_core(num_blocks=12, lookahead=lookahead, slots=4)
    for i in range(4):
        core.add(request(f"r{i}", [i + 1] * 6, max_tokens=24))
    out = run(core)
    assert core.scheduler.num_preemptions > 0
    for i in range(4):
        assert out.tokens[f"r{i}", 0] == expected_output([i + 1] * 6, sequence_seed(7, 0), 24, VOCAB)


def test_512_requests_in_a_pool_that_fits_32() -> None:
    core, _ = make_core(num_blocks=32 * 4, slots=32, budget=64)
    rng = random.Random(0)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 12))] for _ in range(512)]
    for i, prompt in enumerate(prompts):
        core.add(request(f"r{i}", prompt, max_tokens=1 + i % 7))
    collected = Collected()
    while core.has_work:
        collected.take(core.step())
    core.check()
    assert core.pool.num_free == core.pool.num_blocks
    for i, prompt in enumerate(prompts):
        assert collected.tokens[f"r{i}", 0] == expected_output(prompt, sequence_seed(7, 0), 1 + i % 7, VOCAB)


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    core, _ = make_core(num_blocks=4)
    with pytest.raises(ContextLengthError, match=r"maximum context length is 16 tokens.*17 tokens \(9 .* 8 "):
        core.add(request("a", [1] * 9, max_tokens=8))
    with pytest.raises(RequestError, match="no tokens"):
        core.add(request("b", []))
    with pytest.raises(RequestError, match="token id 97"):
        core.add(request("c", [97]))
    core.add(request("d", [1]))
    with pytest.raises(RequestError, match="already in use"):
        core.add(request("d", [1]))
    assert run(core).reasons == {("d", 0): "length"}


@pytest.mark.parametrize("lookahead", [0, 1])
def test_one_request_that_breaks_the_step_fails_alone(
    lookahead: int, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(plan: StepPlan) -> None:
        for span in plan.spans:
            slot = device.slots.get(span.slot)
            tokens = slot.tokens if slot else next(i.tokens for i in plan.inits if i.slot == span.slot)
            if 66 in tokens[:3]:
                raise RuntimeError("planted")

    device = SimulatedDevice(4, VOCAB)
    device._fail = fail
    core, _ = make_core(lookahead=lookahead, device=device)
    core.add(request("good", [1, 2, 3]))
    core.add(request("bad", [66, 2, 3]))
    core.add(request("fine", [4, 2, 3]))
    with caplog.at_level(logging.CRITICAL):
        out = run(core)
    assert out.reasons == {("good", 0): "length", ("bad", 0): "error", ("fine", 0): "length"}
    assert out.tokens["good", 0] == expected_output([1, 2, 3], sequence_seed(7, 0), 8, VOCAB)


def test_stopping_one_continuation_leaves_its_siblings() -> None:
    core, _ = make_core()
    core.add(request("a", [1, 2, 3], max_tokens=10, n=2))
    collected = Collected()
    for _ in range(4):
        collected.take(core.step())
    core.stop_sequence("a", 0)
    run(core, collected)
    assert len(collected.tokens["a", 1]) == 10
    assert ("a", 0) not in collected.reasons


LIVES = st.lists(
    st.tuples(
        st.integers(0, 6),  # which shared prefix
        st.integers(0, 30),  # how much of it
        st.integers(0, 5),  # own tail
        st.integers(1, 12),  # max_tokens
        st.integers(1, 3),  # n
        st.integers(0, 2),  # priority
        st.integers(0, 12),  # steps before the next arrival
        st.integers(0, 9),  # abort after so many further steps when < 3
    ),
    min_size=1,
    max_size=14,
)


@pytest.mark.parametrize("lookahead", [0, 1])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lives=LIVES, caching=st.booleans(), budget=st.integers(6, 24), num_blocks=st.integers(13, 40))
def test_random_lives(
    lookahead: int, lives: list[tuple[int, ...]], caching: bool, budget: int, num_blocks: int
) -> None:
    """Arrivals, sharing, preemption and aborts at random: right tokens, no leak, no output after an end."""
    core, _ = make_core(num_blocks=num_blocks, slots=5, budget=budget, lookahead=lookahead, caching=caching)
    collected = Collected()
    aborts: list[tuple[int, str]] = []
    wanted: dict[str, tuple[list[int], int, int]] = {}
    step = 0
    for i, (family, take, tail, max_tokens, n, priority, wait, abort) in enumerate(lives):
        prompt = [family + 1] * take + [50 + i] * (tail if take else tail + 1)
        core.add(request(f"r{i}", prompt, max_tokens, priority, n=n))
        wanted[f"r{i}"] = (prompt, max_tokens, n)
        if abort < 3:
            aborts.append((step + abort + wait, f"r{i}"))
        for _ in range(wait):
            collected.take(core.step())
            core.check()
            step += 1
            core.abort([name for due, name in aborts if due == step])
    core.abort([name for due, name in aborts if due > step])
    run(core, collected)
    gone = {name for _, name in aborts}
    for name, (prompt, max_tokens, n) in wanted.items():
        for index in range(n):
            want = expected_output(prompt, sequence_seed(7, index), max_tokens, VOCAB)
            got = collected.tokens[name, index]
            assert got == want[: len(got)]
            assert name in gone or got == want
