"""The phases of a search share one budget of processor time, which a clock of the test measures."""

from dataclasses import replace

import pytest

from spmd_engine.models import GPTSize, gpt
from spmd_engine.planning import planner as module
from spmd_engine.planning.machine.files import read_machine
from spmd_engine.planning.plan_result import Request
from spmd_engine.planning.planner import PlanEvaluator, find_plan
from spmd_engine.planning.search import relaxation, search
from spmd_engine.planning.search.budget import Budget
from spmd_engine.planning.search.search import Limits, Planner

SMALL = gpt(GPTSize(layers=2, width=32, heads=2, context=16, vocabulary=64))


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still but for what a test adds, for budgets and searches."""
    clock = Clock()
    monkeypatch.setattr(module, "Budget", lambda seconds: Budget(seconds, clock))
    monkeypatch.setattr(search, "process_time", clock)
    return clock


@pytest.fixture
def phases(clock, monkeypatch):
    """The searches and evaluations of `find_plan`, as (what, seconds of its start); each search takes all of its
    seconds, and an evaluation takes one."""
    phases = []
    find, evaluate, started = Planner.search, PlanEvaluator.evaluate, clock.now

    def taking_its_seconds(planner, *arguments, seconds, **options):
        phases.append(("search", clock.now - started))
        found = find(planner, *arguments, seconds=seconds, **options)
        clock.now += seconds
        return found

    def taking_a_second(evaluator, *arguments, **options):
        phases.append(("evaluate", clock.now - started))
        clock.now += 1.0
        return evaluate(evaluator, *arguments, **options)

    monkeypatch.setattr(Planner, "search", taking_its_seconds)
    monkeypatch.setattr(PlanEvaluator, "evaluate", taking_a_second)
    return phases


def request(seconds, **changes):
    machine = read_machine("cpu").with_ranks(2)
    return Request(SMALL, machine, [2], [4], axes=["data"], sequence=16, seconds=seconds, **changes)


def test_a_part_ends_no_later_than_its_budget(clock):
    budget = Budget(8.0, clock)
    half = budget.part(0.5)
    clock.now += 3
    assert (budget.left, half.left, budget.part(0.2).left) == (5.0, 1.0, 1.0)
    clock.now += 3
    assert (budget.left, half.left, half.part(0.5).left) == (2.0, 0.0, 0.0)


LIMITED = {"none": Limits(), "memory": Limits(memory=1024), "latency": Limits(latency=1e-9)}


@pytest.mark.parametrize("fallback", [(), ("split", "offload", "assign")], ids=["alone", "with fallbacks"])
@pytest.mark.parametrize("limits", LIMITED.values(), ids=LIMITED)
def test_all_phases_together_end_with_the_seconds_of_the_request(limits, fallback, phases, clock):
    """A phase that has begun ends, and the first plan of a search is evaluated in any case."""
    began = clock.now
    result = find_plan(request(20.0, limits=limits, fallback=fallback))
    assert (result.plan is None) == (limits != Limits())
    late = [what for what, start in phases if start > 20]
    assert late.count("evaluate") <= 3 and clock.now - began < 30, phases


def test_a_search_that_leaves_time_leaves_it_to_the_simulation(phases, monkeypatch):
    """All plans that are proposed are simulated, beyond the share of a search that does take its time."""
    find = Planner.search
    monkeypatch.setattr(Planner, "search", lambda *a, seconds, **options: find(*a, seconds=seconds * 0, **options))
    find_plan(request(20.0, fallback=("offload",)))
    assert [what for what, _ in phases].count("evaluate") > 5


def test_a_conflict_contains_a_limit_that_the_closest_plan_breaks(monkeypatch):
    """Sets of constraints that the closest plan keeps are not searched."""
    searched, is_possible = [], relaxation._is_possible

    def recorded(planner, question, names, seconds):
        searched.append(set(names))
        return is_possible(planner, question, names, seconds)

    monkeypatch.setattr(relaxation, "_is_possible", recorded)
    given = replace(request(20.0, fallback=()), limits=Limits(memory=1 << 30, latency=1e-9))
    assert find_plan(given).conflict.constraints == ("latency",)
    assert searched == [{"latency"}]
