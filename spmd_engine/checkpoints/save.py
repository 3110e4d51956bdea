"""Saving: each rank writes blocks of its shards; then rank 0 commits them as a checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from spmd_engine.arguments import checked
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.dtypes import describe, described
from spmd_engine.checkpoints.format.blocks import HASH, block_name, dtype_name
from spmd_engine.checkpoints.format.folder import CheckpointFolder, discard
from spmd_engine.checkpoints.format.manifest import (
    MODEL,
    OPTIMIZER,
    RESIDUES,
    Arrays,
    Files,
    Manifest,
    Pieces,
    Section,
    file_name,
)
from spmd_engine.checkpoints.format.write import BlockToWrite, write_files
from spmd_engine.comm.agreement.rank_zero import gather_equal_json, gather_json, on_rank_zero, text_from_rank_zero
from spmd_engine.engine import LayeredEngine, ShardedEngine
from spmd_engine.engine.optimizers import Optimizer
from spmd_engine.engine.state.assignment import shares_text
from spmd_engine.errors import CheckpointError, UsageError
from spmd_engine.sharding.placement import ArrayPlacement, OneEach, Placement, ranks_of_blocks
from spmd_engine.sharding.rectangles import Rectangle

BLOCK = 4 << 20  #: bytes; larger rectangles become several blocks, so that a rank reads little more than its shard
KEEP = 2  #: complete checkpoints that are kept


@checked({"step": 0, "keep": 1}, folder="the path of a run, before the engine", engine="a ShardedEngine, after it")
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
    pieces: Mapping[str, Pieces]  #: for each array
    array: Callable[[str], Array]  #: returns this rank's shard of an array by name

    def blocks_of(self, rank: int) -> Iterator[tuple[str, Rectangle, Array]]:
        """The blocks that this rank, number ``rank``, writes: array name, rectangle and elements."""
        for name, pieces in self.pieces.items():
            for piece in pieces.of(rank):
                held = next(rectangle for rectangle in self.placement[name].held[rank] if piece in rectangle)
                yield name, piece, self.array(name)[piece.within(held).index]

    def to_write(self, rank: int) -> Iterator[BlockToWrite]:
        """The blocks that this rank, number ``rank``, writes, with their names in its file."""
        for name, piece, block in self.blocks_of(rank):
            full_name = block_name(name, piece, self.placement[name].shape)
            yield BlockToWrite(full_name, block.shape, block.dtype, lambda block=block: block)

    def other_dtypes(self, rank: int) -> dict[str, str]:
        """The dtypes, if they are not those of the placement, as those of optimizer state may be, of the arrays whose
        first piece this rank, number ``rank``, writes."""
        first = [name for name, pieces in self.pieces.items() if pieces.ranks[:1].tolist() == [rank]]
        dtypes = {name: self.array(name).dtype for name in first}
        return {name: dtype_name(dtype, name) for name, dtype in dtypes.items() if dtype != self.placement[name].dtype}

    def arrays(self, dtypes: Mapping[str, str]) -> Arrays:
        """The arrays for the manifest; ``dtypes``: of some, if they are not those of the placement."""
        return {
            name: (array.shape, dtypes.get(name) or dtype_name(array.dtype, name), self.pieces[name])
            for name, array in self.placement.items()
        }

    def stored(self, files: Files, dtypes: Mapping[str, str]) -> Section:
        """The section of the manifest, with the files that all ranks have written."""
        return Section(self.section, self.arrays(dtypes), files)


@dataclass
class ResiduePlan(WritePlan):
    """The residues of this rank alone, all of which it writes; they are placed on one rank."""

    of_ranks: Sequence[Mapping[str, Any]]  #: dtype and shape of each rank's residues by name; equal ones are one object

    def to_write(self, rank: int) -> Iterator[BlockToWrite]:
        return (block._replace(name=f"{rank:05d}/{block.name}") for block in super().to_write(0))

    def other_dtypes(self, rank: int) -> dict[str, str]:
        return {}

    def stored(self, files: Files, dtypes: Mapping[str, str]) -> Section:
        alike: dict[int, list[int]] = {}  # the ranks with equal residues
        for rank, one in enumerate(self.of_ranks):
            alike.setdefault(id(one), []).append(rank)
        own = [(ranks, _residue_plan(self.of_ranks[ranks[0]], {}, ()).arrays({})) for ranks in alike.values()]
        return Section(self.section, {}, files, own)


#: What a rank sends about its file of a section: the byte at which its blocks begin, and the SHA-256 of their hashes.
FILE = np.dtype([("first", "<i8"), ("sha256", f"V{HASH}")])


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
        self.step, self._keep, self._group = step, keep, engine.group()
        self._folder = CheckpointFolder(folder)
        self._config, self._facts, self._mesh = config, dict(facts or {}), mesh_name(engine)
        self._plans = [*write_plans(engine, optimizer), *residue_plans(engine)]
        self._into = Path(text_from_rank_zero(self._group, self._begin, CheckpointError))
        self._written: dict[str, tuple[int, bytes]] = {}  # as in ``FILE``
        self._error = ""
        self._thread: Thread | None = None
        blocks = {plan.section: list(plan.to_write(self._group.rank)) for plan in self._plans}
        if background:
            copies = {section: [_copied(block) for block in part] for section, part in blocks.items()}
            self._thread = Thread(target=self._write, args=(copies,), name=f"save of step {step}", daemon=True)
            self._thread.start()
        else:
            self._write(blocks)

    def _begin(self) -> str:
        """On rank 0: begin the checkpoint, if its facts can be written."""
        for name, value in {"config": self._config, **self._facts}.items():
            try:
                json.dumps(value, sort_keys=True)
            except (TypeError, ValueError) as error:
                raise UsageError(
                    f"save_checkpoint: {name}: {error}; give what JSON has: texts, numbers, lists"
                ) from None
        return str(self._folder.begin())

    @property
    def is_written(self) -> bool:
        """Whether this rank has written its part, or failed."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> None:
        """Wait until all ranks have written, and commit. Raises CheckpointError on all ranks if one failed."""
        if self._thread is not None:
            self._thread.join()
        group, plans = self._group, {plan.section: plan for plan in self._plans}
        dtypes = {} if self._error else {key: plan.other_dtypes(group.rank) for key, plan in plans.items()}
        mine = np.zeros(1 + len(plans), FILE)  # the first says whether this rank sends an error or dtypes
        mine["first"][0] = bool(self._error or any(dtypes.values()))
        for number, section in enumerate(plans, 1):
            if section in self._written:
                mine[number] = self._written[section]
        rows = group.all_gather(mine.view(np.uint8), label="save").view(FILE).reshape(group.size, -1)
        more = gather_json(group, [self._error, dtypes], "save") if rows["first"][:, 0].any() else []
        failed = {rank: error for rank, (error, _) in enumerate(more) if error}
        if failed:
            on_rank_zero(self._group, lambda: discard(self._into))
            errors = "; ".join(f"rank {rank}: {error}" for rank, error in list(failed.items())[:4])
            raise self._failed(errors)

        def commit() -> None:
            try:
                manifest = self._manifest(rows[:, 1:], [dtypes for _, dtypes in more])
                self._folder.commit(self._into, self.step, manifest.text(), self._keep)
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

    def _manifest(self, rows: np.ndarray, dtypes: Sequence[Mapping[str, Mapping[str, str]]]) -> Manifest:
        """From ``rows[ranks sections]`` of files, and dtypes by section and name."""
        sections = {}
        for plan, of_files in zip(self._plans, rows.T, strict=True):
            of_section = dict(chain.from_iterable(of_rank[plan.section].items() for of_rank in dtypes))
            sections[plan.section] = plan.stored(files_of(of_files), of_section)
        return Manifest(self.step, sections, self._facts, self._config, self._mesh)


def files_of(rows: np.ndarray) -> Files:
    """The files of a section, from ``rows`` of ranks, ``FILE[ranks]``; zeros are of a rank without one."""
    ranks = np.flatnonzero(rows["first"])
    return Files(ranks, rows["first"][ranks], rows["sha256"][ranks].tobytes().hex())


def assign_blocks(
    placement: Placement,
    loads: np.ndarray,
    parts: dict[int, Parts] | None = None,
    *,
    block_bytes: int = BLOCK,
) -> dict[str, Pieces]:
    """Divide arrays into pieces of ``block_bytes``, and assign each to a rank that holds it.

    Among replicas, the rank with the least load writes a piece. ``loads``, the bytes of each rank, are increased. The
    result depends on the arguments alone, so all ranks get the same one. ``parts`` are kept for a further call with the
    same ArrayPlacements.
    """
    assigned: dict[str, Pieces] = {}
    parts = {} if parts is None else parts  # equal layers share one placement, and without replicas also the result
    for name, array in placement.items():
        if id(array) not in parts:
            parts[id(array)] = _parts_of(array, block_bytes // array.dtype.itemsize)
        pieces, replicas = parts[id(array)]
        sizes = pieces.sizes * array.dtype.itemsize
        if replicas:
            ranks = []
            for holders, size in zip(replicas, sizes.tolist(), strict=True):
                ranks.append(rank := int(holders[loads[holders].argmin()]))  # the first of equals
                loads[rank] += size
            pieces = Pieces(pieces.bounds, np.array(ranks, np.int64))
        else:
            np.add.at(loads, pieces.ranks, sizes)
        assigned[name] = pieces
    return assigned


Parts = tuple[Pieces, list[np.ndarray]]  #: the pieces of an array, and the ranks that hold each, if some have replicas


def _parts_of(array: ArrayPlacement, elements: int) -> Parts:
    """The pieces of an array, of about so many ``elements``, each with the first rank that holds it; and replicas."""
    bounds, holders, counts = _owned(array)
    if ((bounds[:, 1] - bounds[:, 0]).prod(axis=1) > elements).any():
        divided = [list(pieces_of(Rectangle(*map(tuple, ends)), elements)) for ends in bounds.tolist()]
        times = list(map(len, divided))
        by_piece = zip(np.split(holders, np.cumsum(counts)[:-1]), times, strict=True)
        holders = np.concatenate([np.tile(ranks, often) for ranks, often in by_piece])
        bounds, counts = np.array([*chain(*divided)], np.int64), np.repeat(counts, times)
    begins = np.cumsum(counts) - counts
    return Pieces(bounds, holders[begins]), np.split(holders, begins[1:]) if len(holders) > len(bounds) else []


def _owned(array: ArrayPlacement) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The bounds of every owned rectangle that is not empty, int[rectangles 2 dims]; the ranks that hold each, one
    rectangle after the other; and how many these are: replicas of the rectangle that contains it."""
    if isinstance(array.held, OneEach) and isinstance(array.owned, OneEach):
        numbers, owners = array.held.numbers, np.flatnonzero(array.owned.present)
        holders = np.argsort(numbers, kind="stable")[np.count_nonzero(numbers < 0) :]
        return array.held.bounds[owners], holders, np.bincount(numbers[holders], minlength=1)[owners]
    ranks = ranks_of_blocks(array.held)
    rectangles, holders = [], []
    for owner, owned in enumerate(array.owned):
        for rectangle in owned:
            if rectangle.size:
                within = next(held for held in array.held[owner] if rectangle in held)
                rectangles.append(rectangle)
                holders.append(sorted(ranks[within]))
    bounds = np.array(rectangles, np.int64).reshape(len(rectangles), 2, len(array.shape))
    return bounds, np.array(list(chain(*holders)), np.int64), np.array(list(map(len, holders)), np.int64)


def pieces_of(rectangle: Rectangle, elements: int) -> Iterator[Rectangle]:
    """Split a rectangle that is not empty into runs of whole rows of about so many ``elements``."""
    row = prod(rectangle.shape[1:])
    run = row * max(1, elements // row)
    for first in range(0, rectangle.size, run):
        yield from rectangle.elements(first, min(rectangle.size, first + run))


def write_plans(engine: ShardedEngine, optimizer: Optimizer | None) -> list[WritePlan]:
    """The parts of an engine and of its optimizer's state that each rank writes. Collective over the world."""
    loads, parts = np.zeros(engine.group().size, np.int64), dict[int, Parts]()
    stored, arrays = engine.placement(), {**engine.parameters, **engine.buffers}
    plans = [WritePlan(MODEL, stored, assign_blocks(stored, loads, parts), arrays.__getitem__)]
    if optimizer is not None:
        optimizer.prepare(engine)
        owned, kinds = engine.placement(owned=True), sorted(optimizer.state)
        placement = Placement({f"{kind}/{name}": placed for kind in kinds for name, placed in owned.items()})
        states = {kind: engine.named(optimizer.state[kind]) for kind in kinds}

        def state(key: str) -> Array:
            kind, name = key.split("/", 1)
            return states[kind][name]

        plans.append(WritePlan(OPTIMIZER, placement, assign_blocks(placement, loads, parts), state))
    return plans


def residue_plans(engine: ShardedEngine) -> list[WritePlan]:
    """The plan by which each rank writes all of its own residues. Collective, if the engine has residues."""
    if engine.residues is None:
        return []
    mine = {name: (describe(array.dtype), array.shape) for name, array in engine.residues.items()}
    of_ranks = gather_equal_json(engine.group(), mine, "residues")
    return [_residue_plan(of_ranks[engine.group().rank], engine.residues, of_ranks)]


def _residue_plan(
    kinds: Mapping[str, Any], residues: Mapping[str, Array], of_ranks: Sequence[Mapping[str, Any]]
) -> ResiduePlan:
    """The plan of one rank's ``residues``, with dtypes and shapes ``kinds``."""
    equal: dict[tuple, ArrayPlacement] = {}
    placed = {}
    for name, (dtype, lengths) in kinds.items():
        kind = shape, _ = tuple(lengths), dtype
        if kind not in equal:
            equal[kind] = ArrayPlacement.of_rectangles(shape, described(dtype), [[Rectangle.whole(shape)]])
        placed[name] = equal[kind]
    placement = Placement(placed)
    pieces = assign_blocks(placement, np.zeros(1, np.int64))
    return ResiduePlan(RESIDUES, placement, pieces, residues.__getitem__, of_ranks)


def mesh_name(engine: ShardedEngine) -> str:
    """The mesh on which a checkpoint is written, with uneven shares, and with its nodes if there are several.

    All of these affect the last bits.
    """
    mesh, name = engine.mesh, str(engine.mesh)
    if isinstance(engine, LayeredEngine) and engine.layout.shares:
        name += f" with shares {shares_text(engine.layout.shares)}"
    if mesh.node_count == 1:
        return name
    numbers: dict[str, int] = {}
    return f"{name} on nodes {','.join(str(numbers.setdefault(node, len(numbers))) for node in mesh.nodes_by_rank)}"


def _copied(block: BlockToWrite) -> BlockToWrite:
    x = block.read()
    copied = np.array(backend_of(x).to_host(x), order="C", copy=True)
    return block._replace(read=lambda: copied)
