"""einsum of one or two operands, lowered to BLAS.

``numpy.einsum`` of two operands runs its own loops, many times slower than a matrix product. Here each
pattern is planned once: its letters fall into four kinds,

    batch        in both operands and in the result
    contracted   in both operands, not in the result
    left, right  in one operand and in the result

and the operands are viewed as (batch, left, contracted) x (batch, contracted, right) -> (batch, left,
right), which is what ``matmul`` hands to BLAS. Views are free where the letters of a kind lie side by
side; otherwise one copy is made. A letter of one operand alone is summed first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.errors import NotationError


def einsum(pattern: str, *operands: Array, out: Array | None = None, accumulate: bool = False) -> Array:
    """``numpy.einsum`` for one or two operands: ``einsum("bd,df->bf", x[b d], w[d f]) -> y[b f]``.

    ``out`` receives the result; with ``accumulate=True`` the result is added to it. Raises NotationError
    naming pattern and shapes where a letter has two sizes, an operand too many or too few dimensions, or
    ``out`` another shape than the result.
    """
    plan = _plan(pattern)
    sizes = _sizes(pattern, plan.inputs, operands)
    shape = tuple(sizes[c] for c in plan.output)
    if out is not None and out.shape != shape:
        raise NotationError(f'einsum "{pattern}": the result has shape {shape}, out has {out.shape}')
    result = _contract(plan, operands, sizes, None if accumulate else out)
    if out is None:
        return result
    if accumulate:
        out += result
    elif result is not out:
        out[...] = result
    return out


@dataclass(frozen=True)
class _Plan:
    inputs: tuple[str, ...]
    kept: tuple[str, ...]  # each operand's letters, without those that only it has and the result lacks
    output: str
    batch: str = ""
    left: str = ""
    contracted: str = ""
    right: str = ""
    swap: bool = False  # compute (b x a) instead of (a x b): then the result needs no transposition


@cache
def _plan(pattern: str) -> _Plan:
    inputs, arrow, output = pattern.replace(" ", "").partition("->")
    terms = tuple(inputs.split(","))
    if not arrow or len(terms) not in (1, 2):
        raise NotationError(f'einsum "{pattern}": write one or two operands and "->"')
    for term in (*terms, output):
        if len(set(term)) != len(term) or not (term.isalpha() or term == ""):
            raise NotationError(f'einsum "{pattern}": "{term}" must be distinct letters')
    if missing := set(output) - set("".join(terms)):
        raise NotationError(f'einsum "{pattern}": "{min(missing)}" of the result is in no operand')
    others = ["".join(terms[:i] + terms[i + 1 :]) + output for i in range(len(terms))]
    kept = tuple("".join(c for c in term if c in other) for term, other in zip(terms, others, strict=True))
    if len(terms) == 1:
        return _Plan(terms, kept, output)
    a, b = terms
    batch = "".join(c for c in output if c in a and c in b)
    left = "".join(c for c in output if c in a and c not in b)
    right = "".join(c for c in output if c in b and c not in a)
    contracted = "".join(c for c in a if c in b and c not in output)
    swap = output == batch + right + left
    return _Plan(terms, kept, output, batch, left, contracted, right, swap)


def _sizes(pattern: str, inputs: tuple[str, ...], operands: tuple[Array, ...]) -> dict[str, int]:
    shapes = [operand.shape for operand in operands]
    if len(operands) != len(inputs):
        raise NotationError(f'einsum "{pattern}": {len(inputs)} operands expected, got {len(operands)}')
    sizes: dict[str, int] = {}
    for term, shape in zip(inputs, shapes, strict=True):
        if len(term) != len(shape):
            raise NotationError(f'einsum "{pattern}": "{term}" does not fit shape {shape} (all shapes: {shapes})')
        for letter, size in zip(term, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise NotationError(
                    f'einsum "{pattern}": "{letter}" is {sizes[letter]} in one operand and {size} in the '
                    f"other (shapes {shapes}). Is it cut on a mesh axis in only one of them?"
                )
    return sizes


def _contract(plan: _Plan, operands, sizes, out):
    operands = [_sum_lonely(*each) for each in zip(operands, plan.inputs, plan.kept, strict=True)]
    if len(operands) == 1:
        return operands[0].transpose([plan.kept[0].index(c) for c in plan.output])
    (a, b), (a_term, b_term) = operands, plan.kept
    rows, columns = plan.left, plan.right
    if plan.swap:
        a, b, a_term, b_term, rows, columns = b, a, b_term, a_term, columns, rows
    # The contracted letters in the order of the larger operand, which then need not be copied.
    contracted = "".join(c for c in (a_term if a.size >= b.size else b_term) if c in plan.contracted)
    xa = _matrix(a, a_term, plan.batch, rows, contracted, sizes)
    xb = _matrix(b, b_term, plan.batch, contracted, columns, sizes)
    order = plan.batch + rows + columns
    matmul = backend_of(a).xp.matmul
    if order == plan.output and out is not None and out.flags.c_contiguous and out.dtype == xa.dtype == xb.dtype:
        matmul(xa, xb, out=out.reshape(xa.shape[:-1] + xb.shape[-1:]))
        return out
    result = matmul(xa, xb).reshape([sizes[c] for c in order])
    return result if order == plan.output else result.transpose([order.index(c) for c in plan.output])


def _sum_lonely(x: Array, term: str, kept: str) -> Array:
    if term == kept:
        return x
    return x.sum(axis=tuple(i for i, c in enumerate(term) if c not in kept), dtype=x.dtype)


def _matrix(x: Array, term: str, batch: str, rows: str, columns: str, sizes: dict[str, int]) -> Array:
    """``x`` viewed as (batch..., rows, columns), the letters of each kind merged into one dimension."""
    order = batch + rows + columns
    if order != term:
        x = x.transpose([term.index(c) for c in order])
    return x.reshape([sizes[c] for c in batch] + [prod(sizes[c] for c in kind) for kind in (rows, columns)])
