"""``plan``: what fits, how fast it runs, and the best way to distribute a model, without starting a rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from spmd_engine.cli.adapters import lora_of, lora_options
from spmd_engine.cli.output_file import check_ending, output_file
from spmd_engine.cli.plan.compare import compare_run
from spmd_engine.cli.plan.options import fixed_options, request_of, source_options
from spmd_engine.cli.plan.page import print_comparison, print_fixed, print_plan
from spmd_engine.errors import UsageError
from spmd_engine.planning.report.plan_result import plan_file_of
from spmd_engine.planning.search.goals import GOALS
from spmd_engine.planning.search.planner import NOTHING_FITS, fixed_plan
from spmd_engine.planning.search.planner import plan as find_plan
from spmd_engine.runtime.launchers import launcher_rank


@click.command(short_help="The best way to train a model on a machine, and why.")
@click.argument("what", required=False, type=click.Choice(["explain"]))
@source_options
@lora_options
@click.option("--goal", type=click.Choice(GOALS), default="latency", show_default=True, help="What to optimize.")
@click.option("--memory", metavar="BYTES", help="Most memory of a rank, as in 2GiB. [default: the machine's]")
@click.option("--latency", metavar="SECONDS", type=float, help="Longest step.")
@click.option("--bandwidth", metavar="BYTES", help="Most bytes that a rank sends per second.")
@click.option("--compute", metavar="SECONDS", type=float, help="Longest work of a rank per step.")
@click.option("--fewer", is_flag=True, help="Also consider divisors of --ranks.")
@click.option("--seconds", type=float, default=20.0, show_default=True, help="About how long to search.")
@fixed_options
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write the plan to this file."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a page.")
@click.option("--compare", metavar="RUN", help="Compare the trace of a run (train --trace) with its prediction.")
@click.option(
    "--timeline",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the predicted step to this file, in the format of train --trace.",
)
@click.pass_context
def plan(context: click.Context, what: str | None, **options: Any) -> None:
    """Search meshes, ZeRO stages, schedules, micro-batches, stages and recomputation for the best plan; explain it.

    With --mesh nothing is searched: the composition that train would use is evaluated. If nothing fits, the smallest
    set of constraints that cannot be kept together is printed, and what would help; the exit code is 1.

    \b
      python -m spmd_engine plan --model gpt2 --ranks 8 --memory 2GiB --goal throughput
      python -m spmd_engine plan --model gpt3-175b --machine a100 --ranks 1024 --batch-size 1536
      python -m spmd_engine plan --ranks 4 --mesh data=2,model=2 --json
      mpiexec -n 8 python -m spmd_engine train --mesh auto
      python -m spmd_engine plan explain --model gpt2 --ranks 8
      python -m spmd_engine plan --compare gpt-nano-1
    """
    if launcher_rank() > 0:
        return
    if options["compare"]:
        print_comparison(compare_run(options["compare"], options["machine"]), options["as_json"])
        return
    for option in ("output", "timeline"):
        if options[option]:
            check_ending(f"--{option}", options[option], ".json")
    request = request_of(context)
    if what == "explain":
        _explain(request, options["as_json"])
        return
    result = fixed_plan(request) if "mesh" in request.fixed else find_plan(request)
    if options["output"]:
        if result.conflict is not None:
            click.echo("spmd_engine: note: nothing fits, so no plan was written", err=True)
        else:
            plan_file_of(result, options["model"], lora_of(options)).write(options["output"])
    if options["timeline"] and result.evaluation is not None:
        from spmd_engine.planning.simulator.check_prediction import trace_json

        with output_file(options["timeline"], "--timeline") as file:
            file.write(trace_json(result.evaluation.prediction, result.evaluation.analysis.axes).encode())
    if options["as_json"]:
        click.echo(json.dumps(result.as_json()))
    elif "mesh" in request.fixed:
        print_fixed(result)
    else:
        print_plan(result)
    if result.conflict is not None:
        click.echo(f"spmd_engine: {result.why_not}", err=True)
        sys.exit(NOTHING_FITS)


def _explain(request: Any, as_json: bool) -> None:
    from spmd_engine.cli.plan.page import print_explanation
    from spmd_engine.planning.report.explain import Explanation, explain

    if not request.ranks:
        raise UsageError("plan explain needs --ranks N")
    subject, answers = explain(request)
    if as_json:
        answers = [Explanation("What is explained?", [subject], request.model.name), *answers]
        click.echo(json.dumps([answer.as_json() for answer in answers]))
    else:
        print_explanation(subject, answers)
