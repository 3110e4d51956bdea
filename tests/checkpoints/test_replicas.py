"""A flipped bit in a replica is found, and the rank that has it."""

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.checkpoints.digest import compare_replicas
from spmd_engine.engine import AdamW
from spmd_engine.errors import ReplicasDifferError
from support import tiny


def message(axes, victim, spoil, **options):
    """What all ranks are told of one that has spoilt something of its own; None if nothing."""

    def program():
        with Mesh(**axes) as mesh:
            engine, optimizer = tiny.make_engine(mesh, **options), AdamW()
            engine.step(tiny.batch(engine, 0))
            optimizer.update(engine, engine.gradients, step=1, rate=0.1)
            compare_replicas(engine, optimizer)
            if mesh.rank == victim:
                spoil(engine, optimizer)
            try:
                compare_replicas(engine, optimizer)
            except ReplicasDifferError as error:
                return str(error)

    said = run_threads(program, tiny.ranks_of(axes))
    assert len(set(said)) == 1
    return said[0]


def flip(array):
    array.reshape(-1)[-1:].view(np.uint64)[...] ^= np.uint64(1)


@pytest.mark.parametrize(("axes", "options"), [({"data": 3}, {}), ({"data": 3, "model": 2}, {"zero": 1})], ids=str)
def test_a_flipped_bit_of_a_parameter_is_named(axes, options):
    said = message(axes, 2, lambda engine, optimizer: flip(engine.parameters["block1/mlp/w0"]), **options)
    assert said.startswith("block1/mlp/w0[") and "rank 2 differs from 2 others that agree" in said


def test_of_two_that_differ_nobody_can_say_which_is_right():
    said = message({"data": 2}, 1, lambda engine, optimizer: flip(engine.named(optimizer.state["mean"])["norm/scale"]))
    assert said.startswith("mean of norm/scale[0:12] is not the same") and ": rank 0 against rank 1." in said


def test_what_one_rank_alone_holds_has_nothing_to_differ_from():
    def spoil(engine, optimizer):
        flip(next(iter(optimizer.state["mean"].values())))

    assert message({"data": 3}, 1, spoil, zero=2) is None
