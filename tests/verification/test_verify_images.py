"""verify names mistakes of layers on images: halos and sums of statistics that are missing."""

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.engine import LayeredEngine
from spmd_engine.engine.batch import batch_of
from spmd_engine.layers import BatchNorm, Conv2d
from spmd_engine.verification import Cause, mesh_of_one, verify
from support import pictures
from support.pairwise import in_turn


class NoHalo:
    """Collectives by which nothing comes of what other ranks have: zeros, as beyond the image."""

    def __init__(self, sh):
        self.sh = sh

    def __getattr__(self, name):
        return getattr(self.sh, name)

    def _own(self, wide, reads):
        place = [slice(None)] * 4
        for dim, letter in ((1, "h"), (2, "w")):
            reach = self.sh.reach(letter, *reads[letter])
            place[dim] = slice(*(n - reach.needed[0] for n in reach.own))
        return tuple(place)

    def with_halo(self, x, dims, reads):
        wide = self.sh.with_halo(x, dims, reads)
        alone = np.zeros_like(wide)
        alone[self._own(wide, reads)] = x
        return alone

    def start_with_halo(self, x, dims, reads):
        return self.with_halo(x, dims, reads)

    def start_add_halo(self, dx, dims, reads):
        return dx[self._own(dx, reads)].copy()


class ConvWithoutHalo(Conv2d):
    def forward(self, sh, *given):
        return super().forward(NoHalo(sh), *given)


class ConvThatSendsNothingBack(Conv2d):
    def backward_input(self, sh, *given):
        return super().backward_input(NoHalo(sh), *given)


class NormOfParts(BatchNorm):
    """Forgets, where it is told to, one of its reductions."""

    forgets = ""

    def forward(self, sh, p, x, ctx):
        flat = x.reshape(-1, x.shape[3])
        sums = np.append(flat.sum(0), len(flat))
        sums = sums if self.forgets == "mean" else sh.all_reduce(sums, over=self.over)
        mean, count = sums[:-1] / sums[-1], sums[-1]
        squares = ((flat - mean) ** 2).sum(0)
        if self.forgets != "variance":
            squares = sh.all_reduce(squares, over=self.over)
        inverse = 1 / np.sqrt(squares / count + self.epsilon)
        normal = (flat - mean) * inverse
        return (normal * p["scale"] + p["shift"]).reshape(x.shape), (normal, inverse, count)

    def backward_input(self, sh, p, saved, dy):
        normal, inverse, count = saved
        here = dy.reshape(normal.shape)
        sums = np.stack([(here * normal).sum(0), here.sum(0)])  # of scale and shift
        whole = sums / count
        if self.forgets != "gradient":
            whole = sh.all_reduce(sums.copy(), over=self.over) / count
        dx = (here - whole[1] - normal * whole[0]) * (inverse * p["scale"])
        return dx.reshape(dy.shape), sums


def disagreement(axes, name, kind, **attributes):
    """What verify says if a layer of a small network is of this kind on the mesh, but not alone."""

    def program():
        with Mesh(**axes) as mesh:
            engine = LayeredEngine(pictures.small_convnet(), mesh, dtype=np.float64, seed=5)
            layer = dict(engine.model.layers)[name]
            layer.__class__ = kind
            layer.__dict__.update(attributes)
            alone = None
            if mesh.rank == 0:
                alone = LayeredEngine(pictures.small_convnet(), mesh_of_one(), dtype=np.float64, seed=5)
            return verify(engine, alone, lambda engine, step: batch_of(*pictures.pictures(step), engine, 2, step))

    report = run_threads(program, int(np.prod(list(axes.values()))))[0]
    assert not report.agrees
    return report.disagreement


@in_turn(
    4,
    kind=[ConvWithoutHalo, ConvThatSendsNothingBack],
    **{"axes, over": [({"rows": 2, "data": 2}, "rows"), ({"pipe": 2, "columns": 2}, "columns")]},
)
def test_a_missing_halo_is_named(kind, axes, over):
    found = disagreement(axes, "block1/conv", kind)
    assert (found.kind, found.layer) == ("output" if kind is ConvWithoutHalo else "input gradient", "block1/conv")
    assert [(finding.cause, finding.axes) for finding in found.findings] == [(Cause.MISSING_HALO, (over,))]


@pytest.mark.parametrize(
    ("forgets", "variable", "axes"),
    [
        ("mean", "sums", {"rows": 2}),
        pytest.param("variance", "squares", {"rows": 2, "data": 2}, marks=pytest.mark.soak),
        pytest.param("gradient", "whole", {"pipe": 2, "data": 2}, marks=pytest.mark.soak),
    ],
)
def test_a_sum_of_statistics_that_is_missing_is_named(forgets, variable, axes):
    found = disagreement(axes, "block2/norm", NormOfParts, forgets=forgets)
    assert (found.kind, found.layer) == ("input gradient" if forgets == "gradient" else "output", "block2/norm")
    over = tuple(axis for axis in axes if axis != "pipe")
    ((cause, where, text),) = [(finding.cause, finding.axes, finding.text) for finding in found.findings]
    assert (cause, where) == (Cause.MISSING_SUM, over)
    assert text.startswith(f"{variable} (test_verify_images.py:")
