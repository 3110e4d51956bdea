"""verify: what is right agrees, whatever the strategy, and arrays are found in their places."""

from functools import partial

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads, world
from spmd_engine.engine import SGD, LayeredEngine, ShardedEngine, schedules
from spmd_engine.engine.batch import batch_of
from spmd_engine.engine.pipeline import Recompute
from spmd_engine.errors import NotFiniteError, UsageError
from spmd_engine.losses import cross_entropy
from spmd_engine.models.mlp import deep_mlp, mlp, two_layers
from spmd_engine.sharding import Layout
from spmd_engine.strategies import STRATEGIES, DataParallel, SingleDevice, TensorParallel
from spmd_engine.strategies.layer_stack import LayerStack
from spmd_engine.strategies.one_attention import OneAttention
from spmd_engine.verification import engine_and_reference, fill_zeros, mesh_of_one, verify
from spmd_engine.verification.comparison import from_first, measure
from spmd_engine.verification.lockstep import Pair
from spmd_engine.verification.reference import batches_for_model, batches_of_shape
from support import pages, tiny
from support.own_layers import image_model, images, text_model, tokens
from support.pairwise import in_turn

GPT = [
    ({"data": 1}, {}),
    ({"data": 3}, {"zero": 1, "dropout": 0.1}),
    ({"data": 2, "model": 2}, {"zero": 2}),
    ({"replicate": 2, "shard": 2}, {}),
    ({"model": 3}, {"sequence_parallel": True, "recompute": Recompute.ATTENTION}),
    ({"model": 3}, {"shares": {"model": (1, 2, 0)}, "zero": 1}),
    ({"context": 2, "model": 2}, {"zigzag": True, "model_options": (("context_method", "ring"),)}),
    ({"pipe": 2, "data": 2}, {"zero": 3, "recompute": Recompute.BLOCK, "schedule": schedules.named("gpipe")}),
    ({"pipe": 2}, {"schedule": schedules.named("zero-bubble")}),
    ({"pipe": 2, "model": (1, 2)}, {"sequence_parallel": True, "dropout": 0.1}),
    ({"pipe": 2, "model": 2}, {"schedule": schedules.named("interleaved"), "tied": False}),
]
WHAT = ("dropout", "tied")  # options that say what is computed


def what_is_computed(options):
    return {name: options[name] for name in WHAT if name in options}


#: Meshes whose reference computes no more than that of another, which alone is compared with finite differences.
SAME_REFERENCE = [
    axes
    for number, (axes, options) in enumerate(GPT)
    if what_is_computed(options) in [{}, *(what_is_computed(before) for _, before in GPT[:number])]
]


def gpt_pair(mesh, **options):
    """A tiny GPT on a mesh and, on rank 0, the same alone."""
    alone = tiny.make_engine(mesh_of_one(), **what_is_computed(options)) if mesh.rank == 0 else None
    return tiny.make_engine(mesh, **options), alone


DENSE = [
    (mlp((9, 7, 5, 4)), {"data": 2, "row": 2, "col": 2}),
    (mlp((9, 7, 5, 4), whole_between=True), {"col": 3}),
    (two_layers(6, 10), {"row": 2, "col": 3}),
    (deep_mlp(6, 4), {"data": 2, "col": 2}),
]


def dense_pair(mesh, model):
    """A dense model whose letters the axes cut, and the same alone."""

    def engine(mesh):
        cut = {letter: (axis,) for letter, axis in zip("bdf", ("data", "row", "col"), strict=True) if axis in mesh.axes}
        return LayeredEngine(model, mesh, Layout(cut, cut), dtype=np.float64)

    return engine(mesh), engine(mesh_of_one(mesh.axes)) if mesh.rank == 0 else None


CASES = [(axes, partial(gpt_pair, **options), tiny.batch) for axes, options in GPT]
for model, axes in DENSE:
    CASES.append((axes, partial(dense_pair, model=model), batches_for_model(model, 5, micro_batches=2)))
each_case = {"axes, pair, batches": [pytest.param(*case, id=tiny.mesh_id(case[0])) for case in CASES]}


@in_turn(3, **each_case)
def test_layers_on_any_mesh_agree(axes, pair, batches):
    def program():
        with Mesh(**axes) as mesh:
            return verify(*pair(mesh), batches, steps=2, finite_differences=axes not in SAME_REFERENCE)

    reports = run_threads(program, tiny.ranks_of(axes))
    assert all(repr(report) == repr(reports[0]) for report in reports)
    assert reports[0].agrees and len(reports[0].steps) == 2 and reports[0].tolerance == 1e-9
    assert reports[0].distance < 1e-11
    assert str(reports[0]).splitlines()[-1] == f"agrees to {reports[0].distance:.0e}"


@in_turn(3, 1, **each_case)
def test_all_that_passes_between_layers_is_found_in_its_place(axes, pair, batches):
    def program():
        with Mesh(**axes) as mesh:
            both = Pair(*pair(mesh), batches)
            both.forward_and_backward(1)
            for each in measure(mesh.group(), both.computed()):
                assert each.distance < 1e-12, each.tensor
            alone = both.probe_alone.probed.items() if mesh.rank == 0 else ()
            shapes = from_first(mesh.group(), {point: probed.array.shape for point, probed in alone})
            found = both.probe.probed
            parts = [found[point].part(shape) if point in found else None for point, shape in shapes.items()]
            held = mesh.all_reduce(np.array([part.found.size if part else 0 for part in parts]))
            assert (held >= [np.prod(shape) for shape in shapes.values()]).all()
            return shapes

    shapes = run_threads(program, tiny.ranks_of(axes))[0]
    layers = {point.layer for point in shapes}
    # In two micro-batches, of each layer the output and the input's gradient, but none of the first one's perhaps.
    assert 4 * len(layers) - 2 <= len(shapes) - 2 <= 4 * len(layers)


@in_turn(3, name=list(STRATEGIES))
def test_pages_agree(name):
    page = STRATEGIES[name]
    make = partial(page, pages.D, pages.HEADS if issubclass(page, OneAttention) else pages.F)
    if issubclass(page, LayerStack):
        make = partial(make, layers=3)
    shape = pages.data(page, 0, samples=6)[0].shape
    report = verified(make, pages.meshes(page)[3], shape, micro_batches=2)
    assert report.agrees and report.distance < 1e-12


def test_zeros_are_filled_and_nothing_else():
    def program():
        with Mesh(model=3) as mesh:
            engine = TensorParallel(5, 7, mesh, np.float64)
            engine.parameters["layer_1/weights"][...] = 1.0
            reference = TensorParallel(5, 7, mesh_of_one(mesh.axes), np.float64) if mesh.rank == 0 else None
            if reference:
                reference.parameters["layer_1/weights"][...] = 1.0
            fill_zeros(engine, reference, seed=1)
            return [engine.gather(name) for name in engine.names], reference and list(reference.parameters.values())

    (filled, ones), alone = run_threads(program, 3)[0]
    assert np.array_equal(filled, alone[0]) and np.array_equal(ones, alone[1])
    assert (ones == 1).all() and 0.05 < filled.std() < 0.2 and (filled != 0).all()


def verified(make, axes, shape=(6, 5), *, steps=2, **options):
    """The report of an engine of one's own."""

    def program():
        with Mesh(**axes) as mesh:
            engine, reference = engine_and_reference(make, mesh)
            fill_zeros(engine, reference, seed=3)
            batches = batches_of_shape(engine, reference, shape, **options)
            return verify(engine, reference, batches, steps=steps, optimizer=partial(SGD, 0.9), rate=0.1)

    return run_threads(program, tiny.ranks_of(axes))[0]


def test_engines_that_make_their_own_mesh_have_a_reference_on_one_rank():
    def make():
        return TensorParallel(5, 7, Mesh(model=world().size), np.float64)

    report = verified(make, {"data": 3})
    assert report.agrees and report.tolerance == 1e-9


def test_single_precision_is_compared_as_such():
    report = verified(lambda mesh: DataParallel(5, 7, mesh), {"data": 2})
    assert report.agrees and report.tolerance == 1e-4 and 1e-9 < report.distance < 1e-5


class Tokens(ShardedEngine):
    """scores[b/data v] = table[token v]."""

    input_sharding, output_sharding = "b/data", "b/data v"

    def __init__(self, mesh):
        self.mesh, self.parameters = mesh, {"table": np.zeros((11, 4))}

    def load_checkpoint(self, params):
        self.parameters["table"][...] = params["table"]

    def forward(self, x):
        self.tape.push(x)
        return self.parameters["table"][x]

    def backward(self, grads):
        gradient = np.zeros((11, 4))
        np.add.at(gradient, self.tape.pop(), grads)
        return {"table": self.all_reduce(gradient, over="data")}


def test_tokens_go_into_engines_that_want_them():
    assert verified(Tokens, {"data": 3}, (7,), below=11).agrees


def test_a_loss_of_one_s_own():
    def loss(engine):
        return lambda outputs, targets, **options: cross_entropy(outputs, targets, **options)

    class Scores(Tokens):
        target_sharding = "b/data"

    def batches(engine, step):
        draw = np.random.default_rng(step)
        return batch_of(draw.integers(0, 11, 7), draw.integers(0, 4, 7), engine, step=step)

    def program():
        with Mesh(data=2) as mesh:
            pair = engine_and_reference(Scores, mesh)
            fill_zeros(*pair, seed=0)
            with pytest.raises(UsageError, match='targets are "b/data", outputs "b/data v"'):
                batches_of_shape(*pair, (7,), below=11)
            return verify(*pair, batches, loss=loss)

    assert run_threads(program, 2)[0].agrees


def refused(make, message):
    with pytest.raises(UsageError, match=message):
        verified(make, {"data": 2})


def test_what_cannot_be_verified_is_refused():
    refused(DataParallel, "DataParallel needs model_dim, hidden_dim: give values")
    refused(lambda: 3, "returned a int; it must return a ShardedEngine")
    refused(lambda: DataParallel(5, 7, Mesh(data=2)), "on one rank, .* Let it take the mesh: def __init__")

    class Silent(Tokens):
        def __init__(self, mesh):
            self.mesh = mesh

    with Mesh(data=1) as mesh, pytest.raises(UsageError, match="Silent names no parameters"):
        verify(Silent(mesh), Silent(mesh), None)
    with Mesh(data=1) as mesh, pytest.raises(UsageError, match="differ in names of parameters: layer_0/weights, lay"):
        verify(Tokens(mesh), SingleDevice(5, 7, mesh), None)


def test_a_gradient_that_does_not_fit_its_sharding_is_refused():
    class Twice(DataParallel):
        def backward(self, grads):
            return {name: self.all_gather(g, over="data") for name, g in super().backward(grads).items()}

    message = r"on rank \d the gradient of layer_0/weights has shape \(10, 7\), the parameter \(5, 7\)"
    refused(partial(Twice, 5, 7), message)


def test_mistakes_of_the_reference_alone_are_everyone_s():
    def batches(engine, step):
        if engine.num_devices == 1:
            raise UsageError("the data is gone")
        return batch_of(np.ones((4, 5)), np.ones((4, 5)), engine)

    def program():
        with Mesh(data=3) as mesh, pytest.raises(UsageError, match="the data is gone"):
            verify(*engine_and_reference(partial(DataParallel, 5, 7), mesh), batches)

    run_threads(program, 3)


def test_a_reference_that_diverges_tells_nothing():
    def program():
        with Mesh(data=2) as mesh:
            pair = engine_and_reference(partial(DataParallel, 5, 7), mesh)
            fill_zeros(*pair, seed=0)
            batches = batches_of_shape(*pair, (6, 5))
            with np.errstate(all="ignore"), pytest.raises(NotFiniteError, match="one device's loss is"):
                verify(*pair, batches, optimizer=SGD, rate=1e150, steps=9)

    run_threads(program, 2)


@pytest.mark.parametrize(
    ("model", "batch", "axes", "cuts"),
    [
        (text_model, tokens, {"data": 2, "model": 2}, None),
        (text_model, tokens, {"pipe": 2, "data": 2}, None),
        (image_model, images, {"data": 2, "rows": 2}, {"b": ("data",), "h": ("rows",)}),
        (image_model, images, {"pipe": 2, "model": 2}, {"o": ("model",)}),
    ],
    ids=["text", "text in stages", "images", "images in stages"],
)
def test_verify_agrees_on_buffers_side_outputs_and_letters_of_images(model, batch, axes, cuts):
    def program():
        with Mesh(**axes) as mesh:
            layout = Layout(cuts, cuts) if cuts else Layout.for_mesh(mesh)
            engine = LayeredEngine(model(), mesh, layout, dtype=np.float64, seed=5)
            alone = None
            if mesh.rank == 0:
                alone = LayeredEngine(model(), mesh_of_one(), Layout(), dtype=np.float64, seed=5)
            batches = lambda engine, step: batch_of(*batch(step), engine, 2, step)
            differences = "pipe" not in axes  # without stages, the reference is the same
            return verify(engine, alone, batches, steps=2, finite_differences=differences)

    for report in run_threads(program, ranks=tiny.ranks_of(axes)):
        assert report.agrees, str(report)
