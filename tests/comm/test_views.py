"""``Mesh.describe`` and what objects show of themselves in a notebook."""

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from spmd_engine import LayeredEngine, Mesh, run_threads
from spmd_engine.axes import all_positions, parse_axes
from spmd_engine.comm.notation import Spec
from spmd_engine.comm.views import ArraySharding, draw_mesh
from spmd_engine.engine import schedules
from spmd_engine.errors import MeshError, NotationError, UsageError
from spmd_engine.models import GPTSize, gpt
from spmd_engine.pictures import Picture, html_table, text
from spmd_engine.sharding import shard

CASES = {
    "even": ("b/data f/model", (8, 6), {"data": 2, "model": 2}),
    "uneven": ("b/data f/model", (5, 3), {"data": 2, "model": 2}),
    "empty blocks": ("b/data f", (1, 3), {"data": 4}),
    "several axes": ("b/model,data f", (7, 2), {"data": 2, "model": 2}),
    "an axis of one rank": ("b/data f/model d/context", (6, 2, 3), {"data": 1, "model": 4, "context": 1}),
    "shares": ("b/data:3:1 f/model", (9, 4), {"data": 2, "model": 2}),
    "a share of nothing": ("b/data:0:1 f", (3, 2), {"data": 2, "model": 2}),
    "three dims": ("b/data s/context f/model", (4, 3, 5), {"data": 2, "context": 1, "model": 2}),
    "replicated": ("b f", (2, 2), {"data": 4}),
    "a number": ("", (), {"data": 4}),
}


@pytest.mark.parametrize("sharding, shape, axes", CASES.values(), ids=CASES)
def test_a_block_is_where_it_is_said_to_be(sharding, shape, axes):
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)

    def program():
        with Mesh(**axes) as mesh:
            view = mesh.describe(shard(whole, sharding, mesh), sharding)
            calls = mesh.ledger.total().calls
            assert mesh.describe(shape, sharding).global_shards[mesh.rank].index == view.global_shards[mesh.rank].index
            assert mesh.ledger.total().calls == calls  # of a shape nothing has to be asked
            return view, dict(mesh.coordinates)

    views, coordinates = zip(*run_threads(program, 4), strict=True)
    assert all(
        view == views[0].__class__(view.spec, shape, axes, views[0].global_shards, r) for r, view in enumerate(views)
    )
    owned = np.zeros(shape, int)
    for rank, view in enumerate(views):
        (mine,) = view.addressable_shards
        assert mine.rank == rank and mine.coordinates == coordinates[rank] and mine.device.endswith(" cpu")
        np.testing.assert_array_equal(whole[mine.index], mine.data, strict=True)
        assert (mine.shape, mine.size) == (mine.data.shape, mine.data.size)
        owned[mine.index] += mine.replica_id == 0
    assert (owned == 1).all()
    assert str(view).startswith(f'"{sharding}", shape ') and view.devices() == {mine.device}


def parameters_are_where_they_are_said_to_be():
    """The page of the mesh, the views of an engine's parameters, and this rank's coordinates."""
    with Mesh(model=2, data=2) as mesh:
        model = gpt(GPTSize(layers=1, width=6, heads=3, context=4, vocabulary=11))
        engine = LayeredEngine(model, mesh, seed=1)
        views = {name: mesh.describe(engine.parameters[name], engine.shardings[name]) for name in engine.shardings}
        for name, view in views.items():
            whole = engine.gather(name)
            np.testing.assert_array_equal(whole[view.addressable_shards[0].index], engine.parameters[name])
            assert view.shape == whole.shape
        return mesh._repr_html_(), views, dict(mesh.coordinates)


@pytest.mark.mpi(ranks=4)
def test_parameters_of_an_engine():
    parameters_are_where_they_are_said_to_be()


def test_parameters_of_an_engine_on_nodes_whose_ranks_alternate():
    nodes = ["a", "b", "a", "b"]
    results = run_threads(parameters_are_where_they_are_said_to_be, 4, nodes=nodes)
    html, views, _ = results[0]
    assert [block.rank for block in views["block0/mlp/w0"].global_shards] == [0, 2, 1, 3]
    for block in views["block0/mlp/w0"].global_shards:
        assert block.device == f"{nodes[block.rank]} cpu" and block.coordinates == results[block.rank][2]
    assert "node a: ranks 0,2" in html and "node b: ranks 1,3" in html


MISTAKES = {
    "other dims": (np.zeros(3), "b/data f", NotationError, 'sharding "b/data f" has 2 dims'),
    "no such axis": (np.zeros(3), "b/model", MeshError, "unknown mesh axis 'model'"),
    "a shape of other dims": ((3,), "b/data f", NotationError, 'sharding "b/data f" has 2 dims'),
    "weights": ((3,), "b/data:1:1:1", MeshError, "in 3 parts; axis data has 2 ranks"),
}


@pytest.mark.parametrize("x, sharding, kind, words", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_an_error_on_every_rank(x, sharding, kind, words):
    def program():
        with pytest.raises(kind, match=words), Mesh() as mesh:
            mesh.describe(x, sharding)

    run_threads(program, 2)


def test_blocks_that_are_not_those_of_the_sharding():
    def program():
        with Mesh(data=2) as mesh, pytest.raises(NotationError, match=r"has the block \(2,\) at data=0; .* is \(1,\)"):
            mesh.describe(np.zeros(1 + mesh.rank), "b/data")

    run_threads(program, 2)


# --- HTML of objects


def described(html):
    """The text of a piece of HTML, which must be well formed."""
    return " ".join(ElementTree.fromstring(f"<div>{html}</div>").itertext())


def test_uneven_stages_are_drawn_with_their_own_ranks():
    axes = parse_axes("pipe=2,model=2|1")
    drawn = str(draw_mesh(axes))
    assert "mesh pipe=2,model=2|1: 3 ranks" in drawn and "│    2    │         │" in drawn
    groups = {tuple(line.split()) for line in drawn.splitlines()}
    assert {("pipe", "2", "{0,1,2}"), ("model", "2|1", "{0,1}", "{2}")} <= groups
    places = all_positions(axes)
    assert "on 3 ranks, which differ along pipe and model" in str(ArraySharding.of(Spec.parse("b f"), (8, 6), places))
    with pytest.raises(UsageError, match="stages have other blocks; give the sizes of one stage"):
        ArraySharding.of(Spec.parse("b f/model"), (8, 6), places)


def test_objects_show_themselves_in_a_notebook():
    def program():
        with Mesh(data=2, model=2) as mesh:
            mesh.all_reduce(np.ones(3), over="data", label="<sum>")
            return mesh._repr_html_(), mesh.ledger._repr_html_(), mesh.describe((5, 4), "b/data d")._repr_html_()

    mesh, ledger, sharding = map(described, run_threads(program, 4)[0])
    assert "mesh data=2,model=2: 4 ranks" in mesh and "{0,2} {1,3}" in mesh
    assert "all_reduce" in ledger and "<sum>" in ledger and " 24 " in ledger
    assert "Uneven: a rank holds from 2 x 4 to 3 x 4." in sharding and "ranks 0,1" in sharding
    for name in schedules.SCHEDULES:
        assert f"{name}: " in described(schedules.named(name)._repr_html_())
    assert "2 stages, 3 micro-batches" in str(schedules.named("1f1b").picture(2, 3))


def test_html_is_escaped_and_takes_the_colours_of_its_page():
    picture = Picture("<b>", [text(0, 0, "a < b & c")], notes=['"quoted"'])._repr_html_()
    assert "a < b & c" in described(picture) and "<b>" not in picture.replace("&lt;b&gt;", "")
    assert 'fill="currentColor"' in picture and "background:none" in picture
    assert ElementTree.fromstring(picture).get("aria-label") == '<b>. "quoted"'
    assert "<i>" in described(html_table("<i>", ["<i>"], [["<i>"]]))
