"""How far predictions are from what others measured and published: python scripts/score_planner.py --tables FOLDER

The folder holds CSV files whose first line names their source (``#``), under the names below; what is not there is left
out. Machine files have a few fitted numbers; those for a table are fitted to other rows of it than are scored, by a
split that a hash of the row fixes, or to another table. Beside each error stand naive baselines: a constant rate of
model FLOPs, fitted alike, and the same with the pipeline's bubble.

Systems other than this engine compute in 16 bits with other kernels: layers' shapes, schedules and collectives are
this engine's own, of a GPT with the row's sizes, products and arrays at half the bytes.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import product
from pathlib import Path
from statistics import mean, median

from spmd_engine.errors import SpmdError
from spmd_engine.models import GPTSize, gpt
from spmd_engine.planning.estimate import Estimate
from spmd_engine.planning.lattice import Candidate
from spmd_engine.planning.machine import Machine
from spmd_engine.planning.machine_file import read_machine
from spmd_engine.planning.search import Planner

Row = dict[str, str]


def main() -> None:
    """Score every table that is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True, help="The folder with the CSV files.")
    parser.add_argument("--rows", type=int, default=240, help="Rows of a long table that are scored; 0: all.")
    parser.add_argument("--only", help="The name of one table.")
    arguments = parser.parse_args()
    tables = {
        "allreduce_a100_nccl.csv": score_all_reduce,
        "vtrain_single_node.csv": score_vtrain,
        "calculon_validation.csv": score_iteration_times,
        "kempnerforge_h200.csv": score_h200,
    }
    for name, score in tables.items():
        if arguments.only not in (None, name):
            continue
        path = arguments.tables / name
        if path.is_file():
            print(f"\n{name}", flush=True)
            score(read(path), arguments)
        else:
            print(f"\n{name}: not there")


def read(path: Path) -> list[Row]:
    """The rows of a table, without the line that names its source."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def share(row: Row) -> float:
    """Where a row falls in [0, 1), by a hash of its text: fixed for ever."""
    text = ",".join(f"{name}={value}" for name, value in sorted(row.items()))
    return int(sha256(text.encode()).hexdigest()[:8], 16) / 2**32


def told(name: str, errors: Iterable[float]) -> None:
    """A line of figures of relative errors."""
    errors = [abs(error) for error in errors]
    if errors:
        print(
            f"  {name:<44} mean {mean(errors):6.1%}  median {median(errors):6.1%}  max {max(errors):6.1%}  "
            f"rows {len(errors)}"
        )


# --- collectives


def score_all_reduce(rows: Sequence[Row], _: argparse.Namespace) -> None:
    """all_reduce inside an A100 node; ``link_share`` and ``wait_seconds`` fitted to a quarter of the rows."""
    from spmd_engine.planning.collective_time import CollectiveTimes

    rows = [row for row in rows if row["gpu"] == "a100"]
    fitting = [row for row in rows if share(row) < 0.25]
    scored = [row for row in rows if share(row) >= 0.25]
    machine = read_machine("a100").with_ranks(8)

    def errors(machine: Machine, rows: Sequence[Row]) -> list[float]:
        times = CollectiveTimes(machine)
        return [
            times.of("all_reduce", range(int(row["gpus"])), float(row["bytes"])).seconds * 1e6 / float(row["time_us"])
            - 1
            for row in rows
        ]

    choices = product((0.6, 0.65, 0.7, 0.75, 0.8, 0.85), (0.0, 1e-5, 2e-5, 3e-5, 4e-5))
    best = min(
        (machine.with_fitted(link_share=link, wait_seconds=wait) for link, wait in choices),
        key=lambda each: mean(map(abs, errors(each, fitting))),
    )
    print(f"  fitted to {len(fitting)} rows: link_share {best.fitted.link_share}, wait {best.fitted.wait_seconds}")
    told("predicted", errors(best, scored))
    rate = median(float(row["bytes"]) / float(row["time_us"]) for row in fitting)
    told("baseline: a constant rate", [float(row["bytes"]) / rate / float(row["time_us"]) - 1 for row in scored])


# --- steps of GPTs


class Run:
    """A published run of a GPT: what is to be predicted, and its naive baselines."""

    def __init__(self, size: GPTSize, candidate: Candidate, seconds: float, machine: str) -> None:
        self.size, self.candidate, self.seconds, self.machine = size, candidate, seconds, machine

    @property
    def flops(self) -> float:
        """Of the model, forward and backward, on each rank; with full recomputation a forward more."""
        size, tokens = self.size, self.candidate.batch_size * self.size.context
        width, length = size.width, size.context
        each = 72 * size.layers * width**2 * (1 + length / (6 * width) + size.vocabulary / (16 * size.layers * width))
        return each * tokens * (4 / 3 if self.candidate.recompute == "block" else 1) / self.candidate.ranks

    @property
    def bubble(self) -> float:
        """Of a pipeline, as a factor on the time."""
        p, m = self.candidate.pipe, self.candidate.micro_batches
        return 1 + (p - 1) / (m * self.candidate.chunks)


class HalfPlanner(Planner):
    """A planner whose float32 arrays are taken to have half the bytes, and products the speed of 16 bits."""

    def __init__(self, model, machine: Machine) -> None:
        node = machine.nodes[0]
        fast = {**node.speeds, "float32": node.speeds["float16"]}
        # half the bytes at a bandwidth is all the bytes at twice the bandwidth
        doubled = replace(
            node,
            speeds=fast,
            memory_bandwidth=type(node.memory_bandwidth)(
                tuple((size, 2 * speed) for size, speed in node.memory_bandwidth.points)
            ),
            inside=replace(node.inside, bandwidth=2 * node.inside.bandwidth),
        )
        halved = replace(
            machine,
            nodes=(doubled, *machine.nodes[1:]),
            between=replace(machine.between, bandwidth=2 * machine.between.bandwidth),
        )
        super().__init__(model, halved)

    def estimated(self, candidate: Candidate) -> Estimate | None:
        estimator = self.estimator(candidate)
        return estimator.estimate() if estimator is not None else None


class Predictor:
    """Predicts runs on a machine; models that come again are analyzed once."""

    def __init__(self) -> None:
        self._costs: dict[GPTSize, dict] = {}

    def seconds(self, run: Run, **fitted: float) -> float | None:
        """Of a step; None if the engine cannot cut the model so."""
        machine = read_machine(run.machine).with_fitted(**fitted).with_ranks(run.candidate.ranks)
        planner = HalfPlanner(gpt(run.size), machine)
        profiles = planner.profiles
        profiles.raw = self._costs.setdefault(replace(run.size, layers=1), {})
        found = planner.estimated(run.candidate)
        return float(found.seconds) if found is not None else None


GRID = {
    "product_share": (0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9),
    "product_half": (0.0, 1e9, 4e9, 1.6e10),
    "memory_share": (0.3, 0.5, 0.8),
    "pass_seconds": (0.0, 1e-4, 2e-4, 4e-4),
    "link_share": (0.4, 0.6, 0.75),
}


def fit(predict: Callable[..., float | None], runs: Sequence[Run], start: dict[str, float]) -> dict[str, float]:
    """Numbers of the grid that are best for these runs, one after the other, twice."""
    chosen = dict(start)

    def error(values: dict[str, float]) -> float:
        predicted = [(predict(run, **values), run.seconds) for run in runs]
        return mean(abs(found / seconds - 1) for found, seconds in predicted if found is not None)

    least = error(chosen)
    for _ in range(2):
        better = False
        for name, values in GRID.items():
            for value in values:
                trial = {**chosen, name: value}
                if value != chosen[name] and (found := error(trial)) < least - 1e-4:
                    chosen, least, better = trial, found, True
        if not better:
            break
    return chosen


START = {"product_share": 0.7, "product_half": 0.0, "memory_share": 0.8, "pass_seconds": 1e-4, "link_share": 0.75}


def score_runs(
    name: str, fitting: Sequence[Run], scored: Sequence[Run], fitted: dict[str, float] | None = None
) -> dict:
    """Fit to some runs, unless that was done elsewhere, and score others beside the baselines."""
    predictor = Predictor()
    if fitted is None:
        fitted = fit(predictor.seconds, fitting, START)
        print(f"  fitted to {len(fitting)} rows: {fitted}")
    errors, left_out = [], 0
    for run in scored:
        try:
            found = predictor.seconds(run, **fitted)
        except SpmdError:
            found = None
        left_out += found is None
        errors += [found / run.seconds - 1] if found is not None else []
    told(f"{name}: predicted", errors)
    basis = fitting or scored
    rate = median(run.flops / run.seconds for run in basis)
    told(
        "baseline: a constant rate" + ("" if fitting else " (of these rows)"),
        [r.flops / rate / r.seconds - 1 for r in scored],
    )
    rate = median(run.flops * run.bubble / run.seconds for run in basis)
    told("baseline: a constant rate, and the bubble", [r.flops * r.bubble / rate / r.seconds - 1 for r in scored])
    if left_out:
        print(f"  {left_out} rows left out: this engine does not cut models so")
    return fitted


def _mesh(pipe: int, data: int, model: int) -> tuple[tuple[str, int], ...]:
    axes = {"pipe": pipe, "data": data, "model": model}
    return tuple((axis, size) for axis, size in axes.items() if size > 1) or (("data", 1),)


def score_vtrain(rows: Sequence[Row], arguments: argparse.Namespace) -> None:
    """1,440 runs on 2 to 8 A100: 5% of the rows to fit, the others to score."""

    def run(row: Row) -> Run:
        tp, dp, pp = int(row["tp"]), int(row["dp"]), int(row["pp"])
        batch, micro = int(row["global_batch"]), int(row["micro_batch"])
        size = GPTSize(int(row["layers"]), int(row["hidden"]), int(row["heads"]), int(row["sequence"]), 50257)
        candidate = Candidate(
            _mesh(pp, dp, tp), batch, batch // (micro * dp), schedule="1f1b" if pp > 1 else None, recompute="block"
        )
        return Run(size, candidate, float(row["iteration_ms"]) * 1e-3, "a100")

    ordered = sorted(rows, key=share)
    few, rest = ordered[:72], ordered[72:]
    rest = rest[: arguments.rows] if arguments.rows else rest
    score_runs("steps", [run(row) for row in few], [run(row) for row in rest])


MODELS = {
    "megatron-22B": GPTSize(48, 6144, 64, 2048, 51200),
    "gpt3-175B": GPTSize(96, 12288, 96, 2048, 51200),
    "turing-530B": GPTSize(105, 20480, 128, 2048, 51200),
    "megatron-1T": GPTSize(128, 25600, 160, 2048, 51200),
}


def score_iteration_times(rows: Sequence[Row], _: argparse.Namespace) -> None:
    """arXiv 2205.05198's eight iteration times: half of the models to fit, the other half to score, and turned."""
    runs = []
    for row in rows:
        if row["quantity"] != "iteration_time" or row["model"] not in MODELS:
            continue
        full = row["mode"] == "full"
        chunks = int(row["virtual_chunks"]) if int(row["pp"]) > 1 else 1
        candidate = Candidate(
            _mesh(int(row["pp"]), int(row["data_parallel"]), int(row["tp"])),
            int(row["global_batch"]),
            int(row["global_batch"]) // int(row["micro_batch"]),
            sequence_parallel=not full,
            schedule=("interleaved" if chunks > 1 else "1f1b") if int(row["pp"]) > 1 else None,
            chunks=chunks,
            recompute="block" if full else "attention",
        )
        runs.append((row["model"], Run(MODELS[row["model"]], candidate, float(row["published"]), "a100")))
    if not runs:
        print("  no iteration times")
        return
    small = {"megatron-22B", "gpt3-175B"}
    halves = [run for name, run in runs if name in small], [run for name, run in runs if name not in small]
    score_runs("larger models, fitted to the smaller", *halves)
    score_runs("smaller models, fitted to the larger", *halves[::-1])


def score_h200(rows: Sequence[Row], _: argparse.Namespace) -> None:
    """FSDP, TP and PP on nodes of four H200: every third row, by the hash, to fit."""
    sizes = {"7B": (32, 4096, 32, None), "13B": (40, 5120, 40, None), "70B": (80, 8192, 64, 28672)}
    runs = []
    for row in rows:
        if not row["step_s"] or not row["micro_batch"] or row["model"] not in sizes:
            continue
        layers, width, heads, hidden = sizes[row["model"]]
        # three matrices of a gated layer have the work of two that are half as wide again
        hidden = round(1.5 * (hidden or 1.3 * 8 * width / 3))
        data, tp, pp = int(row["dp_fsdp"]), int(row["tp"]), int(row["pp"])
        accumulation = int(row["grad_accumulation"] or 1)
        size = GPTSize(layers, width, heads, int(row["sequence"]), 128256, hidden, key_value_heads=8, tied=False)
        candidate = Candidate(
            _mesh(pp, data, tp),
            int(row["micro_batch"]) * data * accumulation,
            accumulation,
            zero=3 if data > 1 else 0,
            schedule="1f1b" if pp > 1 else None,
            recompute="block",
        )
        runs.append((share(row), Run(size, candidate, float(row["step_s"]), "h200")))
    runs.sort(key=lambda each: each[0])
    few = max(4, len(runs) // 3)
    score_runs("steps", [run for _, run in runs[:few]], [run for _, run in runs[few:]])


if __name__ == "__main__":
    main()
