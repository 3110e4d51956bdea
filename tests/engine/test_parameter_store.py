"""What an engine's ranks hold, in groups and parts: gathered, counted, loaded."""

from functools import cache

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.checkpoints import load_checkpoint, save_checkpoint
from spmd_engine.engine import AdamW, LayeredEngine, schedules
from spmd_engine.engine.batch import batch_of
from spmd_engine.engine.gather import _plan_to_whole
from spmd_engine.engine.state.assignment import ZeroConfig
from spmd_engine.errors import UsageError
from spmd_engine.layers import Linear
from spmd_engine.layers.declarations import Activation, Parameter
from spmd_engine.layers.layer import Layer
from spmd_engine.losses import mean_squared_error
from spmd_engine.models import Model
from spmd_engine.sharding.groups import ParameterGroup
from support import tiny
from support.pairwise import in_turn

ENGINES = [
    ({"data": 3}, {}),
    *[({"data": 3}, {"zero": zero}) for zero in (1, 2, 3)],
    ({"data": 2, "shard": 2}, {}),
    ({"replicate": 2, "shard": 2}, {"group_threshold": 0}),
    ({"model": 4}, {"zero": 3, "sequence_parallel": True}),  # of 6 heads, 13 words: uneven, some on none
    ({"pipe": 3}, {}),
    ({"pipe": 2, "data": 2}, {"zero": 1, "schedule": schedules.named("interleaved")}),
    ({"data": 2, "model": 2}, {"zero": 3, "tied": False}),
    ({"context": 2, "pipe": 2}, {"zero": 2}),
]
NAMED = [pytest.param(axes, options, id=f"{tiny.mesh_id(axes)}-{options}") for axes, options in ENGINES]


def engines_in_turn(first):
    """Every third engine: of the tests here, neighbours have others; and all of them in ``soak``."""
    return in_turn(3, first, **{"axes, options": NAMED})


@cache
def initial(tied):
    """The whole initial parameters."""

    def program():
        with Mesh() as mesh:
            engine = tiny.make_engine(mesh, tied=tied)
            return {name: array.copy() for name, array in engine.parameters.items()}

    return run_threads(program, 1)[0]


@engines_in_turn(0)
def test_an_engine_s_parts_are_those_of_the_whole(axes, options):
    whole = initial(options.get("tied", True))

    def program():
        with Mesh(**axes) as mesh:
            engine = tiny.make_engine(mesh, **options)
            assert engine.names == tuple(whole)
            with pytest.raises(UsageError, match="this engine has no parameter 'w'; there are: embedding/table"):
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

    results = run_threads(program, tiny.ranks_of(axes))
    for name, array in whole.items():
        for indices in ([held[name] for held, _ in results], [owned[name] for _, owned in results]):
            covered = np.zeros(array.shape, int)
            for index in indices:
                if index is not None:
                    covered[index] += 1
            assert covered.min() == covered.max() > 0, name  # as often everywhere: once a replica


@engines_in_turn(1)
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
            for name in engine.names[::3]:
                at_root = engine.gather_owned(name, like, root=mesh.size - 1)
                assert (at_root is None) == (mesh.rank != mesh.size - 1)
            engine.step(tiny.batch(engine, 0))
            for own, array in zip(engine.gradients.values(), like.values()):
                own[...] = array
            return engine.gradient_norm()

    expected = sum((array**2).sum() for array in places.values()) ** 0.5
    np.testing.assert_allclose(run_threads(program, tiny.ranks_of(axes)), expected, rtol=1e-13)


@cache
def doubled(tied):
    """A checkpoint, and the loss that one device has with it."""
    whole = {name: 2 * array + 0.1 for name, array in initial(tied).items()}

    def program():
        with Mesh() as mesh:
            engine = tiny.make_engine(mesh, tied=tied)
            engine.load_checkpoint(whole)
            return engine.evaluate(tiny.batch(engine, 0))

    return whole, run_threads(program, 1)[0]


@engines_in_turn(2)
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

    run_threads(program, tiny.ranks_of(axes))


class Scale(Layer):
    """y[b d] = scale x[b d]: a parameter without dims."""

    parameters = {"scale": Parameter("", mean=2.0, decay=False, summed="b")}
    may_cut, sizes = "bd", {"d": 5}
    inputs = outputs = Activation("b d", where="inside")

    def forward(self, sh, p, x, ctx):
        return p["scale"] * x, x

    def backward_input(self, sh, p, saved, dy):
        return p["scale"] * dy, saved * dy

    def backward_weight(self, sh, rest, g):
        g.add("scale", rest.sum())


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_number_has_one_owner(zero, tmp_path):
    """It has no rows to be cut."""
    layers = ("up", Linear(("d", 5), ("f", 7))), ("down", Linear(("f", 7), ("d", 5))), ("scale", Scale())
    model = Model("scaled", layers, "b d", "b d", "b d", mean_squared_error)
    x = np.random.default_rng(0).standard_normal((8, 5))

    def program():
        with Mesh() as mesh:
            engine = LayeredEngine(model, mesh, dtype=np.float64, storage=ZeroConfig(zero))
            loss = engine.step(batch_of(x, x[::-1].copy(), engine, 2))
            gradient, norm = engine.gather_owned("scale/scale", engine.gradients), engine.gradient_norm()
            optimizer = AdamW()
            optimizer.update(engine, engine.gradients, step=1, rate=0.1)
            after = engine.gather("scale/scale")
            save_checkpoint(tmp_path / str(mesh.size), engine, optimizer)
            load_checkpoint(tmp_path / str(mesh.size), engine, optimizer)
            assert engine.gather("scale/scale") == after
            engine.load_checkpoint({name: np.full(engine.global_shape(name), 3.0) for name in engine.names})
            assert engine.gather("scale/scale") == 3.0
            return loss, norm, gradient, after

    expected = run_threads(program, 1)[0]
    for result in run_threads(program, 3):
        np.testing.assert_allclose(result, expected, rtol=1e-12)


def test_to_gather_one_array_only_its_own_view_is_made(monkeypatch):
    """A checkpoint gathers every array: views of all for each would be as many as their number squared."""
    made, place = [], ParameterGroup.place

    def counted(group, member, *where):
        made.append(member.name)
        return place(group, member, *where)

    monkeypatch.setattr(ParameterGroup, "place", counted)

    def program():
        engine = tiny.make_engine(Mesh(data=2), zero=3)
        for name in engine.names:
            engine.gather_owned(name, engine.owned)
        return engine.names

    names, _ = run_threads(program, 2)
    assert sorted(made) == sorted(2 * names)


def test_arrays_that_lie_alike_are_gathered_by_one_plan():
    """The same array of another block, and what is updated where it is stored: plans take longer than their moves."""
    _plan_to_whole.cache_clear()

    def program():
        engine = tiny.make_engine(Mesh(model=2))
        for name in ("block0/mlp/w0", "block1/mlp/w0"):
            engine.gather(name)
            engine.gather_owned(name, engine.owned)

    run_threads(program, 2)
    assert _plan_to_whole.cache_info().hits >= 6  # of 8: at first both ranks may make it
