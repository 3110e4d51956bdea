"""Optimizers of the arrays that an engine owns on this rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import cos, pi, ulp
from typing import Any

from spmd_engine.arguments import checked
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.precision import is_half, rounded, widened
from spmd_engine.arrays.updates import adamw, momentum_sgd
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.offload.array import streamed
from spmd_engine.errors import UsageError

State = dict[str, dict[str, Array]]  # kind ("mean") -> key of ``owned`` -> array
MASTER = "master"  #: the kind of state that an optimizer keeps of 16-bit parameters: what it updates in their place


class Optimizer:
    """Updates ``engine.owned`` in place from gradients like it. ``state`` holds arrays like it, by kind.

    Of 16-bit floats it updates masters (``MASTER``), and rounds them to ``engine.owned``.

    ``last`` are the numbers of the last update, with which ``repeat`` makes it again on a copy.
    """

    kinds: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.state: State = {}
        self.last: dict[str, Any] = {}

    def prepare(self, engine: ShardedEngine) -> None:
        """Make the state, all zeros, if there is none yet."""
        for kind in self.kinds:
            arrays = self.state.setdefault(kind, {})
            for key, array in engine.owned.items():
                if key not in arrays:
                    arrays[key] = engine.new_state(array)
        for key, array in engine.owned.items():
            if is_half(array.dtype) and key not in self.state.setdefault(MASTER, {}):
                self.state[MASTER][key] = widened(array)

    def update(
        self, engine: ShardedEngine, gradients: Mapping[str, Array], *, step: int, rate: float, scale: float = 1.0
    ) -> None:
        """Make step number ``step`` (from 1) with learning rate ``rate``; gradients are multiplied by ``scale``."""
        self.prepare(engine)
        self.last = {"step": step, "rate": float(rate), "scale": float(scale)}
        if set(gradients) != set(engine.owned):
            differ = ", ".join(sorted(set(gradients) ^ set(engine.owned)))
            raise UsageError(f"gradients and parameters differ in names: {differ}; backward must return all of them")
        keys, flat, sets, masters = list(engine.owned), [], [], self.state.get(MASTER, {})
        for key, parameter in engine.owned.items():
            if gradients[key].shape != parameter.shape:
                raise UsageError(f"{key}: gradient of shape {gradients[key].shape}, parameter of {parameter.shape}")
            flat.append(widened(backend_of(gradients[key]).xp.ascontiguousarray(gradients[key])).reshape(-1))
            sets.append([_flat(masters.get(key, parameter)), *(_flat(self.state[kind][key]) for kind in self.kinds)])
        for number, part, (parameter, *state) in streamed(sets):
            arrays = parameter, flat[number][part], *state
            self._update(*arrays, **self.last, decays=engine.decays(keys[number]))
        for key, master in masters.items():
            rounded(master, engine.owned[key].dtype, engine.owned[key])
        engine.after_update()

    def repeat(self, numbers: Mapping[str, Any], *arrays: Array, decays: bool) -> None:
        """Make the update with ``numbers``, a ``last``, in place on contiguous copies of one shape: of a parameter, its
        gradient, and its states in the order of ``kinds``."""
        self._update(*map(_flat, arrays), **numbers, decays=decays)

    def _update(self, *arrays: Array, step: int, rate: float, scale: float, decays: bool) -> None:
        raise TypeError(f"{type(self).__name__} must define _update")


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), for the keys that the engine ``decays``."""

    kinds = ("mean", "square")

    @checked(
        {"betas": (0, 1), "epsilon": ulp(0), "weight_decay": 0},
        betas="two numbers from 0 and below 1, as (0.9, 0.95)",
        epsilon="a number above 0",
    )
    def __init__(
        self, betas: tuple[float, float] = (0.9, 0.95), epsilon: float = 1e-8, weight_decay: float = 0.1
    ) -> None:
        super().__init__()
        self.betas, self.epsilon, self.weight_decay = betas, epsilon, weight_decay

    def _update(self, *arrays, step, rate, scale, decays):
        decay = self.weight_decay if decays else 0.0
        adamw(*arrays, step=step, rate=rate, betas=self.betas, epsilon=self.epsilon, decay=decay, scale=scale)


class SGD(Optimizer):
    """Stochastic gradient descent, with momentum if it is not 0."""

    @checked({"momentum": (0, 1), "weight_decay": 0})
    def __init__(self, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__()
        self.momentum, self.weight_decay = momentum, weight_decay
        self.kinds = ("velocity",) if momentum else ()

    def _update(self, p, g, velocity=None, *, step, rate, scale, decays):
        decay = self.weight_decay if decays else 0.0
        momentum_sgd(p, g, velocity, rate=rate, momentum=self.momentum, decay=decay, scale=scale)


#: By name: functions that make an optimizer with the options of a job that sets none.
OPTIMIZERS = {"adamw": AdamW, "sgd": partial(SGD, momentum=0.9)}


@checked({"peak": 0, "steps": 0, "warmup": 0, "floor": 0})
@dataclass(frozen=True)
class WarmupCosine:
    """The learning rate: linear up to ``peak`` over ``warmup`` steps, then a cosine down to ``floor`` of it, where it
    stays after ``steps``."""

    peak: float
    steps: float  #: until the floor, with the warmup
    warmup: float = 0
    floor: float = 0.1  #: fraction of the peak at the end

    def __post_init__(self) -> None:
        if self.floor > 1:
            raise UsageError(f"WarmupCosine: floor is {self.floor}; give a fraction of the peak, at most 1")
        if self.warmup > self.steps:
            raise UsageError(f"WarmupCosine: warmup is {self.warmup}; give at most the number of steps, {self.steps}")

    def __call__(self, step: int) -> float:
        """The rate of step number ``step``, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.peak * (self.floor + (1.0 - self.floor) * 0.5 * (1.0 + cos(pi * done)))


def _flat(x: Array) -> Array:
    """A flat view, not a copy, because the update must change the array itself."""
    if not x.flags.c_contiguous:
        raise UsageError(f"a parameter of shape {x.shape} is not contiguous; store it with numpy.ascontiguousarray")
    return x.reshape(-1)
