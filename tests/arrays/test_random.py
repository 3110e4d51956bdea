"""Random numbers as functions of (key, global index). Keys are fixed, so that no bound here ever flakes."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_engine.arrays.random import bernoulli, hash_bits, integers, key_of, normal, uniform, uniform_at

KEY = key_of(7, "block0/mlp/w0")
DRAWS = [uniform, normal]


@st.composite
def blocks(draw):
    """The shape of an array, and slices of it."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    bounds = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return shape, tuple(slice(*pair) for pair in bounds)


# --- values are functions of the global index


@pytest.mark.parametrize("draw", DRAWS)
@settings(max_examples=60)
@given(blocks())
def test_a_block_is_the_slice_of_the_whole(draw, problem):
    shape, block = problem
    whole, part = draw(KEY, shape, np.float64), draw(KEY, shape, np.float64, block)
    np.testing.assert_array_equal(part, whole[block], strict=True)


@pytest.mark.parametrize("draw", DRAWS)
def test_blocks_longer_than_a_chunk(draw):
    shape, block = (300, 40, 11), (slice(20, 290), slice(3, 39), slice(1, 10))
    whole = draw(KEY, shape, np.float32)
    np.testing.assert_array_equal(draw(KEY, shape, np.float32, block), whole[block], strict=True)
    np.testing.assert_array_equal(draw(KEY, (70_000,), np.float32)[40_000:], whole.reshape(-1)[40_000:70_000])


@pytest.mark.parametrize("draw", DRAWS)
def test_one_number(draw):
    assert draw(KEY, (), np.float64).shape == ()
    assert draw(KEY, (), np.float64) == draw(KEY, (5,), np.float64)[0]


def test_uniform_numbers_at_any_indices_are_those_of_the_whole():
    index = np.array([[5, 0, 11], [3, 3, 7]])
    np.testing.assert_array_equal(uniform_at(KEY, index), uniform(KEY, (12,), np.float64)[index])


def test_an_index_beyond_32_bits():
    rows, shape = slice(2**32 - 1, 2**32 + 2), (2**33, 3)
    index = np.arange(3 * rows.start, 3 * rows.stop, dtype=np.uint64).reshape(3, 3)
    block = uniform(KEY, shape, np.float64, (rows, slice(0, 3)))
    np.testing.assert_array_equal(block, (hash_bits(KEY, index) + 0.5) * 2.0**-32)
    near = uniform(KEY, shape, np.float64, (slice(0, 3), slice(0, 3)))
    assert not np.intersect1d(block, near).size


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=20), st.integers(1, 9), st.data())
def test_rows_of_a_mask_are_the_rows_of_any_other(rows, width, data):
    rows = np.array(rows)
    kept = data.draw(st.lists(st.integers(0, len(rows) - 1)))
    mask = bernoulli(KEY, 0.5, rows, width)
    np.testing.assert_array_equal(bernoulli(KEY, 0.5, rows[kept], width), mask[kept], strict=True)
    folded = bernoulli(KEY, 0.5, rows[None, :, None], width)
    np.testing.assert_array_equal(folded, mask[None, :, None], strict=True)


def test_a_mask_longer_than_a_chunk():
    mask = bernoulli(KEY, 0.3, np.arange(2000), 100)
    np.testing.assert_array_equal(bernoulli(KEY, 0.3, np.arange(1990, 2000), 100), mask[1990:])


# --- the values are what they always were: a seed means the same model for ever


def test_keys():
    assert (KEY, key_of(0), key_of("a")) == (2658618306, 4108050209, 3904355907)
    assert key_of(1, 12) != key_of(11, 2)


def test_golden_bits():
    index = np.array([0, 1, 2, 2**32, 2**32 + 1, 2**63], np.uint64)
    expected = [4230598004, 2509101939, 3898278714, 1390824685, 3279657000, 2730794322]
    assert hash_bits(KEY, index).tolist() == expected


def test_golden_numbers():
    # Logarithms and cosines may differ by a bit between machines, so these are not compared to the last.
    np.testing.assert_allclose(
        uniform(KEY, (4,), np.float64),
        [0.9850128564285114, 0.5841958195669577, 0.9076387422392145, 0.46304210054222494],
        rtol=1e-15,
    )
    np.testing.assert_allclose(
        normal(KEY, (4,), np.float64),
        [-0.8056919207082738, -0.7578673784095747, 0.830678894261001, -0.41877259596465716],
        rtol=1e-12,
    )
    mask = bernoulli(KEY, 0.5, np.array([0, 5, 1 << 40]), 8).astype(int)
    assert mask.tolist() == [[0, 0, 0, 1, 0, 0, 1, 0], [1, 0, 1, 0, 1, 1, 0, 0], [1, 1, 1, 1, 0, 1, 1, 0]]
    assert integers(KEY, 1000, np.arange(8)).tolist() == [346, 929, 464, 71, 57, 878, 750, 291]


# --- the values look random: bounds are five standard deviations of what chance does


def within_chance(value, expected, deviation):
    return abs(value - expected) < 5 * deviation


@pytest.mark.parametrize("seed", range(4))
def test_moments_of_the_normal(seed):
    x = normal(key_of(seed, "w"), (512, 512), np.float64)
    n = x.size
    assert within_chance(x.mean(), 0, n**-0.5)
    assert within_chance(x.var(), 1, (2 / n) ** 0.5)
    assert within_chance((x**3).mean(), 0, (15 / n) ** 0.5)
    assert within_chance((x**4).mean(), 3, (96 / n) ** 0.5)
    assert 4 < abs(x).max() < 7


@pytest.mark.parametrize("seed", range(4))
def test_uniform_numbers_fill_their_interval(seed):
    x = uniform(key_of(seed, "u"), (1 << 18,), np.float64)
    assert 0 < x.min() < 1e-4 and 1 - 1e-4 < x.max() < 1
    for bits in (x * 2**8, x * 2**24 % 2**8):  # the highest bits, and low ones
        counts = np.bincount(bits.astype(int), minlength=256)
        chi_square = ((counts - x.size / 256) ** 2).sum() / (x.size / 256)
        assert within_chance(chi_square, 255, (2 * 255) ** 0.5)


@pytest.mark.parametrize("shape", [(1 << 18,), (512, 512), (64, 64, 64), (1000, 257)])
@pytest.mark.parametrize("draw", DRAWS)
def test_neighbours_are_independent(draw, shape):
    x = draw(key_of(3, "neighbours"), shape, np.float64)
    x = (x - x.mean()) / x.std()
    for dim in range(x.ndim):
        for lag in (1, 2, 8, 32):
            a, b = np.moveaxis(x, dim, 0)[:-lag], np.moveaxis(x, dim, 0)[lag:]
            assert within_chance((a * b).mean(), 0, a.size**-0.5)
            assert within_chance((a**2 * b**2).mean(), 1, 3 * a.size**-0.5)


def test_different_keys_are_independent():
    keys = [key_of(seed, name) for seed in (0, 1, 2, 10) for name in ("block0/w", "block1/w", "x")]
    draws = [normal(key, (1 << 14,), np.float64) for key in keys]
    for a, b in combinations(draws, 2):
        assert within_chance((a * b).mean(), 0, a.size**-0.5)


@pytest.mark.parametrize("bit", [0, 1, 7, 16, 31, 32, 33, 40, 63])
def test_one_bit_of_the_index_changes_half_of_all_bits(bit):
    index = np.arange(4000, dtype=np.uint64) * np.uint64(0x10001)
    changed = hash_bits(KEY, index) ^ hash_bits(KEY, index ^ np.uint64(1 << bit))
    flips = (changed[:, None] >> np.arange(32, dtype=np.uint32)) & 1
    assert np.all(abs(flips.mean(axis=0) - 0.5) < 0.05)


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_rate_of_a_mask(probability):
    mask = bernoulli(KEY, probability, np.arange(1 << 10), 256)
    assert abs(mask.mean() - probability) <= 5 * (probability * (1 - probability) / mask.size) ** 0.5


def test_masks_of_neighbouring_rows_and_keys_are_independent():
    mask = bernoulli(KEY, 0.5, np.arange(1 << 10), 256)
    assert within_chance((mask[1:] == mask[:-1]).mean(), 0.5, 0.5 * mask.size**-0.5)
    other = bernoulli(KEY + 1, 0.5, np.arange(1 << 10), 256)
    assert within_chance((mask == other).mean(), 0.5, 0.5 * mask.size**-0.5)


@pytest.mark.parametrize("high", [1, 2, 7, 1000, 2**40])
def test_integers_fill_their_range(high):
    x = integers(key_of(0, "samples"), high, np.arange(1 << 14))
    assert x.dtype == np.int64 and x.min() >= 0 and x.max() < high
    counts = np.bincount(x * min(high, 7) // high, minlength=min(high, 7))
    assert np.all(abs(counts - x.size / len(counts)) <= 5 * (x.size / len(counts)) ** 0.5)


def test_integers_depend_on_the_index_alone():
    x = integers(KEY, 10**9, np.arange(100))
    np.testing.assert_array_equal(integers(KEY, 10**9, np.array([[99, 3], [0, 7]])), x[[[99, 3], [0, 7]]])
    assert not np.array_equal(x, integers(KEY, 10**9, np.arange(100) + 2**32))


@pytest.mark.parametrize("shape", [(1, 1 << 16, 1 << 16), (1, (1 << 32) - 1), (3, 1 << 32)])
def test_an_array_of_so_many_numbers_that_their_indices_are_long(shape):
    ends = [(length - min(length, 3), length) for length in shape]
    block = tuple(slice(*each) for each in ends)
    part = uniform(7, shape, np.float64, block)
    strides = np.cumprod([1, *shape[:0:-1]])[::-1]
    indices = sum(np.ix_(*(np.arange(*end) * stride for end, stride in zip(ends, strides, strict=True))))
    np.testing.assert_array_equal(part, (hash_bits(7, indices.astype(np.uint64)) + 0.5) * 2.0**-32)
