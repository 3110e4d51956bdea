"""The customary layout of a model: heads are cut where there are enough, else the queries that share one."""

from dataclasses import replace

import pytest

from spmd_engine.axes import MeshPosition
from spmd_engine.errors import MeshError, UsageError
from spmd_engine.layers import LayerNorm, Residual
from spmd_engine.layers.attention.context import RingAttention
from spmd_engine.losses import mean_squared_error
from spmd_engine.models import GPTSize, Model, gpt, mlp
from spmd_engine.models.layouts import layout_for, note_of_shared_keys, with_queries_apart
from spmd_engine.sharding import Layout


def mesh_of(**axes):
    return MeshPosition(axes, {})


def model_of(heads, key_value_heads=None):
    return gpt(GPTSize(layers=2, width=24, heads=heads, context=16, key_value_heads=key_value_heads))


@pytest.mark.parametrize(
    "heads, key_value_heads, ranks, letter",
    [
        (6, None, 4, "h"),
        (6, None, 8, "h"),  # no queries share a head
        (12, 4, 4, "h"),
        (12, 4, 3, "h"),
        (12, 2, 4, "r"),  # 2 x 2 of 12 query heads on the rank with most, in place of 6
        (12, 2, 8, "r"),
        (12, 1, 2, "r"),
        (4, 2, 4, "h"),  # 2 x 1 query heads either way: keys need not be computed twice
    ],
)
def test_what_the_model_axis_cuts(heads, key_value_heads, ranks, letter):
    layout = layout_for(model_of(heads, key_value_heads), mesh_of(data=2, model=ranks))
    assert layout == Layout.for_mesh(mesh_of(data=2, model=ranks), queries_sharded=letter == "r")
    assert layout.axes(letter) == layout.axes("f") == ("model",)


@pytest.mark.parametrize(
    "heads, key_value_heads, ranks, apart",
    [
        (6, None, 8, None),  # no queries share a head
        (12, 4, 4, None),  # a key head for every rank
        (12, 2, 4, (2, 2)),
        (12, 2, 8, (2, 4)),
        (12, 3, 6, (3, 2)),
        (12, 3, 8, (4, 2)),
        (12, 1, 2, None),  # every rank needs the only one
    ],
)
def test_key_heads_that_no_query_reads_need_not_be_computed(heads, key_value_heads, ranks, apart):
    model, axes = model_of(heads, key_value_heads), {"data": 2, "model": ranks, "pipe": 1}
    found = with_queries_apart(model, axes)
    if apart is None:
        assert found == axes and note_of_shared_keys(model, axes) is None
        return
    assert list(found.items()) == [("data", 2), ("model", apart[0]), ("queries", apart[1]), ("pipe", 1)]
    assert f"--mesh {MeshPosition(found, {})} it computes" in note_of_shared_keys(model, axes)
    layout = layout_for(model, mesh_of(**found))
    assert (layout.axes("h"), layout.axes("r")) == (("model",), ("queries",))
    assert layout.axes("f") == layout.axes("v") == ("model", "queries")


@pytest.mark.parametrize(
    "heads, key_value_heads, shares, letter",
    [
        (7, None, (5, 2), "h"),
        (12, 2, (1, 1, 0), "h"),  # two ranks have a share: a key head each
        (12, 2, (2, 1, 1), "r"),  # 2 x 3 query heads for a share of 2, in place of 6 for a share of 1
        (12, 1, (2, 1), "r"),
        (12, 1, (1, 0, 0), "h"),
    ],
)
def test_shares_count_in_what_the_model_axis_shards(heads, key_value_heads, shares, letter):
    mesh, by_axis = mesh_of(model=len(shares)), {"model": shares}
    model = gpt(GPTSize(layers=2, width=2 * heads, heads=heads, context=16, key_value_heads=key_value_heads))
    layout = layout_for(model, mesh, shares=by_axis)
    assert layout == replace(Layout.for_mesh(mesh, queries_sharded=letter == "r"), shares=by_axis)


def test_queries_of_a_model_that_shares_no_keys_are_not_cut():
    with pytest.raises(MeshError, match=r"'queries' shards query heads that share a key head, but \w+ has none"):
        layout_for(model_of(6), mesh_of(queries=2))


def test_options_reach_the_layout():
    options = {"sequence_parallel": True, "zigzag": True}
    layout = layout_for(model_of(6), mesh_of(context=2, model=3), **options)
    assert layout == Layout.for_mesh(mesh_of(context=2, model=3), **options)
    assert layout.zigzag == "s" and layout.axes("s", "residual") == ("context", "model")


def test_a_model_without_a_sequence_has_no_context():
    model = Model("dense", (("norm", LayerNorm(4)),), "b d", "b d", "b d", mean_squared_error)
    assert layout_for(model, mesh_of(data=2, context=1)).axes("b") == ("data",)
    with pytest.raises(MeshError, match=r"axis 'context' shards sequences, but dense takes \[b d\]"):
        layout_for(model, mesh_of(context=2))


def test_a_model_without_a_sequence_is_not_sequence_parallel():
    with pytest.raises(MeshError, match=r"sequence parallel shards sequences, but mlp takes \[b d\]"):
        layout_for(mlp(), mesh_of(model=2), sequence_parallel=True)


def test_a_model_with_shared_key_heads():
    size = GPTSize(layers=1, width=24, heads=6, context=16, key_value_heads=2, tied=False)
    model = gpt(size, context_method="ring")
    shapes = {name: (parameter.dims, shape) for name, (parameter, shape) in model.parameters()}
    assert shapes["block0/attention/query"] == ("d h r k", (24, 2, 3, 4))
    assert shapes["block0/attention/key"] == ("d h k", (24, 2, 4))
    assert shapes["block0/attention/output"] == ("h r k d", (2, 3, 4, 24))
    branch = dict(model.layers)["block0/attention"]
    assert isinstance(branch, Residual) and isinstance(branch.inner.context, RingAttention)


def test_equal_numbers_of_heads_change_nothing():
    assert dict(model_of(6, 6).parameters()) == dict(model_of(6).parameters())


@pytest.mark.parametrize("key_value_heads", [0, 4, 12])
def test_heads_that_cannot_be_shared_are_an_error(key_value_heads):
    with pytest.raises(UsageError, match="gpt: 6 heads cannot share|key_value_heads is 0"):
        model_of(6, key_value_heads)


def test_an_unknown_context_method_is_an_error():
    with pytest.raises(UsageError, match="unknown context method 'star'"):
        gpt(GPTSize(layers=1, width=24, heads=6, context=16), context_method="star")
