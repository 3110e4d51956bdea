"""``@fused``: a function that NumPy computes in pieces, unless a backend has a kernel for it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial, wraps
from inspect import signature
from math import prod
from typing import Any

from spmd_engine.arrays.backend import CPU, Array, backend_of
from spmd_engine.arrays.meta.array import ShapedArray
from spmd_engine.arrays.meta.meter import meter
from spmd_engine.arrays.precision import HALF_DTYPES, accumulated_in, rounded, widened

_HOST_ARRAY = CPU.xp.ndarray


def kernels_for(x: Array, kind: str = "kernels", name: str = "") -> Any:
    """The kernels of the backend of ``x``, if there are any and they take ``x``; else None.

    They take 16-bit floats for the functions, by ``name``, that widen and round them in one pass with the computation.
    """
    kernels = getattr(CPU if type(x) is _HOST_ARRAY else backend_of(x), kind)
    if kernels is None or not kernels.takes(x.dtype, name):
        return None
    emulated = x.dtype in HALF_DTYPES and accumulated_in(x.dtype).itemsize > 4
    return None if emulated else kernels


@lru_cache(maxsize=256)
def _kernel(kernels: Any, name: str, dtype: Any) -> Callable | None:
    """The kernel of this name for arrays of a dtype, if it takes them; None for 16-bit floats."""
    return getattr(kernels, name) if kernels is not None and kernels.takes(dtype) else None


def fastest(function: Callable, x: Array) -> Callable:
    """The kernel with the name of ``function`` for arrays such as ``x``, or ``function`` if there is none: a choice for
    all calls of a loop."""
    kernels = kernels_for(x)
    return function if kernels is None else getattr(kernels, function.__name__)


def fused(function: Callable) -> Callable:
    """Call the kernel of this name that the first argument's backend has, or ``function`` if there is none.

    ``function`` defines what is computed. A backend's ``kernels`` have all functions with this decorator, with the
    same signatures; one may return NotImplemented for arguments that it does not take.

    With 16-bit floats as the first argument, it is computed in the dtype of their sums; results shaped as this argument
    are rounded, others, such as statistics, are not. A kernel that takes them does it in one pass, others
    and ``function`` a piece of rows at a time.
    """
    return _fused(function, "kernels")


def fused_sums(function: Callable) -> Callable:
    """``fused`` for functions whose results are sums over rows."""
    return _fused(function, "kernels", sums=True)


def computed_wide(function: Callable) -> Callable:
    """``fused`` for functions without kernels, whose 16-bit floats are to be computed in the dtype of their sums."""
    run = _fused(function, "no_kernels")
    del run.__wrapped__  # only functions with kernels have this attribute
    return run


def fused_of_images(function: Callable) -> Callable:
    """``fused`` for functions of images, which a backend's ``image_kernels`` have."""
    return _fused(function, "image_kernels")


def _fused(function: Callable, kind: str, sums: bool = False) -> Callable:
    name = function.__name__
    names = list(signature(function).parameters)
    by_row = [argument in BY_ROW for argument in names] if kind != "image_kernels" and "rotation" not in names else None

    @wraps(function)
    def run(x: Array, *others, **options):
        kernel = _kernel(getattr(CPU if type(x) is _HOST_ARRAY else backend_of(x), kind), name, x.dtype)
        if kernel is not None and (result := kernel(x, *others, **options)) is not NotImplemented:
            return result
        if x.dtype not in HALF_DTYPES:
            return function(x, *others, **options)
        if (kernels := kernels_for(x, kind, name)) is not None:
            pairs = zip((x, *others), names, strict=False)
            if all(y.dtype == x.dtype for y, argument in pairs if argument in BY_ROW - {"inverse"}):
                return getattr(kernels, name)(x, *others, **options)
        return _of_halves(partial(_computed, function, kind), by_row, sums, [x, *others], options)

    return run


def _computed(function: Callable, kind: str, x: Array, *others, **options):
    """``function`` of arrays without 16-bit floats: by the kernel of its name, if there is one."""
    kernel = _kernel(getattr(backend_of(x), kind), function.__name__, x.dtype)
    result = NotImplemented if kernel is None else kernel(x, *others, **options)
    return function(x, *others, **options) if result is NotImplemented else result


# --- 16-bit floats: a few rows at a time are widened, computed and rounded, while they are in cache


#: The names of arguments that are as long as the first, x[... d], or as its rows [...].
BY_ROW = {"x", "z", "u", "dy", "normal", "inverse"}


def _of_halves(function: Callable, by_row: list[bool] | None, sums: bool, arguments: list[Any], options: Any) -> Any:
    """``function`` of arguments of which the first has 16-bit floats, a piece of rows at a time if ``by_row``."""
    x, results = arguments[0], None
    if by_row is None or not x.size:
        wide = [widened(y) if hasattr(y, "dtype") else y for y in arguments]
        return _collected(None, function(*wide, **options), slice(None), x)
    count = prod(x.shape[:-1])
    by_row = by_row[: len(arguments)]
    flat = [
        y.reshape(count, *y.shape[x.ndim - 1 :]) if has_rows else widened(y) if hasattr(y, "dtype") else y
        for y, has_rows in zip(arguments, by_row, strict=True)
    ]
    for part in chunks(flat[0]):
        piece = [widened(y[part]) if has_rows else y for y, has_rows in zip(flat, by_row, strict=True)]
        result = function(*piece, **options)
        results = _added(results, result) if sums else _collected(results, result, part, flat[0])
    return results if sums else _shaped(results, x.shape)


def _collected(so_far: Any, result: Any, part: slice, like: Array) -> Any:
    """``so_far`` with the ``result`` of a part of the rows of ``like``, rounded to its dtype if shaped as that part."""
    if result is None or isinstance(result, tuple):
        return result and tuple(
            _collected(*pair, part, like) for pair in zip(so_far or (None,) * len(result), result, strict=True)
        )
    if so_far is None:
        shaped = result.shape[1:] == like.shape[1:] and result.ndim == like.ndim and result.dtype.kind == "f"
        shape = result.shape if part == slice(None) else (len(like), *result.shape[1:])
        so_far = backend_of(like).empty(shape, like.dtype if shaped else result.dtype)
    rounded(result, so_far.dtype, so_far[part])
    return so_far


def _added(so_far: Any, result: Any) -> Any:
    if so_far is None:
        return result
    if isinstance(result, tuple):
        return tuple(_added(*pair) for pair in zip(so_far, result, strict=True))
    so_far += result
    return so_far


def _shaped(results: Any, shape: tuple[int, ...]) -> Any:
    """The results by rows, in the shape of the first argument or of its rows."""
    if results is None or isinstance(results, tuple):
        return results and tuple(_shaped(result, shape) for result in results)
    return results.reshape(shape if results.ndim == 2 else shape[:-1])


# --- Long arrays in pieces that stay in cache, so that a chain of elementwise steps is cheap


CACHE_ELEMENTS = 1 << 16  # 256 KiB of float32: two or three fit a core's L2 cache, and the overhead of calls is small


def chunks(x: Array) -> Iterator[slice]:
    """Slices of ``x``'s first dimension, about ``CACHE_ELEMENTS`` each; a single slice on a device."""
    length = x.shape[0]
    step = max(1, length if backend_of(x).on_device else CACHE_ELEMENTS * length // max(x.size, 1))
    for start in alike(range(0, length, step), x, last=length % step != 0):
        yield slice(start, min(start + step, length))


def alike(parts: Sequence[Any], x: Array, *, last: bool = False) -> Iterable[Any]:
    """The numbers or parts of a loop that does the same work in each iteration, on parts of ``x`` of equal size.

    If ``x`` is a meta array, only the first iteration runs, and counts for all; with ``last``, the last one runs, too.
    """
    return _first_for_all(parts, last) if isinstance(x, ShapedArray) and len(parts) > 2 else parts


def _first_for_all(parts: Sequence[Any], last: bool) -> Iterator[Any]:
    with meter().repeated(len(parts) - last):
        yield parts[0]
    if last:
        yield parts[-1]
