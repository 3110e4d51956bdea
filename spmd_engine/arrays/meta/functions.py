"""NumPy's functions on meta arrays: the shapes of their results, and their work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any

import numpy as np

from spmd_engine.arrays.meta.array import ShapedArray, count
from spmd_engine.arrays.meta.meter import meter
from spmd_engine.errors import UsageError, user_line

# --- operators and other elementwise functions


def apply_ufunc(ufunc: np.ufunc, method: str, inputs: Sequence[Any], out: Any, options: dict[str, Any]) -> Any:
    """``ufunc(*inputs, out=out)``, or its ``reduce``, ``accumulate``, ``reduceat``, ``outer`` or ``at``."""
    if method == "__call__":
        if ufunc is np.matmul:
            return _matmul(*inputs, out=out)
        if ufunc.signature:
            return _of_zeros(ufunc, inputs, options)
        shape = np.broadcast_shapes(*map(np.shape, inputs))
        arrays = [x for x in inputs if isinstance(x, (ShapedArray, np.ndarray))]
        if ufunc.nout > 1:
            results = tuple(ShapedArray.new(shape, dtype) for dtype in _dtypes(ufunc, inputs))
            count(results[0].size, arrays, results)
            return results
        result = out if out is not None else ShapedArray.new(shape, options.get("dtype") or _dtypes(ufunc, inputs)[0])
        count(result.size, arrays, (result,))
        return result
    if method == "reduce":
        x, axis, keepdims = inputs[0], options.get("axis", 0), options.get("keepdims", False)
        return _reduced(x, axis, keepdims, options.get("dtype") or _reduced_dtype(ufunc, x.dtype), out)
    if method == "accumulate":
        return _result(inputs[0].shape, _reduced_dtype(ufunc, inputs[0].dtype), inputs[0].size, inputs, out)
    if method == "reduceat":
        x, places = inputs
        axis = options.get("axis", 0) % x.ndim
        return _result((*x.shape[:axis], len(places), *x.shape[axis + 1 :]), x.dtype, x.size, (x,))
    if method == "at":
        target, places = inputs[:2]
        count(target[places].size, (target,), (target,))
        return None
    if method == "outer":
        a, b = inputs
        return ufunc(a.reshape(*np.shape(a), *[1] * np.ndim(b)), b, out=out)
    raise UsageError(f"numpy.{ufunc.__name__}.{method} of arrays that are only shapes is not supported{user_line()}")


def _dtypes(ufunc: np.ufunc, inputs: Sequence[Any]) -> tuple[np.dtype, ...]:
    return _resolved(ufunc, tuple(getattr(x, "dtype", None) or _weak(x) for x in inputs))


def _weak(x: Any) -> Any:
    """The type of ``x`` in promotions; Python's numbers are weak."""
    return int if isinstance(x, (bool, int)) else type(x) if isinstance(x, (float, complex)) else np.asarray(x).dtype


@lru_cache(maxsize=1024)
def _resolved(ufunc: np.ufunc, kinds: tuple) -> tuple[np.dtype, ...]:
    return ufunc.resolve_dtypes((*kinds, *(None,) * ufunc.nout))[ufunc.nin :]


@lru_cache(maxsize=256)
def _reduced_dtype(ufunc: np.ufunc, dtype: np.dtype) -> np.dtype:
    return ufunc.reduce(np.ones(1, dtype)).dtype


def _result(shape: Sequence[int], dtype: Any, elements: int, read: Sequence[Any], out: Any = None) -> Any:
    result = out if out is not None else ShapedArray.new(shape, dtype)
    count(elements, read, (result,))
    return result


def _reduced(x: Any, axis: Any, keepdims: bool, dtype: Any, out: Any = None) -> Any:
    axes = range(x.ndim) if axis is None else [a % x.ndim for a in (axis if isinstance(axis, tuple) else (axis,))]
    if keepdims:
        shape = [1 if dim in axes else size for dim, size in enumerate(x.shape)]
    else:
        shape = [size for dim, size in enumerate(x.shape) if dim not in axes]
    return _result(shape, dtype, x.size, (x,), out)


# --- products


def _matmul(a: Any, b: Any, out: Any = None) -> Any:
    m = a.shape[-2] if a.ndim > 1 else 1
    n = b.shape[-1] if b.ndim > 1 else 1
    k = a.shape[-1]
    if k != b.shape[-2 if b.ndim > 1 else 0]:
        raise ValueError(f"matmul: shapes {a.shape} and {b.shape} do not fit")
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shape = (*batch, *((m,) if a.ndim > 1 else ()), *((n,) if b.ndim > 1 else ()))
    dtype = np.result_type(a.dtype, b.dtype)
    meter().product(prod(batch), m, n, k, dtype.itemsize)
    return out if out is not None else ShapedArray.new(shape, dtype)


def _dot(a: Any, b: Any, out: Any = None) -> Any:
    if b.ndim > 2:
        return _tensordot(a, b, (a.ndim - 1, b.ndim - 2))
    if a.ndim == 1 and b.ndim == 1:
        count(a.size, (a, b), ())
        return ShapedArray((), np.result_type(a.dtype, b.dtype))
    return _matmul(a, b, out)


def _einsum(pattern: Any, *operands: Any, out: Any = None, **options: Any) -> Any:
    if not isinstance(pattern, str):  # operands and lists of numbers by turns, and perhaps one for the output
        pairs, half = [pattern, *operands], (1 + len(operands)) // 2
        numbered = pairs[1 : 2 * half : 2] + pairs[2 * half :]
        terms = ["".join(chr(ord("a") + number) for number in numbers) for numbers in numbered]
        pattern, operands = "->".join([",".join(terms[:half]), *terms[half:]]), tuple(pairs[: 2 * half : 2])
    terms, arrow, output = pattern.replace(" ", "").partition("->")
    if not arrow:  # the letters that occur once, in order
        letters = terms.replace("...", "").replace(",", "")
        output = "..." * ("..." in terms) + "".join(c for c in sorted(set(letters)) if letters.count(c) == 1)
    sizes: dict[str, int] = {}
    rest: tuple[int, ...] = ()
    for term, x in zip(terms.split(","), operands, strict=True):
        front, dots, back = term.partition("...")
        shape = x.shape
        sizes |= zip(front, shape)
        sizes |= zip(reversed(back), reversed(shape)) if dots else {}
        if dots:
            rest = np.broadcast_shapes(rest, shape[len(front) : len(shape) - len(back)])
    front, dots, back = output.partition("...")
    shape = (*(sizes[c] for c in front), *(rest if dots else ()), *(sizes[c] for c in back))
    dtype = np.result_type(*(x.dtype for x in operands))
    return _result(shape, dtype, prod(sizes.values()) * prod(rest), operands, out)


# --- new arrays, and arrays made of others


def _like(x: Any, dtype: Any = None, order: Any = None, subok: bool = True, shape: Any = None, **_: Any) -> ShapedArray:
    return ShapedArray.new(x.shape if shape is None else shape, x.dtype if dtype is None else dtype)


def _filled_like(x: Any, *args: Any, dtype: Any = None, shape: Any = None, **_: Any) -> ShapedArray:
    result = _like(x, dtype, shape=shape)
    count(result.size, (), (result,))
    return result


def _concatenate(arrays: Sequence[Any], axis: Any = 0, out: Any = None, dtype: Any = None, **_: Any) -> Any:
    arrays = arrays if axis is not None else [x.reshape(-1) for x in arrays]
    first = arrays[0]
    axis = (axis or 0) % first.ndim
    shape = (*first.shape[:axis], sum(x.shape[axis] for x in arrays), *first.shape[axis + 1 :])
    return _result(shape, dtype or np.result_type(*(x.dtype for x in arrays)), prod(shape), arrays, out)


def _stack(arrays: Sequence[Any], axis: int = 0, out: Any = None, **_: Any) -> Any:
    return _concatenate([np.expand_dims(x, axis) for x in arrays], axis, out)


def _where(condition: Any, a: Any, b: Any) -> ShapedArray:
    shape = np.broadcast_shapes(*map(np.shape, (condition, a, b)))
    arrays = [x for x in (condition, a, b) if isinstance(x, (ShapedArray, np.ndarray))]
    return _result(shape, np.result_type(*(getattr(x, "dtype", x) for x in (a, b))), prod(shape), arrays)


def _viewed(function: Callable) -> Callable:
    """A function of NumPy that returns one view, or a list of them, for meta arrays."""

    def view(x: ShapedArray, *args: Any, **options: Any) -> Any:
        like = function(x._like, *args, **options)
        return [x._view(part) for part in like] if isinstance(like, list) else x._view(like)

    return view


def _pad(x: Any, pad_width: Any, mode: Any = "constant", **_: Any) -> ShapedArray:
    if isinstance(pad_width, dict):  # by axis
        pad_width = [pad_width.get(axis, pad_width.get(axis - x.ndim, 0)) for axis in range(x.ndim)]
        pad_width = [np.broadcast_to(widths, 2) for widths in pad_width]
    widths = np.broadcast_to(pad_width, (x.ndim, 2)).sum(1).tolist()
    shape = [size + more for size, more in zip(x.shape, widths, strict=True)]
    return _result(shape, x.dtype, prod(shape), (x,))


def _unchanged(x: Any, *_: Any, out: Any = None, **__: Any) -> Any:
    """An array with the shape and dtype of ``x``, made in one pass over it."""
    return _result(x.shape, x.dtype, x.size, (x,), out)


def _clip(x: Any, a_min: Any = None, a_max: Any = None, out: Any = None, *, min: Any = None, max: Any = None) -> Any:
    bounds = [bound for bound in (a_min, a_max, min, max) if bound is not None]
    dtype = x.dtype
    for bound in bounds:
        dtype = _dtypes(np.maximum, [ShapedArray((), dtype), bound])[0]
    return _result(np.broadcast_shapes(x.shape, *map(np.shape, bounds)), dtype, x.size, (x,), out)


def _tile(x: Any, reps: Any) -> ShapedArray:
    repeats = (reps,) if np.ndim(reps) == 0 else tuple(reps)
    dims = max(x.ndim, len(repeats))
    pairs = zip((1,) * (dims - x.ndim) + x.shape, (1,) * (dims - len(repeats)) + repeats, strict=True)
    shape = [size * times for size, times in pairs]
    return _result(shape, x.dtype, prod(shape), (x,))


def _diff(x: Any, n: int = 1, axis: int = -1, **_: Any) -> ShapedArray:
    shape = list(x.shape)
    shape[axis] = max(0, shape[axis] - n)
    return _result(shape, x.dtype, n * x.size, (x,))


def _tensordot(a: Any, b: Any, axes: Any = 2) -> Any:
    if isinstance(axes, int):
        axes = range(a.ndim - axes, a.ndim), range(axes)
    kept = [np.delete(x.shape, dims).tolist() for x, dims in zip((a, b), axes, strict=True)]
    return _result(kept[0] + kept[1], np.result_type(a.dtype, b.dtype), prod(kept[1]) * a.size, (a, b))


def _norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    return _reduced(x, axis, keepdims, np.result_type(x.dtype, np.float32 if x.dtype.itemsize < 8 else np.float64))


def _written(target: Any, *others: Any, **_: Any) -> None:
    """An array that is written in place, in one pass."""
    count(target.size, [x for x in others if isinstance(x, (ShapedArray, np.ndarray))], (target,))


# --- sums and choices


def _summing(dtype_of: Callable) -> Callable:
    """A function that reduces arrays to this dtype of theirs."""

    def reduce(x: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, **_: Any) -> Any:
        return _reduced(x, axis, keepdims is True, dtype or dtype_of(x.dtype), out)

    return reduce


def _mean_dtype(dtype: np.dtype) -> Any:
    return dtype if dtype.kind not in "iub" else np.float64


def _cumsum(x: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
    dtype = dtype or _reduced_dtype(np.add, x.dtype)
    return _result(x.shape if axis is not None else (x.size,), dtype, x.size, (x,), out)


def _take(x: Any, indices: Any, axis: Any = None, out: Any = None, mode: str = "raise") -> Any:
    if axis is None:
        return x.reshape(-1)[indices]
    return x[(slice(None),) * (axis % x.ndim) + (np.asarray(indices),)]


def _take_along_axis(x: Any, indices: Any, axis: int | None = -1) -> ShapedArray:
    if axis is None:
        x, axis = x.reshape(-1), 0
    shape = list(x.shape)
    shape[axis] = indices.shape[axis]
    return _result(shape, x.dtype, prod(shape), (x, indices))


def _argmax(x: Any, axis: Any = None, out: Any = None, **_: Any) -> np.ndarray:
    """Assumed choices, usually of experts: evenly over the columns, or, as the worst case, the same for all rows."""
    m = meter()
    count(x.size, (x,), ())
    shape = [size for dim, size in enumerate(x.shape) if axis is not None and dim != axis % x.ndim]
    width, turn = (x.size if axis is None else x.shape[axis]), m.turn()
    m.assume(f"choices by value are {m.choose}: " + ("each as often" if m.choose == "balanced" else "all the same"))
    rows = np.arange(prod(shape)) if m.choose == "balanced" else np.zeros(prod(shape), np.int64)
    return ((rows + turn) % max(1, width)).reshape(shape)


def _repeat(x: Any, repeats: Any, axis: Any = None) -> ShapedArray:
    shape, axis = ([x.size], 0) if axis is None else (list(x.shape), axis)
    shape[axis] = int(np.broadcast_to(repeats, shape[axis]).sum())
    return _result(shape, x.dtype, prod(shape), (x,))


def _qr(x: Any, mode: str = "reduced") -> tuple[ShapedArray, ShapedArray]:
    (m, n), rank = x.shape, min(x.shape)
    count(2 * m * n * rank, (x,), (x,))
    return ShapedArray.new((m, rank), x.dtype), ShapedArray.new((rank, n), x.dtype)


def _argpartition(x: Any, kth: int, axis: int = -1, **_: Any) -> np.ndarray:
    """An arbitrary order: only the number of the last elements matters, not which they are."""
    meter().assume("only the number of the largest entries matters, not which they are")
    count(x.size, (x,), ())
    shape = [size if dim == axis % x.ndim else 1 for dim, size in enumerate(x.shape)]
    return np.broadcast_to(np.arange(x.shape[axis]).reshape(shape), x.shape)


VIEWS = (
    np.array_split, np.broadcast_to, np.diagonal, np.expand_dims, np.flip, np.moveaxis, np.split, np.squeeze,
    np.swapaxes, np.transpose, np.lib.stride_tricks.sliding_window_view,
)  # fmt: skip
REDUCTIONS = {
    np.sum: np.add, np.prod: np.multiply, np.max: np.maximum, np.min: np.minimum, np.any: np.logical_or,
    np.all: np.logical_and,
}  # fmt: skip

FUNCTIONS: dict[Callable, Callable] = {
    **{function: _viewed(function) for function in VIEWS},
    **{function: _summing(partial(_reduced_dtype, ufunc)) for function, ufunc in REDUCTIONS.items()},
    **dict.fromkeys((np.roll, np.tril, np.triu, np.sort, np.round), _unchanged),
    **dict.fromkeys((np.copyto, np.fill_diagonal, np.place, np.put, np.put_along_axis, np.putmask), _written),
    **dict.fromkeys((np.zeros_like, np.ones_like, np.full_like), _filled_like),
    **dict.fromkeys((np.mean, np.var, np.std), _summing(_mean_dtype)),
    **dict.fromkeys((np.argmax, np.argmin), _argmax),
    np.dot: _dot,
    np.einsum: _einsum,
    np.empty_like: _like,
    np.concatenate: _concatenate,
    np.stack: _stack,
    np.where: _where,
    np.ravel: lambda x, order="C": x.reshape(-1),
    np.reshape: lambda x, shape, *_, **__: x.reshape(shape),
    np.hstack: lambda arrays, **_: _concatenate(arrays, min(1, arrays[0].ndim - 1)),
    np.vstack: lambda arrays, **_: _concatenate([x.reshape(1, -1) if x.ndim == 1 else x for x in arrays]),
    np.pad: _pad,
    np.tile: _tile,
    np.diff: _diff,
    np.outer: lambda a, b, out=None: np.multiply(a.reshape(-1, 1), b.reshape(1, -1), out=out),
    np.tensordot: _tensordot,
    np.clip: _clip,
    np.cumsum: _cumsum,
    np.take: _take,
    np.take_along_axis: _take_along_axis,
    np.repeat: _repeat,
    np.linalg.norm: _norm,
    np.linalg.qr: _qr,
    np.argpartition: _argpartition,
    np.shape: lambda x: x.shape,
    np.ndim: lambda x: x.ndim,
    np.size: lambda x, axis=None: x.size if axis is None else x.shape[axis],
    np.copy: lambda x, *_, **__: x.copy(),
    np.may_share_memory: lambda x, y, *_: getattr(x, "memory", None) is getattr(y, "memory", None) is not None,
}


def apply_function(function: Callable, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """``function(*args, **options)``; raises UsageError if the shape of the result depends on values."""
    if function in FUNCTIONS:
        return FUNCTIONS[function](*args, **options)
    place = NEED_VALUES.get(function, len(args))
    if any(isinstance(x, ShapedArray) for x in args[place : place + 1]):
        raise UsageError(
            f"this cannot be computed from shapes alone: numpy.{function.__name__} needs the values of an array that "
            f"only a real step has{user_line()}"
        )
    return _of_zeros(function, args, options)


#: Functions whose results, or their shapes, depend on the values of an argument: its place.
NEED_VALUES: dict[Callable, int] = {
    **dict.fromkeys((np.allclose, np.argwhere, np.array_equal, np.array_equiv, np.bincount, np.compress), 0),
    **dict.fromkeys((np.extract, np.flatnonzero, np.histogram, np.intersect1d, np.nonzero, np.setdiff1d), 0),
    **dict.fromkeys((np.setxor1d, np.trim_zeros, np.union1d, np.unique), 0),
    np.delete: 1,
}


def _of_zeros(function: Callable, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """What NumPy itself makes of zeros of these shapes, and in linear algebra of identity matrices.

    Integers are kept, since they may be indices. Raises UsageError if the function refuses them.
    """
    read: list[ShapedArray] = []
    is_linear_algebra = "linalg" in str(getattr(function, "__module__", ""))

    def zeros(value: Any) -> Any:
        if isinstance(value, ShapedArray):
            read.append(value)
            square = is_linear_algebra and value.ndim > 1 and value.shape[-2] == value.shape[-1]
            part = np.eye(value.shape[-1], dtype=value.dtype) if square else np.zeros((), value.dtype)
            return np.broadcast_to(part, value.shape)
        return type(value)(map(zeros, value)) if type(value) in (list, tuple) else value

    def shaped(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [shaped(part) for part in value]
        integers = np.asarray(value).dtype.kind in "iu"
        if not isinstance(value, (np.ndarray, np.generic, float, complex)):
            return value  # a dtype, for example
        result = value if integers else ShapedArray.new(np.shape(value), np.asarray(value).dtype)
        count(max(np.size(value), *(x.size for x in read)), read, () if integers else (result,))
        return result

    meter().assume(f"numpy.{function.__name__} is counted as one pass, and computed on zeros")
    try:
        return shaped(function(*zeros(args), **{name: zeros(value) for name, value in options.items()}))
    except np.linalg.LinAlgError as error:
        why = f"numpy.{function.__name__} refuses zeros ({error})"
        raise UsageError(f"this cannot be computed from shapes alone: {why}{user_line()}") from error


ShapedArray.apply_ufunc = staticmethod(apply_ufunc)
ShapedArray.apply_function = staticmethod(apply_function)
