"""Checks of the layers that users write: their declarations, and what their methods return.

A layer class outside of this package has its methods wrapped when it is defined. So the checks are in one place for all
callers, and the package's own layers pay nothing for them.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import Signature, isfunction, signature
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from spmd_engine.arguments import bound
from spmd_engine.arrays.backend import CPU
from spmd_engine.comm.notation import nested_span
from spmd_engine.comm.pending import UNDER_WAY
from spmd_engine.errors import UsageError, described, is_array
from spmd_engine.layers.declarations import Activation, Buffer, Parameter, SideOutput
from spmd_engine.sharding.shards import Shards

if TYPE_CHECKING:
    from spmd_engine.layers.layer import ForwardContext, Layer

PACKAGE = __name__.partition(".")[0] + "."
DECLARED = {"parameters": Parameter, "buffers": Buffer, "side_outputs": SideOutput}


class Signed(ABCMeta):
    """The class of classes that are called in a way of their own: their signature is that of ``__init__``."""

    @property
    def __signature__(cls) -> Signature:
        if cls.__init__ is object.__init__:
            return Signature()
        found = signature(cls.__init__)
        return found.replace(parameters=[*found.parameters.values()][1:])


def is_checked(kind: type) -> bool:
    """Whether calls of a class are checked: it is defined outside of this package, and not ``costs_only``."""
    return not kind.__module__.startswith(PACKAGE) and not getattr(kind, "costs_only", False)


def guard(kind: type, method: str, check: Callable[..., None], keeps: int | None = None) -> None:
    """If a user's class defines this method, wrap it: ``check(self, returned, *args)`` checks what it returns.

    Only the method of the object's own class is checked, not those that it overrides and calls. A UsageError from the
    method is prefixed with its name; a call with wrong arguments raises a UsageError. So does a call that changes its
    argument number ``keeps`` in place, the first with an array of that shape.
    """
    wrapped = vars(kind).get(method)
    if not is_checked(kind) or not isfunction(wrapped):
        return

    @wraps(wrapped)
    def guarded(self: Any, *args: Any, **options: Any) -> Any:
        before = _copy_at_first(self, method, args[0], args[keeps]) if keeps and len(args) > keeps else None
        try:
            returned = wrapped(self, *args, **options)
        except UsageError as error:
            if not str(error).startswith(f"{type(self).__name__}."):
                error.args = (f"{name_of_call(self, method, *args)}: {error}",)
            raise
        except TypeError as error:
            if "mappingproxy" in str(error):
                name = name_of_call(self, method, *args)
                raise UsageError(f"{name}: {error}; assign a dict first, as in self.parameters = {{}}") from error
            bound(name_of_call(self, method, *args), wrapped, (self, *args), options, _original(kind, method))
            raise
        if before is not None and keeps and before.tobytes() != args[keeps].tobytes():
            changed = [*signature(wrapped).parameters][keeps + 1]
            raise UsageError(
                f"{name_of_call(self, method, *args)} changes its argument {changed} in place, which other layers use, "
                "too: compute into a new array"
            )
        if getattr(type(self), method) is guarded:
            check(self, returned, *args)
        return returned

    setattr(kind, method, guarded)


def _copy_at_first(layer: Any, method: str, sh: Shards, x: Any) -> Any:
    """A copy of ``x`` in the first call with such an array; else, and for arrays without values, None."""
    key = id(layer), method, getattr(x, "shape", None), "before"
    if not isinstance(x, CPU.xp.ndarray) or key in sh.checked:
        return None
    sh.checked.add(key)
    return x.copy()


def _original(kind: type, method: str) -> Callable | None:
    """The method of this package that a user's class overrides."""
    bases = (vars(base) for base in kind.__mro__ if not is_checked(base))
    return next((base[method] for base in bases if method in base), None)


def name_of_call(owner: Any, method: str, *args: Any) -> str:
    """The name of a user's method in messages: its class, and the layer's name in the model if it has one."""
    label = getattr(args[0], "label", "") if args else ""
    return f"{type(owner).__name__}.{method}" + (f" of {label}" if label else "")


def check_declarations(layer: Layer) -> None:
    """Raise UsageError if a layer, or one inside of it, has invalid sizes, or a user's other invalid declarations."""
    for value in vars(layer).values():
        for part in value if isinstance(value, (list, tuple)) else (value,):
            inner: Any = part[1] if isinstance(part, tuple) and len(part) == 2 else part
            if hasattr(inner, "backward_input"):
                check_declarations(inner)
    kind = type(layer)
    known = getattr(layer, "sizes", {})  # parts of the package's layers have none
    if not isinstance(known, Mapping) or not all(_is_size(size) and size for size in known.values()):
        raise UsageError(
            f"{kind.__name__}.sizes is {known!r}: give each letter a whole number from 1, as in {{'d': 24}}"
        )
    if not is_checked(kind):
        return
    for field in ("inputs", "outputs"):
        _check_type(layer, field, getattr(layer, field), Activation, 'Activation("b s d")')
    for field, entry_type in DECLARED.items():
        declared = getattr(layer, field)
        if not isinstance(declared, Mapping):
            raise UsageError(f"{kind.__name__}.{field} is a {type(declared).__name__}: make it a dict of names")
        for name, entry in declared.items():
            _check_type(layer, f"{field}[{name!r}]", entry, entry_type, f'{entry_type.__name__}("d")')
            missing = [x for x in entry.dims.split() if x not in layer.sizes]
            if missing and getattr(entry, "shape", None) is None:
                sizes = ", ".join(f"{letter}={size}" for letter, size in layer.sizes.items()) or "none"
                raise UsageError(
                    f'{kind.__name__}.{field}[{name!r}] has dims "{entry.dims}", but sizes has no '
                    f"{', '.join(missing)}: add it (sizes has: {sizes})"
                )


def check_sizes(layers: Iterable[tuple[str, Layer]], of: str = "") -> None:
    """Raise UsageError if a layer makes a dim of another size than the next one takes, where both are known."""
    for (before, left), (after, right) in pairwise(layers):
        made, taken = left.outputs.dims.split(), right.inputs.dims.split()
        for out, into in zip(made, taken, strict=True) if len(made) == len(taken) else ():
            size, expected = left.output_sizes.get(out), right.input_sizes.get(into)
            if None not in (size, expected) and size != expected:
                maker, taker = (f"{name} ({type(x).__name__})".strip() for name, x in ((before, left), (after, right)))
                raise UsageError(f"{of}{maker} makes {out} of size {size}, but {taker} takes {into} of {expected}")


def _check_type(layer: Layer, field: str, value: Any, kind: type, example: str) -> None:
    if not isinstance(value, kind):
        raise UsageError(f"{type(layer).__name__}.{field} is a {type(value).__name__}: make it a {example}")


def _is_size(size: Any) -> bool:
    return hasattr(size, "__index__") and size >= 0  # a text has none


def check_forward(layer: Layer, returned: Any, sh: Shards, p: Any, x: Any, ctx: ForwardContext) -> None:
    """Raise UsageError unless a forward returned outputs as declared, its saved values and, perhaps, an Extra."""
    name = name_of_call(layer, "forward", sh)
    if not isinstance(returned, (tuple, list)) or len(returned) not in (2, 3):
        raise UsageError(
            f"{name} returned {described(returned)}; return (outputs, what the backward needs), and an Extra if any"
        )
    y = returned[0]
    key = _key(layer, "forward", y, x, ctx.wanted is None)
    if key not in sh.checked:
        _check_activation(name, "outputs", y, layer.outputs, layer.sizes, sh)
        if ctx.wanted is None:
            _check_like(name, "outputs", y, layer.outputs, "inputs", x, layer.inputs, sh)
        sh.checked.add(key)
    extra = returned[2] if len(returned) == 3 else None
    if extra is not None and not hasattr(extra, "decided"):
        raise UsageError(f"{name} returned {described(extra)} as the third value; return an Extra, or two values")
    outputs = {} if extra is None else extra.outputs
    _check_extra(name, "outputs", outputs, layer, layer.side_outputs, "side_outputs", sh)
    _check_extra(name, "updates", {} if extra is None else extra.updates, layer, layer.buffers, "buffers", sh)
    losses = [loss for loss, output in layer.side_outputs.items() if output.loss] if ctx.training else []
    if missing := [loss for loss in losses if loss not in outputs]:
        raise UsageError(
            f"{name}: the loss {missing[0]!r} of side_outputs is missing; return Extra(outputs={{{missing[0]!r}: ...}})"
        )


def check_backward_input(layer: Layer, returned: Any, sh: Shards, p: Any, saved: Any, dy: Any, *side: Any) -> None:
    """Raise UsageError unless a backward returned an input gradient as declared, and what backward_weight needs."""
    name = name_of_call(layer, "backward_input", sh)
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        raise UsageError(
            f"{name} returned {described(returned)}; return (the inputs' gradient, what backward_weight needs)"
        )
    dx = returned[0]
    if isinstance(dx, UNDER_WAY) or (dx is None and sh.takes_data):  # a value under way has no shape yet
        return
    key = _key(layer, "backward", dx, dy)
    if key not in sh.checked:
        _check_activation(name, "gradient of the inputs", dx, layer.inputs, layer.sizes, sh)
        _check_like(name, "gradient of the inputs", dx, layer.inputs, "gradient of the outputs", dy, layer.outputs, sh)
        sh.checked.add(key)


def check_backward_weight(layer: Layer, returned: Any, sh: Shards, rest: Any, g: Any) -> None:
    """Raise UsageError unless a backward added to the gradient of each parameter that this rank has."""
    name = name_of_call(layer, "backward_weight", sh)
    if returned is not None:
        raise UsageError(f"{name} returned {described(returned)}; add gradients to g instead, as by g.add(name, array)")
    names = [key for key, parameter in layer.parameters.items() if parameter.element is None]
    if names and (untouched := g.untouched(names)):
        raise UsageError(
            f"{name} added nothing to the gradient of {', '.join(untouched)}: add g.einsum or g.add for each parameter"
        )


def _key(layer: Layer, method: str, x: Any, y: Any, *more: Any) -> Any:
    """The key of arrays with these shapes in ``Shards.checked``; None if ``x`` is not an array."""
    return (id(layer), method, x.shape, x.dtype, y.shape, y.dtype, *more) if is_array(x) else None


def _check_activation(name: str, role: str, x: Any, declared: Activation, sizes: Mapping[str, int], sh: Shards) -> None:
    """Raise UsageError unless ``x`` has the declared letters, with their sizes on this rank where they are known."""
    letters = declared.dims.split()
    if not is_array(x):
        raise UsageError(f"{name}: {role} must be an array [{declared.dims}], not {described(x)}")
    if len(x.shape) != len(letters):
        raise UsageError(
            f"{name}: {role} of shape {tuple(x.shape)}, but [{declared.dims}] is declared; return that, or declare "
            'in the class what it is: inputs = Activation("..."), outputs = Activation("...")'
        )
    for letter, length in zip(letters, x.shape, strict=True):
        if letter not in sizes:
            continue
        expected = sizes[letter]
        if letter not in declared.whole and (axes := sh.layout.axes(letter, declared.where)):
            part = nested_span(expected, axes, sh.mesh.axes, sh.mesh.coordinates, sh.layout.weights(letter))
            expected = part.stop - part.start
        if length != expected:
            raise UsageError(
                f"{name}: {role} [{declared.dims}] of shape {tuple(x.shape)}, but {letter} is {expected} on this rank"
            )


def _check_like(
    name: str, role: str, x: Any, declared: Activation, other: str, y: Any, y_declared: Activation, sh: Shards
) -> None:
    """Raise UsageError unless ``x`` has the samples, positions and precision of ``y``."""
    letters, others = declared.dims.split(), y_declared.dims.split()
    if len(y.shape) != len(others):
        return
    for letter in "bs":
        if letter not in letters or letter not in others:
            continue
        length, expected = x.shape[letters.index(letter)], y.shape[others.index(letter)]
        if length != expected and sh.layout.axes(letter, declared.where) == sh.layout.axes(letter, y_declared.where):
            raise UsageError(
                f"{name}: {role} [{declared.dims}] of shape {tuple(x.shape)}, but {letter} is {expected} in {other} "
                f"of shape {tuple(y.shape)}; a dim of another length needs another letter"
            )
    if x.dtype.kind == y.dtype.kind == "f" and x.dtype.itemsize > y.dtype.itemsize:
        raise UsageError(
            f"{name}: {role} of {x.dtype} from {other} of {y.dtype}; NumPy's numbers, such as np.sqrt(2), make arrays "
            "float64: use Python's, such as math.sqrt(2), or astype"
        )


def _check_extra(
    name: str,
    field: str,
    entries: Mapping[str, Any],
    layer: Layer,
    declared: Mapping[str, Buffer] | Mapping[str, SideOutput],
    where: str,
    sh: Shards,
) -> None:
    """Raise UsageError unless the entries of an Extra are declared, and have the declared letters."""
    for key, value in entries.items():
        if key not in declared:
            listed = ", ".join(declared) or "none"
            raise UsageError(f"{name}: Extra({field}=...) has {key!r}, but {where} of the layer has {listed}")
        entry = declared[key]
        if entry.dims and getattr(entry, "shape", None) is None:
            _check_activation(
                f"{name}: Extra({field}=...)", repr(key), value, Activation(entry.dims, "inside"), layer.sizes, sh
            )
