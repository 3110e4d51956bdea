"""Walking over long arrays in pieces that stay in cache, so that a chain of elementwise steps is cheap."""

from collections.abc import Iterator

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.meter import meter
from spmd_engine.arrays.shaped import ShapedArray

CACHE_ELEMENTS = 1 << 16  # 256 KiB of float32: two or three fit a core's L2 cache, and NumPy's calls cost little beside


def chunks(x: Array, elements: int = CACHE_ELEMENTS) -> Iterator[slice]:
    """Slices of ``x``'s first dimension, about ``elements`` each; one slice on a device, which has no need."""
    length = x.shape[0]
    if backend_of(x).on_device:
        step = max(length, 1)
    else:
        step = max(1, elements * length // max(x.size, 1))
    for start in alike(range(0, length, step), x, last=length % step != 0):
        yield slice(start, min(start + step, length))


def alike(numbers: range, x: Array, *, last: bool = False) -> Iterator[int]:
    """The numbers of a loop that does the same each time, with parts of ``x`` of one size.

    Where ``x`` is only a shape the first stands for all, and counts for all; ``last``: but for the last one.
    """
    if not isinstance(x, ShapedArray) or len(numbers) < 3:
        yield from numbers
        return
    with meter().repeated(len(numbers) - last):
        yield numbers[0]
    if last:
        yield numbers[-1]
