"""The written form of shardings, and the blocks it stands for."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_engine import Mesh, run_threads
from spmd_engine.axes import all_positions
from spmd_engine.comm.notation import weighted_lengths
from spmd_engine.errors import MeshError, NotationError
from spmd_engine.sharding import Spec

AXES = ["data", "model", "expert"]


@st.composite
def specs(draw):
    """Any legal spec: no letter twice, each axis on one letter at most, a letter's axes in any order."""
    letters = draw(st.lists(st.sampled_from("bsdfhkv"), unique=True, max_size=4))
    dims = [(letter, []) for letter in letters]
    for axis in draw(st.permutations(AXES)):
        place = draw(st.integers(-1, len(dims) - 1))
        if place >= 0:
            dims[place][1].append(axis)
    return Spec(tuple((letter, tuple(axes)) for letter, axes in dims))


def places(axes):
    """Every rank of a mesh, as far as a spec looks at it."""
    for where in product(*(range(size) for size in axes.values())):
        yield SimpleNamespace(axes=axes, coordinates=dict(zip(axes, where)))


# --- reading and writing


@given(specs())
def test_what_is_written_can_be_read(spec):
    assert Spec.parse(str(spec)) == spec


def test_the_parts_of_a_spec():
    spec = Spec.parse("b/data,expert  s d/model")
    assert str(spec) == "b/data,expert s d/model"
    assert spec.letters == "bsd"
    assert spec.axes == ("data", "expert", "model")
    assert spec.axes_of("b") == ("data", "expert") and spec.axes_of("s") == ()
    assert list(spec) == [("b", ("data", "expert")), ("s", ()), ("d", ("model",))]


def test_nothing_is_the_sharding_of_a_number():
    assert Spec.parse("") == Spec(()) and str(Spec(())) == ""


UNREADABLE = ["batch/data", "b/", "b/data,", "model b", "b/da-ta", "1", "/data", "b/data:", "b/data:3:x", "b/:3:1"]


@pytest.mark.parametrize("text", UNREADABLE)
def test_what_cannot_be_read(text):
    with pytest.raises(NotationError, match=f'cannot read sharding "{text}" at'):
        Spec.parse(text)


def test_a_letter_twice():
    with pytest.raises(NotationError, match='"b d b" names a letter twice'):
        Spec.parse("b d b")


def test_an_axis_on_two_letters_names_both():
    with pytest.raises(NotationError) as error:
        Spec.parse("b s/model d f/data,model")
    for words in ('"b s/model d f/data,model"', 'axis "model" shards s and f', "diagonal blocks"):
        assert words in str(error.value)


def test_an_axis_twice_on_one_letter():
    with pytest.raises(NotationError, match='axis "data" shards b'):
        Spec.parse("b/data,data")


# --- blocks


@given(specs(), st.lists(st.integers(1, 4), min_size=3, max_size=3), st.data())
def test_blocks_cover_the_whole_exactly_once(spec, sizes, data):
    axes = dict(zip(AXES, sizes))
    shape = [data.draw(st.integers(0, 9)) for _ in spec]
    count, shapes = np.zeros(shape, int), []
    for rank in places(axes):
        block = spec.block(shape, rank)
        shapes.append(spec.local_shape(shape, rank))
        assert count[block].shape == shapes[-1]
        count[block] += 1
    assert spec.largest_shape(shape, rank) == tuple(map(max, zip(*shapes)))
    copies = np.prod([size for axis, size in axes.items() if axis not in spec.axes])
    assert (count == copies).all()


@given(st.integers(0, 40), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_parts_are_in_order_and_even(length, sizes):
    axes = {f"axis{i}": size for i, size in enumerate(sizes)}
    spec = Spec((("b", tuple(axes)),))
    parts = [spec.block([length], rank)[0] for rank in places(axes)]
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == length
    lengths = [part.stop - part.start for part in parts]
    assert max(lengths) - min(lengths) <= 1
    if len(sizes) == 1:
        assert lengths == sorted(lengths, reverse=True)


def test_a_later_axis_cuts_the_parts_of_an_earlier_one():
    rank = SimpleNamespace(axes={"data": 2, "expert": 2}, coordinates={"data": 0, "expert": 1})
    assert Spec.parse("b/data,expert").block([10], rank) == (slice(3, 5),)
    assert Spec.parse("b/expert,data").block([10], rank) == (slice(5, 8),)


def test_an_array_of_another_number_of_dims():
    rank = SimpleNamespace(axes={"data": 2}, coordinates={"data": 0})
    with pytest.raises(NotationError, match=r'"b/data d" has 2 dims, the array has shape \(2, 3, 4\)'):
        Spec.parse("b/data d").block((2, 3, 4), rank)


def test_an_axis_that_the_mesh_does_not_have():
    rank = SimpleNamespace(axes={"data": 2, "expert": 2}, coordinates={"data": 0, "expert": 0})
    with pytest.raises(MeshError, match='axis "model", which the mesh does not have; there are: data, expert'):
        Spec.parse("d f/model").block((2, 3), rank)


@pytest.mark.parametrize(
    "text, shape, axes",
    [
        ("b/data d", (5, 3), {"data": 2}),
        ("b d/data", (5, 3), {"data": 4}),  # the last rank's block is empty
        ("b/data d/model", (1, 4), {"data": 2, "model": 3}),
        ("b/data,model d", (7, 2), {"data": 2, "model": 3}),
        ("d b/model,data", (2, 7), {"data": 2, "model": 3}),
        ("b/data d", (0, 3), {"data": 2}),
        ("b d", (2, 3), {"data": 2}),
        ("", (), {"data": 2}),
        ("b/data:3:1 d", (7, 3), {"data": 2}),
        ("b/model,data:0:1 d", (7, 3), {"data": 2, "model": 2}),
    ],
)
def test_gathered_blocks_are_the_whole(text, shape, axes):
    spec, whole = Spec.parse(text), np.arange(np.prod(shape)).reshape(shape)

    def rank():
        mesh = Mesh(**axes)
        return spec.gather(whole[spec.block(shape, mesh)], mesh, label="gather"), mesh.ledger

    for gathered, ledger in run_threads(rank, ranks=int(np.prod(list(axes.values())))):
        np.testing.assert_array_equal(gathered, whole, strict=True)
        assert {key[0] for key in ledger.entries} <= {"all_gather"}
        assert ledger.total().calls == len(spec.axes)


# --- weights


def test_weights_are_read_written_and_looked_up():
    spec = Spec.parse("b/data:3:1,expert s d/model:1:0:2")
    assert str(spec) == "b/data:3:1,expert s d/model:1:0:2" and Spec.parse(str(spec)) == spec
    assert spec.axes == ("data", "expert", "model") and spec.axes_of("b") == ("data", "expert")
    assert spec.cuts_of("b") == (("data", (3, 1)), ("expert", None))
    assert spec != Spec.parse("b/data,expert s d/model")


@pytest.mark.parametrize(
    "text, shape, sizes, shapes",
    [
        ("b/data:3:1 d", (8, 2), {"data": 2}, [(6, 2), (2, 2)]),
        ("b/data:3:1 d", (3, 2), {"data": 2}, [(2, 2), (1, 2)]),
        ("b/data:3:1,expert d", (8, 1), {"data": 2, "expert": 2}, [(3, 1), (3, 1), (1, 1), (1, 1)]),
        ("b/expert,data:1:0 d", (5, 1), {"data": 2, "expert": 2}, [(3, 1), (2, 1), (0, 1), (0, 1)]),
        ("b/data:1:2 d/expert:2:1", (3, 3), {"data": 2, "expert": 2}, [(1, 2), (1, 1), (2, 2), (2, 1)]),
    ],
)
def test_blocks_by_weights(text, shape, sizes, shapes):
    spec, ranks = Spec.parse(text), all_positions(sizes)
    assert [spec.local_shape(shape, rank) for rank in ranks] == shapes
    assert spec.largest_shape(shape, ranks[-1]) == tuple(map(max, zip(*shapes)))
    count = np.zeros(shape, int)
    for rank in ranks:
        count[spec.block(shape, rank)] += 1
    assert (count == 1).all()


@given(st.integers(0, 60), st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any))
def test_parts_are_near_their_shares_and_equal_weights_cut_evenly(length, weights):
    lengths = weighted_lengths(length, weights)
    assert sum(lengths) == length
    for part, weight in zip(lengths, weights, strict=True):
        assert abs(part - length * weight / sum(weights)) < 1
    ranks = all_positions({"data": len(weights)})
    even = [Spec.parse("b/data").local_shape((length,), rank)[0] for rank in ranks]
    assert weighted_lengths(length, [3] * len(weights)) == even


def test_weights_that_make_no_sense():
    with pytest.raises(NotationError, match='all weights of "data" are 0'):
        Spec.parse("b/data:0:0")
    with pytest.raises(MeshError, match=r'over "data:3:1", in 2 parts; axis data has 3 ranks'):
        Spec.parse("b/data:3:1").block((4,), all_positions({"data": 3})[0])
