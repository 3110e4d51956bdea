"""Times a job of ``train --adapt``, one rank of which becomes twice as slow in mid-run, and recovers.

    mpiexec -n 4 python benchmarks/bench_adapt.py --rounds 9

The ranks train a small model. In each layer they also sleep for a time proportional to its FLOPs, the last rank twice
as long while it is slow; so ranks need no cores of their own. Shown for each round, and as medians: the seconds
of a step before, those 41 to 50 steps after the rank has become slow, as a part of the sum of all ranks' speeds, those
41 to 50 steps after it has recovered, as a part of the speed before, and the part of the time that rank 0 spends in
observing and deciding.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from math import prod
from pathlib import Path
from statistics import median

from spmd_engine import Mesh, TrainConfig, train
from spmd_engine.adaptive.adapter import Adapter
from spmd_engine.comm.agreement.rank_zero import text_from_rank_zero
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.layers import Linear
from spmd_engine.training import Trainer
from spmd_engine.training.train_config import AdaptConfig

SAMPLES = 56  #: of a step
SECONDS = 2e-3  #: of sleep for a sample in all layers, in a forward and in a backward
MODEL = ModelConfig("mlp").build(ParallelConfig())
WEIGHTS = sum(prod(shape) for name, (_, shape) in MODEL.parameters() if name.endswith("weights"))
WAIT, LAST = 50, 10  #: steps until the measured ones, and number of these
QUIET = 60  #: steps before the rank becomes slow


def sleeping(layer: type, name: str, factor: list[float]) -> None:
    """Let the ``name`` of a layer also sleep for its samples and its part of the model's weights."""
    method = getattr(layer, name)

    def slept(self, sh, p, *arguments):
        result = method(self, sh, p, *arguments)
        samples = len(arguments[0] if name == "forward" else arguments[-1])
        time.sleep(SECONDS * samples * p["weights"].size / WEIGHTS * factor[0])
        return result

    setattr(layer, name, slept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--keep", help="folder in which the runs stay")
    options = parser.parse_args()
    factor, seconds, inside = [1.0], [], [0.0]
    for name in ("forward", "backward_input"):
        sleeping(Linear, name, factor)
    step, stepped = Trainer.step, Adapter.stepped
    begins = 0

    def timed(trainer: Trainer):
        done = trainer.steps_done
        factor[0] = 2.0 if is_slow and begins <= done < begins + WAIT + LAST else 1.0
        report = step(trainer)
        seconds.append(report.seconds)
        return report

    def counted(adapter: Adapter, report) -> None:
        began = time.perf_counter()
        stepped(adapter, report)
        inside[0] += time.perf_counter() - began

    Trainer.step, Adapter.stepped = timed, counted  # type: ignore[method-assign]
    with Mesh() as mesh, tempfile.TemporaryDirectory() as own:
        ranks, is_slow = mesh.size, mesh.rank == mesh.size - 1
        folder = Path(text_from_rank_zero(mesh.group(), lambda: options.keep or own))
        if mesh.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "text.py").write_text("".join(f"line {number} of a text\n" for number in range(5000)))
        mesh.barrier()
        found = []
        for number in range(options.rounds):
            begins = QUIET + 2 * number  # not always the same place in an interval
            steps = begins + 2 * (WAIT + LAST)
            job = TrainConfig.of(
                model=MODEL.name, data=str(folder / "text.py"), batch_size=SAMPLES, steps=20 * steps, eval_every=0,
                save_every=0, sample=0, eval_samples=1,
            ).changed(adapt=AdaptConfig())  # fmt: skip
            seconds.clear()
            inside[0] = 0.0
            run = train(job, folder / str(number), stop_at=steps, enforce=False)
            before = median(seconds[20:begins])
            slow = median(seconds[begins + WAIT - LAST : begins + WAIT])
            after = median(seconds[-LAST:])
            asleep = 2 * SECONDS * SAMPLES / ranks  # the rest of a step does not depend on the speeds
            ideal = asleep * ranks / (ranks - 0.5) + before - asleep
            found.append((before, ideal / slow, before / after, inside[0] / sum(seconds)))
            if mesh.rank == 0:
                events = (run.folder / "events.jsonl").read_text().count('"reshaped"')
                texts = "before {:.4f} s; slow {:.3f}; after {:.3f}; inside {:.3%}".format(*found[-1])
                print(f"{texts}; {events} changes; load {os.getloadavg()[0]:.1f}", flush=True)
        if mesh.rank == 0:
            print(f"median of {len(found)} rounds, {ranks} ranks: ", end="")
            print("slow {:.3f}; after {:.3f}; inside {:.3%}".format(*(median(each) for each in list(zip(*found))[1:])))


if __name__ == "__main__":
    sys.exit(main())
