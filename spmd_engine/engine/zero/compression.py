"""Gradients sent in fewer bytes than they have: 16-bit floats, the largest entries, or low rank.

What the last two omit in a step is added to the next gradient (error feedback: Karimireddy et al., "Error Feedback
Fixes SignSGD", 2019). All ranks get the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from itertools import accumulate, pairwise
from math import ceil
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.dtypes import described
from spmd_engine.arrays.random import key_of, normal
from spmd_engine.comm import Group
from spmd_engine.comm.pending import Deferred, Pending
from spmd_engine.errors import UsageError
from spmd_engine.requirements import Case, requirement
from spmd_engine.sharding.groups import Member, ParameterGroup


class Compression(ABC):
    """How the whole gradients of a parameter group are summed. One object serves one group on one rank."""

    in_parts = False  #: whether it can also scatter the sum to its owners
    feeds_back = False  #: whether it keeps residues of a step for the next

    def forget(self) -> None:
        """Drop the residues, since gradients in them were not finite."""

    @property
    def residues(self) -> dict[str, Array]:
        """The arrays that this rank keeps for the next step, by name: none before the first step."""
        return {}

    def take(self, residues: Mapping[str, Array]) -> bool:
        """Continue with saved ``residues`` of a group of the same parameters; False if they do not fit."""
        return not residues

    @abstractmethod
    def start_all_reduce(self, gradients: Array, over: Group) -> Pending | Deferred:
        """Begin to sum flat ``gradients`` over ranks, in place."""

    def start_reduce_scatter(
        self, gradients: Array, over: Group, sizes: list[int], out: Array | None
    ) -> Pending | Deferred:
        """Begin to sum ``gradients``; each rank gets its part (``out``, if given). Raises UsageError if unsupported."""
        raise UsageError(f"{type(self).__name__} needs whole gradients on every rank; choose float16 or bfloat16")


class Uncompressed(Compression):
    """No compression."""

    in_parts = True

    def start_all_reduce(self, gradients, over):
        return over.start_all_reduce(gradients, out=gradients, label="gradients")

    def start_reduce_scatter(self, gradients, over, sizes, out):
        return over.start_reduce_scatter(gradients, sizes=sizes, out=out, label="gradients")


class HalfPrecision(Compression):
    """Sent as 16-bit floats; summed in float32, in a fixed order, then rounded once more."""

    in_parts = True

    def __init__(self, dtype: np.dtype) -> None:
        self._dtype = dtype

    def start_all_reduce(self, gradients, over):
        half = gradients.astype(self._dtype)
        pending = over.start_all_reduce(half, out=half, label="gradients")
        return Deferred(pending, partial(_fill, gradients))

    def start_reduce_scatter(self, gradients, over, sizes, out):
        pending = over.start_reduce_scatter(gradients.astype(self._dtype), sizes=sizes, label="gradients")
        own_part = out if out is not None else backend_of(gradients).empty(sizes[over.rank], gradients.dtype)
        return Deferred(pending, partial(_fill, own_part))


class TopK(Compression):
    """Each rank sends the entries that are largest in magnitude, a fraction of each parameter's, with their places.

    The fraction is taken of each parameter, not of the group: a parameter that is replicated over ``model`` shares its
    group with sharded ones, whose blocks differ. If its places depended on those, its replicas would diverge.

    After Aji and Heafield, "Sparse Communication for Distributed Gradient Descent" (2017).
    """

    feeds_back = True

    def __init__(self, fraction: float, group: ParameterGroup) -> None:
        if not 0.0 < fraction <= 1.0:
            raise UsageError(f"top-k keeps a fraction of the gradient above 0 and up to 1, not {fraction}")
        self._fraction, self._group = fraction, group
        self._left_out: Array | None = None

    def forget(self):
        self._left_out = None

    @property
    def residues(self):
        return {} if self._left_out is None else {"left_out": self._left_out}

    def take(self, residues):
        self._left_out = residues.get("left_out")
        fits = set(residues) <= {"left_out"} and (self._left_out is None or self._left_out.shape == (self._group.size,))
        if not fits:
            self.forget()
        return fits

    def start_all_reduce(self, gradients, over):
        xp = backend_of(gradients).xp
        left_out = self._left_out = xp.zeros_like(gradients) if self._left_out is None else self._left_out
        left_out += gradients
        places = xp.concatenate([span.start + self._largest(left_out[span]) for span in self._group.spans.values()])
        places = places.astype(np.uint32 if gradients.size < 1 << 32 else np.uint64)
        all_values = over.start_all_gather(left_out[places][None], label="gradients")
        all_places = over.start_all_gather(places[None], label="gradients")
        left_out[places] = 0

        def add(values_of_ranks: Array) -> Array:
            gradients[...] = 0
            for values, rank_places in zip(values_of_ranks, all_places.wait(), strict=True):  # in rank order
                gradients[rank_places] += values
            return gradients

        return Deferred(all_values, add)

    def _largest(self, part: Array) -> Array:
        """The places of the largest entries of ``part``, ascending."""
        magnitudes = abs(part)
        rest = magnitudes.size - ceil(magnitudes.size * self._fraction)
        xp = backend_of(magnitudes).xp
        return xp.sort(xp.argpartition(magnitudes, rest)[rest:] if rest else xp.arange(magnitudes.size))


class PowerSGD(Compression):
    """Each matrix as a product of two thin ones, by one step of power iteration from those of the last step.

    P[i r] = M[i j] · Q[j r], summed and made orthonormal; Q[j r] = M[i j] · P[i r], summed; M = P · Q. Vectors, and
    matrices that this would not make smaller, are sent uncompressed. After Vogels et al., "PowerSGD" (2019).
    """

    feeds_back = True

    def __init__(self, rank: int, group: ParameterGroup) -> None:
        if rank < 1:
            raise UsageError(f"PowerSGD needs a rank of at least 1, not {rank}")
        self._rank, self._group = rank, group
        self._thin: dict[str, Array] = {}  # Q by name
        self._left_out: dict[str, Array] = {}

    def forget(self):
        self._thin.clear()
        self._left_out.clear()

    @property
    def residues(self):
        kinds = {"thin": self._thin, "left_out": self._left_out}
        return {f"{kind}/{name}": array for kind, arrays in kinds.items() for name, array in arrays.items()}

    def take(self, residues):
        self.forget()
        matrices = {m.name: _as_matrix(m) for m in self._group.members if self._is_low_rank(m)}
        shapes = {f"thin/{name}": (columns, self._rank) for name, (_, columns) in matrices.items()}
        shapes |= {f"left_out/{name}": shape for name, shape in matrices.items()}
        if residues and {key: array.shape for key, array in residues.items()} != shapes:
            return False
        for name in matrices if residues else ():
            self._thin[name], self._left_out[name] = residues[f"thin/{name}"], residues[f"left_out/{name}"]
        return True

    def _is_low_rank(self, member: Member) -> bool:
        rows, columns = _as_matrix(member)
        return len(member.shape) > 1 and self._rank * (rows + columns) < rows * columns

    def start_all_reduce(self, gradients, over):
        xp = backend_of(gradients).xp
        views = self._group.views(gradients)
        matrices: dict[str, Array] = {}
        plain: list[Array] = []
        for member in self._group.members:
            if not self._is_low_rank(member):
                plain.append(views[member.name].reshape(-1))
                continue
            matrix = views[member.name].reshape(_as_matrix(member))
            if member.name not in self._thin:
                shape = (matrix.shape[1], self._rank)
                start = normal(key_of(0, "PowerSGD", member.name), shape, gradients.dtype)
                self._thin[member.name] = backend_of(gradients).asarray(start)
                self._left_out[member.name] = xp.zeros_like(matrix)
            matrix += self._left_out[member.name]
            matrices[member.name] = matrix
        tall = {name: matrix @ self._thin[name] for name, matrix in matrices.items()}
        first = over.start_all_reduce(_joined([*plain, *tall.values()], gradients), label="gradients")

        def finish(flat: Array) -> Array:
            sums = _split(flat, [*plain, *tall.values()])
            for vector, summed in zip(plain, sums, strict=False):
                vector[...] = summed
            bases = {name: xp.linalg.qr(p)[0] for name, p in zip(tall, sums[len(plain) :], strict=True)}
            if matrices:
                wide = [matrix.T @ bases[name] for name, matrix in matrices.items()]
                products = _split(over.all_reduce(_joined(wide, gradients), label="gradients"), wide)
                for (name, matrix), self._thin[name] in zip(matrices.items(), products, strict=True):
                    approximation = bases[name] @ self._thin[name].T
                    self._left_out[name][...] = matrix - approximation / over.size
                    matrix[...] = approximation
            return gradients

        return Deferred(first, finish)


def compression(text: str, group: Any = None) -> Compression:
    """The compression ``"none"``, ``"bfloat16"``, ``"float16"``, ``"top-k:0.01"`` or ``"powersgd:4"`` of a group (a
    ParameterGroup; None: only to read its properties).

    Raises UsageError for anything else.
    """
    name, _, number = text.partition(":")
    try:
        if text == "none":
            return Uncompressed()
        if name in ("bfloat16", "float16") and not number:
            return HalfPrecision(described(name))
        if name == "top-k":
            return TopK(float(number or 0.01), group)
        if name == "powersgd":
            return PowerSGD(int(number or 4), group)
    except ValueError:
        pass
    raise UsageError(f"unknown compression {text!r}; write none, bfloat16, float16, top-k:FRACTION or powersgd:RANK")


def _fill(target: Array, values: Array) -> Array:
    target[...] = values
    return target


def _as_matrix(member: Member) -> tuple[int, int]:
    return (member.shape[0], member.row) if member.shape and member.size else (0, 0)


def _joined(arrays: list[Array], like: Array) -> Array:
    xp = backend_of(like).xp
    return xp.concatenate([array.reshape(-1) for array in arrays]) if arrays else like[:0]


def _split(flat: Array, like: list[Array]) -> list[Array]:
    """The inverse of ``_joined``: views of ``flat`` in the shapes of ``like``."""
    ends = accumulate((array.size for array in like), initial=0)
    return [flat[slice(*span)].reshape(array.shape) for span, array in zip(pairwise(ends), like, strict=True)]


@requirement("compress", "zero", nearest="Choose float16 or bfloat16")
def _compression_of_parts(case: Case) -> bool:
    """ZeRO needs parts of sums"""
    return not compression(case.options.compress).in_parts and case.options.storage.stage(case.axes) > 0


REQUIREMENTS = (_compression_of_parts,)
