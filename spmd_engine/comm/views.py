"""Ranks and arrays as data and pictures: the ranks of a mesh, and the block of an array that each rank holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from spmd_engine.arguments import checked
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.axes import PIPE, MeshPosition, all_positions, count_ranks, rank_grid, uneven_axes
from spmd_engine.comm.agreement.rank_zero import gather_json
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.notation import Spec
from spmd_engine.errors import NotationError, UsageError
from spmd_engine.pictures import COLOURS, WIDEST, Cell, Picture, grid, listed, size, table, text

# --- The ranks of a mesh by their coordinates, and the groups of each axis


MOST_RANKS = 1024  # ranks


def draw_mesh(axes: Mapping[str, int], ranks: np.ndarray | None = None, nodes: Sequence[str] = ()) -> Picture:
    """The last two axes are a grid; each axis before them is a row or a column of boxes around the grid.

    ``ranks`` by their coordinates, if they are not in order, and the ``nodes`` of ranks 0, 1, ..., if they are known.
    """
    if ranks is None:
        all_positions(axes)  # raises if there are too many
        ranks = rank_grid(axes)
    if ranks.size > MOST_RANKS:
        raise UsageError(f"mesh {MeshPosition(axes, {})} has {ranks.size} ranks; at most {MOST_RANKS} can be drawn")
    cells = _boxes(list(axes), np.arange(ranks.size).reshape(ranks.shape), ranks)
    rows = [("axis", "size", "groups: the ranks that a collective over this axis joins")]
    rows += [(axis, str(size), _groups(ranks, _dims_of_groups(axes, axis))) for axis, size in axes.items()]
    title = f"mesh {MeshPosition(axes, {})}: {count_ranks(axes)} ranks"
    names = dict.fromkeys(nodes)
    on_nodes = [f"node {name}: ranks {listed([r for r, node in enumerate(nodes) if node == name])}" for name in names]
    return Picture(title, cells, table(rows, "lrl"), on_nodes if len(names) > 1 else ())


def _boxes(axes: list[str], places: np.ndarray, ranks: np.ndarray) -> list[Cell]:
    """``places``: numbers of positions in ``ranks``, with a dimension an axis."""
    fastest = ranks.shape[-1]
    if len(axes) < 3:
        rows = places.reshape(-1, fastest)
        row_names = [f"{axes[0]} {row}" for row in range(len(rows))] if len(axes) == 2 else [""]
        column_names = [f"{axes[-1]} {column}" for column in range(fastest)]
        fills = [[COLOURS[place // fastest % len(COLOURS)] for place in row] for row in rows]
        texts = [[str(ranks.flat[place]) if ranks.flat[place] >= 0 else "" for place in row] for row in rows]
        return grid(row_names, column_names, texts, fills)
    cells: list[Cell] = []
    x = y = 0
    for place, part in enumerate(places):
        inside = _boxes(axes[1:], part, ranks)
        width, height = (side + more for side, more in zip(size(inside), (3, 2), strict=True))
        if x and x + width > WIDEST:  # no room to the right
            x, y = 0, y + height + 1
        cells.append(Cell(x, y, width, height))
        cells.append(text(x + 2, y + 1, f"{axes[0]} {place}"))
        cells += [cell.moved(x + 2, y + 2) for cell in inside]
        x += width + 2
    return cells


def _dims_of_groups(axes: Mapping[str, int], axis: str) -> list[int]:
    """The dims along which the ranks of a group over this axis differ."""
    names = list(axes)
    return [names.index(name) for name in (axis, *(uneven_axes(axes) if axis == PIPE else ()))]


def _groups(ranks: np.ndarray, dims: Sequence[int]) -> str:
    """``{0,1} {2,3}``: as many as a line has room for."""
    moved = np.moveaxis(ranks, dims, range(-len(dims), 0))
    groups = moved.reshape(-1, prod(ranks.shape[dim] for dim in dims))
    shown = ""
    for count, group in enumerate(groups):
        if not (members := group[group >= 0]).size:
            continue
        group_text = "{" + listed(members.tolist()) + "} "
        if len(shown) + len(group_text) > WIDEST - 30:
            return f"{shown}... {len(groups) - count} more"
        shown += group_text
    return shown.rstrip()


# --- An array's blocks over the ranks, as JAX's ``visualize_array_sharding`` draws them


MOST_BLOCKS = 1024  # blocks


@dataclass(frozen=True)
class RankBlock:
    """The block of an array that a rank holds; JAX calls it ``Shard``."""

    device: str  #: the node and the device on it: "node7 cpu", "node7 cuda:1"; empty if it is unknown
    rank: int
    coordinates: Mapping[str, int]  #: of the rank on the mesh
    index: tuple[slice, ...]  #: the block's place in the whole array
    replica_id: int  #: 0 for the first rank with this block, 1 for the next
    data: Array | None = field(default=None, repr=False, compare=False)  #: the block itself, on the rank that holds it

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the block."""
        return tuple(part.stop - part.start for part in self.index)

    @property
    def size(self) -> int:
        """The number of elements of the block."""
        return prod(self.shape)


@dataclass(frozen=True)
class ArraySharding:
    """Which block of an array each rank holds: the result of ``Mesh.describe``. ``print`` draws it, a notebook too.

    Names are those of a ``jax.Array`` where JAX has them.
    """

    spec: Spec
    shape: tuple[int, ...]  #: of the whole array
    axes: Mapping[str, int]  #: of the mesh, with their sizes
    global_shards: tuple[RankBlock, ...]  #: of all ranks that hold the array, by coordinates, the last axis fastest
    rank: int | None = None  #: this rank; None if the mesh has no ranks

    @classmethod
    def of(
        cls,
        spec: Spec,
        shape: Sequence[int],
        places: Sequence[MeshPosition],
        *,
        ranks: Sequence[int] | None = None,
        devices: Sequence[str] = (),
        rank: int | None = None,
        data: Array | None = None,
    ) -> ArraySharding:
        """The blocks of an array of the whole ``shape`` at these ``places`` of a mesh, which need not have ranks.

        ``ranks`` are their numbers, if these are not in order; ``devices`` are by rank; ``data`` is this rank's block.
        Raises NotationError for another number of dims, MeshError for an axis that the mesh does not have, UsageError
        if uneven stages have other blocks.
        """
        differing = {*uneven_axes(places[0].all_axes)} & {*spec.axes}
        if any(len({place.axes[axis] for place in places}) > 1 for axis in differing):
            raise UsageError(
                f'sharding "{spec}" on mesh {places[0]}: stages have other blocks; give the sizes of one stage'
            )
        replicas: dict[int, int] = defaultdict(int)
        blocks = []
        for number, place in enumerate(places):
            holder = ranks[number] if ranks is not None else place.index(None)
            block, index = spec.block(shape, place), place.index(spec.axes)
            device = devices[holder] if devices else ""
            own = data if holder == rank else None
            blocks.append(RankBlock(device, holder, dict(place.coordinates), block, replicas[index], own))
            replicas[index] += 1
        return cls(spec, tuple(shape), dict(places[0].axes), tuple(blocks), rank)

    @property
    def addressable_shards(self) -> tuple[RankBlock, ...]:
        """This rank's block, with its ``data`` if these were given."""
        return tuple(block for block in self.global_shards if block.rank == self.rank)

    def devices(self) -> set[str]:
        """The devices that hold the array."""
        return {block.device for block in self.global_shards}

    def __str__(self) -> str:
        return str(self.picture())

    def _repr_html_(self) -> str:
        return self.picture()._repr_html_()

    def picture(self, name: str = "", notes: Sequence[str] = ()) -> Picture:
        """The blocks with the ranks that hold them and their ranges of indices; ``name`` begins the title.

        The first dim that is split goes from top to bottom, the second from left to right; notes list others. Raises
        UsageError for more blocks than can be drawn.
        """
        spec, mesh = self.spec, MeshPosition(self.axes, {})
        if (count := mesh.axis_size(spec.axes)) > MOST_BLOCKS:
            raise UsageError(f'sharding "{spec}" on mesh {mesh} has {count} blocks; at most {MOST_BLOCKS} can be drawn')
        sharded = [dim for dim, (_, axes) in enumerate(spec) if axes]
        (down, across), others = _drawn_dims(sharded, len(self.shape)), sharded[2:]
        ranks: dict[tuple[int, int], list[int]] = defaultdict(list)
        first: dict[tuple[int, int], tuple[slice, ...]] = {}
        for block in self.global_shards:
            place = MeshPosition(self.axes, block.coordinates)
            cell = _part(spec, down, place), _part(spec, across, place)
            ranks[cell].append(block.rank)
            first.setdefault(cell, block.index)
        rows, columns = (max(parts) + 1 for parts in zip(*ranks, strict=True))
        cells = grid(
            [_name(spec, down, first[row, 0]) for row in range(rows)],
            [_name(spec, across, first[0, column]) for column in range(columns)],
            [[_label(ranks[r, c], first[r, c], spec, others) for c in range(columns)] for r in range(rows)],
            # Steps of 3 and 1 of 7 colours: neighbours never have equal colours.
            [[COLOURS[(3 * r + c) % len(COLOURS)] for c in range(columns)] for r in range(rows)],
        )
        title = f'{name}"{spec}", shape {_shape_text(self.shape)}, mesh {mesh}'
        remarks = [self._sizes(), *map(self._not_drawn, others), *notes]
        reach = {axis: len({block.coordinates[axis] for block in self.global_shards}) for axis in self.axes}
        if replicated_axes := [axis for axis, count in reach.items() if count > 1 and axis not in spec.axes]:
            copies = 1 + max(block.replica_id for block in self.global_shards)
            remarks.append(f"Each block is on {copies} ranks, which differ along {' and '.join(replicated_axes)}.")
        return Picture(title, cells, notes=remarks)

    def _sizes(self) -> str:
        """``Each rank holds 4 x 3.``, or from the smallest to the largest."""
        held = sorted({block.shape for block in self.global_shards}, key=lambda shape: (prod(shape), shape))
        if held == [()]:
            return "Each rank holds one number."
        if len(held) == 1:
            return f"Each rank holds {_shape_text(held[0])}."
        return f"Uneven: a rank holds from {_shape_text(held[0])} to {_shape_text(held[-1])}."

    def _not_drawn(self, dim: int) -> str:
        """``h/context is not drawn: 0:2 on ranks 0,2; 2:4 on ranks 1,3.``"""
        letter, axes = self.spec.dims[dim]
        ranks: dict[str, list[int]] = defaultdict(list)
        for block in self.global_shards:
            ranks[_range(block.index[dim])].append(block.rank)
        parts = [f"{part} on ranks {listed(held)}" for part, held in ranks.items()]
        if len(parts) > 4:
            parts[3:-1] = ["..."]
        return f"{letter}/{','.join(axes)} is not drawn: {'; '.join(parts)}."


@checked(sharding='letters with axes, as in "b/data d"')
def describe(mesh: Mesh, x: Array | Sequence[int], sharding: str | Spec) -> ArraySharding:
    """See ``Mesh.describe``."""
    spec = Spec.parse(sharding) if isinstance(sharding, str) else sharding
    places, ranks = mesh.peers(None), mesh.ranks_in_order
    if isinstance(x, Sequence):
        if isinstance(x, str) or any(not hasattr(length, "__index__") or length < 0 for length in x):
            raise UsageError(f"describe: the shape is {x!r}; give whole numbers from 0, as in (8, 6)")
        return ArraySharding.of(spec, x, places, ranks=ranks, devices=mesh.nodes, rank=mesh.rank)
    if not hasattr(x, "shape"):
        raise UsageError(f"describe: x is a {type(x).__name__}; give this rank's array, or the shape of the whole one")
    backend = backend_of(x)
    device = f"{mesh.nodes[mesh.rank]} {backend.name}" + (f":{x.device.id}" if backend.name == "cuda" else "")
    gathered = gather_json(mesh.group(), [x.shape, device], "describe")
    shape = _whole_shape(spec, [tuple(lengths) for lengths, _ in gathered], places)
    devices = dict(zip(ranks, (device for _, device in gathered), strict=True))
    return ArraySharding.of(
        spec, shape, places, ranks=ranks, devices=[devices[rank] for rank in range(mesh.size)], rank=mesh.rank, data=x
    )


def _whole_shape(spec: Spec, blocks: Sequence[tuple[int, ...]], places: Sequence[MeshPosition]) -> tuple[int, ...]:
    """The shape of the array whose blocks at ``places``, all of a mesh, have these shapes."""
    for block in blocks:
        if len(block) != len(spec.dims):
            raise NotationError(f'sharding "{spec}" has {len(spec.dims)} dims, the array has a block of shape {block}')
    along = [[peer.index(None) for peer in places[0].peers(axes)] for _, axes in spec]
    shape = tuple(sum(blocks[peer][dim] for peer in peers) for dim, peers in enumerate(along))
    for block, place in zip(blocks, places, strict=True):
        if block != (expected := spec.local_shape(shape, place)):
            where = ", ".join(f"{axis}={at}" for axis, at in place.coordinates.items())
            raise NotationError(
                f'an array of shape {shape} sharded as "{spec}" has the block {expected} at {where}; the block there '
                f"is {block}"
            )
    return shape


def _drawn_dims(sharded: Sequence[int], dims: int) -> tuple[int | None, int | None]:
    """The sharded dim drawn from top to bottom, and the one drawn from left to right."""
    if len(sharded) == 1:  # the last dim from left to right, like a vector and the columns of a matrix
        return (None, sharded[0]) if sharded[0] == dims - 1 else (sharded[0], None)
    return (sharded[0], sharded[1]) if sharded else (None, None)


def _part(spec: Spec, dim: int | None, place: MeshPosition) -> int:
    """The index of a rank's part of a dim."""
    return place.index(spec.dims[dim][1] if dim is not None else ())


def _name(spec: Spec, dim: int | None, block: Sequence[slice]) -> str:
    return f"{spec.dims[dim][0]} {_range(block[dim])}" if dim is not None else ""


def _label(ranks: Sequence[int], block: Sequence[slice], spec: Spec, others: Sequence[int]) -> str:
    """The ranks and, below, their indices: ``[0:4, :]``, with the letter of a dim that is split but not drawn."""
    indices = []
    for dim, ((letter, axes), part) in enumerate(zip(spec, block, strict=True)):
        indices.append(letter if dim in others else _range(part) if axes else ":")
    empty = any(part.start == part.stop for dim, part in enumerate(block) if dim not in others)
    held = f"[{', '.join(indices)}]" + (" empty" if empty else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks)}\n{held}"


def _range(part: slice) -> str:
    return f"{part.start}:{part.stop}"


def _shape_text(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes)) or "of a number"
