"""The phases of a search share one budget of evaluations; the time limit, by a clock of the test, only stops them."""

import json
from dataclasses import replace
from math import inf

import pytest

from spmd_engine.cli.plan import print_plan
from spmd_engine.models import GPTSize, gpt
from spmd_engine.planning.machine.machine import read_machine
from spmd_engine.planning.plan_result import Request
from spmd_engine.planning.planner import find_plan
from spmd_engine.planning.search import plan_search as module
from spmd_engine.planning.search import search
from spmd_engine.planning.search.improve import SIMULATION, Budget, improved
from spmd_engine.planning.search.search import Limits
from support.pairwise import in_turn

SMALL = gpt(GPTSize(layers=2, width=32, heads=2, context=16, vocabulary=64))


class Clock:
    """It stands still but for what a test adds."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def budgets(clock, monkeypatch):
    """The budgets of `find_plan`, where a simulation takes the seconds that `budgets(seconds)` says."""
    made = []

    def taking(simulation):
        class Slow(Budget):
            late = 0  #: simulations that begin after the time limit

            def spend(self, evaluations=1):
                super().spend(evaluations)
                self._whole.late += evaluations == SIMULATION and clock.now > self._whole._deadline
                clock.now += simulation * evaluations / SIMULATION

        def slow(evaluations, seconds):
            made.append(Slow(evaluations, seconds, clock))
            return made[-1]

        monkeypatch.setattr(module, "Budget", slow)
        return made

    return taking


def request(seconds, **changes):
    machine = read_machine("cpu").with_ranks(2)
    return Request(SMALL, machine, [2], [4], axes=["data"], sequence=16, seconds=seconds, **changes)


def test_a_part_ends_no_later_than_its_budget(clock):
    budget = Budget(8, 80.0, clock)
    half = budget.part(0.5)
    half.spend(3)
    assert (budget.left, half.left, budget.part(0.2).left, budget.part(most=2).left) == (5, 1, 1, 2)
    budget.spend(3)
    assert (budget.left, half.left, half.part(0.5).left) == (2, 0, 0)
    assert not budget.stopped


def test_a_time_limit_stops_all_parts_and_says_so(clock):
    budget = Budget(8, 80.0, clock)
    half = budget.part(0.5)
    clock.now += 41
    assert (budget.left, half.left, budget.stopped) == (8, 0, True)
    clock.now += 40
    assert budget.left == budget.part(most=5).left == 0


LIMITED = {"none": Limits(), "memory": Limits(memory=1024), "latency": Limits(latency=1e-9)}


@in_turn(2, fallback={"alone": (), "with fallbacks": ("split", "offload", "assign")}, limits=LIMITED)
def test_all_phases_together_end_with_the_seconds_of_the_request(limits, fallback, budgets):
    """A phase that has begun ends, and the first plan of a search is simulated in any case; the result says it."""
    made = budgets(4.0)
    result = find_plan(request(20.0, limits=limits, fallback=fallback))
    assert (result.plan is None) == (limits != Limits())
    assert result.late and made[0].late <= 3


@pytest.mark.parametrize(
    "limits", [Limits(), pytest.param(Limits(memory=1024), marks=pytest.mark.soak)], ids=["none", "memory"]
)
def test_a_plan_does_not_depend_on_the_time_that_it_takes(limits, budgets):
    """Within the time limit."""
    found = []
    for simulation in (0.0, 100.0):
        made = budgets(simulation)
        found.append(find_plan(request(1e9, limits=limits)))
    quick, slow = found
    assert not slow.late and slow.as_json() == quick.as_json()
    assert made[0].left == made[1].left


@pytest.mark.parametrize("limits", [Limits(), Limits(memory=1024)], ids=["a plan", "a conflict"])
def test_what_has_begun_ends_soon_after_the_time_limit(limits, clock, monkeypatch):
    """Also the bounds of a large space, and the first simulation of a search: then numbers are estimates."""
    made = []

    class Slow(Budget):
        def spend(self, evaluations=1):
            super().spend(evaluations)
            clock.now += 1.0

        def check_time(self):
            clock.now += 1.0
            super().check_time()

    def slow(evaluations, seconds):
        made.append(Slow(evaluations, seconds, clock))
        return made[-1]

    monkeypatch.setattr(module, "Budget", slow)
    result = find_plan(request(3.0, limits=limits))
    assert result.late and clock.now < 100 + 3 + 2 + 20
    assert (result.plan is None) == (limits != Limits()) and result.evaluation is None
    json.dumps(result.as_json(), allow_nan=False)
    print_plan(result)


def test_a_conflict_contains_a_limit_that_the_closest_plan_breaks(monkeypatch):
    """Sets of constraints that the closest plan keeps are not searched."""
    searched, are_possible = [], search._are_possible

    def recorded(constraints):
        searched.append(constraints.limits.names)
        return are_possible(constraints)

    monkeypatch.setattr(search, "_are_possible", recorded)
    given = replace(request(20.0, fallback=()), limits=Limits(memory=1 << 30, latency=1e-9))
    assert find_plan(given).conflict.constraints == ("latency",)
    assert searched == [["latency"]]


def test_the_page_names_the_constraints_that_time_left_unexamined(capsys):
    result = find_plan(replace(request(20.0, fallback=()), limits=Limits(latency=1e-9)))
    conflict = replace(result.conflict, constraints=("latency", "ranks", "batch_size"))
    print_plan(replace(result, conflict=conflict, late=True))
    said = "other ranks, batch size: not examined, since time ran out (--seconds 20)"
    assert conflict.relaxations.keys() == {"latency"} and said in " ".join(capsys.readouterr().out.split())


def test_better_neighbours_are_followed_from_the_best_starts():
    """Whole numbers, whose score has two valleys: the deeper one is far from the better start."""
    score = lambda n: (abs(n - 3) + 1 if n < 10 else abs(n - 20),)
    near = lambda n: (n - 1, n + 1)
    assert improved([5, 15], near, score, Budget(inf))[0] == 3
    assert improved([5, 15], near, score, Budget(inf), descents=2)[0] == 20
    spent = Budget(4)

    def spending(n):
        spent.spend()
        return score(n)

    assert sorted(improved([15, 5], near, spending, spent, descents=2)) == [3, 4, 5, 15]
    assert improved([5, 7], near, spending, spent) == [5]  # the first in any case
