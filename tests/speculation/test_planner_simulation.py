"""The planner against its two alternatives, plain decoding and always drafting, in a simulated world."""

from __future__ import annotations

import pytest

from paceline.speculation.costs import Round
from support.round_world import TIERS, World, cpu_seconds, fixed, gpu_seconds, h200_seconds, plain

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ACCEPT_LENGTHS = (1.2, 2.0, 3.5, 6.0)
TOLERANCE = 0.98
START = 160
"""Rounds in which a planner looks around: at what each depth costs, and at what stands."""


def rounds_for(num_seqs: int) -> int:
    """Enough for the start not to count; fewer where each tells more."""
    return max(400, 3000 // num_seqs)


@pytest.mark.parametrize("accept_length", ACCEPT_LENGTHS)
@pytest.mark.parametrize("num_seqs", BATCHES)
def test_never_slower_than_plain_or_fixed(num_seqs: int, accept_length: float) -> None:
    """A4, at every batch size and accept length of the protocol."""
    world = World()
    world.run(num_seqs, accept_length, START)
    got = world.run(num_seqs, accept_length, rounds_for(num_seqs))
    assert got >= TOLERANCE * world.best(num_seqs, accept_length)


@pytest.mark.parametrize("accept_length", (1.2, 3.5))
@pytest.mark.parametrize("num_seqs", (1, 6, 32))
def test_never_slower_where_rounds_have_any_size(num_seqs: int, accept_length: float) -> None:
    world = World(cpu_seconds, tiers=None)
    world.run(num_seqs, accept_length, START)
    got = world.run(num_seqs, accept_length, rounds_for(num_seqs))
    assert got >= TOLERANCE * world.best(num_seqs, accept_length)


@pytest.mark.parametrize("accept_length", (1.2, 6.0))
@pytest.mark.parametrize("num_seqs", (1, 32, 256))
def test_looking_around_costs_a_few_rounds(num_seqs: int, accept_length: float) -> None:
    world = World()
    assert world.run(num_seqs, accept_length, START) >= 0.7 * world.best(num_seqs, accept_length)


@pytest.mark.parametrize(
    ("num_seqs", "accept_length"), [(64, 3.5), (128, 3.5)], ids=["between", "compute bound"]
)
def test_depths_in_between_beat_both(num_seqs: int, accept_length: float) -> None:
    world = World()
    world.run(num_seqs, accept_length, START)
    assert world.run(num_seqs, accept_length, 400) > 1.03 * world.best(num_seqs, accept_length)


@pytest.mark.parametrize("num_seqs", (1, 32))
@pytest.mark.parametrize("order", ((1.2, 6.0), (6.0, 1.2)), ids=["better", "worse"])
def test_a_change_of_domain_is_learnt_within_a_minute(num_seqs: int, order: tuple[float, float]) -> None:
    world = World()
    world.run(num_seqs, order[0], rounds_for(num_seqs))
    minute = int(60 / gpu_seconds(Round(num_seqs, 7, True)))
    world.run(num_seqs, order[1], minute // 4)
    got = world.run(num_seqs, order[1], 400)
    assert got >= TOLERANCE * world.best(num_seqs, order[1])


@pytest.mark.parametrize("num_seqs", (4, 64))
def test_wrong_measurements_are_corrected(num_seqs: int) -> None:
    """Drafting looks half as dear, or twice as dear, as it is."""
    for factor in (0.5, 2.0):
        world = World(misjudged=lambda round_, factor=factor: factor if round_.propose else 1.0)  # type: ignore[misc]
        for accept_length in (1.2, 3.5):
            world.run(num_seqs, accept_length, 1500)
            got = world.run(num_seqs, accept_length, 400)
            assert got >= 0.97 * world.best(num_seqs, accept_length)


def test_a_slow_neighbour_changes_nothing() -> None:
    """Everything takes half as long again: the choice stays what it was."""
    world = World()
    world.run(8, 3.5, 400)
    got = world.run(8, 3.5, 400, slowdown=1.5)
    assert got >= TOLERANCE * world.best(8, 3.5) / 1.5


def test_exploring_costs_little() -> None:
    """Half a hundredth, once the first trials are over, where it can gain nothing."""
    for num_seqs in (1, 256):
        world = World()
        world.run(num_seqs, 1.0, 1500)  # the free trials
        assert world.run(num_seqs, 1.0, 3000) >= 0.993 * world.best(num_seqs, 1.0)
        assert any(reason == "exploring" for _, reason in world.planner.rounds)


def test_plain_decoding_is_not_tried_for_ever_where_it_is_far_behind() -> None:
    """A trial of it costs two rounds' drafts; what it commits is known, and its time was seen."""
    world = World(h200_seconds)
    world.run(8, 6.0, 1000)
    before = world.planner.rounds[0, "exploring"]
    assert world.run(8, 6.0, 2000) > 0.998 * world.best(8, 6.0)
    assert before > 0 and world.planner.rounds[0, "exploring"] == before
    world.run(8, 1.2, 1000)  # and when drafts stand no more
    assert world.run(8, 1.2, 1000) > TOLERANCE * world.best(8, 1.2)


@pytest.mark.parametrize(("accept_length", "again"), [(1.9, True), (2.6, False)])
def test_plain_decoding_is_tried_again_where_doubt_allows(accept_length: float, again: bool) -> None:
    """It has 0.8 of the tokens per second in one case, and 0.58 in the other."""
    world = World(h200_seconds)
    world.run(8, accept_length, 1000)
    before = world.planner.rounds[0, "exploring"]
    world.run(8, accept_length, 3000)
    assert (world.planner.rounds[0, "exploring"] > before) is again


@pytest.mark.parametrize("accept_length", ACCEPT_LENGTHS)
@pytest.mark.parametrize("num_seqs", (1, 16, 64, 256))
def test_closed_batches_of_an_h200_lose_less_than_a_hundredth(num_seqs: int, accept_length: float) -> None:
    """As ``benchmarks/planner_grid.py`` has them, after a look around."""
    world, lengths = World(h200_seconds), [accept_length] * num_seqs
    batches = max(4, 32 // num_seqs)
    world.serve(lengths, 256, batches)
    best = max(World(h200_seconds).serve(lengths, 256, batches, decide) for decide in (plain, fixed))
    assert world.serve(lengths, 256, batches) >= 0.99 * best


@pytest.mark.parametrize(("num_seqs", "accept_length", "faster"), [(8, 2.6, 2.3), (64, 3.5, 1.7)])
def test_nothing_is_given_up_for_good(num_seqs: int, accept_length: float, faster: float) -> None:
    """Plain rounds that were far behind become much faster: seen within some minutes of rounds."""
    scale = 1.0
    world = World(lambda r: h200_seconds(r) / (1.0 if r.propose or r.num_drafts else scale))
    world.run(num_seqs, accept_length, 1500)
    assert world.planner.last is not None and world.planner.last.propose
    scale = faster
    world.run(num_seqs, accept_length, 25000)
    assert world.run(num_seqs, accept_length, 300) > TOLERANCE * world.best(num_seqs, accept_length)


def test_tiers_of_this_world_are_those_that_are_captured() -> None:
    from paceline.runtime.shapes import draft_counts, tiers

    assert {size: tuple(draft_counts(size, 7)) for size in tiers(256)} == TIERS


TEXT = (2.2, 2.4, 2.6, 3.2, 3.6, 4.0, 4.8, 5.2)
"""Accept lengths of prompts in one batch, as the bundled pair has them."""


@pytest.mark.parametrize(
    ("device", "num_seqs", "accept_length", "num_tokens"),
    [
        ("cpu", 4, None, 64),
        ("cpu", 8, None, 64),
        ("cpu", 8, None, 256),
        ("cpu", 8, 6.0, 64),
        ("gpu", 4, None, 64),
        ("gpu", 8, 2.0, 64),
        ("gpu", 16, 6.0, 64),
        ("gpu", 32, None, 64),
        ("gpu", 64, 3.5, 64),
        ("gpu", 128, None, 64),
    ],
)
def test_never_slower_where_nothing_refills_a_batch(
    device: str, num_seqs: int, accept_length: float | None, num_tokens: int
) -> None:
    """Sequences start together and nobody waits; those of real text differ."""
    lengths = [accept_length or TEXT[i % len(TEXT)] for i in range(num_seqs)]
    batches = max(8, 10000 // (num_seqs * num_tokens))

    def world() -> World:
        return World(cpu_seconds, tiers=None) if device == "cpu" else World()

    planned = world()
    planned.serve(lengths, num_tokens, batches)
    got = planned.serve(lengths, num_tokens, batches)
    best = max(world().serve(lengths, num_tokens, batches, decide) for decide in (plain, fixed))
    assert got >= TOLERANCE * best


@pytest.mark.parametrize(("num_seqs", "gain"), [(16, 1.0), (32, 1.03)])
def test_what_is_not_known_of_a_closed_batch_does_not_keep_it_plain(num_seqs: int, gain: float) -> None:
    """Two tokens a round on an H200: worth drafting, unless sequences were believed to end far apart. That
    they do not is only seen where some were drafted.
    """
    world = World(h200_seconds)
    world.serve([2.0] * num_seqs, 256, 2)
    best = max(World(h200_seconds).serve([2.0] * num_seqs, 256, 2, decide) for decide in (plain, fixed))
    assert world.serve([2.0] * num_seqs, 256, 2) > gain * best


def rates(num_batches: int, num_tokens: int = 64, measured_plain: float = 1.0) -> tuple[World, list[float]]:
    """Tokens per second of one closed batch of eight real texts after the other on a CPU, as a share of plain
    decoding's, which is the best there; ``measured_plain`` is what it seemed to take at start.
    """
    world = World(cpu_seconds, tiers=None, misjudged=lambda r: 1.0 if r.propose else measured_plain)
    best = world.serve(TEXT, num_tokens, 1, plain)
    return world, [world.serve(TEXT, num_tokens, 1) / best for _ in range(num_batches)]


@pytest.mark.parametrize("measured_plain", (1.0, 1.25))
def test_only_the_first_closed_batch_is_drafted_where_it_does_not_pay(measured_plain: float) -> None:
    """Plain decoding that was measured too slow runs early enough to show it."""
    world, found = rates(3, measured_plain=measured_plain)
    assert found[0] > 0.75 and min(found[1:]) > 0.96, found
    assert world.planner.last is not None and not world.planner.last.propose


def test_a_new_choice_is_looked_at_again_soon() -> None:
    """Nothing stands: after a few rounds nothing is drafted any more."""
    for num_seqs, most in (1, 8), (8, 3):
        world = World(cpu_seconds, tiers=None)
        world.run(num_seqs, 1.0, 20)
        drafted = sum(n for (depth, _), n in world.planner.rounds.items() if depth)
        assert 0 < drafted <= most


def test_plain_decoding_is_not_tried_where_it_would_be_dear() -> None:
    world = World()
    assert world.serve([6.0] * 32, 64, 3) > 0.98 * World().serve([6.0] * 32, 64, 3, fixed)
    assert (0, "exploring") not in world.planner.rounds


def test_what_a_free_trial_brings_does_not_pay_for_the_next() -> None:
    """Drafts stand, but drafting does not pay: trials keep to their share of the time."""
    trials = 0
    for seed in range(6):
        world = World(cpu_seconds, tiers=None, seed=seed)
        world.serve(TEXT, 64, 1 + seed)
        before = world.planner.rounds.copy()
        world.serve(TEXT, 64, 8)
        later = world.planner.rounds - before
        trials += sum(n for (_, reason), n in later.items() if reason == "exploring")
    assert 0 < trials < 30, "rounds of some 3,000"


def test_drafting_that_looked_too_dear_at_start_is_tried_once() -> None:
    def world() -> World:
        return World(cpu_seconds, tiers=None, misjudged=lambda round_: 1.5 if round_.propose else 1.0)

    best = world().serve([6.0] * 8, 64, 3, fixed)
    planned = world()
    planned.serve([6.0] * 8, 64, 1)
    assert planned.serve([6.0] * 8, 64, 3) > 0.95 * best
