"""Cross-products of which `make test` runs few cases: all pairs of values, or values in turn. The rest is soak."""

from itertools import combinations, product

import pytest


def every_pair(*, indirect=False, **parameters):
    """Like stacked ``pytest.mark.parametrize`` of these names and values; cases not needed for pairs are soak.

    Values may be ``pytest.param`` with marks, or tuples for names separated by commas (``{"heads, width": [(3, 2), (4,
    1)]}``); if they are a dict, its keys are the ids. If a value is marked ``soak``, so are all its cases.
    """
    columns = _columns(parameters)
    soon = [[i for i, each in enumerate(column) if "soak" not in _mark_names(each)] for column in columns]
    return _parametrize(parameters, columns, set(covering(soon)), indirect)


def in_turn(of, first=0, **parameters):
    """Like ``every_pair``, but one in ``of`` cases is not soak, in turn, beginning with number ``first``.

    With two parameters, each value is paired with some values of the other, and its neighbour with different ones.
    With one parameter, one value in ``of`` remains.
    """
    columns = _columns(parameters)
    places = product(*map(range, map(len, columns)))
    return _parametrize(parameters, columns, {each for each in places if sum(each) % of == first % of}, False)


def covering(columns):
    """Cases of the product of lists, as tuples, that contain every pair of values of any two lists.

    Greedy: each choice is the first case with the most pairs that are still missing.
    """
    if len(columns) < 2:
        return list(product(*columns))
    cases = {case: set(combinations(enumerate(case), 2)) for case in product(*columns)}
    missing = set().union(*cases.values())
    chosen = []
    while missing:
        chosen.append(max(cases, key=lambda case: len(cases[case] & missing)))
        missing -= cases[chosen[-1]]
    return chosen


def _names(parameters):
    return [[name.strip() for name in names.split(",")] for names in parameters]


def _columns(parameters):
    pairs = zip(_names(parameters), parameters.values(), strict=True)
    return [[_as_param(value, len(names)) for value in _listed(values)] for names, values in pairs]


def _parametrize(parameters, columns, now, indirect):
    """All cases of the product; each is in soak unless its places are in ``now``."""
    cases = []
    for places in product(*map(range, map(len, columns))):
        chosen = [column[i] for column, i in zip(columns, places, strict=True)]
        marks = [mark for each in chosen for mark in each.marks]
        if places not in now and all(mark.name != "soak" for mark in marks):
            marks.append(pytest.mark.soak)
        values = [value for each in chosen for value in each.values]
        cases.append(pytest.param(*values, marks=marks, id="-".join(each.id for each in chosen)))
    return pytest.mark.parametrize([name for names in _names(parameters) for name in names], cases, indirect=indirect)


def _listed(values):
    return [pytest.param(value, id=key) for key, value in values.items()] if isinstance(values, dict) else values


def _as_param(value, names):
    given = value if hasattr(value, "marks") else pytest.param(*(value if names > 1 else (value,)))
    if given.id is not None:
        return given
    words = (each.__name__ if hasattr(each, "__name__") else str(each) for each in given.values)
    return pytest.param(*given.values, marks=given.marks, id="-".join(words))


def _mark_names(given):
    return {mark.name for mark in given.marks}
