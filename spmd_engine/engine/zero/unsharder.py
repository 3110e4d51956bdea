"""What layers compute with: views of whole parameters, gathered a little ahead of use where they are in parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from spmd_engine.arrays.backend import Array
from spmd_engine.engine.zero.storage import GroupStorage
from spmd_engine.errors import UnknownParameter


class Unsharder:
    """Parameters by layer. A group that is stored in parts is whole only from its gather to its release.

    ``uses`` holds, for each layer of this rank, its own names of its parameters and their full names; ``buffers`` its
    buffers, which are always here, by its own names.
    """

    def __init__(
        self,
        storages: Sequence[GroupStorage],
        uses: Mapping[int, Mapping[str, str]],
        buffers: Mapping[int, Mapping[str, Array]] = MappingProxyType({}),
    ) -> None:
        self._uses, self._buffers = uses, buffers
        self._storage_of = {name: storage for storage in storages for name in storage.group.spans}
        self._storages = {
            layer: list(dict.fromkeys(map(self._storage_of.__getitem__, names.values())))
            for layer, names in uses.items()
        }
        self._layers: dict[GroupStorage, list[int]] = {}  # which use a group
        for layer, used in self._storages.items():
            for storage in used:
                self._layers.setdefault(storage, []).append(layer)
        self._in_parts = any(storage.zero == 3 for storage in storages)
        self._trees: dict[int, dict[str, Any]] = {}  # of layers whose parameters are here
        self._whole: list[GroupStorage] = []  # stored in parts, and whole for now

    def unshard(self, layer: int, *, keep: Iterable[int] = (), prefetch: Iterable[int] = ()) -> dict[str, Any]:
        """The parameters of a layer by its own names, "norm/scale" at ["norm"]["scale"], until the next call.

        Groups that are used neither by it nor by the layers to ``keep`` are released. Of the layers that come
        next, to ``prefetch``, the first group that is not here begins to be gathered.
        """
        if self._in_parts:
            self._gather(layer, keep, prefetch)
        if layer not in self._trees:
            names = self._uses[layer]
            arrays = {own: self._storage_of[full].parameters[full] for own, full in names.items()}
            self._trees[layer] = _tree({**arrays, **self._buffers.get(layer, {})})
        return self._trees[layer]

    def _gather(self, layer: int, keep: Iterable[int], prefetch: Iterable[int]) -> None:
        needed = list(self._parted(layer))
        wanted = list(dict.fromkeys([*needed, *(s for number in keep for s in self._parted(number))]))
        coming = next((s for number in prefetch for s in self._parted(number) if s not in wanted), None)
        if coming:
            wanted.append(coming)
        self._release_all(storage for storage in self._whole if storage not in wanted)
        for storage in wanted:
            storage.start_gather()
        self._whole = wanted
        for storage in needed:
            storage.finish_gather()

    def _parted(self, layer: int) -> Iterator[GroupStorage]:
        return (storage for storage in self._storages[layer] if storage.zero == 3)

    def release(self) -> None:
        """Release everything: the parameters have changed, or will not be needed for long."""
        self._release_all(self._whole)
        self._whole = []

    def _release_all(self, storages: Iterable[GroupStorage]) -> None:
        for storage in storages:
            for layer in self._layers[storage]:
                self._trees.pop(layer, None)
            storage.release()


class _OwnArrays(dict[str, Any]):
    """A layer's arrays by its own names."""

    def __missing__(self, name: str) -> Any:
        raise UnknownParameter(name, self, "layer")


def _tree(arrays: Mapping[str, Array]) -> dict[str, Any]:
    """A layer's arrays; "norm/scale" stands at ["norm"]["scale"]."""
    tree: dict[str, Any] = _OwnArrays()
    for own, array in arrays.items():
        *path, leaf = own.split("/")
        place = tree
        for part in path:
            place = place.setdefault(part, _OwnArrays())
        place[leaf] = array
    return tree
