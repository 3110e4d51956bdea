"""The schedule of exchanges in log2(n) rounds, carried out for all ranks at once."""

from math import ceil, log2

import numpy as np
import pytest

from spmd_engine.comm.blocks import merged, spans
from spmd_engine.comm.rounds import Payload, WholeSum, gather_rounds, reduce_rounds, scatter_rounds

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
def test_the_root_s_parts_reach_their_ranks(n):
    parts = parts_of(n)
    whole = np.arange(float(parts[-1].stop))
    for root in {0, n // 2, n - 1}:
        arrays = [whole if r == root else np.full(whole.size, -1.0) for r in range(n)]
        results, sent = carried_out(arrays, parts, [scatter_rounds(r, n, root) for r in range(n)])
        assert all((x[part] == whole[part]).all() for x, part in zip(results, parts, strict=True))
        assert sent[root] == whole.size - (parts[root].stop - parts[root].start)


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_sums_have_one_order_if_ranks_are_a_power_of_two(n):
    """Of numbers of different magnitudes: whole arrays, and parts of any lengths, whichever rank has them."""
    size = 64
    arrays = [np.random.default_rng(r).standard_normal(size) * 10.0 ** (r % 5) for r in range(n)]
    totals = delivered([WholeSum(x, r, n, add) for r, x in enumerate(arrays)])[0]
    assert len({x.tobytes() for x in totals}) == 1
    for lengths in ([size // n] * n, [*[0] * (n - 1), size], [size, *[0] * (n - 1)]):
        parts = spans(lengths)
        sums = carried_out(arrays, parts, [reduce_rounds(r, n) for r in range(n)], add)[0]
        joined = np.concatenate([x[part] for x, part in zip(sums, parts, strict=True)])
        assert joined.tobytes() == totals[0].tobytes()


@each_number
def test_a_whole_sum_has_equal_bits_on_all_ranks(n):
    """Of 2^k m arrays, m are added in rank order; a rank sends those m - 1, and k sums."""
    arrays = [np.random.default_rng(r).standard_normal(8) * 10.0 ** (r % 5) for r in range(n)]
    payloads = [WholeSum(x, r, n, lambda out, blocks: np.copyto(out, sum(blocks))) for r, x in enumerate(arrays)]
    _, sent = delivered(payloads)
    totals = [payload.x[payload.mine] for payload in payloads]
    assert len({x.tobytes() for x in totals}) == 1 and np.allclose(totals[0], sum(arrays))
    apart = n & -n
    assert set(sent) == {8 * (n // apart - 1 + apart.bit_length() - 1)}
    assert len(payloads[0].rounds) == ceil(log2(n))


def test_adjacent_parts_are_one_slice():
    assert merged([slice(4, 6), slice(6, 6), slice(6, 9), slice(0, 4)]) == [slice(4, 9), slice(0, 4)]
    assert merged([slice(0, 0)]) == []
