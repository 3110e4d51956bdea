"""What is refused of a subclass of ShardedEngine, of its batches and of its trainer: each mistake in one line."""

from inspect import signature

import numpy as np
import pytest

from spmd_engine import ArrayData, Mesh, as_distributed, layers, load_pretrained, run_threads
from spmd_engine.arrays.einsum_lowering import einsum
from spmd_engine.checkpoints import load_checkpoint, save_checkpoint
from spmd_engine.engine import SGD, AdamW, LayeredEngine, ShardedEngine
from spmd_engine.engine.batch import Batch, MicroBatch, batch_of
from spmd_engine.engine.distributed import make_engine
from spmd_engine.engine.optimizers import WarmupCosine
from spmd_engine.errors import UsageError
from spmd_engine.layers import MLP, Attention, LayerNorm, Residual
from spmd_engine.losses import cross_entropy, mean_squared_error, right_classes
from spmd_engine.models import two_layers
from spmd_engine.training import Hook, Observer, Run, TrainConfig, Trainer
from spmd_engine.training.run_folder import run_folder
from support.linear_engine import Linear
from support.strangers import Bare

X, Y = np.random.default_rng(0).standard_normal((8, 3)), np.random.default_rng(1).standard_normal((8, 2))


class Own(Linear):
    """Without a mistake; a test changes one thing in a subclass."""

    def __init__(self):
        self.load_checkpoint({"w": np.ones((3, 2))})


def own(**changed):
    return type("Linear", (Own,), changed)()


def losses(engine=None, *, micro_batches=1, optimizer=None, rate=lambda step: 0.1, **given):
    """Two steps."""
    engine = engine or own()
    batches = given.pop("batches", lambda step: batch_of(X, Y, engine, micro_batches, step))
    return [r.loss for r in Trainer(engine, optimizer or SGD(), batches, rate, **given).run(2)]


def trainer():
    return Trainer(own(), SGD(), None, None)


def test_without_a_mistake_nothing_is_refused():
    expected = losses(micro_batches=3)
    assert expected[1] < expected[0]
    np.testing.assert_allclose(run_threads(lambda: losses(micro_batches=3), 2)[1], expected, rtol=1e-12)


# --- what methods return


def pushed(outputs):
    """A forward of these outputs."""

    def forward(self, x):
        self.tape.push(x)
        return outputs(self, x)

    return forward


def popped(gradients):
    """A backward of these gradients."""
    return lambda self, dy: gradients(self, self.tape.pop().T @ dy)


def same_memory(self, dw):
    self.dw = self.__dict__.get("dw", np.zeros((3, 2)))
    self.dw[...] = dw
    return {"w": self.dw}


def pushed_twice(self, x):
    self.tape.push(x)
    return Own.forward(self, x)


def popped_twice(self, dy):
    self.tape.pop()
    return Own.backward(self, dy)


RETURNED = {
    "forward: nothing": (
        {"forward": pushed(lambda self, x: None)},
        "Linear.forward returned None",
    ),
    "forward: a pair": (
        {"forward": pushed(lambda self, x: (x @ self.parameters["w"], x))},
        "Linear.forward returned a tuple of 2; return one array, the outputs",
    ),
    "forward: a list": (
        {"forward": pushed(lambda self, x: (x @ self.parameters["w"]).tolist())},
        "Linear.forward returned a list of 8",
    ),
    "forward: a number": (
        {"forward": pushed(lambda self, x: (x @ self.parameters["w"]).sum())},
        "Linear.forward returned a float64",
    ),
    "forward: one dim less": (
        {"forward": pushed(lambda self, x: (x @ self.parameters["w"]).sum(axis=1))},
        r'Linear.output_sharding is "b/data d", but the array has shape \(8,\)',
    ),
    "backward: nothing": (
        {"backward": popped(lambda self, dw: None)},
        r"Linear.backward returned None; return \{name: gradient\}, like parameters",
    ),
    "backward: an array": ({"backward": popped(lambda self, dw: dw)}, r"returned an array of shape \(3, 2\); return {"),
    "backward: a pair": (
        {"backward": popped(lambda self, dw: (dw, {"w": dw}))},
        "Linear.backward returned a tuple of 2",
    ),
    "backward: a list": ({"backward": popped(lambda self, dw: {"w": dw.tolist()})}, "gradient of 'w' is a list of 3"),
    "backward: no gradient": ({"backward": popped(lambda self, dw: {"w": None})}, "the gradient of 'w' is None"),
    "backward: transposed": (
        {"backward": popped(lambda self, dw: {"w": dw.T})},
        r"Linear.backward: the gradient of 'w' has shape \(2, 3\), the parameter \(3, 2\)",
    ),
    "backward: broadcast": ({"backward": popped(lambda self, dw: {"w": dw[None]})}, r"has shape \(1, 3, 2\)"),
    "backward: another name": (
        {"backward": popped(lambda self, dw: {"W": dw})},
        "Linear.backward returned a gradient of 'W'; the parameters are w",
    ),
    "backward: one is missing": (
        {"backward": popped(lambda self, dw: {})},
        "Linear.backward returned no gradient of w; return one for each",
    ),
    "backward: one buffer": ({"backward": popped(same_memory)}, "'w' in the same memory for two micro-batches"),
    "tape: not popped": (
        {"backward": lambda self, dy: {"w": np.zeros((3, 2))}},
        "Linear: forward pushes 1 more than backward pops from the tape",
    ),
    "tape: pushed twice": ({"forward": pushed_twice}, "forward pushes 1 more than backward pops"),
    "tape: popped twice": ({"backward": popped_twice}, r"Linear.backward: tape.pop\(\): the tape is empty"),
    "forward: arguments": (
        {"forward": lambda self, p, x: x},
        r"Linear.forward: missing .* takes \(self, p, x\), but is called with \(self, x\)",
    ),
    "backward: arguments": ({"backward": lambda self: {}}, r"takes \(self\), but is called with \(self, grads\)"),
}


@pytest.mark.parametrize("case", RETURNED)
def test_what_methods_return_is_checked(case):
    changed, message = RETURNED[case]
    with pytest.raises(UsageError, match=message):
        losses(own(**changed), micro_batches=2 if "buffer" in case else 1)


def test_methods_called_by_hand_and_by_a_step_of_one_s_own_are_checked_too():
    engine = own(backward=lambda self, dy: None)
    with pytest.raises(UsageError, match="Linear.backward returned None"):
        engine.backward(engine.forward(X))


def test_a_method_that_a_subclass_extends_may_return_anything():
    class Pair(Own):
        def forward(self, x):
            return super().forward(x), x

    class Last(Pair):
        def forward(self, x):
            return super().forward(x)[0]

    assert losses(Last()) == losses()
    with pytest.raises(UsageError, match="Pair.forward returned a tuple"):
        losses(Pair())


def test_a_forward_without_outputs_on_any_rank_is_told_from_one_of_a_pipeline():
    def program():
        losses(own(forward=pushed(lambda self, x: None)))

    with pytest.raises(
        UsageError, match=r"Linear.forward returned None, and Linear.backward\(None\) failed \(ValueError"
    ):
        run_threads(program, 2)


def test_what_a_forward_by_hand_left_on_the_tape_is_not_the_step_s():
    engine = own()
    engine.forward(X)
    losses(engine)


# --- what is declared


def loading(parameters):
    return {"load_checkpoint": lambda self, params: setattr(self, "parameters", parameters(self, params["w"]))}


def in_place(self, params):
    self.parameters["w"] = params["w"]


def read_only(array):
    array.flags.writeable = False
    return array


DECLARED = {
    "shardings: unknown name": (
        {"shardings": {"W": "d f/data"}},
        "Linear.shardings names 'W', but the parameters are w",
    ),
    "shardings: dims": (
        {"shardings": {"w": "d/data"}},
        r"Linear.shardings\['w'\] is \"d/data\", but the array has shape \(3, 2\): write a letter for each dim",
    ),
    "shardings: axis": ({"shardings": {"w": "d f/modle"}}, "but the mesh has no axis modle; it has data"),
    "shardings: no text": ({"shardings": {"w": ("d", "f")}}, r"Linear.shardings\['w'\] is a tuple of 2; write letters"),
    "shardings: letters": ({"shardings": {"w": "df"}}, r"Linear.shardings\['w'\]: cannot read sharding \"df\""),
    "inputs: more letters": (
        {"input_sharding": "b/data s d"},
        r'Linear.input_sharding is "b/data s d", but the array has shape \(8, 3\): write a letter for each dim',
    ),
    "inputs: batch behind": (
        {"input_sharding": "d b/data", "output_sharding": "d b/data"},
        'Linear.input_sharding is "d b/data": the batch, b, must be the first dim',
    ),
    "inputs: axis": ({"input_sharding": "b/dat d"}, 'Linear.input_sharding is "b/dat d", but the mesh has no axis dat'),
    "inputs: no text": ({"input_sharding": None}, "Linear.input_sharding is None; write letters"),
    "outputs: more letters": (
        {"output_sharding": "b/data s d"},
        'Linear.output_sharding is "b/data s d", but the array',
    ),
    "outputs: not cut": ({"output_sharding": ""}, "declare in output_sharding"),
    "parameters: none": ({"__init__": lambda self: None}, "Linear has no parameters: call load_checkpoint"),
    "parameters: added to": ({"load_checkpoint": in_place}, "assign a dict first, as in self.parameters"),
    "parameters: a list": (loading(lambda self, w: [w]), "Linear.parameters is a list of 1; make it a dict"),
    "parameters: of lists": (
        loading(lambda self, w: {"w": w.tolist()}),
        r"parameters\['w'\] is a list of 3, which cannot",
    ),
    "parameters: a number": (
        loading(lambda self, w: {"w": np.float64(1)}),
        r"parameters\['w'\] is a float64, which cannot",
    ),
    "parameters: whole numbers": (loading(lambda self, w: {"w": w.astype(int)}), "has dtype int64"),
    "parameters: read only": (loading(lambda self, w: {"w": read_only(w)}), "is read-only, like a memory map"),
    "parameters: not contiguous": (loading(lambda self, w: {"w": np.ones((2, 3)).T}), "not contiguous"),
    "parameters: one array twice": (
        loading(lambda self, w: {"w": w, "v": w}),
        r"parameters\['v'\] is the same array as 'w'",
    ),
    "parameters: made anew": (
        {"load_checkpoint": lambda self, params: None, "parameters": property(lambda self: {"w": np.ones((3, 2))})},
        r"Linear.parameters\['w'\] is a new array at each access",
    ),
    "loading: arguments": ({"load_checkpoint": lambda self: None}, r"but is called with \(self, params\)"),
}


@pytest.mark.parametrize("case", DECLARED)
def test_what_is_declared_is_checked(case):
    changed, message = DECLARED[case]
    with pytest.raises(UsageError, match=message):
        losses(own(**changed))


@pytest.mark.parametrize("sharding", ["b/data d", "b d/data"])
def test_letters_that_are_not_the_array_s_dims_are_refused(sharding):
    engine = own(input_sharding=sharding, output_sharding=sharding)
    with pytest.raises(UsageError, match=f'Linear.input_sharding is "{sharding}", but the array has shape'):
        batch_of(X.reshape(4, 2, 3), Y.reshape(4, 2, 2), engine)
    by_hand = Batch([MicroBatch(X.reshape(4, 2, 3), Y.reshape(4, 2, 2))])
    with pytest.raises(UsageError, match="write a letter for each dim, or one for the batch alone"):
        engine.step(by_hand)


@pytest.mark.parametrize("sharding", ["", "b/data"])
def test_no_letter_and_the_batch_s_alone_stand_for_all_dims(sharding):
    engine = own(input_sharding=sharding, output_sharding=sharding)
    assert losses(engine) == losses()


def test_serving_checks_what_is_declared():
    with pytest.raises(UsageError, match="Linear.shardings names 'W'"):
        own(shardings={"W": "d f/data"}).inference_loop([X], None)


def test_a_sharding_of_a_parameter_that_another_rank_has_is_no_mistake():
    class Stages(Own):
        shardings = {"w0": "d f", "w1": "d f"}
        input_sharding = output_sharding = ""

        def __init__(self):
            self.parameters = {f"w{self.device_id}": np.ones((3, 2))}

        def forward(self, x):
            self.tape.push(x)
            return x @ self.parameters[f"w{self.device_id}"]

        def backward(self, dy):
            return {f"w{self.device_id}": self.tape.pop().T @ dy}

    def program():
        engine = Stages()
        engine.checks_replicas = False  # the two train apart
        return losses(engine)

    assert len(run_threads(program, 2)) == 2


# --- losses, metrics, batches, trainers


def squared(y, targets, count):
    return float(((y - targets) ** 2).sum() / count), 2 * (y - targets) / count


LOSSES = {
    "value alone": (lambda y, t, count: squared(y, t, count)[0], r"returned a float; return \(value, gradient"),
    "turned": (lambda y, t, count: squared(y, t, count)[::-1], "a number and an array of the outputs' shape"),
    "one value a sample": (lambda y, t, count: (((y - t) ** 2).mean(1), y - t), r"returned \(an array of shape \(8,\)"),
    "gradient of another shape": (lambda y, t, count: (0.0, (y - t).sum()), r"returned \(a float, a float64\)"),
    "without count": (
        lambda y, t: squared(y, t, 16),
        r"it takes \(y, t\), but is called with \(outputs, targets, count\)",
    ),
}


@pytest.mark.parametrize("case", LOSSES)
def test_what_a_loss_returns_is_checked(case):
    loss, message = LOSSES[case]
    with pytest.raises(UsageError, match=message):
        losses(loss=loss)


def test_a_loss_that_is_a_plain_function_of_the_class_is_told():
    with pytest.raises(UsageError, match=r"loss = staticmethod\(...\)"):
        losses(own(loss=squared))


@pytest.mark.parametrize("value", [lambda y, t: None, lambda y, t: y == t])
def test_what_a_metric_returns_is_checked(value):
    with pytest.raises(UsageError, match="metric hits returned .*; return the number"):
        losses(own(metrics={"hits": value}))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (np.arange(8) % 2 + 1, "targets must be whole numbers from 0 to 1; they are int64 from 1 to 2"),
        ((np.arange(8) % 2).astype(float), "targets must be whole numbers from 0 to 1; they are float64"),
        (np.eye(2)[np.arange(8) % 2], r"outputs of shape \(8, 2\), targets of \(8, 2\); give one class for each row"),
    ],
)
def test_targets_that_are_no_classes_are_refused(targets, message):
    engine = own(loss=staticmethod(cross_entropy), target_sharding="b/data")
    engine.target_sharding = "b/data"
    with pytest.raises(UsageError, match=message):
        losses(engine, batches=lambda step: batch_of(X, targets, engine))


def batches(make):
    return lambda engine: {"batches": lambda step: make(engine, step)}


ARGUMENTS = {
    "more targets": (batches(lambda e, step: batch_of(X, np.vstack([Y, Y]), e)), "inputs have 8 rows, targets 16"),
    "fewer targets": (batches(lambda e, step: batch_of(X, Y[:5], e)), "batch_of: inputs have 8 rows, targets 5"),
    "inputs in a list": (
        batches(lambda e, step: batch_of(X.tolist(), Y, e)),
        "batch_of: inputs is a list; give an array",
    ),
    "targets in a list": (batches(lambda e, step: batch_of(X, Y.tolist(), e)), "batch_of: targets is a list"),
    "step for micro-batches": (
        batches(lambda e, step: batch_of(X, Y, e, step)),
        "micro_batches is 0: make it 1 or more",
    ),
    "no batch": (batches(lambda e, step: None), r"batches\(0\): None is no Batch; make one, by batch_of"),
    "a pair": (batches(lambda e, step: (X, Y)), r"batches\(0\): a tuple of 2 is no Batch"),
    "pairs": (
        batches(lambda e, step: Batch([(X, Y)])),
        "one of the Batch's micro_batches is a tuple of 2; make each a MicroBatch",
    ),
    "no micro-batches": (batches(lambda e, step: Batch([])), "the Batch has no micro-batches"),
    "a batch": (lambda e: {"batches": batch_of(X, Y, e)}, "batches is a Batch; give a function of the step"),
    "rate": (lambda e: {"rate": 0.1}, "rate is 0.1; give a function of the step, as lambda step: 0.1"),
    "no rate": (lambda e: {"rate": lambda step: None}, r"rate\(0\) returned None; a learning rate is"),
    "class of optimizer": (lambda e: {"optimizer": SGD}, "optimizer is the class SGD; give an Optimizer"),
    "class of engine": (lambda e: {"engine": Own}, "engine is the class Own; give a ShardedEngine"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_what_a_trainer_is_given_is_checked(case):
    given, message = ARGUMENTS[case]
    engine = own()
    with pytest.raises(UsageError, match=message):
        losses(**{"engine": engine, **given(engine)})


def test_a_step_by_hand_wants_a_batch():
    with pytest.raises(UsageError, match="step: an array of shape .* is no Batch"):
        own().step(X)


# --- and as it was


class Careless(Bare):
    """A stranger's mistakes, one at a time."""

    @property
    def parameters(self):
        return {"w": self.w}


def test_a_batch_cut_in_inputs_alone_is_refused():
    engine = Careless()
    engine.input_sharding = "b/data d"
    with pytest.raises(UsageError, match="declare in output_sharding"):
        engine.step(batch_of(np.ones((4, 3)), np.ones((4, 2)), engine))


@pytest.mark.parametrize(
    ("shardings", "how"), [({}, "whole"), ({"w": "d f/model"}, 'sharded as "d f/model"')], ids=["whole", "sharded"]
)
def test_a_forgotten_all_reduce_is_found_in_the_first_step(shardings, how):
    class Forgetful(Careless):
        input_sharding = output_sharding = "b/data d"

        def backward(self, grads):
            return {"w": self.tape.pop().T @ grads}

    Forgetful.shardings = shardings
    x = np.random.default_rng(0).standard_normal((4, 3))

    def program():
        with Mesh(data=2, model=2) as mesh:
            engine = Forgetful()
            engine.mesh = mesh
            engine.step(batch_of(x, x[:, :2], engine))

    said = f"the gradient of 'w' differs between ranks of data, along which it is {how}: is an all_reduce over data mi"
    with pytest.raises(UsageError, match=said):
        run_threads(program, 4)


# --- an engine without parameters, as one writes it first


class Attributes(Bare):
    """It computes, and has its weights as attributes."""

    def load_checkpoint(self, params):
        self.w[...] = params["layer_0/weights"][...]


LINE = r'add the line self.parameters = \{"layer_0/weights": self.w\}'


def test_weights_as_attributes_are_named_in_the_line_that_is_missing():
    engine = Attributes()
    with pytest.raises(UsageError, match=f"Attributes has no parameters: where it makes its arrays, {LINE}"):
        losses(engine)
    for failing in (
        lambda: engine.gather("layer_0/weights"),
        lambda: engine.sharding("layer_0/weights"),
        lambda: as_distributed(engine),
    ):
        with pytest.raises(UsageError, match=LINE):
            failing()


OF_WRONG_TYPES = {
    "grad_clip is '1'; give the largest norm": lambda: losses(grad_clip="1"),
    "Trainer.run: steps is '3'; give the number of steps": lambda: Trainer(own(), SGD(), None, None).run("3"),
    "SGD: momentum is '0.9'; give a number": lambda: SGD("0.9"),
    "SGD: momentum is nan; give a number": lambda: SGD(float("nan")),
    "unknown activation 'swoosh'; there are: gelu": lambda: layers.MLP(4, 8, activation="swoosh"),
    "unknown activation 'swish'; there are: silu|did you mean": lambda: layers.GatedMLP(4, 8, activation="swish"),
    "Parameter: std is -1; it must be from 0": lambda: layers.Parameter("d", std=-1),
    "Parameter: dims is 3; give letters": lambda: layers.Parameter(3),
    "Activation.*: dims are letters with blanks between them, as in .b s d": lambda: layers.Activation("bsd"),
    "Positions: dropout is 2.0; it must be from 0 below 1": lambda: layers.Positions(4, 4, dropout=2.0),
    "MaxPool: kernel is 0; it must be from 1": lambda: layers.MaxPool((8, 8), 0),
    "reshard: mesh is 'data=2'; give a Mesh": lambda: LayeredEngine(two_layers(2, 3)).reshard("data=2"),
    "describe: sharding is None; give letters with axes": lambda: Mesh().describe((2, 2), None),
    "Run: observers\\[0\\] is the class Observer; give an Observer": lambda: Run("r", trainer(), observers=[Observer]),
    "Trainer: loss is 'mse'; give a function of outputs": lambda: losses(loss="mse"),
    "SGD: momentum is 1.5; it must be from 0 below 1": lambda: SGD(1.5),
    "AdamW: epsilon is 0; give a number above 0": lambda: AdamW(epsilon=0),
    "8 samples in 9 micro-batches: give at most as many parts": lambda: batch_of(X, Y, own(), 9),
    "mean_squared_error: outputs is None; give an array": lambda: mean_squared_error(None, None),
    "cross_entropy: targets is a list of 1; give an array": lambda: cross_entropy(X, [1]),
    "mean_squared_error: outputs of int64, targets of int64; give floats": lambda: mean_squared_error(
        *[np.arange(3)] * 2
    ),
    "save_checkpoint: folder is 3; give the path of a run": lambda: save_checkpoint(3, own()),
    "Linear.shardings is a list of 1; make it a dict": lambda: own(shardings=["w"]),
    r"'a\\nb' is no name of a run; give one": lambda: run_folder("a\nb"),
    "WarmupCosine: peak is '1'; give a number": lambda: WarmupCosine("1", 10),
    "LayeredEngine: dtype is <class 'numpy.int32'>; there are: float32": lambda: LayeredEngine(
        two_layers(2, 3), dtype=np.int32
    ),
    "LayeredEngine: dtype is 'float31'; did you mean 'float32'": lambda: LayeredEngine(
        two_layers(2, 3), dtype="float31"
    ),
    "WarmupCosine: warmup is -3; it must be from 0": lambda: WarmupCosine(1.0, 10, -3),
    r"AdamW: betas\[1\] is 3; give two numbers from 0 and below 1": lambda: AdamW(betas=(0.9, 3)),
    "AdamW: betas is 0.9; give two numbers": lambda: AdamW(betas=0.9),
    r"block\('w', ...\): a list of 1 is no array": lambda: own().load_checkpoint({"w": [[1.0]]}),
    "lacks backward, forward, load_checkpoint: define": lambda: make_engine(ShardedEngine, Mesh()),
    "batch_of: engine is the class Own; give a ShardedEngine": lambda: batch_of(X, Y, Own),
    "batch_of: inputs has <U1, which are no numbers; give an array": lambda: batch_of(np.array(["a"] * 8), Y, own()),
    "batch_of: inputs has no rows; give an array": lambda: batch_of(X[:0], Y[:0], own()),
    "batch_of: step is 'a'; give a whole number": lambda: batch_of(X, Y, own(), step="a"),
    "Trainer: grad_clip is nan; give the largest norm": lambda: losses(grad_clip=float("nan")),
    "max_skipped is '3'; give a whole number": lambda: losses(max_skipped="3"),
    r"rate\(0\) returned nan; a learning rate is": lambda: losses(rate=lambda step: float("nan")),
    r"rate\(0\) returned -1; a learning rate is": lambda: losses(rate=lambda step: -1),
    r"Trainer.run: steps is -1; give the number of steps": lambda: Trainer(own(), SGD(), None, None).run(-1),
    r"Trainer.run: steps is 1.5; give the number of steps": lambda: Trainer(own(), SGD(), None, None).run(1.5),
    "load_checkpoint: folder is a Linear; give the path of a run, before": lambda: load_checkpoint(own(), "folder"),
    "load_checkpoint: params is None; give a mapping": lambda: LayeredEngine(two_layers(2, 3)).load_checkpoint(None),
    "load_pretrained: path is None; give that of": lambda: load_pretrained(LayeredEngine(two_layers(2, 3)), None),
    "run_folder: run is 3; give the folder of a run": lambda: run_folder(3),
    "'' is no name of a run; give one": lambda: run_folder(""),
    "'..' is no name of a run; give one": lambda: run_folder(".."),
    r"'a\\x00b' is no name of a run; give one": lambda: run_folder("a\0b"),
    r"Linear: inputs\[1\] is 0; it must be from 1": lambda: layers.Linear(("d", 0), ("f", 3)),
    "WarmupCosine: warmup is 11; give at most the number of steps, 10": lambda: WarmupCosine(1.0, 10, 11),
    "mean_squared_error: count is 0; give the number of terms": lambda: mean_squared_error(X, X, count=0),
    "cross_entropy: count is -1; give the number of terms": lambda: cross_entropy(X, np.zeros(8, int), count=-1),
    "mean_squared_error: mask is a list of 1; give an array": lambda: mean_squared_error(X, X, mask=[1]),
    "Ledger.total: operation is 'all_reduc'; did you mean 'all_reduce'": lambda: Mesh().ledger.total("all_reduc"),
    "Mesh: check is 'no'; give True or False": lambda: Mesh(check="no"),
    "TrainConfig.read: path is 1; give a text or a Path": lambda: TrainConfig.read(1),
    r"Conv2d: kernel is a tuple of 3; give a whole number or": lambda: layers.Conv2d(
        ("c", 2), ("f", 2), (8, 8), (1, 2, 3)
    ),
    'Activation\\("b b"\\): give each dim a letter of its own': lambda: layers.Activation("b b"),
    "Activation: where is 'insde'; did you mean 'inside'": lambda: layers.Activation("b", where="insde"),
    "BatchNorm: epsilon is -1; it must be from 0": lambda: layers.BatchNorm(("c", 2), epsilon=-1),
    "mesh axis 'a b': a name has letters": lambda: Mesh(**{"a b": 1}),
    "Mesh: timeout is -1; give seconds above 0": lambda: Mesh(timeout=-1),
    "over=3: name mesh axes, of data": lambda: Mesh().all_reduce(X, over=3),
    "all_reduce takes an array, not a NoneType": lambda: Mesh().all_reduce(None),
    "describe: x is a NoneType; give this rank's array": lambda: Mesh().describe(None, "b d"),
    "batch_of: micro_batches is '2'; give a whole number": lambda: batch_of(X, Y, own(), "2"),
    "LayeredEngine: model is 'gpt-nano'; give a Model": lambda: LayeredEngine("gpt-nano"),
    r"LayeredEngine: mesh is 'data=1'; give a Mesh, as Mesh\(data=2\)": lambda: LayeredEngine(
        two_layers(2, 3), "data=1"
    ),
    "as_distributed: dtype is 'bf16'; did you mean 'bfloat16'": lambda: as_distributed(own(), dtype="bf16"),
    "evaluation: a tuple of 2 is no Batch": lambda: own().evaluate((X, Y)),
    "Trainer.evaluate: batches is one Batch; give a list": lambda: Trainer(own(), None, None, None).evaluate(
        batch_of(X, Y, own())
    ),
    "save_checkpoint: folder is a Linear; give the path of a run, before": lambda: save_checkpoint(own(), "folder"),
    "Residual: inner is a list of 1; give a layer": lambda: Residual(LayerNorm(4), [LayerNorm(4)]),
    "Attention: width is '8'; give a whole number": lambda: Attention("8", 2),
    "Residual: missing a required argument: 'inner'; it takes": lambda: Residual(LayerNorm(4)),
    "AttentionConfig has no field 'windw'; did you mean 'window'": lambda: Attention(8, 2, windw=4),
    'einsum "bd,df->bf": operand 0 is a list of 1; make it an array': lambda: einsum("bd,df->bf", [[1.0]], Y[:1]),
    "einsum: the pattern is an array .*; it comes first": lambda: einsum(X, "bd,df->bf", Y),
    "Run: save_every is -1; it must be from 0": lambda: Run("r", trainer(), save_every=-1),
    r"Run: hooks\[0\] is the class Hook; give a Hook, not its": lambda: Run("r", trainer(), hooks=[Hook]),
    "Run: validation is a Batch; give a list of Batch objects": lambda: Run(
        "r", trainer(), validation=batch_of(X, Y, own())
    ),
    "Trainer: first_step is -3; it must be from 0": lambda: losses(first_step=-3),
    "Trainer: hooks is a Hook; give a list of Hook objects": lambda: losses(hooks=Hook()),
    "batches is a function of 0 arguments; give a function of the step": lambda: losses(batches=lambda: None),
    r"describe: the shape is \(-8, 6\); give whole numbers from 0": lambda: Mesh().describe((-8, 6), "b d"),
    "batch: step is -1; steps count from 0": lambda: batch_of(X, Y, own(), step=-1),
    "ArrayData: x is a list of 2; make it an array": lambda: ArrayData([1, 2], Y),
    "ArrayData: validation has numbers from 9 to 9; samples are numbered 0 to 7": lambda: ArrayData(
        X, Y, validation=np.array([9])
    ),
    "gather of 'w': root is 5, but ranks are 0 to 0": lambda: own().gather("w", root=5),
    "save_checkpoint: loss: Object of type float32 is not JSON": lambda: save_checkpoint(
        "r", own(), loss=np.float32(1)
    ),
    "output_stream is a list of 0; give one with write": lambda: own().inference_loop([X], []),
    r"cross_entropy: mask of shape \(3,\), targets of \(8,\)": lambda: cross_entropy(
        X, np.zeros(8, int), mask=np.ones(3)
    ),
    "right_classes: outputs of shape .* targets of": lambda: right_classes(X, np.zeros(3, int)),
    "WarmupCosine: floor is 2; give a fraction of the peak": lambda: WarmupCosine(1.0, 10, floor=2),
}


@pytest.mark.parametrize("message", OF_WRONG_TYPES)
def test_a_value_of_a_wrong_type_is_refused_where_it_is_given(message):
    with pytest.raises(UsageError, match=message):
        OF_WRONG_TYPES[message]()


def test_classes_of_engines_and_layers_show_the_arguments_of_their_constructors():
    """Programs that make an engine by its arguments' names, help() and notebooks ask for them."""

    class Own(ShardedEngine):
        def __init__(self, mesh, hidden=3): ...

    assert str(signature(Own)) == "(mesh, hidden=3)"
    assert [*signature(MLP).parameters][:2] == ["width", "hidden"]
