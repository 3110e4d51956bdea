"""Views of whole parameters for layers: sharded parameters are gathered a little before their use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from spmd_engine.arrays.backend import Array
from spmd_engine.engine.state.array_table import USED
from spmd_engine.engine.zero.storage import GroupStorage
from spmd_engine.errors import UnknownParameter


class Unsharder:
    """Parameters by layer. A sharded group is whole only from its gather to its release.

    ``uses`` holds, for each layer of this rank, the local and the full names of its parameters; ``buffers`` its
    buffers, which are always present, by local name.
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
        self._absent = {  # groups that are whole only while they are used
            layer: [storage for storage in used if not storage.table[USED].lasts]
            for layer, used in self._storages.items()
        }
        self._layers: dict[GroupStorage, list[int]] = {}  # that use a group
        for layer, used in self._storages.items():
            for storage in used:
                self._layers.setdefault(storage, []).append(layer)
        self._gathers = any(self._absent.values())
        self._trees: dict[int, dict[str, Any]] = {}  # by layers whose parameters are present
        self._gathered: list[GroupStorage] = []  # sharded, and whole at present
        self.changes = 0  #: how often the parameters have changed

    def unshard(self, layer: int, *, keep: Iterable[int] = (), prefetch: Iterable[int] = ()) -> dict[str, Any]:
        """The parameters of a layer by local name, "norm/scale" at ["norm"]["scale"], valid until the next call.

        Groups that neither this layer nor those in ``keep`` use are released. The absent groups of the first layer in
        ``prefetch`` that has any begin to be gathered.
        """
        if self._gathers:
            self._gather(layer, keep, prefetch)
        if layer not in self._trees:
            names = self._uses[layer]
            arrays = {name: self._storage_of[full_name].parameters[full_name] for name, full_name in names.items()}
            self._trees[layer] = tree_of({**arrays, **self._buffers.get(layer, {})})
        return self._trees[layer]

    def _gather(self, layer: int, keep: Iterable[int], prefetch: Iterable[int]) -> None:
        needed = self._absent[layer]
        wanted = list(dict.fromkeys([*needed, *(s for number in keep for s in self._absent[number])]))
        absent = ([s for s in self._absent[number] if s not in wanted] for number in prefetch)
        wanted += next(filter(None, absent), [])
        self._release_all(storage for storage in self._gathered if storage not in wanted)
        for storage in wanted:
            storage.start_gather()
        self._gathered = wanted
        for storage in needed:
            storage.finish_gather()

    def release(self) -> None:
        """Release all groups: they will not be needed for long."""
        self._release_all(self._gathered)
        self._gathered = []

    def changed(self) -> None:
        """Release all groups, since the parameters have changed."""
        self.changes += 1
        self.release()

    def _release_all(self, storages: Iterable[GroupStorage]) -> None:
        for storage in storages:
            for layer in self._layers[storage]:
                self._trees.pop(layer, None)
            storage.release()


class _OwnArrays(dict[str, Any]):
    """A layer's arrays by local name."""

    def __missing__(self, name: str) -> Any:
        raise UnknownParameter(name, self, "layer")


def tree_of(arrays: Mapping[str, Array]) -> dict[str, Any]:
    """A layer's arrays; "norm/scale" stands at ["norm"]["scale"]."""
    tree: dict[str, Any] = _OwnArrays()
    for name, array in arrays.items():
        *path, leaf = name.split("/")
        subtree = tree
        for part in path:
            subtree = subtree.setdefault(part, _OwnArrays())
        subtree[leaf] = array
    return tree
