"""Saving: each rank writes blocks of its shards; then rank 0 commits them as a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Thread
from typing import Any, SupportsIndex

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
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.optimizers import Optimizer
from spmd_engine.engine.state.assignment import shares_text
from spmd_engine.errors import CheckpointError, UsageError
from spmd_engine.layers.contract import check_argument
from spmd_engine.sharding.placement import ArrayPlacement, Placement, exchange_placements, ranks_of_blocks
from spmd_engine.sharding.rectangles import Rectangle

BLOCK = 4 << 20  #: bytes; larger rectangles become several blocks, so that a rank reads little more than its shard
KEEP = 2  #: complete checkpoints that are kept

Piece = tuple[str, Rectangle]  # the name of an array in its section, and a part of the array


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

    Every rank writes blocks of its shards, replicas share the work, and nothing is gathered. The checkpoint gets its
    name only when all of it is on the disk; the last ``keep - 1`` earlier checkpoints are kept. ``config`` and
    ``facts`` (JSON) are stored with it. Raises CheckpointError on every rank if one could not write, or has a value
    that is not finite; earlier checkpoints are then unchanged.
    """
    Save(folder, engine, optimizer, step=step, config=config, keep=keep, facts=facts).finish()


@dataclass
class WritePlan:
    """The parts of a section's arrays that each rank writes."""

    section: str
    placement: Placement
    pieces: list[list[Piece]]  #: by rank
    array: Callable[[str], Array]  #: returns this rank's shard of an array by name

    def blocks_of(self, rank: int) -> Iterator[tuple[str, Rectangle, Array]]:
        """The blocks that this rank, number ``rank``, writes: array name, rectangle and elements."""
        for name, piece in self.pieces[rank]:
            held = next(rectangle for rectangle in self.placement[name].held[rank] if piece in rectangle)
            yield name, piece, self.array(name)[piece.within(held).index]


class Save:
    """One save. Parameters may change after its construction; ``finish`` commits it. Both are collective.

    With ``background``, this rank copies its blocks, and a thread writes the copies.
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
        check_argument("save_checkpoint: engine", engine, ShardedEngine, "a ShardedEngine, after the folder")
        check_argument("save_checkpoint: step", step, SupportsIndex, "a number")
        self.step, self._keep, self._group = step, keep, engine.group()
        self._folder = CheckpointFolder(folder)
        self._config, self._facts, self._mesh = config, dict(facts or {}), mesh_name(engine)
        self._plans = [*write_plans(engine, optimizer), *residue_plans(engine)]
        self._into = Path(text_from_rank_zero(self._group, lambda: str(self._folder.begin()), CheckpointError))
        self._written: dict[str, list[Written]] = {}
        self._error = ""
        self._thread: Thread | None = None
        blocks = {plan.section: list(_blocks(plan, self._group.rank)) for plan in self._plans}
        if background:
            copies = {section: [_copied(block) for block in part] for section, part in blocks.items()}
            self._thread = Thread(target=self._write, args=(copies,), name=f"save of step {step}", daemon=True)
            self._thread.start()
        else:
            self._write(blocks)

    @property
    def is_written(self) -> bool:
        """Whether this rank has written its part, or failed."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> None:
        """Wait until all ranks have written, and commit. Raises CheckpointError on all ranks if one failed."""
        if self._thread is not None:
            self._thread.join()
        places = {section: [[x.dtype, x.offset, x.sha256] for x in part] for section, part in self._written.items()}
        results = gather_json(self._group, {"error": self._error, "written": places}, "save")
        failed = {rank: result["error"] for rank, result in enumerate(results) if result["error"]}
        if failed:
            on_rank_zero(self._group, lambda: discard(self._into))
            errors = "; ".join(f"rank {rank}: {error}" for rank, error in list(failed.items())[:4])
            raise self._failed(errors)

        def commit() -> None:
            try:
                self._folder.commit(self._into, self.step, self._manifest(results).text(), self._keep)
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
            parts = {section: part for section, part in blocks.items() if part}
            files = {self._into / file_name(section, self._group.rank): part for section, part in parts.items()}
            self._written = dict(zip(parts, write_files(files, {"step": str(self.step)}), strict=True))
        except (OSError, UsageError) as error:
            self._error = str(error) or repr(error)
        except Exception as error:  # noqa: BLE001 (in a thread: finish reports it to all ranks)
            self._error = f"{type(error).__name__}: {error}"

    def _manifest(self, results: Sequence[Mapping[str, Any]]) -> Manifest:
        sections = {}
        for plan in self._plans:
            written = [[Written(*block) for block in rank["written"].get(plan.section, [])] for rank in results]
            sections[plan.section] = stored_arrays(plan.section, plan.placement, plan.pieces, written)
        return Manifest(self.step, sections, self._facts, self._config, self._mesh)


def file_name(section: str, rank: int) -> str:
    """The file in which a rank writes its blocks of a section."""
    return f"{section}-{rank:05d}.safetensors"


def stored_arrays(
    section: str, placement: Placement, pieces: Sequence[Sequence[Piece]], written: Sequence[Sequence[Written]]
) -> Arrays:
    """A section of the manifest, from the pieces of every rank and the places where the rank has written them."""
    blocks: dict[str, list[StoredBlock]] = {name: [] for name in placement}
    dtypes: dict[str, str] = {}  # as written; optimizer state has other dtypes in its placement
    for rank, (rank_pieces, places) in enumerate(zip(pieces, written, strict=True)):
        for (name, rectangle), place in zip(rank_pieces, places, strict=True):
            blocks[name].append(StoredBlock(rectangle, file_name(section, rank), place.offset, place.sha256))
            dtypes[name] = place.dtype
    return {
        name: StoredArray(array.shape, dtypes.get(name) or dtype_name(array.dtype, name), tuple(blocks[name]))
        for name, array in placement.items()
    }


def assign_blocks(placement: Placement, loads: list[int], *, block_bytes: int = BLOCK) -> list[list[Piece]]:
    """Assign pieces of ``block_bytes`` to ranks, so that each element is written once, by a rank that holds it.

    Among replicas, the rank with the least load writes a piece. ``loads``, the bytes of each rank, are increased. The
    result depends on the arguments alone, so all ranks get the same one.
    """
    assigned: list[list[Piece]] = [[] for _ in loads]
    parts: dict[int, list[tuple[list[Rectangle], list[int]]]] = {}  # equal layers share one placement
    for name, array in placement.items():
        if id(array) not in parts:
            parts[id(array)] = [
                (list(pieces_of(rectangle, array.dtype.itemsize, block_bytes)), sorted(ranks))
                for rectangle, ranks in _holders(array)
            ]
        for pieces, ranks in parts[id(array)]:
            for piece in pieces:
                rank = min(ranks, key=loads.__getitem__)  # the first of equals
                loads[rank] += piece.size * array.dtype.itemsize
                assigned[rank].append((name, piece))
    return assigned


def _holders(array: ArrayPlacement) -> Iterator[tuple[Rectangle, list[int]]]:
    """Every owned rectangle with the ranks that hold it: replicas of the rectangle that contains it."""
    ranks = ranks_of_blocks(array.held)
    for owner, owned in enumerate(array.owned):
        for rectangle in owned:
            if rectangle.size:
                within = next(held for held in array.held[owner] if rectangle in held)
                yield rectangle, ranks[within]


def pieces_of(rectangle: Rectangle, itemsize: int, block_bytes: int) -> Iterator[Rectangle]:
    """Split a rectangle that is not empty into runs of whole rows of about ``block_bytes``."""
    row = prod(rectangle.shape[1:])
    run = row * max(1, block_bytes // (row * itemsize))
    for first in range(0, rectangle.size, run):
        yield from rectangle.elements(first, min(rectangle.size, first + run))


def write_plans(engine: ShardedEngine, optimizer: Optimizer | None) -> list[WritePlan]:
    """The parts of an engine and of its optimizer's state that each rank writes. Collective over the world."""
    loads = [0] * engine.group().size
    stored = engine.placement()
    plans = [
        WritePlan(MODEL, stored, assign_blocks(stored, loads), {**engine.parameters, **engine.buffers}.__getitem__)
    ]
    if optimizer is not None:
        optimizer.prepare(engine)
        owned, kinds = engine.placement(owned=True), sorted(optimizer.state)
        placement = Placement({f"{kind}/{name}": placed for kind in kinds for name, placed in owned.items()})
        states = {kind: engine.named(optimizer.state[kind]) for kind in kinds}

        def state(key: str) -> Array:
            kind, name = key.split("/", 1)
            return states[kind][name]

        plans.append(WritePlan(OPTIMIZER, placement, assign_blocks(placement, loads), state))
    return plans


def residue_plans(engine: ShardedEngine) -> list[WritePlan]:
    """The plan by which each rank writes all of its own residues. Collective, if the engine has residues."""
    if engine.residues is None:
        return []
    group = engine.group()
    residues = {f"{group.rank:05d}/{name}": array for name, array in engine.residues.items()}
    held = {name: (array.dtype, Rectangle.whole(array.shape)) for name, array in residues.items()}
    placement = exchange_placements(group, held, label="residues")
    return [WritePlan(RESIDUES, placement, assign_blocks(placement, [0] * group.size), residues.__getitem__)]


def mesh_name(engine: ShardedEngine) -> str:
    """The mesh on which a checkpoint is written, with uneven shares, and with its nodes if there are several.

    All of these affect the last bits.
    """
    mesh, name = engine.mesh, str(engine.mesh)
    if isinstance(engine, LayeredEngine) and engine.layout.shares:
        name += f" with shares {shares_text(engine.layout.shares)}"
    if mesh.node_count == 1:
        return name
    hosts = list(dict.fromkeys(mesh.nodes_by_rank))
    return f"{name} on nodes {','.join(str(hosts.index(node)) for node in mesh.nodes_by_rank)}"


def _blocks(plan: WritePlan, rank: int) -> Iterator[BlockToWrite]:
    """The blocks that this rank writes, with their names in its file."""
    for name, piece, block in plan.blocks_of(rank):
        full_name = block_name(name, piece, plan.placement[name].shape)
        yield BlockToWrite(full_name, block.shape, block.dtype, lambda block=block: block)


def _copied(block: BlockToWrite) -> BlockToWrite:
    x = block.read()
    copied = np.array(backend_of(x).to_host(x), order="C", copy=True)
    return block._replace(read=lambda: copied)
