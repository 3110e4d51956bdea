"""Parameters are unsharder a layer at a time: what is gathered when, and released when."""

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.engine.state.assignment import ZeroConfig
from spmd_engine.engine.zero.storage import GroupStorage
from spmd_engine.engine.zero.unsharder import Unsharder
from spmd_engine.models import deep_mlp
from support.stored import TIED, UNTIED, Parts, memory_of, pair_bytes, thresholds


def leaves(tree, prefix=""):
    """A layer's arrays by their own names: "norm/scale" stands at ["norm"]["scale"]."""
    for name, value in tree.items():
        yield from leaves(value, f"{prefix}{name}/") if isinstance(value, dict) else [(prefix + name, value)]


@pytest.mark.parametrize("zero, threshold", [(0, 1500), (1, 1500), (3, 0), (3, 1500), (3, 1 << 20)])
@pytest.mark.parametrize("model", [TIED, UNTIED], ids=["tied", "untied"])
def test_a_layer_opens_its_own_parameters(model, zero, threshold):
    def program():
        with Mesh(data=2) as mesh:
            parts = Parts(model, mesh, ZeroConfig(zero, threshold))
            unsharder = Unsharder(parts.storages, parts.assignment.uses)
            for layer in (*parts.layers, *reversed(parts.layers), 3, 3, 6, 0):
                found = dict(leaves(unsharder.unshard(layer, prefetch=range(layer + 1, len(parts.layers)))))
                assert list(found) == list(parts.assignment.uses[layer])
                for own, full in parts.assignment.uses[layer].items():
                    np.testing.assert_array_equal(found[own], parts.whole[full], strict=True)
            assert zero == 3 or not mesh.ledger.entries

    run_threads(program, 2)


@thresholds
@pytest.mark.parametrize("model", [TIED, UNTIED], ids=["tied", "untied"])
def test_of_groups_in_parts_only_those_in_use_and_of_the_next_layer_are_here(model, threshold):
    def program():
        with Mesh(data=2) as mesh:
            parts = Parts(model, mesh, ZeroConfig(3, threshold))
            unsharder = Unsharder(parts.storages, parts.assignment.uses)
            last = parts.layers[-1]
            walk = [(layer, (), range(layer + 1, last + 1)) for layer in parts.layers]
            walk += [(layer, (), range(layer - 1, -1, -1)) for layer in reversed(parts.layers)]
            walk += [(4, (2, 3), (1, 0)), (3, (2, 3, 4), (1, 0)), (2, (2,), ()), (2, (), (2, 3, 4))]
            for layer, keep, prefetch in walk:
                unsharder.unshard(layer, keep=keep, prefetch=prefetch)
                wanted = parts.used(layer, *keep)
                absent = ([each for each in parts.used(number) if each not in wanted] for number in prefetch)
                assert parts.gathered() == {*wanted, *next(filter(None, absent), [])}
            unsharder.release()
            assert not parts.gathered()

    run_threads(program, 2)


class Logged(GroupStorage):
    """Says when gathers begin and when they are waited for."""

    def start_gather(self):
        self.log.append(f"start {self.group.name}")
        super().start_gather()

    def finish_gather(self):
        self.log.append(f"finish {self.group.name}")
        super().finish_gather()


def test_the_next_group_is_on_its_way_before_the_one_in_use_is_waited_for():
    def program():
        with Mesh(data=2) as mesh:
            parts, log = Parts(deep_mlp(8, 4), mesh, ZeroConfig(3, pair_bytes(4)), kind=Logged), []
            for each in parts.storages:
                each.log = log
            unsharder = Unsharder(parts.storages, parts.assignment.uses)
            for layer in parts.layers:
                unsharder.unshard(layer, prefetch=range(layer + 1, 4))
            return list(dict.fromkeys(log))

    events = ["start 0", "start 1", "finish 0", "start 2", "finish 1", "start 3", "finish 2", "finish 3"]
    assert run_threads(program, 2) == [[event.replace(" ", " group") for event in events]] * 2


def test_released_memory_is_given_back():
    def program():
        with Mesh(data=2) as mesh:
            parts = Parts(deep_mlp(8, 4), mesh, ZeroConfig(3, pair_bytes(4)))
            unsharder = Unsharder(parts.storages, parts.assignment.uses)
            unsharder.unshard(0, prefetch=range(1, 4))
            first = memory_of(parts.storages[0].whole_parameters)
            unsharder.unshard(1, prefetch=range(2, 4))
            assert first() is None

    run_threads(program, 2)
