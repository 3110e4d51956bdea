"""What a rank does at the start, in a save, in a load and in a line of metrics, by the number of ranks, without any.

    python benchmarks/bench_scale.py --ranks 64,1024,4096

One rank runs the package's own code; what it would receive from the others is made up. Times are those of the process
(the least of the rounds), memory the peak of what the part allocates. The arrays are those of 12 layers with 12 arrays
each, with rows on every rank (ZeRO-3); 32 ranks are on each node.
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from time import process_time
from types import SimpleNamespace
from typing import Any

import click
import numpy as np

from spmd_engine.axes import position_of
from spmd_engine.checkpoints.digest import compare_replicas
from spmd_engine.checkpoints.format.blocks import HASH
from spmd_engine.checkpoints.format.manifest import MODEL, OPTIMIZER, RESIDUES, Manifest, Section
from spmd_engine.checkpoints.load_in_place import Wanted, parts_of_rank
from spmd_engine.checkpoints.save import FILE, assign_blocks, files_of, residue_plans
from spmd_engine.cli.bench.measuring import count_option, output_option, report
from spmd_engine.comm.agreement.tree import gather_texts
from spmd_engine.comm.communicators.communicator import Communicator
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.notation import Spec
from spmd_engine.comm.pending import Progress
from spmd_engine.sharding.placement import Held, exchange_placements, exchange_shapes
from spmd_engine.sharding.rectangles import Rectangle
from spmd_engine.training.data.token_data import whole_documents
from spmd_engine.training.trainer import StepReport

PER_NODE, LAYERS, KINDS, WIDTH = 32, 12, 12, 64


class Echo(Communicator):
    """The communicator of one rank of many, which all send what this one sends; it counts messages and bytes."""

    def __init__(self, size: int) -> None:
        super().__init__(range(size), 0, [f"node{rank // PER_NODE:04d}" for rank in range(size)], Progress())
        self.messages = self.nbytes = 0
        self._incoming: list[np.ndarray] = []

    def start_receive(self, data: Any, source: int, tag: int) -> list:
        self._incoming.append(data)
        return []

    def start_send(self, data: Any, to: int, tag: int) -> list:
        self.messages, self.nbytes = self.messages + 1, self.nbytes + data.nbytes
        for incoming in self._incoming:
            incoming[: data.size] = data
        self._incoming.clear()
        return []

    def done(self, requests: list) -> bool:
        return True

    def create_subset(self, ranks: Sequence[int], timeout: float | None) -> Communicator:
        raise NotImplementedError

    def pause(self, idle: int, messages: bool = True) -> None:
        raise NotImplementedError

    def announce_end(self) -> None:
        raise NotImplementedError

    def ended(self, awaited: Sequence[int]) -> list[int]:
        return []


class Gathering:
    """A group whose all_gather joins the row of this rank with those that ``others`` makes of it at the first call."""

    rank = lowest = 0

    def __init__(self, size: int, others: Callable[[np.ndarray, int], Sequence[np.ndarray]]) -> None:
        self.size, self._others, self._gathered = size, others, np.empty(0)

    def all_gather(self, row: np.ndarray, **options: Any) -> np.ndarray:
        if not self._gathered.size:
            self._gathered = np.concatenate(self._others(row, self.size))
        return self._gathered.copy()

    @property
    def nbytes(self) -> int:
        return self._gathered.nbytes


def held_here() -> Held:
    """The rows of all arrays that rank 0 holds: the same of each layer."""
    dtype = np.dtype(np.float32)
    return {
        f"block{layer}/array{kind}": (dtype, Rectangle((0, 0), (1 + kind, WIDTH)))
        for layer in range(LAYERS)
        for kind in range(KINDS)
    }


def rows_of_all(row: np.ndarray, size: int) -> list[np.ndarray]:
    """The numbers that every rank sends of its placement: rows further down for each."""
    rows = np.tile(row, (size, 1))
    bounds = rows[:, 2:].reshape(size, -1, 2, 2)
    bounds[..., 0] += np.arange(size)[:, None, None] * bounds[:1, :, 1:, 0]
    return list(rows)


def rows_of_files(row: np.ndarray, size: int) -> list[np.ndarray]:
    """What every rank sends about its files, with a different hash for each."""
    hashes = np.random.default_rng(0).bytes(HASH * size)
    rows = np.tile(row.view(FILE), (size, 1))
    rows["sha256"][:, 1:] = np.frombuffer(hashes, f"V{HASH}")[:, None]
    return [one.view(np.uint8) for one in rows]


def parts_of(size: int) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], Mapping[str, int]]]]:
    """The name of each part, the work, and what its result counts: messages and bytes."""

    def join() -> Echo:
        comm = Echo(size)
        here, handle = list(range(min(size, PER_NODE))), "x" * 100
        gather_texts(comm, comm.node)
        for text in (handle, handle, "yes reads"):
            gather_texts(comm, text, here)
        gather_texts(comm, "yes")
        return comm

    yield "joining a world", join, lambda comm: {"messages": comm.messages, "bytes": comm.nbytes}
    comm = Echo(size)
    yield "Mesh()", lambda: Mesh(comm, data=size), lambda _: {}

    placing: Any = Gathering(size, rows_of_all)
    held = held_here()
    placement = exchange_placements(placing, {"": held})[""]
    yield "placements", lambda: exchange_placements(placing, {"": held}), lambda _: {"bytes": placing.nbytes}
    yield "assignment of blocks", lambda: assign_blocks(placement, np.zeros(size, np.int64)), lambda _: {}
    mine = np.array([(0, b""), *[(4096, bytes(32))] * 3], FILE)
    saving: Any = Gathering(size, rows_of_files)
    tell = lambda: saving.all_gather(mine.view(np.uint8)).view(FILE).reshape(size, -1)  # noqa: E731
    tell()
    yield "results of a save", tell, lambda _: {"bytes": saving.nbytes}

    def manifest() -> str:
        files = [files_of(column) for column in tell()[:, 1:].T]
        pieces = assign_blocks(placement, np.zeros(size, np.int64))
        arrays = {name: (array.shape, "F32", pieces[name]) for name, array in placement.items()}
        state = {f"{kind}/{name}": array for kind in ("mean", "square") for name, array in arrays.items()}
        (residues,) = residue_plans(compressing)
        sections = Section(MODEL, arrays, files[0]), Section(OPTIMIZER, state, files[1]), residues.stored(files[2], {})
        return Manifest(1, {one.name: one for one in sections}, mesh=f"data={size}").text()

    telling: Any = Gathering(size, lambda row, size: [row] * size)
    residues = {name: np.zeros(part.shape, dtype) for name, (dtype, part) in held.items()}
    compressing: Any = SimpleNamespace(residues=residues, group=lambda: telling)
    yield "kinds of residues", lambda: residue_plans(compressing), lambda _: {"bytes": telling.nbytes}
    yield "manifest, on rank 0", manifest, lambda text: {"bytes": len(text)}
    text = manifest().encode()
    on_node = range(min(size, PER_NODE))

    def load() -> Manifest:
        read = Manifest.parse(BytesIO(text), "it")
        for name in read.file_names(slice(0, None, size)):
            read.file(name)
        model, state = read.sections[MODEL], read.sections[OPTIMIZER]
        wanted = [Wanted(name, model[name], placed, None) for name, placed in placement.items()]
        for kind in ("mean", "square"):
            wanted += [Wanted(name, state[f"{kind}/{name}"], placed, None) for name, placed in placement.items()]
        parts = list(parts_of_rank(wanted, 0, on_node))
        own = [array.blocks[0] for array in read.sections[RESIDUES].of(0).values()]
        assert len(parts) == len(wanted) == 3 * len(own)
        return read

    yield "reading the manifest", lambda: Manifest.parse(BytesIO(text), "it"), lambda _: {"bytes": len(text)}
    yield "a load's part, with that", load, lambda _: {}
    engine: Any = SimpleNamespace(parameters={name: np.zeros(1) for name in placement}, buffers={})
    engine.placement = lambda: placement
    comparing: Any = Gathering(size, lambda row, size: [row] * size)
    engine.group = lambda: comparing
    yield "comparison of replicas", lambda: compare_replicas(engine), lambda _: {"bytes": comparing.nbytes}
    sharded = {name: (Spec.parse("d/data f"), part.shape) for name, (_, part) in held.items()}
    shaping: Any = Gathering(size, lambda row, size: [row] * size)
    first = position_of(0, {"data": size})
    yield "shapes of arrays", lambda: exchange_shapes(shaping, first, sharded), lambda _: {"bytes": shaping.nbytes}
    shares = np.random.default_rng(0).random((size, 3)).round(3).tolist()
    step = StepReport(
        1, 1.0, 1.0, 1.0, 1, 1.0, 1.0, shares=shares, cpu_seconds=[1.0] * size, private_bytes=[1 << 30] * size
    )
    yield "a line of metrics", lambda: json.dumps(step.as_line()), lambda text: {"bytes": len(text)}
    ends = np.arange(1, 16 * size) * 100
    packed = whole_documents(ends - 100, ends, 1024, truncate=False)
    numbers = np.arange(size) % len(packed)
    yield "targets of a batch", lambda: packed.targets_of_rows[numbers].sum(), lambda _: {}


@click.command()
@click.option("--ranks", default="64,1024,4096,16384", show_default=True, help="Numbers of ranks.")
@count_option("rounds", 3)
@output_option
def scale(ranks: str, rounds: int, output: Path | None) -> None:
    """Time and count what one rank does, for several numbers of ranks."""
    sizes = [int(size) for size in ranks.split(",")]
    figures: dict[str, dict[int, dict[str, float]]] = {}
    for size in sizes:
        for name, work, counts in parts_of(size):
            seconds = []
            for _ in range(rounds):
                began = process_time()
                result = work()
                seconds.append(process_time() - began)
            tracemalloc.start()
            work()
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            figures.setdefault(name, {})[size] = {"seconds": min(seconds), "peak": peak, **counts(result)}
    rows = [[name, *(_text(by_size[size]) for size in sizes)] for name, by_size in figures.items()]
    report(["a rank's part", *(f"{size:,} ranks" for size in sizes)], rows, figures, output)


def _text(figures: Mapping[str, float]) -> str:
    counts = f"{figures['messages']:.0f} messages, " if "messages" in figures else ""
    counts += f"{figures['bytes'] / 1e6:.3g} MB, " if "bytes" in figures else ""
    return f"{figures['seconds'] * 1e3:,.3g} ms, {counts}peak {figures['peak'] / 1e6:.3g} MB"


if __name__ == "__main__":
    scale()
