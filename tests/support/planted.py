"""Faults planted in small engines: the changed line, and the cause that verify should name.

Each engine here is correct; a fault replaces one of its lines. ``at`` is the line that verify should name if it is
not the changed one.
"""

from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location

from spmd_engine.verification import Cause

BLOCKS = '''
import numpy as np
from spmd_engine.engine import ShardedEngine

D, F = 6, 8
SHAPES = {"w0": (D, F), "b0": (F,), "w1": (F, D), "b1": (D,), "w2": (D, F), "w3": (F, D), "b3": (D,), "w4": (D, D)}


class Engine(ShardedEngine):
    """Two tensor-parallel blocks with biases, tanh between them, and a square matrix; the batch over data."""

    shardings = {"w0": "d f/model", "b0": "f/model", "w1": "f/model d", "w2": "d f/model", "w3": "f/model d"}
    input_sharding = output_sharding = "b/data d"

    def __init__(self, mesh):
        self.mesh = mesh
        self.load_checkpoint({name: np.zeros(shape) for name, shape in SHAPES.items()})

    def load_checkpoint(self, params):
        self.parameters = {name: self.block(name, params[name]) for name in SHAPES}

    def up(self, x, w, b=0.0):
        z = x @ w + b
        return z

    def input_of_up(self, dz, w):
        dx = dz @ w.T
        dx = self.all_reduce(dx, over="model")
        return dx

    def forward(self, x):
        w = self.parameters
        z0 = self.up(x, w["w0"], w["b0"])
        h0 = np.maximum(z0, 0)
        p0 = h0 @ w["w1"]
        y0 = self.all_reduce(p0, over="model")
        s0 = y0 + w["b1"]
        h1 = np.tanh(s0)
        z2 = self.up(h1, w["w2"])
        h2 = np.maximum(z2, 0)
        y2 = self.all_reduce(h2 @ w["w3"], over="model") + w["b3"]
        h4 = np.tanh(y2)
        self.tape.push(x, z0, h0, h1, z2, h2, h4)
        return h4 @ w["w4"]

    def backward(self, dy):
        x, z0, h0, h1, z2, h2, h4 = self.tape.pop()
        w, g = self.parameters, {}
        g["w4"] = h4.T @ dy
        dh4 = dy @ w["w4"].T
        dy2 = dh4 * (1 - h4 * h4)
        g["b3"] = dy2.sum(axis=0)
        g["w3"] = h2.T @ dy2
        dh2 = dy2 @ w["w3"].T
        dz2 = dh2 * (z2 > 0)
        g["w2"] = h1.T @ dz2
        dh1 = self.input_of_up(dz2, w["w2"])
        ds0 = dh1 * (1 - h1 * h1)
        g["b1"] = ds0.sum(axis=0)
        g["w1"] = h0.T @ ds0
        dz0 = (ds0 @ w["w1"].T) * (z0 > 0)
        g["b0"] = dz0.sum(axis=0)
        g["w0"] = x.T @ dz0
        g = {name: self.all_reduce(each, over="data") for name, each in g.items()}
        return g
'''

PLANE = '''
import numpy as np
from spmd_engine.engine import ShardedEngine

D, F = 6, 8


class Engine(ShardedEngine):
    """Weights cut over rows and columns, as strategies/two_dimensional.py does, and a bias."""

    shardings = {"w0": "d/row f/col", "b0": "f/col", "w1": "f/col d/row", "b1": "d/row"}
    input_sharding = output_sharding = "b d/row"

    def __init__(self, mesh):
        self.mesh = mesh
        self.load_checkpoint({"w0": np.zeros((D, F)), "b0": np.zeros(F), "w1": np.zeros((F, D)), "b1": np.zeros(D)})

    def load_checkpoint(self, params):
        self.parameters = {name: self.block(name, params[name]) for name in self.shardings}

    def forward(self, x):
        w0, b0, w1, b1 = self.parameters.values()
        z = self.all_reduce(x @ w0, over="row") + b0
        r = np.maximum(z, 0)
        self.tape.push(x, z, r)
        y = self.all_reduce(r @ w1, over="col")
        return y + b1

    def backward(self, dy):
        x, z, r = self.tape.pop()
        w0, _, w1, _ = self.parameters.values()
        db1 = dy.sum(axis=0)
        summing_dr = self.start_all_reduce(dy @ w1.T, over="row")
        dw1 = r.T @ dy
        dr = summing_dr.wait()
        dz = dr * (z > 0)
        dw0 = x.T @ dz
        self.input_gradient = self.all_reduce(dz @ w0.T, over="col")
        return {"w0": dw0, "b0": dz.sum(axis=0), "w1": dw1, "b1": db1}
'''

SEQUENCE = '''
import numpy as np
from spmd_engine.engine import ShardedEngine

S, D = 4, 6


class Engine(ShardedEngine):
    """Positions over context: each sees its own vector and, by mix, all of them; a mean over positions is added."""

    input_sharding = output_sharding = "b s/context d"
    shardings = {"mix": "t/context s"}

    def __init__(self, mesh):
        self.mesh = mesh
        self.load_checkpoint({"w": np.zeros((D, D)), "mix": np.zeros((S, S)), "v": np.zeros((D, D))})

    def load_checkpoint(self, params):
        self.parameters = {name: self.block(name, params[name]) for name in ("w", "mix", "v")}

    def forward(self, x):
        w, mix, v = self.parameters.values()
        h = np.tanh(x @ w)
        whole = self.all_gather(h, axis=1, over="context")
        m = np.einsum("ts,bsd->btd", mix, whole)
        mean = self.all_reduce(h.sum(axis=1), over="context") / S
        a = np.tanh(m + mean[:, None])
        self.tape.push(x, h, whole, a)
        return a @ v

    def backward(self, dy):
        x, h, whole, a = self.tape.pop()
        w, mix, v = self.parameters.values()
        dv = np.einsum("bsd,bse->de", a, dy)
        da = dy @ v.T
        dm = da * (1 - a * a)
        dmix = np.einsum("btd,bsd->ts", dm, whole)
        dwhole = np.einsum("ts,btd->bsd", mix, dm)
        dh = self.reduce_scatter(dwhole, axis=1, over="context")
        dmean = self.all_reduce(dm.sum(axis=1), over="context")
        dh = dh + dmean[:, None] / S
        dz = dh * (1 - h * h)
        dw = np.einsum("bsd,bse->de", x, dz)
        dw = self.all_reduce(dw, over="context")
        dv = self.all_reduce(dv, over="context")
        return {"w": dw, "mix": dmix, "v": dv}
'''

LAYER = '''
import numpy as np
from spmd_engine.engine import as_distributed
from spmd_engine.layers import Activation, Layer, Linear
from spmd_engine.layers.declarations import Parameter

D, F = 6, 8


class Projection(Layer):
    """A layer of a user's own, after docs/layers.md: y[b d] = x[b d] + relu(x · up[d f]) · down[f d] + shift[d]."""

    sizes = {"d": D, "f": F}
    parameters = {"up": Parameter("d f", 0.3), "down": Parameter("f d", 0.3), "shift": Parameter("d", 0.3)}
    may_cut = "bf"
    inputs = outputs = Activation("b d")

    def forward(self, sh, p, x, ctx):
        z = x @ p["up"]
        h = np.maximum(z, 0)
        y = h @ p["down"]
        y = sh.all_reduce(y, "f")
        return x + y + p["shift"], (x, z, h)

    def backward_input(self, sh, p, saved, dy):
        x, z, h = saved
        dh = dy @ p["down"].T
        dz = dh * (z > 0)
        dx = dz @ p["up"].T
        dx = sh.all_reduce(dx, "f")
        return dy + dx, (x, h, dz, dy)

    def backward_weight(self, sh, rest, g):
        x, h, dz, dy = rest
        g.add("up", x.T @ dz)
        g.add("down", h.T @ dy)
        g.add("shift", dy.sum(axis=0))


def Engine(mesh):
    layers = [("in", Linear(("d", D), ("e", D))), ("mine", Projection()), ("out", Linear(("d", D), ("e", D)))]
    return as_distributed(layers, mesh, dtype=np.float64, outputs="b d")
'''

SOURCES = {
    "blocks": (BLOCKS, {"data": 2, "model": 2}, (6, 6)),
    "blocks-uneven": (BLOCKS, {"data": 2, "model": 3}, (6, 6)),
    "plane": (PLANE, {"row": 2, "col": 2}, (4, 6)),
    "sequence": (SEQUENCE, {"context": 2}, (3, 4, 6)),
    "layer": (LAYER, {"data": 2, "model": 2}, (6, 6)),
}


@dataclass(frozen=True)
class Planted:
    """A line of an engine and its replacement."""

    kind: str
    source: str
    cause: Cause
    old: str
    new: str
    at: str = ""

    def __str__(self):
        return f"{self.kind}: {self.source}: {' '.join(self.new.split())}".replace("[", "(").replace("]", ")")

    @property
    def text(self):
        source, *_ = SOURCES[self.source]
        assert source.count(self.old) == 1, self.old
        return source.replace(self.old, self.new)

    @property
    def lines(self):
        """The numbers of the lines that verify may name."""
        changed = [(self.new, self.new.rstrip().count("\n"))] if self.new else []
        lines = set()
        for text, more in [*changed, *([(self.at, 0)] if self.at else [])]:
            before, found, _ = self.text.partition(text)
            assert found, text
            lines |= {before.count("\n") + 1 + i for i in range(more + 1)}
        return lines

    def engine(self, folder):
        """The class of the engine with the fault, imported from its own file."""
        path = folder / "engine.py"
        path.write_text(self.text)
        spec = spec_from_file_location(f"planted_{folder.name}", path)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.Engine


def _planted(kind, cause, *faults):
    return [Planted(kind, source, cause, *change) for source, *change in faults]


FAULTS = [
    *_planted(
        "missing in the forward, before what is not linear",
        Cause.MISSING_SUM,
        ("blocks", 'y0 = self.all_reduce(p0, over="model")\n        s0 = y0 + w["b1"]', 's0 = p0 + w["b1"]', "p0 = h0"),
        ("plane", 'z = self.all_reduce(x @ w0, over="row") + b0', "p = x @ w0\n        z = p + b0"),
        ("sequence", 'self.all_reduce(h.sum(axis=1), over="context") / S', "h.sum(axis=1) / S"),
        ("plane", 'z = self.all_reduce(x @ w0, over="row") + b0', "z = x @ w0 + b0"),
    ),
    *_planted(
        "missing in the forward, before a bias",
        Cause.MISSING_SUM,
        ("blocks", 'y2 = self.all_reduce(h2 @ w["w3"], over="model") + w["b3"]', 'y2 = h2 @ w["w3"] + w["b3"]'),
        ("plane", 'y = self.all_reduce(r @ w1, over="col")', "y = r @ w1"),
        ("layer", 'y = h @ p["down"]\n        y = sh.all_reduce(y, "f")', 'y = h @ p["down"]'),
    ),
    *_planted(
        "doubled in the forward",
        Cause.REPEATED_SUM,
        ("blocks", "s0 = y0 + ", 'y0 = self.all_reduce(y0, over="model")\n        s0 = y0 + '),
        ("blocks-uneven", "s0 = y0 + ", 's0 = self.all_reduce(y0, over="model") + '),
        ("plane", "return y + b1", 'return self.all_reduce(y, over="col") + b1'),
        ("layer", 'y = sh.all_reduce(y, "f")', 'y = sh.all_reduce(sh.all_reduce(y, "f"), "f")'),
    ),
    *_planted(
        "a mean in the forward",
        Cause.MEAN,
        ("blocks", 'y0 = self.all_reduce(p0, over="model")', 'y0 = self.all_reduce(p0, "mean", over="model")'),
        (
            "plane",
            'z = self.all_reduce(x @ w0, over="row") + b0',
            'z = self.all_reduce(x @ w0, over="row") / self.mesh.axes["row"] + b0',
        ),
        (
            "sequence",
            'mean = self.all_reduce(h.sum(axis=1), over="context") / S',
            'mean = self.all_reduce(h.sum(axis=1), "mean", over="context") / S',
        ),
    ),
    *_planted(
        "a maximum in the forward",
        Cause.OTHER_REDUCTION,
        ("blocks", 'y0 = self.all_reduce(p0, over="model")', 'y0 = self.all_reduce(p0, "max", over="model")'),
        (
            "plane",
            'z = self.all_reduce(x @ w0, over="row") + b0',
            'z = self.all_reduce(x @ w0, "max", over="row") + b0',
        ),
        ("plane", 'y = self.all_reduce(r @ w1, over="col")', 'y = self.all_reduce(r @ w1, "max", over="col")'),
    ),
    *_planted(
        "over the wrong axis in the forward",
        Cause.WRONG_AXIS,
        ("blocks", 'y0 = self.all_reduce(p0, over="model")', 'y0 = self.all_reduce(p0, over="data")'),
        ("plane", 'z = self.all_reduce(x @ w0, over="row") + b0', 'z = self.all_reduce(x @ w0, over="col") + b0'),
    ),
    *_planted(
        "a bias added before the sum",
        Cause.BIAS_IN_SUM,
        (
            "blocks",
            'p0 = h0 @ w["w1"]\n        y0 = self.all_reduce(p0, over="model")\n        s0 = y0 + w["b1"]',
            'p0 = h0 @ w["w1"] + w["b1"]\n        s0 = self.all_reduce(p0, over="model")',
        ),
        (
            "blocks",
            'self.all_reduce(h2 @ w["w3"], over="model") + w["b3"]',
            'self.all_reduce(h2 @ w["w3"] + w["b3"], over="model")',
        ),
        ("plane", 'z = self.all_reduce(x @ w0, over="row") + b0', 'z = self.all_reduce(x @ w0 + b0, over="row")'),
        (
            "layer",
            'y = h @ p["down"]\n        y = sh.all_reduce(y, "f")\n        return x + y + p["shift"]',
            'y = h @ p["down"] + p["shift"]\n        y = sh.all_reduce(y, "f")\n        return x + y',
        ),
    ),
    *_planted(
        "neighbours' blocks swapped",
        Cause.OTHER_BLOCK,
        (
            "sequence",
            'whole = self.all_gather(h, axis=1, over="context")',
            'whole = np.roll(self.all_gather(h, axis=1, over="context"), h.shape[1], axis=1)',
        ),
        (
            "sequence",
            'dh = self.reduce_scatter(dwhole, axis=1, over="context")',
            'dh = self.reduce_scatter(np.roll(dwhole, h.shape[1], axis=1), axis=1, over="context")',
        ),
        (
            "blocks",
            "z2 = self.up(h1",
            'if self.mesh.axes["model"] > 1:\n'
            '            self.send(1 - self.mesh.coordinates["model"], h0, over="model")\n'
            '            h0 = self.receive(1 - self.mesh.coordinates["model"], over="model")\n'
            "        z2 = self.up(h1",
            'h0 = self.receive(1 - self.mesh.coordinates["model"]',
        ),
        (
            "sequence",
            "return a @ v",
            'if self.mesh.axes["context"] > 1:\n'
            "            y = self.all_gather(a @ v, axis=0, over='context').reshape(2, *a.shape)\n"
            '            return y[1 - self.mesh.coordinates["context"]]\n'
            "        return a @ v",
            'return y[1 - self.mesh.coordinates["context"]]',
        ),
    ),
    *_planted(
        "an all_reduce too many",
        Cause.EXTRA_SUM,
        ("blocks", "dz2 = dh2 * (z2 > 0)", 'dz2 = self.all_reduce(dh2 * (z2 > 0), over="model")'),
        ("blocks", 'g["b0"] = dz0', 'dz0 = self.all_reduce(dz0, over="model")\n        g["b0"] = dz0'),
        ("plane", "dz = dr * (z > 0)", 'dz = self.all_reduce(dr * (z > 0), over="col")'),
        ("blocks", "h2 = np.maximum(z2, 0)", 'h2 = self.all_reduce(np.maximum(z2, 0), over="model")'),
    ),
    *_planted(
        "missing inside a helper",
        Cause.MISSING_SUM,
        ("blocks", 'dx = dz @ w.T\n        dx = self.all_reduce(dx, over="model")', "dx = dz @ w.T"),
        ("blocks-uneven", 'dx = dz @ w.T\n        dx = self.all_reduce(dx, over="model")', "dx = dz @ w.T"),
    ),
    *_planted(
        "missing in the backward",
        Cause.MISSING_SUM,
        (
            "plane",
            'self.start_all_reduce(dy @ w1.T, over="row")',
            "self.start_all_reduce(dy @ w1.T, over=())",
            "dr = summing",
        ),
        ("sequence", '        dw = self.all_reduce(dw, over="context")\n', "", "dw = np.einsum"),
        (
            "blocks",
            'g = {name: self.all_reduce(each, over="data") for name, each in g.items()}',
            'g = {name: each if name == "w2" else self.all_reduce(each, over="data") for name, each in g.items()}',
            'g["w2"] =',
        ),
        ("layer", 'dx = dz @ p["up"].T\n        dx = sh.all_reduce(dx, "f")', 'dx = dz @ p["up"].T'),
    ),
    *_planted(
        "doubled in the backward",
        Cause.REPEATED_SUM,
        ("blocks", 'g["w2"] = h1.T @ dz2', 'g["w2"] = self.all_reduce(h1.T @ dz2, over="data")', "g = {name: "),
        (
            "sequence",
            '        return {"w": dw',
            '        dv = self.all_reduce(dv, over="context")\n        return {"w": dw',
        ),
        ("layer", 'dx = sh.all_reduce(dx, "f")', 'dx = sh.all_reduce(sh.all_reduce(dx, "f"), "f")'),
        ("blocks", "ds0 = dh1 * (1", 'dh1 = self.all_reduce(dh1, over="model")\n        ds0 = dh1 * (1'),
    ),
    *_planted(
        "a mean in the backward",
        Cause.MEAN,
        ("sequence", 'dv = self.all_reduce(dv, over="context")', 'dv = self.all_reduce(dv, "mean", over="context")'),
        ("blocks", 'dx = self.all_reduce(dx, over="model")', 'dx = self.all_reduce(dx, "mean", over="model")'),
        (
            "plane",
            'self.start_all_reduce(dy @ w1.T, over="row")',
            'self.start_all_reduce(dy @ w1.T, "mean", over="row")',
            "dr = summing",
        ),
    ),
    *_planted(
        "a maximum in the backward",
        Cause.OTHER_REDUCTION,
        ("sequence", 'dv = self.all_reduce(dv, over="context")', 'dv = self.all_reduce(dv, "max", over="context")'),
        ("blocks", 'dx = self.all_reduce(dx, over="model")', 'dx = self.all_reduce(dx, "max", over="model")'),
    ),
    *_planted(
        "over the wrong axis in the backward",
        Cause.WRONG_AXIS,
        ("blocks", 'dx = self.all_reduce(dx, over="model")', 'dx = self.all_reduce(dx, over="data")'),
        (
            "plane",
            'self.start_all_reduce(dy @ w1.T, over="row")',
            'self.start_all_reduce(dy @ w1.T, over="col")',
            "dr = summing",
        ),
    ),
    *_planted(
        "sign and scale in the forward, of some ranks or by what they have",
        Cause.FACTOR,
        ("blocks", "h2 = np.maximum(z2, 0)", "h2 = np.maximum(z2, 0) / z2.shape[1] * 8"),
        ("plane", "r = np.maximum(z, 0)", 'r = np.maximum(z, 0) * (-1 if self.mesh.axes["col"] > 1 else 1)'),
    ),
    *_planted(
        "sign, on one device, too",
        Cause.FACTOR,
        ("blocks", "dh2 = dy2 @", "dh2 = -dy2 @"),
        ("plane", "dw1 = r.T @ dy", "dw1 = -r.T @ dy"),
    ),
    *_planted(
        "scale, on one device, too",
        Cause.FACTOR,
        ("blocks", 'g["w1"] = h0.T @ ds0', 'g["w1"] = h0.T @ ds0 / len(x)'),
        ("sequence", "dm = da * (1 - a * a)", "dm = 2 * da * (1 - a * a)"),
        ("layer", 'dh = dy @ p["down"].T', 'dh = 0.5 * dy @ p["down"].T'),
    ),
    *_planted(
        "zero",
        Cause.ZERO,
        ("blocks", 'g["w1"] = h0.T @ ds0', 'g["w1"] = np.zeros_like(w["w1"])'),
        ("plane", "dz = dr * (z > 0)", "dz = np.zeros_like(z)"),
        (
            "sequence",
            "        return a @ v",
            '        if self.mesh.coordinates["context"]:\n            a = np.zeros_like(a)\n        return a @ v',
            "a = np.zeros_like(a)",
        ),
    ),
    *_planted(
        "transposed, square",
        Cause.TRANSPOSED,
        ("blocks", 'g["w4"] = h4.T @ dy', 'g["w4"] = dy.T @ h4'),
        ("sequence", 'dv = np.einsum("bsd,bse->de", a, dy)', 'dv = np.einsum("bsd,bse->ed", a, dy)'),
    ),
    *_planted(
        "transposed, not square",
        Cause.TRANSPOSED,
        ("blocks", 'g["w1"] = h0.T @ ds0', 'g["w1"] = ds0.T @ h0'),
        ("plane", "dw1 = r.T @ dy", "dw1 = dy.T @ r", "return {"),
    ),
    *_planted(
        "no gradient",
        Cause.ABSENT,
        ("blocks", '        g["b1"] = ds0.sum(axis=0)\n', "", "return g"),
        ("plane", '"b0": dz.sum(axis=0), ', "", 'return {"w0"'),
    ),
    *_planted(
        "no mask in the backward",
        Cause.MISSING_MASK,
        ("blocks", "dz2 = dh2 * (z2 > 0)", "dz2 = dh2"),
        ("plane", "dz = dr * (z > 0)", "dz = dr"),
        ("blocks", "ds0 = dh1 * (1 - h1 * h1)", "ds0 = dh1"),
        ("layer", "dz = dh * (z > 0)", "dz = dh"),
    ),
    *_planted(
        "no mask in the forward",
        Cause.MISSING_MASK,
        ("blocks", "h2 = np.maximum(z2, 0)", "h2 = z2"),
        ("plane", "r = np.maximum(z, 0)", "r = z"),
    ),
]
