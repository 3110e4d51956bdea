"""einsum of one or two operands, lowered to matrix products.

``numpy.einsum`` of two operands runs its own loops, many times slower than a matrix product. Here each
pattern is planned once for the shapes of its operands. Letters fall into four kinds,

    batch        in both operands and in the result
    contracted   in both operands, not in the result
    left, right  in one operand and in the result

and the operands are viewed as (batch, left, contracted) x (batch, contracted, right) -> (batch, left,
right), which is what ``matmul`` multiplies. Views are free where the letters of a kind lie side by
side; otherwise one copy is made. A letter of one operand alone is summed first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from math import prod
from operator import itemgetter, methodcaller
from typing import Any, NamedTuple

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.precision import HALF_DTYPES, accumulated_in, rounded
from spmd_engine.arrays.products import Kind, kind_of, matmul
from spmd_engine.errors import NotationError, described

Shape = tuple[int, ...]
View = tuple[Callable[[Array], Array], ...]  #: how an array is summed, transposed and reshaped: the steps


def einsum(
    pattern: str, *operands: Array, out: Array | None = None, accumulate: bool = False, dtype: Any = None
) -> Array:
    """``numpy.einsum`` for one or two operands: ``einsum("bd,df->bf", x[b d], w[d f]) -> y[b f]``.

    ``out`` receives the result; with ``accumulate=True`` the result is added to it. ``dtype`` is that of the
    result, by default that of ``out``, or else of a sum of the operands: it matters for 16-bit floats, whose
    products and sums are wider, and rounded once. Raises NotationError naming pattern and shapes where a letter has
    two sizes, an operand too many or too few dimensions, or ``out`` another shape than the result.
    """
    try:
        if len(operands) == 2:
            a, b = operands
            plan = _plan(pattern, a.shape, a.dtype, b.shape, b.dtype)
        else:
            plan = _plan(pattern, *[fact for x in operands for fact in (x.shape, x.dtype)])
            (a,), b = operands, None
    except (AttributeError, TypeError):
        _check_arguments(pattern, operands)
        raise
    shape, usual_dtype, left, right, swap, product, after, is_in_order, kind = plan
    if out is not None:
        if out.shape != shape:
            raise NotationError(f'einsum "{pattern}": the result has shape {shape}, out has {out.shape}')
        usual_dtype = out.dtype
    if dtype is None:
        dtype = usual_dtype
    for step in left:
        a = step(a)
    if b is None:
        result = a if a.dtype == dtype else rounded(a, dtype)
    else:
        for step in right:
            b = step(b)
        if swap:
            a, b = b, a
        if out is not None and not accumulate and is_in_order and out.flags.c_contiguous:
            matmul(a, b, out.reshape(product) if after else out, kind=kind)
            return out
        result = matmul(a, b, None, dtype, kind)
        for step in after:
            result = step(result)
    if out is None:
        return result
    if accumulate:
        out += result
    else:
        out[...] = result
    return out


def _check_arguments(pattern: Any, operands: Sequence[Any]) -> None:
    if not isinstance(pattern, str):
        raise NotationError(f'einsum: the pattern is {described(pattern)}; it comes first: einsum("bd,df->bf", x, w)')
    for number, x in enumerate(operands):
        if not hasattr(x, "shape"):
            raise NotationError(
                f'einsum "{pattern}": operand {number} is {described(x)}; make it an array, by numpy.asarray'
            )


class _Plan(NamedTuple):
    """The result is the view of one operand, or the product of the views of two."""

    shape: Shape  # the result's
    dtype: Any  # the result's, unless another is wanted; None: that of a sum of the operands
    left: View  # of the first operand
    right: View = ()  # of the second
    swap: bool = False  # compute (b x a) instead of (a x b): then the result needs no transposition
    product: Shape = ()  # (batch..., left, right); of one operand empty
    after: View = ()  # of the product
    is_in_order: bool = True  # whether the product lies in memory as the result does
    kind: Kind | None = None  # of the product; None: an operand's dtype is known only when it has been summed


def _view(term: str, kinds: Sequence[str], sizes: Mapping[str, int]) -> View:
    """The view of an array with the letters ``term``; each of its dimensions merges one of ``kinds``."""
    order = "".join(kinds)
    remaining = "".join(c for c in term if c in order)
    steps: list[Callable[[Array], Array]] = []
    if remaining != term:
        axes = tuple(i for i, c in enumerate(term) if c not in order)
        leading = axes[-1] == len(axes) - 1
        matrix = tuple(prod(sizes[c] for c in letters) for letters in (term[: len(axes)], remaining))
        shape = tuple(sizes[c] for c in remaining)
        steps.append(partial(_sum_of_rows, axes, matrix, shape) if leading and matrix[1] > 1 else partial(_sum, axes))
    if remaining != order:
        steps.append(methodcaller("transpose", tuple(remaining.index(c) for c in order)))
    if any(len(kind) != 1 for kind in kinds):
        shape = tuple(prod(sizes[c] for c in kind) for kind in kinds)
        steps.append(_reshaping(tuple(sizes[c] for c in order), shape))
    return tuple(steps)


def _reshaping(before: Shape, after: Shape) -> Callable[[Array], Array]:
    """The step from one shape to the other; an index takes less than half the time, which counts for one row."""
    if before == (1, *after):
        return itemgetter(0)
    return itemgetter(None) if after == (1, *before) else methodcaller("reshape", after)


def _sum_of_rows(axes: Shape, matrix: Shape, shape: Shape, x: Array) -> Array:
    """The sum over leading ``axes``, of this shape, of rows of a ``matrix``: BLAS computes it in half the time.

    Not over all axes: there NumPy adds in pairs, which loses fewer digits than a sequential sum.
    """
    if x.dtype.char not in "fd" or not x.flags.c_contiguous:
        return _sum(axes, x)
    return (backend_of(x).ones(matrix[0], x.dtype) @ x.reshape(matrix)).reshape(shape)


def _sum(axes: Shape, x: Array) -> Array:
    return x.sum(axis=axes, dtype=accumulated_in(x.dtype))


@lru_cache(maxsize=4096)  # a growing sequence has new shapes in each step
def _plan(pattern: str, *operands: Any) -> _Plan:
    """The plan of a pattern. ``operands``: the shape and the dtype of the first operand, then those of the second."""
    shapes, dtypes = operands[::2], operands[1::2]
    inputs, arrow, output = pattern.replace(" ", "").partition("->")
    terms = tuple(inputs.split(","))
    if not arrow or len(terms) not in (1, 2):
        raise NotationError(f'einsum "{pattern}": write one or two operands and "->"')
    for term in (*terms, output):
        if len(set(term)) != len(term) or not (term.isalpha() or term == ""):
            raise NotationError(f'einsum "{pattern}": "{term}" must be distinct letters')
    if missing := set(output) - set("".join(terms)):
        raise NotationError(f'einsum "{pattern}": "{min(missing)}" of the result is in no operand')
    sizes = _sizes(pattern, terms, shapes)
    shape = tuple(sizes[c] for c in output)
    if len(terms) == 1:
        return _Plan(shape, dtypes[0], _view(terms[0], output, sizes))
    a, b = terms
    batch = "".join(c for c in output if c in a and c in b)
    left = "".join(c for c in output if c in a and c not in b)
    right = "".join(c for c in output if c in b and c not in a)
    # The contracted letters in the order of the larger operand, which then need not be copied.
    larger = max(terms, key=lambda term: prod(sizes[c] for c in term if c in output or (c in a and c in b)))
    contracted = "".join(c for c in larger if c in a and c in b and c not in output)
    swap = output == batch + right + left
    # A single row needs no view: its letters stay.
    rows = tuple(left) if left and not batch and prod(sizes[c] for c in left) == 1 and not swap else (left,)
    of_a, of_b = (*batch, *rows, contracted), (*batch, contracted, right)
    if swap:
        of_a, of_b = (*batch, contracted, left), (*batch, right, contracted)
        rows, right = (right,), left
    views = _view(a, of_a, sizes), _view(b, of_b, sizes)
    order = "".join((*batch, *rows, right))
    product = tuple(prod(sizes[c] for c in kind) for kind in (*batch, *rows, right))
    after = _view(order, tuple(output), sizes)
    if (letters := tuple(sizes[c] for c in order)) != product:
        after = _reshaping(product, letters), *after
    kind = None
    if {*a, *b} == {*order, *contracted}:  # no letter of one operand alone is summed
        one, other = (tuple(prod(sizes[c] for c in letters) for letters in view) for view in (of_a, of_b))
        kind = kind_of(*(other, dtypes[1], one, dtypes[0]) if swap else (one, dtypes[0], other, dtypes[1]))
    # An operand of which a letter was summed is wider than a 16-bit float; the result is not.
    dtype = dtypes[0] if dtypes[0] == dtypes[1] and dtypes[0] in HALF_DTYPES else None
    return _Plan(shape, dtype, *views, swap, product, after, order == output, kind)


def _sizes(pattern: str, inputs: tuple[str, ...], shapes: Sequence[Shape]) -> dict[str, int]:
    if len(shapes) != len(inputs):
        raise NotationError(f'einsum "{pattern}": {len(inputs)} operands expected, got {len(shapes)}')
    sizes: dict[str, int] = {}
    for term, shape in zip(inputs, shapes, strict=True):
        if len(term) != len(shape):
            raise NotationError(f'einsum "{pattern}": "{term}" does not fit shape {shape} (all shapes: {list(shapes)})')
        for letter, size in zip(term, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise NotationError(
                    f'einsum "{pattern}": "{letter}" is {sizes[letter]} in one operand and {size} in the '
                    f"other (shapes {list(shapes)}). Is it sharded on a mesh axis in only one of them?"
                )
    return sizes
