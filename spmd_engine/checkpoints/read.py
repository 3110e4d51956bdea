"""Reading: a checkpoint as a mapping of names to arrays; only the parts that are sliced are read.

``load_in_place`` decides which parts a rank reads on another mesh.
"""

from __future__ import annotations

import logging
import os
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from spmd_engine.arguments import checked
from spmd_engine.checkpoints.format.folder import CHECKPOINTS, MANIFEST, find_checkpoint, step_in_name
from spmd_engine.checkpoints.format.manifest import (
    MODEL,
    OPTIMIZER,
    RESIDUES,
    Manifest,
    StoredArray,
    StoredBlock,
)
from spmd_engine.checkpoints.load_in_place import LARGEST, Headers, PartOfBlock, PartReader, Wanted, fill
from spmd_engine.checkpoints.save import BLOCK, mesh_name, pieces_of
from spmd_engine.comm.agreement.rank_zero import on_all_ranks, text_from_rank_zero
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.optimizers import MASTER, Optimizer
from spmd_engine.engine.zero.parameter_store import check_shapes
from spmd_engine.errors import CheckpointError
from spmd_engine.foreign import parse_json, reading
from spmd_engine.formats.safetensors_file import read_header, tensors_of
from spmd_engine.formats.safetensors_header import dtype_of
from spmd_engine.formats.tensor import PlainTensor
from spmd_engine.sharding.rectangles import Rectangle, intersected

logger = logging.getLogger(__name__)

EXPORTED = "parameters.safetensors"  #: the plain file that a folder may hold instead of checkpoints


class Checkpoint(Mapping):
    """Parameters and buffers by name, of a checkpoint's folder, of the newest one of a run, or of a safetensors file.

    A slice reads only the blocks that it overlaps, and checks their hashes. Raises CheckpointError if there is no
    checkpoint, or if it is damaged.
    """

    def __init__(self, path: str | os.PathLike, files: slice = slice(None)) -> None:
        """``files``: those of each section whose sizes are checked at once."""
        self.path = _find(path)
        self.manifest = Manifest(0, {})  #: without sections for a plain safetensors file
        if os.path.isfile(self.path):
            self._arrays, self.metadata = _plain_file(self.path)
        else:
            self.manifest = read_manifest(self.path, files)
            self.headers = Headers(self.path, self.manifest)
            self.metadata = {"step": self.manifest.step, **self.manifest.facts}

    @cached_property
    def _arrays(self) -> dict[str, Sliceable]:
        return self.section(MODEL)

    def section(self, name: str) -> dict[str, Sliceable]:
        """The arrays of a section of the manifest, such as ``optimizer``, by name; none if there is no such section."""
        arrays = self.manifest.sections.get(name, {})
        return {array_name: _sliceable(array_name, array, self.read_block) for array_name, array in arrays.items()}

    def read_block(
        self, name: str, array: StoredArray, block: StoredBlock, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Read a block of an array in this manifest, into ``out`` (contiguous, of its shape and dtype) if it is given.

        Raises CheckpointError if the hash or the header is wrong, or a value is not finite.
        """
        data = np.empty(block.rectangle.shape, dtype_of(array.dtype)) if out is None else out
        with PartReader(self.path, self.headers) as reader:
            reader.read(PartOfBlock(name, array, block, block.rectangle, True, data))
        return data

    def __getitem__(self, name: str) -> Sliceable:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def _find(path: str | os.PathLike) -> Path:
    """The plain file, or the folder of the checkpoint, at a path. Raises CheckpointError if there is neither."""
    path = Path(path)
    if os.path.isfile(path / EXPORTED) and not os.path.isdir(path / CHECKPOINTS):
        path /= EXPORTED
    return path if os.path.isfile(path) else find_checkpoint(path)


class Sliceable:
    """An array on disk, with a shape and a dtype. NumPy's basic slicing reads parts of it, always as copies."""

    slices_are_copies = True

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        read: Callable[[tuple[slice, ...]], np.ndarray],
        *,
        rows_are_cheap: bool = False,
        blocks: Sequence[Rectangle] = (),
    ) -> None:
        """``rows_are_cheap``: to read a few rows at a time costs no more than to read all at once.

        ``blocks``, if the array is stored in blocks, are the rectangles that are read only as a whole.
        """
        self.shape, self.dtype, self._read_spans, self.rows_are_cheap = shape, dtype, read, rows_are_cheap
        self._blocks = blocks

    @property
    def blocks(self) -> Sequence[Rectangle]:
        """Parts that cover the array, each read once; of a few megabytes, unless stored blocks or rows are larger."""
        full = Rectangle.whole(self.shape)
        return self._blocks or (list(pieces_of(full, BLOCK // self.dtype.itemsize)) if full.size else [])

    def __getitem__(self, index: Any) -> np.ndarray:
        """``self[...]``, ``self[2:5]``, ``self[-1, :, ::2]``, ...; reads only the elements between the ends.

        Raises IndexError as NumPy does, and for an index that is no basic slicing (lists, masks, None).
        """
        spans, within = [], []  # the spans that are read, and the index within them
        for part, length in zip(self._expand(index), self.shape, strict=True):
            if isinstance(part, slice):
                places = range(length)[part]
                first, last = sorted((places[0], places[-1])) if places else (0, -1)
                spans.append(slice(first, last + 1))
                within.append(slice(None, None, places.step))
            else:
                place = range(length)[part]  # raises IndexError
                spans.append(slice(place, place + 1))
                within.append(0)
        return self._read(tuple(spans))[tuple(within)]

    def _expand(self, index: Any) -> list[slice | int]:
        """The index with one entry for each dim: ``...`` and omitted dims become full slices."""
        parts = list(index) if isinstance(index, tuple) else [index]
        for part in parts:
            if part is not ... and not isinstance(part, (slice, int, np.integer)) or isinstance(part, bool):
                raise IndexError(f"an array on disk takes slices, whole numbers and ..., not {part!r}")
        if parts.count(...) > 1 or len(parts) - parts.count(...) > len(self.shape):
            raise IndexError(f"[{', '.join(map(str, parts))}] of an array of shape {self.shape}: too many indices")
        at = parts.index(...) if ... in parts else len(parts)
        missing = len(self.shape) - (len(parts) - parts.count(...))
        return [*parts[:at], *[slice(None)] * missing, *parts[at + 1 :]]

    def _read(self, spans: tuple[slice, ...]) -> np.ndarray:
        shape = [span.stop - span.start for span in spans]
        return np.empty(shape, self.dtype) if 0 in shape else self._read_spans(spans)


def read_manifest(folder: Path, files: slice = slice(None)) -> Manifest:
    """Read and check the manifest of a checkpoint's folder, and check the sizes of the ``files`` of each section.

    Raises CheckpointError.
    """
    path = folder / MANIFEST
    try:
        if path.stat().st_size > LARGEST:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes are no manifest of ours")
        with path.open("rb") as file:
            manifest = Manifest.parse(file, str(path))
        if step_in_name(folder) not in (None, manifest.step):
            raise CheckpointError(
                f"{folder} was renamed: it is the checkpoint of step {manifest.step}; give it its name back, or a run "
                "would go on from the wrong one"
            )
        for name in manifest.file_names(files):
            nbytes, size = (folder / name).stat().st_size, manifest.file(name).size
            if nbytes != size:
                raise CheckpointError(f"{folder / name} is damaged: it has {nbytes} bytes, {size} were written")
    except OSError as error:
        raise CheckpointError(
            f"{folder}: a part of this checkpoint cannot be read: {error}. Take it from a copy, or remove the folder "
            "to continue from the previous one"
        ) from error
    return manifest


@checked(folder="the path of a run, before the engine", engine="a ShardedEngine, after it")
def load_checkpoint(
    folder: str | os.PathLike, engine: ShardedEngine, optimizer: Optimizer | None = None
) -> dict[str, Any]:
    """Load each rank's blocks into engine and optimizer; return the saved ``facts`` and the ``step``.

    ``folder`` is a run's folder, of which the newest checkpoint is loaded, or a checkpoint's own. The engine may have
    any mesh, ZeRO stage and pipeline stages. Raises CheckpointError if an array is damaged, missing or of another
    shape. Collective over the world for an engine that ``is_filled_in_place``.
    """
    if engine.is_filled_in_place:  # rank 0 chooses: a running job may be saving a newer one just now
        group = engine.group()
        found = text_from_rank_zero(group, lambda: str(_find(folder)), CheckpointError)
        share = slice(group.rank, None, group.size)  # each file is asked for its size by one rank
        checkpoint = on_all_ranks(group, lambda: Checkpoint(found, share), CheckpointError)
    else:
        checkpoint = Checkpoint(folder)
    if engine.is_filled_in_place and checkpoint.manifest.sections:
        _fill(checkpoint, engine, optimizer)
    else:
        _slice(checkpoint, engine, optimizer)
    if checkpoint.manifest.sections:
        _take_residues(checkpoint, engine)
    return dict(checkpoint.metadata)


def _fill(checkpoint: Checkpoint, engine: ShardedEngine, optimizer: Optimizer | None) -> None:
    """Fill the existing arrays of engine and optimizer. Collective over the world."""
    sections, rank = checkpoint.manifest.sections, engine.group().rank
    stored, blocks = engine.placement(), {**engine.parameters, **engine.buffers}
    check_shapes(checkpoint, {name: placed.shape for name, placed in stored.items()})
    wanted = [
        Wanted(name, sections[MODEL][name], placed, blocks[name] if placed.held[rank] else None)
        for name, placed in stored.items()
    ]
    if optimizer is not None:
        optimizer.prepare(engine)
        for kind, state in optimizer.state.items():
            blocks = engine.named(state)
            for name, placed in engine.placement(owned=True).items():
                key, saved = f"{kind}/{name}", sections.get(OPTIMIZER, {})
                if key not in saved or saved[key].shape != placed.shape:
                    raise _other_optimizer(checkpoint, key)
                wanted.append(Wanted(key, saved[key], placed, blocks[name] if placed.held[rank] else None))
    fill(engine.group(), wanted, checkpoint.path, checkpoint.headers, engine.mesh.nodes_by_rank)
    engine.filled()


def _slice(checkpoint: Checkpoint, engine: ShardedEngine, optimizer: Optimizer | None) -> None:
    """Load by the engine's own ``load_checkpoint``: each rank reads only what it slices."""
    state = checkpoint.section(OPTIMIZER)
    masters = {key.removeprefix(MASTER + "/"): array for key, array in state.items() if key.startswith(MASTER + "/")}
    parameters = ChainMap(masters, checkpoint) if masters else checkpoint  # type: ignore[arg-type]
    engine.load_checkpoint(parameters)
    engine.after_update()
    if optimizer is None:
        return
    optimizer.prepare(engine)
    for kind, arrays in optimizer.state.items():
        for name, array in engine.named(arrays).items():
            if kind == MASTER:  # a run in float32 has none
                state[f"{kind}/{name}"] = parameters[name]
            if f"{kind}/{name}" not in state:
                raise _other_optimizer(checkpoint, f"{kind}/{name}")
            if engine.owned_index(name) is not None:  # a scalar may be owned by other ranks alone
                array[...] = engine.block(name, state[f"{kind}/{name}"], owned=True)


def _other_optimizer(checkpoint: Checkpoint, key: str) -> CheckpointError:
    return CheckpointError(f"{checkpoint.path} has no {key}: it was saved with another optimizer")


def _take_residues(checkpoint: Checkpoint, engine: ShardedEngine) -> None:
    """Load this rank's residues if they were saved on the same mesh; otherwise they start from zero. Collective."""
    if engine.residues is None:
        return
    group, section = engine.group(), checkpoint.manifest.sections.get(RESIDUES)
    saved_on, mesh, residues = checkpoint.manifest.mesh, mesh_name(engine), {}
    if section is not None and saved_on == mesh:
        for name, array in section.of(group.rank).items():
            residues[name] = _sliceable(f"{group.rank:05d}/{name}", array, checkpoint.read_block)[...]
    taken = engine.take_residues(residues)
    if section is not None and group.rank == 0 and not (taken and saved_on == mesh):
        why = f"they were saved on mesh {saved_on}, not on {mesh}" if saved_on != mesh else "--compress has changed"
        logger.warning("%s: the residues of --compress start from zero: %s", checkpoint.path, why)


def _sliceable(name: str, array: StoredArray, read_block: Callable[..., np.ndarray]) -> Sliceable:
    dtype = dtype_of(array.dtype)
    last: list[tuple[StoredBlock, np.ndarray]] = []  # most of many small slices are in the block of the slice before

    def load(block: StoredBlock) -> np.ndarray:
        cached = last[:]  # a copy, because another thread may change it
        if not cached or cached[0][0] != block:
            last[:] = cached = [(block, read_block(name, array, block))]
        return cached[0][1]

    def read(spans: tuple[slice, ...]) -> np.ndarray:
        wanted = Rectangle.of(spans)
        out = np.empty(wanted.shape, dtype)
        for number in np.flatnonzero(intersected(array.bounds, np.array([wanted], np.int64))).tolist():
            block = array.blocks[number]
            shared = block.rectangle & wanted
            place = out[shared.within(wanted).index or ...]
            if shared == block.rectangle and place.flags.c_contiguous:
                read_block(name, array, block, place)  # directly into the result
            else:
                place[...] = load(block)[shared.within(block.rectangle).index]
        return out

    return Sliceable(array.shape, dtype, read, blocks=[Rectangle(*map(tuple, ends)) for ends in array.bounds.tolist()])


def _plain_file(path: Path) -> tuple[dict[str, Sliceable], dict[str, Any]]:
    """The arrays of any safetensors file, and the facts in its header if this package wrote it."""
    described, after, size = read_header(path)
    with reading(f"{path} is damaged or cannot be read", kind=CheckpointError):
        facts = parse_json(described.pop("__metadata__", {}).get("facts", "{}"))
        if not isinstance(facts, dict):
            raise ValueError("the facts in its header are no object")
    return {name: _mapped(tensor) for name, tensor in tensors_of(path, described, after, size).items()}, facts


def _mapped(tensor: PlainTensor) -> Sliceable:
    def read(spans: tuple[slice, ...]) -> np.ndarray:
        return np.array(tensor.read([[length] for length in tensor.shape], spans))

    return Sliceable(tensor.shape, dtype_of(tensor.dtype), read)
