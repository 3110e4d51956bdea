"""``plan``: what fits, how fast it runs, and which way to spread a model is best, without starting a rank."""

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
from spmd_engine.cli.plan.page import print_answer, print_comparison, print_fixed
from spmd_engine.errors import UsageError
from spmd_engine.planning.report.plan_result import plan_file_of
from spmd_engine.planning.search.goals import GOALS
from spmd_engine.planning.search.planner import MISFIT, fixed_plan
from spmd_engine.planning.search.planner import plan as find_plan
from spmd_engine.runtime.launchers import launcher_rank


@click.command(short_help="The best way to train a model on a machine, and why.")
@click.argument("what", required=False, type=click.Choice(["explain"]))
@source_options
@lora_options
@click.option("--goal", type=click.Choice(GOALS), default="latency", show_default=True, help="What to be best at.")
@click.option("--memory", metavar="BYTES", help="A rank has at most, as in 2GiB. [default: as the machine says]")
@click.option("--latency", metavar="SECONDS", type=float, help="A step takes at most.")
@click.option("--bandwidth", metavar="BYTES", help="A rank sends at most, each second.")
@click.option("--compute", metavar="SECONDS", type=float, help="A rank works at most, each step.")
@click.option("--fewer", is_flag=True, help="Consider fewer ranks, too.")
@click.option("--seconds", type=float, default=20.0, show_default=True, help="To search for about so long.")
@fixed_options
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write the plan there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a page.")
@click.option("--compare", metavar="RUN", help="Lay the trace of a run (train --trace) over what is predicted of it.")
@click.option(
    "--timeline",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the predicted step there, in the format of --trace.",
)
@click.pass_context
def plan(context: click.Context, what: str | None, **options: Any) -> None:
    """Search meshes, ZeRO stages, schedules, micro-batches, stages and recomputation for the best plan; explain it.

    With --mesh, nothing is searched that is not named: the composition is train's, and it is looked at closely. Where
    nothing fits, the smallest set of constraints that cannot be kept together is named, and what would help; the exit
    code is 1.

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
    answer = fixed_plan(request) if "mesh" in request.fixed else find_plan(request)
    if options["output"]:
        if answer.conflict is not None:
            click.echo("spmd_engine: note: nothing fits, so no plan was written", err=True)
        else:
            plan_file_of(answer, options["model"], lora_of(options)).write(options["output"])
    if options["timeline"] and answer.foresight is not None:
        from spmd_engine.planning.simulator.trace_diff import trace_of

        with output_file(options["timeline"], "--timeline") as file:
            file.write(trace_of(answer.foresight.prediction, answer.foresight.analysis.axes).encode())
    if options["as_json"]:
        click.echo(json.dumps(answer.as_json()))
    elif "mesh" in request.fixed:
        print_fixed(answer)
    else:
        print_answer(answer)
    if answer.conflict is not None:
        click.echo(f"spmd_engine: {answer.why_not}", err=True)
        sys.exit(MISFIT)


def _explain(request: Any, as_json: bool) -> None:
    from spmd_engine.cli.plan.page import print_explanation
    from spmd_engine.planning.report.explain import Explanation, explain

    if not request.ranks:
        raise UsageError("plan explain: --ranks N, how many?")
    subject, answers = explain(request)
    if as_json:
        answers = [Explanation("What is explained?", [subject], request.model.name), *answers]
        click.echo(json.dumps([each.as_json() for each in answers]))
    else:
        print_explanation(subject, answers)
