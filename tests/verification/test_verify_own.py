"""verify, for engines of one's own: sums forgotten inside a backward, gradients wrong on one device, classifiers."""

from functools import partial
from inspect import unwrap

import numpy as np
import pytest

from spmd_engine import Mesh, batch_of, run_threads
from spmd_engine.engine import SGD, ShardedEngine, as_distributed
from spmd_engine.errors import UsageError
from spmd_engine.layers import Activation, Layer, Linear
from spmd_engine.layers.declarations import Parameter
from spmd_engine.losses import cross_entropy, mean_squared_error
from spmd_engine.strategies import AttentionHeads, DataParallel
from spmd_engine.verification import Cause, engine_and_reference, fill_zeros, mesh_of_one, verify
from spmd_engine.verification.reference import batches_of_shape
from support import tiny
from support.linear_engine import Drawn
from support.strangers import Bare

D, F = 5, 8


def verified(make, axes, shape=(6, D), *, steps=2, classes=None, below=None, **options):
    """The report of an engine of one's own; the same on every rank."""

    def program():
        with Mesh(**axes) as mesh:
            engine, reference = engine_and_reference(make, mesh)
            fill_zeros(engine, reference, seed=3)
            batches = batches_of_shape(engine, reference, shape, classes=classes, below=below)
            return verify(engine, reference, batches, steps=steps, optimizer=SGD, rate=0.1, **options)

    reports = run_threads(program, tiny.ranks_of(axes))
    assert all(repr(report) == repr(reports[0]) for report in reports)
    return reports[0]


class Weights(ShardedEngine):
    """Weights of these shapes, cut as ``shardings`` says."""

    input_sharding = output_sharding = "b/data d"
    shapes = {}

    def __init__(self, mesh):
        self.mesh = mesh
        self.load_checkpoint({name: np.zeros(shape) for name, shape in self.shapes.items()})

    def load_checkpoint(self, params):
        self.parameters = {name: self.block(name, params[name]) for name in self.shapes}


# --- a sum that is missing inside


class Blocks(Weights):
    """Two tensor-parallel blocks, w0 w1 and w2 w3, with relu in each and between them. ``forgets`` some sums."""

    shardings = {"w0": "d f/model", "w1": "f/model d", "w2": "d f/model", "w3": "f/model d"}
    shapes = {"w0": (D, F), "w1": (F, D), "w2": (D, F), "w3": (F, D)}
    forgets = ()

    def sum_over_model(self, x, what):
        return x if what in self.forgets and self.num_devices > 1 else self.all_reduce(x, over="model")

    def forward(self, x):
        w = self.parameters
        z0 = x @ w["w0"]
        y0 = np.maximum(z0, 0) @ w["w1"]
        y0 = self.sum_over_model(y0, "y0")
        h = np.maximum(y0, 0)
        z1 = h @ w["w2"]
        self.tape.push(x, z0, y0, h, z1)
        return self.all_reduce(np.maximum(z1, 0) @ w["w3"], over="model")

    def backward(self, dy):
        x, z0, y0, h, z1 = self.tape.pop()
        w = self.parameters
        g = {"w3": np.maximum(z1, 0).T @ dy}
        dz1 = (dy @ w["w3"].T) * (z1 > 0)
        g["w2"] = h.T @ dz1
        dh = self.sum_over_model(dz1 @ w["w2"].T, "dh")
        dy0 = dh * (y0 > 0)
        g["w1"] = np.maximum(z0, 0).T @ dy0
        dz0 = (dy0 @ w["w1"].T) * (z0 > 0)
        g["w0"] = x.T @ dz0
        return {name: self.all_reduce(each, over="data") for name, each in g.items()}


HELPER = "what sum_over_model returns"


def forgetful(engine, *what):
    return type("Forgetful", (engine,), {"forgets": what})


@pytest.mark.parametrize("axes", [{"data": 2, "model": 2}], ids=tiny.mesh_id)
def test_a_sum_that_is_missing_over_an_activation_s_gradient_is_named(axes):
    axes = {"data": 1, **axes}
    assert verified(Blocks, axes).agrees
    found = verified(forgetful(Blocks, "dh"), axes).disagreement
    assert found.what == "gradient of w1"
    (finding,) = found.findings
    assert (finding.cause, finding.axes) == (Cause.MISSING_SUM, ("model",))
    assert finding.text.startswith(HELPER) and "summed over model it would be right" in finding.text


def test_a_sum_that_is_missing_within_the_forward_is_named():
    found = verified(forgetful(Blocks, "y0"), {"data": 2, "model": 2}).disagreement
    assert found.what == "output"
    assert [finding.axes for finding in found.findings] == [("model",)]
    assert found.findings[0].text.startswith("y0 (test_verify_own.py:")


class Stack(Weights):
    """Blocks in a loop: the sum is missing each time round."""

    layers = 3
    shapes = {f"{i}/{name}": shape for i in range(3) for name, shape in (("up", (D, F)), ("down", (F, D)))}
    shardings = {name: "d f/model" if name.endswith("up") else "f/model d" for name in shapes}
    forgets = ()

    def forward(self, x):
        saved = []
        for i in range(self.layers):
            z = x @ self.parameters[f"{i}/up"]
            saved.append((x, z))
            x = np.tanh(x + self.all_reduce(np.maximum(z, 0) @ self.parameters[f"{i}/down"], over="model"))
        self.tape.push(saved, x)
        return x

    def backward(self, dy):
        saved, y = self.tape.pop()
        gradients = {}
        for i in reversed(range(self.layers)):
            x, z = saved[i]
            ds = dy * (1 - y * y)
            gradients[f"{i}/down"] = np.maximum(z, 0).T @ ds
            dz = (ds @ self.parameters[f"{i}/down"].T) * (z > 0)
            gradients[f"{i}/up"] = x.T @ dz
            dx = dz @ self.parameters[f"{i}/up"].T
            if "dx" not in self.forgets or self.num_devices == 1:
                dx = self.all_reduce(dx, over="model")
            dy, y = ds + dx, x
        return {name: self.all_reduce(each, over="data") for name, each in gradients.items()}


def test_a_sum_that_is_missing_each_time_round_is_named():
    assert verified(Stack, {"data": 1, "model": 2}).agrees
    found = verified(forgetful(Stack, "dx"), {"data": 1, "model": 2}).disagreement
    assert found.what == "gradient of 1/down" and [finding.axes for finding in found.findings] == [("model",)]
    assert found.findings[0].text.startswith("dx (test_verify_own.py:")


class Heads(AttentionHeads):
    """Attention heads after a matrix that every rank has whole."""

    forgets = ()

    def __init__(self, mesh):
        super().__init__(6, 2, mesh, np.float64)
        self.parameters["before"] = np.zeros((6, 6))

    def global_shape(self, name):
        return (6, 6) if name == "before" else super().global_shape(name)

    def load_checkpoint(self, params):
        super().load_checkpoint(params)

    def forward(self, x):
        z = x @ self.parameters["before"]
        self.outer = x, z
        return super().forward(np.maximum(z, 0))

    def start_all_reduce(self, arr, op="sum", *, over=None, label=""):
        if label == "dx" and self.forgets and self.num_devices > 1:
            over = ()
        return super().start_all_reduce(arr, op, over=over, label=label)

    def backward(self, dy):
        gradients = super().backward(dy)
        x, z = self.outer
        dz = self.input_gradient * (z > 0)
        gradients["before"] = np.einsum("bsd,bse->de", x, dz)
        self.input_gradient = None
        return gradients


def test_attention_heads_whose_input_s_gradient_is_not_summed_are_named():
    assert verified(Heads, {"model": 2}, (4, 3, 6)).agrees
    found = verified(forgetful(Heads, "dx"), {"model": 2}, (4, 3, 6)).disagreement
    assert found.what == "gradient of before"
    assert [(finding.cause, finding.axes) for finding in found.findings] == [(Cause.MISSING_SUM, ("model",))]


def test_two_sums_that_are_missing_are_both_named():
    class Twice(Blocks):
        def backward(self, dy):
            x, z0, y0, h, z1 = self.tape.pop()
            w = self.parameters
            g = {"w3": np.maximum(z1, 0).T @ dy}
            dz1 = (dy @ w["w3"].T) * (z1 > 0)
            g["w2"] = h.T @ dz1
            dh = self.sum_over_model(dz1 @ w["w2"].T, "dh")
            dy0 = dh * (y0 > 0)
            g["w1"] = np.maximum(z0, 0).T @ dy0
            dz0 = (dy0 @ w["w1"].T) * (z0 > 0)
            g0 = x.T @ dz0
            g["w0"] = self.sum_over_data(g0)
            return {name: each if name == "w0" else self.all_reduce(each, over="data") for name, each in g.items()}

        def sum_over_data(self, x):
            return x if self.num_devices > 1 else self.all_reduce(x, over="data")

    found = verified(forgetful(Twice, "dh"), {"data": 2, "model": 2}).disagreement
    assert [finding.axes for finding in found.findings] == [("model",), ("data",)]
    assert [finding.text.split(" (")[0] for finding in found.findings] == [HELPER, "g0"]


def test_of_what_nothing_explains_the_line_is_named():
    class Off(Blocks):
        def backward(self, dy):
            gradients = super().backward(dy)
            if self.num_devices > 1:
                gradients["w1"] = gradients["w1"] + 1.0
            return gradients

    found = verified(Off, {"data": 1, "model": 2}).disagreement
    assert found.what == "gradient of w1" and [finding.cause for finding in found.findings] == [Cause.FIRST]
    line = unwrap(Off.backward).__code__.co_firstlineno + 3
    assert f'gradients["w1"] (test_verify_own.py:{line}): it differs from what one device has' in str(found)


class Projection(Layer):
    """A layer of one's own: y[b d] = x[b d] + relu(x · up[d f]) · down[f d]; forgets to sum dx over f."""

    sizes = {"d": D, "f": F}
    parameters = {"up": Parameter("d f", 0.3), "down": Parameter("f d", 0.3)}
    may_cut = "bf"
    inputs = outputs = Activation("b d")

    def forward(self, sh, p, x, ctx):
        z = x @ p["up"]
        return x + sh.all_reduce(np.maximum(z, 0) @ p["down"], "f"), (x, z)

    def backward_input(self, sh, p, saved, dy):
        x, z = saved
        dz = (dy @ p["down"].T) * (z > 0)
        return dy + dz @ p["up"].T, (x, z, dz, dy)

    def backward_weight(self, sh, rest, g):
        x, z, dz, dy = rest
        g.add("up", x.T @ dz)
        g.add("down", np.maximum(z, 0).T @ dy)


def test_a_layer_of_one_s_own_that_forgets_a_sum_is_named_by_the_watch():
    def engine(mesh):
        layers = [("in", Linear(("d", D), ("e", D))), ("mine", Projection())]
        return as_distributed(layers, mesh, dtype=np.float64, outputs="b d")

    def batches(engine, step):
        x, y = (np.random.default_rng([step, i]).standard_normal((6, D)) for i in range(2))
        return batch_of(x, y, engine, step=step)

    def program():
        with Mesh(model=2) as mesh:
            return verify(engine(mesh), engine(mesh_of_one(["model"])) if mesh.rank == 0 else None, batches)

    found = run_threads(program, 2)[0].disagreement
    assert found.what == "input gradient of mine"
    assert [(finding.cause, finding.axes) for finding in found.findings] == [(Cause.MISSING_SUM, ("model",))]


# --- gradients that are wrong on one device, too


def spoiled_backward(change):
    class Spoiled(Blocks):
        def backward(self, dy):
            return change(super().backward(dy))

    return Spoiled


@pytest.mark.parametrize(
    ("change", "text"),
    [
        pytest.param(lambda g: {**g, "w1": 2 * g["w1"]}, "it is 2 times what it should be", marks=pytest.mark.soak),
        (lambda g: {**g, "w1": -g["w1"]}, "it is -1 times what it should be"),
        (lambda g: {**g, "w1": g["w1"] + 0.01 * np.arange(D)}, "right: w0, w2, w3"),
        (lambda g: {**g, "w1": np.zeros_like(g["w1"])}, "backward says 0"),
        (lambda g: {**g, "w1": 1.001 * g["w1"]}, "it is 1.001 times"),
    ],
)
def test_a_gradient_that_is_wrong_everywhere_is_named(change, text):
    report = verified(spoiled_backward(change), {"data": 1, "model": 2})
    assert not report.agrees and report.disagreement is None and not report.steps
    (wrong,) = report.gradients.wrong
    assert wrong.name == "w1"
    assert f"changes by {wrong.differences:.10g} (finite" in str(wrong) and f"says {wrong.backward:.10g}" in str(wrong)
    assert "gradient of w1 is wrong on one device, too" in report.verdict and text in report.verdict
    assert verified(spoiled_backward(change), {"data": 1, "model": 2}, finite_differences=False).agrees


def test_a_loss_whose_gradient_is_wrong_is_named_itself():
    class Halved(Blocks):
        @staticmethod
        def loss(outputs, targets, *, count):
            difference = outputs - targets
            outputs[...] = difference / count  # written over the outputs, and without the factor 2
            return float((difference**2).sum()) / count, outputs

    report = verified(Halved, {"data": 1, "model": 1})
    assert report.verdict.startswith("the loss function's gradient is wrong on one device, too")
    assert "it is 0.5 times what it should be" in report.verdict


class Dropping(Blocks):
    """With dropout from a generator of its own, and a state that each forward changes."""

    def __init__(self, mesh):
        super().__init__(mesh)
        self.generator, self.calls = np.random.default_rng(0), 0

    def forward(self, x):
        self.calls += 1
        mask = self.generator.random(D) < 0.8
        self.kept = mask * (1 + 0.1 * self.calls)
        return super().forward(x) * self.kept

    def backward(self, dy):
        return super().backward(dy * self.kept)


def test_dropout_and_states_of_an_engine_repeat_themselves():
    report = verified(Dropping, {"data": 1, "model": 2}, steps=3)
    assert report.agrees and not report.gradients.skipped and len(report.gradients.slopes) == 4


def test_what_cannot_be_repeated_is_not_compared_and_said():
    class Random(Blocks):
        def forward(self, x):
            return super().forward(x) + np.random.standard_normal()

    report = verified(Random, {"data": 1, "model": 1})
    assert "left out, since two steps on the same batch" in str(report.gradients)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_parameters_are_as_before(dtype):
    def program():
        with Mesh(data=1) as mesh:
            engine, reference = (DataParallel(D, F, each, dtype) for each in (mesh, mesh_of_one()))
            for each in (engine, reference):
                each.initialize(1)
            before = {name: x.copy() for name, x in reference.parameters.items()}
            report = verify(engine, reference, batches_of_shape(engine, reference, (6, D)), steps=1, rate=0.0)
            for name, x in before.items():
                np.testing.assert_array_equal(reference.parameters[name], x)
            return report

    report = run_threads(program, 1)[0]
    assert report.agrees and [slope.name for slope in report.gradients.slopes] == ["layer_0/weights", "layer_1/weights"]
    assert max(slope.distance for slope in report.gradients.slopes) < (1e-7 if dtype is np.float64 else 1e-2)


# --- classifiers


class Classifier(Weights):
    """scores[b/data v] = x[b/data d] · w[d v]."""

    output_sharding, target_sharding, loss = "b/data v", "b/data", staticmethod(cross_entropy)
    shapes, shardings = {"w": (D, 4)}, {"w": "d v"}

    def forward(self, x):
        self.tape.push(x)
        return x @ self.parameters["w"]

    def backward(self, dy):
        return {"w": self.all_reduce(self.tape.pop().T @ dy, over="data")}


def test_classifiers_get_classes():
    report = verified(Classifier, {"data": 2}, classes=4)
    assert report.agrees and report.gradients.slopes[0].distance < 1e-7 and len(report.steps) == 2


@pytest.mark.parametrize(
    ("attributes", "classes", "message"),
    [
        ({"target_sharding": "b/data v"}, 4, 'set in the engine target_sharding = "b/data"'),
        ({"loss": staticmethod(mean_squared_error)}, 4, "the engine's loss is the mean squared error"),
        ({}, 5, "5 classes, but outputs of shape"),
        ({}, None, "Targets unlike the outputs can only be classes: --classes N"),
    ],
)
def test_what_is_no_classifier_is_refused(attributes, classes, message):
    with pytest.raises(UsageError, match=message):
        verified(type("Other", (Classifier,), attributes), {"data": 2}, classes=classes)


def test_an_engine_that_keeps_what_it_loads_shares_nothing_with_its_reference():
    class Keeping(Classifier):
        def load_checkpoint(self, params):
            self.parameters = {"w": params["w"]}

    assert verified(partial(Keeping), {"data": 3}, classes=4).agrees


def test_verification_is_in_float64():
    class Narrow(Drawn):
        drawn = np.float32

    with Mesh() as mesh:
        for engine in engine_and_reference(Narrow, mesh):
            assert engine.parameters["w"].dtype == np.float64


def test_an_engine_without_parameters_is_told_the_line_that_is_missing():
    with pytest.raises(UsageError, match=r'an engine without parameters: .* self.parameters = \{"w": self.w\}'):
        engine_and_reference(Bare, Mesh())


class Attributes(Bare):
    """It computes, and has its weights as attributes."""

    def load_checkpoint(self, params):
        self.w[...] = params["layer_0/weights"][...]


def test_weights_as_attributes_are_named_in_the_line_that_is_missing():
    with pytest.raises(UsageError, match=r'add the line self.parameters = \{"layer_0/weights": self.w\}'):
        engine_and_reference(Attributes, mesh_of_one())
