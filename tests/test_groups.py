"""Parameter groups: flat buffers, and arrays that are views of them."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_engine.arrays import CPU
from spmd_engine.sharding.groups import Member, make_groups

SUMS = [(), ("data",), ("data", "model")]


def member(name, shape, decay=True, summed_over=("data",), on_others=0):
    """As one rank has it; the largest block of all ranks may be larger by some elements."""
    return Member(name, shape, decay, summed_over, prod(shape) + on_others)


@st.composite
def members(draw):
    shapes = draw(st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=12))
    facts = st.tuples(st.booleans(), st.sampled_from(SUMS), st.integers(0, 3))
    return [member(f"p{i}", shape, *draw(facts)) for i, shape in enumerate(shapes)]


@st.composite
def cases(draw):
    """Members, and the groups made of them."""
    listed = draw(members())
    return listed, make_groups(listed, np.float64, CPU, threshold=draw(st.integers(1, 999)))


def group_of(*described, dtype=np.float32):
    """One group of members given as (name, shape, decay)."""
    (group,) = make_groups([member(*each) for each in described], dtype, CPU)
    return group


MIXED = [("norm", (3,), False), ("w0", (2, 3), True), ("bias", (2,), False), ("w1", (3, 2), True)]

# --- who is in which group


@given(cases())
def test_every_member_is_in_one_group_in_order(case):
    listed, groups = case
    assert [m for group in groups for m in sorted(group.members, key=listed.index)] == listed
    assert [group.name for group in groups] == [f"group{i}" for i in range(len(groups))]


@given(cases())
def test_a_group_is_summed_over_one_set_of_axes(case):
    _, groups = case
    for group in groups:
        assert {m.summed_over for m in group.members} == {group.summed_over}


@given(members(), st.integers(1, 999))
def test_groups_end_at_the_threshold_or_where_the_sum_changes(listed, threshold):
    groups = make_groups(listed, np.float64, CPU, threshold)
    sizes = [sum(m.largest for m in group.members) * 8 for group in groups]
    for size, group, after in zip(sizes, groups, groups[1:]):
        assert size >= threshold or group.summed_over != after.summed_over
    for size, group in zip(sizes, groups):  # without its last member, a group was still below
        last = max(group.members, key=listed.index)
        assert size - last.largest * 8 < threshold


@given(members(), st.integers(1, 999))
def test_ranks_with_smaller_blocks_make_the_same_groups(listed, threshold):
    elsewhere = [replace(m, shape=(m.largest,)) for m in listed]
    here, there = (make_groups(some, np.float64, CPU, threshold) for some in (listed, elsewhere))
    assert [[m.name for m in g.members] for g in here] == [[m.name for m in g.members] for g in there]


def test_the_threshold_counts_bytes():
    listed = [member(f"p{i}", (10,)) for i in range(4)]
    assert [g.size for g in make_groups(listed, np.float32, CPU, threshold=80)] == [20, 20]
    assert [g.size for g in make_groups(listed, np.float64, CPU, threshold=80)] == [10, 10, 10, 10]
    assert [g.size for g in make_groups(listed, np.float32, CPU)] == [40]


def test_no_members_no_groups():
    assert make_groups([], np.float32, CPU) == []


# --- views, segments and join


@given(cases())
def test_writing_through_views_fills_the_buffer(case):
    for group in case[1]:
        for flat in (group.parameters, group.gradients):
            assert flat.shape == (group.size,) and not flat.any()
            for i, (name, view) in enumerate(group.views(flat).items()):
                assert view.shape == next(m.shape for m in group.members if m.name == name)
                view += i + 1
            sizes = [prod(m.shape) for m in group.members]
            np.testing.assert_array_equal(flat, np.repeat(np.arange(len(sizes)) + 1.0, sizes))


@given(cases())
def test_join_gives_the_same_views_as_the_whole_buffer(case):
    for group in case[1]:
        flat = np.arange(float(group.size))
        joined = group.join(group.segments(flat))
        views = group.views(flat)
        assert list(joined) == list(views)
        for name, view in views.items():
            assert joined[name].shape == view.shape
            np.testing.assert_array_equal(joined[name], view)
            assert np.shares_memory(joined[name], flat) or not view.size


@given(cases())
def test_segments_cover_the_buffer_and_part_the_decayed(case):
    for group in case[1]:
        flat = np.arange(float(group.size))
        segments = group.segments(flat)
        np.testing.assert_array_equal(np.concatenate([*segments.values(), []]), flat)
        for m in group.members:
            part = "decayed" if m.decay else "plain"
            if prod(m.shape):
                assert np.isin(group.views(flat)[m.name], segments[f"{group.name}/{part}"]).all()


def test_decayed_members_lie_first_each_kind_in_order():
    group = group_of(*MIXED)
    assert [m.name for m in group.members] == ["w0", "w1", "norm", "bias"]
    segments = group.segments(group.parameters)
    assert {name: part.size for name, part in segments.items()} == {"group0/decayed": 12, "group0/plain": 5}


@pytest.mark.parametrize("decay, name", [(True, "group0/decayed"), (False, "group0/plain")])
def test_a_segment_of_nothing_is_left_out(decay, name):
    assert list(group_of(("p", (3,), decay)).segments(np.zeros(3))) == [name]


def test_a_member_without_elements_is_in_no_segment_but_has_its_views():
    """Collectives go by name, so a rank with an empty block must know it too."""
    group = group_of(("w", (0, 3), True), ("x", (2,), True), ("empty", (0,), False))
    segments = group.segments(group.parameters)
    assert list(segments) == ["group0/decayed"]
    for views in (group.views(group.parameters), group.join(segments)):
        assert {name: view.shape for name, view in views.items()} == {"w": (0, 3), "x": (2,), "empty": (0,)}


def test_a_group_of_nothing_but_empty_members():
    group = group_of(("w", (0, 3), True))
    assert group.size == 0 and group.segments(group.parameters) == {}
    assert group.join({})["w"].shape == (0, 3)


def test_buffers_have_the_dtype():
    group = group_of(("w", (2,), True), dtype=np.float64)
    assert group.parameters.dtype == group.gradients.dtype == np.float64
