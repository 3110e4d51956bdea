"""Saving: each rank writes blocks of what it holds; when all have, rank 0 makes them a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.checkpoints.format.blocks import block_name, dtype_name
from spmd_engine.checkpoints.format.folder import CheckpointFolder, discard
from spmd_engine.checkpoints.format.manifest import (
    MODEL,
    OPTIMIZER,
    RESIDUES,
    Arrays,
    Manifest,
    StoredArray,
    StoredBlock,
)
from spmd_engine.checkpoints.format.write import BlockToWrite, Written, write_files
from spmd_engine.comm.agreement.rank_zero import gather_json, on_rank_zero, text_from_rank_zero
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.optimizers import Optimizer
from spmd_engine.errors import CheckpointError, UsageError
from spmd_engine.sharding.placement import ArrayPlacement, Placement, ask_placement, ranks_of_blocks
from spmd_engine.sharding.rectangles import Rectangle

BLOCK = 4 << 20  #: bytes; larger rectangles are several blocks, so that who needs a part reads little more than that
KEEP = 2  #: complete checkpoints that stay

Piece = tuple[str, Rectangle]  # a name in its section, and a part of that array


def save_checkpoint(
    folder: str | os.PathLike,
    engine: ShardedEngine,
    optimizer: Optimizer | None = None,
    *,
    step: int = 0,
    config: Mapping[str, Any] | None = None,
    keep: int = KEEP,
    **facts: Any,
) -> None:
    """Write a checkpoint into a run's ``folder``: parameters, buffers and, if given, the optimizer's state. Collective.

    Every rank writes blocks of what it holds, replicas share the work, and nothing is gathered. It is there when all
    of it is on the disk, under its name at once, and never in part; of those before, the last ``keep - 1`` stay.
    ``config`` and ``facts`` (JSON) are kept with it. Raises CheckpointError, on every rank, if any of them could not
    write, or has a value that is not finite: what was there before is there still.
    """
    Save(folder, engine, optimizer, step=step, config=config, keep=keep, facts=facts).finish()


@dataclass
class Shares:
    """What each rank writes of the arrays of one section."""

    section: str
    placement: Placement
    pieces: list[list[Piece]]  #: by rank
    array: Callable[[str], Array]  #: this rank's, of a name

    def mine(self, rank: int) -> Iterator[tuple[str, Rectangle, Array]]:
        """What this rank, which is ``rank``, writes: an array's name, which part of it, and that part."""
        for name, piece in self.pieces[rank]:
            held = next(each for each in self.placement[name].held[rank] if piece in each)
            yield name, piece, self.array(name)[piece.within(held).index]


class Save:
    """One save, from its beginning, after which parameters may change, to its commit. Collective, as ``finish`` is.

    In the ``background`` what this rank writes is copied, and a thread of its own writes it.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        engine: ShardedEngine,
        optimizer: Optimizer | None = None,
        *,
        step: int,
        config: Mapping[str, Any] | None = None,
        keep: int = KEEP,
        facts: Mapping[str, Any] | None = None,
        background: bool = False,
    ) -> None:
        self.step, self._keep, self._group = step, keep, engine.group()
        self._folder = CheckpointFolder(folder)
        self._config, self._facts, self._mesh = config, dict(facts or {}), mesh_name(engine)
        self._shares = [*shares_of(engine, optimizer), *residues_of(engine)]
        self._into = Path(text_from_rank_zero(self._group, lambda: str(self._folder.begin()), CheckpointError))
        self._written: dict[str, list[Written]] = {}
        self._error = ""
        self._thread: Thread | None = None
        blocks = {share.section: list(_blocks(share, self._group.rank)) for share in self._shares}
        if background:
            copies = {section: [_copied(block) for block in own] for section, own in blocks.items()}
            self._thread = Thread(target=self._write, args=(copies,), name=f"save of step {step}", daemon=True)
            self._thread.start()
        else:
            self._write(blocks)

    @property
    def is_written(self) -> bool:
        """Whether this rank has done its part, or failed in it."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> None:
        """Wait until all ranks have written, and make it a checkpoint. Raises CheckpointError on all if one failed."""
        if self._thread is not None:
            self._thread.join()
        mine = {section: [[x.dtype, x.offset, x.sha256] for x in own] for section, own in self._written.items()}
        everyone = gather_json(self._group, {"error": self._error, "written": mine}, "save")
        failed = {rank: said["error"] for rank, said in enumerate(everyone) if said["error"]}
        if failed:
            on_rank_zero(self._group, lambda: discard(self._into))
            told = "; ".join(f"rank {rank}: {error}" for rank, error in list(failed.items())[:4])
            raise self._failed(told)

        def commit() -> None:
            try:
                self._folder.commit(self._into, self.step, self._manifest(everyone).text(), self._keep)
            except OSError as error:
                discard(self._into)
                raise self._failed(str(error)) from error

        on_rank_zero(self._group, commit, CheckpointError)

    def _failed(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self._folder.path}: step {self.step} could not be saved ({why}); what was saved before is there"
        )

    def _write(self, blocks: Mapping[str, Sequence[BlockToWrite]]) -> None:
        try:
            own = {section: some for section, some in blocks.items() if some}
            files = {self._into / file_name(section, self._group.rank): some for section, some in own.items()}
            self._written = dict(zip(own, write_files(files, {"step": str(self.step)}), strict=True))
        except (OSError, UsageError) as error:
            self._error = str(error) or repr(error)
        except Exception as error:  # noqa: BLE001 (of a thread: told to all ranks by finish)
            self._error = f"{type(error).__name__}: {error}"

    def _manifest(self, everyone: Sequence[Mapping[str, Any]]) -> Manifest:
        sections = {}
        for share in self._shares:
            said = [[Written(*each) for each in rank["written"].get(share.section, [])] for rank in everyone]
            sections[share.section] = stored_arrays(share.section, share.placement, share.pieces, said)
        return Manifest(self.step, sections, self._facts, self._config, self._mesh)


def file_name(section: str, rank: int) -> str:
    """The file of what a rank writes of a section."""
    return f"{section}-{rank:05d}.safetensors"


def stored_arrays(
    section: str, placement: Placement, pieces: Sequence[Sequence[Piece]], written: Sequence[Sequence[Written]]
) -> Arrays:
    """A section of the manifest: of every rank the pieces that it was dealt, and where it has written each of them."""
    blocks: dict[str, list[StoredBlock]] = {name: [] for name in placement}
    dtypes: dict[str, str] = {}  # as written: of optimizer state a placement does not know them
    for rank, (own, places) in enumerate(zip(pieces, written, strict=True)):
        for (name, rectangle), place in zip(own, places, strict=True):
            blocks[name].append(StoredBlock(rectangle, file_name(section, rank), place.offset, place.sha256))
            dtypes[name] = place.dtype
    return {
        name: StoredArray(array.shape, dtypes.get(name) or dtype_name(array.dtype, name), tuple(blocks[name]))
        for name, array in placement.items()
    }


def deal(placement: Placement, loads: list[int], *, block_bytes: int = BLOCK) -> list[list[Piece]]:
    """Which pieces each rank writes: each element once, by a rank that holds it, in pieces of ``block_bytes``.

    Of replicas the one writes a piece that has least to write yet, by ``loads``: bytes by rank, which grow. A pure
    function, so that all ranks find the same.
    """
    dealt: list[list[Piece]] = [[] for _ in loads]
    parts: dict[int, list[tuple[list[Rectangle], list[int]]]] = {}  # layers of a kind have one and the same placement
    for name, array in placement.items():
        if id(array) not in parts:
            parts[id(array)] = [
                (list(pieces_of(rectangle, array.dtype.itemsize, block_bytes)), sorted(ranks))
                for rectangle, ranks in _holders(array)
            ]
        for pieces, ranks in parts[id(array)]:
            for piece in pieces:
                rank = min(ranks, key=loads.__getitem__)  # of several, the first
                loads[rank] += piece.size * array.dtype.itemsize
                dealt[rank].append((name, piece))
    return dealt


def _holders(array: ArrayPlacement) -> Iterator[tuple[Rectangle, list[int]]]:
    """Every owned rectangle with the ranks that hold the one it is in."""
    ranks = ranks_of_blocks(array.held)
    for owner, owned in enumerate(array.owned):
        for each in owned:
            if each.size:
                within = next(held for held in array.held[owner] if each in held)
                yield each, ranks[within]


def pieces_of(rectangle: Rectangle, itemsize: int, block_bytes: int) -> Iterator[Rectangle]:
    """A rectangle, which is not empty, in runs of whole rows, of about so many bytes."""
    row = prod(rectangle.shape[1:])
    run = row * max(1, block_bytes // (row * itemsize))
    for first in range(0, rectangle.size, run):
        yield from rectangle.elements(first, min(rectangle.size, first + run))


def shares_of(engine: ShardedEngine, optimizer: Optimizer | None) -> list[Shares]:
    """What each rank writes of an engine, and of its optimizer's state. Collective over the world."""
    loads = [0] * engine.group().size
    stored = engine.placement()
    shares = [Shares(MODEL, stored, deal(stored, loads), {**engine.parameters, **engine.buffers}.__getitem__)]
    if optimizer is not None:
        optimizer.prepare(engine)
        owned, kinds = engine.placement(owned=True), sorted(optimizer.state)
        placement = Placement({f"{kind}/{name}": each for kind in kinds for name, each in owned.items()})
        states = {kind: engine.named(optimizer.state[kind]) for kind in kinds}

        def state(key: str) -> Array:
            kind, name = key.split("/", 1)
            return states[kind][name]

        shares.append(Shares(OPTIMIZER, placement, deal(placement, loads), state))
    return shares


def residues_of(engine: ShardedEngine) -> list[Shares]:
    """What each rank writes of what it alone keeps from step to step, if ranks do: all of its own. Collective then."""
    if engine.residues is None:
        return []
    group = engine.group()
    mine = {f"{group.rank:05d}/{name}": array for name, array in engine.residues.items()}
    held = {name: (array.dtype, Rectangle.whole(array.shape)) for name, array in mine.items()}
    placement = ask_placement(group, held, label="residues")
    return [Shares(RESIDUES, placement, deal(placement, [0] * group.size), mine.__getitem__)]


def mesh_name(engine: ShardedEngine) -> str:
    """The mesh that a checkpoint is written on, and how it lies on several nodes: what bears on the last bits."""
    mesh = engine.mesh
    if mesh.node_count == 1:
        return str(mesh)
    hosts = list(dict.fromkeys(mesh.nodes_by_rank))
    return f"{mesh} on nodes {','.join(str(hosts.index(node)) for node in mesh.nodes_by_rank)}"


def _blocks(share: Shares, rank: int) -> Iterator[BlockToWrite]:
    """The blocks that this rank writes, with names for readers of its file."""
    for name, piece, block in share.mine(rank):
        named = block_name(name, piece, share.placement[name].shape)
        yield BlockToWrite(named, block.shape, block.dtype, partial(_itself, block))


def _copied(block: BlockToWrite) -> BlockToWrite:
    x = block.read()
    return block._replace(read=partial(_itself, np.array(backend_of(x).to_host(x), order="C", copy=True)))


def _itself(block: Array) -> Array:
    return block
