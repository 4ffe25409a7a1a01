"""Captured draft state under the real scheduler, over a device that checks what every draft is made from."""

from __future__ import annotations

import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.cache import BlockPool
from paceline.engine.core import EngineCore
from paceline.engine.messages import EngineRequest
from paceline.engine.planned import DraftLimits
from paceline.runtime.plan import DraftUpdates, StepPlan
from paceline.sampling.params import SamplingParams
from paceline.sampling.seeds import sequence_seed
from paceline.speculation.capture_cache import CaptureCache
from paceline.speculation.counters import SpeculationCounters
from paceline.speculation.draft_reserve import DraftReserve, open_blocks
from paceline.speculation.draft_state import (
    EXPECTED_TOKENS,
    ROWS_PER_TOKEN,
    Candidate,
    CaptureDraftState,
    plan_restore,
)
from support.drafting_device import DraftingDevice
from support.info import engine_info
from support.simulated_device import expected_output

VOCAB = 97
BLOCK = 4
NUM_DRAFTS = 3


class Harness:
    """An engine with captured draft state, small enough for every limit to be met."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        slots: int = 6,
        budget: int = 24,
        lookahead: int = 0,
        captures: int = 40,
        reserve: int = 64,
        caching: bool = True,
    ) -> None:
        self.device = DraftingDevice(BLOCK, VOCAB, NUM_DRAFTS)
        self.state = CaptureDraftState(
            DraftReserve(reserve, BLOCK),
            CaptureCache(captures, slots * open_blocks(BLOCK, NUM_DRAFTS, 1)),
            draft_block=NUM_DRAFTS + 1,
            max_positions=1000,
            counters=SpeculationCounters(NUM_DRAFTS),
        )
        info = engine_info(vocab_size=VOCAB, max_num_seqs=slots, block_size=BLOCK, num_blocks=num_blocks)
        self.core = EngineCore(
            self.device,
            BlockPool(num_blocks, BLOCK, enable_caching=caching, hash_key=b"test" * 4),
            info,
            max_num_batched_tokens=budget,
            lookahead=lookahead,
            drafting=DraftLimits(NUM_DRAFTS, 0),
            draft_state=self.state,
        )
        self.tokens: dict[tuple[str, int], list[int]] = {}

    def add(self, name: str, prompt: list[int], max_tokens: int = 12, **params: object) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=7, **params)  # type: ignore[arg-type]
        self.core.add(EngineRequest(request_id=name, prompt_token_ids=prompt, params=sampling))
        for index in range(sampling.n):
            self.tokens[name, index] = []

    def step(self) -> None:
        for output in self.core.step():
            self.tokens[output.request_id, output.index] += output.token_ids
        self.core.check()
        assert not self.device.errors

    def run(self, limit: int = 3000) -> None:
        for _ in range(limit):
            if not self.core.has_work:
                self.check_nothing_held()
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def check_nothing_held(self) -> None:
        """Every charge is back, exactly once, and no capture slot is open."""
        assert self.core.pool.num_free == self.core.pool.num_blocks
        assert self.state.reserve.num_free == self.state.reserve.num_blocks
        assert self.state.captures.num_in_progress == 0

    def serve(self, prompt: list[int], max_tokens: int = 12, **params: object) -> list[int]:
        """Run one request alone; its tokens."""
        name = f"alone {len(self.tokens)}"
        self.add(name, prompt, max_tokens, **params)
        self.run()
        return self.tokens[name, 0]

    @property
    def events(self) -> dict[str, int]:
        return self.core.stats().draft_state

    @property
    def refused(self) -> dict[str, int]:
        return self.core.stats().draft_refusals


def expected(prompt: list[int], max_tokens: int, index: int = 0) -> list[int]:
    return expected_output(prompt, sequence_seed(7, index), max_tokens, VOCAB)


# ---------------------------------------------------------------------- the joint cap


@pytest.mark.parametrize(
    ("matched", "restorable", "tokens_left", "expected_blocks"),
    [
        (0, 0, 100, 0),  # nothing cached: nothing lost
        (25, 25, 3, 25),  # everything can be restored, however short the output
        (25, 24, 100, 24),  # one block again: always worth it
        (25, 24, 2, 24),
        (25, 24, 1, None),  # sixteen rows for one token are not
        (25, 2, 16, None),  # 368 rows for 16 tokens
        (25, 2, 46, 2),  # 368 rows for 46 tokens
        (25, 2, 45, None),
        (25, 0, 400, 0),  # a whole prefix again, for a long answer
        (250, 0, 500, 0),
        (250, 0, 499, None),
        (257, 0, 10**6, None),  # beyond what any answer is expected to be worth
        (2000, 1900, 10**6, 1900),
    ],
)
def test_the_joint_cap(matched: int, restorable: int, tokens_left: int, expected_blocks: int | None) -> None:
    assert plan_restore(matched, restorable, 16, tokens_left) == expected_blocks


@given(
    matched=st.integers(0, 600),
    share=st.floats(0, 1),
    left=st.integers(0, 5000),
    block_size=st.sampled_from([16, 64]),
)
def test_the_joint_cap_never_shares_more_than_it_can_restore(
    matched: int, share: float, left: int, block_size: int
) -> None:
    restorable = int(matched * share)
    blocks = plan_restore(matched, restorable, block_size, left)
    if blocks is None:
        assert restorable < matched
    else:
        assert blocks == restorable
        assert (matched - blocks) * block_size <= ROWS_PER_TOKEN * EXPECTED_TOKENS
    more = plan_restore(matched, restorable, block_size, left + 1)
    assert blocks is None or more == blocks, "a longer answer is worth at least as much"


# ---------------------------------------------------------------------- what can happen to a request


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_hit_restores_and_drafts_as_a_cold_start_does(lookahead: int) -> None:
    harness = Harness(lookahead=lookahead)
    prompt = [i % 90 + 1 for i in range(33)]
    totals, counters = [(0, 0)], harness.core.scheduler.speculation
    for _ in range(3):
        assert harness.serve(prompt) == expected(prompt, 12)
        totals.append((counters.num_drafts, counters.num_accepted_tokens))
    rounds, accepted = totals[1]
    assert totals == [(i * rounds, i * accepted) for i in range(4)] and accepted > 0
    assert harness.events["hits"] == 2 and harness.events["restored_tokens"] == 2 * 32
    assert "misses" not in harness.events and harness.device.num_restored == 16


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("offset", range(12))
def test_every_second_turn_drafts(offset: int, lookahead: int) -> None:
    """First turns end at every offset around a block boundary: their last sealed block is published."""
    harness = Harness(lookahead=lookahead)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    first = harness.serve(prompt, 11 + offset)
    whole = prompt + first
    second = [*whole, 8, 8]
    assert harness.serve(second, 12) == expected(second, 12)
    # All that the target forwarded is matched and restored: all but the last token, in full blocks.
    assert harness.events == {
        "hits": 1,
        "restored_tokens": (len(whole) - 1) // BLOCK * BLOCK,
        "publishes": harness.state.captures.num_published,
        "evictions": 0,
        "reforwarded_tokens": 0,
    }
    drafts = [plan.spans for plan in harness.device.plans if any(span.drafts for span in plan.spans)]
    assert drafts and not harness.refused


def test_a_miss_keeps_the_hit_and_decodes_plainly() -> None:
    harness = Harness(captures=1)
    prompt = [i % 90 + 1 for i in range(81)]
    harness.serve(prompt, 5)
    drafted = harness.core.stats().num_drafts
    assert drafted > 0
    harness.add("miss", prompt, 5)
    harness.add("other", [9, 9, 9], 12)
    harness.run()
    assert harness.tokens["miss", 0] == expected(prompt, 5)
    assert harness.tokens["other", 0] == expected([9, 9, 9], 12)
    assert harness.refused == {"capture_miss": 1} and harness.events["misses"] == 1
    assert harness.core.pool.num_hit_tokens == 80, "the target's hit is kept whole"
    spans = [span for plan in harness.device.plans[-8:] for span in plan.spans]
    assert any(span.drafts for span in spans), "the request beside it drafts as ever"


def test_a_hit_is_shortened_when_that_saves_the_drafter() -> None:
    harness = Harness(captures=4, reserve=64)
    prompt = [i % 90 + 1 for i in range(33)]
    harness.serve(prompt)
    assert harness.serve(prompt) == expected(prompt, 12)
    assert harness.events["misses"] == 1 and not harness.refused
    assert harness.events["restored_tokens"] == 16 and harness.events["reforwarded_tokens"] == 16


def test_what_was_evicted_is_captured_again() -> None:
    """A prefix that stays cached for the target does not stay lost for the drafter."""
    harness = Harness(captures=12)
    prompt = [i % 90 + 1 for i in range(33)]
    harness.serve(prompt)
    harness.serve([50 + i % 40 for i in range(60)])
    assert not harness.state.captures.head(harness.core.pool.chain().hashes)
    harness.serve(prompt)
    misses = harness.events["misses"]
    harness.serve(prompt)
    assert misses == 1 and harness.events["misses"] == 1 and harness.events["hits"] == 1


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("count", [64, 96])
def test_many_requests_on_one_prefix_finish_within_the_reserve(count: int, lookahead: int) -> None:
    harness = Harness(slots=count, num_blocks=512, budget=count * 8, reserve=350, lookahead=lookahead)
    prompt = [i % 90 + 1 for i in range(41)]
    harness.serve(prompt)
    for i in range(count):
        harness.add(f"r{i}", [*prompt, i % 90 + 1], 12)
    harness.run()
    for i in range(count):
        assert harness.tokens[f"r{i}", 0] == expected([*prompt, i % 90 + 1], 12)
    fits = 350 // -(-(42 + 12 + NUM_DRAFTS + 1) // BLOCK)
    # All that fit draft; they end early, and the others decode on plainly beside them.
    assert harness.refused == {"draft_reserve": count - fits}
    assert harness.events["hits"] == fits


@pytest.mark.parametrize("lookahead", [0, 1])
def test_memory_pressure(lookahead: int) -> None:
    harness = Harness(num_blocks=12, slots=4, lookahead=lookahead)
    for i in range(4):
        harness.add(f"r{i}", [i + 1] * 6, 24)
    harness.run()
    assert harness.core.scheduler.num_preemptions > 0 and harness.events["hits"] > 0
    for i in range(4):
        assert harness.tokens[f"r{i}", 0] == expected([i + 1] * 6, 24)


def test_samples_of_one_prompt_restore_or_forward_it_again() -> None:
    prompt = [i % 90 + 1 for i in range(22)]
    for caching in (True, False):
        harness = Harness(caching=caching, captures=40 if caching else 0)
        harness.add("many", prompt, 12, n=4, temperature=1.0)
        harness.run()
        for index in range(4):
            assert harness.tokens["many", index] == expected(prompt, 12, index)
        assert harness.core.stats().num_drafts > 4 and not harness.refused
        restored = 3 * 20 if caching else 0
        assert harness.events.get("restored_tokens", 0) == restored
        assert harness.events.get("reforwarded_tokens", 0) == 60 - restored


def test_short_answers_capture_for_those_who_draft() -> None:
    harness = Harness()
    prompt = [i % 90 + 1 for i in range(30)]
    harness.serve(prompt, 1)
    assert harness.state.reserve.num_free == 64 and harness.events["publishes"] == 7
    harness.serve(prompt, 12)
    assert harness.events["hits"] == 1 and harness.core.stats().num_drafts > 0


@pytest.mark.parametrize("lookahead", [0, 1])
def test_aborts_give_everything_back(lookahead: int) -> None:
    harness = Harness(lookahead=lookahead)
    for after in range(12):
        harness.add(f"r{after}", [after + 1] * 9, 40)
        for _ in range(after):
            harness.step()
        harness.core.abort([f"r{after}"])
        harness.run()
        harness.check_nothing_held()


def test_a_cold_cache_after_a_reset() -> None:
    harness = Harness()
    prompt = [i % 90 + 1 for i in range(30)]
    harness.serve(prompt)
    assert harness.core.reset_prefix_cache()
    assert harness.state.captures.num_published == 0
    harness.serve(prompt)
    assert "hits" not in harness.events and "misses" not in harness.events


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_request_that_breaks_the_step_leaves_nothing_behind(
    lookahead: int, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(plan: StepPlan) -> None:
        for span in plan.spans:
            slot = harness.device.slots.get(span.slot)
            tokens = slot.tokens if slot else next(i.tokens for i in plan.inits if i.slot == span.slot)
            if 66 in tokens[:3]:
                raise RuntimeError("planted")

    harness = Harness(lookahead=lookahead)
    harness.serve([1, 2, 3] * 5)
    harness.device._fail = fail
    with caplog.at_level(logging.CRITICAL):
        harness.add("good", [1, 2, 3] * 5)
        harness.add("bad", [66, 2, 3] * 5)
        harness.add("fine", [4, 2, 3] * 5)
        harness.run()
    assert harness.tokens["good", 0] == expected([1, 2, 3] * 5, 12)
    assert harness.tokens["fine", 0] == expected([4, 2, 3] * 5, 12)
    assert harness.tokens["bad", 0] == []


def test_one_debug_line_per_publish(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness()
    with caplog.at_level(logging.DEBUG, logger="paceline.speculation.draft_state"):
        harness.serve([5] * 9, 8)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("Captured slot 0: blocks 0..1 of 2 full, ")
    assert len(lines) == 3, "one for the prompt, one for each block filled after it"


def hashes(*path: int) -> list[bytes]:
    return [bytes(path[: i + 1]) for i in range(len(path))]


def tables(updates: DraftUpdates) -> list[tuple[int, list[int]]]:
    return [(item.first, list(item.ids)) for item in updates.capture_tables]


def test_who_cannot_publish_stops_writing_into_slots_of_others() -> None:
    """The device must hear that open slots were given back before anyone else writes there."""
    state = Harness(captures=6).state
    state.admit(0, state.offer(Candidate((), 0, 30, 20, 20)), DraftUpdates())
    updates = DraftUpdates()
    state.cover(0, 14, updates)
    assert [(first, len(ids)) for first, ids in tables(updates)] == [(0, 4)]
    state.commit(0, 4, hashes(1))
    state.captures.reset()  # as good as other prefixes that evict block 0
    state.commit(0, 9, hashes(1, 2))
    assert state.captures.num_published == 0 and state.captures.num_in_progress == 0
    # Block 1 could not be published. Blocks 2 and 3 were open behind it: they go to the sink from now on.
    for rows, wanted in ((16, [(2, [0, 0])]), (20, [])):
        updates = DraftUpdates()
        state.cover(0, rows, updates)
        assert tables(updates) == wanted
    state.release(0)
    state.check()


def test_restoring_keeps_a_prefix_young() -> None:
    harness = Harness(captures=8)
    first, second = [1] * 17, [2] * 17
    harness.serve(first, 3)
    harness.serve(second, 3)
    harness.serve(first, 3)
    harness.serve([3] * 9, 3)
    assert harness.serve(first, 3) == expected(first, 3)
    assert harness.events["hits"] == 2 and not harness.refused
    harness.check_nothing_held()


# ---------------------------------------------------------------------- everything at once

LIVES = st.lists(
    st.tuples(
        st.integers(0, 4),  # which shared prefix
        st.integers(0, 30),  # how much of it
        st.integers(0, 5),  # own tail
        st.integers(1, 16),  # max_tokens
        st.integers(1, 3),  # n
        st.integers(0, 8),  # steps before the next arrival
        st.integers(0, 9),  # abort after so many further steps when < 3
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("lookahead", [0, 1])
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lives=LIVES,
    caching=st.booleans(),
    budget=st.integers(6, 30),
    num_blocks=st.integers(14, 40),
    captures=st.integers(1, 24),
    reserve=st.integers(4, 60),
)
def test_random_lives(
    lookahead: int,
    lives: list[tuple[int, ...]],
    caching: bool,
    budget: int,
    num_blocks: int,
    captures: int,
    reserve: int,
) -> None:
    """Sharing, preemption, eviction, refusals and aborts at random: right tokens, right drafts, no leak."""
    harness = Harness(
        num_blocks=num_blocks,
        slots=4,
        budget=budget,
        lookahead=lookahead,
        captures=captures if caching else 0,
        reserve=reserve,
        caching=caching,
    )
    due: list[tuple[int, str]] = []
    wanted: dict[str, tuple[list[int], int, int]] = {}
    step = 0
    for i, (family, take, tail, max_tokens, n, wait, abort) in enumerate(lives):
        prompt = [family + 1] * take + [50 + i] * (tail if take else tail + 1)
        harness.add(f"r{i}", prompt, max_tokens, n=n, temperature=1.0)
        wanted[f"r{i}"] = (prompt, max_tokens, n)
        if abort < 3:
            due.append((step + abort + wait, f"r{i}"))
        for _ in range(wait):
            harness.step()
            step += 1
            harness.core.abort([name for at, name in due if at == step])
    harness.core.abort([name for at, name in due if at > step])
    harness.run()
    gone = {name for _, name in due}
    for name, (prompt, max_tokens, n) in wanted.items():
        for index in range(n):
            want = expected(prompt, max_tokens, index)
            got = harness.tokens[name, index]
            assert got == want[: len(got)]
            assert name in gone or got == want
