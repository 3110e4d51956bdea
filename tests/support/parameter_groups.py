"""Parameter groups, random and written by hand, for their tests."""

from math import prod

from hypothesis import strategies as st

from spmd_engine.sharding.groups import Member, Sum, make_groups

ITEM = 8  # bytes
DATA = Sum(("data",), ("data",))


def member(name, shape, decay=True, summed=DATA, chunk=0, on_others=0):
    """A member on one rank; the largest block of all ranks may be larger by some elements."""
    return Member(name, shape, decay, summed, prod(shape) + on_others, chunk)


@st.composite
def cases(draw):
    """A group of at least one member, and two positions in its flat array where rows begin or end."""
    shapes = draw(st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=8))
    (group,) = make_groups([member(f"p{i}", shape, draw(st.booleans())) for i, shape in enumerate(shapes)], ITEM)
    ends = boundaries(group)
    return group, slice(*sorted((draw(st.sampled_from(ends)), draw(st.sampled_from(ends)))))


def boundaries(group):
    """Where an interval of a flat array may begin and end."""
    rows = {span.start + k * m.row for m in group.members for span in [group.spans[m.name]] for k in rows_of(m)}
    return sorted({0, group.size, *rows})


def rows_of(each):
    return range(each.size // each.row + 1)


def group_of(*described):
    """One group of members given as (name, shape, decay)."""
    (group,) = make_groups([member(*each) for each in described], ITEM)
    return group
