"""Collectives spoken in letters. One whose letter is not cut does nothing, so one text serves every mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.comm.group import Group
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.pending import Pending
from spmd_engine.errors import NotationError
from spmd_engine.sharding.layout import Layout
from spmd_engine.sharding.notation import nested_span
from spmd_engine.sharding.placement import ArrayPlacement, Placement
from spmd_engine.sharding.transfer import TransferPlan, plan_transfer


class Shards:
    """A mesh seen through a layout, as a layer needs it. ``label`` names the layer in the ledger."""

    def __init__(self, mesh: Mesh, layout: Layout, label: str = "") -> None:
        self.mesh, self.layout, self.label = mesh, layout, label
        self._axes: dict[tuple[str, str], tuple[str, ...]] = {}
        self._halos: dict[tuple, TransferPlan] = {}
        self._parts: dict[tuple[str, int], tuple[int, ...]] = {}

    def axes(self, letters: Iterable[str], where: str = "inside") -> tuple[str, ...]:
        """The mesh axes that cut any of these letters, in the mesh's order, without those of size 1."""
        key = letters if isinstance(letters, str) else "".join(letters), where
        if key not in self._axes:
            wanted = {axis for letter in key[0] for axis in self.layout.axes(letter, where)}
            self._axes[key] = tuple(axis for axis, size in self.mesh.axes.items() if axis in wanted and size > 1)
        return self._axes[key]

    def is_cut(self, letter: str, where: str = "inside") -> bool:
        return bool(self.axes(letter, where))

    def span(self, letter: str, length: int, where: str = "inside") -> slice:
        """This rank's part of a letter that is ``length`` long in all."""
        return nested_span(length, self.layout.axes(letter, where), self.mesh.axes, self.mesh.coordinates)

    def parts(self, letter: str, count: int) -> tuple[int, ...]:
        """In which part each of this layer's ``count`` elements of a letter is: see ``Layout.parts``."""
        key = letter, count
        if key not in self._parts:
            self._parts[key] = self.layout.parts(self.label, letter, count, self.mesh)
        return self._parts[key]

    def part(self, letter: str) -> int:
        """The number of this rank's part of a letter; 0 where it is whole."""
        return self.mesh.index(self.layout.axes(letter))

    def group_of(self, letter: str, where: str = "inside") -> Group | None:
        """The ranks among which a letter is cut, in the order of its parts; None where it is whole."""
        axes = self._order(letter, where, self.axes(letter, where))
        return self.mesh.group(axes) if axes else None

    def all_reduce(self, x: Array, over: Iterable[str], op: str = "sum", where: str = "inside") -> Array:
        """``x``, unreduced over the axes of the letters ``over``, reduced. ``x`` must be contiguous: it is reused."""
        axes = self.axes(over, where)
        if not axes:
            return x
        return self.mesh.group(axes).all_reduce(x, op, out=x, label=self.label)

    def start_all_reduce(
        self, x: Array, over: Iterable[str], op: str = "sum", where: str = "inside"
    ) -> Array | Pending:
        """As ``all_reduce``, to be waited for later; ``x`` itself where there is nothing to reduce."""
        axes = self.axes(over, where)
        if not axes:
            return x
        return self.mesh.group(axes).start_all_reduce(x, op, out=x, label=self.label)

    def all_gather(self, x: Array, dims: str, letter: str, *, across: str) -> Array:
        """``x[dims]`` of the residual stream with ``letter`` whole along the axes of ``across``.

        Moves bytes only where the stream cuts ``letter`` over those axes: sequence parallelism.
        """
        for axis in reversed(self._borrowed(letter, across)):
            group = self.mesh.group(axis)
            x = group.all_gather(x, dims.split().index(letter), label=self.label)
        return x

    def reduce_scatter(self, x: Array, dims: str, *, over: str, onto: str) -> Array:
        """``x[dims]``, unreduced over the axes of ``over``, reduced onto the residual stream.

        Where the stream cuts ``onto`` over those axes each rank keeps its part; else this is an all_reduce.
        """
        borrowed = self._scattered(dims, over, onto)
        if not borrowed:
            return self.all_reduce(x, over)
        for axis in borrowed:
            x = self.mesh.group(axis).reduce_scatter(x, dims.split().index(onto), label=self.label)
        return x

    def start_reduce_scatter(self, x: Array, dims: str, *, over: str, onto: str) -> Array | Pending:
        """As ``reduce_scatter``, to be waited for later; ``x`` itself where there is nothing to reduce."""
        borrowed = self._scattered(dims, over, onto)
        if not borrowed:
            return self.start_all_reduce(x, over)
        dim = dims.split().index(onto)
        for axis in borrowed[:-1]:
            x = self.mesh.group(axis).reduce_scatter(x, dim, label=self.label)
        return self.mesh.group(borrowed[-1]).start_reduce_scatter(x, dim, label=self.label)

    def all_to_all(
        self, x: Array, splits: Sequence[int], *, over: str, received: Sequence[int] | None = None
    ) -> tuple[Array, list[int]]:
        """Rows of ``x`` sent to the ranks among which the letter ``over`` is cut: ``splits[i]`` of them to the i-th.

        Returns the rows that came, in rank order, and how many came from whom: the ``splits`` of the way back, in the
        backward. Who knows that number says it (``received``), and it need not be asked for. Any number may be 0.
        Where the letter is whole, all rows stay here.
        """
        group = self.group_of(over)
        if group is None:
            return x, list(splits)
        if received is None:
            received = group.all_to_all(np.array(splits, np.int64), label=self.label).tolist()
        return group.all_to_all(x, splits=splits, label=self.label), list(received)

    def start_all_to_all(self, x: Array, splits: Sequence[int], *, over: str) -> Array | Pending:
        """As ``all_to_all`` of rows whose way is known, to be waited for later."""
        group = self.group_of(over)
        return x if group is None else group.start_all_to_all(x, splits=splits, label=self.label)

    def gather_rows(self, x: Array, *, over: str, where: str = "inside") -> Array:
        """The rows of ``x``, however many, of all ranks along the axes of these letters; in order if of one."""
        axes = self.axes(over, where)
        if len(over) == 1:
            axes = self._order(over, where, axes)
        return self.mesh.group(axes).all_gather(x, label=self.label) if axes else x

    def gather_whole(self, x: Array, dims: str, letter: str) -> Array:
        """``x[dims]``, as it is inside a layer, with ``letter`` whole on every rank."""
        for axis in reversed(self._order(letter, "inside", self.axes(letter))):
            x = self.mesh.group(axis).all_gather(x, dims.split().index(letter), label=self.label)
        return x

    def with_halo(
        self, x: Array, dims: str, letter: str, length: int, halo: tuple[int, int], where: str = "inside"
    ) -> Array:
        """``x[dims]`` with what lies before and behind this rank's part of ``letter``, ``length`` long in all.

        ``halo=(1, 2)``: 1 element before and 2 behind, as far as the whole goes: at its ends there are fewer, and a
        part that is empty has none. They come from whichever ranks have them. ``x`` itself where the letter is whole.
        """
        plan, group = self._halo(x.shape, x.dtype, dims, letter, length, halo, where)
        return x if plan is None else plan.execute(group, {"x": [x]}, label=self.label)["x"][0]

    def add_halo(
        self, dx: Array, dims: str, letter: str, length: int, halo: tuple[int, int], where: str = "inside"
    ) -> Array:
        """The adjoint of ``with_halo``: from gradients of overlapping parts, the sum of all at this rank's own part."""
        shape = list(dx.shape)
        shape[dims.split().index(letter)] = 0  # how long this part is the plan knows
        plan, group = self._halo(tuple(shape), dx.dtype, dims, letter, length, halo, where)
        return dx if plan is None else plan.adjoint().execute(group, {"x": [dx]}, label=self.label)["x"][0]

    def _halo(
        self, block: tuple[int, ...], dtype: np.dtype, dims: str, letter: str, length: int, halo: tuple[int, int],
        where: str,
    ) -> tuple[TransferPlan | None, Group | None]:
        group, dim = self.group_of(letter, where), dims.split().index(letter)
        if group is None:
            return None, None
        shape = (*block[:dim], length, *block[dim + 1 :])
        key = shape, dtype, dim, letter, halo, where
        if key not in self._halos:
            axes = self._order(letter, where, self.axes(letter, where))
            peers = self.mesh.peers(axes)
            parts = [nested_span(length, axes, self.mesh.axes, peer.coordinates) for peer in peers]
            parts = [(part.start, part.stop) for part in parts]
            source = ArrayPlacement.of_intervals(shape, dtype, dim, parts)
            target = ArrayPlacement.of_intervals(shape, dtype, dim, parts, halo)
            self._halos[key] = plan_transfer(Placement({"x": source}), Placement({"x": target}), from_owners=True)
        return self._halos[key], group

    def _scattered(self, dims: str, over: str, onto: str) -> tuple[str, ...]:
        """The axes of ``over`` over which the residual stream cuts ``onto``: all of them, or none."""
        borrowed = self._borrowed(onto, over)
        if borrowed and set(borrowed) != set(self.axes(over)):
            raise NotationError(
                f"reduce_scatter of {dims!r}: {over} is cut over {self.axes(over)}, but the residual stream cuts "
                f"{onto} only over {borrowed}; cut both over the same axes"
            )
        return borrowed

    def _borrowed(self, letter: str, from_letter: str) -> tuple[str, ...]:
        """Axes that cut ``letter`` on the residual stream and ``from_letter`` inside."""
        return self._order(letter, "residual", self.axes(from_letter))

    def _order(self, letter: str, where: str, among: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the axes that cut ``letter``, in the order in which they cut it: not always the mesh's."""
        return tuple(axis for axis in self.layout.axes(letter, where) if axis in among)
