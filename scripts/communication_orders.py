"""How much exposed communication another order of it could save, for each composition that ``plan`` would consider.

    python scripts/communication_orders.py --model gpt-mini --ranks 4 --rate 1.25e8

The machine is two hosts with a link of so many bytes a second, of nodes as the packaged machine ``cpu`` describes them.
No rank is started. The bound is that of ``plan``: no order saves more, with calls in chunks of any size.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import replace

from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.planning.dry_run.engine import PassCache
from spmd_engine.planning.machine.files import read_machine
from spmd_engine.planning.machine.machine import Link
from spmd_engine.planning.model_file import planned_model
from spmd_engine.planning.search.cost_model import CostModel
from spmd_engine.planning.search.plan_search import evaluate_plan
from spmd_engine.planning.search.search_space import SearchSpace, candidates
from spmd_engine.planning.simulator.step_evaluation import PlanEvaluation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="gpt-mini")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--micro-batches", default="1,2,4", help="numbers of micro-batches to consider")
    parser.add_argument("--rate", type=float, default=1.25e8, help="bytes a second between the hosts")
    options = parser.parse_args()
    cpu, model = read_machine("cpu"), planned_model(options.model)
    host = replace(cpu.nodes[0], name="host", count=2, ranks=options.ranks // 2, cores=options.ranks / 2)
    machine = replace(cpu, name="two-hosts", nodes=(host,), between=Link(1e-4, options.rate))
    costs, cache = CostModel(model, machine), PassCache()
    space = SearchSpace(model, [options.ranks], [options.batch_size], host.ranks, recompute="none")
    seen: dict[str, list[tuple[float, PlanEvaluation, str]]] = defaultdict(list)
    numbers = [int(number) for number in options.micro_batches.split(",")]
    for candidate in candidates(space):
        if candidate.micro_batches not in numbers:
            continue
        estimator = costs.estimator(candidate)
        if estimator is None or (estimate := estimator.estimate()) is None:
            continue
        plan = evaluate_plan(model, machine, estimate.candidate, ParallelConfig(), cache=cache)
        pipeline = ", pipeline" * (candidate.pipe > 1)
        seen[f"ZeRO-{candidate.zero}{pipeline}"].append((plan.order_saves or 0.0, plan, str(candidate)))
    print("| compositions | number | most saved of what is exposed | of the step | by |\n|---|---|---|---|---|")
    for kind, plans in sorted(seen.items()):
        saves, plan, name = max(plans, key=lambda entry: entry[0])
        step = saves * plan.prediction.exposed / plan.seconds
        print(f"| {kind} | {len(plans)} | {saves:.1%} | {step:.1%} | {name} |")


if __name__ == "__main__":
    main()
