"""Checks of engines that users write: their declarations, their batches, and the results of their methods.

Declarations are checked once, before the first step, evaluation or answer; results in each call, only by types, names
and shapes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from inspect import getsource
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.arrays.precision import is_float, widened
from spmd_engine.comm.agreement.rank_zero import gather_json
from spmd_engine.comm.notation import Spec
from spmd_engine.engine.batch import Batch, MicroBatch
from spmd_engine.errors import SpmdError, UsageError, described, is_array
from spmd_engine.layers.contract import guard

if TYPE_CHECKING:
    from spmd_engine.engine.base import ShardedEngine

SHARDINGS = ("input_sharding", "output_sharding", "target_sharding")


def guard_engine(kind: type) -> None:
    """Check the results of the methods that a user's class defines."""
    for method in ("__init__", "load_checkpoint"):
        guard(kind, method, lambda engine, returned, *args, **options: None)
    guard(kind, "forward", check_outputs)
    guard(kind, "backward", check_gradients)


def check_dict(engine: ShardedEngine, attribute: str) -> None:
    """Raise UsageError unless this attribute is a dict."""
    if not isinstance(found := getattr(engine, attribute), Mapping):
        raise UsageError(f"{type(engine).__name__}.{attribute} is {described(found)}; make it a dict by parameter name")


def check_declared(engine: ShardedEngine, training: bool) -> None:
    """Raise UsageError for parameters and shardings that cannot be trained or served. Collective."""
    name = type(engine).__name__
    for attribute in ("parameters", "shardings"):
        check_dict(engine, attribute)
    check_parameters(engine)
    for parameter, text in engine.shardings.items():
        spec = read_sharding(engine, f"shardings[{parameter!r}]", text)
        if parameter in engine.parameters:
            check_letters(engine, parameter, spec, engine.parameters[parameter])
    for attribute in SHARDINGS:
        spec = read_sharding(engine, attribute, getattr(engine, attribute))
        if "b" in spec.letters[1:]:
            raise UsageError(f'{name}.{attribute} is "{spec}": the batch, b, must be the first dim')
    # A rank may lack parameters that others have, such as those of another pipeline stage.
    names_of_ranks = gather_json(engine.group(), list(engine.parameters), "check")
    parameters = dict.fromkeys(parameter for names in names_of_ranks for parameter in names)
    if training and not parameters:
        raise UsageError(f"{name} has no parameters: {lack_of_parameters(engine)}")
    if parameters and (unknown := [parameter for parameter in engine.shardings if parameter not in parameters]):
        raise UsageError(f"{name}.shardings names {unknown[0]!r}, but the parameters are {', '.join(parameters)}")


def lack_of_parameters(engine: ShardedEngine) -> str:
    """What to do for an engine without ``parameters``: if it has arrays, the line that names them as its code does."""
    arrays = [
        name
        for name, x in vars(engine).items()
        if is_array(x) and is_float(x.dtype) and not hasattr(type(engine), name)
    ]
    if not arrays:
        return "call load_checkpoint, which sets self.parameters, before training"
    try:
        names = dict(_LOADED.findall(getsource(type(engine).load_checkpoint)))
    except (OSError, TypeError):  # the class has no file
        names = {}
    pairs = ", ".join(f'"{names.get(name, name)}": self.{name}' for name in arrays)
    return f"where it makes its arrays, add the line self.parameters = {{{pairs}}}"


#: ``self.w0[...] = params["layer_0/weights"][...]``: an attribute, and the name of what it is loaded from.
_LOADED = re.compile(r"""self\.(\w+)\b[^=\n]*=[^\n]*?\[\s*["']([^"'\n]+)["']\s*\]""")


def check_parameters(engine: ShardedEngine) -> None:
    """Raise UsageError for parameters that an optimizer cannot update in place."""
    class_name, second_read, names = type(engine).__name__, engine.parameters, {}
    for name, array in engine.parameters.items():
        label = f"{class_name}.parameters[{name!r}]"
        if not is_array(array):
            raise UsageError(f"{label} is {described(array)}, which cannot be updated in place: make it an array")
        if array.dtype.kind in "biuOSUM":
            raise UsageError(f"{label} has dtype {array.dtype}, which holds no gradient: use float32, for example")
        if not isinstance(array, np.ndarray):
            continue
        if not array.flags.writeable:
            raise UsageError(f"{label} is read-only, like a memory map: use self.block({name!r}, array), a copy")
        if array.size and not np.may_share_memory(array, second_read[name]):
            raise UsageError(f"{label} is a new array at each access, so updates are lost: store one array")
        if (twin := names.setdefault((array.ctypes.data, array.shape, array.strides), name)) != name and array.size:
            raise UsageError(
                f"{label} is the same array as {twin!r}, which would be updated twice: give it one name, and "
                "return the sum of both gradients"
            )


def read_sharding(engine: ShardedEngine, what: str, text: Any) -> Spec:
    """Parse a sharding. Raises UsageError if it cannot be parsed, or names an axis that the mesh lacks."""
    name = f"{type(engine).__name__}.{what}"
    if not isinstance(text, str):
        raise UsageError(f'{name} is {described(text)}; write letters as in "b/data d", and "" for whole')
    try:
        spec = Spec.parse(text)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from error
    if unknown := [axis for axis in spec.axes if axis not in engine.mesh.axes]:
        raise UsageError(
            f'{name} is "{text}", but the mesh has no axis {unknown[0]}; it has {", ".join(engine.mesh.axes)}'
        )
    return spec


def check_letters(engine: ShardedEngine, parameter: str, spec: Spec, array: Any) -> None:
    """Raise UsageError unless the sharding of a parameter has a letter for each of its dims."""
    if len(array.shape) != len(spec.dims):
        raise UsageError(
            f'{type(engine).__name__}.shardings[{parameter!r}] is "{spec}", but the array has shape '
            f"{tuple(array.shape)}: write a letter for each dim"
        )


def check_dims(engine: ShardedEngine, what: str, array: Any) -> None:
    """Raise UsageError unless a sharding has a letter for each dim of an array, or for the batch alone."""
    text, shape = getattr(engine, what), np.shape(array)
    letters = len(Spec.parse(text).dims)
    fits = letters < 2 or letters == len(shape)
    if what == "target_sharding" and not fits:  # by default that of the outputs, and targets may be classes
        fits = letters == len(shape) + 1 and text == engine.output_sharding
    if not fits:
        raise UsageError(
            f'{type(engine).__name__}.{what} is "{text}", but the array has shape {shape}: write a letter for each '
            "dim, or one for the batch alone"
        )


def check_batch(batch: Any, of: str = "step") -> None:
    """Raise UsageError unless ``batch`` is a Batch of at least one micro-batch."""
    if not isinstance(batch, Batch):
        raise UsageError(
            f"{of}: {described(batch)} is no Batch; make one, by batch_of(inputs, targets, engine, step=step)"
        )
    for micro in batch.micro_batches:
        if not isinstance(micro, MicroBatch):
            raise UsageError(f"{of}: one of the Batch's micro_batches is {described(micro)}; make each a MicroBatch")
    if not batch.micro_batches:
        raise UsageError(f"{of}: the Batch has no micro-batches; make one, by batch_of(inputs, targets, engine)")


def check_outputs(engine: ShardedEngine, outputs: Any, x: Any, *args: Any, **options: Any) -> None:
    """Raise UsageError unless a forward has returned one array, or None where another rank may have it."""
    if outputs is None and engine.mesh.size > 1:
        return
    if not is_array(outputs):
        raise UsageError(
            f"{type(engine).__name__}.forward returned {described(outputs)}; return one array, the outputs (save what "
            "the backward needs with self.tape.push)"
        )
    if not engine.outputs_everywhere:
        check_dims(engine, "output_sharding", outputs)


def check_gradients(engine: ShardedEngine, gradients: Any, dy: Any, *args: Any) -> None:
    """Raise UsageError unless a backward has returned a gradient like each parameter."""
    name = f"{type(engine).__name__}.backward"
    if not isinstance(gradients, Mapping):
        raise UsageError(f"{name} returned {described(gradients)}; return {{name: gradient}}, like parameters")
    owned = engine.named(engine.owned) if engine.checks_gradients else {}
    if not owned:  # no names are known, other ranks own all parameters, or verify itself compares them
        return
    for key, gradient in gradients.items():
        if key not in owned:
            raise UsageError(f"{name} returned a gradient of {key!r}; the parameters are {', '.join(owned)}")
        if getattr(gradient, "shape", None) is None:
            raise UsageError(f"{name}: the gradient of {key!r} is {described(gradient)}; return an array")
        if gradient.shape != owned[key].shape:
            raise UsageError(
                f"{name}: the gradient of {key!r} has shape {gradient.shape}, the parameter {owned[key].shape}"
            )
    if missing := [key for key in owned if key not in gradients]:
        raise UsageError(f"{name} returned no gradient of {', '.join(missing)}; return one for each parameter")


def backward_of(engine: ShardedEngine, dy: Array | None) -> Mapping[str, Array]:
    """The gradients that ``engine.backward`` returns. Raises UsageError if it fails for lack of outputs."""
    try:
        return engine.backward(dy)
    except SpmdError:
        raise
    except Exception as error:
        if dy is not None:
            raise
        name = type(engine).__name__
        raise UsageError(
            f"{name}.forward returned None, and {name}.backward(None) failed ({type(error).__name__}: {error}): return "
            "the outputs, or let backward expect None on ranks that have none"
        ) from error


def check_tape(engine: ShardedEngine, before: int) -> None:
    """Raise UsageError unless a forward and its backward left the tape at its length ``before``."""
    if left := len(engine.tape) - before:
        excess = f"{left} more than backward pops" if left > 0 else f"{-left} fewer than backward pops"
        raise UsageError(f"{type(engine).__name__}: forward pushes {excess} from the tape; push and pop equally often")


def add_gradients(engine: ShardedEngine, sums: MutableMapping[str, Array], more: Mapping[str, Array]) -> None:
    """Add a micro-batch's gradients to ``sums``. Raises UsageError if both are in the same memory."""
    for name, array in more.items():
        if name not in sums:
            sums[name] = widened(array)
            continue
        if array.size and _share_memory(array, sums[name]):
            raise UsageError(
                f"{type(engine).__name__}.backward returned the gradient of {name!r} in the same memory for two "
                "micro-batches: return a new array each time"
            )
        sums[name] = sums[name] + array


def _share_memory(a: Array, b: Array) -> bool:
    return a is b or (isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.may_share_memory(a, b))


# --- Replicas must have equal gradients; a forgotten all_reduce makes them differ


def check_replicas(engine: ShardedEngine, gradients: Mapping[str, Array]) -> None:
    """Raise UsageError if ranks that own the same block of a parameter have different gradients of it.

    It compares sums of magnitudes, to find a missing reduction, not a different last bit. Collective.
    """
    for name in sorted(engine.parameters):
        sharding = engine.owned_sharding(name)
        axes = tuple(axis for axis in engine.mesh.axes if axis not in sharding.axes)
        if name not in gradients or not axes:
            continue
        size = np.array([float(abs(gradients[name]).sum(dtype=np.float64))])
        sizes = engine.all_gather(size, over=axes, label="check")
        if np.allclose(sizes, sizes[0], rtol=1e-4, equal_nan=True):
            continue
        sizes = sizes.reshape([engine.mesh.axes[axis] for axis in axes])
        differing_axes = [
            axis
            for dim, axis in enumerate(axes)
            if not np.allclose(sizes, sizes.take([0], axis=dim), rtol=1e-4, equal_nan=True)
        ]
        over = ",".join(differing_axes)
        how = f'sharded as "{sharding}"' if sharding.axes else "whole"  # then its letters are placeholders
        raise UsageError(
            f"the gradient of {name!r} differs between ranks of {over}, along which it is {how}: is an "
            f"all_reduce over {over} missing in backward?"
        )
