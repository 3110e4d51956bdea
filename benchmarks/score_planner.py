"""Errors of predictions against published measurements: python benchmarks/score_planner.py --tables FOLDER

The folder holds CSV files with the names below, whose first line names their source (``#``); missing files are skipped.
Machine files have a few fitted numbers. For each table they are fitted to rows that are not scored, in a fixed split by
a hash of the row, or to another table. Each error is printed with naive baselines: a constant rate of model FLOPs,
fitted to the same rows, and the same with the pipeline bubble.

Other tables in the folder are searched for columns of step times or memory of transformers, with the names in
``score_columns.py``; the unusable parts are reported. Errors without a fit are printed too.

Other systems compute in 16 bits with other kernels. Files describe them operation by operation
(``other_systems/megatron-deepspeed.toml``, ``fsdp.toml``, ...). For the H200 table the layers are the engine's, of a
GPT with the row's sizes, with products and arrays at half the bytes. Schedules and collectives are always the engine's.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from itertools import product
from pathlib import Path
from statistics import mean, median
from textwrap import fill

import numpy as np
from other_systems.description import RECOMPUTED, Transformer, read_system
from other_systems.memory import SystemMemory, memory_of
from other_systems.work import SystemUpdate, model_of
from score_columns import Columns, TransformerRun

from spmd_engine.errors import SpmdError
from spmd_engine.models import GPTSize, Model, gpt
from spmd_engine.planning.machine.machine import Machine, read_machine
from spmd_engine.planning.search.cost_model import CostModel
from spmd_engine.planning.search.search_space import Candidate

Row = dict[str, str]


def main() -> None:
    """Score every table in the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True, help="The folder with the CSV files.")
    parser.add_argument("--rows", type=int, default=0, help="Most rows scored per table; 0: all.")
    parser.add_argument("--only", help="Score only the table of this name.")
    arguments = parser.parse_args()
    tables = {
        "allreduce_a100_nccl.csv": score_all_reduce,
        "vtrain_single_node.csv": score_vtrain,
        "calculon_validation.csv": score_2205_05198,
        "kempnerforge_h200.csv": score_h200,
        "megatron_2020_tp.csv": score_tensor_parallel,
        "bloom_tuning.csv": score_bloom_memory,
    }
    for name, score in tables.items():
        if arguments.only not in (None, name):
            continue
        path = arguments.tables / name
        if path.is_file():
            score_table(path, score, arguments)
        else:
            print(f"\n{name}: no such file")
    others = (path for path in sorted(arguments.tables.glob("*.csv")) if path.name not in tables)
    for path in others if arguments.only is None else ():
        score_table(path, score_by_columns, arguments)


Score = Callable[[Sequence[Row], argparse.Namespace], None]


def score_table(path: Path, score: Score, arguments: argparse.Namespace) -> None:
    """Score one table, or print why it cannot be read."""
    print(f"\n{path.name}\n{source_of(path)}", flush=True)
    rows = read(path)
    if not rows:
        print("  no rows")
        return
    try:
        score(rows, arguments)
    except KeyError as missing:
        print(f"  there is no column {missing}")
        if score is not score_by_columns:
            score_by_columns(rows, arguments)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        print(f"  cannot be used: {error}")


def score_by_columns(rows: Sequence[Row], arguments: argparse.Namespace) -> None:
    """Score the steps and the memory of transformers in a table, for each kind of GPU: predictions without a fit, and
    with numbers fitted to 5% of the rows (at least eight); the other rows are scored."""
    columns = Columns.of([name for name in rows[0] if name])
    if columns.missing:
        print(f"  no table of transformer steps: it lacks {columns.help}")
        return
    if columns.assumed:
        print("  defaults of missing columns: " + ", ".join(f"{k} {v}" for k, v in columns.assumed.items()))
    if columns.unused:
        print(f"  not used: {', '.join(columns.unused)}")
    runs_by_share = [(share(row), columns.run(row)) for row in rows]
    reasons = Counter(run for _, run in runs_by_share if isinstance(run, str))
    for reason, count in reasons.most_common():
        print(f"  {count} rows left out: {reason}")
    runs_by_share.sort(key=lambda pair: pair[0])
    runs = [(at, run) for at, run in runs_by_share if isinstance(run, TransformerRun)]
    for gpu in sorted({run.gpu for _, run in runs}):
        runs_on_gpu = [(at, run) for at, run in runs if run.gpu == gpu]
        timed = [run for _, run in runs_on_gpu if run.seconds]
        if timed:
            score_told_steps(f"steps on {gpu}", timed, arguments.rows)
        read_of = [(at, run) for at, run in runs_on_gpu if run.memory]
        if read_of:
            score_told_memory(f"memory on {gpu}", read_of)


def score_told_steps(name: str, runs: Sequence[TransformerRun], most: int) -> None:
    """Score runs on one kind of GPU, in the order of their hashes."""
    few = max(8, len(runs) // 20)
    enough = len(runs) >= 2 * few
    scored = runs[few : few + most] if enough and most else runs[few:] if enough else runs
    start = START | STARTS.get(runs[0].gpu, {})
    plain = [run_of(run, Way(run.repeats, True)) for run in scored]
    score_as_it_is(f"{name}: nothing fitted", plain, start)
    if any(run.recompute is None for run in scored):
        for repeats in RECOMPUTED:
            pairs = predicted([run_of(run, Way(repeats, True)) for run in scored], start)
            told(f"  with recompute {repeats}", [seconds / run.seconds - 1 for seconds, run in pairs])
    if not enough:
        print(f"  {len(runs)} rows are too few to fit to some and score others")
        return
    fitting = runs[:few]
    best = min(ways_of(runs), key=lambda way: fit_error([run_of(run, way) for run in fitting], start))
    print("  chosen by the error of the fitted rows: " + best.told)
    score_runs(name, [run_of(run, best) for run in fitting], [run_of(run, best) for run in scored], start)


def predicted(runs: Sequence[Run], fitted: dict[str, float]) -> list[tuple[float, Run]]:
    """Predicted seconds with their runs, for the runs that this engine can shard in this way."""
    predictor = Predictor()
    predictions = [(predictor.seconds(run, **fitted), run) for run in runs]
    return [(seconds, run) for seconds, run in predictions if seconds is not None]


def score_as_it_is(name: str, runs: Sequence[Run], fitted: dict[str, float]) -> None:
    """Print errors with the default numbers, and those of the baseline: the median rate of these rows."""
    predictions = predicted(runs, fitted)
    told(name, [seconds / run.seconds - 1 for seconds, run in predictions])
    if len(predictions) > 2:
        rates = [
            [run.flops / seconds for seconds, run in predictions],
            [run.flops / run.seconds for _, run in predictions],
        ]
        print(f"  {'':<44} Spearman's correlation of FLOP/s {spearman(*rates):.2f}")
    if predictions:
        rate = median(run.flops / run.seconds for _, run in predictions)
        told("baseline: their own median rate", [run.flops / rate / run.seconds - 1 for _, run in predictions])
    if len(predictions) < len(runs):
        print(f"  {len(runs) - len(predictions)} rows left out: this engine cannot shard them in this way")


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation."""
    ranks = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def score_told_memory(name: str, runs: Sequence[tuple[float, TransformerRun]]) -> None:
    """Score memory predicted from the file of the run's system: without a fit, and with a base fitted to a third of the
    rows."""
    readings = []
    for at, run in runs:
        try:
            stages = told_memory(run)
        except SpmdError:
            continue
        peak, state = (max(part) / 2**30 for part in zip(*((s.peak, s.state) for s in stages), strict=True))
        readings.append((at, peak, state, float(run.memory or 0)))
    told(f"{name}: nothing fitted", [peak / read - 1 for _, peak, _, read in readings])
    if len(readings) >= 6:
        score_memory(name, readings[: len(readings) // 3], readings[len(readings) // 3 :])
    if len(readings) < len(runs):
        print(f"  {len(runs) - len(readings)} rows left out: this engine cannot shard them in this way")


def told_memory(run: TransformerRun) -> list[SystemMemory]:
    """Memory of each stage's ranks, with the largest number of micro-batches in flight."""
    flight = run.pp + 1 if run.virtual == 1 else 2 * run.pp
    return memory_of(
        known_system(system_of(run)),
        Transformer(run.layers, run.hidden, run.heads, run.sequence, run.vocabulary, run.ffn, run.kv_heads),
        axes_of(pipe=run.pp, data=run.dp, model=run.tp),
        micro_batch=run.micro_batch,
        micro_batches=max(min(run.global_batch // (run.micro_batch * run.dp), flight), 1),
        recompute=repeated_by(run) or run.repeats,
        sequence_parallel=run.sequence_parallel,
        chunks=run.virtual if run.pp > 1 else 1,
        zero=run.zero,
    )


def repeated_by(run: TransformerRun) -> str | None:
    """What a run recomputes, if given. Megatron's selective recomputes scores, which fused attention never keeps."""
    if run.recompute == "selective" and system_of(run) in ("megatron-core", "fsdp-gpt"):
        return "none"
    return run.recompute


def system_of(run: TransformerRun) -> str:
    """The file that describes the run's computation and memory: that of its framework, if it has one for such blocks;
    otherwise it depends on the blocks, on fused attention, and on whether parameters are sharded over data."""
    named, gated = run.framework.replace("_", "-"), bool(run.gated or run.kv_heads)
    if gated:
        return named if named in LLAMAS else "fsdp" if run.zero == 3 else "megatron-core"
    if named in GPTS:
        return named
    fused = run.zero == 3 if run.flash is None else run.flash
    return "fsdp-gpt" if fused else MEGATRON


@dataclass(frozen=True)
class Way:
    """Options that tables seldom give: recomputation, and whether gradient reductions overlap with the backward."""

    recompute: str
    overlap: bool

    @property
    def told(self) -> str:
        return f"recompute {self.recompute}, gradients summed {'during' if self.overlap else 'after'} the backward"


def ways_of(runs: Sequence[TransformerRun]) -> list[Way]:
    """The options that differ for these runs."""
    overlaps = (True, False) if any(run.dp > 1 for run in runs) else (True,)
    untold = any(run.recompute is None for run in runs)
    recomputed = ("full", "selective", "none") if untold else ("as given",)
    return [Way(recompute, overlap) for recompute in recomputed for overlap in overlaps]


def fit_error(runs: Sequence[Run], start: dict[str, float]) -> float:
    """The mean error of the runs to which numbers are fitted."""
    fitted = fit(Predictor().seconds, runs, start)
    errors = [abs(seconds / run.seconds - 1) for seconds, run in predicted(runs, fitted)]
    return mean(errors) if errors else float("inf")


def run_of(published: TransformerRun, way: Way) -> Run:
    """The run under 1F1B, or interleaved 1F1B if stages have several chunks."""
    sizes = published.layers, published.hidden, published.heads, published.sequence, published.vocabulary, published.ffn
    schedule = ("interleaved" if published.virtual > 1 else "1f1b") if published.pp > 1 else None
    recompute = repeated_by(published) or way.recompute
    candidate = Candidate(
        mesh_of(published.pp, published.dp, published.tp),
        published.global_batch,
        published.global_batch // (published.micro_batch * published.dp),
        zero=published.zero if published.dp > 1 else 0,
        sequence_parallel=published.sequence_parallel,
        schedule=schedule,
        chunks=published.virtual if published.pp > 1 else 1,
        recompute="block" if recompute == "full" else "none",
    )
    size = GPTSize(*sizes, tied=not published.gated, key_value_heads=published.kv_heads)
    repeats = "selective" if recompute == "selective" else "none"
    run = Run(size, candidate, published.seconds or 0.0, published.gpu, system_of(published), repeats, way.overlap)
    run.counted, run.node = published.flops(repeated=True), (published.per_node, published.between)
    return run


def read(path: Path) -> list[Row]:
    """The rows of a table, without the source line."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def source_of(path: Path) -> str:
    """The source of a table, from its first line, as lines to print."""
    first = path.read_text().partition("\n")[0]
    source = first.removeprefix("#").strip() if first.startswith("#") else "source: not said"
    return fill(source, 118, initial_indent="  ", subsequent_indent="  ")


def share(row: Row) -> float:
    """A fixed position of a row in [0, 1): a hash of its text."""
    text = ",".join(f"{name}={value}" for name, value in sorted(row.items()))
    return int(sha256(text.encode()).hexdigest()[:8], 16) / 2**32


def told(name: str, errors: Iterable[float]) -> None:
    """Print a line of statistics of relative errors."""
    errors = [abs(error) for error in errors]
    if errors:
        print(
            f"  {name:<44} mean {mean(errors):6.1%}  median {median(errors):6.1%}  max {max(errors):6.1%}  "
            f"rows {len(errors)}"
        )


# --- collectives


def score_all_reduce(rows: Sequence[Row], _: argparse.Namespace) -> None:
    """Score all_reduce in an A100 node; ``link_share`` and ``wait_seconds`` are fitted to a quarter of the rows."""
    from spmd_engine.planning.simulator.times import CollectiveTimes

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
        key=lambda fitted_machine: mean(map(abs, errors(fitted_machine, fitting))),
    )
    print(f"  fitted to {len(fitting)} rows: link_share {best.fitted.link_share}, wait {best.fitted.wait_seconds}")
    told("predicted", errors(best, scored))
    rate = median(float(row["bytes"]) / float(row["time_us"]) for row in fitting)
    told("baseline: a constant rate", [float(row["bytes"]) / rate / float(row["time_us"]) - 1 for row in scored])


# --- steps of GPTs


class Run:
    """A published run of a GPT: the measured time, and its naive baselines."""

    def __init__(
        self,
        size: GPTSize,
        candidate: Candidate,
        seconds: float,
        machine: str,
        system: str | None = None,
        repeats: str = "none",
        overlap: bool = False,
    ) -> None:
        """``system``: whose file describes the work (None: this engine); ``repeats``: its recomputation inside blocks;
        ``overlap``: whether gradient reductions over data overlap with the backward."""
        self.size, self.candidate, self.seconds, self.machine = size, candidate, seconds, machine
        self.system, self.repeats, self.overlap = system, repeats, overlap
        self.counted: float | None = None  #: FLOPs, if not those of a GPT
        self.node = 0, 0  #: GPUs per node, and Gbit/s between nodes; 0: as in the machine file

    @property
    def flops(self) -> float:
        """FLOPs per rank of forward and backward; with full recomputation, of one more forward."""
        if self.counted is not None:
            return self.counted
        size, tokens = self.size, self.candidate.batch_size * self.size.context
        width, length = size.width, size.context
        flops_per_token = (
            72 * size.layers * width**2 * (1 + length / (6 * width) + size.vocabulary / (16 * size.layers * width))
        )
        return flops_per_token * tokens * (4 / 3 if self.candidate.recompute == "block" else 1) / self.candidate.ranks

    @property
    def bubble(self) -> float:
        """The pipeline bubble, as a factor on the time."""
        p, m = self.candidate.pipe, self.candidate.micro_batches
        return 1 + (p - 1) / (m * self.candidate.chunks)


class HalfCosts(CostModel):
    """Costs in which float32 arrays have half the bytes, and products the speed of 16 bits."""

    def __init__(self, model, machine: Machine) -> None:
        node = machine.nodes[0]
        fast = {**node.speeds, "float32": node.speeds["float16"]}
        # half the bytes take as long as all bytes at twice the bandwidth
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


@lru_cache
def known_machine(name: str, per_node: int, between: int) -> Machine:
    """A machine with this many GPUs per node and this many Gbit/s between nodes; 0: as in its file."""
    machine = read_machine(name)
    node, link = machine.nodes[0], machine.between
    ranks = per_node or node.ranks
    lanes = max(round((link.lanes or node.ranks) * ranks / node.ranks), 1)
    bandwidth = between * 1e9 / 8 / lanes if between else link.bandwidth
    nodes = (replace(node, ranks=ranks),)
    return replace(machine, nodes=nodes, between=replace(link, lanes=lanes, bandwidth=bandwidth))


known_model = lru_cache(gpt)  # built once for all iterations of a fit


known_system = lru_cache(read_system)


@lru_cache
def known_work(system: str, size: GPTSize, repeats: str) -> Model:
    """The model of a GPT in another system."""
    transformer = Transformer(
        size.layers, size.width, size.heads, size.context, size.vocabulary, size.hidden, size.key_value_heads
    )
    return model_of(known_system(system), transformer, repeats)


class Predictor:
    """Predicts runs on a machine; each model is analyzed once."""

    def __init__(self) -> None:
        self._costs: dict[tuple, dict] = {}

    def seconds(self, run: Run, **fitted: float) -> float | None:
        """Predicted seconds of a step; None if the engine cannot shard the model in this way."""
        try:
            return self._seconds(run, **fitted)
        except SpmdError:
            return None

    def _seconds(self, run: Run, **fitted: float) -> float | None:
        machine = known_machine(run.machine, *run.node).with_fitted(**fitted).with_ranks(run.candidate.ranks)
        size, candidate = run.size, run.candidate
        if run.system is None:
            costs = HalfCosts(known_model(size), machine)
        else:
            size, candidate = _as_megatron(size, candidate)
            system = known_system(run.system)
            costs = CostModel(
                known_work(run.system, size, run.repeats),
                machine,
                dtype=np.float16,
                optimizer=SystemUpdate(system),
                hides_sums=run.overlap,
            )
        costs.analyses = self._costs.setdefault((replace(size, layers=1), run.system, run.repeats), {})
        estimator = costs.estimator(candidate)
        estimate = estimator.estimate() if estimator is not None else None
        return float(estimate.seconds) if estimate is not None else None


def _as_megatron(size: GPTSize, candidate: Candidate) -> tuple[GPTSize, Candidate]:
    """As in Megatron: the vocabulary is padded to a multiple of 128 per rank, and stages have equally many blocks."""
    unit = 128 * candidate.mesh.get("model", 1)
    size = replace(size, vocabulary=-(-size.vocabulary // unit) * unit)
    chunks = candidate.pipe * candidate.chunks
    if candidate.pipe == 1 or size.layers % chunks:
        return size, candidate
    layers_per_chunk = 2 * size.layers // chunks  # layers: attention and MLP of each block, after the embedding
    return size, replace(candidate, stages=tuple(number * layers_per_chunk + bool(number) for number in range(chunks)))


#: Initial values of the fitted numbers: for an A100, with collectives as measured by nccl-tests.
START = {
    "product_share": 0.8,
    "product_half": 4e9,
    "memory_share": 0.8,
    "pass_seconds": 2e-4,
    "link_share": 0.7,
    "wait_seconds": 2e-5,
}
#: Other initial values for tables without a reader: fitted to half of the rows of llm-foundry's tables (MPT under FSDP,
#: 2023) and of the first table of arXiv 2104.04473, and to KempnerForge's.
STARTS: dict[str, dict[str, float]] = {
    "a100": {"product_share": 0.75},
    "h100": {"product_share": 0.65},
    "h200": {"product_share": 0.7},
}
#: For this engine's layers, whose attention has products of small blocks, which one kernel computes together.
START_OWN = START | {"product_half": 1e8}
APART = 0.5  #: expected deviation of a number from its initial value, as a logarithm
WRONG = 0.1  #: expected relative error of a prediction
ROUNDS = 6  #: iterations of the fit


def fit(predict: Callable[..., float | None], runs: Sequence[Run], start: dict[str, float]) -> dict[str, float]:
    """The best numbers for these runs, regularized towards ``start``: with few runs they stay close to it.

    Least squares of the logarithms of errors, divided by ``WRONG``, with less weight for large ones (Huber, 1964), and
    of the logarithms of numbers relative to ``start``, divided by ``APART``; by the Levenberg-Marquardt method.
    """
    names = tuple(start)
    most = np.array([0.0 if name.endswith("share") else np.inf for name in names])
    first = np.log([start[name] for name in names])
    runs = [run for run in runs if predict(run, **start) is not None]
    measured = np.log([run.seconds for run in runs])

    def values(x: np.ndarray) -> dict[str, float]:
        return {name: float(f"{value:.3g}") for name, value in zip(names, np.exp(np.minimum(x, most)), strict=True)}

    def errors(x: np.ndarray) -> np.ndarray:
        """Residuals of the runs and of the numbers, each divided by its expected deviation."""
        logs = np.log([predict(run, **dict(zip(names, np.exp(np.minimum(x, most)), strict=True))) for run in runs])
        return np.concatenate([(logs - measured) / WRONG, (x - first) / APART])

    def cost(e: np.ndarray) -> float:
        size = np.abs(e)
        return float(np.where(size < 1, size**2, 2 * size - 1).sum())

    x, damping = first, 1e-2
    e = errors(x)
    for _ in range(ROUNDS):
        step = 1e-2
        slopes = np.stack([(errors(x + step * unit) - e) / step for unit in np.eye(len(x))], axis=1)
        weights = 1 / np.maximum(np.abs(e), 1)
        square = slopes.T @ (weights[:, None] * slopes)
        while damping < 1e4:
            trial = x - np.linalg.solve(square + damping * np.diag(np.diag(square)), slopes.T @ (weights * e))
            trial_errors = errors(trial)
            if cost(trial_errors) < cost(e):
                break
            damping *= 8
        else:
            break
        gained = cost(e) - cost(trial_errors)
        x, e, damping = trial, trial_errors, damping / 4
        if gained < 1e-3 * cost(e):
            break
    return values(x)


def score_runs(name: str, fitting: Sequence[Run], scored: Sequence[Run], start: dict[str, float] | None = None) -> None:
    """Fit to some runs, near ``start``, and score others against the baselines."""
    predictor = Predictor()
    this_engine = all(run.system is None for run in fitting)
    fitted = fit(predictor.seconds, fitting, start or (START_OWN if this_engine else START))
    print(f"  fitted to {len(fitting)} rows: {fitted}")
    errors, left_out = [], 0
    for run in scored:
        seconds = predictor.seconds(run, **fitted)
        left_out += seconds is None
        errors += [seconds / run.seconds - 1] if seconds is not None else []
    told(f"{name}: predicted", errors)
    rate = median(run.flops / run.seconds for run in fitting)
    told("baseline: a constant rate", [r.flops / rate / r.seconds - 1 for r in scored])
    rate = median(run.flops * run.bubble / run.seconds for run in fitting)
    told("baseline: a constant rate, and the bubble", [r.flops * r.bubble / rate / r.seconds - 1 for r in scored])
    if left_out:
        print(f"  {left_out} rows left out: this engine cannot shard them in this way")


def axes_of(*, pipe: int = 1, data: int = 1, model: int = 1) -> dict[str, int]:
    """The mesh of a row: the axes larger than 1."""
    axes = {"pipe": pipe, "data": data, "model": model}
    return {axis: size for axis, size in axes.items() if size > 1} or {"data": 1}


def mesh_of(pipe: int, data: int, model: int) -> tuple[tuple[str, int], ...]:
    """The same in the form of a candidate."""
    return tuple(axes_of(pipe=pipe, data=data, model=model).items())


MEGATRON = "megatron-deepspeed"
#: Systems whose files describe their work, for GPT blocks and for Llama blocks.
GPTS, LLAMAS = (MEGATRON, "megatron-lm", "fsdp-gpt"), ("megatron-core", "fsdp", "torchtitan")


def score_vtrain(rows: Sequence[Row], arguments: argparse.Namespace) -> None:
    """Score 1,440 runs on 2 to 8 A100; 5% of the rows are fitted, the others scored."""

    def run(row: Row) -> Run:
        tp, dp, pp = int(row["tp"]), int(row["dp"]), int(row["pp"])
        batch, micro = int(row["global_batch"]), int(row["micro_batch"])
        size = GPTSize(int(row["layers"]), int(row["hidden"]), int(row["heads"]), int(row["sequence"]), 50257)
        candidate = Candidate(
            mesh_of(pp, dp, tp), batch, batch // (micro * dp), schedule="1f1b" if pp > 1 else None, recompute="block"
        )
        return Run(size, candidate, float(row["iteration_ms"]) * 1e-3, "a100", MEGATRON)

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


def score_2205_05198(rows: Sequence[Row], _: argparse.Namespace) -> None:
    """Score figures 1 and 7 of arXiv 2205.05198, without a fit, and its eight iteration times."""
    score_figures(rows)
    score_iteration_times(rows)


def score_figures(rows: Sequence[Row]) -> None:
    """Score the memory of the first stage: GiB (figure 1), and percent of that without any technique (figure 7)."""
    modes = {"none": ("none", False), "any": ("none", False), "seq": ("none", True), "sel": ("selective", False)}
    modes |= {"seqsel": ("selective", True), "full": ("full", False)}
    megatron, memories = read_system("megatron"), {}

    def memory_of_row(row: Row, mode: str) -> SystemMemory:
        size, chunks, stages = MODELS[row["model"]], int(row["virtual_chunks"]), int(row["pp"])
        if (size, mode) not in memories:
            transformer = Transformer(size.layers, size.width, size.heads, size.context)
            axes = axes_of(pipe=stages, model=int(row["tp"]))
            recompute, parallel = modes[mode]
            memories[size, mode] = memory_of(
                megatron,
                transformer,
                axes,
                micro_batch=int(row["micro_batch"]),
                micro_batches=2 * stages if chunks > 1 else stages,
                recompute=recompute,
                sequence_parallel=parallel,
                chunks=chunks if stages > 1 else 1,
            )[0]
        return memories[size, mode]

    gib, points = [], []
    for row in rows:
        if row["model"] not in MODELS or row["mode"] not in modes:
            continue
        published = float(row["published"])
        match row["quantity"]:
            case "parameters_and_optimizer":
                gib.append(abs(memory_of_row(row, "none").state / 2**30 - published))
            case "activations":
                gib.append(abs(memory_of_row(row, row["mode"]).activations / 2**30 - published))
            case "activations_relative":
                percent = 100 * memory_of_row(row, row["mode"]).activations / memory_of_row(row, "none").activations
                points.append(abs(percent - published))
    if gib:
        print(f"  figure 1, memory: largest error {max(gib):.4f} GiB, mean {mean(gib):.4f}, of {len(gib)} numbers")
    if points:
        worst, average = max(points), mean(points)
        print(f"  figure 7, activations: largest error {worst:.3f} points, mean {average:.3f}, of {len(points)}")


def score_iteration_times(rows: Sequence[Row]) -> None:
    """Score the eight iteration times: fit to half of the models, score the other half, then the reverse."""
    runs = []
    for row in rows:
        if row["quantity"] != "iteration_time" or row["model"] not in MODELS:
            continue
        full = row["mode"] == "full"
        chunks = int(row["virtual_chunks"]) if int(row["pp"]) > 1 else 1
        candidate = Candidate(
            mesh_of(int(row["pp"]), int(row["data_parallel"]), int(row["tp"])),
            int(row["global_batch"]),
            int(row["global_batch"]) // int(row["micro_batch"]),
            sequence_parallel=not full,
            schedule=("interleaved" if chunks > 1 else "1f1b") if int(row["pp"]) > 1 else None,
            chunks=chunks,
            recompute="block" if full else "none",
        )
        seconds, repeats = float(row["published"]), "none" if full else "selective"
        runs.append((row["model"], Run(MODELS[row["model"]], candidate, seconds, "a100", "megatron-lm", repeats)))
    if not runs:
        print("  no iteration times")
        return
    small = {"megatron-22B", "gpt3-175B"}
    halves = [run for name, run in runs if name in small], [run for name, run in runs if name not in small]
    score_runs("larger models, fitted to the smaller", *halves)
    score_runs("smaller models, fitted to the larger", *halves[::-1])


def score_h200(rows: Sequence[Row], _: argparse.Namespace) -> None:
    """Score FSDP, TP and PP on nodes of four H200; a third of the rows, by hash, is fitted."""
    sizes = {"7B": (32, 4096, 32, None), "13B": (40, 5120, 40, None), "70B": (80, 8192, 64, 28672)}
    runs = []
    for row in rows:
        if not row["step_s"] or not row["micro_batch"] or not row["sequence"] or row["model"] not in sizes:
            continue
        layers, width, heads, hidden = sizes[row["model"]]
        # three matrices of a gated MLP have the work of two that are 1.5 times as wide
        hidden = round(1.5 * (hidden or 1.3 * 8 * width / 3))
        data, tp, pp = int(row["dp_fsdp"]), int(row["tp"]), int(row["pp"])
        accumulation = int(row["grad_accumulation"] or 1)
        size = GPTSize(layers, width, heads, int(row["sequence"]), 128256, hidden, key_value_heads=8, tied=False)
        candidate = Candidate(
            mesh_of(pp, data, tp),
            int(row["micro_batch"]) * data * accumulation,
            accumulation,
            zero=3 if data > 1 else 0,
            schedule="1f1b" if pp > 1 else None,
            recompute="block",
        )
        runs.append((share(row), Run(size, candidate, float(row["step_s"]), "h200")))
    runs.sort(key=lambda pair: pair[0])
    few = max(4, len(runs) // 3)
    score_runs("steps", [run for _, run in runs[:few]], [run for _, run in runs[few:]])
    score_h200_memory(rows, sizes)


def score_h200_memory(rows: Sequence[Row], sizes: dict[str, tuple]) -> None:
    """Score the memory of the same runs: that of FSDP (``fsdp.toml``), plus a base fitted to a third of the rows."""
    fsdp, readings = read_system("fsdp"), []
    for row in rows:
        if not row["memory_gb"] or not row["micro_batch"] or not row["sequence"] or row["model"] not in sizes:
            continue
        layers, width, heads, hidden = sizes[row["model"]]
        hidden = hidden or round(1.3 * 8 * width / 3)
        transformer = Transformer(layers, width, heads, int(row["sequence"]), 128256, hidden, key_value_heads=8)
        stages_in_all = int(row["pp"])
        stages = memory_of(
            fsdp,
            transformer,
            axes_of(pipe=stages_in_all, data=int(row["dp_fsdp"]), model=int(row["tp"])),
            micro_batch=int(row["micro_batch"]),
            micro_batches=min(int(row["grad_accumulation"] or 1), stages_in_all + 1),
            recompute="full",
            zero=3,
        )
        peak = max(stage.peak for stage in stages) / 2**30
        readings.append((share(row), peak, max(stage.state for stage in stages) / 2**30, float(row["memory_gb"])))
    readings.sort()
    score_memory("memory", readings[: len(readings) // 3], readings[len(readings) // 3 :])


# --- measured memory

#: Position of a row (``share``), GiB predicted, GiB of parameters, gradients and optimizer state, and GiB measured.
Reading = tuple[float, float, float, float]


def score_memory(name: str, fitting: Sequence[Reading], scored: Sequence[Reading]) -> float:
    """Print errors of memory plus a fitted base (library, buffers, fragmentation); returns the base."""
    base = median(read - peak for _, peak, _, read in fitting)
    print(f"  fitted to {len(fitting)} rows: a base of {base:.1f} GiB")
    told(f"{name}: predicted", [(peak + base) / read - 1 for _, peak, _, read in scored])
    offset = median(read - state for _, _, state, read in fitting)
    told("baseline: states alone, and a base", [(state + offset) / read - 1 for _, _, state, read in scored])
    constant = median(read for *_, read in fitting)
    told("baseline: a constant", [constant / read - 1 for *_, read in scored])
    return base


ROOM = 80e9 / 2**30  #: GiB of an A100 with 80 GB


def score_bloom_memory(rows: Sequence[Row], _: argparse.Namespace) -> None:
    """Score the memory of BLOOM's tuning: that of Megatron-DeepSpeed, plus a base fitted to a quarter of the rows."""
    plain = read_system("megatron-deepspeed")
    wide = replace(plain, state={**plain.state, "gradients": plain.state["gradients"] + 4})  # summed in 32 bits
    memories: dict[tuple, list[SystemMemory]] = {}
    fitting, scored, without_room = [], [], []
    for row in rows:
        if not row["memory_gb"] or not row["hidden"] or not row["pp"]:
            continue
        width, heads = int(row["hidden"]), int(row["heads"] or 64)
        vocabulary = 250_880
        billions = float(row["size"].rstrip("B"))
        layers = int(row["layers"] or round((billions * 1e9 - vocabulary * width) / (12 * width**2)))
        tp, pp, dp = int(row["tp"]), int(row["pp"]), int(row["dp"])
        key = width, heads, layers, tp, pp, dp, row["micro_batch"], row["precision"], row["zero_stage"]
        if key not in memories:
            memories[key] = memory_of(
                wide if "fp32" in row["precision"] else plain,
                Transformer(layers, width, heads, 2048, vocabulary),
                axes_of(pipe=pp, data=dp, model=tp),
                micro_batch=int(row["micro_batch"]),
                micro_batches=pp + 1,
                recompute="full",
                zero=int(row["zero_stage"] or 1),
            )
        stages = memories[key]
        peak, state = (max(part) / 2**30 for part in zip(*((s.peak, s.state) for s in stages), strict=True))
        if row["memory_gb"] == "OOM":
            without_room.append(peak)
        else:
            (fitting if share(row) < 0.25 else scored).append((share(row), peak, state, float(row["memory_gb"])))
    base = score_memory("memory", fitting, scored)
    right = sum(peak + base > ROOM for peak in without_room)
    wrong = sum(peak + base > ROOM for _, peak, _, _ in scored)
    print(f"  out of memory: {right} of {len(without_room)} such rows predicted; also {wrong} of {len(scored)} others")


def score_tensor_parallel(rows: Sequence[Row], _: argparse.Namespace) -> None:
    """Score tensor parallelism on A100 (Megatron, 2020): fitted to rows of one node, scored on rows of many."""
    few, many = [], []
    for row in rows:
        if "A100" not in row["machine"]:
            continue
        tp, gpus = int(row["tp"]), int(row["gpus"])
        size = GPTSize(int(row["layers"]), int(row["hidden"]), int(row["heads"]), 1024, 51200)
        candidate = Candidate(mesh_of(1, gpus // tp, tp), int(row["global_batch"]), 1, recompute="block")
        # its README recommends PyTorch's DistributedDataParallel for large models, which overlaps with the backward
        run = Run(size, candidate, float(row["iteration_ms"]) * 1e-3, "a100", MEGATRON, overlap=True)
        (few if gpus <= 8 else many).append(run)
    score_runs("steps on 128 to 1,024, fitted to 1 to 8", few, many)


if __name__ == "__main__":
    main()
