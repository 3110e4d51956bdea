"""Prints tables of docs/planning.md, from shapes alone: models of 1 and 10 billion parameters, and grouped small
layers.

    python scripts/planned_tables.py              # A100 nodes; about a minute
    python scripts/planned_tables.py --machine h100 --memory 40GB

The first table compares the fastest plan within the memory with ZeRO-3 over all ranks. The second has a stack of 1,000
layers whose parameters are gathered in groups of various sizes. Every row is a whole step, analyzed and simulated.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.models import GPTSize, Model, gpt
from spmd_engine.models.mlp import deep_mlp
from spmd_engine.planning.machine.files import read_machine
from spmd_engine.planning.machine.machine import Machine
from spmd_engine.planning.search.budget import Budget
from spmd_engine.planning.search.cost_model import CostModel
from spmd_engine.planning.search.plan_search import EVALUATIONS, evaluate_plan
from spmd_engine.planning.search.search import Limits, search
from spmd_engine.planning.search.search_space import SearchSpace
from spmd_engine.planning.simulator.step_evaluation import PlanEvaluation, evaluate_step
from spmd_engine.units import bytes_of, readable_bytes, readable_seconds

BATCH, CONTEXT = 64, 1024
MODELS = {  # 12 · layers · width² parameters, plus the embedding
    "1B": gpt(GPTSize(80, 1024, 16, CONTEXT), "gpt-1b"),
    "10B": gpt(GPTSize(48, 4096, 32, CONTEXT), "gpt-10b"),
}
RANKS = [("1B", 1), ("1B", 4), ("1B", 8), ("10B", 16)]
SMALL_LAYERS, SMALL_WIDTH, SMALL_RANKS = 1000, 64, 8
THRESHOLDS = [0, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]  #: bytes at which a parameter group is closed
MEASURES = ("a step", "memory a rank", "sent by all", "calls a rank", "waits")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="a100", help="A machine of the package, or a machine file.")
    parser.add_argument("--memory", default="40GB", help="Memory of a rank.")
    options = parser.parse_args()
    machine = read_machine(options.machine)
    print(f"{BATCH} samples of {CONTEXT} tokens a step, {machine.name}, {options.memory} a rank\n")
    show(("model", "ranks", "plan", *MEASURES), billions(machine, bytes_of(options.memory)))
    print(f"\n{SMALL_LAYERS:,} layers of width {SMALL_WIDTH}, ZeRO-3 on {SMALL_RANKS} ranks of {machine.name}\n")
    show(("groups of", *MEASURES), grouped(machine))


def measures(evaluation: PlanEvaluation) -> list[str]:
    """The cells of a step."""
    analysis = evaluation.analysis
    return [
        readable_seconds(evaluation.seconds),
        readable_bytes(analysis.peak_bytes),
        readable_bytes(evaluation.bytes_sent),
        f"{analysis.calls / analysis.ranks:,.0f}",
        f"{evaluation.prediction.exposed / evaluation.prediction.seconds:.1%}",
    ]


def billions(machine: Machine, memory: float) -> Iterable[list[str]]:
    """The fastest plan for each model and number of ranks, and ZeRO-3."""
    for name, ranks in RANKS:
        model, nodes = MODELS[name], machine.with_ranks(ranks)
        costs = CostModel(model, nodes)
        choices = SearchSpace(model, [ranks], [BATCH], machine.nodes[0].ranks)
        limits, budget = Limits(memory=memory), Budget(EVALUATIONS)
        result = search(costs, choices, limits, "latency", budget, front=False, keep=1)
        if not result.best:
            yield [name, str(ranks), "none fits"]
        else:
            best = result.best[0].candidate
            yield [name, str(ranks), str(best), *measures(evaluate_plan(model, nodes, best, ParallelConfig()))]
        if ranks > 1:
            yield [name, str(ranks), f"data={ranks}; zero 3; recompute block", *measures(sharded(model, nodes, ranks))]


def sharded(model: Model, machine: Machine, ranks: int) -> PlanEvaluation:
    """ZeRO-3 with recomputed blocks and four samples per rank and micro-batch."""
    return evaluate_step(
        model, machine, {"data": ranks}, ParallelConfig(zero=3, recompute="block"), BATCH, BATCH // ranks // 4
    )


def grouped(machine: Machine) -> Iterable[list[str]]:
    """Small layers, by the largest bytes of a group."""
    model = deep_mlp(SMALL_LAYERS, SMALL_WIDTH)
    for threshold in THRESHOLDS:
        composition = ParallelConfig(zero=3, group_threshold=threshold)
        evaluation = evaluate_step(
            model, machine.with_ranks(SMALL_RANKS), {"data": SMALL_RANKS}, composition, 64 * SMALL_RANKS, 1
        )
        yield [readable_bytes(threshold) if threshold else "one array", *measures(evaluation)]


def show(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table."""
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for row in rows:
        print("| " + " | ".join([*row, *[""] * (len(columns) - len(row))]) + " |", flush=True)


if __name__ == "__main__":
    main()
