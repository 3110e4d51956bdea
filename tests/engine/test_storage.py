"""One parameter group: where it lives, how its gradients are summed, what is gathered and refreshed."""

from collections import Counter
from math import prod

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.arrays.backend import CPU
from spmd_engine.engine.state.array_table import array_table
from spmd_engine.engine.zero.storage import GroupStorage
from spmd_engine.sharding.groups import Member, Sum, make_groups
from support.stored import FLOAT, every_stage_of_zero, integers, memory_of

SHAPES = {"w0": (5, 3), "empty": (0, 4), "w1": (2, 7), "bias": (6,), "number": ()}
MESHES = [
    ({"data": 2}, Sum(("data",), ("data",))),
    ({"data": 5}, Sum(("data",), ("data",))),  # one owns nothing of what stages share
    ({"replicate": 2, "shard": 3}, Sum(("replicate", "shard"), ("shard",))),
    ({"data": 2, "context": 2}, Sum(("data", "context"), ("data", "context"))),
    ({"model": 2, "data": 2}, Sum(("data",), ("data",))),
    ({"pipe": 3, "data": 2}, Sum(("data",), ("data",), stages=(0, 2))),
    ({"pipe": 2}, Sum((), (), stages=(0, 1))),
    ({"data": 2}, Sum()),
]
every_mesh = pytest.mark.parametrize("axes, summed", MESHES, ids=str)


def on_each_rank(axes, summed, zero, program):
    """``program(storage, mesh)`` by rank of the mesh, where the group is held."""

    def body():
        with Mesh(**axes) as mesh:
            if summed.stages and mesh.coordinates["pipe"] not in summed.stages:
                return None
            cut = summed.sharded if zero else ()
            total = Sum(summed.over, cut, summed.stages)
            members = [Member(name, shape, len(shape) > 1, total, prod(shape)) for name, shape in SHAPES.items()]
            group, *_ = make_groups(members, FLOAT.itemsize)  # what stages share stands alone: then the first
            return program(GroupStorage(group, mesh, array_table(zero, cut, FLOAT), CPU), mesh)

    return run_threads(body, prod(axes.values()))


def summed_with(axes, summed, rank):
    """The ranks over which the gradients of ``rank`` are summed."""
    sizes = tuple(axes.values())
    here = dict(zip(axes, np.unravel_index(rank, sizes)))

    def together(other):
        there = dict(zip(axes, np.unravel_index(other, sizes)))
        free = {*summed.over, *(("pipe",) if summed.stages else ())}
        return all(axis in free or here[axis] == there[axis] for axis in axes) and (
            not summed.stages or there["pipe"] in summed.stages
        )

    return [other for other in range(prod(sizes)) if together(other)]


@every_stage_of_zero
@every_mesh
def test_own_parts_of_reduced_gradients_are_the_sum_over_ranks(axes, summed, zero):
    def program(storage, mesh):
        for step in range(2):
            for name, gradient in storage.gradients.items():
                assert gradient.shape == SHAPES[name]
            storage.whole_gradients[...] = integers(storage.group.size, step, mesh.rank)
            pending = storage.start_reduce()
            result = pending.wait() if pending else None
            if zero >= 2 and summed.sharded:
                storage.own_gradients[...] = result
            rest = storage.start_reduce_rest()
            if rest:
                rest.wait()
            total = sum(integers(storage.group.size, step, r) for r in summed_with(axes, summed, mesh.rank))
            np.testing.assert_array_equal(storage.own_gradients, total[storage.interval])
        return storage.interval, storage.group.size

    for rank, found in enumerate(results := on_each_rank(axes, summed, zero, program)):
        if found and zero and summed.sharded:  # the parts of those who share state are the whole
            owners = summed_with(axes, Sum(summed.sharded), rank)
            intervals = [results[owner][0] for owner in owners]
            assert [i.start for i in intervals] + [found[1]] == [0, *(i.stop for i in intervals)]
        elif found:
            assert found[0] == slice(0, found[1])


@every_stage_of_zero
@every_mesh
def test_gradients_go_by_the_operation_that_sends_least(axes, summed, zero):
    """Parts are scattered and then summed over replicas, and nothing whole where there are parts."""

    def program(storage, mesh):
        storage.gradients["w0"][...] = 0
        for start in (storage.start_reduce, storage.start_reduce_rest):
            pending = start()
            if pending:
                pending.wait()
        return {key: entry.sent for key, entry in mesh.ledger.entries.items()}, storage.group.size * FLOAT.itemsize

    cut = summed.sharded if zero else ()
    rest = (*(("pipe",) if summed.stages else ()), *(axis for axis in summed.over if axis not in cut))
    entries = [found for found in on_each_rank(axes, summed, zero, program) if found]
    size = entries[0][1]
    expected = Counter()
    parts = prod(axes[axis] for axis in cut)
    copies = prod(axes[axis] for axis in rest if axis != "pipe") * max(1, len(summed.stages))
    if cut:
        expected["reduce_scatter", ",".join(cut), "gradients"] = size * (parts - 1) * (len(entries) // parts)
    if rest:  # of each part 2 (copies - 1) times
        expected["all_reduce", ",".join(rest), "gradients"] = 2 * size * (copies - 1) * len(entries) // parts // copies
    assert sum((Counter(sent) for sent, _ in entries), Counter()) == expected


@every_stage_of_zero
@every_mesh
def test_what_owners_update_everyone_who_needs_it_has(axes, summed, zero):
    def program(storage, mesh):
        everywhere = integers(storage.group.size, 5)
        storage.own_parameters[...] = everywhere[storage.interval]
        refresh = storage.start_refresh()
        assert (refresh is not None) == (zero in (1, 2) and bool(summed.sharded))
        if refresh:
            refresh.wait()
        storage.start_gather()
        storage.start_gather()  # nothing more: it is on its way
        storage.finish_gather()
        np.testing.assert_array_equal(storage.whole_parameters, everywhere)
        for name, block in storage.parameters.items():
            np.testing.assert_array_equal(block, everywhere[storage.group.spans[name]].reshape(SHAPES[name]))
        calls = {key: entry.calls for key, entry in mesh.ledger.entries.items()}
        gathers = {("all_gather", ",".join(summed.sharded), "parameters"): 1}
        assert calls == (gathers if zero and summed.sharded else {})

    on_each_rank(axes, summed, zero, program)


@every_stage_of_zero
def test_which_arrays_are_here_at_which_time(zero):
    def program(storage, mesh):
        sizes = [part.stop - part.start for part in storage.group.intervals(3)]
        own = sizes[mesh.rank] if zero else storage.group.size

        def here():
            return storage.whole_parameters is not None, storage.whole_gradients is not None

        parameters, gradients = zero < 3, zero < 2
        assert storage.own_parameters.shape == storage.own_gradients.shape == (own,)
        assert storage.stored_parameters.shape == (own if zero == 3 else storage.group.size,)
        assert here() == (parameters, gradients)
        assert not parameters or np.shares_memory(storage.own_parameters, storage.whole_parameters)
        assert not gradients or np.shares_memory(storage.own_gradients, storage.whole_gradients)

        storage.start_gather()
        storage.finish_gather()
        assert here() == (True, gradients)
        assert storage.gradients is storage.gradients
        assert here() == (True, True)
        if not gradients:
            assert not np.shares_memory(storage.own_gradients, storage.whole_gradients)
        pending = storage.start_reduce()
        assert here() == (True, gradients)  # what is not stored was given away
        pending.wait()
        gathered = memory_of(storage.whole_parameters)
        storage.release()
        assert here() == (parameters, gradients)
        assert parameters or gathered() is None

    on_each_rank({"data": 3}, Sum(("data",), ("data",)), zero, program)


def test_memory_that_is_being_gathered_into_is_not_released_before_it_ends():
    def program(storage, mesh):
        storage.own_parameters[...] = 1
        storage.start_gather()
        storage.release()
        assert mesh.ledger.total("all_gather").calls == 1  # it is over
        storage.own_parameters[...] = 2
        storage.start_gather()
        storage.finish_gather()
        assert (storage.whole_parameters == 2).all()
        assert mesh.ledger.total("all_gather").calls == 2

    on_each_rank({"data": 3}, Sum(("data",), ("data",)), 3, program)
