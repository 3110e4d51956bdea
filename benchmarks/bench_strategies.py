"""Bytes, calls, memory and time of each strategy, on the same ranks and the same batch; and more ranks than cores.

python benchmarks/bench_strategies.py strategies --model gpt-mini --batch-size 16
python benchmarks/bench_strategies.py oversubscribed --ranks 8
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import click

from spmd_engine.cli.bench.measuring import count_option, measure, output_option, report, spread
from spmd_engine.comm.shared_memory.cores import cores_here


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """Options by name as a command line has them: ``{"zero": 3}`` is ``--zero 3``; True stands for a flag."""
    arguments: list[str] = []
    for name, value in options.items():
        arguments += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return arguments


@click.group()
def bench() -> None:
    """Compare strategies, and numbers of ranks, on this machine."""


_TEXT = argparse.__file__  # small data: the memory of the default data would hide that of a strategy

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


@bench.command(short_help="Bytes, calls, memory and time of each strategy.")
@click.option("--model", default="gpt-nano", show_default=True)
@click.option("--ranks", type=click.Choice(["2", "8"]), default="8", show_default=True)
@click.option("--batch-size", type=click.IntRange(min=8), default=32, show_default=True)
@count_option("steps", 5)
@count_option("rounds", 3)
@click.option("--only", metavar="TEXT", help="Strategies whose names contain this; the first is always run.")
@output_option
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
            results[name].append(measure(int(ranks), "train", {"options": arguments, "warm": 2, "time": steps}))
    rows = []
    times = {name: [median(result["seconds"]) for result in rounds_of_name] for name, rounds_of_name in results.items()}
    for name, rounds_of_name in results.items():
        last = rounds_of_name[-1]
        ratios = [ours / base for ours, base in zip(times[name], times[first], strict=True)]
        rows.append(
            (
                name,
                f"{last['bytes_sent'] / 1e6:,.1f} MB",
                f"{last['calls']:,.0f}",
                f"{median(result['memory'] for result in rounds_of_name) / 1e6:,.0f} MB",
                spread(times[name], 1e3, " ms"),
                f"{median(ratios):.2f}",
            )
        )
    columns = ("strategy", "sent a step", "calls", "memory a rank", "step", f"times {first}")
    report(columns, rows, results, output)


# --- The cost of more ranks than cores


@bench.command(
    short_help="More ranks than cores against as many as cores.",
    context_settings={"ignore_unknown_options": True},
)
@count_option("ranks", 8, least=2)
@count_option("steps", 12)
@count_option("rounds", 3)
@output_option
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def oversubscribed(ranks: int, steps: int, rounds: int, output: Path | None, options: tuple[str, ...]) -> None:
    """Compare tokens a second on one rank a core with more ranks than cores; further options go to 'train'."""
    cores = max(1, int(cores_here()))
    arguments = {"options": ["--batch-size", "32", *options], "warm": 3, "time": steps}
    speeds: dict[int, list[float]] = {cores: [], ranks: []}
    for _ in range(rounds):
        for number, values in speeds.items():
            result = measure(number, "train", arguments)
            values.append(result["tokens"] / median(result["seconds"]))
    ratios = [many / few for few, many in zip(*speeds.values(), strict=True)]
    rows = [(f"{number} ranks, targets a second", spread(values)) for number, values in speeds.items()]
    rows.append(("ratio", spread(ratios)))
    report((f"on {cores} cores", "median (range)"), rows, speeds, output)


if __name__ == "__main__":
    bench()
