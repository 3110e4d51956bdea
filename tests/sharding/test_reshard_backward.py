"""The backward of reshard is the way back."""

from itertools import permutations

import numpy as np

from spmd_engine.sharding import Spec, reshard, shard
from support.numerics import normals
from support.on_ranks import assert_same
from support.resharding import CUBE, each_mesh_with_pairs, on_mesh


@each_mesh_with_pairs(3)
def test_the_backward_is_the_way_back(axes, pairs):
    """<y, R x> = <R' y, x>, where x and y are arrays cut over ranks, copies alike, and each element counts once.

    Where no axis is left out of either sharding there are no copies, and R is a permutation of all ranks'
    elements: then this is the inner product of everything on all ranks, and R' its transpose.
    """
    shape = (5, 6, 7)
    whole_x, whole_y = normals(*shape, seed=1), normals(*shape, seed=2)

    def body(mesh):
        def inner(one, other, spec):
            copies = mesh.size // mesh.axis_size(Spec.parse(spec).axes)
            return np.vdot(one, other) / copies

        products = []
        for source, target in pairs:
            x, y = shard(whole_x, source, mesh), shard(whole_y, target, mesh)
            there, back = reshard(x, source, target, mesh), reshard(y, target, source, mesh)
            products.append((inner(y, there, target), inner(back, x, source)))
        return products

    forward, backward = sum(map(np.array, on_mesh(axes, body))).T
    np.testing.assert_allclose(forward, backward, rtol=1e-12)
    np.testing.assert_allclose(forward, np.vdot(whole_y, whole_x), rtol=1e-12)


def test_without_copies_it_is_a_permutation_and_back_its_inverse():
    full = [spec for spec in CUBE if len(Spec.parse(spec).axes) == 3]
    assert len(full) >= 5

    def body(mesh):
        for source, target in permutations(full[::2], 2):
            x = normals(*Spec.parse(source).local_shape((5, 6, 7), mesh), seed=mesh.rank)
            y = reshard(x, source, target, mesh)
            everything = [np.sort(mesh.all_gather(each.reshape(-1))) for each in (x, y)]
            np.testing.assert_array_equal(*everything)
            assert_same(reshard(y, target, source, mesh), np.asarray(x))

    on_mesh({"a": 2, "b": 2, "c": 2}, body)
