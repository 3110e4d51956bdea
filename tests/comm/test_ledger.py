"""The ledger's bytes equal the formulas, to the byte, however small, uneven or empty the shards are."""

import threading
from itertools import product

import numpy as np
import pytest

from spmd_engine import Ledger, Mesh, run_threads
from spmd_engine.comm import group as group_module
from spmd_engine.comm import pending as pending_module
from spmd_engine.comm.ledger import Entry
from spmd_engine.comm.pending import Progress
from support.on_ranks import DTYPES, INLINE, everywhere, numbers_of_ranks, on_ranks

LENGTHS = [0, 1, 5, 24, INLINE, INLINE + 1]  # of all shards together: fewer than ranks, inline, large
SOME_DTYPES = [DTYPES[1], *DTYPES[-2:]]


def lengths_dtypes_and_ranks():
    """Each length with each dtype, and either on all numbers of ranks; the other triples are in ``soak``."""
    numbers = numbers_of_ranks(1, 3, 8, mpi=(3,))
    for (i, length), (j, dtype), (k, ranks) in product(*map(enumerate, (LENGTHS, SOME_DTYPES, numbers))):
        marks = [*ranks.marks, *([] if (i + k) % len(SOME_DTYPES) == j else [pytest.mark.soak])]
        yield pytest.param(length, dtype, *ranks.values, marks=marks, id=f"{length}-{dtype}-{ranks.id}")


each_two_of_length_dtype_and_ranks = pytest.mark.parametrize("length, dtype, ranks", list(lengths_dtypes_and_ranks()))


class Account:
    """One call on a mesh of its own, and what all ranks' ledgers say of it."""

    def __init__(self, call, *, op="sum"):
        mesh, self.group = Mesh(), Mesh().group()
        self.n, self.rank = self.group.size, self.group.rank
        self.result = call(mesh.group())
        assert len(mesh.ledger.entries) == (self.n > 1)
        self.own = mesh.ledger.total()

    def total(self, name):
        return int(self.group.all_reduce(np.array(getattr(self.own, name))))


def shard(length, n, rank):
    return len(np.array_split(range(length), n)[rank])


@each_two_of_length_dtype_and_ranks
def test_all_gather(length, dtype, ranks):
    def program():
        account = Account(lambda g: g.all_gather(np.zeros(shard(length, g.size, g.rank), dtype)))
        n, mine = account.n, shard(length, account.n, account.rank) * dtype.itemsize
        assert account.total("sent") == length * dtype.itemsize * (n - 1)
        assert account.own == Entry(1, mine, mine * (n - 1), account.own.seconds) or n == 1

    on_ranks(program, ranks)


@each_two_of_length_dtype_and_ranks
def test_reduce_scatter(length, dtype, ranks):
    def program():
        account = Account(lambda g: g.reduce_scatter(np.zeros(length, dtype)))
        n, whole = account.n, length * dtype.itemsize
        assert account.total("sent") == whole * (n - 1)
        mine = shard(length, n, account.rank) * dtype.itemsize
        assert account.own == Entry(1, whole, whole - mine, account.own.seconds) or n == 1

    on_ranks(program, ranks)


@each_two_of_length_dtype_and_ranks
def test_all_reduce(length, dtype, ranks):
    def program():
        account = Account(lambda g: g.all_reduce(np.zeros(length, dtype)))
        n, whole = account.n, length * dtype.itemsize
        assert account.total("sent") == 2 * whole * (n - 1)
        mine = shard(length, n, account.rank) * dtype.itemsize
        assert account.own == Entry(1, whole, whole - mine + mine * (n - 1), account.own.seconds) or n == 1

    on_ranks(program, ranks)


@each_two_of_length_dtype_and_ranks
def test_broadcast(length, dtype, ranks):
    def program():
        account = Account(lambda g: g.broadcast(np.zeros(length, dtype), g.size - 1))
        n, whole = account.n, length * dtype.itemsize
        assert account.total("sent") == whole * (n - 1)
        assert account.total("payload") == whole * (n > 1)  # the root's alone
        assert account.total("calls") == n * (n > 1)

    on_ranks(program, ranks)


@each_two_of_length_dtype_and_ranks
def test_all_to_all(length, dtype, ranks):
    def program():
        account = Account(lambda g: g.all_to_all(np.zeros((length, g.rank), dtype), 0, 1))
        n, mine = account.n, length * account.rank * dtype.itemsize
        stays = shard(length, n, account.rank) * account.rank * dtype.itemsize
        assert account.own == Entry(1, mine, mine - stays, account.own.seconds) or n == 1

    on_ranks(program, ranks)


@everywhere(2, 3, 8)
def test_all_to_all_with_splits_counts_what_leaves(ranks):
    def program():
        account = Account(lambda g: g.all_to_all(np.zeros(g.size * 10), splits=[10 * g.size] + [0] * (g.size - 1)))
        assert account.total("payload") == account.n**2 * 80
        assert account.total("sent") == account.n * (account.n - 1) * 80  # rank 0 keeps its own

    on_ranks(program, ranks)


@everywhere(2, 4, 8)
@pytest.mark.parametrize("elements", [1, 1000], ids=["inline", "large"])
def test_even_shards_cost_each_rank_the_same(elements, ranks):
    def program():
        n = Mesh().size
        whole = 8 * n * elements  # bytes
        times = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}
        for name, factor in times.items():
            x = np.zeros(elements if name == "all_gather" else n * elements)
            assert Account(lambda g: getattr(g, name)(x)).own.sent == factor * whole * (n - 1) // n  # noqa: B023

    on_ranks(program, ranks)


@everywhere(2, 3)
@pytest.mark.parametrize("length", LENGTHS)
def test_send_and_receive(length, ranks):
    def program():
        mesh = Mesh()
        if mesh.rank == 0:
            mesh.send(1, np.zeros(length, np.int16))
            sent = mesh.ledger.entries["send", "data", ""]
            assert (sent.calls, sent.payload, sent.sent) == (1, 2 * length, 2 * length)
        if mesh.rank == 1:
            mesh.receive(0)
            received = mesh.ledger.entries["receive", "data", ""]
            assert (received.calls, received.payload, received.sent) == (1, 0, 0)

    on_ranks(program, ranks)


def test_entries_are_kept_by_operation_axes_and_label():
    def program():
        with Mesh(data=2, model=2) as mesh:
            x = np.zeros(10)
            for over in "data", "model", ("data", "model"), ("model", "data"):
                mesh.all_reduce(x, over=over)
            for _ in range(3):
                mesh.all_reduce(x, over="data", label="gradients")
                mesh.start_all_gather(x, over="data", label="gradients").wait()
            mesh.barrier("model")
            return mesh.ledger

    for ledger in run_threads(program, 4):
        calls = {key: (entry.calls, entry.payload) for key, entry in ledger.entries.items()}
        assert calls == {
            ("all_reduce", "data", ""): (1, 80),
            ("all_reduce", "model", ""): (1, 80),
            ("all_reduce", "data,model", ""): (1, 80),
            ("all_reduce", "model,data", ""): (1, 80),
            ("all_reduce", "data", "gradients"): (3, 240),
            ("all_gather", "data", "gradients"): (3, 240),
            ("barrier", "model", ""): (1, 0),
        }
        assert ledger.total().calls == 11
        assert ledger.total("all_reduce").calls == 7
        assert ledger.total(axes="data").payload == 80 + 240 + 240
        assert ledger.total(label="gradients").sent == 3 * (80 + 80)
        assert ledger.total("all_reduce", "data", "").calls == 1
        assert "all_gather      data         gradients" in str(ledger)
        assert repr([ledger]).startswith("[Ledger(all_gather over data (gradients): 3 calls, 240 bytes sent; all_red")
        ledger.clear()
        assert ledger.total() == Entry() and repr(ledger) == "Ledger(no calls)"


def test_axes_of_one_rank_cost_nothing():
    def program():
        with Mesh(data=2, model=1) as mesh:
            mesh.all_reduce(np.zeros(10), over="model")
            return len(mesh.ledger.entries)

    assert run_threads(program, 2) == [0, 0]


def test_meshes_may_share_a_ledger():
    def program():
        ledger = Ledger()
        for _ in range(2):
            Mesh(ledger=ledger).all_reduce(np.zeros(10))
        return ledger.total("all_reduce", "data").calls

    assert run_threads(program, 2) == [2, 2]


def test_seconds_are_those_a_rank_stood_waiting(monkeypatch):
    """By a clock that goes on only while rank 0 works."""
    clock, waits = [0.0], threading.Event()

    def wait_long_for(progress, wanted, timeout, real=Progress._wait_long_for):
        if "(late)" in wanted.describe():
            waits.set()
        real(progress, wanted, timeout)

    monkeypatch.setattr(Progress, "_wait_long_for", wait_long_for)
    for module in (pending_module, group_module):
        monkeypatch.setattr(module, "perf_counter", lambda: clock[0])

    def program():
        mesh = Mesh()
        pending = mesh.start_all_reduce(np.zeros(10), label="overlapped")
        if mesh.rank == 0:
            clock[0] += 1.0  # work meanwhile
        pending.wait()
        mesh.barrier()
        if mesh.rank == 0:
            assert waits.wait(100)
            clock[0] += 10.0
        mesh.all_reduce(np.zeros(10), label="late")
        return [mesh.ledger.total(label=label).seconds for label in ("overlapped", "late")]

    (overlapped, late), (_, waited) = run_threads(program, 2)
    assert (overlapped, late, waited) == (0.0, 0.0, 10.0)
