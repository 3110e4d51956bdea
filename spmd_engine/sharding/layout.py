"""Layouts: the mesh axes that shard each letter, and so the strategy of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.axes import MeshPosition
from spmd_engine.comm.notation import EVEN, Spec, Weights, nested_span
from spmd_engine.errors import MeshError, NotationError, one_of

#: The letters that a mesh axis of a customary name shards. Data parallelism shards the batch (``replicate`` and
#: ``shard`` say how parameters are stored); expert parallelism the experts and, in layers without experts, the batch;
#: tensor parallelism the heads, the hidden width and the vocabulary, and, with fewer key heads than ranks, ``queries``
#: the queries that share a key head, and again the other two; a 2-D mesh of weights their rows and their columns;
#: context parallelism the sequence; a pipeline the list of layers, and so no letter.
CUSTOMARY = {
    **dict.fromkeys(("data", "replicate", "shard"), "b"),
    "expert": "be",
    "model": "hfv",
    "queries": "rfv",
    "row": "d",
    "col": "f",
    "context": "s",
    "pipe": "",
}

EVENLY = "se"  #: letters that are sharded evenly also over axes with weights: positions and experts

TENSOR = ("model", "queries")  #: axes of tensor parallelism, whose ranks have the same samples

Axes = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Layout:
    """The mesh axes that shard each letter, ``inside`` a layer and on the ``residual`` stream between layers.

    The two differ under sequence parallelism: the stream's ``s`` is then sharded over the axis that shards the heads
    inside. A letter without axes is whole on every rank.
    """

    inside: Axes = field(default_factory=dict)
    residual: Axes = field(default_factory=dict)
    zigzag: str = ""  #: letters of which each rank has an early and a late part: see ``positions_by_rank``
    experts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  #: layer -> each expert's part: see ``parts``
    #: axis -> its ranks' relative shares of each letter that it shards inside: (3, 1); other axes shard evenly
    shares: Weights = field(default_factory=dict)
    _specs: dict[tuple[str, str], Spec] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def for_mesh(
        cls,
        mesh: MeshPosition,
        *,
        sequence_parallel: bool = False,
        zigzag: bool = False,
        queries_sharded: bool = False,
        experts_over: Sequence[str] | None = None,
        experts: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ) -> Layout:
        """The customary layout of a mesh whose axes have customary names; raises MeshError for other axes.

        ``sequence_parallel`` shards the residual stream's s over ``model`` and ``queries``, too. ``zigzag`` shards the
        sequence over ``context`` so that causal attention is equal work on every rank. ``queries_sharded``:
        ``model`` shards the r queries that share a key head, not the key heads, for models with too few of these.
        ``experts_over`` are the axes that shard the experts instead of ``expert``, from those that shard tokens.
        ``experts`` has, for some layers, the part of each expert: see ``parts``.
        """
        inside: dict[str, tuple[str, ...]] = {}
        for axis in mesh.axes:
            if axis not in CUSTOMARY:
                why = f"no customary layout for axis {axis!r}; {one_of(axis, CUSTOMARY)}, or pass a Layout"
                raise MeshError(f"mesh {mesh}: {why}")
            letters = CUSTOMARY[axis].replace("h", "r") if queries_sharded else CUSTOMARY[axis]
            for letter in letters:
                inside[letter] = (*inside.get(letter, ()), axis)
        if experts_over is not None:
            token_axes = [axis for axis in mesh.axes if set(CUSTOMARY[axis]) & set("bs")]
            for axis in experts_over:
                if axis not in token_axes:
                    raise MeshError(
                        f"mesh {mesh}: experts cannot be over axis {axis!r}, along which ranks have the same tokens or "
                        f"none; they can be over {', '.join(token_axes) or 'no axis here'}"
                    )
            inside["e"] = tuple(experts_over)
        residual = dict(inside)
        if sequence_parallel and (tensor := [axis for axis in mesh.axes if axis in TENSOR]):
            residual["s"] = (*inside.get("s", ()), *tensor)
        return cls(inside, residual, "s" if zigzag else "", experts)

    def axes(self, letter: str, where: str = "inside") -> tuple[str, ...]:
        """The axes that shard a letter ``inside`` a layer or on the ``residual`` stream."""
        return {"inside": self.inside, "residual": self.residual}[where].get(letter, ())

    def weights(self, letter: str, where: str = "inside") -> Weights:
        """The weights of the axes that shard a letter by weights; letters of ``EVENLY`` have no such axes."""
        if letter in EVENLY:
            return EVEN
        return {axis: self.shares[axis] for axis in self.axes(letter, where) if axis in self.shares}

    def parts(self, layer: str, letter: str, count: int, mesh: MeshPosition) -> tuple[int, ...]:
        """The part of each of a layer's ``count`` elements of a letter, such as its experts.

        Parts are numbered along the axes that shard the letter, as ranks are in ``mesh.group(self.axes(letter))``. They
        are consecutive elements, as even as possible, unless ``experts`` has the layer. Raises MeshError if ``experts``
        has another number of elements there, or parts that the mesh does not have.
        """
        axes = self.axes(letter)
        if layer not in self.experts:
            spans = (nested_span(count, axes, mesh.axes, peer.coordinates) for peer in mesh.peers(axes))
            return tuple(part for part, span in enumerate(spans) for _ in range(span.start, span.stop))
        parts, total = tuple(self.experts[layer]), mesh.axis_size(axes)
        if len(parts) != count or not set(parts) <= set(range(total)):
            listed = ", ".join(map(str, parts))
            raise MeshError(f"{layer}: {count} experts in parts {listed}; on mesh {mesh} parts are 0 to {total - 1}")
        return parts

    def positions_by_rank(self, length: int, mesh: MeshPosition, letter: str = "s") -> list[np.ndarray]:
        """The indices of a letter, ``length`` long in all, that each rank of the letter's axes has inside.

        Ranks are in the order of ``mesh.group(self.axes(letter))``; each rank's indices ascend. Every rank has as many
        as ``nested_span`` returns: consecutive ones, or, where the letter is sharded in a ``zigzag``, half of them from
        the beginning and half from the end. A zigzag splits the letter into 2n parts, of which rank i has parts i and
        2n-1-i, so that early queries, which read few keys, are on a rank with late ones.
        """
        axes = self.axes(letter)
        ranks = product(*(range(mesh.axis_size(axis)) for axis in axes))
        weights = self.weights(letter)
        spans = [nested_span(length, axes, mesh.axes, dict(zip(axes, rank, strict=True)), weights) for rank in ranks]
        if letter not in self.zigzag:
            return [np.arange(part.start, part.stop) for part in spans]
        early, late, ranges = 0, length, []
        for part in spans:
            count = part.stop - part.start
            front, back = count - count // 2, count // 2
            ranges.append(np.concatenate((np.arange(early, early + front), np.arange(late - back, late))))
            early, late = early + front, late - back
        return ranges

    def positions(self, length: int, mesh: MeshPosition, where: str = "inside", letter: str = "s") -> np.ndarray:
        """The ascending indices that this rank has of a letter, ``length`` long in all: of a sequence, by default.

        On the ``residual`` stream they are the indices inside, further sharded over the axes that the stream adds.
        """
        inside = self.axes(letter)
        positions = self.positions_by_rank(length, mesh, letter)[mesh.index(inside)]
        if where == "residual":
            further = self.axes(letter, where)[len(inside) :]
            positions = positions[nested_span(len(positions), further, mesh.axes, mesh.coordinates)]
        return positions

    def check(self, name: str, letters: Iterable[str], may_cut: str, across: str, stream: str = "bs") -> None:
        """Raise NotationError if a layer cannot work under this layout.

        ``letters`` are those of its arrays, ``may_cut`` those that may be sharded inside it, ``stream`` those of its
        inputs and outputs. ``across`` are the letters over whose axes it gathers from the residual stream, which may
        shard the stream's letters further over those axes and no others.
        """
        try:
            self.spec(" ".join(dict.fromkeys("bs" + across)))  # an activation has all of these letters
        except NotationError as error:
            raise NotationError(f"{name}: {error}") from None
        for letter in letters:
            axes = self.axes(letter)
            if axes and letter not in may_cut:
                raise NotationError(
                    f'{name}: {letter} is sharded over mesh axis "{",".join(axes)}" inside, but this layer needs it '
                    f"whole; it can be sharded along {', '.join(may_cut)}"
                )
        for letter in stream:
            inside, outside = self.axes(letter), self.axes(letter, "residual")
            borrowed = outside[len(inside) :]
            if outside[: len(inside)] != inside:
                raise NotationError(
                    f"{name}: the residual stream shards {letter} over {outside}; it must shard it over {inside} "
                    "first, as inside the layers"
                )
            if across and not set(borrowed) <= {axis for gathered in across for axis in self.axes(gathered)}:
                raise NotationError(
                    f"{name}: the residual stream shards {letter} over {borrowed}, which do not shard {across} inside; "
                    f"shard {across} over the same axes, or {letter} over no more than inside"
                )

    def spec(self, dims: str, where: str = "inside") -> Spec:
        """``spec("d f")`` is ``"d f/model"`` where the layout shards f over model."""
        if (dims, where) not in self._specs:  # equal layers use the same
            try:
                letters = dims.split()
                weights = (pair for letter in letters for pair in self.weights(letter, where).items())
                spec = Spec(tuple((letter, self.axes(letter, where)) for letter in letters), tuple(weights)).checked()
            except NotationError as error:
                raise NotationError(f"{error} (dims {dims!r} {where} a layer)") from None
            self._specs[dims, where] = spec
        return self._specs[dims, where]


# --- Blocks of whole arrays, and whole arrays from blocks, where a letter may be sharded in a zigzag


def block_of(x: Array, dims: str, layout: Layout, mesh: MeshPosition, first: int = 0) -> Array:
    """This rank's block of the whole ``x[dims]``, as it is inside layers; the first ``first`` dims stay as they are."""
    for dim, letter in enumerate(dims.split()):
        axes = layout.axes(letter)
        if dim < first or not axes:
            continue
        mine = layout.positions_by_rank(x.shape[dim], mesh, letter)[mesh.index(axes)]
        x = backend_of(x).xp.take(x, mine, axis=dim)
    return x


def in_order(x: Array, dims: str, layout: Layout, mesh: MeshPosition) -> Array:
    """The whole ``x[dims]`` in order, from the ranks' blocks joined rank by rank."""
    for dim, letter in enumerate(dims.split()):
        if letter in layout.zigzag and layout.axes(letter):
            order = np.argsort(np.concatenate(layout.positions_by_rank(x.shape[dim], mesh, letter)))
            x = backend_of(x).xp.take(x, order, axis=dim)
    return x
