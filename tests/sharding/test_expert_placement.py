"""Placement of experts: nobody is dropped, the greedy one is near the best, and little moves."""

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spmd_engine.errors import UsageError
from spmd_engine.sharding.experts import (
    best_matching,
    even,
    greedy,
    imbalance,
    load_by_part,
    moved,
    rebalanced,
    renumbered,
)

counts = st.integers(0, 1000)
numbers = st.floats(0, 1e6, allow_subnormal=False)
few = st.lists(counts, max_size=6) | st.lists(numbers, max_size=6)
many = st.lists(counts, max_size=40) | st.lists(numbers, max_size=40)


def heaviest(placement, loads, parts):
    return max(sum(load for load, at in zip(loads, placement, strict=True) if at == part) for part in range(parts))


@given(st.integers(0, 40), st.integers(1, 12))
@example(10, 4)
def test_even_places_every_expert_and_no_part_has_two_more_than_another(experts, parts):
    placement = even(experts, parts)
    sizes = [placement.count(part) for part in range(parts)]
    assert sum(sizes) == len(placement) == experts and max(sizes) - min(sizes) <= 1
    assert list(placement) == sorted(placement) and sizes == sorted(sizes, reverse=True)


def test_ten_experts_on_four_parts():
    assert even(10, 4) == (0, 0, 0, 1, 1, 1, 2, 2, 3, 3)


@given(many, st.integers(1, 9), st.integers(0, 3))
def test_greedy_places_every_expert_on_a_part_with_room(loads, parts, spare):
    most = -(-len(loads) // parts) + spare
    placement = greedy(loads, parts, most)
    assert len(placement) == len(loads) and set(placement) <= set(range(parts))
    assert all(placement.count(part) <= most for part in range(parts))


@given(few, st.integers(1, 4))
@example([5, 5, 4, 4, 3, 3, 3], 3)  # 11 against 9: the bound is reached
def test_greedy_is_within_grahams_bound_of_the_best_of_all(loads, parts):
    best = min(heaviest(each, loads, parts) for each in product(range(parts), repeat=len(loads)))
    assert heaviest(greedy(loads, parts), loads, parts) <= (4 / 3 - 1 / (3 * parts)) * best + 1e-9


def test_experts_without_load_are_spread_as_well():
    assert sorted(greedy([0] * 8, 4)) == list(even(8, 4))


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: even(4, 0), "4 experts cannot be placed on 0 parts"),
        (lambda: greedy([1] * 9, 4, 2), "allow 3 or more"),
        (lambda: greedy([1.0, float("nan")], 2), "load of expert 1 is nan"),
        (lambda: greedy([1.0, -1.0], 2), "load of expert 1 is -1.0"),
        (lambda: moved((0, 1), (0,)), "of 2 and of 1 experts"),
    ],
)
def test_what_cannot_be_placed(call, says):
    with pytest.raises(UsageError, match=says):
        call()


def test_imbalance_counts_empty_parts_too():
    assert load_by_part((0, 0, 2), [1, 2, 3], 4).tolist() == [3, 0, 3, 0]
    assert imbalance((0, 0, 2), [1, 2, 3], 4) == 2
    assert imbalance(even(8, 4), [1] * 8, 4) == imbalance(even(8, 4), [0] * 8, 4) == 1


# --- from one placement to another


@given(st.integers(1, 6).flatmap(lambda n: st.lists(st.lists(counts, min_size=n, max_size=n), min_size=n, max_size=n)))
def test_a_matching_is_the_best_of_all(gain):
    columns = best_matching(np.array(gain))
    assert sorted(columns) == list(range(len(gain)))
    best = max(sum(row[c] for row, c in zip(gain, way, strict=True)) for way in permutations(range(len(gain))))
    assert sum(row[c] for row, c in zip(gain, columns, strict=True)) == best


@given(st.integers(1, 4), st.data())
def test_renumbered_moves_the_fewest_and_keeps_who_is_together(parts, data):
    placements = st.lists(st.integers(0, parts - 1), min_size=7, max_size=7).map(tuple)
    before, after = data.draw(placements), data.draw(placements)
    named = renumbered(before, after, parts)
    assert len(set(zip(after, named, strict=True))) == len(set(after)) == len(set(named))
    ways = ([way[part] for part in after] for way in permutations(range(parts)))
    assert len(moved(before, named)) == min(sum(a != b for a, b in zip(before, way, strict=True)) for way in ways)


def test_the_same_parts_by_other_numbers_move_nothing():
    before = even(12, 4)
    assert moved(before, renumbered(before, tuple(3 - part for part in before), 4)) == []


def test_what_moves_is_named():
    assert moved((0, 0, 1, 1), (0, 1, 1, 2)) == [(1, 0, 1), (3, 1, 2)]


def test_a_load_that_is_even_enough_moves_nothing():
    assert rebalanced(even(4, 2), [11, 10, 9, 10], 2) == even(4, 2)


def test_an_uneven_load_moves_experts():
    before, loads = even(8, 4), [90, 80, 10, 10, 10, 10, 10, 10]
    after = rebalanced(before, loads, 4)
    assert imbalance(before, loads, 4) > imbalance(after, loads, 4) == imbalance(greedy(loads, 4), loads, 4)
    assert after[0] == 0 or after[1] == 0  # one of the two heavy ones stays


def test_where_nothing_better_is_known_nothing_moves():
    before, loads = (1, 0, 0), [100, 1, 1]
    assert rebalanced(before, loads, 2) is before
