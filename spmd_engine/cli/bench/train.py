"""``bench train``: tokens a second of any strategy, and the share of the machine's peak that this is."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import click
import numpy as np

from spmd_engine.cli.bench.measuring import (
    measure,
    output_option,
    ranks_option,
    report,
    rounds_option,
    sgemm_peak,
    spread,
    steps_option,
)


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
    """Time training steps; whatever else is given goes to 'train'.

    The share of the peak counts 6 operations for each parameter that is multiplied, and token, and attention where it
    is not masked, against this machine's own matrix products on as many cores as ranks.

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
