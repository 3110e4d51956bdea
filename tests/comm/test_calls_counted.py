"""How many functions of Python a small collective calls, while no other rank is waited for."""

import sys

import numpy as np
import pytest

from spmd_engine import run_threads, world
from spmd_engine.comm.connections import connections_of
from spmd_engine.comm.group import Group
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.shared_memory.slot_table import SLOTS

OPERATIONS = {  # on two ranks
    "barrier": lambda group, x: group.barrier(),
    "all_reduce": lambda group, x: group.all_reduce(x, out=x),
    "all_gather": lambda group, x: group.all_gather(x),
    "reduce_scatter": lambda group, x: group.reduce_scatter(x),
    "all_to_all": lambda group, x: group.all_to_all(x),
    "broadcast": lambda group, x: group.broadcast(x),
}


def calls_of(do):
    """The functions of this package that rank 0 calls in ``do(group, x)`` after the other rank has called the same."""

    def program():
        comm = world().subset(range(2))
        comm.spin_tests = 1
        group, everyone, x = Group(comm, "all", Ledger()), Group(world(), "world", Ledger()), np.zeros(2, np.float32)
        for _ in range(2 * SLOTS):
            do(group, x)
        everyone.barrier()
        called = []
        if group.rank == 0:
            for words in connections_of(comm).table._phases:
                words[1] = 1 << 60  # as if rank 1 had made all later calls, and had not slept
            connections_of(comm).table._waker.anyone_sleeps = lambda: False
            sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_qualname) if event == "call" else None)
            do(group, x)
            sys.setprofile(None)
        everyone.barrier()
        return called

    return run_threads(program, 2)[0]


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_repeated_small_call_takes_few_calls_of_functions(name):
    called = calls_of(OPERATIONS[name])
    assert 10 < len(called) <= 22, called
    assert not any("Operation" in each for each in called)


def test_a_call_that_is_started_takes_not_many_more():
    called = calls_of(lambda group, x: group.start_all_reduce(x, out=x).wait())
    assert 20 < len(called) <= 32, called
