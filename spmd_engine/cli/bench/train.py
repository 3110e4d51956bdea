"""``bench train`` and ``bench layers``: how fast training steps are.

This module is also the worker: its ``argv[1]`` is a JSON object, ``options`` of ``train`` as on its command line, and
the numbers of steps to ``warm`` up and to ``time``. Rank 0 prints a JSON object.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median
from time import perf_counter

import click
import numpy as np
from threadpoolctl import threadpool_limits

from spmd_engine.arrays.fused import kernels_for
from spmd_engine.arrays.products import in_use, unfit
from spmd_engine.cli.bench.measuring import count_option, measure, output_option, report, sgemm_peak, spread
from spmd_engine.cli.options import open_mesh, print_notices
from spmd_engine.cli.train import job_of
from spmd_engine.cli.train import train as train_command
from spmd_engine.comm import Mesh
from spmd_engine.comm.communicators.threads import solo
from spmd_engine.engine import LayeredEngine
from spmd_engine.errors import UsageError
from spmd_engine.planning.machine.product_choice import choose_products
from spmd_engine.training.trace import Trace
from spmd_engine.training.workload import Workload, make_trainer, open_workload


@click.command(
    short_help="Tokens a second, and the share of the machine's peak.",
    context_settings={"ignore_unknown_options": True},
)
@count_option("ranks", 2)
@count_option("steps", 10)
@count_option("rounds", 3)
@output_option
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def train(ranks: int, steps: int, rounds: int, output: Path | None, options: tuple[str, ...]) -> None:
    """Time training steps; further options are those of 'train'.

    The share of the peak counts 6 operations per token for each parameter in a product, and attention where it is not
    masked; the peak is that of this machine's own matrix products on as many cores as ranks.

    \b
      python -m spmd_engine bench train --ranks 1 --model gpt-mini
      python -m spmd_engine bench train --ranks 2 --model gpt-mini --mesh pipe=2 --micro-batches 8
    """
    results, peaks = [], []
    for _ in range(rounds):
        peaks.append(sgemm_peak())
        results.append(measure(ranks, "train", {"options": list(options), "warm": 2, "time": steps}))
    tokens = [result["tokens"] / median(result["seconds"]) for result in results]
    rates = [result["multiplications"] / median(result["seconds"]) for result in results]
    shares = [rate / (peak * ranks) for rate, peak in zip(rates, peaks, strict=True)]
    rows = [
        ("targets a second", spread(tokens)),
        ("a step", spread([median(result["seconds"]) for result in results], 1e3, " ms")),
        ("floating-point operations a second", spread(rates, 1e-9, " G")),
        ("of the peak of one core for each rank", spread(shares, 100, " %")),
        ("a core's matrix products", spread(peaks, 1e-9, " G")),
        ("waiting for others, of a step", spread([r["waiting"] / np.mean(r["seconds"]) for r in results], 100, " %")),
        ("sent a step by all ranks", f"{results[-1]['bytes_sent'] / 1e6:,.1f} MB"),
        ("memory a rank", spread([result["memory"] for result in results], 1e-6, " MB")),
        ("page faults a step", spread([result["page_faults"] for result in results])),
        ("elementwise steps by", "compiled kernels" if results[-1]["compiled"] else "NumPy"),
    ]
    columns = f"{ranks} rank(s): {' '.join(options)}", "median (range)"
    report(columns, rows, {"peaks": peaks, "results": results}, output)


# --- ``bench layers``: where the time of a step goes on one core, layer by layer


KINDS = ("forward", "backward (input)", "backward (weights)")
REST = "loss, optimizer and data"


@click.command(
    short_help="Time of each layer's forward and backward.", context_settings={"ignore_unknown_options": True}
)
@count_option("steps", 5)
@count_option("rounds", 3)
@output_option
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def layers(steps: int, rounds: int, output: Path | None, options: tuple[str, ...]) -> None:
    """Train on one core and print the milliseconds of a step by layer; further options are those of 'train'.

    Layers that differ only in the number of their block are summed. The share of the peak compares their
    multiplications, three times those of a forward, with this machine's own matrix products.

    \b
      python -m spmd_engine bench layers --model gpt-mini --batch-size 8
    """
    chosen = job_of(train_command.make_context("train", list(options)))
    if chosen.shards_itself:
        raise UsageError(f"bench layers: {chosen.strategy or chosen.model.name} is not made of layers; use bench train")
    parts_by_layer: dict[str, list[list[float]]] = defaultdict(list)  # seconds of a step by kind, a list a round
    peaks = []
    with threadpool_limits(1, "blas"), Mesh(solo()) as mesh:
        print_notices(choose_products(mesh.group(), chosen.products, dtype=chosen.model.dtype, device=chosen.device))
        workload = open_workload(chosen, mesh)
        assert isinstance(workload.engine, LayeredEngine)
        trainer = make_trainer(workload)
        for _ in range(2):
            tokens = trainer.step().tokens
        for _ in range(rounds):
            peaks.append(sgemm_peak())
            trace, began = Trace(mesh), perf_counter()
            with trace.of(workload.engine):
                for _ in range(steps):
                    trainer.step()
            seconds = perf_counter() - began
            round_seconds = _by_layer(json.loads(trace.json() or "{}")["traceEvents"])
            round_seconds[REST] = [seconds - sum(map(sum, round_seconds.values())), 0.0, 0.0]
            for name, parts in round_seconds.items():
                parts_by_layer[name].append([part / steps for part in parts])
    model, costs = workload.engine.model, dict[str, float]()
    for name, layer in model.layers:
        pattern = _without_number(name)
        costs[pattern] = costs.get(pattern, 0.0) + 3 * 2 * tokens * layer.cost(model.context)
    numbers = Counter(_without_number(name) for name, _ in model.layers)
    totals = [sum(sum(layer_rounds[i]) for layer_rounds in parts_by_layer.values()) for i in range(rounds)]
    rows = [
        _row(name, numbers[name], layer_rounds, costs.get(name, 0.0), totals, peaks)
        for name, layer_rounds in parts_by_layer.items()
    ]
    of_peak = _share(sum(costs.values()), totals, peaks)
    rows.append(("a step", "", "", "", "", spread(totals, 1e3, " ms"), "100%", of_peak))
    columns = ("layer", "times", "forward", "dx", "dw", "together", "of a step", "of the peak")
    figures = {"peaks": peaks, "seconds": parts_by_layer, "multiplications": costs, "products": in_use()}
    report(columns, rows, figures | {"unfit": dict(unfit)}, output)
    by_dtype = {dtype: ", ".join(f"{size} {name}" for size, name in names.items()) for dtype, names in in_use().items()}
    click.echo(f"products: {'; '.join(f'{dtype}: {names}' for dtype, names in by_dtype.items())}")
    for what, number in unfit.items():
        click.echo(f"products: NumPy computed {number} of {what}, which did not take their operands")


def _by_layer(events: list[dict]) -> dict[str, list[float]]:
    """Seconds by layer: forward, and both parts of the backward."""
    seconds: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(KINDS))
    for event in events:
        for place, kind in enumerate(KINDS):
            if event["name"].endswith(f" {kind}"):
                seconds[_without_number(event["name"].removesuffix(f" {kind}"))][place] += event["dur"] / 1e6
    return seconds


def _without_number(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _row(
    name: str, number: int, rounds: list[list[float]], cost: float, totals: list[float], peaks: list[float]
) -> tuple[str, ...]:
    together = [sum(parts) for parts in rounds]
    parts = [f"{median(times) * 1e3:,.1f} ms" if name != REST else "" for times in zip(*rounds, strict=True)]
    share = median(seconds / step for seconds, step in zip(together, totals, strict=True))
    of_peak = _share(cost, together, peaks) if cost else ""
    return name, str(number or ""), *parts, spread(together, 1e3, " ms"), f"{share:.1%}", of_peak


def _share(cost: float, seconds: list[float], peaks: list[float]) -> str:
    """The share of the peak that ``cost`` operations in ``seconds`` reach, as the median over rounds."""
    return f"{median(cost / s / peak for s, peak in zip(seconds, peaks, strict=True)):.0%}"


# --- The worker: times training steps as ``train`` makes them


def main() -> None:
    """Build a trainer, warm up, and time steps."""
    config = json.loads(sys.argv[1])
    job = job_of(train_command.make_context("train", config["options"]))
    steps = config["time"]
    with open_mesh(job) as mesh:
        mesh.barrier()
        before = held_bytes()
        workload = open_workload(job, mesh)
        trainer = make_trainer(workload)
        for _ in range(config["warm"]):
            trainer.step()
        mesh.ledger.clear()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        seconds, tokens = [], 0
        for _ in range(steps):
            mesh.barrier()
            began = perf_counter()
            tokens = trainer.step().tokens
            mesh.barrier()
            seconds.append(perf_counter() - began)
        faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / steps
        total = mesh.ledger.total()
        facts = [total.sent, total.calls, total.seconds, faults, held_bytes() - before]
        by_rank = mesh.all_gather(np.array([facts], np.float64))
    if mesh.rank == 0:
        result = {
            "seconds": seconds,
            "tokens": tokens,
            "multiplications": tokens * multiplications(workload),
            "bytes_sent": by_rank[:, 0].sum() / steps,  # by all ranks, a step
            "calls": by_rank[:, 1].max() / steps,  # by one rank, a step
            "waiting": by_rank[:, 2].mean() / steps,  # seconds of a rank in collectives, a step
            "page_faults": by_rank[:, 3].max(),
            "memory": by_rank[:, 4].max(),  # bytes of one rank
            "compiled": kernels_for(next(iter(workload.engine.owned.values()))) is not None,
        }
        print(json.dumps(result))


def multiplications(workload: Workload) -> float:
    """Multiplications and additions of a training step for each token: three times those of a forward."""
    if not isinstance(workload.engine, LayeredEngine):
        return 0.0
    model = workload.engine.model
    return 3 * 2 * sum(layer.cost(model.context) for _, layer in model.layers)


def held_bytes() -> int:
    """This process's memory in bytes, without mapped files; a page that several ranks share counts in part (PSS).

    Freed memory is kept, so this is a peak. The part of a mapped library depends on how many unrelated processes use it
    at the moment.
    """
    fields = dict(line.split()[:2] for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return 1024 * sum(int(fields.get(name, 0)) for name in ("Pss_Anon:", "Pss_Shmem:"))


if __name__ == "__main__":
    main()
