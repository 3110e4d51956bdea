"""Gradients, as layers finish: what they add up to, and when they leave."""

from math import prod

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.comm.connections import Connections, Tuning
from spmd_engine.engine.state.assignment import ZeroConfig
from spmd_engine.engine.zero.reducer import Reducer
from spmd_engine.engine.zero.storage import GroupStorage
from spmd_engine.models import deep_mlp
from support import tiny
from support.stored import TIED, UNTIED, Parts, every_stage_of_zero, integers, memory_of, pair_bytes, thresholds


class Garbage(Mesh):
    """New memory is full of nonsense, as it may be; ``alive`` counts what was made since and is still held."""

    def empty(self, *args, **options):
        array = super().empty(*args, **options)
        array.fill(np.nan)
        self.__dict__.setdefault("made", []).append(memory_of(array))
        return array

    @property
    def alive(self):
        return sum(ref() is not None for ref in self.made)


def contribution(parts, m, layer, own, rank):
    """What a layer adds to the gradient of one of its parameters on a rank; None where it adds nothing."""
    full = parts.assignment.uses[layer][own]
    if full == "positions/table" or (full == "norm/scale" and m != 1):
        return None
    return integers(parts.whole[full].shape, rank, m, layer, len(own), ord(own[0]))


def backward(parts, reducer, micro_batches, rank, seen=lambda event: None):
    """All backwards of a step, with gradients that are drawn instead of computed."""
    for m in range(micro_batches):
        for layer in reversed(parts.layers):
            sums = reducer.sums(layer)
            for own in parts.assignment.uses[layer]:
                value = contribution(parts, m, layer, own, rank)
                if value is not None:
                    sums.add(own, value)
            reducer.layer_done(layer)
            seen((m, layer))


def expected_gradients(parts, micro_batches, ranks):
    total = {name: np.zeros(whole.shape) for name, whole in parts.whole.items()}
    for layer in parts.layers:
        for own, full in parts.assignment.uses[layer].items():
            for m in range(micro_batches):
                for rank in ranks:
                    value = contribution(parts, m, layer, own, rank)
                    total[full] += 0 if value is None else value
    return total


def make_reducer(parts):
    return Reducer(parts.storages, parts.assignment.uses, [parts.layers])


def assert_reduced(parts, micro_batches, ranks):
    expected = expected_gradients(parts, micro_batches, ranks)
    for each in parts.storages:
        rows = each.group.rows(each.interval)
        for name, own in each.group.views(each.own_gradients, each.interval).items():
            np.testing.assert_array_equal(own, expected[name][rows[name]], err_msg=name)


STORED = [
    *[({"data": 3}, ZeroConfig(zero, 1500)) for zero in (0, 1, 2, 3)],
    *[({"data": 2}, ZeroConfig(zero, 0)) for zero in (1, 3)],
    *[({"data": 2}, ZeroConfig(zero, 1 << 20)) for zero in (0, 2)],
    ({"data": 2, "shard": 2}, ZeroConfig(None, 1500)),
    ({"data": 2, "shard": 2}, ZeroConfig(2, 1500)),
    ({"replicate": 2, "shard": 2}, ZeroConfig(None, 1500)),
    ({"replicate": 2, "shard": 2}, ZeroConfig(1, 1500)),
]


def stored_of_models():
    """Every other storage, of a model with a tied parameter and one without in turn; the rest is in ``soak``."""
    for i, (axes, storage) in enumerate(STORED):
        for j, (name, model) in enumerate({"tied": TIED, "untied": UNTIED}.items()):
            marks = () if (i + 2 * j) % 4 == i // 4 % 2 else pytest.mark.soak
            yield pytest.param(
                axes, storage, model, marks=marks, id=f"{name}-{tiny.mesh_id(axes)}-{storage.zero}-{storage.threshold}"
            )


@pytest.mark.parametrize("axes, storage, model", list(stored_of_models()))
def test_micro_batches_and_ranks_add_up_and_nothing_else(model, axes, storage):
    """From memory full of nonsense: what comes first is written, what nothing comes for is zero."""

    def program():
        with Garbage(**axes) as mesh:
            parts = Parts(model, mesh, storage)
            reducer = make_reducer(parts)
            for each in parts.storages:
                each.own_gradients[...] = np.nan
                if each.whole_gradients is not None:
                    each.whole_gradients[...] = np.nan
            for micro_batches in (3, 1):
                reducer.begin(micro_batches)
                backward(parts, reducer, micro_batches, mesh.rank)
                reducer.finish()
                assert_reduced(parts, micro_batches, range(mesh.size))

    run_threads(program, prod(axes.values()))


class Sent(GroupStorage):
    """Says when gradients leave."""

    def start_reduce(self):
        self.log.append(self.group.name)
        return super().start_reduce()


@pytest.mark.parametrize("zero", [0, 2])
@thresholds
def test_groups_leave_as_soon_as_the_backward_is_through_with_them(threshold, zero):
    """Before ZeRO-2 after the last micro-batch's, from then on after each."""

    def program():
        with Mesh(data=2) as mesh:
            parts, log = Parts(TIED, mesh, ZeroConfig(zero, threshold), kind=Sent), []
            for each in parts.storages:
                each.log = log
            reducer = make_reducer(parts)
            reducer.begin(2)
            backward(parts, reducer, 2, mesh.rank, log.append)
            reducer.finish()

            through = {}  # the last layer of a backward that uses a group: the first of the model
            for layer in reversed(parts.layers):
                through.update(dict.fromkeys(parts.used(layer), layer))
            expected = []
            for m in range(2):
                for layer in reversed(parts.layers):
                    if m == 1 or zero >= 2:
                        expected += [each.group.name for each in parts.used(layer) if through[each] == layer]
                    expected.append((m, layer))
            assert log == expected

    run_threads(program, 2)


@pytest.mark.parametrize("zero", [2, 3])
def test_few_whole_gradients_are_here_at_once(zero):
    def program():
        with Garbage(data=3) as mesh:
            parts = Parts(deep_mlp(16, 4), mesh, ZeroConfig(zero, pair_bytes(4)))
            assert len(parts.storages) == 8
            reducer, alive, stored = make_reducer(parts), [], mesh.alive
            for _ in range(2):
                reducer.begin(3)
                backward(parts, reducer, 3, mesh.rank, lambda event: alive.append(mesh.alive - stored))
                reducer.finish()
                assert mesh.alive == stored
            return max(alive)

    assert max(run_threads(program, 3)) == 2  # on their way, between two layers


@every_stage_of_zero
def test_a_reducer_begins_anew_after_a_step_that_broke_off(zero, monkeypatch):
    """Sums under way, of many pieces here, must not end in the gradients of the next step."""
    monkeypatch.setattr(Connections, "tuning", Tuning(piece=256))

    def program():
        with Garbage(data=2) as mesh:
            parts = Parts(UNTIED, mesh, ZeroConfig(zero, 3000))
            reducer = make_reducer(parts)
            for broken_after in (1, 3, len(parts.layers)):
                reducer.begin(1)
                for layer in [*reversed(parts.layers)][:broken_after]:
                    for own, full in parts.assignment.uses[layer].items():
                        reducer.sums(layer).add(own, np.full_like(parts.whole[full], np.nan))
                    reducer.layer_done(layer)
                reducer.begin(2)
                backward(parts, reducer, 2, mesh.rank)
                reducer.finish()
                assert_reduced(parts, 2, range(2))

    run_threads(program, 2)
