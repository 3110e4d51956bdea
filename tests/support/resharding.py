"""Meshes, shardings and global arrays for the tests of resharding."""

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import strategies as st

from spmd_engine import Mesh, run_threads
from spmd_engine.sharding import Spec
from support.numerics import frozen

DATA_MODEL = ["b s f", "b/data s f", "b s f/data", "b/data s f/model", "b/model s f/data", "b/data s/model f"]
DATA_MODEL += ["b s/data,model f", "b s/model,data f", "b/model,data s f", "b s f/model", "b s/model f"]
DATA_MODEL += ["b/model s/data f"]
CUBE = ["b s f", "b/a s f", "b/a,b s f", "b/b,a s f", "b/a,b,c s f", "b/c s/a f/b", "b s/a,b f", "b s/a,b f/c"]
CUBE += ["b/a s/b f/c", "b/c,b s f/a", "b s f/a,b,c", "b/b s f/c,a"]
MESHES = [({"data": 2, "model": 2}, DATA_MODEL), ({"data": 3, "model": 2}, DATA_MODEL)]
MESHES += [({"a": 2, "b": 2, "c": 2}, CUBE)]
MESH_IDS = ["2x2", "3x2", "2x2x2"]


def each_mesh_with_pairs(now):
    """Pairs of shardings on each mesh. On larger meshes only part ``now`` of ten is not in ``soak``; in each part, a
    sharding is paired with several others. Tests that use different parts together cover most pairs."""
    params = []
    for (axes, names), name in zip(MESHES, MESH_IDS, strict=True):
        pairs = list(product(enumerate(names), repeat=2))
        of = {4: 2, 6: 7}.get(prod(axes.values()), 11)
        for part in range(of):
            chosen = [(source, target) for (i, source), (j, target) in pairs if (i + 2 * j) % of == part]
            id = name if of == 1 else f"{name}, part {part + 1} of {of}"
            params.append(pytest.param(axes, chosen, id=id, marks=pytest.mark.soak if part != now % of else ()))
    return pytest.mark.parametrize("axes, pairs", params)


def numbered(shape, dtype=np.int64):
    """A global array with distinct elements."""
    return frozen(np.arange(prod(shape)).reshape(shape).astype(dtype))


def on_mesh(axes, body):
    """The results of ``body(mesh)`` on all ranks."""

    def rank():
        with Mesh(**axes) as mesh:
            return body(mesh)

    return run_threads(rank, prod(axes.values()))


@st.composite
def specs(draw, letters="bsf", axes=("x", "y", "z")):
    """Any sharding of three dims over three axes."""
    cuts = {letter: [] for letter in letters}
    for axis in draw(st.permutations(axes)):
        if letter := draw(st.sampled_from(["", *letters])):
            cuts[letter].append(axis)
    return Spec(tuple((letter, tuple(names)) for letter, names in cuts.items()))
