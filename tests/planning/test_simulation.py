"""The event simulation, on steps that can be worked out by hand."""

from dataclasses import replace

import pytest

from spmd_engine.errors import UsageError
from spmd_engine.planning.dry_run.step_analysis import (
    Communication,
    Computation,
    Peak,
    Phases,
    Product,
    Products,
    RankClass,
    RankStep,
    StepAnalysis,
)
from spmd_engine.planning.machine.machine import parse_machine
from spmd_engine.planning.simulator.simulation import simulate

TEXT = """
name = "m"
[[nodes]]
name = "n"
ranks = 2
memory = 1e9
memory_bandwidth = 1e15
{cores}
[nodes.speeds]
float32 = 1e9
[nodes.inside]
latency = 0
bandwidth = 1e9
by_copy = {copy}
"""


def machine(cores=None, copy="false"):
    return parse_machine(TEXT.format(cores=f"cores = {cores}" if cores else "", copy=copy))


def work(name, milliseconds):
    return Computation(name, name, Phases.FORWARD, products=Products([Product(500 * milliseconds, 10, 100)]), calls=1)


def all_reduce(place, size, begins, ends, label=""):
    return Communication("all_reduce", "data", label, 2, place, size, size, begins, ends)


def analysis(*steps):
    classes = [
        RankClass(RankStep({"data": rank}, computations, communications, [], Peak(0, 0, {})), [rank])
        for rank, (computations, communications) in enumerate(steps)
    ]
    return StepAnalysis("model", {"data": len(steps)}, classes, 1, 0)


def ms(prediction):
    return round(prediction.seconds * 1e3, 6)


def test_a_collective_starts_with_the_last_rank_and_hides_behind_work():
    steps = [
        ([work("a", first), work("b", 5)], [all_reduce(rank, 2_000_000, 1, 2)]) for rank, first in ((0, 2), (1, 3))
    ]
    # 2 MB over two ranks take 2 ms at 1 GB/s, from 3 ms on: before 8 ms, when the slower rank is done
    assert ms(simulate(analysis(*steps), machine())) == 8
    steps = [(computations, [all_reduce(rank, 9_000_000, 1, 2)]) for rank, (computations, _) in enumerate(steps)]
    assert ms(simulate(analysis(*steps), machine())) == 12


def test_ranks_share_cores():
    steps = [([work("a", 4)], []), ([work("a", 2)], [])]
    assert ms(simulate(analysis(*steps), machine(cores=2))) == 4
    assert ms(simulate(analysis(*steps), machine(cores=1))) == 6  # both until 4 ms, then one alone


def test_a_rank_without_samples_only_takes_part():
    steps = [([work("a", 4)], [all_reduce(0, 2_000_000, 1, 1)]), ([], [all_reduce(1, 2_000_000, 0, 0)])]
    assert ms(simulate(analysis(*steps), machine())) == 6


def test_moving_bytes_by_copy_needs_a_core():
    steps = [([work("a", 4)], [all_reduce(rank, 1_000_000, 1, 1)]) for rank in range(2)]
    # an all_reduce copies twice its bytes: 2 ms of a core on each rank
    assert ms(simulate(analysis(*steps), machine(cores=2, copy="true"))) == 6
    assert ms(simulate(analysis(*steps), machine(cores=1, copy="true"))) == 12


def test_the_more_urgent_of_two_transfers_goes_first():
    late, urgent = 3_000_000, 1_000_000
    steps = [
        (
            [work("a", 1), work("b", 1), work("c", 1)],
            [all_reduce(rank, late, 0, 3, "late"), all_reduce(rank, 1_000_000, 0, 3, "later")]
            + [all_reduce(rank, urgent, 0, 1, "urgent")],
        )
        for rank in range(2)
    ]
    found = simulate(analysis(*steps), machine())
    ends = [end for name, _, _, end in found.spans[0] if "urgent" in name]
    # "late" was on the link already; "urgent" overtakes "later"
    assert [round(end * 1e3, 6) for end in ends] == [4.0]
    assert ms(found) == 6


@pytest.mark.parametrize("copy, expected", [("false", 3), ("true", 2)])
def test_ranks_of_a_ring_all_send_before_they_receive(copy, expected):
    def message(operation, rank):
        return Communication(operation, "data", "", 2, rank, 1_000_000, 1_000_000, 1, 1, peer=1 - rank)

    steps = [([work("a", 1)], [message("send", rank), message("receive", rank)]) for rank in range(2)]
    assert ms(simulate(analysis(*steps), machine(cores=2, copy=copy))) == expected


def test_calls_that_do_not_match_are_an_error():
    steps = [([work("a", 1)], [all_reduce(0, 8, 1, 1, "x")]), ([work("a", 1)], [all_reduce(1, 8, 1, 1, "y")])]
    found = analysis(*steps)
    with pytest.raises(UsageError, match="hang"):
        simulate(found, machine())


def passing(cores, *computations, pass_seconds=3e-3):
    """Milliseconds of a rank that computes these, each pass through a layer taking a host so long."""
    one = machine(cores).with_fitted(pass_seconds=pass_seconds)
    return ms(simulate(analysis((computations, [])), one))


def test_a_device_works_while_its_host_launches_the_next_work():
    short, long = [work(f"a{n}", 1) for n in range(4)], [work("b", 5)]
    assert passing(2, *long) == 5 + 3  # a rank with cores does one after the other
    assert passing(None, *long) == 5
    assert passing(None, *short) == 4 * 3
    assert passing(None, *long, *short) == 5 * 3


def test_a_step_is_bound_by_its_launches_or_by_its_work_and_a_wait_drains_the_device():
    text = TEXT.format(cores="launch_seconds = 1e-3\nsync_seconds = 2e-3", copy="false")

    def took(*launches_works_waits):
        computations = [
            replace(work(f"a{n}", milliseconds), launches=launches, waits=waits)
            for n, (launches, milliseconds, waits) in enumerate(launches_works_waits)
        ]
        return ms(simulate(analysis((computations, [])), parse_machine(text)))

    assert took((3, 1, 0), (3, 1, 0)) == 6  # the host launches no faster
    assert took((1, 5, 0), (4, 1, 0)) == 6  # the host launches the second while the device does the first
    assert took((1, 5, 1), (4, 1, 0)) == 5 + 4  # after a wait it cannot
    assert took((1, 1, 1), (4, 1, 0)) == 1 + 2 + 4


def test_a_pass_that_communicates_is_launched_once():
    assert passing(None, work("a", 1), work("a", 1)) == 3
    assert passing(None, work("a", 1), work("b", 1)) == 6
