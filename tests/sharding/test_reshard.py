"""Arrays cut anew: every pair of shardings, their bytes, every kind of array."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_engine import Mesh, run_threads
from spmd_engine.sharding import Spec, gather, reshard, reshard_plan, shard
from support.numerics import normals
from support.on_ranks import DTYPES, assert_same, on_ranks, values
from support.resharding import DATA_MODEL, each_mesh_with_pairs, numbered, on_mesh, specs

# --- every pair


def is_called(plan, move, shape, mesh):
    """Whether a move is a collective call here: an exchange of nothing, among these ranks, is none."""
    nothing = str(move).startswith("exchange") and not any(
        plan.sent(shape, np.int8, peer.coordinates) for peer in mesh.peers(move.over)
    )
    return bool(move.over) and not nothing


@each_mesh_with_pairs(0)
def test_every_pair_and_its_bytes(axes, pairs):
    check_pairs(axes, pairs, (5, 6, 7))


@each_mesh_with_pairs(1)
def test_pairs_with_empty_blocks_and_their_bytes(axes, pairs):
    check_pairs(axes, pairs, (1, 3, 2))


def check_pairs(axes, pairs, shape):
    whole = numbered(shape)

    def body(mesh):
        for source, target in pairs:
            mesh.ledger.clear()
            plan = reshard_plan(source, target, mesh.axes)
            x = whole[Spec.parse(source).block(shape, mesh)]
            result = reshard(x, source, target, mesh, shape=shape, label="moved")
            assert_same(result, whole[Spec.parse(target).block(shape, mesh)], source, target)
            assert result.flags.c_contiguous or not plan.moves
            assert mesh.ledger.total().sent == plan.sent(shape, whole.dtype, mesh.coordinates), (source, target)
            assert mesh.ledger.total() == mesh.ledger.total(label="moved")
            assert mesh.ledger.total().calls == sum(is_called(plan, move, shape, mesh) for move in plan.moves)

    on_mesh(axes, body)


@each_mesh_with_pairs(2)
def test_pairs_without_being_told_the_shape(axes, pairs):
    whole = numbered((5, 6, 7))

    def body(mesh):
        for source, target in pairs:
            mesh.ledger.clear()
            plan = reshard_plan(source, target, mesh.axes)
            x = shard(whole, source, mesh)
            assert_same(reshard(x, f"{source} -> {target}", mesh), shard(whole, target, mesh), source, target)
            exchanged = str(plan).startswith("exchange")
            lengths = x.ndim * 8 * (mesh.axis_size(Spec.parse(source).axes) - 1) if exchanged else 0
            sent = plan.sent(whole.shape, whole.dtype, mesh.coordinates)
            assert mesh.ledger.total().sent == sent + lengths, (source, target)

    on_mesh(axes, body)


@pytest.mark.parametrize("check", [pytest.param(True, marks=pytest.mark.soak), False])  # compared above, too
def test_without_comparing_calls(check):
    whole = numbered((5, 6, 7))

    def rank():
        with Mesh(data=2, model=2, check=check) as mesh:
            for source, target in permutations(DATA_MODEL, 2):
                x = shard(whole, source, mesh)
                assert_same(reshard(x, source, target, mesh), shard(whole, target, mesh), source, target)

    run_threads(rank, 4)


@given(specs(), specs(), st.tuples(*[st.integers(1, 2)] * 3), st.tuples(*[st.integers(0, 5)] * 3))
def test_any_pair_there_and_back(source, target, sizes, shape):
    whole = numbered(shape, np.int16)

    def body(mesh):
        x = shard(whole, source, mesh)
        y = reshard(x, source, target, mesh)
        assert_same(y, shard(whole, target, mesh))
        assert_same(reshard(y, target, source, mesh, shape=shape), x)
        assert_same(gather(y, target, mesh), whole)

    on_mesh(dict(zip("xyz", sizes)), body)


@pytest.mark.parametrize("dtype", [*DTYPES, np.dtype("S3"), np.dtype("i4,f8")], ids=str)
def test_any_dtype(dtype):
    whole = values((5, 4), dtype, 0) if dtype.kind in "biufcV" and not dtype.fields else np.zeros((5, 4), dtype)
    if dtype.kind == "S" or dtype.fields:
        whole.view(np.uint8)[...] = np.arange(whole.nbytes).reshape(5, -1) % 251

    def body(mesh):
        x = shard(whole, "b/data f/model", mesh)
        for target in "b f", "b/model f/data", "b f/model,data", "b/model f":
            assert_same(reshard(x, "b/data f/model", target, mesh), shard(whole, target, mesh))

    on_mesh({"data": 2, "model": 2}, body)


def spread(x):
    """The same values with gaps between them in memory."""
    big = np.zeros([2 * n for n in x.shape], x.dtype)
    big[tuple(slice(None, None, 2) for _ in x.shape)] = x
    return big[tuple(slice(None, None, 2) for _ in x.shape)]


def test_blocks_that_are_not_contiguous():
    whole = numbered((6, 5))

    def body(mesh):
        for source, target in permutations(["b/data f/model", "b/model f/data", "b f", "b f/model,data"], 2):
            result = reshard(spread(shard(whole, source, mesh)), source, target, mesh)
            assert_same(result, shard(whole, target, mesh))

    on_mesh({"data": 2, "model": 2}, body)


def test_an_array_on_a_device_stays_there(device):
    whole = numbered((5, 4))

    def body(mesh):
        for source, target in permutations(["b/data f/model", "b/model f/data", "b f", "b f/model,data"], 2):
            x = shard(device.asarray(whole), source, mesh)
            result = reshard(x, source, target, mesh)
            assert device.owns(result)
            assert_same(result.memory, shard(whole, target, mesh))

    on_mesh({"data": 2, "model": 2}, body)


# --- under MPI


@pytest.mark.parametrize(
    "ranks, axes",
    [
        pytest.param(None, {"data": 3}, id="mpi-3", marks=[pytest.mark.mpi(ranks=3), pytest.mark.soak]),
        pytest.param(None, {"data": 2, "model": 2}, id="mpi-4", marks=pytest.mark.mpi(ranks=4)),
        pytest.param(4, {"data": 2, "model": 2}, id="threads-4"),
    ],
)
def test_on_threads_and_on_mpi(ranks, axes):
    whole = normals(5, 6, 7)
    names = [name for name in DATA_MODEL if set(Spec.parse(name).axes) <= set(axes)]

    def program():
        with Mesh(**axes) as mesh:
            for source, target in permutations(names, 2):
                x = shard(whole, source, mesh)
                assert_same(reshard(x, source, target, mesh), shard(whole, target, mesh), source, target)
            assert_same(gather(shard(whole, names[1], mesh), names[1], mesh), np.asarray(whole))

    on_ranks(program, ranks)
