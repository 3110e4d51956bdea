"""Causes of a disagreement, found in blocks made by hand."""

from types import SimpleNamespace

import numpy as np

from spmd_engine import Mesh
from spmd_engine.verification import Cause
from spmd_engine.verification.comparison import ComparedTensor, LocalPart, examine, measure
from spmd_engine.verification.diagnosis import ComparedBlock, diagnose


def blocks(found, expected, *, axes, **more):
    """A block of one tensor, whole on every rank, for each rank of the mesh."""
    places = list(np.ndindex(*axes.values()))
    index = tuple(map(np.arange, np.shape(expected)))
    coordinates = [dict(zip(axes, place, strict=True)) for place in places]
    return [
        ComparedBlock(rank, where, index, np.array(values, float), np.array(expected, float), **more)
        for rank, (where, values) in enumerate(zip(coordinates, found, strict=True))
    ]


AXES = {"data": 2, "model": 2}
RIGHT = np.array([1.0, -2.0, 4.0])


def causes(found, *, axes=None, kind="gradient", micro_batches=1, **more):
    axes = axes or AXES
    made = blocks(found, RIGHT, axes=axes, **more)
    return [(f.cause, f.axes) for f in diagnose(made, axes, 1e-9, kind=kind, micro_batches=micro_batches)]


def test_a_sum_over_two_axes_needs_both():
    parts = np.random.default_rng(0).standard_normal((3, 3))
    assert causes([*parts, RIGHT - parts.sum(axis=0)]) == [(Cause.MISSING_SUM, ("data", "model"))]
    assert causes([RIGHT * 4] * 4) == [(Cause.REPEATED_SUM, ("data", "model"))]


def test_a_part_to_which_a_sum_is_added_has_no_share_in_it():
    base, parts = np.array([5.0, 6.0, 7.0]), np.random.default_rng(0).standard_normal((2, 3))
    parts[1] += RIGHT - base - parts.sum(axis=0)
    found = [base + part for part in parts] * 2
    assert causes(found, base=base) == [(Cause.MISSING_SUM, ("model",))]
    assert causes(found) != [(Cause.MISSING_SUM, ("model",))]


def test_multiples():
    assert causes([RIGHT * 3] * 4, micro_batches=3) == [(Cause.REPEATED_SUM, ())]
    assert causes([RIGHT / 3] * 4, micro_batches=3) == [(Cause.MEAN, ())]
    assert causes([RIGHT * -0.37] * 4) == [(Cause.FACTOR, ())]
    assert causes([RIGHT * (1 + 1e-5)] * 4) == [(Cause.FACTOR, ())]  # one micro-batch cannot be summed twice
    assert causes([RIGHT * [1, 1, 3]] * 4) == []


def test_one_number_is_no_multiple_of_another_but_by_the_ranks():
    for factor, expected in ((0.37, []), (0.5, [(Cause.MEAN, ("data",)), (Cause.MEAN, ("model",))])):
        made = blocks([3.0 * factor] * 4, 3.0, axes=AXES)
        assert [(f.cause, f.axes) for f in diagnose(made, AXES, 1e-9, kind="loss")] == expected


def test_zeros_and_replicas_that_differ():
    assert causes([RIGHT, RIGHT, [1, 0, 4], [0, 0, 4]]) == [(Cause.ZERO, ())]
    assert causes([RIGHT, RIGHT + 1, RIGHT, RIGHT + 1]) == [(Cause.REPLICAS_DIFFER, ("model",))]
    assert causes([RIGHT, RIGHT + 1, RIGHT, RIGHT], kind="parameter") == [
        (Cause.REPLICAS_DIFFER, ("data",)),
        (Cause.REPLICAS_DIFFER, ("model",)),
    ]


def test_only_tensors_of_whole_steps_are_sums_over_micro_batches():
    found = LocalPart(2 * RIGHT, (slice(None),))
    with Mesh(data=1) as mesh:
        engine = SimpleNamespace(mesh=mesh, group=mesh.group)
        for micro_batch, cause in ((None, Cause.REPEATED_SUM), (1, Cause.FACTOR)):
            tensor = ComparedTensor("gradient", lambda: RIGHT, lambda shape: found, micro_batch=micro_batch)
            (measured,) = measure(mesh.group(), [tensor])
            disagreement = examine(engine, measured, 1e-9, step=0, micro_batches=2)
            assert [finding.cause for finding in disagreement.findings] == [cause]
