"""Parameter groups: which neighbours are in one flat array, and where it is cut in intervals."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from spmd_engine.sharding.groups import CAP, Sum, make_groups
from support.parameter_groups import DATA, ITEM, boundaries, cases, group_of, member

SUMS = [Sum(), DATA, Sum(("data",)), Sum(("data", "model"), ("data",)), Sum(("data",), (), stages=(0, 2))]


@st.composite
def members(draw):
    shapes = draw(st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=12))
    facts = st.tuples(st.booleans(), st.sampled_from(SUMS), st.integers(0, 1), st.integers(0, 3))
    return [member(f"p{i}", shape, *draw(facts)) for i, shape in enumerate(shapes)]


limits = st.tuples(st.integers(0, 999), st.integers(0, 999))  # threshold and cap, in bytes


# --- who is in which group


def bytes_of(some):
    return sum(m.largest for m in some) * ITEM


@given(members(), limits)
def test_every_member_is_in_one_group_in_order(listed, limits):
    groups = make_groups(listed, ITEM, *limits)
    assert [m for group in groups for m in sorted(group.members, key=listed.index)] == listed
    assert [group.name for group in groups] == [f"group{i}" for i in range(len(groups))]


@given(members(), limits)
def test_members_of_a_group_are_summed_alike_and_in_one_unit(listed, limits):
    for group in make_groups(listed, ITEM, *limits):
        assert {(m.summed, m.unit) for m in group.members} == {(group.summed, group.members[0].unit)}


@given(members(), limits)
def test_groups_end_where_they_must_and_nowhere_else(listed, limits):
    threshold, cap = limits
    groups = [sorted(group.members, key=listed.index) for group in make_groups(listed, ITEM, *limits)]
    for group in groups:
        assert bytes_of(group) <= cap or len(group) == 1
        assert len(group) == 1 or bytes_of(group[:-1]) < threshold
    for group, after in pairwise(groups):
        one, other = group[-1], after[0]
        must = [
            (one.summed, one.unit) != (other.summed, other.unit),
            bool(one.summed.stages),
            bytes_of(group) >= threshold,
            bytes_of([*group, other]) > cap,
        ]
        assert any(must)


@given(members(), limits)
def test_ranks_with_smaller_blocks_make_the_same_groups(listed, limits):
    elsewhere = [replace(m, shape=(m.largest,)) for m in listed]
    here, there = (make_groups(some, ITEM, *limits) for some in (listed, elsewhere))
    assert [[m.name for m in g.members] for g in here] == [[m.name for m in g.members] for g in there]


def test_threshold_and_cap_count_bytes():
    listed = [member(f"p{i}", (10,)) for i in range(6)]

    def sizes(itemsize, **limits):
        return [group.size for group in make_groups(listed, itemsize, **limits)]

    assert sizes(4, threshold=80) == [20, 20, 20]
    assert sizes(8, threshold=80) == [10] * 6
    assert sizes(4) == [60]
    assert sizes(4, cap=120) == [30, 30]
    assert sizes(4, cap=39) == [10] * 6  # each alone is larger, and stands alone


def test_a_large_parameter_stands_alone_and_its_neighbours_together():
    large = CAP // ITEM + 1
    listed = [member("a", (2,)), member("b", (3,)), member("large", (large,)), member("c", (4,)), member("d", (5,))]
    assert [list(group.spans) for group in make_groups(listed, ITEM)] == [["a", "b"], ["large"], ["c", "d"]]


def test_no_members_no_groups():
    assert make_groups([], ITEM) == []


# --- intervals


@given(cases(), st.integers(1, 9))
def test_intervals_cover_the_flat_array_at_row_boundaries_as_evenly_as_rows_allow(case, parts):
    group, _ = case
    intervals = group.intervals(parts)
    assert len(intervals) == parts
    assert intervals[0].start == 0 and intervals[-1].stop == group.size
    assert all(one.stop == other.start for one, other in pairwise(intervals))
    assert all(part.start <= part.stop for part in intervals)
    assert {part.start for part in intervals} <= set(boundaries(group))
    for number, part in enumerate(intervals):
        even = group.size * number // parts
        assert abs(part.start - even) == min(abs(end - even) for end in boundaries(group))


def test_parts_are_even_where_rows_divide_and_within_a_row_where_not():
    def lengths(*described, parts):
        return [part.stop - part.start for part in group_of(*described).intervals(parts)]

    assert lengths(("w", (6, 4), True), parts=3) == [8, 8, 8]
    assert lengths(("w", (5, 4), True), ("bias", (4,), False), parts=3) == [8, 8, 8]
    assert sorted(lengths(("w", (5, 4), True), parts=3)) == [4, 8, 8]
    assert sorted(lengths(("w", (2, 9), True), parts=4)) == [0, 0, 9, 9]
    assert lengths(("number", (), True), ("empty", (0, 3), True), parts=2) in ([0, 1], [1, 0])
    assert lengths(("empty", (0, 3), True), parts=2) == [0, 0]
