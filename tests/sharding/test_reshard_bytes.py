"""What resharding sends, by the formulas of the collectives."""

import pytest

from spmd_engine.sharding import reshard, shard
from support.numerics import normals
from support.resharding import on_mesh


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize(
    "source, target, operation, formula",
    [
        ("b f", "b/data f", None, lambda whole, n: 0),
        ("b/data f", "b f", "all_gather", lambda whole, n: whole * (n - 1) // n),
        ("b/data f", "b f/data", "all_to_all", lambda whole, n: whole * (n - 1) // n**2),
    ],
)
def test_bytes_of_each_collective(n, source, target, operation, formula):
    whole = normals(12, 24)

    def body(mesh):
        reshard(shard(whole, source, mesh), source, target, mesh)
        assert {key[0] for key in mesh.ledger.entries} == ({operation} if operation else set())
        return mesh.ledger.total().sent

    assert on_mesh({"data": n}, body) == [formula(whole.nbytes, n)] * n


def test_an_exchange_sends_to_nobody_what_he_has():
    """Swapped axes on 2 x 2: the ranks on the diagonal keep all they have, the other two swap theirs."""
    whole = normals(4, 6)

    def body(mesh):
        reshard(shard(whole, "b/data f/model", mesh), "b/data f/model -> b/model f/data", mesh, shape=whole.shape)
        return mesh.ledger.total("all_to_all").sent

    block = whole.nbytes // 4
    assert on_mesh({"data": 2, "model": 2}, body) == [0, block, block, 0]


def test_copies_share_the_work():
    """Of the two who have what a rank lacks, the one at its own place along model sends: not one of them to both."""
    whole = normals(8, 1)

    def body(mesh):
        reshard(shard(whole, "b/data f", mesh), "b/data f -> b/model f", mesh, shape=whole.shape)
        return mesh.ledger.total("all_to_all").sent

    half = whole.nbytes // 2
    assert on_mesh({"data": 2, "model": 2}, body) == [half, 0, 0, half]
