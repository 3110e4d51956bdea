"""Which rectangles each rank holds and owns."""

from math import prod

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.axes import all_positions
from spmd_engine.errors import UsageError
from spmd_engine.sharding import Spec
from spmd_engine.sharding.placement import ArrayPlacement, Placement, exchange_placements, exchange_shapes
from spmd_engine.sharding.rectangles import Rectangle, covers_once
from support.nodes import everyone

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


def drawn_parts(rng, ranks):
    """Parts of a row of 12 that ranks hold: a partition, with replicas and empty parts; or any parts, or none."""
    if rng.random() < 0.5:
        edges = np.sort(rng.integers(0, 13, ranks + 1))
        edges[[0, -1]] = 0, 12
        blocks = [[pair] for pair in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]
        return [*blocks, blocks[int(rng.integers(ranks))]]
    parts = [tuple(np.sort(rng.integers(0, 13, 2)).tolist()) for _ in range(ranks)]
    return [[part] if rng.random() < 0.8 else [] for part in parts] + [[(0, 12)]]


@pytest.mark.parametrize("seed", range(12))
def test_an_exchange_finds_what_each_rank_holds_and_which_owns_it(seed):
    rng = np.random.default_rng(seed)
    drawn = {name: columns(*drawn_parts(rng, 3), shape=(2, 12)) for name in ("a", "b", "c")}
    drawn["like a"] = drawn["a"]

    def program():
        group, dtype = everyone(), np.dtype(np.float32)
        held = {name: (dtype, parts[group.rank][0]) for name, parts in drawn.items() if parts[group.rank]}
        exchanged = exchange_placements(group, {"one": held, "same": dict(held), "none": {}})
        assert exchanged["one"] is exchanged["same"] and not exchanged["none"]
        return exchanged["one"]

    for placement in run_threads(program, 4):
        assert sorted(placement) == sorted(drawn) and placement["a"] is placement["like a"]
        for name, parts in drawn.items():
            expected, found = ArrayPlacement.of_rectangles((2, 12), np.float32, parts), placement[name]
            assert found.shape == expected.shape and texts(found.held) == texts(expected.held)
            assert list(found.held) == [found.held[rank] for rank in range(4)]
            covered = [[part for part in owned if part.size] for owned in found.owned]
            assert texts(covered) == texts([[part for part in owned if part.size] for owned in expected.owned])


@pytest.mark.parametrize(("rows", "calls"), [([3, 3, 3, 3], 1), ([4, 3, 3, 0], 2), ([4, 3, 3, None], 2)], ids=str)
def test_shapes_that_are_equal_on_all_ranks_are_not_sent(rows, calls):
    def program():
        with Mesh(data=2, model=2) as mesh:
            group, shape = mesh.group(), (rows[mesh.rank] or 0, 5)
            blocks = {"w": (Spec.parse("r/data,model c"), shape), "v": (Spec.parse("r c"), shape)}
            if rows[mesh.rank] is None:
                del blocks["w"]
            before = group.ledger.total().calls
            return exchange_shapes(group, mesh, blocks), group.ledger.total().calls - before

    for mine, (shapes, made) in zip(rows, run_threads(program, 4), strict=True):
        whole = {} if None in rows else {"w": (sum(rows), 5)}
        assert shapes == whole | {"v": (mine or 0, 5)} and made == calls


def test_ranks_send_numbers_of_their_own_rectangles_and_names_once():
    sent = []

    def program():
        group = everyone()
        held = {f"block{n}/array": (np.dtype("f4"), Rectangle((group.rank, 0), (group.rank + 1, 8))) for n in range(50)}
        before = group.ledger.total()
        exchange_placements(group, {"": held})
        total = group.ledger.total()
        sent.append((total.calls - before.calls, total.sent - before.sent))

    run_threads(program, 4)
    assert sent == [(1, (2 + 4) * 8 * 3)] * 4


@pytest.mark.parametrize(
    ("bounds", "once"),
    [
        ([[[0, 0], [2, 4]], [[0, 4], [2, 9]]], True),
        ([[[0, 0], [1, 9]], [[1, 0], [2, 3]], [[1, 3], [2, 9]]], True),
        ([[[0, 0], [2, 4]]], False),
        ([[[0, 0], [2, 5]], [[0, 4], [2, 9]]], False),
        ([[[0, 0], [2, 5]], [[0, 4], [2, 8]]], False),
        ([], False),
    ],
)
def test_rectangles_that_cover_an_array_once(bounds, once):
    assert covers_once(np.array(bounds, int).reshape(-1, 2, 2), (2, 9)) == once
    assert covers_once(np.zeros((1, 2, 0), int), ()) and covers_once(np.zeros((0, 2, 1), int), (0,))


def test_arrays_on_different_numbers_of_ranks():
    one, other = (ArrayPlacement.of_rectangles((2, 9), np.float32, columns(*[[]] * n)) for n in (2, 3))
    with pytest.raises(UsageError, match=r"of one group of ranks; these arrays are placed on \[2, 3\] ranks"):
        Placement({"w": one, "v": other})
