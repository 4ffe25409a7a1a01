"""Whether traffic goes on or a batch runs empty."""

from __future__ import annotations

import random

from paceline.speculation.vacancies import MEMORY, PATIENCE, Vacancies


def test_steady_traffic_is_told_from_batches() -> None:
    vacancies = Vacancies()
    for _ in range(4 * MEMORY):  # every few steps one ends and another comes soon
        vacancies.step(0, 1, 7)
        vacancies.step(1, 0, 7)
        vacancies.step(0, 0, 8)
    assert vacancies.replaced
    for _ in range(8):  # batches of eight that end one by one, then all at once
        vacancies.step(8, 0, 0)
        for left in range(7, 0, -1):
            vacancies.step(0, 1, left)
        vacancies.step(0, 1, 0)
    assert vacancies.share < 0.2


def test_a_batch_that_ends_in_one_step_is_no_traffic() -> None:
    vacancies = Vacancies()
    for _ in range(50):
        vacancies.step(0, 64, 0)  # the next batch is there already, and begins in this step
        for _ in range(5):
            vacancies.step(0, 0, 64)
    assert vacancies.share == 0.0


def test_who_comes_late_takes_nobodys_place() -> None:
    vacancies = Vacancies()
    for _ in range(50):
        vacancies.step(0, 1, 5)
        for _ in range(PATIENCE + 1):
            vacancies.step(0, 0, 5)
        vacancies.step(1, 0, 6)
    assert vacancies.share == 0.0


def test_shares_are_shares() -> None:
    rng, vacancies = random.Random(1), Vacancies()
    for _ in range(2000):
        vacancies.step(rng.randrange(3), rng.randrange(3), rng.randrange(4))
        assert 0.0 <= vacancies.share <= 1.0
