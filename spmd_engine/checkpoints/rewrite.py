"""Rewriting a complete checkpoint, on any number of ranks or none: as one plain file, or in other parts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from spmd_engine.checkpoints.format.blocks import HASH, block_name
from spmd_engine.checkpoints.format.folder import CheckpointFolder, RunLock, discard
from spmd_engine.checkpoints.format.manifest import Section, file_name
from spmd_engine.checkpoints.format.write import HASHES, BlockToWrite, write_files
from spmd_engine.checkpoints.hf.export import TensorToWrite, write_tensors
from spmd_engine.checkpoints.hf.weights import as_it_is
from spmd_engine.checkpoints.load_in_place import PartOfBlock, PartReader, read_file_header
from spmd_engine.checkpoints.read import Checkpoint, Sliceable
from spmd_engine.checkpoints.save import FILE, assign_blocks, files_of
from spmd_engine.comm import Group
from spmd_engine.errors import CheckpointError
from spmd_engine.formats.safetensors_header import dtype_of, header
from spmd_engine.sharding import ArrayPlacement, Placement, Rectangle


def export_checkpoint(
    checkpoint: Checkpoint, section: str, path: str | os.PathLike, group: Group | None = None
) -> None:
    """Write a section of a checkpoint as one plain safetensors file, in which every array is whole.

    The rest is as in ``write_tensors``.
    """
    sections = checkpoint.manifest.sections
    if section not in sections:
        raise CheckpointError(f"{checkpoint.path} has no section {section!r}; it has: {', '.join(sections)}")
    tensors = [
        TensorToWrite(name, array.dtype, array.shape, {name: as_it_is(array.shape)})
        for name, array in sections[section].items()
    ]
    write_tensors(checkpoint.section(section), {Path(path): tensors}, group, partial(header, facts={"format": "np"}))


def reshard_checkpoint(checkpoint: Checkpoint, folder: str | os.PathLike, files: int) -> Path:
    """Write a checkpoint into a run's folder as ``files`` ranks would write it; return its path.

    Any mesh loads any checkpoint; this is for file systems that prefer few large files, or many. The folder is new, or
    that of the same run, to which no other process may write. Raises CheckpointError if it holds another run, OSError
    or UsageError if it cannot be written.
    """
    into = CheckpointFolder(folder)
    if (other := into.newest()) and not checkpoint.path.resolve().parent.samefile(into.path):
        raise CheckpointError(f"{folder} holds another run already ({other.name}); write into a folder of its own")
    with RunLock(folder):
        return _reshard(checkpoint, into, files)


def _reshard(checkpoint: Checkpoint, into: CheckpointFolder, files: int) -> Path:
    loads, sections = np.zeros(files, np.int64), {}
    unfinished = into.begin()
    try:
        for section, arrays in checkpoint.manifest.sections.items():
            whole = {name: [(Rectangle.whole(array.shape),)] * files for name, array in arrays.items()}
            placement = {
                name: ArrayPlacement.of_rectangles(array.shape, dtype_of(array.dtype), whole[name])
                for name, array in arrays.items()
            }
            pieces, readable = assign_blocks(Placement(placement), loads), checkpoint.section(section)
            shares = {}
            for number in range(files):
                mine = [(name, piece) for name, of_array in pieces.items() for piece in of_array.of(number)]
                if mine:
                    shares[number] = [_source(name, readable[name], piece) for name, piece in mine]
            paths = {unfinished / file_name(section, number): share for number, share in shares.items()}
            written = write_files(paths, {"step": str(checkpoint.manifest.step)})
            described = {name: (array.shape, array.dtype, pieces[name]) for name, array in arrays.items()}
            rows = np.zeros(files, FILE)
            rows[list(shares)] = written
            sections[section] = Section(section, described, files_of(rows))
        manifest = replace(checkpoint.manifest, sections=sections)
        return into.commit(unfinished, manifest.step, manifest.text(), keep=1 << 30)
    except BaseException:
        discard(unfinished)
        raise


def problems(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a sentence for each fault of a checkpoint: reads every block and the header of every file."""
    expected: dict[str, dict[str, tuple]] = {}
    for file in map(checkpoint.manifest.file, checkpoint.manifest.file_names()):
        expected[file.name] = {HASHES: ("U8", [file.blocks, HASH], file.end)} if file.hashes is None else {}
    for section, arrays in checkpoint.manifest.sections.items():
        for name, array in arrays.items():
            for block in array.blocks:
                facts = array.dtype, list(block.rectangle.shape), block.offset
                expected[block.file][block_name(name, block.rectangle, array.shape)] = facts
                place = np.empty(block.rectangle.shape, dtype_of(array.dtype))
                try:
                    with PartReader(checkpoint.path, checkpoint.headers, compares=False) as reader:
                        reader.read(PartOfBlock(f"{section} {name}", array, block, block.rectangle, True, place))
                except CheckpointError as error:
                    yield str(error)
    for file, blocks in expected.items():
        try:
            if read_file_header(checkpoint.path / file) != (str(checkpoint.manifest.step), blocks):
                yield f"{checkpoint.path / file}: its header and the manifest differ"
        except CheckpointError as error:
            yield str(error)


def _source(name: str, array: Sliceable, piece: Rectangle) -> BlockToWrite:
    return BlockToWrite(block_name(name, piece, array.shape), piece.shape, array.dtype, lambda: array[piece.index])
