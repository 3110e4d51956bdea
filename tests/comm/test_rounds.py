"""The schedule of exchanges in log2(n) rounds, carried out for all ranks at once."""

from math import ceil, log2

import numpy as np
import pytest

from spmd_engine.comm.blocks import merged, spans
from spmd_engine.comm.rounds import Payload, broadcast_rounds, gather_rounds, reduce_rounds

LENGTHS = [3, 0, 1, 2, 5, 1]  # of the parts of the first ranks, then again
each_number = pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17])


def add(out, blocks):
    np.add(*blocks, out=out)


def carried_out(arrays, parts, rounds, combine=None):
    """The arrays of all ranks after their rounds; and the elements that each rank has sent."""
    return delivered([Payload(x.copy(), parts, mine, combine) for x, mine in zip(arrays, rounds, strict=True)])


def delivered(payloads):
    sent, n = [0] * len(payloads), len(payloads)
    for i in range(len(payloads[0].rounds)):
        messages = [payload.outgoing(i).copy() for payload in payloads]
        for rank, payload in enumerate(payloads):
            arrived = messages[(rank - payload.rounds[i].distance) % n]
            sent[rank] += messages[rank].size
            assert payload.room(i).size == arrived.size
            payload.take(i, arrived)
    return [payload.x for payload in payloads], sent


def parts_of(n):
    return spans([LENGTHS[r % len(LENGTHS)] for r in range(n)])


def numbers(n, size):
    return [np.random.default_rng(r).integers(0, 1000, size).astype(float) for r in range(n)]


@each_number
def test_each_rank_gets_the_sum_of_its_part(n):
    parts = parts_of(n)
    arrays = numbers(n, parts[-1].stop)
    rounds = [reduce_rounds(r, n) for r in range(n)]
    sums, sent = carried_out(arrays, parts, rounds, add)
    for r, part in enumerate(parts):
        assert (sums[r][part] == sum(arrays)[part]).all()
        assert len(rounds[r]) == ceil(log2(n))
        assert sent[r] == parts[-1].stop - (part.stop - part.start)


@each_number
def test_a_gather_is_the_adjoint_of_a_reduction(n):
    parts = parts_of(n)
    whole = np.arange(float(parts[-1].stop))
    arrays = [np.full(whole.size, -1.0) for _ in range(n)]
    for x, part in zip(arrays, parts, strict=True):
        x[part] = whole[part]
    rounds = [gather_rounds(r, n) for r in range(n)]
    assert all((x == whole).all() for x in carried_out(arrays, parts, rounds)[0])
    for r in range(n):
        assert [(-d, received, sent) for d, sent, received in reversed(rounds[r])] == reduce_rounds(r, n)


@each_number
def test_the_root_s_array_reaches_each_rank_once(n):
    whole = np.arange(5.0)
    for root in {0, n // 2, n - 1}:
        arrays = [whole if r == root else np.full(whole.size, -1.0) for r in range(n)]
        results, sent = carried_out(arrays, [slice(0, 5)], [broadcast_rounds(r, n, root) for r in range(n)])
        assert all((x == whole).all() for x in results)
        assert sum(sent) == 5 * (n - 1) and max(sent) == 5 * ceil(log2(n))


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_sums_have_one_order_if_ranks_are_a_power_of_two(n):
    """Of numbers of different magnitudes: parts of any lengths, whichever rank has them."""
    size, totals = 64, set()
    arrays = [np.random.default_rng(r).standard_normal(size) * 10.0 ** (r % 5) for r in range(n)]
    for lengths in ([size // n] * n, [*[0] * (n - 1), size], [size, *[0] * (n - 1)]):
        parts = spans(lengths)
        sums = carried_out(arrays, parts, [reduce_rounds(r, n) for r in range(n)], add)[0]
        joined = np.concatenate([x[part] for x, part in zip(sums, parts, strict=True)])
        totals.add(joined.tobytes())
    assert len(totals) == 1


def test_adjacent_parts_are_one_slice():
    assert merged([slice(4, 6), slice(6, 6), slice(6, 9), slice(0, 4)]) == [slice(4, 9), slice(0, 4)]
    assert merged([slice(0, 0)]) == []
