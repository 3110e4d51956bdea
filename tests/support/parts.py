"""The parts of arrays on ranks, each with its place in the global array, compared without gathering."""

import numpy as np


def stored(engine):
    """This rank's part of every parameter."""
    return {name: (engine.index(name), array.copy()) for name, array in engine.parameters.items()}


def updated(engine, arrays):
    """This rank's part of arrays like its gradients, or a kind of optimizer state."""
    return {name: (engine.owned_index(name), array.copy()) for name, array in engine.named(arrays).items()}


def assert_parts(found, expected, *, atol, missing=False):
    """Assert that each rank's parts in ``found``, replicas included, equal those of ``expected``, of one device.

    Unless parts may be ``missing``, as in a process that sees one of several ranks, each element is on a rank.
    """
    assert {name for parts in found for name in parts} <= expected.keys()
    for name, (_, whole) in expected.items():
        covered = np.zeros(whole.shape, bool)
        for index, part in (parts[name] for parts in found if name in parts):
            np.testing.assert_allclose(part, whole[index], rtol=0, atol=atol, err_msg=name)
            covered[index] = True
        assert missing or covered.all(), name


def joined(found, shapes):
    """The global arrays of these shapes, joined from the parts; replicas must have the same bits."""
    wholes = {}
    for name, shape in shapes.items():
        parts = [parts[name] for parts in found if name in parts]
        whole, covered = np.empty(shape, parts[0][1].dtype), np.zeros(shape, bool)
        for index, part in parts:
            np.testing.assert_array_equal(part[covered[index]], whole[index][covered[index]], err_msg=name)
            whole[index], covered[index] = part, True
        assert covered.all(), name
        wholes[name] = whole
    return wholes
