"""The bound of a step over all orders of its communication, against all orders of small steps."""

from dataclasses import replace
from math import prod

import pytest

from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.models import GPT_SIZES, gpt
from spmd_engine.planning.dry_run.analyze import analyze
from spmd_engine.planning.machine.machine import Curve, Link, Machine, NodeKind
from spmd_engine.planning.simulator import simulation
from spmd_engine.planning.simulator.step_evaluation import evaluate_step, least_seconds

SMALL = gpt(replace(GPT_SIZES["gpt-nano"], layers=1), "gpt-nano")
HOST = NodeKind("host", 2, 1, {"float32": Curve.flat(2e10)}, 1e10, Curve.flat(1e10), Link(1e-5, 5e9))
MOST_ORDERS = 3000


def two_hosts(rate, count=2):
    return Machine("hosts", (replace(HOST, count=count),), Link(1e-4, rate))


class Ordered(simulation._Simulation):
    """A simulation that begins the call that ``choices`` say, whenever several wait for a link."""

    def __init__(self, choices, *arguments):
        super().__init__(*arguments)
        self.choices, self.numbers = choices, []

    def _start_queued(self):
        while waiting := [e for e in self._queue if not any(self._ports.get(rank) for rank in e[2].begun)]:
            chosen = 0
            if len(waiting) > 1:
                chosen = self.choices[len(self.numbers)] if len(self.numbers) < len(self.choices) else 0
                self.numbers.append(len(waiting))
            call = waiting[chosen][2]
            self._queue.remove(waiting[chosen])
            for rank in call.begun:
                self._ports[rank] = True
            ends = self.clock + call.duration(self.collectives).seconds
            self._schedule(ends, lambda call=call: self._arrived(call))


def all_orders(analysis, machine):
    """The seconds of the step in each order of what waits for links."""
    steps = {rank: analysis.of_rank(rank) for rank in range(analysis.ranks)}
    choices, seconds = [], []
    while len(seconds) < MOST_ORDERS:
        run = Ordered(choices, machine, steps, simulation.match_calls(analysis, steps))
        seconds.append(run.run().seconds)
        choices = [*choices, *[0] * (len(run.numbers) - len(choices))]
        while choices and choices[-1] + 1 == run.numbers[len(choices) - 1]:
            choices.pop()
        if not choices:
            return seconds
        choices[-1] += 1
    raise AssertionError(f"more than {MOST_ORDERS} orders")


SMALL_STEPS = {  # mesh, options, micro-batches, bytes of a parameter group
    "ZeRO-1": ({"data": 2}, {"zero": 1}, 1, 1 << 15),
    "ZeRO-2": ({"data": 2}, {"zero": 2}, 2, 1 << 17),
    "ZeRO-3": ({"data": 2}, {"zero": 3}, 1, 1 << 17),
    "ZeRO-3, recomputed": ({"data": 2}, {"zero": 3, "recompute": "block"}, 1, 1 << 17),
    "a pipeline of replicas": ({"data": 2, "pipe": 2}, {"schedule": "1f1b"}, 2, 1 << 15),
}
SAVED = 0.05  #: share of the exposed communication that the best of all orders saves at most


@pytest.mark.parametrize("rate", [1.25e8, pytest.param(5e8, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", SMALL_STEPS)
def test_no_order_is_below_the_bound_or_saves_much(name, rate):
    axes, how, micro_batches, threshold = SMALL_STEPS[name]
    composition, machine = (
        ParallelConfig(mesh=axes, group_threshold=threshold, **how),
        two_hosts(rate, prod(axes.values())),
    )
    analysis = analyze(SMALL, axes, composition, batch_size=8, micro_batches=micro_batches, sequence=32)
    seconds, by_priority = all_orders(analysis, machine), simulation.simulate(analysis, machine)
    assert len(seconds) > (4 if rate < 5e8 else 1)
    assert least_seconds(analysis, machine) <= min(seconds) * (1 + 1e-9)
    assert by_priority.seconds - min(seconds) <= SAVED * by_priority.exposed


def test_one_link_that_is_always_busy_leaves_nothing_to_save():
    axes = {"data": 2}
    seen = evaluate_step(SMALL, two_hosts(1e6), axes, ParallelConfig(mesh=axes), 8, 1, sequence=32)
    assert seen.order_saves == pytest.approx(0, abs=1e-9) and seen.as_json()["order_saves_at_most"] == seen.order_saves


def test_what_more_ranks_than_are_simulated_could_save_is_not_said():
    axes = {"data": 16}
    assert (
        evaluate_step(SMALL, two_hosts(1e9, 16), axes, ParallelConfig(mesh=axes), 16, 1, sequence=32).order_saves
        is None
    )


def test_zero_3_hides_the_gathers_of_a_whole_layer():
    """Each block has four groups; only the first gathers of a pass, and reductions at its end, are exposed."""
    model = gpt(replace(GPT_SIZES["gpt-nano"], layers=3), "gpt-nano")
    axes = {"data": 2}
    composition = ParallelConfig(mesh=axes, zero=3, group_threshold=1 << 17)
    seen = evaluate_step(model, two_hosts(1.25e9), axes, composition, 32, 1)
    step = seen.analysis.of_rank(0)
    gathers = [call for call in step.communications if call.operation == "all_gather"]
    hidden = [call for call in gathers if call.priority]
    assert len(hidden) > 0.8 * len(gathers)
