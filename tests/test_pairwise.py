"""Which cases of cross-products `make test` runs, and that all others are in soak."""

from itertools import combinations, product

import pytest

from support.pairwise import covering, every_pair, in_turn


def is_soak(case):
    return any(mark.name == "soak" for mark in case.marks)


@pytest.mark.parametrize("sizes", [(3,), (2, 3), (2, 2, 2, 2), (3, 2, 2, 3, 4), (1, 5, 1), (0, 2)], ids=str)
def test_any_two_values_meet_in_a_case(sizes):
    columns = [range(10 * i, 10 * i + size) for i, size in enumerate(sizes)]
    cases = covering(columns)
    assert set(cases) <= set(product(*columns)) and len(set(cases)) == len(cases)
    if all(sizes):
        for one, other in combinations(columns, 2):
            assert {frozenset(pair) for case in cases for pair in combinations(case, 2)} >= {
                frozenset(pair) for pair in product(one, other)
            }
    assert covering(columns) == cases  # deterministic: each worker process collects the tests itself


def test_far_fewer_cases_than_the_product_has():
    assert len(covering([range(2)] * 5)) <= 8 < 2**5
    assert len(covering([range(3)] * 4)) <= 12 < 3**4


def test_the_others_are_in_soak_and_none_is_lost():
    mark = every_pair(a=[1, 2], b={"an id": "x", "another": "y"}, c=[True, False]).mark
    names, cases = mark.args
    assert names == ["a", "b", "c"]
    assert [case.values for case in cases] == list(product([1, 2], ["x", "y"], [True, False]))
    assert len({case.id for case in cases}) == 8 and cases[0].id == "1-an id-True"
    now = [case.values for case in cases if not is_soak(case)]
    assert len(now) < 8
    for i, j in combinations(range(3), 2):
        assert len({(values[i], values[j]) for values in now}) == 4


def test_values_take_turns():
    _, cases = in_turn(3, 1, a=range(4), b=range(5)).mark.args
    assert [case.values for case in cases] == list(product(range(4), range(5)))
    now = {case.values for case in cases if not is_soak(case)}
    assert now == {(a, b) for a, b in product(range(4), range(5)) if a + b in (1, 4, 7)}
    _, cases = in_turn(2, a=["x", "y", pytest.param("z", marks=pytest.mark.soak)]).mark.args
    assert [is_soak(case) for case in cases] == [False, True, True]


def test_values_keep_their_marks_and_what_is_in_soak_is_not_relied_on():
    """A pair must not be covered only by a case that is in soak because of a third value."""
    mpi = pytest.mark.mpi(ranks=3)
    ranks = [2, pytest.param(3, marks=pytest.mark.soak, id="three"), pytest.param(None, marks=mpi)]
    _, cases = every_pair(**{"ranks": ranks, "size, dtype": [(1, "f"), (2, "d")], "check": [True, False]}).mark.args
    assert len(cases) == 12
    assert all(is_soak(case) for case in cases if case.values[0] == 3 and case.id.startswith("three-"))
    assert all((mpi in case.marks) == (case.values[0] is None) for case in cases)
    now = [case.values for case in cases if not is_soak(case)]
    assert len(now) == 4
    assert {(size, dtype, check) for _, size, dtype, check in now} == {
        (size, dtype, check) for size, dtype in [(1, "f"), (2, "d")] for check in [True, False]
    }
    assert {(ranks, check) for ranks, _, _, check in now} == set(product([2, None], [True, False]))
