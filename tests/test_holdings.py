"""What ranks hold of arrays: rectangles, put together to the whole and counted once."""

from functools import cache
from math import prod

import numpy as np
import pytest

import tiny
from spmd_engine import Mesh, run
from spmd_engine.engine import AdamW, LayeredEngine, schedules
from spmd_engine.engine.batch import batch_of
from spmd_engine.engine.holdings import Holdings
from spmd_engine.engine.plan import Storage
from spmd_engine.errors import MismatchError, UsageError
from spmd_engine.layers import Linear
from spmd_engine.layers.layer import Layer, Parameter
from spmd_engine.models import Model
from spmd_engine.models.mlp import squared_loss

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


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("root", [None, 5])
def test_each_element_is_sent_once_to_those_who_lack_it(name, root):
    """Of ranks that hold the same, one sends; who has a part already gets only the rest."""

    def program(shelf, mesh):
        mesh.ledger.clear()
        shelf.gather(name, root=root)
        wanted = WHOLE[name].size if root in (None, mesh.rank) else shelf.parameters[name].size
        return mesh.ledger.total("all_to_all").sent, wanted - shelf.parameters[name].size

    sent, lacking = zip(*on_shelves(program))
    assert sum(sent) == sum(lacking) * WHOLE[name].itemsize


@pytest.mark.parametrize("kind", [Shelf, Holdings], ids=["shapes-known", "shapes-asked"])
def test_the_number_of_collectives_does_not_grow_with_the_arrays(kind):
    """Two to learn of all arrays who holds what; then, an array, one to agree and one to send, if anything lacks."""

    class Asking(Shelf):
        global_shape = kind.global_shape

    def program(shelf, mesh):
        mesh.ledger.clear()
        counts = []
        for _ in range(2):
            for name in WHOLE:
                shelf.gather(name)
                counts.append(mesh.ledger.total().calls)
        return np.diff([0, *counts]).tolist()

    moves = [1 + (name in SHARDINGS and WHOLE[name].size > 0) for name in WHOLE]
    for counts in on_shelves(program, kind=Asking):
        assert counts == [2 + moves[0], *moves[1:], *moves]


def test_what_is_held_otherwise_than_last_time_is_asked_for_anew():
    """Even if only one rank's part has another shape now."""

    def program():
        with Mesh(data=2) as mesh:
            shelf = Holdings()
            shelf.mesh, shelf.group, shelf.shardings = mesh, mesh.group, {"w": "d/data"}
            for length in 7, 6, 5:  # 4 and 3 rows; 3 and 3; 3 and 2
                whole = np.arange(length)
                shelf.parameters = {"w": shelf.block("w", whole)}
                np.testing.assert_array_equal(shelf.gather("w"), whole)

    run(program, 2)


def test_parts_of_different_dtypes_are_every_rank_s_error():
    def program(shelf, mesh):
        if mesh.rank == 2:
            shelf.parameters["uneven"] = shelf.parameters["uneven"].astype(np.float32)
        with pytest.raises(MismatchError, match="ranks hold 'uneven', .* in several dtypes: <f4, <i8"):
            shelf.gather("uneven")
        return True

    assert all(on_shelves(program))


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


def test_another_root_or_another_part_is_every_rank_s_error():
    def program(shelf, mesh):
        for other in (lambda: shelf.gather("few", root=1), lambda: shelf.gather_owned("few", shelf.parameters)):
            with pytest.raises(MismatchError, match=r"gather: ranks \[2\] ask for another parameter .*, or otherwise"):
                other() if mesh.rank == 2 else shelf.gather("few")
        np.testing.assert_array_equal(shelf.gather("few"), WHOLE["few"])

    on_shelves(program)


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


# --- of an engine, in groups and parts

ENGINES = [
    ({"data": 3}, {}),
    *[({"data": 3}, {"zero": zero}) for zero in (1, 2, 3)],
    ({"data": 2, "shard": 2}, {}),
    ({"replicate": 2, "shard": 2}, {"group_threshold": 0}),
    ({"model": 4, "data": 2}, {"zero": 3, "sequence_parallel": True}),  # of 6 heads, 13 words: uneven, some on none
    ({"pipe": 3}, {}),
    ({"pipe": 2, "data": 2}, {"zero": 1, "schedule": schedules.named("interleaved")}),
    ({"data": 2, "pipe": 2, "model": 2}, {"zero": 3, "tied": False}),
    ({"context": 2, "pipe": 2}, {"zero": 2}),
]
every_engine = pytest.mark.parametrize("axes, options", ENGINES, ids=[f"{tiny.mesh_id(a)}-{o}" for a, o in ENGINES])


@cache
def initial(tied):
    """The whole initial parameters."""

    def program():
        with Mesh() as mesh:
            engine = tiny.make_engine(mesh, tied=tied)
            return {name: array.copy() for name, array in engine.parameters.items()}

    return run(program, 1)[0]


@every_engine
def test_an_engine_s_parts_are_those_of_the_whole(axes, options):
    whole = initial(options.get("tied", True))

    def program():
        with Mesh(**axes) as mesh:
            engine = tiny.make_engine(mesh, **options)
            assert engine.names == tuple(whole)
            with pytest.raises(UsageError, match="no parameter 'w'; this engine has: embedding/table"):
                engine.addressable_shard("w")
            held = {name: engine.index(name) for name in engine.names}
            for name, index in held.items():
                shard = engine.addressable_shard(name)
                assert (shard is None) == (index is None) == (name not in engine.parameters)
                assert engine.global_shape(name) == whole[name].shape
                if index is not None:
                    np.testing.assert_array_equal(shard.data, whole[name][index], strict=True)
                    np.testing.assert_array_equal(engine.block(name, whole[name]), shard.data, strict=True)
            for name in engine.names:
                np.testing.assert_array_equal(engine.gather(name), whole[name], strict=True)
            return held, {name: engine.owned_index(name) for name in engine.names}

    results = run(program, tiny.ranks_of(axes))
    for name, array in whole.items():
        for indices in ([held[name] for held, _ in results], [owned[name] for _, owned in results]):
            covered = np.zeros(array.shape, int)
            for index in indices:
                if index is not None:
                    covered[index] += 1
            assert covered.min() == covered.max() > 0, name  # as often everywhere: once a replica


@every_engine
def test_gradients_and_state_are_gathered_and_counted_as_owned(axes, options):
    """From arrays like ``owned`` that hold each element's place in the whole."""
    whole = initial(options.get("tied", True))
    places = {name: np.arange(1.0, array.size + 1).reshape(array.shape) for name, array in whole.items()}

    def program():
        with Mesh(**axes) as mesh:
            engine = tiny.make_engine(mesh, **options)
            like = {key: np.zeros_like(array) for key, array in engine.owned.items()}
            for name, part in engine.named(like).items():
                part[...] = places[name][engine.owned_index(name)]
            for name in engine.names:
                np.testing.assert_array_equal(engine.gather_owned(name, like), places[name])
                at_root = engine.gather_owned(name, like, root=mesh.size - 1)
                assert (at_root is None) == (mesh.rank != mesh.size - 1)
            engine.step(tiny.batch(engine, 0))
            for own, array in zip(engine.gradients.values(), like.values()):
                own[...] = array
            return engine.gradient_norm()

    expected = sum((array**2).sum() for array in places.values()) ** 0.5
    np.testing.assert_allclose(run(program, tiny.ranks_of(axes)), expected, rtol=1e-13)


@cache
def doubled(tied):
    """A checkpoint, and the loss that one device has with it."""
    whole = {name: 2 * array + 0.1 for name, array in initial(tied).items()}

    def program():
        with Mesh() as mesh:
            engine = tiny.make_engine(mesh, tied=tied)
            engine.load_checkpoint(whole)
            return engine.evaluate(tiny.batch(engine, 0))

    return whole, run(program, 1)[0]


@every_engine
def test_a_checkpoint_is_taken_by_the_parts_and_used_at_once(axes, options):
    whole, expected = doubled(options.get("tied", True))

    def program():
        with Mesh(**axes) as mesh:
            engine = tiny.make_engine(mesh, **options)
            assert abs(engine.evaluate(tiny.batch(engine, 0)) - expected) > 1e-3  # opens what is in parts
            engine.load_checkpoint(whole)
            for name in engine.names:
                np.testing.assert_array_equal(engine.gather(name), whole[name], strict=True)
            np.testing.assert_allclose(engine.evaluate(tiny.batch(engine, 0)), expected, rtol=1e-12)

    run(program, tiny.ranks_of(axes))


class Scale(Layer):
    """y[b d] = scale x[b d]: a parameter without dims."""

    parameters = {"scale": Parameter("", mean=2.0, decay=False, summed="b")}
    may_cut, sizes = "bd", {"d": 5}

    def forward(self, sh, p, x, at):
        return p["scale"] * x, x

    def backward_input(self, sh, p, saved, dy):
        return p["scale"] * dy, saved * dy

    def backward_weight(self, sh, rest, g):
        g.add("scale", rest.sum())


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_number_has_one_owner(zero):
    """It has no rows to be cut."""
    layers = ("up", Linear(("d", 5), ("f", 7))), ("down", Linear(("f", 7), ("d", 5))), ("scale", Scale())
    model = Model("scaled", layers, "b d", "b d", "b d", squared_loss)
    x = np.random.default_rng(0).standard_normal((8, 5))

    def program():
        with Mesh() as mesh:
            engine = LayeredEngine(model, mesh, dtype=np.float64, storage=Storage(zero))
            loss = engine.step(batch_of(x, x[::-1].copy(), engine, 2))
            gradient, norm = engine.gather_owned("scale/scale", engine.gradients), engine.gradient_norm()
            AdamW().update(engine, engine.gradients, step=1, rate=0.1)
            after = engine.gather("scale/scale")
            engine.load_checkpoint({name: np.full(engine.global_shape(name), 3.0) for name in engine.names})
            assert engine.gather("scale/scale") == 3.0
            return loss, norm, gradient, after

    expected = run(program, 1)[0]
    for result in run(program, 3):
        np.testing.assert_allclose(result, expected, rtol=1e-12)
