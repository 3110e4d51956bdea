"""Measures how much of the gradient communication overlaps with the backward, on ranks that an MPI launcher starts.

    python scripts/two_hosts.py -n 2 -- python scripts/bench_overlap.py --model gpt-mini

It alternates a step of one rank alone, the reduction of all gradients alone, and a step of all ranks. ``hidden`` is the
fraction of the communication time that does not lengthen the step.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import click
import numpy as np

from spmd_engine import Mesh, world
from spmd_engine.cli.bench.measuring import print_table, spread
from spmd_engine.engine import LayeredEngine
from spmd_engine.engine.batch import batch_of
from spmd_engine.engine.state.assignment import ZeroConfig
from spmd_engine.models.names import GPT_SIZES, build_model


@click.command()
@click.option("--model", type=click.Choice(list(GPT_SIZES)), default="gpt-mini", show_default=True)
@click.option("--samples", type=click.IntRange(min=1), default=2, show_default=True, help="Samples per rank.")
@click.option("--rounds", type=click.IntRange(min=2), default=5, show_default=True)
@click.option(
    "--compress", multiple=True, help="Compression of gradients, as in 'train'; may be repeated. [default: none]"
)
def overlap(model: str, samples: int, rounds: int, compress: tuple[str, ...]) -> None:
    """Print milliseconds, averaged over ranks, for each compression: medians and ranges of the rounds."""
    comm = world()
    with Mesh(comm.subset([comm.rank])) as one, Mesh(data=comm.size) as mesh:
        rows = []
        for compression in compress or ("none",):
            single = LayeredEngine(build_model(model), one)
            together = LayeredEngine(build_model(model), mesh, storage=ZeroConfig(compress=compression))
            calls = {
                "alone": _step(single, samples),
                "communication": lambda engine=together: _communicate(engine),
                "step": _step(together, samples * mesh.size),
            }
            seconds: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(rounds + 1):
                for name, call in calls.items():
                    seconds[name].append(_timed(mesh, call))
            times = {name: values[1:] for name, values in seconds.items()}  # the first round is warm-up
            triples = zip(*times.values(), strict=True)
            hidden = [1 - (step - before) / moved for before, moved, step in triples]
            rows.append(
                (compression, *(spread(values, 1e3, " ms") for values in times.values()), f"{median(hidden):.0%}")
            )
        if comm.rank == 0:
            print_table((f"{model}, {comm.size} ranks", "alone", "communication", "step", "hidden"), rows)


def _step(engine: LayeredEngine, samples: int) -> Callable[[], object]:
    """A step of the engine on ``samples`` samples."""
    size = engine.model.context + 1
    tokens = np.random.default_rng(0).integers(0, engine.model.vocabulary, (samples, size))
    batch = batch_of(tokens[:, :-1], tokens[:, 1:], engine)
    return lambda: engine.step(batch)


def _communicate(engine: LayeredEngine) -> None:
    """Run only the gradient reductions of a step."""
    for pending in [storage.start_reduce() for storage in engine.storages]:
        if pending is not None:
            pending.wait()


def _timed(mesh: Mesh, call: Callable[[], object]) -> float:
    """Seconds of one call, averaged over ranks that start together."""
    mesh.barrier()
    began = perf_counter()
    call()
    return float(mesh.all_reduce(np.array(perf_counter() - began), "mean"))


if __name__ == "__main__":
    overlap()
