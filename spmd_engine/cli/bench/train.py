"""``bench train``, ``layers``, ``strategies`` and ``oversubscribed``: how fast training steps are."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median
from time import perf_counter

import click
import numpy as np
from threadpoolctl import threadpool_limits

from spmd_engine.cli.bench.measuring import (
    as_arguments,
    measure,
    output_option,
    ranks_option,
    report,
    rounds_option,
    sgemm_peak,
    spread,
    steps_option,
)
from spmd_engine.comm.communicators.threads import solo
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.shared_memory.cores import cores_here
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.errors import UsageError
from spmd_engine.training.trace import Trace
from spmd_engine.training.workload import make_trainer, open_workload


@click.command(
    short_help="Tokens a second, and the share of the machine's peak.",
    context_settings={"ignore_unknown_options": True},
)
@ranks_option(2)
@steps_option(10)
@rounds_option()
@output_option()
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def train(ranks: int, steps: int, rounds: int, output: Path | None, options: tuple[str, ...]) -> None:
    """Time training steps; further options go to 'train'.

    The share of the peak counts 6 operations per token for each parameter in a product, and attention where it is not
    masked; the peak is that of this machine's own matrix products on as many cores as ranks.

    \b
      python -m spmd_engine bench train --ranks 1 --model gpt-mini
      python -m spmd_engine bench train --ranks 2 --model gpt-mini --mesh pipe=2 --micro-batches 8
    """
    results, peaks = [], []
    for _ in range(rounds):
        peaks.append(sgemm_peak())
        results.append(measure(ranks, "steps", {"options": list(options), "warm": 2, "time": steps}))
    tokens = [result["tokens"] / median(result["seconds"]) for result in results]
    done = [result["multiplications"] / median(result["seconds"]) for result in results]
    shares = [each / (peak * ranks) for each, peak in zip(done, peaks, strict=True)]
    rows = [
        ("targets a second", spread(tokens)),
        ("a step", spread([median(result["seconds"]) for result in results], 1e3, " ms")),
        ("floating-point operations a second", spread(done, 1e-9, " G")),
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
    short_help="Time of each layer's forward and backward.",
    context_settings={"ignore_unknown_options": True},
)
@steps_option(5)
@rounds_option()
@output_option()
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def layers(steps: int, rounds: int, output: Path | None, options: tuple[str, ...]) -> None:
    """Train on one core and print the milliseconds of a step by layer; further options go to 'train'.

    Layers that differ only in the number of their block are summed. The share of the peak compares their
    multiplications, three times those of a forward, with this machine's own matrix products.

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


# --- ``bench strategies``: bytes, calls, memory and time of each strategy, on the same ranks and the same batch


_TEXT = argparse.__file__  # something small to learn: the memory of the usual data would hide that of a strategy

#: Options of ``train`` by the number of ranks that they are for.
STRATEGIES = {
    8: {
        "data": {"mesh": "data=8"},
        "ZeRO-1": {"mesh": "data=8", "zero": 1},
        "ZeRO-2": {"mesh": "data=8", "zero": 2},
        "ZeRO-3": {"mesh": "data=8", "zero": 3},
        "hybrid sharded": {"mesh": "replicate=2,shard=4"},
        "data x tensor": {"mesh": "data=4,model=2"},
        "data x tensor, sequence parallel": {"mesh": "data=4,model=2", "sequence_parallel": True},
        "context, ring": {"mesh": "data=2,context=4", "context_method": "ring"},
        "context, Ulysses": {"mesh": "data=2,context=4", "context_method": "ulysses"},
        "pipeline, 1F1B": {"mesh": "pipe=4,data=2", "micro_batches": 4},
        "pipeline, interleaved": {"mesh": "pipe=4,data=2", "micro_batches": 4, "schedule": "interleaved"},
        "pipeline, zero-bubble": {"mesh": "pipe=4,data=2", "micro_batches": 4, "schedule": "zero-bubble"},
        "pipe x data x tensor, ZeRO-1": {"mesh": "pipe=2,data=2,model=2", "micro_batches": 4, "zero": 1},
        "pipe x context x tensor, ZeRO-3, recompute": {
            "mesh": "pipe=2,context=2,model=2",
            "micro_batches": 4,
            "zero": 3,
            "recompute": "block",
        },
    },
    2: {
        "data": {"mesh": "data=2"},
        "ZeRO-1": {"mesh": "data=2", "zero": 1},
        "ZeRO-2": {"mesh": "data=2", "zero": 2},
        "ZeRO-3": {"mesh": "data=2", "zero": 3},
        "tensor": {"mesh": "model=2"},
        "tensor, sequence parallel": {"mesh": "model=2", "sequence_parallel": True},
        "context, ring": {"mesh": "context=2", "context_method": "ring"},
        "context, Ulysses": {"mesh": "context=2", "context_method": "ulysses"},
        "pipeline, 1F1B": {"mesh": "pipe=2", "micro_batches": 8, "stages": "cost"},
        "pipeline, interleaved": {"mesh": "pipe=2", "micro_batches": 8, "schedule": "interleaved"},
        "pipeline, zero-bubble": {"mesh": "pipe=2", "micro_batches": 8, "schedule": "zero-bubble", "stages": "cost"},
    },
}


@click.command(short_help="Bytes, calls, memory and time of each strategy.")
@click.option("--model", default="gpt-nano", show_default=True)
@click.option("--ranks", type=click.Choice(["2", "8"]), default="8", show_default=True)
@click.option("--batch-size", type=click.IntRange(min=8), default=32, show_default=True)
@steps_option(5)
@rounds_option()
@click.option("--only", metavar="TEXT", help="Strategies whose names contain this; the first is always run.")
@output_option()
def strategies(
    model: str, ranks: str, batch_size: int, steps: int, rounds: int, only: str | None, output: Path | None
) -> None:
    """Train some steps by every strategy in turn and compare them with plain data parallel.

    Bytes are sent by all ranks together in a step, calls are those of one rank. Memory is what one rank holds at the
    end in addition to what it held before the engine was made (PSS); freed memory is kept, so this is a peak.
    """
    chosen = dict(STRATEGIES[int(ranks)])
    first = next(iter(chosen))
    chosen = {name: options for name, options in chosen.items() if not only or only in name or name == first}
    results: dict[str, list[dict]] = {name: [] for name in chosen}
    for _ in range(rounds):
        for name, options in chosen.items():
            arguments = as_arguments({"model": model, "batch_size": batch_size, "data": _TEXT, **options})
            results[name].append(measure(int(ranks), "steps", {"options": arguments, "warm": 2, "time": steps}))
    rows = []
    times = {name: [median(result["seconds"]) for result in of_name] for name, of_name in results.items()}
    for name, of_name in results.items():
        last = of_name[-1]
        ratios = [ours / base for ours, base in zip(times[name], times[first], strict=True)]
        rows.append(
            (
                name,
                f"{last['bytes_sent'] / 1e6:,.1f} MB",
                f"{last['calls']:,.0f}",
                f"{median(result['memory'] for result in of_name) / 1e6:,.0f} MB",
                spread(times[name], 1e3, " ms"),
                f"{median(ratios):.2f}",
            )
        )
    columns = ("strategy", "sent a step", "calls", "memory a rank", "step", f"times {first}")
    report(columns, rows, results, output)


# --- ``bench oversubscribed``: what it costs to run more ranks than there are cores


@click.command(
    short_help="More ranks than cores against as many as cores.",
    context_settings={"ignore_unknown_options": True},
)
@ranks_option(8, least=2)
@steps_option(12)
@rounds_option()
@output_option()
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def oversubscribed(ranks: int, steps: int, rounds: int, output: Path | None, options: tuple[str, ...]) -> None:
    """Compare tokens a second on one rank a core with more ranks than cores; further options go to 'train'."""
    cores = max(1, int(cores_here()))
    arguments = {"options": ["--batch-size", "32", *options], "warm": 3, "time": steps}
    speeds: dict[int, list[float]] = {cores: [], ranks: []}
    for _ in range(rounds):
        for number, values in speeds.items():
            result = measure(number, "steps", arguments)
            values.append(result["tokens"] / median(result["seconds"]))
    ratios = [many / few for few, many in zip(*speeds.values(), strict=True)]
    rows = [(f"{number} ranks, targets a second", spread(values)) for number, values in speeds.items()]
    rows.append(("ratio", spread(ratios)))
    report((f"on {cores} cores", "median (range)"), rows, speeds, output)
