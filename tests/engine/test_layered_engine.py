"""The layered engine computes on every mesh what one device computes."""

import gc
import math
import weakref
from dataclasses import replace
from functools import cache, partial
from itertools import product

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.arrays import random
from spmd_engine.engine import SGD, Batch, LayeredEngine, MicroBatch, schedules
from spmd_engine.engine.schedules.orders import Sequential
from spmd_engine.engine.schedules.schedule import Instruction
from spmd_engine.errors import NotationError, UsageError
from spmd_engine.models import gpt
from spmd_engine.sharding import Layout
from support import tiny
from support.pairwise import in_turn

train_once = cache(lambda **options: tiny.train({"data": 1}, **options)[0])


WAYS = {
    "tied": {"dropout": 0.1},
    "untied": {"tied": False, "micro_batches": 1},
    "sequence-parallel": {"sequence_parallel": True, "dropout": 0.1},
}


def pairs():
    """Every way on every third mesh, in turn; of those of eight ranks few: the rest is in ``soak``.

    On model=8 some ranks have no head: both ways of the residual stream are tried there, and data cut by it in one.
    """
    here = {("tied", "model=8"), ("sequence-parallel", "model=8")}
    for (i, (name, options)), (j, axes) in product(enumerate(WAYS.items()), enumerate(tiny.MESHES)):
        now = (i + j) % 3 == 0 if tiny.ranks_of(axes) < 8 else (name, tiny.mesh_id(axes)) in here
        marks = () if now else pytest.mark.soak
        yield pytest.param(options, axes, id=f"{name}-{tiny.mesh_id(axes)}", marks=marks)


@pytest.mark.parametrize("options, axes", list(pairs()))
def test_every_mesh_trains_as_one_device_does(axes, options):
    tiny.assert_same_training(tiny.train(axes, **options), train_once(**options))


@pytest.mark.parametrize("axes", [{"data": 2, "model": 2}], ids=tiny.mesh_id)
def test_momentum_sgd_too(axes):
    options = {"optimizer": partial(SGD, momentum=0.9, weight_decay=0.1)}
    tiny.assert_same_training(tiny.train(axes, **options), train_once(**options))


@pytest.mark.parametrize("threshold", [0, 1 << 30], ids=["a group each", "one group"])
def test_grouping_changes_nothing(threshold):
    found = tiny.train({"data": 2, "model": 2}, dropout=0.1, group_threshold=threshold)
    tiny.assert_same_training(found, train_once(dropout=0.1))


def test_dense_gradients_do_not_depend_on_the_number_of_micro_batches():
    one, three = (tiny.train({"data": 2}, micro_batches=m) for m in (1, 3))
    tiny.assert_same_training(one, three[0])  # replicas: each has all of it


def test_replicas_are_bit_identical():
    results = tiny.train({"data": 3, "model": 2}, dropout=0.1)
    for rank, (_, _, parameters) in enumerate(results):
        for name, (index, parameter) in parameters.items():
            first, other = results[rank % 2][2][name]  # of data 0, at the same place of model
            assert index == first and np.array_equal(parameter, other), name


def test_masked_and_ragged_targets_count_globally():
    inputs, targets = tiny.tokens(0)
    mask = (np.arange(targets.size).reshape(targets.shape) % 5 < np.arange(len(targets))[:, None]).astype(int)

    def program():
        with Mesh() as mesh:
            engine = tiny.make_engine(mesh)
            part = engine.batch_span(len(inputs))
            micro = MicroBatch(inputs[part], targets[part], mask=mask[part])
            return engine.step(Batch([micro])), engine.gradient_norm(), engine.count(Batch([micro]))

    expected = run_threads(program, 1)[0]
    assert expected[2] == mask.sum()
    for result in run_threads(program, 4):
        np.testing.assert_allclose(result, expected, rtol=1e-12)


def test_micro_batches_may_be_under_way_together():
    inputs, targets = tiny.tokens(1)

    def gradients(order):
        with Mesh() as mesh:
            engine, sums = tiny.make_engine(mesh), {}
            outputs = {}
            for kind, m in order:
                with engine.micro_batch(m):
                    if kind == "forward":
                        outputs[m] = engine.forward(inputs[m : m + 1])
                    else:
                        dy = engine.loss(outputs[m], targets[m : m + 1])[1]
                        for name, g in engine.backward(dy).items():
                            sums[name] = sums.get(name, 0) + g
            assert len(engine._tapes) == 0
            return sums

    def order(text):
        return [({"F": "forward", "B": "backward"}[step[0]], int(step[1])) for step in text.split()]

    expected = gradients(order("F0 B0 F1 B1 F2 B2"))
    for text in ("F0 F1 B0 F2 B1 B2", "F0 F1 F2 B2 B1 B0"):
        for name, g in gradients(order(text)).items():
            np.testing.assert_allclose(g, expected[name], atol=1e-14, err_msg=name)


def test_inference_keeps_nothing_and_draws_no_dropout():
    with Mesh() as mesh:
        engine = tiny.make_engine(mesh, dropout=0.5)
        plain = tiny.make_engine(mesh, dropout=0.0)
        with engine.inference(), plain.inference():
            outputs = [e.forward(tiny.tokens(0)[0]) for e in (engine, engine, plain)]
        assert np.array_equal(outputs[0], outputs[1]) and np.array_equal(outputs[0], outputs[2])
        with pytest.raises(UsageError, match="backward without a forward"):
            engine.backward(outputs[0])


def test_wrong_checkpoints_are_named():
    with Mesh() as mesh:
        engine = tiny.make_engine(mesh)
        whole = {name: engine.gather(name) for name in engine.parameters}
        with pytest.raises(UsageError, match="the checkpoint has no 'norm/scale'"):
            engine.load_checkpoint({k: v for k, v in whole.items() if k != "norm/scale"})
        with pytest.raises(UsageError, match="norm/scale: the checkpoint has shape"):
            engine.load_checkpoint({**whole, "norm/scale": np.ones(3)})


DRAWN_ON = [
    ({"data": 2, "model": 2}, {}),
    ({"data": 3}, {"zero": 1}),
    ({"data": 2, "context": 2}, {"zero": 2, "group_threshold": 0}),
    ({"replicate": 2, "shard": 2}, {}),
    ({"pipe": 2, "data": 2}, {}),  # with a tied table, which both stages have
]


@in_turn(2, nodes=[1, 2], **{"axes, options": [pytest.param(*each, id=tiny.mesh_id(each[0])) for each in DRAWN_ON]})
def test_initial_parameters_are_those_of_one_device(axes, options, nodes):
    def program(**axes):
        with Mesh(**axes) as mesh:
            engine = tiny.make_engine(mesh, **options)
            return {name: (engine.index(name), array.copy()) for name, array in engine.parameters.items()}

    (expected,) = run_threads(partial(program, data=1), 1)
    ranks = tiny.ranks_of(axes)
    for result in run_threads(
        partial(program, **axes), ranks, nodes=[f"node{rank * nodes // ranks}" for rank in range(ranks)]
    ):
        for name, (index, array) in result.items():
            assert index is None or np.array_equal(array, expected[name][1][index]), name


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_of_a_node_draw_an_initial_parameter_once(monkeypatch, zero, nodes):
    """Those of several nodes that all store it draw it on each rank."""
    drawn, normal = [], random.normal

    def counted(*arguments):
        drawn.append(normal(*arguments))
        return drawn[-1]

    monkeypatch.setattr(random, "normal", counted)

    def program():
        with Mesh(data=4) as mesh:
            engine = tiny.make_engine(mesh, zero=zero)
            described = engine.store.described.values()
            return sum(math.prod(shape) for parameter, shape in described if parameter.std)

    (size, *_) = run_threads(program, 4, nodes=[f"node{rank * nodes // 4}" for rank in range(4)])
    assert sum(array.size for array in drawn) == (4 if nodes > 1 and zero < 3 else 1) * size


def test_a_plain_forward_draws_the_dropout_of_one_device():
    inputs, _ = tiny.tokens(0)

    def program():
        with Mesh() as mesh:
            engine = tiny.make_engine(mesh, dropout=0.5)
            return engine.all_gather(engine.forward(inputs[engine.batch_span(len(inputs))]))

    np.testing.assert_allclose(run_threads(program, 4)[3], run_threads(program, 1)[0], atol=1e-12)


LAYOUTS = {
    "d is sharded": Layout(inside={"d": ("data",)}),
    "which do not shard v inside": Layout(residual={"s": ("data",)}),
    "as inside the layers": Layout(inside={"b": ("data",)}),
}


@pytest.mark.parametrize("message", LAYOUTS)
def test_layouts_that_would_compute_something_else_are_refused(message):
    with Mesh(data=1) as mesh, pytest.raises(NotationError, match=message):
        LayeredEngine(gpt(tiny.SIZE), mesh, LAYOUTS[message])


def test_wrong_tokens_and_ties_are_refused():
    with Mesh() as mesh, pytest.raises(UsageError, match="gpt: inputs from -1 to 3; the vocabulary has 0 to 12"):
        tiny.make_engine(mesh).forward(np.array([[3, -1]]))
    model = gpt(tiny.SIZE)
    with pytest.raises(UsageError, match="tied to 'embedding/table', which no layer has"):
        replace(model, layers=model.layers[1:])


def test_float_tokens_wrong_targets_and_long_sequences_are_refused():
    inputs, targets = tiny.tokens(0)
    with Mesh() as mesh:
        engine = tiny.make_engine(mesh)
        with pytest.raises(UsageError, match="inputs must be whole numbers, they are float64"):
            engine.forward(inputs * 1.0)
        with pytest.raises(UsageError, match="a sequence of 20, but the context is 10"):
            engine.forward(np.zeros((1, 20), int))
        with pytest.raises(UsageError, match="targets from -100 to"):
            engine.step(Batch([MicroBatch(inputs, np.where(targets == 3, -100, targets))]))


def test_any_order_of_micro_batches_gives_the_same():
    options = {"dropout": 0.1, "micro_batches": 3}
    found = tiny.train({"data": 2}, schedule=schedules.named("gpipe"), **options)
    tiny.assert_same_training(found, train_once(**options))


class Unknown(Sequential):
    def order(self, stages, micro_batches, stage):
        return [Instruction(0)]


def test_instructions_that_an_engine_does_not_know_are_refused():
    with Mesh() as mesh:
        engine = tiny.make_engine(mesh, schedule=Unknown())
        with pytest.raises(UsageError, match="cannot execute Instruction"):
            engine.step(tiny.batch(engine, 0))


def test_a_step_after_one_that_broke_off_is_right():
    def program():
        with Mesh() as mesh:
            engine = tiny.make_engine(mesh, group_threshold=0)
            batch, (_, first) = tiny.batch(engine, 0), engine.model.layers[0]
            engine.step(batch)
            expected = engine.gradient_norm()
            engine.model.layers[0][1].backward_weight = broken
            try:
                engine.step(batch)
            except RuntimeError:
                del first.backward_weight
            engine.step(batch)
            assert engine.gradient_norm() == expected

    def broken(*args):
        raise RuntimeError

    run_threads(program, 2)


def test_samples_that_are_not_numbered_are_counted():
    def norm(numbered):
        def program():
            with Mesh() as mesh:
                engine = tiny.make_engine(mesh, dropout=0.3)
                batch = tiny.batch(engine, 0, micro_batches=3)
                if not numbered:
                    batch = Batch([replace(m, samples=None) for m in batch.micro_batches])
                engine.step(batch)
                return engine.gradient_norm()

        return program

    np.testing.assert_allclose(run_threads(norm(False), 2), run_threads(norm(True), 1)[0], rtol=1e-12)


@pytest.mark.parametrize("axes", [{"data": 2}, {"pipe": 2}], ids=tiny.mesh_id)
def test_an_engine_s_memory_goes_with_it(axes):
    """Without the collector of cycles, which comes when it likes: the next engine would be made beside this one."""

    def program():
        with Mesh(**axes) as mesh:
            engine = tiny.make_engine(mesh)
            engine.step(tiny.batch(engine, 0))
            ours = [weakref.ref(array.base if array.base is not None else array) for array in engine.owned.values()]
            del engine
            return sum(ref() is not None for ref in ours)

    gc.disable()
    try:
        assert run_threads(program, 2) == [0, 0]
    finally:
        gc.enable()
