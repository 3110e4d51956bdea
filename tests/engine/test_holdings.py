"""What ranks hold of arrays: rectangles, put together to the whole and counted once."""

from math import prod

import numpy as np
import pytest

import tiny
from spmd_engine import Mesh, run
from spmd_engine.engine.holdings import Holdings
from spmd_engine.errors import MismatchError, UsageError

WHOLE = {
    "uneven": np.arange(7 * 5).reshape(7, 5),
    "replicated": np.arange(4.0),
    "cut twice": np.arange(5 * 6 * 2, dtype=np.float32).reshape(5, 6, 2),
    "few": np.arange(2),  # fewer than ranks: some have none
    "nothing": np.zeros((0, 3)),
    "number": np.array(2.5),
    "over both": np.arange(11),
}
SHARDINGS = {
    "uneven": "d f/model",
    "cut twice": "d/data f/model h",
    "few": "d/model",
    "nothing": "d/model f",
    "over both": "d/data,model",
}
AXES = {"data": 2, "model": 3}


class Shelf(Holdings):
    """Nothing but holdings: blocks of WHOLE, as SHARDINGS say."""

    shardings = SHARDINGS

    def __init__(self, mesh):
        self.mesh = mesh
        self.parameters = {name: self.block(name, whole).copy() for name, whole in WHOLE.items()}

    def group(self, over=None):
        return self.mesh.group(over)

    def global_shape(self, name):
        return WHOLE[name].shape if name in WHOLE else super().global_shape(name)


def on_shelves(program, axes=AXES, kind=Shelf):
    """``program(shelf, mesh)`` on every rank."""

    def body():
        with Mesh(**axes) as mesh:
            return program(kind(mesh), mesh)

    return run(body, prod(axes.values()))


# --- the whole, from what ranks hold


@pytest.mark.parametrize("axes", [AXES, {"data": 1, "model": 1}, {"model": 4, "data": 1}], ids=tiny.mesh_id)
@pytest.mark.parametrize("name", WHOLE)
def test_the_whole_is_on_every_rank(name, axes):
    for whole in on_shelves(lambda shelf, mesh: shelf.gather(name), axes):
        np.testing.assert_array_equal(whole, WHOLE[name], strict=True)


@pytest.mark.parametrize("root", [0, 4])
@pytest.mark.parametrize("name", WHOLE)
def test_the_whole_may_be_on_one_rank_alone(name, root):
    results = on_shelves(lambda shelf, mesh: shelf.gather(name, root=root))
    np.testing.assert_array_equal(results[root], WHOLE[name], strict=True)
    assert [rank for rank, whole in enumerate(results) if whole is not None] == [root]


def test_each_element_is_sent_once_to_those_who_want_it():
    """Of ranks that hold the same, one sends; on one rank alone, others send nothing else."""

    def program(shelf, mesh, root):
        mesh.ledger.clear()
        shelf.gather("uneven", root=root)
        return {key: entry.sent for key, entry in mesh.ledger.entries.items() if key[0] in ("send", "broadcast")}

    one = on_shelves(lambda shelf, mesh: program(shelf, mesh, 5))
    assert sum(sum(sent.values()) for sent in one) == WHOLE["uneven"].nbytes
    everyone = on_shelves(lambda shelf, mesh: program(shelf, mesh, None))
    # A broadcast among n ranks hands out n - 1 parts, then everyone passes its part on to the n - 2 others.
    assert sum(sum(sent.values()) for sent in everyone) == 5 * WHOLE["uneven"].nbytes


def test_what_is_gathered_is_a_copy():
    def program(shelf, mesh):
        for name in ("replicated", "number"):
            shelf.gather(name)[...] = -1
            np.testing.assert_array_equal(shelf.parameters[name], WHOLE[name])

    on_shelves(program)
    on_shelves(program, {"data": 1, "model": 1})


class Rows(Shelf):
    """Of every array some rows a rank, in rank order, whatever the sharding; the last rank has none at all."""

    def __init__(self, mesh):
        super().__init__(mesh)
        self.parameters = {name: WHOLE[name][self.rows(name)] for name in self.kept if mesh.rank < mesh.size - 1}

    kept = ("uneven", "replicated", "cut twice")
    shardings = {}

    @property
    def names(self):
        return tuple(WHOLE)

    def rows(self, name):
        length, ranks = len(WHOLE[name]), self.mesh.size - 1
        return slice(length * self.mesh.rank // ranks, length * (self.mesh.rank + 1) // ranks)

    def index(self, name):
        if name not in self.parameters:
            return None
        return (self.rows(name), *(slice(0, n) for n in WHOLE[name].shape[1:]))


@pytest.mark.parametrize("root", [None, 0, 5])
@pytest.mark.parametrize("name", Rows.kept)
def test_rows_are_put_together_also_by_a_rank_that_has_none(name, root):
    results = on_shelves(lambda shelf, mesh: shelf.gather(name, root=root), kind=Rows)
    for whole in [results[root]] if root is not None else results:
        np.testing.assert_array_equal(whole, WHOLE[name], strict=True)


def test_what_nobody_holds_is_an_error():
    with pytest.raises(UsageError, match="no rank holds any of 'few'"):
        on_shelves(lambda shelf, mesh: shelf.gather("few"), kind=Rows)


class Torn(Rows):
    """Rank 1's rows are gone."""

    def index(self, name):
        return None if self.mesh.rank == 1 else super().index(name)


@pytest.mark.parametrize("root", [None, 0])
def test_pieces_that_are_missing_are_an_error(root):
    message = "uneven: ranks hold 30 of its 35 elements; is its sharding right?"
    with pytest.raises(UsageError, match=message):
        on_shelves(lambda shelf, mesh: shelf.gather("uneven", root=root), kind=Torn)


def test_names_asked_differently_are_every_rank_s_error():
    def program(shelf, mesh):
        with pytest.raises(MismatchError, match=r"gather: ranks \[1, 4\] ask for another parameter than rank 0"):
            shelf.gather("few" if mesh.rank in (1, 4) else "uneven")
        return True

    assert all(on_shelves(program))


@pytest.mark.parametrize("call", ["gather", "sharding", "global_shape"])
def test_an_unknown_name_is_an_error_that_says_those_there_are(call):
    with pytest.raises(UsageError, match="no parameter 'w'; .*: uneven, replicated, cut twice"):
        on_shelves(lambda shelf, mesh: getattr(shelf, call)("w"))


# --- the parts


@pytest.mark.parametrize("name", WHOLE)
def test_a_shard_says_where_it_lies(name):
    def program(shelf, mesh):
        shard = shelf.addressable_shard(name)
        np.testing.assert_array_equal(WHOLE[name][shard.index], shard.data, strict=True)
        assert shard.data is shelf.parameters[name]

    on_shelves(program)


def test_shapes_of_the_whole_follow_from_the_blocks():
    def program(shelf, mesh):
        return {name: Holdings.global_shape(shelf, name) for name in WHOLE}

    for shapes in on_shelves(program):
        assert shapes == {name: whole.shape for name, whole in WHOLE.items()}


def test_the_norm_counts_each_element_once():
    def program(shelf, mesh):
        shelf.gradients = shelf.parameters
        counted = {name: shelf.counts_here(name) * part.size for name, part in shelf.parameters.items()}
        return shelf.gradient_norm(), counted

    results = on_shelves(program)
    expected = sum((whole.astype(float) ** 2).sum() for whole in WHOLE.values()) ** 0.5
    np.testing.assert_allclose([norm for norm, _ in results], expected, rtol=1e-14)
    for name, whole in WHOLE.items():
        assert sum(counted[name] for _, counted in results) == whole.size


def test_blocks_of_what_is_whole_are_copies():
    def program(shelf, mesh):
        return [np.shares_memory(shelf.block(name, whole), whole) for name, whole in WHOLE.items()]

    for name, shared in zip(WHOLE, on_shelves(program)[0]):
        assert shared == (name in SHARDINGS and name != "nothing")
