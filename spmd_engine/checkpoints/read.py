"""Reading: a checkpoint as a mapping of names to arrays that are read only where they are sliced."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from spmd_engine.checkpoints.format.blocks import DTYPES, is_finite, read_block
from spmd_engine.checkpoints.format.folder import CHECKPOINTS, MANIFEST, find_checkpoint, step_in_name
from spmd_engine.checkpoints.format.manifest import (
    MODEL,
    OPTIMIZER,
    RESIDUES,
    Manifest,
    StoredArray,
    StoredBlock,
)
from spmd_engine.checkpoints.load_in_place import LARGEST, Headers, Wanted, fill
from spmd_engine.checkpoints.save import BLOCK, mesh_name, pieces_of
from spmd_engine.comm.agreement.rank_zero import text_from_rank_zero
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.optimizers import Optimizer
from spmd_engine.engine.zero.parameter_store import check_shapes
from spmd_engine.errors import CheckpointError
from spmd_engine.foreign import parse_json, reading
from spmd_engine.sharding.rectangles import Rectangle

logger = logging.getLogger(__name__)

EXPORTED = "parameters.safetensors"  #: the plain file that a folder may hold instead of checkpoints


class Checkpoint(Mapping):
    """Parameters and buffers by name, of a checkpoint's folder, of the newest one of a run, or of a safetensors file.

    Only the blocks of what is sliced are read, and their hashes are checked. Raises CheckpointError if there is no
    checkpoint, or if it is damaged.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = _found(path)
        self.manifest: Manifest | None = None  #: None of a plain safetensors file
        if os.path.isfile(self.path):
            self._arrays, self.metadata = _plain_file(self.path)
        else:
            self.manifest = read_manifest(self.path)
            self.headers = Headers(self.path, self.manifest.step)
            self._arrays = self.section(MODEL)
            self.metadata = {"step": self.manifest.step, **self.manifest.facts}

    def section(self, name: str) -> dict[str, Sliceable]:
        """The arrays of a section of the manifest, such as ``optimizer``, by name; none if there is no such section."""
        assert self.manifest is not None
        arrays = self.manifest.sections.get(name, {})
        return {each: _sliceable(each, array, self.read_block) for each, array in arrays.items()}

    def read_block(
        self, name: str, array: StoredArray, block: StoredBlock, out: np.ndarray | None = None
    ) -> np.ndarray:
        """One block of an array of this manifest, in ``out`` (contiguous, of its shape and dtype) if that is given.

        Raises CheckpointError unless hash, header and values are sound.
        """
        self.headers.check(name, array, block)
        said, shape, dtype = f"{name}{block.rectangle}", block.rectangle.shape, DTYPES[array.dtype]
        data = read_block(self.path / block.file, block.offset, shape, dtype, block.sha256, said, out)
        if not is_finite(data):
            raise CheckpointError(f"{self.path / block.file}: {said} has values that are not finite")
        return data

    def __getitem__(self, name: str) -> Sliceable:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def _found(path: str | os.PathLike) -> Path:
    """The plain file, or the folder of the checkpoint, at a path. Raises CheckpointError."""
    path = Path(path)
    if os.path.isfile(path / EXPORTED) and not os.path.isdir(path / CHECKPOINTS):
        path /= EXPORTED
    return path if os.path.isfile(path) else find_checkpoint(path)


class Sliceable:
    """An array on disk: a shape, a dtype, and parts of it, as NumPy's basic slicing gives them but always copies."""

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
        """``rows_are_cheap`` says that some rows at a time cost no more than all at once.

        ``blocks``, which make up the array, are those that are read as a whole, if it consists of such.
        """
        self.shape, self.dtype, self._read_spans, self.rows_are_cheap = shape, dtype, read, rows_are_cheap
        self._blocks = blocks

    @property
    def blocks(self) -> Sequence[Rectangle]:
        """Parts, of a few megabytes if rows are, in which all of it is read without reading anything twice."""
        whole = Rectangle.whole(self.shape)
        return self._blocks or (list(pieces_of(whole, self.dtype.itemsize, BLOCK)) if whole.size else [])

    def __getitem__(self, index: Any) -> np.ndarray:
        """``self[...]``, ``self[2:5]``, ``self[-1, :, ::2]``, ...; only what lies between the ends is read.

        Raises IndexError as NumPy does, and for what is no basic slicing (lists, masks, None).
        """
        spans, wanted = [], []  # what is read, and what of that is asked for
        for part, length in zip(self._of_every_dim(index), self.shape, strict=True):
            if isinstance(part, slice):
                places = range(length)[part]
                first, last = sorted((places[0], places[-1])) if places else (0, -1)
                spans.append(slice(first, last + 1))
                wanted.append(slice(None, None, places.step))
            else:
                place = range(length)[part]  # raises IndexError
                spans.append(slice(place, place + 1))
                wanted.append(0)
        return self._read(tuple(spans))[tuple(wanted)]

    def _of_every_dim(self, index: Any) -> list[slice | int]:
        """An index with ``...``, and whatever dims it leaves out, written out."""
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


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder, checked, and the sizes of the files that it speaks of.

    Raises CheckpointError.
    """
    path = folder / MANIFEST
    try:
        if path.stat().st_size > LARGEST:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes are no manifest of ours")
        manifest = Manifest.parse(path.read_bytes(), str(path))
        if step_in_name(folder) not in (None, manifest.step):
            raise CheckpointError(
                f"{folder} was renamed: it is the checkpoint of step {manifest.step}; give it its name back, or a run "
                "would go on from the wrong one"
            )
        for file, size in manifest.file_sizes().items():
            if (folder / file).stat().st_size != size:
                there = (folder / file).stat().st_size
                raise CheckpointError(f"{folder / file} is damaged: it has {there} bytes, {size} were written")
    except OSError as error:
        raise CheckpointError(
            f"{folder}: a part of this checkpoint cannot be read: {error}. Take it from a copy, or remove the folder "
            "to continue from the previous one"
        ) from error
    return manifest


def load_checkpoint(
    folder: str | os.PathLike, engine: ShardedEngine, optimizer: Optimizer | None = None
) -> dict[str, Any]:
    """Load each rank's blocks into engine and optimizer; returns the ``facts`` that were saved, and the ``step``.

    ``folder`` is a run's, whose newest checkpoint is taken, or a checkpoint's own. The engine's mesh, ZeRO stage and
    stages may be any. Raises CheckpointError for what is damaged, missing or of another shape. Collective over the
    world, of an engine that ``is_filled_in_place``.
    """
    if engine.is_filled_in_place:  # rank 0 decides which one: a run that goes on may be saving a newer one just now
        folder = text_from_rank_zero(engine.group(), lambda: str(_found(folder)), CheckpointError)
    checkpoint = Checkpoint(folder)
    if engine.is_filled_in_place and checkpoint.manifest is not None:
        _fill(checkpoint, engine, optimizer)
    else:
        _slice(checkpoint, engine, optimizer)
    if checkpoint.manifest is not None:
        _take_residues(checkpoint, engine)
    return dict(checkpoint.metadata)


def _fill(checkpoint: Checkpoint, engine: ShardedEngine, optimizer: Optimizer | None) -> None:
    """Into the arrays that engine and optimizer have. Collective over the world."""
    assert checkpoint.manifest is not None
    sections, rank = checkpoint.manifest.sections, engine.group().rank
    stored, here = engine.placement(), {**engine.parameters, **engine.buffers}
    check_shapes(checkpoint, {name: each.shape for name, each in stored.items()})
    wanted = [
        Wanted(name, sections[MODEL][name], each, here[name] if each.held[rank] else None)
        for name, each in stored.items()
    ]
    if optimizer is not None:
        optimizer.prepare(engine)
        for kind, state in optimizer.state.items():
            here = engine.named(state)
            for name, each in engine.placement(owned=True).items():
                key, known = f"{kind}/{name}", sections.get(OPTIMIZER, {})
                if key not in known or known[key].shape != each.shape:
                    raise _other_optimizer(checkpoint, key)
                wanted.append(Wanted(key, known[key], each, here[name] if each.held[rank] else None))
    fill(engine.group(), wanted, checkpoint.path, checkpoint.headers, engine.mesh.nodes_by_rank)
    engine.filled()


def _slice(checkpoint: Checkpoint, engine: ShardedEngine, optimizer: Optimizer | None) -> None:
    """Each rank reads what the engine's own ``load_checkpoint`` needs."""
    engine.load_checkpoint(checkpoint)
    engine.after_update()
    if optimizer is None:
        return
    state = checkpoint.section(OPTIMIZER) if checkpoint.manifest else {}
    optimizer.prepare(engine)
    for kind, arrays in optimizer.state.items():
        for name, array in engine.named(arrays).items():
            if f"{kind}/{name}" not in state:
                raise _other_optimizer(checkpoint, f"{kind}/{name}")
            if engine.owned_index(name) is not None:  # of a number, others may be the owners
                array[...] = engine.block(name, state[f"{kind}/{name}"], owned=True)


def _other_optimizer(checkpoint: Checkpoint, key: str) -> CheckpointError:
    return CheckpointError(f"{checkpoint.path} has no {key}: it was saved with another optimizer")


def _take_residues(checkpoint: Checkpoint, engine: ShardedEngine) -> None:
    """Load this rank's residues if they were saved on the same mesh; else they start from zero. Collective."""
    if engine.residues is None:
        return
    assert checkpoint.manifest is not None
    group, section = engine.group(), checkpoint.section(RESIDUES)
    begins = f"{group.rank:05d}/"
    own = {name.removeprefix(begins): array[...] for name, array in section.items() if name.startswith(begins)}
    saved_on, here = checkpoint.manifest.mesh, mesh_name(engine)
    taken = engine.take_residues(own if saved_on == here else {})
    if section and group.rank == 0 and not (taken and saved_on == here):
        why = f"on mesh {saved_on}; on mesh {here}" if saved_on != here else "by another --compress; with this one"
        logger.warning("%s: what --compress has yet to send was saved %s it starts from zero", checkpoint.path, why)


def _sliceable(name: str, array: StoredArray, read_block: Callable[..., np.ndarray]) -> Sliceable:
    dtype = DTYPES[array.dtype]
    last: list[tuple[StoredBlock, np.ndarray]] = []  # of many small slices, most are of the block before

    def loaded(block: StoredBlock) -> np.ndarray:
        found = last[:]  # which another thread may change
        if not found or found[0][0] is not block:
            last[:] = found = [(block, read_block(name, array, block))]
        return found[0][1]

    def read(spans: tuple[slice, ...]) -> np.ndarray:
        wanted = Rectangle.of(spans)
        out = np.empty(wanted.shape, dtype)
        for block in array.blocks:
            shared = block.rectangle & wanted
            if not shared.size:
                continue
            place = out[shared.within(wanted).index or ...]
            if shared == block.rectangle and place.flags.c_contiguous:
                read_block(name, array, block, place)  # straight to where it is wanted
            else:
                place[...] = loaded(block)[shared.within(block.rectangle).index]
        return out

    return Sliceable(array.shape, dtype, read, blocks=[block.rectangle for block in array.blocks])


def _plain_file(path: Path) -> tuple[dict[str, Sliceable], dict[str, Any]]:
    """The arrays of any safetensors file, and the facts in its header, if this package wrote them."""
    with reading(f"{path} is damaged or cannot be read", kind=CheckpointError):
        file = safe_open(path, framework="numpy")
        pieces = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        arrays = {
            name: Sliceable(tuple(each.get_shape()), DTYPES[each.get_dtype()], each.__getitem__)
            for name, each in pieces.items()
        }
        facts = parse_json((file.metadata() or {}).get("facts", "{}"))
        if not isinstance(facts, dict):
            raise ValueError("the facts in its header are no object")
        return arrays, facts
