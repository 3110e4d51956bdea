"""Times moving a model with its optimizer to another mesh: in memory, through rank 0, and through a checkpoint.

    mpiexec -n 4 python benchmarks/bench_reshard.py --model gpt-mini --rounds 5

The three alternate, and ratios are taken between neighbours of one round, so that other work on the machine affects all
equally. Each line also has the CPU seconds of all ranks: with fewer cores than ranks they are the relevant measure.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Callable

from bench_checkpoints import timed

from spmd_engine import Mesh
from spmd_engine.checkpoints import load_checkpoint, save_checkpoint
from spmd_engine.comm.agreement.rank_zero import text_from_rank_zero
from spmd_engine.engine import AdamW, LayeredEngine
from spmd_engine.engine.state.assignment import ZeroConfig
from spmd_engine.models.names import build_model

WAYS = {
    "data=4 -> model=2,data=2": ({"data": 4}, 0, {"model": 2, "data": 2}, 0),
    "data=4 zero 3 -> pipe=2,data=2": ({"data": 4}, 3, {"pipe": 2, "data": 2}, 0),
    "data=4 zero 1 -> model=4": ({"data": 4}, 1, {"model": 4}, 0),
    "pipe=2,model=2 -> data=4 zero 3": ({"pipe": 2, "model": 2}, 0, {"data": 4}, 3),
}


class Engine(LayeredEngine):
    """An engine without initial parameters, which every method would overwrite."""

    def initialize(self) -> None: ...


def in_memory(engine: LayeredEngine, optimizer: AdamW, mesh: Mesh, zero: int) -> None:
    engine.reshard(mesh, optimizer=optimizer, storage=ZeroConfig(zero))


def through_rank_zero(engine: LayeredEngine, optimizer: AdamW, mesh: Mesh, zero: int) -> None:
    """The method by hand: gather each array on rank 0, make a new engine, and broadcast each array."""
    world = engine.group()
    parameters = {name: engine.gather(name, root=0) for name in engine.names}
    states = {
        kind: {name: engine.gather_owned(name, state, root=0) for name in engine.names}
        for kind, state in optimizer.state.items()
    }
    engine = Engine(engine.model, mesh, storage=ZeroConfig(zero))
    engine.load_checkpoint({name: world.broadcast(array) for name, array in parameters.items()})
    engine.after_update()
    optimizer.state.clear()
    optimizer.prepare(engine)
    for kind, state in optimizer.state.items():
        named_state = engine.named(state)
        for name, array in states[kind].items():
            array = world.broadcast(array)
            if name in named_state and engine.owned_index(name) is not None:
                named_state[name][...] = engine.block(name, array, owned=True)


def through_checkpoint(engine: LayeredEngine, optimizer: AdamW, mesh: Mesh, zero: int) -> None:
    folder = text_from_rank_zero(engine.group(), tempfile.mkdtemp)
    save_checkpoint(folder, engine, optimizer)
    load_checkpoint(folder, Engine(engine.model, mesh, storage=ZeroConfig(zero)), AdamW())
    engine.group().barrier()
    if engine.group().rank == 0:
        shutil.rmtree(folder)


HOWS = {"in memory": in_memory, "through rank 0": through_rank_zero, "through a checkpoint": through_checkpoint}


def moved(how: Callable, way: tuple, model: str) -> tuple[float, float]:
    """Wall seconds until all ranks are done, and CPU seconds of all ranks."""
    axes, zero, others, new_zero = way
    with Mesh(**axes) as mesh, Mesh(**others) as other:
        engine, optimizer = Engine(build_model(model), mesh, storage=ZeroConfig(zero)), AdamW()
        optimizer.prepare(engine)
        return timed(mesh.group(), lambda: how(engine, optimizer, other, new_zero))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="gpt-mini")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--way", choices=WAYS, help="run only this one")
    args = parser.parse_args()
    with Mesh() as mesh:
        rank = mesh.rank
    for name, way in WAYS.items():
        if args.way not in (None, name):
            continue
        rounds = [{how: moved(do, way, args.model) for how, do in HOWS.items()} for _ in range(args.rounds + 1)][1:]
        if rank == 0:
            print(name)
        for how in HOWS:
            wall, cpu = (statistics.median(result[how][i] for result in rounds) for i in (0, 1))
            ratios = [[result[how][i] / result["in memory"][i] for result in rounds] for i in (0, 1)]
            ratio_text = ", ".join(
                f"{kind} {statistics.median(r):.2f}x ({min(r):.2f}-{max(r):.2f})"
                for kind, r in zip(("wall", "CPU"), ratios, strict=True)
            )
            if rank == 0:
                print(
                    f"  {how:21} {wall * 1e3:8.1f} ms, CPU {cpu * 1e3:8.1f} ms; of in memory: {ratio_text}", flush=True
                )


if __name__ == "__main__":
    main()
