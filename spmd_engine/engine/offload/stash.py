"""Offloaded activations: what the forward of a layer saves for its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, cast
from weakref import WeakValueDictionary, finalize, ref

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.arrays.memory import address_of
from spmd_engine.arrays.meta.array import ShapedArray
from spmd_engine.arrays.meta.meter import Memory
from spmd_engine.engine.offload.target import OffloadTarget, bytes_of


class Stash:
    """What forwards save, written behind and read ahead.

    Arrays in tuples, lists and dicts are moved, whole memory blocks at a time: a block that several layers save is
    stored once. Parameters, shared memory and small arrays stay. The last layer's stay until the next layer saves,
    since a backward may follow at once. A stored block keeps its place in the target while a saved tree refers to it.
    """

    def __init__(self, target: OffloadTarget) -> None:
        self._target = target
        self._blocks: WeakValueDictionary[int, _MemoryBlock] = WeakValueDictionary()  # by the id of their memory
        self._last: list[ref[_MemoryBlock]] = []  # memory of the last layer
        self._writing: list[ref[_MemoryBlock]] = []  # memory of the layer before

    def put(self, saved: Any, parameters: Any = ()) -> Any:
        """``saved`` with blocks in place of arrays, for ``take``; ``parameters`` are a layer's own arrays, by name."""
        stay, fresh, arrays = set[int](), list[ref[_MemoryBlock]](), self._target.arrays
        _mapped(parameters, lambda x: stay.add(id(_memory_of(x))), arrays)

        def in_block(x: Array) -> Any:
            memory = _memory_of(x)
            if memory is None or memory.nbytes < self._target.smallest or id(memory) in stay:
                return x
            block = self._blocks.get(id(memory))
            if block is None or not block.holds(memory):
                block = self._blocks[id(memory)] = _MemoryBlock(self._target, memory)
                fresh.append(ref(block))
            return _ArrayInBlock(block, x)

        tree = _mapped(saved, in_block, arrays)
        for block in _living(self._last):
            block.start_write()
        for block in _living(self._writing):
            block.finish_write()
        self._writing, self._last = self._last, fresh
        return tree

    def expect(self, tree: Any) -> None:
        """Begin to read what ``take`` will be asked for next."""
        _mapped(tree, lambda view: view.block.start_read(), _ArrayInBlock)

    def take(self, tree: Any) -> Any:
        """What was ``put``, with the same bits and strides."""
        return _mapped(tree, lambda view: view.array(), _ArrayInBlock)


class _MemoryBlock:
    """The memory of an array: in memory, in the target, or on its way."""

    def __init__(self, target: OffloadTarget, memory: Any) -> None:
        self._target, self._size, self._seen = target, memory.nbytes, ref(memory)
        self._memory: Any = memory  # None while it is only in the target
        self._writing: Future[None] | None = None
        self._reading: Future[Any] | None = None
        self._written = False

    def holds(self, memory: Any) -> bool:
        return self._seen() is memory

    def start_write(self) -> None:
        if self._memory is not None and not self._written and self._writing is None:
            target, place, size = self._target, self._target.reserve(self._size), self._size
            self._place, self._writing = place, target.start_store(place, self._memory)
            # Not while it is being written: another block would be written to the same place at the same time.
            finalize(self, self._writing.add_done_callback, lambda _: target.give_back(place, size))

    def finish_write(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._memory, self._writing, self._written = None, None, True

    def start_read(self) -> None:
        if self._memory is None and self._reading is None:
            self._memory = self._seen()  # perhaps another layer has it
            if self._memory is None:
                self._reading = self._target.start_load(self._place, self._size)

    def memory(self) -> Any:
        """The memory, which only the caller holds from now on if it is in the target too."""
        self.start_read()
        if self._reading is not None:
            self._memory, self._reading = self._reading.result(), None
            self._seen = ref(self._memory)
        memory = self._memory
        if self._written:
            self._memory = None
        return memory


class _ArrayInBlock:
    """An array as a part of a block."""

    def __init__(self, block: _MemoryBlock, x: Array) -> None:
        self.block, self._shape, self._dtype, self._strides = block, x.shape, x.dtype, x.strides
        self._offset = 0 if isinstance(x, ShapedArray) else address_of(x) - address_of(_memory_of(x))

    def array(self) -> Array:
        memory = self.block.memory()
        if isinstance(memory, Memory):
            return ShapedArray(self._shape, self._dtype, memory)
        return np.ndarray(self._shape, self._dtype, cast(Any, bytes_of(memory)), self._offset, self._strides)


def _memory_of(x: Array) -> Any:
    """What owns the memory of ``x``; None if another object does, or it has gaps."""
    if isinstance(x, ShapedArray):
        return x.memory
    while isinstance(x, np.ndarray) and x.base is not None:
        x = x.base
    return x if isinstance(x, np.ndarray) and (x.flags.c_contiguous or x.flags.f_contiguous) else None


def _mapped(tree: Any, change: Callable[[Any], Any], kind: type) -> Any:
    """The tree of tuples, lists and dicts with each leaf of a kind changed; the tree itself if none is."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, dict):
        parts = [_mapped(part, change, kind) for part in tree.values()]
        same = all(a is b for a, b in zip(parts, tree.values(), strict=True))
        return tree if same else dict(zip(tree, parts, strict=True))
    if isinstance(tree, (tuple, list)):
        parts = [_mapped(part, change, kind) for part in tree]
        if all(a is b for a, b in zip(parts, tree, strict=True)):
            return tree
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


def _living(blocks: Iterable[ref[_MemoryBlock]]) -> Iterator[_MemoryBlock]:
    return (block for reference in blocks if (block := reference()) is not None)
