"""``plan``: what fits, how fast it runs, and the best way to distribute a model, without starting a rank."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import click

from spmd_engine.arrays.precision import FLOATS
from spmd_engine.axes import count_ranks
from spmd_engine.cli.options import LongCommand, Quantity, options_of, rare_option, values_given
from spmd_engine.cli.plan.page import print_comparison, print_explanation, print_fixed, print_plan, print_precisions
from spmd_engine.cli.values import FILE, Choice, WholeNumber
from spmd_engine.engine.state.assignment import parse_division
from spmd_engine.errors import UsageError
from spmd_engine.files import check_ending, output_file
from spmd_engine.jobs.resolve import request_for, unplanned
from spmd_engine.models.names import IMAGES
from spmd_engine.planning.explain import explain
from spmd_engine.planning.machine.files import default_machine
from spmd_engine.planning.machine.machine import Machine
from spmd_engine.planning.plan_result import FALLBACKS, PlanResult, Request
from spmd_engine.planning.planner import NOTHING_FITS, find_plan, fixed_plan, planned_model
from spmd_engine.planning.search.rank_order import PLACEMENTS
from spmd_engine.planning.search.search import GOALS, Limits
from spmd_engine.planning.search.search_space import FIXABLE
from spmd_engine.planning.simulator.check_prediction import compare_run, trace_json
from spmd_engine.training.train_config import OF_IMAGES, TrainConfig
from spmd_engine.units import BYTES, SECONDS, numbers_of

_SIZE, _TIME = Quantity(BYTES), Quantity(SECONDS)


@click.command(cls=LongCommand, short_help="The best way to train a model on a machine, and why.")
@click.argument("what", required=False, type=Choice(["explain"]))
@click.option(
    "--machine",
    metavar="NAME|FILE",
    help="a100, h100, h200, edge, cpu, or a file as 'calibrate' writes. [default: the file of 'calibrate', else cpu]",
)
@click.option("--ranks", type=WholeNumber(), help="Number of ranks. [default: as --mesh, or the machine's cores]")
@click.option(
    "--batch-size",
    metavar="N[,N...]",
    help="Samples a step, over all ranks; the best of several. [default: 16; images: 64]",
)
@click.option("--goal", type=Choice(GOALS), default="latency", help="What to optimize.")
@click.option(
    "--memory", metavar="SIZE", type=_SIZE, help="Most memory of a rank, such as 24GiB. [default: as the machine has]"
)
@click.option("--latency", metavar="TIME", type=_TIME, help="Longest step, such as 100ms.")
@rare_option("--bandwidth", metavar="SIZE", type=_SIZE, help="Most that a rank sends a second, such as 1GB/s.")
@rare_option("--compute", metavar="TIME", type=_TIME, help="Longest computation of a rank in a step.")
@click.option("--fewer", is_flag=True, help="Consider fewer ranks, too.")
@rare_option("--seconds", metavar="TIME", type=_TIME, default=20.0, help="Time for the search.")
@rare_option(
    "--placement",
    type=Choice(PLACEMENTS),
    default="auto",
    help="How ranks of unequal nodes are placed on the mesh: by simulations, as listed, or by costs of single ranks.",
)
@rare_option(
    "--fallback",
    metavar="split,offload,assign|none",
    default=",".join(FALLBACKS),
    help="What a plan may do where nothing else fits: split the layers of a pipeline stage over more ranks than those "
    "of others, offload, or assign layers of a rank that lacks memory to a helper rank.",
)
@rare_option("--axes", metavar="AXIS,...", help="Mesh axes to consider. [default: all that suit the model]")
@click.option("--output", type=FILE, help="Write the plan to FILE.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a page.")
@click.option("--compare", metavar="RUN", help="Compare the trace of a run (train --trace) with its prediction.")
@rare_option("--timeline", type=FILE, help="Write the predicted step to FILE, in the format of --trace.")
@click.option(
    "--precision",
    "--dtype",
    metavar="NAME[,NAME...]",
    default="float32",
    help=f"Of {', '.join(FLOATS)}; several are planned each, and compared.",
)
@options_of(
    TrainConfig,
    ["model", "optimizer", "length", "micro_batches", "lora", "composition"],
    without=["rebalance_every"],
    defaults=dict.fromkeys(FIXABLE, "searched"),
    help={"mesh": "Evaluate this mesh only; options that are not given are as in 'train'."},
)
def plan(what: str | None, **options: Any) -> None:
    """Search meshes, ZeRO stages, schedules, micro-batches, stages and recomputation for the best plan; explain it.

    With --mesh, nothing is searched: the composition is that of 'train' with these options, and it is evaluated in
    detail. If nothing fits, the exit code is 1, and the page names the smallest set of constraints that contradict each
    other, and what would help.

    \b
      python -m spmd_engine plan --model gpt2 --ranks 8 --memory 2GiB --goal throughput
      python -m spmd_engine plan --model gpt3-175b --machine a100 --ranks 1024 --batch-size 1536
      python -m spmd_engine plan --ranks 4 --mesh data=2,model=2 --json
      mpiexec -n 8 python -m spmd_engine train --mesh auto
      python -m spmd_engine plan explain --model gpt2 --ranks 8
      python -m spmd_engine plan --compare gpt-nano-1
    """
    if options["compare"]:
        code = values_given(options).get("model")
        comparison = compare_run(options["compare"], options["machine"], code)
        click.echo(json.dumps(comparison.as_json())) if options["as_json"] else print_comparison(comparison)
        return
    for option in ("output", "timeline"):
        if options[option]:
            check_ending(f"--{option}", options[option], ".json")
    values = values_given({name: value for name, value in options.items() if name not in ("batch_size", "precision")})
    precisions = dict.fromkeys(name.strip() for name in options["precision"].split(","))
    requests = [_request(options, {**values, "precision": precision}) for precision in precisions]
    if what == "explain":
        if len(requests) > 1:
            raise UsageError(f"plan explain --precision {options['precision']}: it explains one plan; give one")
        subject, answers = explain(requests[0])
        if options["as_json"]:
            explained = {"question": "What is explained?", "answer": [subject], "data": requests[0].model.name}
            click.echo(json.dumps([explained, *answers]))
        else:
            print_explanation(subject, answers)
        return
    results = [fixed_plan(request) if "mesh" in request.fixed else find_plan(request) for request in requests]
    result = min(results, key=lambda planned: planned.rank)
    request = result.request
    if options["output"]:
        if result.conflict is not None:
            click.echo("spmd_engine: note: nothing fits, so no plan was written", err=True)
        else:
            result.plan_file(values.get("model", TrainConfig().model.name)).write(options["output"])
    if options["timeline"] and result.evaluation is not None:
        with output_file(options["timeline"], "--timeline") as file:
            file.write(trace_json(result.evaluation.prediction, result.evaluation.analysis.axes).encode())
    if options["as_json"]:
        compared = {"precision": result.precision, "compared": list(map(_needs, results))} if results[1:] else {}
        click.echo(json.dumps(result.as_json() | compared))
    else:
        if results[1:]:
            print_precisions(results, result)
        (print_fixed if "mesh" in request.fixed else print_plan)(result)
    if result.conflict is not None:
        click.echo(f"spmd_engine: {result.why_not}", err=True)
        sys.exit(NOTHING_FITS)


def _needs(result: PlanResult) -> dict[str, Any]:
    if result.conflict is not None:
        return {"precision": result.precision, "reason": result.why_not}
    seconds, sent, memory = result.needs
    return {"precision": result.precision, "seconds": seconds, "bytes_sent": sent, "peak_bytes": memory}


def _request(options: Mapping[str, Any], values: Mapping[str, Any]) -> Request:
    """The request of a command line; raises UsageError for options that contradict each other."""
    machine = default_machine(options["machine"])
    axes = values.get("mesh")
    ranks = _ranks(options, axes, machine)
    job = TrainConfig().with_options(**{name: value for name, value in values.items() if name != "model"})
    name = values.get("model", job.model.name)
    return request_for(
        job,
        planned_model(name, job.model.lora, unplanned(job.composition)),
        machine,
        [n for n in range(1, ranks + 1) if ranks % n == 0] if options["fewer"] else [ranks],
        batch_sizes=_batch_sizes(options["batch_size"], name),
        goal=options["goal"],
        limits=Limits(options["memory"], options["latency"], options["bandwidth"], options["compute"]),
        fixed=_fixed(values),
        axes=_axes(options["axes"]),
        seconds=options["seconds"],
        placement=options["placement"],
        fallback=[name.strip() for name in options["fallback"].split(",")] if options["fallback"] != "none" else [],
        named=name,
    )


def _axes(text: str | None) -> list[str] | None:
    axes = [axis.strip() for axis in text.split(",") if axis.strip()] if text is not None else None
    if axes == []:
        raise UsageError(f"--axes {text!r}: name axes, as in data,model")
    return axes


def _ranks(options: Mapping[str, Any], axes: Mapping[str, int] | None, machine: Machine) -> int:
    ranks = options["ranks"]
    if axes is not None:
        if ranks is not None and count_ranks(axes) != ranks:
            raise UsageError(f"--mesh {options['mesh']} has {count_ranks(axes)} ranks, and --ranks is {ranks}")
        ranks = count_ranks(axes)
    if ranks is None:
        ranks = round(machine.nodes[0].cores or machine.nodes[0].ranks)
    if ranks < 1:
        raise UsageError(f"--ranks {ranks}: it must be from 1")
    if machine.ranks and ranks > machine.ranks:
        raise UsageError(f"machine {machine.name} has {machine.ranks} ranks, fewer than --ranks {ranks}")
    return ranks


def _batch_sizes(text: str | None, model: str) -> list[int]:
    if text is None:
        return [OF_IMAGES["batch_size"] if model in IMAGES else TrainConfig().data.batch_size]
    return list(numbers_of(text, "--batch-size", "a whole number, or several as in 16,32", 1))


def _fixed(values: Mapping[str, Any]) -> dict[str, Any]:
    fixed = {name: values[name] for name in FIXABLE if name in values}
    if "stages" in fixed:
        division = parse_division(fixed["stages"])
        fixed["stages"] = fixed["stages"] if isinstance(division, str) else tuple(division)
        if "mesh" not in values and isinstance(division, str):
            raise UsageError(f"--stages {division}: stages are planned; give --mesh as well, or the first layers")
    return fixed
