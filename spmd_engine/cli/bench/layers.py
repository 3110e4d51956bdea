"""``bench layers``: where the time of a step goes on one core, layer by layer."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median
from time import perf_counter

import click
from threadpoolctl import threadpool_limits

from spmd_engine.cli.bench.measuring import output_option, report, rounds_option, sgemm_peak, spread, steps_option
from spmd_engine.comm.communicators.threads import solo
from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.errors import UsageError
from spmd_engine.training.trace import Trace
from spmd_engine.training.workload import make_trainer, open_workload

KINDS = ("forward", "backward (input)", "backward (weights)")
REST = "loss, optimizer and data"


@click.command(
    short_help="Time of each layer's forward and backward.",
    context_settings={"ignore_unknown_options": True},
)
@steps_option(5)
@rounds_option()
@output_option()
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def layers(steps: int, rounds: int, output: Path | None, options: tuple[str, ...]) -> None:
    """Train on one core and tell the milliseconds of a step by layer; whatever else is given goes to 'train'.

    Layers that differ only in the number of their block are summed. The share of the peak is their multiplications,
    three times those of a forward, by this machine's own matrix products.

    \b
      python -m spmd_engine bench layers --model gpt-mini --batch-size 8
    """
    from spmd_engine.cli.train import job_of, train

    chosen = job_of(train.make_context("train", list(options)))
    found: dict[str, list[list[float]]] = defaultdict(list)  # seconds of a step by kind, a list a round
    peaks = []
    with threadpool_limits(1, "blas"), Mesh(solo()) as mesh:
        workload = open_workload(chosen, mesh)
        if not isinstance(workload.engine, LayeredEngine):
            raise UsageError("bench layers: a page of strategies/ is not made of layers")
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
            of_round = _by_layer(json.loads(trace.json())["traceEvents"])
            of_round[REST] = [seconds - sum(map(sum, of_round.values())), 0.0, 0.0]
            for name, parts in of_round.items():
                found[name].append([part / steps for part in parts])
    model, costs = workload.engine.model, Counter()
    for name, layer in model.layers:
        costs[_without_number(name)] += 3 * 2 * tokens * layer.cost(model.context)
    numbers = Counter(_without_number(name) for name, _ in model.layers)
    whole = [sum(sum(of_round[i]) for of_round in found.values()) for i in range(rounds)]
    rows = [_row(name, numbers[name], of_name, costs[name], whole, peaks) for name, of_name in found.items()]
    of_peak = _share(sum(costs.values()), whole, peaks)
    rows.append(("a step", "", "", "", "", spread(whole, 1e3, " ms"), "100%", of_peak))
    columns = ("layer", "times", "forward", "dx", "dw", "together", "of a step", "of the peak")
    report(columns, rows, {"peaks": peaks, "seconds": found, "multiplications": costs}, output)


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
    name: str, number: int, rounds: list[list[float]], cost: float, whole: list[float], peaks: list[float]
) -> tuple[str, ...]:
    together = [sum(parts) for parts in rounds]
    parts = [f"{median(each) * 1e3:,.1f} ms" if name != REST else "" for each in zip(*rounds, strict=True)]
    share = median(seconds / step for seconds, step in zip(together, whole, strict=True))
    of_peak = _share(cost, together, peaks) if cost else ""
    return name, str(number or ""), *parts, spread(together, 1e3, " ms"), f"{share:.1%}", of_peak


def _share(cost: float, seconds: list[float], peaks: list[float]) -> str:
    """What share of the peak so many operations in so many seconds are."""
    return f"{median(cost / s / peak for s, peak in zip(seconds, peaks, strict=True)):.0%}"
