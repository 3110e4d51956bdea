"""The report of a verification: distances step by step and, if there is one, the first disagreement explained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from html import escape

from spmd_engine.pictures import html_table


class Cause(Enum):
    """The causes that may explain a disagreement."""

    MISSING_SUM = "missing sum"  #: ranks have terms of a sum that was not reduced
    REPEATED_SUM = "repeated sum"  #: a sum over equal terms, which were summed before
    MEAN = "mean for a sum"
    STALE = "stale"  #: the values are those of the step before
    ZERO = "zero"
    OTHER_REDUCTION = "other reduction"  #: a maximum, for example, instead of a sum
    WRONG_AXIS = "wrong axis"  #: a sum over the wrong ranks
    EXTRA_SUM = "extra sum"  #: a sum over different blocks
    BIAS_IN_SUM = "bias in sum"  #: every rank adds the bias before a sum over ranks
    OTHER_BLOCK = "other block"  #: the values are those that another rank should have
    TRANSPOSED = "transposed"
    MISSING_MASK = "missing mask"  #: or another missing factor of elements
    ABSENT = "absent"  #: the backward returns no such gradient
    FACTOR = "factor"  #: a multiple of the right values
    FIRST = "first difference"  #: the first array that differs, without an explanation
    MISSING_HALO = "missing halo"  #: only elements next to other ranks' shards differ
    REPLICAS_DIFFER = "replicas differ"  #: values differ between ranks that should have the same


@dataclass(frozen=True)
class Finding:
    """A cause that fits, with an explanation."""

    cause: Cause
    text: str  #: a sentence for people
    axes: tuple[str, ...] = ()  #: the mesh axes concerned
    factor: float = 1.0  #: found values divided by right ones


@dataclass(frozen=True)
class Element:
    """One wrong element."""

    index: tuple[int, ...]  #: in the global array
    rank: int  #: the rank with the element
    coordinates: Mapping[str, int]  #: the rank's position on the mesh
    found: float
    expected: float

    def __str__(self) -> str:
        where = ", ".join(f"{axis}={place}" for axis, place in self.coordinates.items())
        at = f"at [{', '.join(map(str, self.index))}] " if self.index else ""
        return f"{at}on rank {self.rank} ({where}): {self.found:.10g}, one device has {self.expected:.10g}"


@dataclass(frozen=True)
class Disagreement:
    """The first tensor, in order of computation, that differs from one device's, and its explanation."""

    step: int  #: from 1; 0: before the first
    kind: str  #: "output", "loss", "gradient", "parameter", ...
    name: str  #: the parameter; empty for other tensors
    layer: str  #: empty if the engine has no named layers
    micro_batch: int | None
    distance: float  #: the largest difference, relative to the tensor's scale
    ranks: tuple[int, ...]  #: the ranks with wrong elements
    first: Element  #: the first wrong element
    largest: Element
    findings: tuple[Finding, ...]

    @property
    def what(self) -> str:
        """The tensor in words: "gradient of block0/mlp/w0"."""
        of = "" if self.kind.endswith("parameter") else "of "
        which = f" {of}{self.name or self.layer}" if self.name or self.layer else ""
        part = f", micro-batch {self.micro_batch}" if self.micro_batch is not None else ""
        return self.kind + which + part

    def __str__(self) -> str:
        layer = f" (layer {self.layer})" if self.name and self.layer else ""
        on = ("rank " if len(self.ranks) == 1 else "ranks ") + ", ".join(map(str, self.ranks))
        lines = [
            f"step {self.step}: {self.what}{layer} differs on {on}, by {self.distance:.1e} of its scale",
            f"  first   {self.first}",
            f"  largest {self.largest}",
        ]
        causes = [finding.text for finding in self.findings] or ["none of the causes that are tried explains it"]
        return "\n".join([*lines, *(f"  {cause}" for cause in causes)])


@dataclass(frozen=True)
class Distances:
    """The largest differences of a step from one device's, by kind, relative to the scales of tensors."""

    step: int  #: from 1
    loss: float  #: one device's loss
    of_loss: float  #: that of the loss and, if they are compared, the outputs
    of_gradients: float
    of_parameters: float  #: after the update

    @property
    def largest(self) -> float:
        return max(self.of_loss, self.of_gradients, self.of_parameters)

    def __str__(self) -> str:
        distances = (self.of_loss, self.of_gradients, self.of_parameters)
        return f"{self.step:>4}  {self.loss:>10.6g}  " + "  ".join(f"{distance:>10.1e}" for distance in distances)


#: The headings of the columns of ``Distances``.
HEADING = f"{'step':>4}  {'loss':>10}  {'of loss':>10}  {'gradients':>10}  {'parameters':>10}"


@dataclass(frozen=True)
class Slope:
    """The slope of one device's loss along a random direction in one parameter, computed in two ways."""

    name: str  #: the parameter; empty: the outputs, for a check of the loss function alone
    backward: float  #: the gradient times the direction
    differences: float  #: by central differences of the loss
    distance: float  #: between the two, relative to their scale
    wrong: bool = False
    multiple: float | None = None  #: if wrong: the factor, if it is the same in all directions
    fault: str = ""  #: the reason why nothing can be compared: "has shape (5, 7), ..."

    def __str__(self) -> str:
        if self.fault:
            return f"gradient of {self.name} is wrong on one device, too: it {self.fault}"
        name, source = (f"gradient of {self.name}", "backward") if self.name else ("the loss function's gradient", "it")
        text = (
            f"{name} is wrong on one device, too: along a random direction the loss changes by "
            f"{self.differences:.10g} (finite differences), {source} says {self.backward:.10g}"
        )
        return text if self.multiple is None else f"{text}\n  it is {self.multiple:.4g} times what it should be"


@dataclass(frozen=True)
class GradientCheck:
    """The comparison of one device's gradients with finite differences of its loss."""

    slopes: Sequence[Slope] = ()  #: one for each parameter
    findings: tuple[Finding, ...] = ()  #: why gradients are wrong, and in which lines
    skipped: str = ""  #: the reason if nothing was compared

    @property
    def wrong(self) -> Sequence[Slope]:
        return [slope for slope in self.slopes if slope.wrong]

    def __str__(self) -> str:
        if self.skipped:
            return f"finite differences: left out, since {self.skipped}"
        if not self.wrong:
            worst = max((slope.distance for slope in self.slopes), default=0.0)
            return f"one device's gradients are those of finite differences, to {worst:.0e}"
        others = [slope.name for slope in self.wrong[1:]], [slope.name for slope in self.slopes if not slope.wrong]
        lines = [f"  {label}: {', '.join(names)}" for label, names in zip(("also wrong", "right"), others) if names]
        if layer := self.wrong[-1].name.rpartition("/")[0]:  # layers before it get their gradients from it
            lines.append(f"  {layer} is the last layer with a wrong one: look at its backward first")
        return "\n".join([str(self.wrong[0]), *lines, *(f"  {finding.text}" for finding in self.findings)])


@dataclass(frozen=True)
class Report:
    """The result of a verification; the same on every rank."""

    steps: Sequence[Distances]  #: the steps that agree
    tolerance: float
    disagreement: Disagreement | None = None
    gradients: GradientCheck | None = None  #: None: skipped, or not reached
    rounded_in: tuple[str, ...] = ()  #: layers in which ranks sum 16-bit floats: there the mesh rounds elsewhere
    differing: tuple[str, ...] = ()  #: tensors that differ for this reason, within its bound

    @property
    def agrees(self) -> bool:
        return self.disagreement is None and not (self.gradients and self.gradients.wrong)

    @property
    def distance(self) -> float:
        """The largest distance of all steps and kinds, including the disagreement."""
        off = [self.disagreement.distance] if self.disagreement else []
        return max([0.0, *(step.largest for step in self.steps), *off])

    @property
    def verdict(self) -> str:
        """``agrees to 3e-13``, or the disagreement, or the wrong gradients of one device."""
        if self.gradients and self.gradients.wrong:
            return str(self.gradients)
        if self.disagreement:
            return str(self.disagreement)
        if not self.differing:
            return f"agrees to {self.distance:.0e}"
        most = max(max(step.of_loss, step.of_gradients) for step in self.steps)
        updated = max(step.of_parameters for step in self.steps)
        sizes = "AdamW divides gradients by their size, so that a small one's error is one of a whole update"
        return (
            f"loss and gradients agree to {most:.0e}, within the bound of roundings that one device does not make: "
            f"ranks sum 16-bit floats in {_listed(self.rounded_in)}\n  so these differ: {_listed(self.differing)}"
            + (f"\n  parameters agree to {updated:.0e}: {sizes}" if updated > most else "")
        )

    def __str__(self) -> str:
        return "\n".join([HEADING, *map(str, self.steps), self.verdict])

    def _repr_html_(self) -> str:
        rows = [str(step).split() for step in self.steps]
        caption = "Largest differences from one device, relative to the scales of tensors"
        table = html_table(caption, ["step", "loss", "of loss", "of gradients", "of parameters"], rows)
        return f"{table}<pre>{escape(self.verdict)}</pre>"


def _listed(names: Sequence[str], most: int = 6) -> str:
    return ", ".join([*names[:most], *([f"and {len(names) - most} more"] if len(names) > most else [])])
