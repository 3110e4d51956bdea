"""Ranks arranged on named axes: ``Mesh(data=4, model=2)``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from math import ulp
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import numpy as np

from spmd_engine.arguments import checked
from spmd_engine.arrays.backend import CPU, Array, Backend
from spmd_engine.axes import MeshPosition, Over, axes_text, checked_axes, count_ranks, rank_grid
from spmd_engine.comm.communicators.communicator import Communicator
from spmd_engine.comm.communicators.threads import current_thread_communicator, solo
from spmd_engine.comm.group import Group, Out, Sizes
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.other_ranks import OtherRanks
from spmd_engine.comm.pending import TIMEOUT, Pending
from spmd_engine.comm.world import world
from spmd_engine.errors import MeshError, UsageError, WrongNumberOfRanks
from spmd_engine.runtime.activity import Activity

if TYPE_CHECKING:
    from spmd_engine.comm.notation import Spec
    from spmd_engine.comm.views import ArraySharding

_Arguments = ParamSpec("_Arguments")


def started(method: Callable[Concatenate[Any, _Arguments], Any]) -> Callable[Concatenate[Any, _Arguments], Pending]:
    """The ``start_...`` form of a blocking method: it takes the same arguments and returns a Pending."""

    @wraps(method)
    def start(self: Collectives, *args: _Arguments.args, **options: _Arguments.kwargs) -> Pending:
        return method(_Starting(self), *args, **options)

    return start


class _Starting:
    """A view of a mesh or group whose methods start their calls: ``all_reduce`` is the group's ``start_all_reduce``."""

    def __init__(self, ranks: Any) -> None:
        self._ranks, self.backend = ranks, getattr(ranks, "backend", CPU)

    def group(self, over: Over) -> _Starting:
        return _Starting(self._ranks.group(over))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, f"start_{name}")


class Collectives:
    """Collectives and messages ``over`` mesh axes, for any class with groups of ranks.

    Semantics, shapes and errors are those of ``Group``'s methods of the same names. ``start_...`` returns a Pending.
    """

    backend: Backend = CPU  #: of the arrays that are received

    def group(self, over: Over = None) -> Group:
        """The ranks that differ from this one only along the axes ``over`` (None: all axes)."""
        raise UsageError(f"{type(self).__name__} does not define group()")

    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32, *, zero: bool = False) -> np.ndarray:
        """A host array in memory that the ranks of this node share, uninitialized or zero.

        Collectives read and reduce it in place, without a copy. Use it for flat buffers of parameters and gradients and
        other large arrays that are communicated often, also as ``out``. The memory is released with its last view.
        Every rank has an arena of bounded size for such arrays; without an arena, or when it is full, the array is in
        ordinary memory, which all collectives accept.
        """
        x = self.group().connections.empty((shape,) if isinstance(shape, int) else tuple(shape), dtype)
        if zero:
            x.fill(0)
        return x

    def barrier(self, over: Over = None) -> None:
        return self.group(over).barrier()

    start_barrier = started(barrier)

    def broadcast(self, arr: Array | None, root: int = 0, *, over: Over = None, label: str = "") -> Array:
        return self.group(over).broadcast(arr, root, label=label)

    start_broadcast = started(broadcast)

    def all_gather(
        self, arr: Array, axis: int = 0, *, over: Over = None, sizes: Sizes = None, out: Out = None, label: str = ""
    ) -> Array:
        return self.group(over).all_gather(arr, axis, sizes=sizes, out=out, label=label)

    start_all_gather = started(all_gather)

    def all_reduce(self, arr: Array, op: str = "sum", *, over: Over = None, out: Out = None, label: str = "") -> Array:
        return self.group(over).all_reduce(arr, op, out=out, label=label)

    start_all_reduce = started(all_reduce)

    def reduce_scatter(
        self,
        arr: Array,
        axis: int = 0,
        op: str = "sum",
        *,
        over: Over = None,
        sizes: Sizes = None,
        out: Out = None,
        label: str = "",
    ) -> Array:
        return self.group(over).reduce_scatter(arr, axis, op, sizes=sizes, out=out, label=label)

    start_reduce_scatter = started(reduce_scatter)

    def all_to_all(
        self,
        arr: Array,
        axis: int = 0,
        concat_axis: int | None = None,
        *,
        over: Over = None,
        splits: Sizes = None,
        received: Sizes = None,
        out: Out = None,
        label: str = "",
    ) -> Any:
        group = self.group(over)
        return group.all_to_all(arr, axis, concat_axis, splits=splits, received=received, out=out, label=label)

    start_all_to_all = started(all_to_all)

    def send(self, dest_id: int, arr: Array, *, over: Over = None, label: str = "") -> None:
        return self.group(over).send(dest_id, arr, label=label)

    start_send = started(send)

    def receive(self, src_id: int, *, over: Over = None, label: str = "") -> Array:
        return self.group(over).receive(src_id, like=self.backend, label=label)

    start_receive = started(receive)


def ranks_by_position(nodes: Sequence[str], order: Sequence[int] | None = None) -> list[int]:
    """The rank at each position of a mesh, of ranks on these ``nodes``: node by node.

    ``order`` has a number for each position: that of its rank, in this list. Raises MeshError unless it has each once.

    >>> ranks_by_position(["a", "b", "a"]), ranks_by_position(["a", "b", "a"], [2, 0, 1])
    ([0, 2, 1], [1, 0, 2])
    """
    on_nodes: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        on_nodes.setdefault(node, []).append(rank)
    ranks = [rank for members in on_nodes.values() for rank in members]
    if order is None:
        return ranks
    if sorted(order) != list(range(len(ranks))):
        raise MeshError(f"rank order {','.join(map(str, order))}: it must have each of 0 to {len(ranks) - 1} once")
    return [ranks[number] for number in order]


class Mesh(Collectives, MeshPosition):
    """All ranks of a communicator, arranged row-major on named axes; the last-named axis varies fastest.

    Ranks of one node are neighbours, so that the last-named axes, which communicate most, stay inside a node where
    their sizes allow. ``with Mesh(...) as mesh`` or ``close()`` frees the communicators of its groups.
    ``deterministic``: use rank order also for sums between nodes. (All sums are in a fixed order in either case.)
    ``order``: which rank is at each position, for unequal ranks: see ``ranks_by_position``.
    ``Mesh(pipe=2, model=(1, 2))``: stages may have different sizes along an axis. A group over ``pipe`` then includes
    that axis, and ``axes`` are those of this rank's stage.
    Raises MeshError if the sizes do not give the number of ranks, the order names other ranks, or axes have no names.
    """

    others: OtherRanks  #: the ranks of the job that are not on the mesh, if there are any

    @checked(
        {"timeout": ulp(0)},
        comm="axes by name, as in Mesh(data=2, model=2)",
        timeout="seconds above 0, or None to wait for ever",
    )
    def __init__(
        self,
        comm: Communicator | None = None,
        /,
        *,
        check: bool = True,
        timeout: float | None = TIMEOUT,
        ledger: Ledger | None = None,
        deterministic: bool = False,
        order: Sequence[int] | None = None,
        **axes: int | Sequence[int],
    ) -> None:
        self.comm = comm if comm is not None else world()
        self.others = OtherRanks(self.comm)
        self.axes = self.all_axes = checked_axes(axes or {"data": self.comm.size})
        self.ledger = ledger if ledger is not None else Ledger()
        #: of its groups
        self.options: dict[str, Any] = {"check": check, "timeout": timeout, "deterministic": deterministic}
        self._groups: dict[tuple, Group] = {}
        self._owned: list[Communicator] = []
        self._closed = False
        if (ranks := count_ranks(self.all_axes)) != self.comm.size:
            threads = current_thread_communicator() is not None
            raise WrongNumberOfRanks(str(self), ranks, self.comm.size, threads=threads)
        self.nodes = list(self.comm.hosts)
        #: ranks of the communicator by coordinates: an array with one dimension for each axis; -1 where a stage of
        #: an uneven mesh has no rank
        self.ranks = rank_grid(self.all_axes, ranks_by_position(self.nodes, order))
        self.rank, self.size = self.comm.rank, self.comm.size
        coordinates = np.argwhere(self.ranks == self.rank)[0]
        MeshPosition.__init__(self, self.all_axes, dict(zip(self.axes, map(int, coordinates), strict=True)))

    def group(self, over: Over = None, *, among: Mapping[str, Sequence[int]] | None = None) -> Group:
        """The ranks that differ from this one only along ``over``, as a Group; created on first use.

        Their order follows the axes as written: over ("data", "expert"), expert varies fastest. ``among`` selects some
        coordinates of an axis, including this rank's: ``group("pipe", among={"pipe": (0, 3)})``. Raises MeshError if
        ``among`` omits this rank's coordinate or names an axis that is not in ``over``.
        """
        asked = over if over is None or type(over) in (str, tuple) else self._names(over)
        if not among and (group := self._groups.get((asked, ()))) is not None:
            return group
        names = self._names(asked)
        places = tuple((name, tuple(among[name])) for name in names if name in among) if among else ()
        if among and len(places) < len(among):
            raise MeshError(
                f"among selects coordinates of axes {', '.join(among)}, but the group is over {', '.join(names)}"
            )
        if (names, places) not in self._groups:
            if self._closed:
                raise MeshError(f"mesh {self} is closed, by its 'with' or close(); make calls before, or another mesh")
            members = self._members(names, dict(places))
            if members == list(range(self.size)):
                comm = self.comm
            else:
                comm = self.comm.subset(members, self.options["timeout"])
                self._owned.append(comm)
            group = Group(comm, ",".join(names) or "no axis", self.ledger, **self.options)
            group.lowest = members.index(min(members))
            self._groups[names, places] = group
        group = self._groups[names, places]
        if not among:
            self._groups[asked, ()] = group
        return group

    def _members(self, names: tuple[str, ...], among: Mapping[str, Sequence[int]]) -> list[int]:
        sizes = self.all_axes if self._joins_stages(names, alone=True) else self.axes

        def places(axis: str) -> Sequence[int]:
            if axis not in names:
                return [self.coordinates[axis]]
            all_places = range(sizes[axis])
            chosen = among.get(axis, all_places)
            if len(set(chosen)) < len(chosen) or not set(chosen) <= set(all_places):
                last = all_places[-1]
                raise MeshError(f"places {list(chosen)} of axis {axis!r}: use each of 0 to {last} at most once")
            if self.coordinates[axis] not in chosen:
                raise MeshError(f"rank {self.rank} is not among the places {list(chosen)} of axis {axis!r}")
            return chosen

        axes = list(self.axes)
        others = [axis for axis in axes if axis not in names]
        part = self.ranks[np.ix_(*(places(axis) for axis in axes))]
        members = part.transpose([axes.index(axis) for axis in (*others, *names)]).reshape(-1)
        return members[members >= 0].tolist()

    def alone(self) -> Mesh:
        """A mesh of this rank alone."""
        mesh = Mesh(solo(self.comm.progress), ledger=self.ledger)
        mesh.others = self.others
        return mesh

    def all_ranks(self, name: str = "world") -> Group:
        """All ranks of the job, also those that are not on the mesh; ``name`` stands for axes."""
        if name == "world" and self.comm is self.others.world:
            return self.group()
        return Group(self.others.world, name, self.ledger, timeout=self.options["timeout"])

    @property
    def checks(self) -> bool:
        """Whether ranks of a node compare their calls."""
        return bool(self.options["check"])

    @property
    def activity(self) -> Activity:
        """The present activity of this rank, for the watchdog: ``with mesh.activity.phase("reading data"): ...``."""
        return self.comm.progress.activity

    @property
    def local_rank(self) -> int:
        """This rank's number on its node."""
        return self.nodes[: self.rank].count(self.nodes[self.rank])

    @property
    def process_on_node(self) -> tuple[int, int]:
        """The number of this rank's process on its node, and how many there are, with those that are not on the mesh:
        virtual ranks have one."""
        comm = self.others.world
        if comm.in_one_process:
            return 0, 1
        return list(comm.hosts[: comm.rank]).count(comm.node), list(comm.hosts).count(comm.node)

    @property
    def nodes_by_rank(self) -> list[str]:
        """The node of each rank of ``group()``."""
        return [self.nodes[rank] for rank in self.ranks_in_order]

    def nodes_at(self, places: Iterable[MeshPosition]) -> list[str]:
        """The node of the rank at each of these places of the mesh."""
        return [self.nodes[self.ranks[tuple(place.coordinates.values())]] for place in places]

    @property
    def ranks_in_order(self) -> list[int]:
        """The ranks of ``group()``, by their number there."""
        return self.ranks[self.ranks >= 0].tolist()

    @property
    def node_count(self) -> int:
        return len(set(self.nodes))

    def describe(self, x: Array | Sequence[int], sharding: str | Spec) -> ArraySharding:
        """Which block of an array each rank holds: its device, rank, coordinates, index and size, and a picture.

        ``x`` is this rank's block of the array, which asks all ranks for theirs by one all_gather, or the shape of the
        whole array, which needs no communication. ``mesh.describe((8, 6), "b/data f/model")``, as in ``shard``.
        Raises NotationError if the sharding has another number of dims, or if the blocks are not those of one array so
        sharded; MeshError if it names an axis that the mesh does not have.
        """
        from spmd_engine.comm.views import describe

        return describe(self, x, sharding)

    def close(self) -> None:
        """Free the sub-communicators. Afterwards the mesh and its groups refuse all calls."""
        for group in self._groups.values():
            group.close()
        for comm in self._owned:
            comm.free()
        self._owned.clear()
        self._groups.clear()
        self._closed = True

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Mesh({self})"

    def _repr_html_(self) -> str:
        from spmd_engine.comm.views import draw_mesh

        return draw_mesh(self.all_axes, self.ranks, self.nodes)._repr_html_()


def mesh_on(ranks: Sequence[int], axes: Mapping[str, Any], others: OtherRanks, **options: Any) -> Mesh | None:
    """The mesh of these ranks of the world, beside the ``others``; None on one of these. ``options``: of ``Mesh``."""
    world = others.world
    if world.rank not in ranks:
        return None
    comm = world if len(ranks) == world.size else world.subset(ranks, options.get("timeout", TIMEOUT))
    mesh = Mesh(comm, **options, **axes)
    mesh.others = others
    mesh._owned += [comm] if comm is not world else []
    return mesh


def mesh_beside(
    ranks: Sequence[int], axes: Mapping[str, Any], comm: Communicator | None = None, **options: Any
) -> Mesh:
    """The mesh of the ranks of the world but these ``ranks``, which are its ``others``; on one of them, a mesh of all
    ranks. ``options`` are those of ``Mesh``. Raises UsageError if the world lacks a rank."""
    comm = comm if comm is not None else world()
    if ranks and max(ranks) >= comm.size:
        raise UsageError(f"helper rank {max(ranks)}: the job has the ranks 0 to {comm.size - 1}")
    if axes and ranks and count_ranks(axes) != comm.size - len(ranks):  # on the other ranks, too
        raise WrongNumberOfRanks(axes_text(axes), count_ranks(axes), comm.size - len(ranks))
    others = OtherRanks(comm, ranks, options.get("timeout", TIMEOUT))
    mesh = mesh_on(others.on_mesh, axes, others, **options)
    if mesh is None:
        mesh = Mesh(comm, **{**options, "order": None})
        mesh.others = others
    return mesh
