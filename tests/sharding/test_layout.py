"""Layouts: where each letter lives."""

from itertools import pairwise
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.errors import MeshError, NotationError
from spmd_engine.sharding import Layout


def layout_of(*axes, **options):
    return Layout.for_mesh(SimpleNamespace(axes=dict.fromkeys(axes, 2)), **options)


@pytest.mark.parametrize(
    "axes, specs",
    [
        (("data",), {"b s d": "b/data s d", "d f": "d f", "v d": "v d"}),
        (("model",), {"b s d": "b s d", "d f": "d f/model", "v d": "v/model d", "h k": "h/model k"}),
        (("data", "model"), {"b s d": "b/data s d", "b s v": "b/data s v/model", "f d": "f/model d"}),
        (("replicate", "shard"), {"b s d": "b/replicate,shard s d", "d f": "d f"}),
        (("shard", "data"), {"b s d": "b/shard,data s d"}),
        (("context",), {"b s d": "b s/context d", "d h k": "d h k", "b s h k": "b s/context h k"}),
        (("pipe", "context", "data"), {"b s d": "b/data s/context d", "d f": "d f"}),
    ],
)
def test_the_customary_layout(axes, specs):
    layout = layout_of(*axes)
    for dims, written in specs.items():
        assert str(layout.spec(dims)) == str(layout.spec(dims, "residual")) == written


def test_sequence_parallel_cuts_the_stream_alone():
    layout = layout_of("data", "model", sequence_parallel=True)
    assert str(layout.spec("b s d")) == "b/data s d"
    assert str(layout.spec("b s d", "residual")) == "b/data s/model d"
    assert str(layout.spec("d f")) == "d f/model"


def test_sequence_parallel_needs_a_model_axis():
    assert layout_of("data", sequence_parallel=True) == layout_of("data")


@pytest.mark.parametrize("axes", [("context", "model"), ("model", "context")])
def test_the_stream_is_cut_over_context_before_model(axes):
    layout = layout_of(*axes, sequence_parallel=True)
    assert str(layout.spec("b s h k")) == "b s/context h/model k"
    assert str(layout.spec("b s d", "residual")) == "b s/context,model d"
    layout.check("attention", "bsdhk", "bsh", "h")


def test_queries_may_be_cut_instead_of_key_heads():
    layout = layout_of("data", "model", queries_sharded=True)
    assert str(layout.spec("d h r k")) == "d h r/model k"
    assert str(layout.spec("d h k")) == "d h k"
    assert str(layout.spec("d f")) == "d f/model" and str(layout.spec("v d")) == "v/model d"


def test_an_axis_without_a_custom():
    names = "row, data, replicate, shard, expert, model, queries, col, context, pipe"
    said = f"no customary layout for axis 'rows'; did you mean 'row'. There are: {names}, or pass"
    with pytest.raises(MeshError, match=said):
        layout_of("data", "rows")


# --- positions

CUTS = [{"context": 1}, {"context": 2}, {"context": 3}, {"context": 4}, {"data": 2, "context": 2}]
LENGTHS = [0, 1, 2, 3, 7, 10, 12, 31]


def positions(axes, length, where="inside", **options):
    """What each rank has, and what it thinks that all have."""

    def rank():
        mesh = Mesh(**axes)
        layout = Layout.for_mesh(mesh, **options)
        return layout.positions(length, mesh, where), layout.positions_by_rank(length, mesh)

    return run_threads(rank, ranks=prod(axes.values()))


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("axes", CUTS, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_position_is_dealt_once(length, axes, zigzag):
    results = positions(axes, length, zigzag=zigzag)
    n = axes["context"]
    for rank, (own, rank_positions) in enumerate(results):
        np.testing.assert_array_equal(own, rank_positions[rank % n])
        np.testing.assert_array_equal(own, np.sort(own))
        np.testing.assert_array_equal(np.sort(np.concatenate(rank_positions)), np.arange(length))
        assert [len(part) for part in rank_positions] == [length // n + (i < length % n) for i in range(n)]
        if not zigzag:
            np.testing.assert_array_equal(np.concatenate(rank_positions), np.arange(length))


def test_balanced_ranks_have_an_early_and_a_late_part():
    (_, rank_positions), *_ = positions({"context": 3}, 12, zigzag=True)
    assert [part.tolist() for part in rank_positions] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    (_, rank_positions), *_ = positions({"context": 3}, 7, zigzag=True)  # the early half has the odd one
    assert [part.tolist() for part in rank_positions] == [[0, 1, 6], [2, 5], [3, 4]]


@pytest.mark.parametrize("length", [64, 100])
def test_balanced_ranks_see_as_many_keys(length):
    def work(zigzag):
        (_, rank_positions), *_ = positions({"context": 4}, length, zigzag=zigzag)
        return [int((part + 1).sum()) for part in rank_positions]

    zigzag = work(True)
    assert max(zigzag) - min(zigzag) <= length
    assert max(work(False)) > 6 * min(work(False))


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_positions_on_the_residual_stream_are_those_inside_cut_further(length, zigzag):
    axes, options = {"context": 2, "model": 3}, {"sequence_parallel": True, "zigzag": zigzag}
    inside, stream = positions(axes, length, **options), positions(axes, length, "residual", **options)
    for c in range(2):
        for own, _ in inside[3 * c : 3 * c + 3]:
            parts = [part for part, _ in stream[3 * c : 3 * c + 3]]
            np.testing.assert_array_equal(np.concatenate(parts), own)
            assert all(0 <= len(a) - len(b) <= 1 for a, b in pairwise(parts))


@pytest.mark.parametrize("order", [("x", "y"), ("y", "x")])
def test_a_sequence_dealt_over_two_axes(order):
    layout = Layout({"s": order}, {"s": order})

    def rank():
        mesh = Mesh(x=3, y=2)
        rank_positions = layout.positions_by_rank(10, mesh)
        own = np.arange(10)[layout.spec("s").block((10,), mesh)]
        np.testing.assert_array_equal(layout.positions(10, mesh), own)
        np.testing.assert_array_equal(rank_positions[mesh.group(order).rank], own)
        return np.concatenate(rank_positions)

    for whole in run_threads(rank, ranks=6):
        np.testing.assert_array_equal(whole, np.arange(10))


# --- what a layer allows


def test_a_layer_says_which_letter_it_needs_whole():
    layout = layout_of("context")
    layout.check("mlp", "bsdf", "bsf", "f")
    with pytest.raises(NotationError, match='convolution: s is sharded over mesh axis "context" inside'):
        layout.check("convolution", "bsc", "b", "")


def test_one_axis_may_not_cut_two_letters_of_an_activation():
    layout = Layout({"s": ("x",), "h": ("x",)}, {"s": ("x",)})
    with pytest.raises(NotationError, match='attention: .*axis "x" shards s and h'):
        layout.check("attention", "bsdhk", "bsh", "h")


def test_a_layer_may_gather_across_several_letters():
    layout = layout_of("model", sequence_parallel=True, queries_sharded=True)
    layout.check("attention", "bsdhrk", "bshr", "hr")
    with pytest.raises(NotationError, match="which do not shard h inside"):
        layout.check("attention", "bsdhk", "bsh", "h")


def test_letters_that_are_not_named_are_whole():
    layout = Layout({"b": ("x",)}, {"b": ("x",), "s": ("y", "z")})
    assert layout.axes("b") == ("x",) and layout.axes("d") == ()
    assert layout.axes("s") == () and layout.axes("s", "residual") == ("y", "z")
    assert str(layout.spec("b s d", "residual")) == "b/x s/y,z d"
    assert str(Layout().spec("b s d")) == "b s d"


def test_two_letters_on_one_axis_are_an_error_that_says_where():
    layout = Layout(inside={"h": ("model",), "f": ("model",)}, residual={})
    with pytest.raises(NotationError) as error:
        layout.spec("h f")
    for words in ('axis "model" shards h and f', "dims 'h f' inside a layer"):
        assert words in str(error.value)
