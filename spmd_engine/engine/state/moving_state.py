"""State that moves with an engine to another mesh, beside its parameters: the scalars of a training, a cache of
sequences under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from spmd_engine.arrays.attention import HIDDEN
from spmd_engine.arrays.backend import Array, Backend
from spmd_engine.comm import Group
from spmd_engine.comm.agreement.rank_zero import gather_json
from spmd_engine.comm.blocks import span
from spmd_engine.layers.attention.kv_cache import Cache, Columns
from spmd_engine.sharding import Rectangle, Shards, plan_transfer
from spmd_engine.sharding.placement import Held, Placement, exchange_placements

if TYPE_CHECKING:
    from spmd_engine.engine.layered import LayeredEngine

Parts = Mapping[str, tuple[Rectangle, Array]]  #: parts of whole arrays, by name: one part of an array at most


class MovingState(Protocol):
    """What an engine's user keeps of it, and takes along to another mesh: see ``LayeredEngine.reshard``."""

    def pack(self, engine: LayeredEngine) -> tuple[Any, Parts]:
        """On each rank of the old mesh, before the move: facts that ranks of the new mesh need, as JSON, and this
        rank's parts of arrays."""
        ...

    def unpack(self, engine: LayeredEngine | None, facts: Sequence[Any], whole: Placement) -> Parts:
        """On each rank of both meshes, after the move: continue from the facts that the ranks of the old mesh have
        packed, in rank order, and from the ``whole`` arrays of their parts. Returns new arrays for the parts that this
        rank needs from now on, which are filled then. ``engine`` is None outside the new mesh: a rank needs none there.
        """
        ...


def unpack(
    states: Sequence[MovingState],
    packed: Sequence[tuple[Any, Parts]],
    engine: LayeredEngine | None,
    group: Group,
    backend: Backend,
) -> None:
    """Move states after their engine, by what each rank has ``packed`` of them: None and no parts where the engine was
    not placed. Collective over the ranks of both meshes."""
    for state, (facts, parts) in zip(states, packed, strict=True):
        all_facts = gather_json(group, facts, "placement")
        source = exchange_placements(group, {"": _held(parts)})[""]
        new = state.unpack(engine, [known for known in all_facts if known is not None], source)
        if source:
            target = exchange_placements(group, {"": _held(new)})[""]
            plan = plan_transfer(source, target, nodes=list(group.comm.hosts))
            blocks, out = ({name: [array] for name, (_, array) in one.items()} for one in (parts, new))
            plan.execute(group, blocks, out=out, like=backend, label="reshard")


def _held(parts: Parts) -> Held:
    return {name: (array.dtype, rectangle) for name, (rectangle, array) in parts.items()}


# --- The move of a KV cache: to the ranks that have its heads, its layers, and its sequences then
#
# An array of the move holds the keys, or the values, of one sequence in one layer on one part of s: [t h k], in the
# order of positions. The ranks that shard s on the new mesh take even parts of each.


def pack_cache(engine: LayeredEngine, cache: Cache, sequences: Sequence[int]) -> tuple[dict[str, Any], Parts]:
    """Facts of this rank's cache that ranks of another mesh need, as JSON, and its keys and values: views.

    ``sequences``: the numbers by which all ranks know those of the cache.
    """
    windows, parts, part = [], {}, engine.mesh.index(engine.layout.axes("s"))
    for window, columns in cache.by_window.items():
        positions, arrays = columns.packed()
        rows = list(zip(sequences, positions, columns.dropped, strict=True))
        layers = {layer: len(several) for layer, several in arrays.items()}
        windows.append({"window": window, "part": part, "layers": layers, "rows": rows})
        for layer, several in arrays.items():
            heads = _heads(engine, layer)
            for row, (sequence, held, _) in enumerate(rows):
                for number, x in enumerate(several if held else ()):
                    block = Rectangle((0, heads.start, 0), (len(held), heads.stop, x.shape[-1]))
                    parts[_name(layer, number, sequence, part)] = block, x[row, : len(held)]
    return {"lengths": list(zip(sequences, cache.lengths, strict=True)), "windows": windows}, parts


def unpack_cache(
    engine: LayeredEngine, sequences: Sequence[int], facts: Sequence[Mapping[str, Any]], whole: Placement
) -> tuple[Cache, Parts]:
    """This rank's cache on another mesh, for some of the sequences, by the facts that all ranks of the old mesh have
    packed; and the parts of ``whole`` arrays that fill it."""
    lengths = {sequence: length for rank in facts for sequence, length in rank["lengths"]}
    of, part = engine.mesh.axis_size(engine.layout.axes("s")), engine.mesh.index(engine.layout.axes("s"))
    here = {engine.model.layers[n][0] for chunk in engine.assignment.mine for n in engine.assignment.chunks[chunk]}
    cache, parts = Cache([lengths[sequence] for sequence in sequences]), {}
    several = [window for rank in facts for window in rank["windows"]]
    for window in dict.fromkeys(columns["window"] for columns in several):
        held: dict[int, dict[int, Sequence[int]]] = {}  # by sequence and part of s on the old mesh: positions
        dropped, layers = dict.fromkeys(sequences, 0), {}
        for columns in several:
            if columns["window"] == window:
                layers |= {layer: count for layer, count in columns["layers"].items() if layer in here}
                for sequence, positions, first in columns["rows"]:
                    held.setdefault(sequence, {})[columns["part"]] = positions
                    dropped[sequence] = max(first, dropped.get(sequence, 0))
        pieces, places = [], []
        for row, sequence in enumerate(sequences):
            mine: list[int] = []
            for old, positions in sorted(held.get(sequence, {}).items()):
                taken, begin = span(len(positions), of, part), len(mine)
                mine += positions[taken]
                if len(mine) > begin:
                    pieces.append((sequence, old, taken, (row, slice(begin, len(mine)))))
            places.append(mine)
        if not pieces or not layers:
            continue
        used, room = max(map(len, places)), {}
        for layer, count in layers.items():
            heads = _heads(engine, layer)
            for number in range(count):
                one = whole[_name(layer, number, *pieces[0][:2])]
                shape = len(places), used, heads.stop - heads.start, one.shape[-1]
                x = engine.backend.xp.zeros(shape, one.dtype)  # hidden values must be finite
                room.setdefault(layer, []).append(x)
                for sequence, old, taken, place in pieces:
                    block = Rectangle((taken.start, heads.start, 0), (taken.stop, heads.stop, one.shape[-1]))
                    parts[_name(layer, number, sequence, old)] = block, x[place]
        padded = np.array([mine + [HIDDEN] * (used - len(mine)) for mine in places])
        firsts = [dropped[sequence] for sequence in sequences]
        cache.by_window[window] = Columns.of(window, engine.backend.asarray(padded), firsts, room)
    return cache, parts


def _heads(engine: LayeredEngine, layer: str) -> slice:
    """This rank's heads of keys in a layer."""
    sizes = dict(engine.model.layers)[layer].sizes
    return Shards(engine.mesh, engine.layout, layer).span("h", sizes["h"])


def _name(layer: str, number: int, sequence: int, part: int) -> str:
    return f"{layer}/{number}/{sequence}/{part}"
