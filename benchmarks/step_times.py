"""Step times of plans on this machine, predicted and measured: errors, rank correlation, and the cost of choices.

    python benchmarks/step_times.py                       # calibrates, then runs all plans in turn: about eight minutes
    python benchmarks/step_times.py --only "gpt-mini/data=2;mlp" --rounds 1
    python benchmarks/step_times.py --machine FILE        # with a machine file that `calibrate` wrote
    python benchmarks/step_times.py --record FILE         # stores the measurements; again: adds rounds
    python benchmarks/step_times.py --replay FILE         # predicts and reports from such a file without measuring

The machine should be otherwise idle. Plans run one after the other, and all run once before any runs again, so that a
temporary slowdown affects all of them; the median of a plan's rounds counts. ``chosen`` compares the plan of a model
that is predicted to be fastest with the one that was.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from platform import processor
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from spmd_engine import Mesh
from spmd_engine.axes import parse_axes
from spmd_engine.cli.bench.measuring import start_ranks
from spmd_engine.cli.calibrate import STEPS, fitted, step_seconds
from spmd_engine.engine import AdamW
from spmd_engine.engine.build import build_engine
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.planning.dry_run.analyze import synthetic_batch
from spmd_engine.planning.machine.machine import Machine, parse_machine, read_machine, toml_of
from spmd_engine.planning.machine.measure import measure_machine
from spmd_engine.planning.simulator.step_evaluation import evaluate_step
from spmd_engine.training import Trainer

BATCHES = {"gpt-mini": 8, "mlp": 4096, "convnet": 256, "gpt-moe-mini": 8}
PLANS = {  # model -> mesh, options of the composition, micro-batches
    "gpt-mini": [
        ("data=2", {}, 1),
        ("data=2", {"zero": 1}, 1),
        ("data=2", {"zero": 3}, 1),
        ("data=2", {"recompute": "block"}, 1),
        ("model=2", {}, 1),
        ("context=2", {}, 1),
        ("pipe=2", {}, 4),
        ("pipe=2,data=2", {}, 2),
        ("data=4", {}, 1),
        ("data=2,model=2", {"sequence_parallel": True}, 1),
        ("data=8", {"zero": 1}, 1),
    ],
    "mlp": [
        ("data=2", {}, 1),
        ("data=2", {"zero": 2}, 1),
        ("model=2", {}, 1),
        ("data=4", {}, 1),
        ("data=2,model=2", {}, 1),
    ],
    "convnet": [
        ("data=2", {}, 1),
        ("data=2", {}, 2),
        ("rows=2", {}, 1),
        ("data=4", {"zero": 1}, 1),
    ],
    "gpt-moe-mini": [
        ("data=2", {}, 1),
        ("expert=2", {}, 1),
        ("expert=2", {"zero": 1}, 1),
        ("data=2,expert=2", {}, 1),
    ],
}
RECORDED = Path(__file__).parent / "step_times"  #: files of --record, one per machine
WARM = 2  #: steps before the timed ones
TIMED = 3  #: least number of timed steps


def named() -> dict[str, tuple]:
    """All plans by their names."""
    plans = {}
    for model, rows in PLANS.items():
        for mesh, options, micro_batches in rows:
            extra = [f"{name}={value}" for name, value in options.items()]
            extra += [f"m={micro_batches}"] * (micro_batches > 1)
            plans["/".join([model, mesh, *extra])] = model, mesh, options, micro_batches
    return plans


def measure(name: str, seconds: float) -> float:
    """Seconds of a step: the median of the steps within the time limit, on the slowest rank."""
    model, axes, options, micro_batches = named()[name]
    with Mesh(**parse_axes(axes)) as mesh:
        engine = build_engine(ModelConfig(model), mesh, ParallelConfig(**options))
        batch = synthetic_batch(
            engine.model, engine, BATCHES[model], micro_batches, None, dtype=engine.dtype, real=True
        )
        trainer = Trainer(engine, AdamW(), lambda step: batch, lambda step: 1e-4, step_metrics=False)
        turns: list[float] = []
        for number in range(10_000):
            mesh.barrier()
            began = perf_counter()
            trainer.step()
            mesh.barrier()
            if number >= WARM:
                turns.append(perf_counter() - began)
            enough = len(turns) >= TIMED and sum(turns) >= seconds
            if mesh.all_reduce(np.array([float(enough)]))[0] == mesh.size:
                return median(turns)
    raise AssertionError


def launched(name: str, seconds: float) -> float | None:
    """Seconds of a step, measured on newly started ranks; None if they failed."""
    ranks = prod(parse_axes(named()[name][1]).values())
    try:
        output = start_ranks(ranks, [__file__, "--worker", name, "--seconds", str(seconds)])
    except UsageError as error:
        print(f"{name}: {error}", flush=True)
        return None
    return float(json.loads(output.splitlines()[-1]))


def calibration() -> dict[str, Any]:
    """The measurements of ``calibrate`` before the fit: the machine, and seconds of small steps."""
    with Mesh() as mesh:
        machine = measure_machine(mesh)
        steps = step_seconds(mesh).tolist()
    return {"machine": toml_of(machine), "steps": dict(zip(map(str, STEPS), steps, strict=True))} if machine else {}


def calibrated(measured: dict[str, Any]) -> Machine:
    """The machine that ``calibrate`` would write from these measurements."""
    steps = [measured["steps"].get(str(step), float("nan")) for step in STEPS]
    return fitted(parse_machine(measured["machine"]), np.array(steps))


def cpu_name() -> str:
    """The system's name for the CPU, with family and model, which hypervisors do not change."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "model name" not in facts:
        return processor()
    return f"{facts['model name']}, family {facts.get('cpu family')}, model {facts.get('model')}"


def predicted(name: str, machine: Machine) -> float:
    """Seconds of a step, simulated by the planner."""
    model, axes, options, micro_batches = named()[name]
    mesh, composition = parse_axes(axes), ParallelConfig(**options)
    machine = machine.with_ranks(prod(mesh.values()))
    config = ModelConfig(model)
    options = {"dtype": np.dtype(config.dtype), "optimizer": AdamW()}
    return evaluate_step(
        config.build(composition), machine, mesh, composition, BATCHES[model], micro_batches, **options
    ).seconds


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation."""
    places = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(*places)[0, 1])


def report(results: dict[str, tuple[float, list[float]]]) -> None:
    """Print errors, the correlation, and for each model the time of its chosen plan against the best."""
    print(f"\n{'plan':<44} {'predicted':>10} {'measured':>10} {'spread':>7} {'error':>7}")
    errors, pairs = [], []
    for name, (predicted, turns) in results.items():
        measured = median(turns)
        errors.append(abs(predicted / measured - 1))
        pairs.append((predicted, measured))
        spread = (max(turns) - min(turns)) / measured
        print(f"{name:<44} {predicted:>9.4f}s {measured:>9.4f}s {spread:>7.1%} {predicted / measured - 1:>+7.1%}")
    print(f"\n{len(errors)} plans: median error {median(errors):.1%}, largest {max(errors):.1%}", end="")
    print(f"; Spearman {spearman(*zip(*pairs, strict=True)):.3f}" if len(pairs) > 2 else "")
    for model in BATCHES:
        mine = {name: result for name, result in results.items() if name.startswith(f"{model}/")}
        if len(mine) < 2:
            continue
        chosen = min(mine, key=lambda name: mine[name][0])
        best = min(mine, key=lambda name: median(mine[name][1]))
        ratio = median(mine[chosen][1]) / median(mine[best][1])
        pairs = [(predicted, median(turns)) for predicted, turns in mine.values()]
        order = f"Spearman {spearman(*zip(*pairs, strict=True)):.2f}" if len(pairs) > 2 else ""
        print(f"{model}: chosen {chosen}, {ratio:.2f} times the best measured, {best}; {order}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--machine", type=Path, help="A machine file; without it, this machine is calibrated first.")
    parser.add_argument("--only", help="Names of plans, or prefixes of names, separated by semicolons.")
    parser.add_argument("--rounds", type=int, default=3, help="Runs of each plan.")
    parser.add_argument("--seconds", type=float, default=1.0, help="Seconds for which each run is timed.")
    parser.add_argument("--record", type=Path, metavar="FILE", help="Store the measurements in this JSON file.")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="Report on such a file without measuring.")
    arguments = parser.parse_args()
    if arguments.worker:
        worker_result = (
            calibration() if arguments.worker == "calibrate" else measure(arguments.worker, arguments.seconds)
        )
        if Mesh().rank == 0:
            print(json.dumps(worker_result))
        return
    prefixes = arguments.only.split(";") if arguments.only else [""]
    names = [name for name in named() if any(name.startswith(prefix) for prefix in prefixes)]
    if not names:
        parser.error(f"--only {arguments.only}: there is no such plan; there are {'; '.join(named())}")
    record = arguments.replay or arguments.record
    if record is not None and record.exists():
        recorded = json.loads(record.read_text())
    elif arguments.replay:
        parser.error(f"--replay {record}: there is no such file; --record FILE writes one")
    else:
        recorded = {"cpu": cpu_name(), "calibration": {}, "plans": {}}
    if arguments.machine is None and not recorded["calibration"]:
        recorded["calibration"] = json.loads(start_ranks(2, [__file__, "--worker", "calibrate"]).splitlines()[-1])
    machine = read_machine(arguments.machine) if arguments.machine else calibrated(recorded["calibration"])

    def keep() -> None:
        if arguments.record:
            arguments.record.write_text(json.dumps(recorded, indent=1) + "\n")

    keep()
    print(f"{recorded['cpu']}\n\n{toml_of(machine)}")
    for number in range(0 if arguments.replay else arguments.rounds):
        for name in names:
            if (seconds := launched(name, arguments.seconds)) is not None:
                recorded["plans"].setdefault(name, []).append(seconds)
                print(f"round {number + 1} of {arguments.rounds}: {name} {seconds:.4f} s", flush=True)
            keep()
    turns = {name: recorded["plans"][name] for name in names if name in recorded["plans"]}
    report({name: (predicted(name, machine), seconds) for name, seconds in turns.items()})


if __name__ == "__main__":
    main()
