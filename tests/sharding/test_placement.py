"""Which rectangles each rank holds and owns."""

from math import prod

import numpy as np
import pytest

from spmd_engine.axes import all_positions
from spmd_engine.errors import UsageError
from spmd_engine.sharding import Spec
from spmd_engine.sharding.placement import ArrayPlacement, Placement
from spmd_engine.sharding.rectangles import Rectangle

MESHES = [{"data": 1}, {"data": 3}, {"data": 2, "model": 2}, {"data": 2, "model": 3}]


def texts(of_ranks):
    return [[str(each) for each in rectangles] for rectangles in of_ranks]


def columns(*pairs, shape=(2, 9)):
    """By rank, all rows of some columns."""
    return [[Rectangle((0, start), (shape[0], stop)) for start, stop in intervals] for intervals in pairs]


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("sharding", ["b/data d", "b d/data", "b d", "b/data d/model", "b/model,data d"])
def test_blocks_of_a_sharding_are_held_and_the_first_of_copies_owns(axes, sharding):
    spec, shape, places = Spec.parse(sharding), (5, 4), all_positions(axes)
    if not set(spec.axes) <= set(axes):
        pytest.skip("no such axis")
    placement = ArrayPlacement.of_spec(sharding, shape, np.float32, places)
    placement.check("w")
    owners = np.full(shape, -1)
    for rank, place in enumerate(places):
        (held,) = placement.held[rank]
        assert held.index == spec.block(shape, place)
        block = owners[held.index]
        assert placement.owned[rank] == ((held,) if (block < 0).all() else ())
        block[block < 0] = rank
    assert sum(placement.nbytes(rank) for rank in range(len(places))) == (
        4 * prod(shape) * len(places) // prod(axes[axis] for axis in spec.axes)
    )


def test_only_some_coordinates_hold_it():
    places = all_positions({"pipe": 3, "data": 2})
    placement = ArrayPlacement.of_spec("b/data", (4,), np.float32, places, among={"pipe": (0, 2)})
    assert texts(placement.held) == [["[0:2]"], ["[2:4]"], [], [], ["[0:2]"], ["[2:4]"]]
    assert texts(placement.owned) == [["[0:2]"], ["[2:4]"], [], [], [], []]


def test_halos_end_with_the_array_and_none_are_around_nothing():
    places = all_positions({"data": 4})
    placement = ArrayPlacement.of_spec("h/data w", (3, 2), np.float32, places, halos={"h": (2, 1)})
    assert texts(placement.held) == [["[0:2, 0:2]"], ["[0:3, 0:2]"], ["[0:3, 0:2]"], ["[3:3, 0:2]"]]
    assert texts(placement.owned) == [["[0:1, 0:2]"], ["[1:2, 0:2]"], ["[2:3, 0:2]"], ["[3:3, 0:2]"]]
    placement.check("x")


def test_an_empty_batch_has_halos_too():
    """As many rows as a layer makes its outputs of, of no samples; and of no rows, none are beside any."""
    places = all_positions({"data": 3})
    of_none = ArrayPlacement.of_spec("b h/data w", (0, 3, 2), np.float32, places, halos={"h": (1, 1)})
    assert texts(of_none.held) == [["[0:0, 0:2, 0:2]"], ["[0:0, 0:3, 0:2]"], ["[0:0, 1:3, 0:2]"]]
    of_none.check("x")


def test_of_rectangles_that_overlap_the_first_holder_owns():
    held = columns([(0, 4)], [(2, 6)], [(0, 1), (5, 9)])
    placement = ArrayPlacement.of_rectangles((2, 9), np.float32, held)
    placement.check("w")
    assert texts(placement.owned) == [["[0:2, 0:4]"], ["[0:2, 4:6]"], ["[0:2, 6:9]"]]


@pytest.mark.parametrize(
    "held, owned, words",
    [
        (columns([(0, 4)], [(6, 9)]), None, r"w: no rank owns the element at \(0, 4\)"),
        (columns([(0, 6)], [(4, 9)]), columns([(0, 6)], [(4, 9)]), r"w: ranks 0, 1 all own the element at \(0, 4\)"),
        (columns([(0, 6)], [(6, 8)]), columns([(0, 6)], [(6, 9)]), r"w: rank 1 owns \[0:2, 6:9\], which no rectangle"),
        (columns([(0, 6), (5, 9)], []), None, r"w: rank 0 holds \[0:2, 0:6\], \[0:2, 5:9\], which overlap"),
    ],
)
def test_what_is_no_placement(held, owned, words):
    with pytest.raises(UsageError, match=words):
        Placement({"w": ArrayPlacement.of_rectangles((2, 9), np.float32, held, owned)}).checked()


def test_arrays_on_different_numbers_of_ranks():
    one, other = (ArrayPlacement.of_rectangles((2, 9), np.float32, columns(*[[]] * n)) for n in (2, 3))
    with pytest.raises(UsageError, match=r"of one group of ranks; these arrays are placed on \[2, 3\] ranks"):
        Placement({"w": one, "v": other})
