"""Placement: annealing and a genetic search compared with the exact optimum, with all kinds of constraints."""

from functools import partial
from itertools import permutations, product
from math import inf

import numpy as np
import pytest

from spmd_engine.errors import UsageError
from spmd_engine.planning.search.placement import Tasks, annealed, assigned, evolved, shares
from support.pairwise import in_turn
from support.placements import exact


def drawn(seed, tasks=8, nodes=3, **constraints):
    rng = np.random.default_rng(seed)
    way = rng.random((nodes, nodes)) * 0.05
    np.fill_diagonal(way, 0.0)
    return Tasks(
        rng.random((tasks, nodes)) + 0.2,
        rng.random(tasks),
        rng.random((tasks, tasks)) * (rng.random((tasks, tasks)) < 0.4),
        np.full(nodes, 0.6 * tasks / nodes + 1.0),
        way,
        **constraints,
    )


@in_turn(2, search={"annealed": annealed, "evolved": partial(evolved, generations=150, population=40)}, seed=range(3))
def test_within_one_percent_of_the_exact_optimum(search, seed):
    tasks = drawn(seed, tasks=7)
    found = search(tasks)
    assert tasks.fits(found)
    assert tasks.cost(found) <= 1.01 * tasks.cost(exact(tasks))


@pytest.mark.parametrize("search", [annealed, partial(evolved, generations=150, population=40)])
def test_tasks_stay_together_within_the_capacity_of_nodes(search):
    tasks = drawn(5, together=[(0, 1)], most=3)
    found = search(tasks)
    assert tasks.fits(found)
    assert found[0] == found[1]
    assert max(map(found.count, found)) == 3


def test_what_cannot_be_placed_is_an_error():
    with pytest.raises(UsageError, match="no placement of 8 tasks"):
        annealed(drawn(1, most=2))


def test_an_assignment_is_the_best_of_all_permutations():
    pytest.importorskip("scipy")
    cost = np.random.default_rng(2).random((5, 5))
    found = assigned(cost)
    best = min(permutations(range(5)), key=lambda order: sum(cost[t, n] for t, n in enumerate(order)))
    assert found == best


def test_shares_follow_speeds():
    assert shares([0.8, 0.4], 12) == (8, 4)
    assert sum(shares([0.4, 0.4, 0.4, 0.2], 100)) == 100


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0, 0.48), (8.0, 1.0), (3.0, 3.0, 1.0), (0.0, 0.3), (2.0, 2.0)])
def test_no_other_shares_are_done_sooner(speeds):
    for whole in range(9):
        found = shares(speeds, whole)
        every = (each for each in product(range(whole + 1), repeat=len(speeds)) if sum(each) == whole)
        assert sum(found) == whole and _seconds(found, speeds) == min(_seconds(each, speeds) for each in every)


def _seconds(parts, speeds):
    return max((part / speed if speed else inf for part, speed in zip(parts, speeds, strict=True) if part), default=0)
