"""Blocks of whole arrays where a layout deals a letter out instead of cutting it, and the way back."""

from math import prod

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.axes import all_positions
from spmd_engine.sharding import Layout
from spmd_engine.sharding.layout import block_of, in_order

MESHES = [{"context": 3}, {"data": 2, "context": 2}, {"context": 2, "data": 3, "model": 2}, {"pipe": 2, "context": 4}]


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("zigzag", [False, True], ids=["consecutive", "zigzag"])
@pytest.mark.parametrize("length", [0, 2, 11])
def test_what_is_dealt_and_joined_is_the_whole_again(axes, zigzag, length):
    whole = np.arange(5 * length * 7).reshape(5, length, 7)

    def program():
        with Mesh(**axes) as mesh:
            layout = Layout.for_mesh(mesh, zigzag=zigzag)
            block = block_of(whole, "b s v", layout, mesh)
            spec = layout.spec("b s v")
            assert block.shape == spec.local_shape(whole.shape, mesh)
            joined = in_order(spec.gather(block, mesh), "b s v", layout, mesh)
            np.testing.assert_array_equal(joined, whole, strict=True)

    run_threads(program, prod(axes.values()))


def test_balanced_ranks_have_an_early_and_a_late_part():
    places = all_positions({"context": 2})
    layout = Layout.for_mesh(places[0], zigzag=True)
    assert [block_of(np.arange(8), "s", layout, place).tolist() for place in places] == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_first_dims_may_be_left():
    place = all_positions({"data": 2, "context": 2})[3]
    layout = Layout.for_mesh(place)
    whole = np.arange(24).reshape(4, 6)
    assert block_of(whole, "b s", layout, place, first=1).tolist() == whole[:, 3:].tolist()
    assert block_of(whole, "b s", layout, place).tolist() == whole[2:, 3:].tolist()
    assert block_of(whole, "b d", layout, place, first=1) is whole  # nothing is cut: no copy
