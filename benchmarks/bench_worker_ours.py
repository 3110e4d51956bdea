"""Times training steps of the engine's trainer: a worker that `bench_peers.py` starts.

`argv[1]` is a configuration as described in `peers_protocol.py`. It may also have `mesh` (sizes by axis; default: all
ranks on `data`), `zero`, `micro_batches`, `schedule` and `stages`, as in `train`.
"""

import numpy as np
from peers_protocol import make_batches, print_result, read_config, time_steps

from spmd_engine import Mesh
from spmd_engine.arrays.backend import CPU
from spmd_engine.arrays.memory import keep_freed_memory
from spmd_engine.engine import SGD, AdamW, LayeredEngine, schedules
from spmd_engine.engine.batch import make_batch
from spmd_engine.engine.state.assignment import ZeroConfig
from spmd_engine.models import GPTSize, gpt
from spmd_engine.models.mlp import mlp
from spmd_engine.planning.machine.product_choice import choose_products
from spmd_engine.training.trainer import Trainer


def main() -> None:
    config = read_config()
    precision = config.get("precision", "float32")
    keep_freed_memory()  # as `train` does
    with Mesh(**config.get("mesh", {})) as mesh:
        choose_products(mesh.group(), config.get("products", "auto"), dtype=precision)
        engine = LayeredEngine(
            build_model(config),
            mesh,
            dtype=precision,
            storage=ZeroConfig(config.get("zero")),
            schedule=schedules.named(config["schedule"]) if "schedule" in config else None,
            stages=config.get("stages", "even"),
        )
        batches = [cut(config, engine, *batch) for batch in make_batches(config)]
        trainer = Trainer(
            engine,
            make_optimizer(config),
            lambda step: batches[step % len(batches)],
            lambda step: config["learning_rate"],
            grad_clip=config["clip_norm"],
            step_metrics=False,  # the peers' ranks do not exchange metrics either
        )
        row = time_steps(config, lambda step: trainer.step().loss, mesh.barrier)
        rows = mesh.all_gather(row[None])
        if mesh.rank == 0:
            print_result(config, rows, version())
        mesh.barrier()


def version():
    return f"NumPy {np.__version__}{' and Numba' if CPU.kernels else ''}"


def build_model(config):
    if "sizes" in config:
        return mlp(config["sizes"])
    return gpt(GPTSize(config["layers"], config["width"], config["heads"], config["context"], config["vocabulary"]))


def make_optimizer(config):
    if "sizes" in config:
        return SGD()
    return AdamW(tuple(config["betas"]), config["epsilon"], config["weight_decay"])


def cut(config, engine, inputs, targets):
    """This rank's shard of the global batch, made as in `train`, with the number of targets."""
    parts = config.get("micro_batches", 1)
    load = lambda samples: (inputs[samples], targets[samples])
    return make_batch(load, len(inputs), parts, engine, count=targets.size)


if __name__ == "__main__":
    main()
