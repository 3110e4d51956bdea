"""What reshard, shard and gather refuse, and in which words."""

import numpy as np
import pytest

from spmd_engine.errors import MeshError, NotationError
from spmd_engine.sharding import reshard, reshard_plan
from support.resharding import on_mesh


@pytest.mark.parametrize(
    "source, target, error, words",
    [
        ("b/data f", "b s/data", NotationError, ['"b/data f" -> "b s/data"', "letters bf and bs differ", "same dims"]),
        ("b/data f", "f b", NotationError, ['"b/data f" -> "f b"', "transpose"]),
        ("b/data f", "b f/pipe", MeshError, ['"b/data f" -> "b f/pipe"', 'axis "pipe"', "there are: data, model"]),
        ("b/data f", "b/model f/model", NotationError, ['axis "model" shards b and f']),
        ("b/data f/", "b f", NotationError, ['cannot read sharding "b/data f/" at "f/"']),
    ],
)
def test_shardings_that_do_not_go_together(source, target, error, words):
    with pytest.raises(error) as raised:
        reshard_plan(source, target, {"data": 2, "model": 2})
    for each in words:
        assert each in str(raised.value)


@pytest.mark.parametrize("sides", [("b f",), ("b f -> b f -> b f",), ("b f", "b f"), ("b f -> b f",)])
def test_a_side_or_the_mesh_is_missing(sides):
    def body(mesh):
        complete = sides[-1] in ("b f", "b f -> b f") and sides != ("b f",)
        with pytest.raises(NotationError, match="reshard takes"):
            reshard(np.ones((2, 2)), *sides, mesh=None if complete else mesh)

    on_mesh({"data": 1}, body)


@pytest.mark.parametrize(
    "block, target, shape, words",
    [
        ((2, 3, 1), "b f/data", None, "the array has 3 dims"),
        ((2, 3), "b f/data", (5, 3), r"has the block \(3, 3\) at data=0; the block there is \(2, 3\)"),
        ((2, 3), "b f/data", (4, 4), r"has the block \(2, 4\) at data=[01]; the block there is \(2, 3\)"),
    ],
)
def test_a_block_that_does_not_fit(block, target, shape, words):
    def body(mesh):
        reshard(np.ones(block), "b/data f", target, mesh, shape=shape)

    with pytest.raises(NotationError, match=words):
        on_mesh({"data": 2}, body)


@pytest.mark.parametrize("target", ["b f", "b f/data"])
def test_blocks_that_are_cut_otherwise(target):
    """Three rows and one are not how four are cut in two; both ranks see it in what comes together."""

    def body(mesh):
        with pytest.raises(NotationError, match=r"4 long together along b, so this rank's must be 2; it is [31]"):
            reshard(np.ones((3 - 2 * mesh.rank, 4)), "b/data f", target, mesh)

    on_mesh({"data": 2}, body)


def test_all_ranks_raise_alike_before_they_exchange():
    """Six rows cut by data, then by model, are 2, 1, 2 and 1."""

    def body(mesh):
        rows = [2, 1, 1, 2][mesh.rank]
        with pytest.raises(NotationError) as raised:
            reshard(np.ones((rows, 4)), "b/data,model f", "b/model,data f", mesh)
        return str(raised.value)

    texts = on_mesh({"data": 2, "model": 2}, body)
    assert len(set(texts)) == 1
    assert "has the block (2, 4) at data=1, model=0; the block there is (1, 4)" in texts[0]
