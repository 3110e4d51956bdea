"""Collectives over letters. Over a letter that is not sharded they do nothing, so a layer runs on every mesh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING

from spmd_engine.arrays.backend import Array
from spmd_engine.arrays.precision import is_half
from spmd_engine.axes import MeshPosition
from spmd_engine.comm import Group, Mesh
from spmd_engine.comm.notation import nested_span
from spmd_engine.comm.pending import Deferred, Pending
from spmd_engine.errors import MeshError, NotationError
from spmd_engine.sharding.layout import Layout

if TYPE_CHECKING:
    from spmd_engine.sharding.halos import Axes, Reach, Reads
    from spmd_engine.sharding.transfer import Blocks, TransferPlan

    Reading = tuple[int, Reads]  #: the whole length of a letter, and the inputs that outputs read


def _only_block(blocks: Blocks) -> Array:
    """The block of a transfer of one array ``x``, of which each rank has one block."""
    return blocks["x"][0]


class Shards:
    """A mesh with a layout, as a layer uses them. ``label`` names the layer in the ledger; a layer that
    ``takes_data``, a model's first, need not compute the gradient of its inputs."""

    def __init__(self, mesh: Mesh, layout: Layout, label: str = "", *, takes_data: bool = True) -> None:
        self.mesh, self.layout, self.label, self.takes_data = mesh, layout, label, takes_data
        self.checked: set[tuple] = set()  #: keys of the layer's calls that were checked
        self._is_alone = all(size == 1 for size in mesh.axes.values())  # then nothing is sharded
        # A layer asks for the same letters in every call.
        self._axes = cache(self._find_axes)
        self._groups = cache(self._find_group)
        self._gathers = cache(self._find_gathers)
        self._scatters = cache(self._find_scatters)
        self._parts = cache(self._find_parts)
        self._plans: dict[tuple, TransferPlan | None] = {}

    def axes(self, letters: Iterable[str], where: str = "inside") -> tuple[str, ...]:
        """The mesh axes that shard any of these letters, in the mesh's order, without those of size 1."""
        return self._axes(letters if type(letters) is str else "".join(letters), where)

    def _find_axes(self, letters: str, where: str) -> tuple[str, ...]:
        wanted = {axis for letter in letters for axis in self.layout.axes(letter, where)}
        return tuple(axis for axis, size in self.mesh.axes.items() if axis in wanted and size > 1)

    def axes_in_order(self, letter: str, where: str = "inside") -> tuple[str, ...]:
        """The axes of one letter, in the order in which they shard it: not always the mesh's."""
        return self._order(letter, where, self.axes(letter, where))

    def is_sharded(self, letter: str, where: str = "inside") -> bool:
        return bool(self.axes(letter, where))

    def span(self, letter: str, length: int, where: str = "inside") -> slice:
        """This rank's part of a letter that is ``length`` long in all.

        Raises MeshError if the letter is sharded in a zigzag, as do all methods here for which a part is an interval.
        """
        self._check_consecutive(letter)
        axes, weights = self.layout.axes(letter, where), self.layout.weights(letter, where)
        return nested_span(length, axes, self.mesh.axes, self.mesh.coordinates, weights)

    def parts(self, letter: str, count: int) -> tuple[int, ...]:
        """The part of each of this layer's ``count`` elements of a letter: see ``Layout.parts``."""
        return self._parts(letter, count)

    def _find_parts(self, letter: str, count: int) -> tuple[int, ...]:
        return self.layout.parts(self.label, letter, count, self.mesh)

    def part(self, letter: str) -> int:
        """The number of this rank's part of a letter; 0 where it is whole."""
        return self.mesh.index(self.layout.axes(letter))

    def group_of(self, letter: str, where: str = "inside") -> Group | None:
        """The ranks along the axes of a letter, in the order of its parts; None where it is whole."""
        return None if self._is_alone else self._groups(letter, where)

    def _find_group(self, letter: str, where: str) -> Group | None:
        axes = self.axes_in_order(letter, where)
        return self.mesh.group(axes) if axes else None

    def all_reduce(self, x: Array, over: Iterable[str], op: str = "sum", where: str = "inside") -> Array:
        """``x``, unreduced over the axes of the letters ``over``, reduced in place. ``x`` must be contiguous."""
        axes = self.axes(over, where)
        if not axes:
            return x
        return self.mesh.group(axes).all_reduce(x, op, out=x, label=self.label)

    def start_all_reduce(
        self, x: Array, over: Iterable[str], op: str = "sum", where: str = "inside"
    ) -> Array | Pending:
        """``all_reduce`` without waiting for it; ``x`` itself where there is nothing to reduce."""
        axes = self.axes(over, where)
        if not axes:
            return x
        return self.mesh.group(axes).start_all_reduce(x, op, out=x, label=self.label)

    def all_gather(self, x: Array, dims: str, letter: str, *, across: str) -> Array:
        """``x[dims]`` of the residual stream with ``letter`` whole along the axes of ``across``.

        Moves bytes only where the stream shards ``letter`` over those axes: sequence parallelism.
        """
        if self._is_alone:
            return x
        for group, dim in self._gathers(dims, letter, across):
            x = group.all_gather(x, dim, label=self.label)
        return x

    def _find_gathers(self, dims: str, letter: str, across: str) -> list[tuple[Group, int]]:
        """The calls of such an ``all_gather``: their groups, and the dim."""
        return self._along(dims, letter, reversed(self._borrowed(letter, across)))

    def _along(self, dims: str, letter: str, axes: Iterable[str]) -> list[tuple[Group, int]]:
        return [(self.mesh.group(axis), dims.split().index(letter)) for axis in axes]

    def reduce_scatter(self, x: Array, dims: str, *, over: str, onto: str) -> Array:
        """``x[dims]``, unreduced over the axes of ``over``, reduced onto the residual stream.

        Where the stream shards ``onto`` over those axes each rank keeps its part; else this is an all_reduce.
        """
        if self._is_alone:
            return x
        calls = self._scatters(dims, over, onto)
        for group, dim in calls:
            x = group.reduce_scatter(x, dim, label=self.label)
        return self.all_reduce(x, over) if not calls and self._axes(over, "inside") else x

    def start_reduce_scatter(self, x: Array, dims: str, *, over: str, onto: str) -> Array | Pending:
        """``reduce_scatter`` without waiting for it; ``x`` itself where there is nothing to reduce."""
        calls = self._scatters(dims, over, onto)
        if not calls:
            return self.start_all_reduce(x, over)
        for group, dim in calls[:-1]:
            x = group.reduce_scatter(x, dim, label=self.label)
        group, dim = calls[-1]
        return group.start_reduce_scatter(x, dim, label=self.label)

    def all_to_all(
        self,
        x: Array,
        splits: Sequence[int],
        *,
        over: str,
        received: Sequence[int] | None = None,
    ) -> tuple[Array, list[int]]:
        """Send rows of ``x`` to the ranks along the axes of the letter ``over``: ``splits[i]`` rows to the i-th rank.

        Returns the received rows, in rank order, and the number of rows from each rank: the ``splits`` of the
        backward. A caller that has these numbers passes them (``received``), which saves their exchange; they must be
        right. Any number may be 0. Where the letter is whole, all rows stay on their rank.
        """
        group = self.group_of(over)
        if group is None:
            return x, list(splits)
        return group.all_to_all(x, splits=splits, received=received, label=self.label)

    def start_all_to_all(
        self, x: Array, splits: Sequence[int], *, over: str, received: Sequence[int] | None = None
    ) -> Array | Deferred:
        """The rows of ``all_to_all``, without waiting for them."""
        group = self.group_of(over)
        if group is None:
            return x
        rows = group.start_all_to_all(x, splits=splits, received=received, label=self.label)
        return Deferred(rows, itemgetter(0))

    def gather_rows(self, x: Array, *, over: str, where: str = "inside") -> Array:
        """The rows of ``x``, however many, of all ranks along the axes of these letters; for one letter in order."""
        axes = self.axes(over, where)
        if len(over) == 1:
            self._check_consecutive(over)
            axes = self._order(over, where, axes)
        return self.mesh.group(axes).all_gather(x, label=self.label) if axes else x

    def gather_whole(self, x: Array, dims: str, letter: str) -> Array:
        """``x[dims]``, as it is inside a layer, with ``letter`` whole on every rank."""
        self._check_consecutive(letter)
        for axis in reversed(self.axes_in_order(letter)):
            x = self.mesh.group(axis).all_gather(x, dims.split().index(letter), label=self.label)
        return x

    def reshard(self, x: Array, dims: str, after: str, shape: Sequence[int]) -> Array:
        """``x[dims]`` as ``x[after]``: the same array, sharded as other letters are. A rank keeps what it has.

        ``shape`` is the shape of the array that the ranks along the changed axes hold together.
        """
        axes, changes = self._change(dims, after)
        if not axes:
            return x
        key = "reshard", tuple(shape), x.dtype, dims, after
        plan = self._plans.get(key)
        if plan is None:
            from spmd_engine.sharding.halos import plan_reshard

            pairs = zip(dims.split(), after.split(), strict=True)
            weights = [(self.layout.weights(before), self.layout.weights(letter)) for before, letter in pairs]
            plan = self._plans[key] = plan_reshard(shape, x.dtype, changes, weights, self.mesh.peers(axes))
        return plan.execute(self.mesh.group(axes), {"x": [x]}, label=self.label)["x"][0]

    def gather_further(self, x: Array, dims: str, after: str) -> Array:
        """``x[dims]`` as ``x[after]``, whose letters are sharded over fewer axes, the first ones of ``dims``."""
        for dim, (further, _) in enumerate(self._change(dims, after)[1]):
            for axis in reversed(further):
                x = self.mesh.group(axis).all_gather(x, dim, label=self.label)
        return x

    def shard_further(self, x: Array, dims: str, after: str) -> Array:
        """This rank's part of ``x[dims]``, as ``after`` shards it over more axes: inverts ``gather_further``."""
        for dim, (letter, (_, further)) in enumerate(zip(after.split(), self._change(dims, after)[1], strict=True)):
            weights = self.layout.weights(letter)
            part = nested_span(x.shape[dim], further, self.mesh.axes, self.mesh.coordinates, weights)
            x = x[(slice(None),) * dim + (part,)]
        return x

    def _change(self, dims: str, after: str) -> tuple[tuple[str, ...], list[tuple[Axes, Axes]]]:
        from spmd_engine.sharding.halos import reshard_axes

        source, target = ([self.axes_in_order(letter) for letter in letters.split()] for letters in (dims, after))
        return reshard_axes(source, target, self.mesh)

    def reach(self, letter: str, length: int, reads: Reads, where: str = "inside") -> Reach:
        """This rank's part of a letter of ``length`` elements and of the outputs, and the inputs that these read."""
        self._check_consecutive(letter)
        return self._reach(letter, length, reads, where, self.mesh)

    def _reach(self, letter: str, length: int, reads: Reads, where: str, place: MeshPosition) -> Reach:
        from spmd_engine.sharding.halos import Reach

        weights = self.layout.weights(letter, where)
        return Reach.of(length, reads, self.axes_in_order(letter, where), place, weights)

    def with_halo(self, x: Array, dims: str, reads: Mapping[str, Reading], where: str = "inside") -> Array:
        """``x[dims]`` with exactly those elements of the letters in ``reads`` that this rank's outputs read.

        ``reads={"h": (224, Window(7, stride=2, before=3, after=3))}``: of 224 rows in all this rank has a shard; its
        shard of the outputs, which are sharded as evenly, reads an interval of rows, which ``reach`` returns. The
        elements come from the ranks that have them, for several letters at once. ``x`` itself where no letter is
        sharded.
        """
        halo = self._halo(x, dims, reads, where)
        return x if halo is None else halo[0].execute(halo[1], {"x": [x]}, label=self.label)["x"][0]

    def start_with_halo(
        self, x: Array, dims: str, reads: Mapping[str, Reading], where: str = "inside"
    ) -> Array | Deferred:
        """``with_halo`` without waiting for it; ``x`` itself where nothing is received."""
        halo = self._halo(x, dims, reads, where)
        return x if halo is None else Deferred(halo[0].start(halo[1], {"x": [x]}, label=self.label), _only_block)

    def add_halo(self, dx: Array, dims: str, reads: Mapping[str, Reading], where: str = "inside") -> Array:
        """The adjoint of ``with_halo``: from gradients of what outputs read, the sums for each rank's part.

        Elements that no output reads have gradient 0.
        """
        adding = self.start_add_halo(dx, dims, reads, where)
        return adding.wait() if isinstance(adding, Deferred) else adding

    def start_add_halo(
        self, dx: Array, dims: str, reads: Mapping[str, Reading], where: str = "inside"
    ) -> Array | Deferred:
        """``add_halo`` without waiting for it; ``dx`` itself where nothing is sent."""
        halo = self._halo(dx, dims, reads, where)
        if halo is None:
            return dx
        if is_half(dx.dtype):
            self.mesh.ledger.rounded.add(("all_to_all", halo[1].axes, self.label))
        return Deferred(halo[0].adjoint().start(halo[1], {"x": [dx]}, label=self.label), _only_block)

    def _halo(self, x: Array, dims: str, reads: Mapping[str, Reading], where: str) -> tuple[TransferPlan, Group] | None:
        """The transfer and its group, or None if nothing is sent; ``x`` may have its halo already."""
        sharded = {dims.split().index(letter): letter for letter in reads if self.axes(letter, where)}
        if not sharded:
            return None
        for letter in sharded.values():
            self._check_consecutive(letter)
        shape = tuple(reads[sharded[dim]][0] if dim in sharded else length for dim, length in enumerate(x.shape))
        key = shape, x.dtype, where, tuple((dim, letter, *reads[letter]) for dim, letter in sharded.items())
        group_axes = self.axes("".join(sharded.values()), where)
        if key not in self._plans:
            from spmd_engine.sharding.halos import plan_halos

            reaches = tuple(
                tuple((dim, self._reach(letter, *reads[letter], where, peer)) for dim, letter in sharded.items())
                for peer in self.mesh.peers(group_axes)
            )
            self._plans[key] = plan_halos(shape, x.dtype, reaches)
        plan = self._plans[key]
        return None if plan is None else (plan, self.mesh.group(group_axes))

    def _check_consecutive(self, letter: str) -> None:
        """Raise MeshError for a letter in a zigzag, of which a rank has an early and a late part, not an interval."""
        if letter in self.layout.zigzag and self.is_sharded(letter):
            raise MeshError(
                f"{self.label or 'a layer'} takes this rank's part of {letter} for an interval, but {letter} is "
                f"sharded over {', '.join(self.axes(letter))} in a zigzag: an early and a late part on each rank. "
                "Shard it without the zigzag, or use Layout.positions for the indices of a rank"
            )

    def _find_scatters(self, dims: str, over: str, onto: str) -> list[tuple[Group, int]]:
        """The calls of such a ``reduce_scatter``, over all axes of ``over``: their groups, and the dim. None where the
        residual stream does not shard ``onto`` over these axes."""
        borrowed = self._borrowed(onto, over)
        if borrowed and set(borrowed) != set(self.axes(over)):
            raise NotationError(
                f"reduce_scatter of {dims!r}: {over} is sharded over {self.axes(over)}, but the residual stream shards "
                f"{onto} only over {borrowed}; shard both over the same axes"
            )
        return self._along(dims, onto, borrowed)

    def _borrowed(self, letter: str, from_letter: str) -> tuple[str, ...]:
        """Axes that shard ``letter`` on the residual stream and ``from_letter`` inside."""
        return self._order(letter, "residual", self.axes(from_letter))

    def _order(self, letter: str, where: str, among: tuple[str, ...]) -> tuple[str, ...]:
        """The axes ``among`` that shard ``letter``, in the order in which they shard it: not always the mesh's."""
        return tuple(axis for axis in self.layout.axes(letter, where) if axis in among)
