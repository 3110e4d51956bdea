"""The backward pass of every collective: <A x, y> = <x, A' y>, summed over ranks, for random x and y."""

import numpy as np
import pytest

from spmd_engine import Mesh
from support.on_ranks import everywhere, numbers_of_ranks, on_ranks, values
from support.pairwise import every_pair

FLOAT = np.dtype(float)
RANKS = numbers_of_ranks(1, 2, 3, 4, 8, mpi=(3,))
LENGTHS = {"even": lambda r: 3, "uneven": lambda r: r + 1, "some-empty": lambda r: 4 * (r % 2)}
each_length = pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)


class Space:
    """All ranks' arrays as one vector."""

    def __init__(self):
        self.group = Mesh().group()
        self.rank, self.size = self.group.rank, self.group.size
        self.seed = 0

    def random(self, *shape):
        self.seed += 1
        return values(shape, FLOAT, 100 * self.seed + self.rank)

    def product(self, x, y):
        assert x.shape == y.shape
        return self.group.all_reduce(np.asarray(np.vdot(x, y)))

    def assert_adjoint(self, x, ax, y, ay):
        np.testing.assert_allclose(self.product(ax, y), self.product(x, ay), rtol=1e-12, atol=1e-12)


@every_pair(ranks=RANKS, length=LENGTHS, axis=[0, 1, -1])
def test_all_gather_and_reduce_scatter(length, axis, ranks):
    def program():
        s = Space()
        sizes = [length(r) for r in range(s.size)]
        shape, whole = [2, 3, 4], [2, 3, 4]
        shape[axis], whole[axis] = sizes[s.rank], sum(sizes)
        x, y = s.random(*shape), s.random(*whole)
        s.assert_adjoint(x, s.group.all_gather(x, axis), y, s.group.reduce_scatter(y, axis, sizes=sizes))

    on_ranks(program, ranks)


@everywhere(1, 2, 3, 4, 8)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_all_reduce_is_its_own(op, ranks):
    def program():
        s = Space()
        x, y = s.random(5, 7), s.random(5, 7)
        s.assert_adjoint(x, s.group.all_reduce(x, op), y, s.group.all_reduce(y, op))

    on_ranks(program, ranks)


@every_pair(
    **{
        "ranks": RANKS,
        "length": LENGTHS,
        "axis, onto": [(0, 1), (1, 0), (2, 0), (-1, 1)],
    }
)
def test_all_to_all_and_all_to_all_with_the_axes_swapped(length, axis, onto, ranks):
    def program():
        s = Space()
        lengths = [length(r) for r in range(s.size)]
        shape = [5, 6, 7]
        shape[onto] = lengths[s.rank]
        x = s.random(*shape)
        ax = s.group.all_to_all(x, axis, onto)
        y = s.random(*ax.shape)
        s.assert_adjoint(x, ax, y, s.group.all_to_all(y, onto, axis, splits=lengths)[0])

    on_ranks(program, ranks)


@everywhere(1, 2, 3, 4, 8)
def test_all_to_all_on_one_axis_and_all_to_all_with_the_table_transposed(ranks):
    def program():
        s = Space()
        table = np.random.default_rng(0).integers(0, 4, (s.size, s.size))
        x, y = s.random(table[s.rank].sum(), 2), s.random(table[:, s.rank].sum(), 2)
        (ax, _), (ay, _) = s.group.all_to_all(x, splits=table[s.rank]), s.group.all_to_all(y, splits=table[:, s.rank])
        s.assert_adjoint(x, ax, y, ay)

    on_ranks(program, ranks)


@everywhere(2, 3, 4, 8)
@each_length
def test_send_and_receive_the_other_way_round(length, ranks):
    def program():
        s = Space()
        right, left = (s.rank + 1) % s.size, (s.rank - 1) % s.size
        x, y = s.random(length(s.rank), 2), s.random(length(left), 2)
        sent = [s.group.start_send(right, x), s.group.start_send(left, y)]
        if left == right:  # of two ranks one is both neighbours: messages come in the order sent
            ax, ay = s.group.receive(left), s.group.receive(right)
        else:
            ay, ax = s.group.receive(right), s.group.receive(left)
        s.assert_adjoint(x, ax, y, ay)
        for each in sent:
            each.wait()

    on_ranks(program, ranks)


@everywhere(1, 2, 3, 4, 8)
def test_broadcast_and_the_sum_at_its_root(ranks):
    def program():
        s = Space()
        root = s.size - 1
        x, y = s.random(4, 5), s.random(4, 5)
        ay = s.group.all_reduce(y) * (s.rank == root)
        s.assert_adjoint(x, s.group.broadcast(x, root), y, ay)

    on_ranks(program, ranks)
