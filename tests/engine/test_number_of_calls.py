"""How many collectives it takes to gather an array and to save all: a number that follows from neither."""

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.checkpoints import save_checkpoint
from spmd_engine.engine import AdamW, ShardedEngine
from spmd_engine.engine.state.assignment import ZeroConfig
from support import tiny

MANY_FIELDS = np.dtype([(f"a field with a long name, number {i}", "<f8", (2,)) for i in range(20)])


def calls(do, ranks, **options):
    """That rank 0 makes in ``do(engine)``."""

    def program():
        with Mesh(data=ranks) as mesh:
            engine = tiny.make_engine(mesh, zero=3, **options)
            before = mesh.ledger.total().calls
            do(engine)
            return mesh.ledger.total().calls - before

    return run_threads(program, ranks)[0]


def test_a_save_takes_as_many_calls_of_many_arrays_as_of_few(tmp_path):
    def save(engine):
        save_checkpoint(tmp_path / str(len(engine.names)), engine, AdamW())

    assert calls(save, 2, layers=1) == calls(save, 2, layers=4) == calls(save, 3, layers=1) <= 5


@pytest.mark.parametrize("zero, most", [(0, 3), (3, 4)])
def test_state_of_several_kinds_moves_in_as_many_calls_as_one(zero, most):
    """Who has what, before and after, is told at once, and names once more where ranks differ; then parameters, and the
    state if other ranks have it."""

    def program():
        with Mesh(data=2) as mesh, Mesh(data=2) as other:
            engine = tiny.make_engine(mesh, zero=zero)
            before = mesh.ledger.total().calls
            engine.reshard(other, optimizer=AdamW(), storage=ZeroConfig(3 - zero))
            return mesh.ledger.total().calls - before

    assert max(run_threads(program, 2)) <= most


def test_to_gather_takes_as_many_calls_of_many_holders_as_of_few():
    def gather(engine):
        for name in engine.names[:2]:
            engine.gather(name)

    # Who has what, in two calls where ranks have different arrays; for each array: what is asked, and its bytes.
    assert calls(gather, 2) <= calls(gather, 4) == calls(gather, 6) == 2 + 2 * 2


class Records(ShardedEngine):
    """One array, whose elements are records."""

    shardings = {"records": "d/data"}
    forward = backward = load_checkpoint = None

    def __init__(self, mesh):
        self.mesh = mesh
        self.parameters = {"records": np.full(3, mesh.rank, MANY_FIELDS)}


@pytest.mark.parametrize("root", [None, 1])
def test_records_of_many_fields_are_gathered(root):
    def program():
        with Mesh(data=2) as mesh:
            return Records(mesh).gather("records", root=root)

    expected = np.repeat(np.arange(2), 3).astype(MANY_FIELDS)
    for rank, found in enumerate(run_threads(program, 2)):
        if root in (None, rank):
            np.testing.assert_array_equal(found, expected)
        else:
            assert found is None
