"""Steps in 16-bit floats: what is rounded, where, and what meshes and ranks then agree on."""

from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.arrays.precision import accumulated_in, dtype_of, emulated, rounded
from spmd_engine.engine.state.assignment import ZeroConfig
from spmd_engine.layers.attention.attention import Alibi
from spmd_engine.sharding import Layout
from spmd_engine.sharding.shards import Shards
from spmd_engine.training import Trainer, loss_scale
from spmd_engine.training.loss_scale import LossScale
from support import tiny
from support.tiny import mesh_of_one

BFLOAT16, FLOAT16 = map(dtype_of, ("bfloat16", "float16"))


@cache
def on_one_device(dtype):
    return tiny.train({"data": 1}, dtype=dtype)[0]


def with_context(method):
    return {"model_options": [("context_method", method)]}


SAME_ROUNDINGS = [
    pytest.param({"data": 3}, {}, marks=pytest.mark.soak),
    pytest.param({"data": 2}, {"zero": 1}, marks=pytest.mark.soak),
    ({"data": 2}, {"zero": 2, "recompute": "block"}),
    pytest.param({"data": 3}, {"zero": 3}, marks=pytest.mark.soak),
    ({"pipe": 2}, {"schedule": "zero-bubble"}),
    pytest.param({"pipe": 2, "data": 2}, {"zero": 1}, marks=pytest.mark.soak),
    ({"pipe": 2, "data": 2}, {"zero": 3, "overlap": 1}),
    ({"context": 2}, with_context("ring")),
    pytest.param({"context": 3}, with_context("gather") | {"zigzag": True}, marks=pytest.mark.soak),
    pytest.param({"context": 2}, with_context("ulysses"), marks=pytest.mark.soak),
]


@pytest.mark.parametrize("axes, options", SAME_ROUNDINGS, ids=lambda value: "-".join(map(str, value)))
def test_a_mesh_that_rounds_where_one_device_does_agrees_with_it(axes, options):
    with emulated():
        tiny.assert_same_training(tiny.train(axes, dtype=BFLOAT16, **options), on_one_device(BFLOAT16), tolerance=1e-12)


def test_float16_agrees_too():
    with emulated():
        tiny.assert_same_training(
            tiny.train({"data": 2}, zero=3, dtype=FLOAT16), on_one_device(FLOAT16), tolerance=1e-12
        )


@pytest.mark.parametrize("zero", range(4))
def test_masters_are_in_the_optimizers_shard_and_layers_get_them_rounded(zero):
    def program():
        with Mesh(data=2) as mesh:
            engine = tiny.make_engine(mesh, dtype=BFLOAT16, zero=zero)
            trainer = Trainer(engine, tiny.AdamW(), lambda step: tiny.batch(engine, step), lambda step: 0.05)
            trainer.step()
            elements = 0
            for storage in engine.storages:
                assert storage.own_parameters.dtype == storage.own_gradients.dtype == np.float32
                elements += storage.own_parameters.size
                storage.start_gather()
                storage.finish_gather()
                used = storage.whole_parameters
                assert used.dtype == BFLOAT16
                np.testing.assert_array_equal(used[storage.interval], rounded(storage.own_parameters, BFLOAT16))
            states = trainer.optimizer.state["mean"]
            assert sum(array.size for array in states.values()) == elements
            assert {array.dtype.name for array in states.values()} == {"float32"}
            return elements

    every = run_threads(program, 2)
    whole = sum(np.prod(shape) for _, shape in dict(tiny.gpt(tiny.SIZE).parameters()).values())
    assert sum(every) == whole * (1 if zero else 2)


def test_a_reshard_moves_masters_and_gives_them_to_layers():
    def program():
        with Mesh(data=2) as mesh, Mesh(model=2) as other:
            engine = tiny.make_engine(mesh, dtype=BFLOAT16, zero=1)
            trainer = Trainer(engine, tiny.AdamW(), lambda step: tiny.batch(engine, step), lambda step: 0.05)
            trainer.step()
            before = {name: engine.gather(name) for name in engine.names}
            engine.reshard(other, optimizer=trainer.optimizer, storage=ZeroConfig(0))
            for storage in engine.storages:
                np.testing.assert_array_equal(storage.whole_parameters, rounded(storage.own_parameters, BFLOAT16))
            for name, array in before.items():
                assert array.dtype == np.float32
                np.testing.assert_array_equal(engine.gather(name), array)
            return trainer.step().loss

    assert np.isfinite(run_threads(program, 2)).all()


def test_masters_begin_as_the_parameters_of_float32():
    engines = [tiny.make_engine(mesh_of_one(), dtype=dtype) for dtype in (np.float32, BFLOAT16)]
    for name, parameter in engines[0].parameters.items():
        np.testing.assert_array_equal(parameter, engines[1].parameters[name])


def bytes_sent(axes, dtype, **options):
    def program():
        with Mesh(**axes) as mesh:
            engine = tiny.make_engine(mesh, dtype=dtype, layers=4, **options)
            trainer = Trainer(engine, tiny.AdamW(), lambda step: tiny.batch(engine, step), lambda step: 0.05)
            trainer.step()  # with what is sent once
            mesh.ledger.clear()
            trainer.step()
            return mesh.ledger.entries

    every = run_threads(program, tiny.ranks_of(axes))
    labels = {"loss", "gradient norm", "metrics", "parameter shards"}
    return sum(entry.sent for ledger in every for key, entry in ledger.items() if key[2] not in labels)


@pytest.mark.parametrize(
    "axes, options, expected",
    [
        ({"pipe": 2}, {"tied": False}, 0.5),
        ({"data": 2}, {"zero": 3, "group_threshold": 1000}, 2 / 3),
        ({"data": 2}, {"zero": 3, "compress": "bfloat16"}, 0.5),
    ],
    ids=["pipe", "zero-3", "zero-3-bfloat16-gradients"],
)
def test_bytes_on_the_wire(axes, options, expected):
    of_float32 = options | ({"compress": "none"} if "compress" in options else {})
    ratio = bytes_sent(axes, BFLOAT16, **options) / bytes_sent(axes, np.float32, **of_float32)
    assert ratio == pytest.approx(expected, rel=0.03)


def test_sums_of_tensor_parallelism_are_sent_in_half_the_bytes():
    def reductions(dtype):
        def program():
            with Mesh(model=2) as mesh:
                engine = tiny.make_engine(mesh, dtype=dtype)
                engine.step(tiny.batch(engine, 0))
                return sum(e.sent for key, e in mesh.ledger.entries.items() if key[2].endswith(("mlp", "attention")))

        return run_threads(program, 2)[0]

    assert 0 < 2 * reductions(BFLOAT16) == reductions(np.float32)


# --- Meshes that round elsewhere


# --- Loss scaling


def trainer_in_float16(mesh):
    engine = tiny.make_engine(mesh, dtype=FLOAT16)
    return Trainer(engine, tiny.AdamW(), lambda step: tiny.batch(engine, step), lambda step: 1e-3)


def test_all_ranks_skip_a_step_that_overflows_and_then_lower_the_scale():
    def program():
        with Mesh(data=2) as mesh:
            trainer = trainer_in_float16(mesh)
            trainer.loss_scale.value = 2.0**24
            before = trainer.engine.parameters["embedding/table"].copy()
            first = trainer.step()
            np.testing.assert_array_equal(trainer.engine.parameters["embedding/table"], before)
            reports = [first, *trainer.run(8)]
            return [(report.loss_scale, report.skipped) for report in reports], trainer.skipped_in_a_row

    found, other = run_threads(program, 2)
    assert found == other
    steps, in_a_row = found
    assert steps[0] == (2.0**24, "gradients overflow float16 at loss scale 1.67772e+07")
    assert steps[1][0] == 2.0**23 and steps[-1][1] is None and in_a_row == 0  # max_skipped is 0, too


def test_the_scale_grows_after_steps_without_overflow(monkeypatch):
    monkeypatch.setattr(loss_scale, "GROW_AFTER", 2)
    trainer = trainer_in_float16(mesh_of_one())
    trainer.loss_scale.value = 64.0
    assert [report.loss_scale for report in trainer.run(5)] == [64, 64, 128, 128, 256]


def test_the_scale_changes_neither_loss_nor_norm_nor_update():
    reports = []
    for value in (1.0, 2.0**10):
        trainer = trainer_in_float16(mesh_of_one())
        trainer.loss_scale = LossScale(value)
        reports.append(list(trainer.run(2))[-1])
    assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-3)
    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=0.02)


def test_the_scale_stays_within_its_bounds_and_continues():
    scale = LossScale(1.0)
    assert not scale.can_fall()
    scale.update(overflow=True)
    assert scale.value == 1.0
    other = LossScale()
    other.restore(LossScale(8.0, 5).as_json())
    assert (other.value, other.good_steps) == (8.0, 5)


# --- Memory


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
@pytest.mark.parametrize("sums", [nullcontext, emulated])
def test_alibi_rounds_neither_queries_nor_keys_nor_values(dtype, sums):
    q = np.arange(1, 13).reshape(1, 3, 2, 2).astype(dtype)
    with sums():
        widened = Alibi("h", {"h": 2}, 8.0).widen(Shards(Mesh(), Layout({}, {})), q, q, q, np.arange(3))
        assert {x.dtype for x in widened} == {accumulated_in(dtype)}
    for x, factor in zip(widened, (1.5**0.5, 1, 1), strict=True):  # scores are divided by the square root of 3, not 2
        np.testing.assert_allclose(x[..., :-1], q.astype(float) * factor, rtol=1e-6)


def test_sums_are_wide():
    assert accumulated_in(BFLOAT16) == accumulated_in(FLOAT16) == np.float32
    with emulated():
        assert accumulated_in(BFLOAT16) == np.float64
    assert accumulated_in(np.dtype(np.int16)) == np.int16
