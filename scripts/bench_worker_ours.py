"""Times our own training steps: the worker that ``bench_peers.py`` and ``bench.py`` start.

``argv[1]`` is the JSON configuration; the last line of output is the JSON result.
"""

import json
import resource
import sys
from time import perf_counter

import numpy as np

from spmd_engine import Mesh
from spmd_engine.engine import AdamW, LayeredEngine
from spmd_engine.engine.batch import batch_of
from spmd_engine.models import GPTSize, gpt


def main() -> None:
    config = json.loads(sys.argv[1])
    size = GPTSize(config["layers"], config["width"], config["heads"], config["context"], config["vocabulary"])
    steps, warmup, rows = config["steps"], config["warmup"], config["batch_size"]
    shape = (warmup + steps, rows, config["context"] + 1)
    tokens = np.random.default_rng(config["seed"]).integers(0, config["vocabulary"], shape)
    seconds, losses = [], []
    with Mesh(**config.get("mesh", {})) as mesh:
        engine = LayeredEngine(gpt(size), mesh, dtype=np.float32)
        optimizer = AdamW(tuple(config["betas"]), config["epsilon"], config["weight_decay"])
        for step in range(warmup + steps):
            batch = batch_of(tokens[step, :, :-1], tokens[step, :, 1:], engine, step=step)
            mesh.barrier()
            began = perf_counter()
            losses.append(engine.step(batch))
            scale = min(1.0, config["clip_norm"] / (engine.gradient_norm() + 1e-6))
            optimizer.update(
                engine, engine.gradients, step=step + 1, rate=config["learning_rate"], scale=scale
            )
            mesh.barrier()
            seconds.append(perf_counter() - began)
        if mesh.rank == 0:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            result = {"step_seconds": seconds[warmup:], "peak_rss_bytes": peak}
            print(json.dumps({**result, "first_loss": losses[0], "last_loss": losses[-1], "version": np.__version__}))


if __name__ == "__main__":
    main()
