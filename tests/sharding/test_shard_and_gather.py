"""Arrays cut and gathered: what comes of it, what it costs, and the forms of a call."""

import numpy as np

from spmd_engine.sharding import Spec, gather, reshard, reshard_plan, shard
from support.numerics import normals
from support.on_ranks import assert_same
from support.resharding import numbered, on_mesh


def test_a_shard_is_a_contiguous_copy():
    whole = np.arange(12.0).reshape(3, 4)

    def body(mesh):
        for sharding in "b/data f", "b f/model", "b f":
            block = shard(whole, sharding, mesh)
            assert block.flags.c_contiguous and not np.may_share_memory(block, whole)
        assert mesh.ledger.total().calls == 0
        return shard(whole, "b/data f/model", mesh)

    blocks = on_mesh({"data": 2, "model": 2}, body)
    expected = [whole[:2, :2], whole[:2, 2:], whole[2:, :2], whole[2:, 2:]]
    for block, part in zip(blocks, expected):
        assert_same(block, part)


def test_gather_is_one_all_gather_a_letter():
    whole = numbered((5, 7))

    def body(mesh):
        x = shard(whole, "b/data,expert f/model", mesh)
        assert_same(gather(x, "b/data,expert f/model", mesh, label="seen"), whole)
        assert set(mesh.ledger.entries) == {("all_gather", axes, "seen") for axes in ("data,expert", "model")}
        return mesh.ledger.total().sent

    assert sum(on_mesh({"data": 2, "model": 2, "expert": 2}, body)) == whole.nbytes * (8 - 1)


def test_what_is_not_cut_costs_nothing():
    x = normals(3, 4)

    def body(mesh):
        assert gather(x, "b f", mesh) is x
        assert reshard(x, "b/data f", "b/data f", mesh) is x
        return mesh.ledger.total().calls

    assert on_mesh({"data": 2}, body) == [0, 0]


def test_a_number_has_no_letters():
    x = np.array(3.0)
    assert on_mesh({"data": 2}, lambda mesh: float(gather(shard(x, "", mesh), "", mesh))) == [3.0, 3.0]


def test_the_forms_of_a_call():
    whole = numbered((4, 4))

    def body(mesh):
        x = shard(whole, "b/data f", mesh)
        forms = [
            reshard(x, "b/data f", "b f/data", mesh),
            reshard(x, "b/data f->b f/data", mesh),
            reshard(x, "b/data f -> b f/data", mesh=mesh),
            reshard(x, Spec.parse("b/data f"), Spec.parse("b f/data"), mesh=mesh),
            reshard_plan("b/data f", "b f/data", mesh.axes).do(x, mesh),
        ]
        for result in forms:
            assert_same(result, shard(whole, "b f/data", mesh))

    on_mesh({"data": 2}, body)
