"""Writes the figures in docs/ that a dry run computes, on any machine: ``python scripts/figures.py [NAME...]``.

Each block between ``<!-- figures: NAME -->`` and ``<!-- end of figures -->`` is written by the function of that name.
With ``--check`` nothing is written, and the exit code is 1 if a block would change.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from spmd_engine.axes import axes_text, count_ranks, parse_axes
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.models import GPTSize, Model, deep_mlp, gpt
from spmd_engine.models.names import build_model
from spmd_engine.planning import analyze
from spmd_engine.planning.machine.machine import read_machine
from spmd_engine.planning.simulator.step_evaluation import evaluate_step
from spmd_engine.units import exact_bytes, readable_bytes, readable_seconds

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n)(.*?)(<!-- end of figures -->)", re.DOTALL)

Rows = list[list[str]]


def table(rows: Rows) -> str:
    """Rows as a table of Markdown; the first is the head."""
    head, *rest = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *rest])


def rows_of(block: str) -> Rows:
    """The rows of the table in a block, with its head and without the line below."""
    lines = [line for line in block.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


# --- docs/planning.md: predicted steps


ONE, TEN = gpt(GPTSize(80, 1024, 16, 1024), "1B"), gpt(GPTSize(48, 4096, 32, 1024), "10B")
#: The model, the mesh, the micro-batches and the options of each plan.
PLANNED: Sequence[tuple[Model, str, int, Mapping]] = (
    (ONE, "data=1", 16, {}),
    (ONE, "data=2,model=2", 32, {"sequence_parallel": True}),
    (ONE, "data=4", 4, {"zero": 3, "recompute": "block"}),
    (ONE, "data=4,model=2", 16, {"sequence_parallel": True}),
    (ONE, "data=8", 2, {"zero": 3, "recompute": "block"}),
    (TEN, "data=8,model=2", 2, {"zero": 3, "sequence_parallel": True}),
    (TEN, "data=16", 1, {"zero": 3, "recompute": "block"}),
)


def planned(block: str) -> str:
    """Steps of 64 samples on nodes of eight A100."""
    rows = [["model", "ranks", "plan", "a step", "memory a rank", "sent", "calls", "waits"]]
    for model, mesh, micro_batches, options in PLANNED:
        axes = parse_axes(mesh)
        words = [f"`{axes_text(axes)}`", *(f"ZeRO-{value}" for name, value in options.items() if name == "zero")]
        words += ["sequence parallel"] * ("sequence_parallel" in options)
        words += [f"{micro_batches} micro-batches"] * (micro_batches > 1)
        words += ["recompute block"] * ("recompute" in options)
        row = [model.name, str(count_ranks(axes)), ", ".join(words)]
        rows.append([*row, *_predicted(model, mesh, ParallelConfig(**options), micro_batches)])
    return table(rows)


def _predicted(model: Model, mesh: str, composition: ParallelConfig, micro_batches: int) -> list[str]:
    step = evaluate_step(model, read_machine("a100"), parse_axes(mesh), composition, 64, micro_batches)
    calls = len(step.analysis.of_rank(0).communications) if step.whole else step.analysis.calls // step.analysis.ranks
    waits = step.prediction.exposed / step.prediction.seconds
    peak = readable_bytes(step.analysis.peak_bytes)
    return [readable_seconds(step.seconds), peak, readable_bytes(step.bytes_sent), f"{calls:,}", f"{waits:.1%}"]


def groups(block: str) -> str:
    """A thousand layers by ``--group-threshold``."""
    rows = [["groups of", "a step", "memory a rank", "sent", "calls", "waits"]]
    for threshold in (0, *(1 << bits for bits in range(16, 25, 2))):
        size = exact_bytes(threshold).replace("KiB", " KiB").replace("MiB", " MiB") if threshold else "one array"
        composition = ParallelConfig(zero=3, group_threshold=threshold)
        rows.append([size, *_predicted(deep_mlp(1000, 64), "data=8", composition, 1)])
    return table(rows)


# --- docs/measuring.md: bytes and calls of strategies; times and memory stay as they were measured


OF_TRAINER = 3  #: calls of a step besides the engine's: the number of targets, the gradient's norm, and the metrics


def strategies(block: str) -> str:
    """The columns of bytes and calls of ``benchmarks/bench_strategies.py``, of which the rest is measured."""
    path = ROOT / "benchmarks" / "bench_strategies.py"
    spec = importlib.util.spec_from_file_location("bench_strategies", path)
    assert spec and spec.loader
    spec.loader.exec_module(bench := importlib.util.module_from_spec(spec))
    rows = rows_of(block)
    for row in rows[1:]:
        options = dict(bench.STRATEGIES[8][row[0]])
        axes, micro_batches = parse_axes(options.pop("mesh")), options.pop("micro_batches", 1)
        composition = ParallelConfig(**options)
        model = ModelConfig("gpt-mini").build(composition)
        step = analyze(model, axes, composition, batch_size=16, micro_batches=micro_batches)
        calls = max(sum(calls for calls, *_ in each.step.ledger().values()) for each in step.classes)
        row[1:3] = f"{step.bytes_sent / 1e6:,.0f} MB", f"{calls + OF_TRAINER:,}"
    return table(rows)


# --- docs/training.md: launches on a GPU; docs/precision.md: memory of a model of 1B parameters


def launches(block: str) -> str:
    """The column of ``gpt2``; the others are of models that only a test makes."""
    rows = rows_of(block)
    column = rows[0].index("`gpt2`")
    for row in rows[1:]:
        dtype = "bfloat16" if "bfloat16" in row[0] else "float32"
        step = analyze(build_model("gpt2"), {"data": 1}, batch_size=16, dtype=dtype, device="cuda").of_rank(0)
        row[column] = f"{step.waits if row[0] == 'waits' else step.launches:,}"
    return table(rows)


def halves(block: str) -> str:
    """What one rank holds between steps, beside the formula for everything in 16 bits."""
    kinds = ("parameters", "gradients", "optimizer state")
    usual = {"parameters": 2, "gradients": 2, "optimizer state": 4}
    rows = [["GB between steps", *kinds, "together"]]
    count = ONE.parameter_count
    formula = [usual[kind] * count / 1e9 for kind in kinds]
    rows.append(["all in 16 bits: 2 + 2 + 4 bytes a parameter", *(f"{x:.1f}" for x in (*formula, sum(formula)))])
    for dtype in ("bfloat16", "float32"):
        step = analyze(ONE, {"data": 1}, batch_size=1, sequence=128, dtype=dtype).of_rank(0)
        held = [step.before.get(kind, 0) / 1e9 for kind in kinds]
        rows.append([f"`--precision {dtype}`", *(f"{x:.1f}" for x in (*held, sum(held)))])
    return table(rows)


FIGURES: dict[str, Callable[[str], str]] = {
    "groups": groups,
    "halves": halves,
    "launches": launches,
    "planned": planned,
    "strategies": strategies,
}


def pages(names: Sequence[str]) -> Iterator[tuple[Path, str, str]]:
    """Each page with such blocks, its text, and the text that it should have."""
    for path in sorted((ROOT / "docs").glob("*.md")):
        text = path.read_text()

        def written(match: re.Match) -> str:
            head, name, block, end = match.groups()
            return head + (FIGURES[name](block) + "\n" if name in names else block) + end

        if BLOCK.search(text):
            yield path, text, BLOCK.sub(written, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(FIGURES)}; all by default")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page would change")
    options = parser.parse_args()
    changed = [(path, new) for path, old, new in pages(options.names or list(FIGURES)) if old != new]
    for path, new in changed:
        if not options.check:
            path.write_text(new)
        print(
            f"{path.relative_to(ROOT)}: {'other figures than scripts/figures.py has' if options.check else 'written'}"
        )
    sys.exit(1 if options.check and changed else 0)


if __name__ == "__main__":
    main()
