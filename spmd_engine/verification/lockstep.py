"""Trains a sharded engine and one on a single device in lockstep, until they disagree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np

from spmd_engine.arguments import checked
from spmd_engine.arrays.backend import Array
from spmd_engine.comm.agreement.rank_zero import gather_json, on_rank_zero
from spmd_engine.engine import Batch, ShardedEngine
from spmd_engine.engine.definition import Loss
from spmd_engine.engine.optimizers import AdamW, Optimizer
from spmd_engine.errors import NotFiniteError, UsageError
from spmd_engine.verification.comparison import ComparedTensor, LocalPart, Measured, examine, from_first, measure
from spmd_engine.verification.diagnosis import INITIAL, PARAMETER
from spmd_engine.verification.finite_differences import check_gradients
from spmd_engine.verification.probe import INPUT_GRADIENT, OUTPUT, OUTPUT_GRADIENT, ProbePoint, probe
from spmd_engine.verification.replay import explain
from spmd_engine.verification.report import Cause, Disagreement, Distances, GradientCheck, Report

GRADIENT, LOSS, NORM = "gradient", "loss", "squared norm of the gradient"
#: By dtype, relative to a tensor's scale: larger than rounding errors of a few steps, smaller than mistakes.
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
#: A mesh that rounds elsewhere makes at most twice as many roundings of a tensor's terms as one device, so that its own
#: distance from exact values is at most about twice as large, and the distance between both three times.
ROUNDINGS = 3.0


@checked(
    {"steps": 0, "rate": 0, "tolerance": 0},
    ["batches"],  # for no steps
    engine="the engine of all ranks, and its reference on rank 0",
    batches="a function of engine and step",
    optimizer="a function that makes an Optimizer, as AdamW",
)
def verify(
    engine: ShardedEngine,
    reference: ShardedEngine | None,
    batches: Callable[[ShardedEngine, int], Batch],
    *,
    steps: int = 3,
    optimizer: Callable[[], Optimizer] = AdamW,
    rate: float = 1e-3,
    tolerance: float | None = None,
    loss: Callable[[ShardedEngine], Loss | None] = lambda engine: None,
    finite_differences: bool = True,
    on_gradients: Callable[[GradientCheck], None] = lambda check: None,
    on_step: Callable[[Distances], None] = lambda distances: None,
    exact: ShardedEngine | None = None,
) -> Report:
    """Train ``engine`` on all ranks and ``reference`` on rank 0 alone, and compare everything they compute.

    ``reference`` is an engine with the same parameters, by names and values, on a mesh of one rank
    (``mesh_of_one``); only rank 0 needs it. ``batches(engine, step)`` returns the same global batch for both engines,
    sharded for the engine (``make_batch``), for steps from 0. ``loss(engine)`` is the loss function of an engine; None:
    the engine's own.

    The first comparison is of all ranks' copies of the parameters. Unless ``finite_differences`` is False, the
    reference's gradients are then compared with finite differences of its loss (``check_gradients``); only this finds
    mistakes that one device makes, too. Every step compares outputs, the loss, gradients and their norm, and after the
    update the parameters. A tensor disagrees if an element differs by more than ``tolerance`` times the largest one
    (1e-9 in float64, 1e-4 in float32). A disagreement ends the verification: the report has the first such tensor in
    the order of computation (forwards layer by layer, then backwards) and its explanation. Both engines are trained.
    Collective; the report is the same on every rank.

    Engines of 16-bit floats are to be made and verified inside ``emulated()``: sums are then float64, and tensors agree
    as those of float64 do, unless the mesh rounds where one device does not: where ranks sum 16-bit floats. Then
    ``exact``, which rank 0 needs, bounds the differences: it is the reference in float64, which is trained, too. A
    tensor may differ from the reference by ``ROUNDINGS`` times as much as rounding takes the reference away from it.

    Raises NotFiniteError if the reference diverges, UsageError if the two cannot be compared.
    """
    pair = Pair(engine, reference, batches, loss, tolerance, exact)
    optimizers = optimizer(), optimizer(), optimizer()
    agreed: list[Distances] = []
    _, disagreement = pair.compare(pair.parameters(INITIAL), step=0)
    check = None
    if finite_differences and steps and disagreement is None:
        check = pair.check_gradients()
        if check.wrong:
            return Report(agreed, pair.tolerance, gradients=check)
        on_gradients(check)
    for step in range(1, steps + 1):
        if disagreement is not None:
            break
        computed, disagreement = _step(pair, step, steps)
        if disagreement is not None:
            break
        pair.update(*optimizers, step, rate)
        updated, disagreement = pair.compare(pair.parameters(PARAMETER), step)
        if disagreement is None:
            agreed.append(_distances(step, pair.expected_loss, computed, updated))
            on_step(agreed[-1])
    return Report(agreed, pair.tolerance, disagreement, check, pair.rounded_in(), tuple(pair.differing))


def _step(pair: Pair, step: int, steps: int) -> tuple[list[Measured], Disagreement | None]:
    """Compute a step up to the gradients; return distances, and the first disagreement if there is one.

    Where ranks sum 16-bit floats, the rounding of a sum near 0 can turn a ReLU on or off, and then no bound holds for
    the gradients of that sample. So the step is repeated with the batches of the other steps; a disagreement is
    returned only if all batches disagree.
    """
    first = None
    for number in dict.fromkeys([step, *range(1, steps + 1)]):
        pair.forward_and_backward(number)
        computed, disagreement = pair.compare(pair.computed(), step)
        if disagreement is None or not pair.rounded_in():
            return computed, disagreement
        first = first or (computed, disagreement)
    assert first is not None
    return first


def _distances(step: int, loss: float, computed: Sequence[Measured], updated: Sequence[Measured]) -> Distances:
    forward = [measured.distance for measured in computed if measured.tensor.kind in (OUTPUT, LOSS)]
    backward = [measured.distance for measured in computed if measured.tensor.kind not in (OUTPUT, LOSS)]
    return Distances(step, loss, max(forward), max(backward), max(measured.distance for measured in updated))


class Pair:
    """The two engines and their last computed tensors; see ``verify``."""

    def __init__(
        self,
        engine: ShardedEngine,
        reference: ShardedEngine | None,
        batches: Callable[[ShardedEngine, int], Batch],
        loss: Callable[[ShardedEngine], Loss | None] = lambda engine: None,
        tolerance: float | None = None,
        exact: ShardedEngine | None = None,
    ) -> None:
        self.engine, self.batches, self.loss_of = engine, batches, loss
        self.reference: Any = reference  # an engine on rank 0; not used on other ranks
        for compared in (engine, reference):
            if compared is not None:  # only rank 0 has the reference
                compared.checks_replicas = compared.checks_gradients = False  # verify checks and explains both
        self.world = engine.group()
        self._on_first(lambda: _check_names(engine, self.reference))
        self.probe, self.probe_alone = probe(engine), self._on_first(lambda: probe(self.reference))
        self.tolerance = tolerance or from_first(self.world, self._on_first(lambda: _tolerance(self.reference)))
        self.micro_batches = 1
        #: on rank 0, the float64 engine compared with the reference
        self.of_rounding: Pair | None = exact and Pair(exact, reference, batches, loss, self.tolerance)
        self.differing: dict[str, None] = {}  #: tensors that differ, since the mesh rounds elsewhere, in order
        self.gradients_before: dict[str, Array] = {}
        self.parameters_before: dict[str, Array] = {}

    def _on_first(self, do: Callable[[], Any]) -> Any:
        """Return the result of ``do`` on rank 0, which has the reference; None on others. All raise its UsageError."""
        return on_rank_zero(self.world, do)

    def rounded_in(self) -> tuple[str, ...]:
        """The layers in which ranks have summed 16-bit floats, so that the mesh rounds elsewhere than one device.
        Collective."""
        ranks = gather_json(self.world, sorted({label for _, _, label in self.engine.ledger.rounded}), "verify")
        return tuple(dict.fromkeys(label for labels in ranks for label in labels))

    # --- steps of both -----------------------------------------------------------------------------------

    def check_gradients(self) -> GradientCheck:
        """Compare the reference's gradients with its loss. The reference's parameters are restored."""

        def check_reference() -> GradientCheck:
            reference = self.reference
            return check_gradients(reference, lambda: self.batches(reference, 0), self.loss_of(reference))

        return from_first(self.world, self._on_first(check_reference))

    def forward_and_backward(self, step: int) -> None:
        """Run step number ``step``, from 1, of both engines up to the gradients. Raises NotFiniteError."""

        def step_reference() -> float:
            batch = self.batches(self.reference, step - 1)
            return self.probe_alone.step(batch, self.loss_of(self.reference))

        batch = self.batches(self.engine, step - 1)
        self.micro_batches = len(batch.micro_batches)
        self.loss = self.probe.step(batch, self.loss_of(self.engine))
        self.expected_loss = from_first(self.world, self._on_first(step_reference))
        if not np.isfinite(self.expected_loss):
            raise NotFiniteError(f"step {step}: one device's loss is {self.expected_loss}; lower the learning rate")
        if self.of_rounding:
            self.of_rounding.forward_and_backward(step)

    def update(self, optimizer: Optimizer, alone: Optimizer, of_exact: Optimizer, step: int, rate: float) -> None:
        """Update both engines, and the exact one if any; keep copies of gradients, and of parameters from before."""
        self.gradients_before = {name: g.copy() for name, g in self.engine.named(self.engine.gradients).items()}
        self.parameters_before = {name: parameter.copy() for name, parameter in self.engine.parameters.items()}
        optimizer.update(self.engine, self.engine.gradients, step=step, rate=rate)
        self._on_first(lambda: alone.update(self.reference, self.reference.gradients, step=step, rate=rate))
        if self.of_rounding:
            exact = self.of_rounding.engine
            of_exact.update(exact, exact.gradients, step=step, rate=rate)

    # --- comparing ---------------------------------------------------------------------------------------

    def compare(self, tensors: Sequence[ComparedTensor], step: int) -> tuple[list[Measured], Disagreement | None]:
        """Return the distances and, if one is too large, the first disagreement.

        Arrays between layers are compared only if another tensor differs: they never differ alone.
        """
        between = OUTPUT, OUTPUT_GRADIENT, INPUT_GRADIENT
        at_once = [tensor for tensor in tensors if tensor.kind not in between or not tensor.layer]
        measured = measure(self.world, at_once)
        off = [measurement for measurement in measured if measurement.is_off(self.tolerance)]
        if not off:
            return measured, None
        limits: dict[str, float] = {}  # tensors that may differ by more, since the mesh rounds elsewhere
        if step and self.rounded_in():
            limits = self._bounds(step, computed=tensors[0].kind != PARAMETER)
            self.differing |= {_words(measurement.tensor): None for measurement in off if limits}

        def limit(measurement: Measured) -> float:
            return max(self.tolerance, limits.get(_key(measurement.tensor), 0.0))

        wrong = [measurement for measurement in measured if measurement.is_off(limit(measurement))]
        if not wrong:
            return measured, None
        measured_by_id = dict(zip(map(id, at_once), measured, strict=True))
        one_by_one = (measured_by_id.get(id(tensor)) or measure(self.world, [tensor])[0] for tensor in tensors)
        first = next(measurement for measurement in one_by_one if measurement.is_off(limit(measurement)))
        disagreement = examine(self.engine, first, limit(first), step=step, micro_batches=self.micro_batches)
        return measured, self._explain(disagreement, wrong)

    def _bounds(self, step: int, computed: bool) -> dict[str, float]:
        """How far a tensor may be off, relative to its scale, if only roundings differ: by the reference's distance
        from the exact values, of this tensor or of the median one of its kind, after an update of the furthest one. For
        the tensors that are ``computed``, or for the parameters. Collective."""

        def find() -> dict[str, float]:
            if self.of_rounding is None:  # only a compression rounds: the tolerance alone says by how much
                return {}
            tensors = self.of_rounding.computed() if computed else self.of_rounding.parameters(PARAMETER)
            measured = measure(self.of_rounding.world, tensors)
            if not computed:  # AdamW updates the smallest gradient, of either sign, as much as the largest
                most = max(measurement.most for measurement in measured)
                return {_key(measurement.tensor): ROUNDINGS * most / measurement.scale for measurement in measured}
            by_kind: dict[bool, list[float]] = {}
            for measurement in measured:
                by_kind.setdefault(measurement.tensor.kind in (OUTPUT, LOSS), []).append(measurement.distance)
            typical = np.median if step == 1 else max  # from the second on, parameters are those of unlike roundings
            of_kind = {kind: float(typical(distances)) for kind, distances in by_kind.items()}
            return {
                _key(measurement.tensor): ROUNDINGS
                * max(measurement.distance, of_kind[measurement.tensor.kind in (OUTPUT, LOSS)])
                for measurement in measured
            }

        return from_first(self.world, self._on_first(find))

    def _explain(self, disagreement: Disagreement, wrong: Sequence[Measured]) -> Disagreement:
        """Find the line of a user's function that causes a disagreement in a step, unless a line is known."""
        if disagreement.kind in (INITIAL, PARAMETER):
            return disagreement
        step = disagreement.step

        def repeat() -> list[str]:
            self.loss = self.probe.step(self.batches(self.engine, step - 1), self.loss_of(self.engine))
            measured = measure(self.world, self.computed())
            return [_key(measurement.tensor) for measurement in measured if measurement.is_off(self.tolerance)]

        def repeat_reference() -> None:
            self.probe_alone.step(self.batches(self.reference, step - 1), self.loss_of(self.reference))

        names = [_key(measurement.tensor) for measurement in wrong]
        is_explained = bool({finding.cause for finding in disagreement.findings} - {Cause.REPLICAS_DIFFER})
        lines = explain(self.engine, self.reference, repeat, repeat_reference, names, self.tolerance, is_explained)
        if is_explained and {finding.cause for finding in lines} == {Cause.FIRST}:
            return disagreement
        return replace(disagreement, findings=lines or disagreement.findings)

    def parameters(self, kind: str) -> list[ComparedTensor]:
        """Return all parameters, in the model's order."""

        def part(name: str) -> LocalPart | None:
            parameter, before = self.engine.parameters.get(name), self.parameters_before.get(name)
            index = self.engine.index(name)
            return None if parameter is None or index is None else LocalPart(parameter, index, before, base=before)

        def tensor(name: str) -> ComparedTensor:
            return ComparedTensor(
                kind, lambda: self.reference.parameters[name], lambda _: part(name), name, self._layer(name)
            )

        return list(map(tensor, self.engine.names))

    def computed(self) -> list[ComparedTensor]:
        """Return the tensors that forward and backward have computed, in the order of computation."""
        norm = float(self.engine.gradient_norm())
        norm_alone = self._on_first(lambda: float(self.reference.gradient_norm()))
        points = from_first(self.world, self._on_first(lambda: set(self.probe_alone.probed)))
        gradients: dict[str, list[ComparedTensor]] = {}  # by layer, in the order of the backward
        for tensor in reversed(self._gradients()):
            gradients.setdefault(self.probe.layer_of(tensor.name), []).append(tensor)
        layers = self.probe.layers
        tensors = [*self._probed_tensors(points, OUTPUT, layers), _number(LOSS, self.expected_loss, self.loss)]
        tensors += self._probed_tensors(points, OUTPUT_GRADIENT, layers)
        for layer in reversed(layers):
            layer_gradients, probed = gradients.get(layer, []), self._probed_tensors(points, INPUT_GRADIENT, [layer])
            # The gradients of a layer's parameters come last.
            tensors += [*probed, *layer_gradients] if layer else [*layer_gradients, *probed]
        return [*tensors, _number(NORM, norm_alone, norm, power=2)]

    def _probed_tensors(self, points: Set[ProbePoint], kind: str, layers: Sequence[str]) -> list[ComparedTensor]:
        """Return the probed arrays of some layers, by layer and then by micro-batch."""

        def tensor(point: ProbePoint) -> ComparedTensor:
            def expected() -> Array:
                return self.probe_alone.probed[point].array

            def part(shape: tuple[int, ...]) -> LocalPart | None:
                probed = self.probe.probed.get(point)
                return probed.part(shape) if probed else None

            return ComparedTensor(kind, expected, part, layer=point.layer, micro_batch=point.micro_batch)

        every = (ProbePoint(kind, layer, m) for layer in layers for m in range(self.micro_batches))
        return [tensor(point) for point in every if point in points]

    def _gradients(self) -> list[ComparedTensor]:
        gradients = self.engine.named(self.engine.gradients)
        expected = self._on_first(lambda: self.reference.named(self.reference.gradients))

        self._on_first(lambda: _check_gradients(expected, self.reference))
        _check_gradients(gradients, self.engine)

        def part(name: str) -> LocalPart | None:
            index = self.engine.owned_index(name)
            if name not in gradients or index is None:
                return None
            return LocalPart(gradients[name], index, self.gradients_before.get(name))

        def tensor(name: str) -> ComparedTensor:
            return ComparedTensor(GRADIENT, lambda: expected[name], lambda _: part(name), name, self._layer(name))

        return list(map(tensor, self.engine.names))

    def _layer(self, name: str) -> str:
        """Return the layer of a parameter: by the names of layers or, if there are none, by the parameter's name."""
        return self.probe.layer_of(name) or name.rpartition("/")[0]


def _number(kind: str, expected: Any, found: float, power: int = 1) -> ComparedTensor:
    """Return the tensor of a number that every rank should have."""
    return ComparedTensor(kind, lambda: np.array(expected**power), lambda shape: LocalPart(np.array(found**power), ()))


def _words(tensor: ComparedTensor) -> str:
    return f"{tensor.kind} of {tensor.name or tensor.layer}" if tensor.name or tensor.layer else tensor.kind


def _key(tensor: ComparedTensor) -> str:
    return f"{tensor.kind} {tensor.name} {tensor.micro_batch}"


def _check_names(engine: ShardedEngine, reference: ShardedEngine) -> None:
    if not engine.names:
        raise UsageError(
            f"{type(engine).__name__} names no parameters; an engine to verify must define its parameters and their "
            "shardings"
        )
    if set(engine.names) != set(reference.names):
        differ = ", ".join(sorted(set(engine.names) ^ set(reference.names)))
        raise UsageError(f"the engine and its reference differ in names of parameters: {differ}")


def _check_gradients(gradients: Mapping[str, Array], engine: ShardedEngine) -> None:
    """Raise UsageError for a gradient that is missing, or is not of its parameter's shape."""
    for name, parameter in engine.named(engine.owned).items():
        which = "one device" if engine.num_devices == 1 else f"rank {engine.device_id}"
        if name not in gradients:
            raise UsageError(f"on {which} backward returns no gradient of {name}; it returns: {', '.join(gradients)}")
        if (shape := gradients[name].shape) != parameter.shape:
            transposed = ": it is transposed" if shape == parameter.shape[::-1] else ""
            raise UsageError(
                f"on {which} the gradient of {name} has shape {shape}, the parameter {parameter.shape}{transposed}"
            )


def _tolerance(reference: ShardedEngine) -> float:
    return max(TOLERANCE.get(parameter.dtype.name, 1e-1) for parameter in reference.parameters.values())
