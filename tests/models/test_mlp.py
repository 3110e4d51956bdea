"""Dense models on real data: every mesh of rows and columns computes what one device computes."""

from functools import cache, partial
from itertools import product
from math import log, prod

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.engine import SGD, AdamW, Batch, LayeredEngine, MicroBatch
from spmd_engine.engine.batch import batch_of
from spmd_engine.errors import NotationError, UsageError
from spmd_engine.models import build_model, deep_mlp, mlp, two_layers
from spmd_engine.sharding import Layout
from spmd_engine.strategies import SingleDevice
from spmd_engine.strategies.two_layers import initial_parameters
from spmd_engine.training import Trainer, load_corpus
from spmd_engine.training.data.corpus import data_for
from support import parts

LETTERS = {"data": "b", "model": "f", "row": "d", "col": "f"}
MESHES = [
    {"data": 2},
    {"data": 3},
    {"model": 2},
    {"model": 3},
    {"row": 2},
    {"row": 2, "col": 2},
    {"row": 2, "col": 3},
    {"data": 2, "row": 2, "col": 2},
]


def mesh_id(axes):
    return ",".join(f"{axis}={size}" for axis, size in axes.items())


def layout_of(axes, letters=LETTERS):
    cut = {letters[axis]: (axis,) for axis in axes}
    return Layout(cut, cut)


def train_here(
    model, axes, *, steps, size=12, micro_batches=2, optimizer=AdamW, rate=0.01, epoch=None, dtype="float64"
):
    """Losses, and parts of final gradients and parameters. With ``epoch``, so many batches come again and again."""
    with Mesh(**axes) as mesh:
        engine = LayeredEngine(model, mesh, layout_of(axes), dtype=np.dtype(dtype), seed=3)
        data = data_for(model, load_corpus(mesh.group(), pytest.__file__, 128), engine.dtype, seed=4)

        def batches(step):
            number = step % epoch if epoch else step
            return data.batch(engine, number, size=size, micro_batches=micro_batches)

        trainer = Trainer(engine, optimizer(), batches, lambda step: rate, grad_clip=1.0)
        losses = [report.loss for report in trainer.run(steps)]
        return losses, parts.updated(engine, engine.gradients), parts.stored(engine)


def train(model, axes, **options):
    return run_threads(partial(train_here, model, axes, **options), prod(axes.values()))


def assert_same(found, expected, tolerance, kinds=(1, 2)):
    for rank in found:
        np.testing.assert_allclose(rank[0], expected[0], rtol=tolerance)
    alone = len(found) == 1  # of an MPI job, each process sees its own part
    for kind in kinds:
        parts.assert_parts([rank[kind] for rank in found], expected[kind], atol=tolerance, missing=alone)


MODELS = {
    "mlp": mlp((784, 24, 23, 10)),
    "four layers, gelu": mlp((48, 11, 13, 7, 10), activation="gelu"),
    "outputs gathered": mlp((48, 11, 13, 10), whole_between=True),
    "two layers": two_layers(10, 13),
    "deep": deep_mlp(12, 6),
}
STEPS = 2
one_device = cache(lambda name, **options: train(MODELS[name], {"data": 1}, steps=STEPS, **options)[0])


def models_on_meshes():
    """Every model on every fourth mesh, in turn; the deep model, of the layers of the others, not on many ranks."""
    for (i, name), (j, axes) in product(enumerate(MODELS), enumerate(MESHES)):
        marks = pytest.mark.soak if (i + j) % 4 or (name == "deep" and prod(axes.values()) > 4) else ()
        yield pytest.param(name, axes, id=f"{name}-{mesh_id(axes)}", marks=marks)


@pytest.mark.parametrize("name, axes", list(models_on_meshes()))
def test_every_mesh_trains_as_one_device_does(name, axes):
    expected = one_device(name)
    assert all(abs(gradient).max() > 1e-7 for _, gradient in expected[1].values())  # what is nothing is always equal
    assert_same(train(MODELS[name], axes, steps=STEPS), expected, 1e-10)


@pytest.mark.mpi(ranks=4)
def test_under_mpi():
    assert_same([train_here(MODELS["mlp"], {"row": 2, "col": 2}, steps=STEPS)], one_device("mlp"), 1e-10)


EPOCH = 4  # steps
ten_epochs = partial(
    train, mlp(), steps=10 * EPOCH, epoch=EPOCH, size=32, micro_batches=1, optimizer=SGD, rate=0.05, dtype="float32"
)
ten_epochs_on_one_device = cache(lambda: ten_epochs({"data": 1})[0])


IN_SOAK = [pytest.param(axes, marks=pytest.mark.soak) for axes in ({"data": 3}, {"row": 2, "col": 2})]


@pytest.mark.parametrize("axes", [{"model": 3}, *IN_SOAK], ids=mesh_id)
def test_ten_epochs_in_float32(axes):
    """784-128-127-10 on 128 samples: losses and parameters within 1e-5 of one device's, well below where it began."""
    expected = ten_epochs_on_one_device()
    losses = expected[0]
    assert np.mean(losses[-EPOCH:]) < 0.4 * np.mean(losses[:EPOCH]) < log(10)
    assert_same(ten_epochs(axes), expected, 1e-5, kinds=[2])


def test_shardings_of_rows_and_columns():
    def program():
        with Mesh(data=2, row=2, col=2) as mesh:
            engine = LayeredEngine(mlp(), mesh, layout_of(mesh.axes))
            return engine.shardings, engine.input_sharding, engine.output_sharding, engine.target_sharding

    for shardings, *ends in run_threads(program, 8):
        assert [shardings[f"layer_{k}/weights"] for k in range(3)] == ["d/row f/col", "f/col d/row", "d/row c"]
        assert [shardings[f"layer_{k}/bias"] for k in range(3)] == ["f/col", "d/row", "c"]
        assert ends == ["b/data d/row", "b/data c", "b/data"]


def test_bytes_of_a_step():
    """Per sum of S bytes over R ranks 2 S (R-1): over rows, over columns, and the gradients' over data."""
    sizes, batch, (data, rows, columns) = (48, 11, 13, 10), 12, (2, 2, 3)

    def program():
        with Mesh(data=data, row=rows, col=columns) as mesh:
            engine = LayeredEngine(mlp(sizes), mesh, layout_of(mesh.axes), dtype=np.float64)
            micro = batch_of(np.ones((batch, sizes[0])), np.zeros(batch, int), engine)
            mesh.ledger.clear()
            engine.step(micro)
            places = [(k, axis) for k in range(3) for axis in ("row", "col")]
            sent = {(k, axis): mesh.ledger.total("all_reduce", axis, f"layer_{k}").sent for k, axis in places}
            sent["gradients"] = mesh.ledger.total(axes="data", label="gradients").sent
            return sent, sum(array.size for array in engine.parameters.values())

    ranks = run_threads(program, data * rows * columns)
    assert {key: sum(sent[key] for sent, _ in ranks) for key in ranks[0][0]} == {
        (0, "row"): 2 * batch * sizes[1] * 8 * (rows - 1),  # z[b f/col], which d made unreduced
        (0, "col"): 0,  # nobody wants the inputs' gradient
        (1, "row"): 2 * batch * sizes[1] * 8 * (rows - 1),  # dx[b f/col]
        (1, "col"): 2 * batch * sizes[2] * 8 * (columns - 1),  # z[b d/row]
        (2, "row"): 2 * batch * sizes[3] * 8 * (rows - 1) * columns,  # z[b c], in each column: c is not cut
        (2, "col"): 0,  # so dx[b d/row] is not unreduced
        "gradients": 2 * sum(size for _, size in ranks) // data * 8 * (data - 1),
    }


def test_classes_may_be_cut_too():
    """Scores stay cut: the loss reduces maxima and sums over the axis of their letter."""
    model, letters = mlp((16, 6, 10)), {"model": "c", "data": "b"}

    def program(axes):
        with Mesh(**axes) as mesh:
            engine = LayeredEngine(model, mesh, layout_of(axes, letters), dtype=np.float64)
            rng = np.random.default_rng(0)
            loss = engine.step(batch_of(rng.standard_normal((6, 16)), rng.integers(0, 10, 6), engine))
            return loss, engine.gradient_norm(), engine.output_sharding

    (expected,) = run_threads(program, 1, args=({"data": 1},))
    for result in run_threads(program, 6, args=({"data": 2, "model": 3},)):
        assert result[2] == "b/data c/model"
        np.testing.assert_allclose(result[:2], expected[:2], rtol=1e-12)


def test_two_layers_are_the_model_of_the_pages():
    """The same names, output, gradients and input gradient as the page of the single device."""
    d, f, rng = 6, 11, np.random.default_rng(0)
    x, dy = rng.standard_normal((5, d)), rng.standard_normal((5, d))
    with Mesh(data=1) as mesh:
        page, layered = SingleDevice(d, f, mesh, np.float64), LayeredEngine(two_layers(d, f), mesh, dtype=np.float64)
        results = []
        for engine in (page, layered):
            engine.load_checkpoint(initial_parameters(d, f, dtype=np.float64))
            results.append({"y": engine.forward(x).copy(), **engine.backward(dy), "dx": engine.input_gradient})
        for name, expected in results[0].items():
            np.testing.assert_allclose(results[1][name], expected, atol=1e-13, err_msg=name)
        assert list(layered.parameters) == list(page.parameters)
        assert {n: s.replace("/data", "") for n, s in layered.shardings.items()} == page.shardings


def test_signals_and_gradients_keep_their_size_through_a_thousand_layers():
    with Mesh(data=1) as mesh:
        engine = LayeredEngine(deep_mlp(), mesh, dtype=np.float32)
        assert sum(name.endswith("weights") for name in engine.parameters) == 1000
        x = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
        y = engine.forward(x)
        gradients = engine.backward(np.ones_like(y))
        assert 0.5 < np.linalg.norm(y) / np.linalg.norm(x) < 5
        norms = [np.linalg.norm(gradients[f"block{k}/pair/down/weights"]) for k in (0, 250, 499)]
        assert max(norms) < 5 * min(norms)


# --- by name, and what is refused


def test_models_by_name():
    assert build_model("mlp").parameter_count == 784 * 128 + 128 + 128 * 127 + 127 + 127 * 10 + 10
    assert build_model("deep-mlp").parameter_count == 1000 * (64 * 64 + 64)
    assert build_model("two-layers").parameter_count == 2 * 64 * 256
    assert build_model("gpt-nano").name == "gpt-nano"
    with pytest.raises(UsageError, match="did you mean 'resnet18'. There are: resnet18, .*, gpt-nano, .*, convnet, "):
        build_model("resnet")
    with pytest.raises(UsageError, match="mlp has no dropout"):
        build_model("mlp", dropout=0.1)


def test_sizes_that_make_no_model_are_refused():
    with pytest.raises(UsageError, match="those of the inputs and of the classes at least"):
        mlp((784,))
    with pytest.raises(UsageError, match="7 layers; they come in pairs"):
        deep_mlp(7)


@pytest.mark.parametrize("targets", [np.array([0, 10]), np.array([0, -1]), np.array([0.0, 1.0])], ids=str)
def test_wrong_classes_are_refused(targets):
    with Mesh(data=1) as mesh, pytest.raises(UsageError, match="whole numbers from 0 to 9"):
        LayeredEngine(mlp((8, 10)), mesh).step(Batch([MicroBatch(np.zeros((2, 8), np.float32), targets)]))


def test_rows_and_columns_on_one_axis_are_refused():
    with Mesh(model=1) as mesh, pytest.raises(NotationError, match='axis "model" shards d and f'):
        LayeredEngine(mlp((8, 4, 10)), mesh, Layout({"d": ("model",), "f": ("model",)}))
