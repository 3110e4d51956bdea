"""``plan``: what fits, how fast it runs, and the best way to distribute a model, without starting a rank."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

import click
from rich.console import Console

from spmd_engine.arrays.precision import FLOATS
from spmd_engine.axes import all_positions, axes_text, count_ranks, uneven_axes
from spmd_engine.cli.options import LongCommand, Quantity, options_of, rare_option, values_given
from spmd_engine.cli.values import FILE, Choice, WholeNumber
from spmd_engine.errors import UsageError
from spmd_engine.files import check_ending, output_file
from spmd_engine.jobs.resolve import request_for, unplanned
from spmd_engine.models.names import IMAGES
from spmd_engine.observability.render import print_picture, text_table
from spmd_engine.planning.machine.machine import Machine, default_machine
from spmd_engine.planning.plan_result import FALLBACKS, PlanResult, Request, draw_step
from spmd_engine.planning.planner import NOTHING_FITS, explain, find_plan, fixed_plan, planned_model
from spmd_engine.planning.search.estimate import Estimate
from spmd_engine.planning.search.placement import PLACEMENTS
from spmd_engine.planning.search.search import GOALS, Limits, thinned
from spmd_engine.planning.search.search_space import FIXABLE, Candidate, across_nodes, broken_choices
from spmd_engine.planning.simulator.check_prediction import TraceComparison, compare_run, trace_json
from spmd_engine.planning.simulator.step_evaluation import PlanEvaluation
from spmd_engine.training.train_config import OF_IMAGES, TrainConfig
from spmd_engine.units import BYTES, SECONDS, numbers_of, readable_bytes, readable_seconds

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
@click.option("--memory", type=_SIZE, help="Most memory of a rank, such as 24GiB. [default: as the machine has]")
@click.option("--latency", type=_TIME, help="Longest step, such as 100ms.")
@rare_option("--bandwidth", type=_SIZE, help="Most that a rank sends a second, such as 1GB/s.")
@rare_option("--compute", type=_TIME, help="Longest computation of a rank in a step.")
@click.option("--fewer", is_flag=True, help="Consider fewer ranks, too.")
@rare_option("--seconds", type=_TIME, default=20.0, help="Time for the search.")
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
        fixed={name: values[name] for name in FIXABLE if name in values},
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


# --- The page that it prints, with a picture of the step


BY = "simulated step by step (about: estimated)"  #: the source of the numbers of a table


def print_plan(result: PlanResult) -> None:
    """Print the best plan with its reasons, or why there is none."""
    console = Console(highlight=False, soft_wrap=True)
    request = result.request
    ranks = ", ".join(map(str, request.ranks))
    batch = ", ".join(map(str, request.batch_sizes))
    console.print(
        f"{request.model.name}, {request.model.parameter_count:,} parameters in {request.dtype}, on {ranks} ranks of "
        f"machine {request.machine.name}; batch {batch}; goal: {request.goal}"
    )
    names = [*result.limits.names, *request.fixed]
    shown = (request.constraint_text(name, result.limits) for name in names)
    console.print(f"constraints: {'; '.join(shown)}\n")
    if result.plan is None:
        _print_conflict(console, result)
        return
    console.print(f"plan: {result.plan.candidate}")
    console.print(f"  {result.command}")
    _print_nodes(console, result.plan.candidate, request.machine)
    if result.evaluation is not None:
        _print_evaluation(console, result.evaluation, result.request.batch_sizes[0])
    else:
        why = "time ran out before it was simulated" if result.late else "too large to be simulated"
        console.print(f"  a step: about {readable_seconds(result.plan.seconds)} ({why})")
        console.print(f"  memory: about {readable_bytes(result.plan.memory)} on a rank of stage {result.plan.stage}")
    parts = ", ".join(
        f"{name} {value / result.plan.seconds:.0%}" for name, value in result.plan.parts.items() if value > 0.0005
    )
    console.print(f"  where the time goes, as estimated: {parts}\n")
    if result.reasons:
        console.print("why")
        for reason in result.reasons:
            console.print(f"  {reason}")
        console.print()
    if result.evaluation is not None:
        print_picture(draw_step(result.evaluation.prediction, result.evaluation.analysis.ranks), console)
        console.print()
    _print_matrix(console, f"the best plans and the constraints, {BY}", result.search.best, result)
    front = thinned(result.search.front)
    memory = partial(result.limits.shown, "memory")
    rows = [(_seconds_of(plan), memory(plan.memory), str(plan.candidate)) for plan in front]
    if len(rows) > 1:
        console.print(text_table(["step", "memory", "plan"], rows, f"time against memory, {BY}"))
    _print_certificate(console, result)


def print_precisions(results: Sequence[PlanResult], chosen: PlanResult) -> None:
    """Print what each precision needs, by its own best plan, and which is best for the goal."""
    console = Console(highlight=False, soft_wrap=True)
    rows = [(result.precision + " (chosen)" * (result is chosen), *_needs_of(result)) for result in results]
    console.print(text_table(["precision", "step", "sent", "memory of a rank", "plan"], rows))
    console.print()


def _needs_of(result: PlanResult) -> list[str]:
    if result.conflict is not None:
        return ["", "", "", result.why_not]
    seconds, sent, memory = result.needs
    mesh = result.composition.mesh if result.composition else None
    plan = str(result.plan.candidate) if result.plan else axes_text(mesh or {})
    return [readable_seconds(seconds), readable_bytes(sent), readable_bytes(memory), plan]


def _found_by_simulations(candidate: Candidate) -> str:
    """What a candidate has that is only simulated, see ``PlanSearch.only_simulated``; empty: nothing."""
    if candidate.assign:
        return "a helper rank"
    return "uneven stages" if uneven_axes(candidate.mesh) else ""


def _print_nodes(console: Console, candidate: Candidate, machine: Machine) -> None:
    """Print what is on which node, or, of ranks that fill nodes in order, which axes stay inside one."""
    if _found_by_simulations(candidate):
        return  # a stage is a node, or a part of one; the ranks of a mesh beside a helper rank do not fill nodes
    if candidate.order:
        by_node: dict[tuple[int, str], list[str]] = defaultdict(list)
        for rank, place in zip(candidate.order, all_positions(candidate.mesh), strict=True):
            number, node = machine.places[rank]
            where = ",".join(f"{axis}={at}" for axis, at in place.coordinates.items() if candidate.mesh[axis] > 1)
            by_node[number, node.name].append(where)
        shown = [f"node {number} ({name}) has {'; '.join(held)}" for (number, name), held in by_node.items()]
        console.print(
            f"  in the order of ranks {','.join(map(str, candidate.order))}: {'. '.join(shown)}", markup=False
        )
    elif candidate.ranks > (node_ranks := machine.nodes[0].ranks):
        inside, across = across_nodes(candidate.mesh, node_ranks)
        shown = [
            f"{' and '.join(axes)} {where} nodes" for axes, where in ((inside, "inside"), (across, "across")) if axes
        ]
        console.print(f"  on nodes of {node_ranks} ranks, filled in the order of ranks: {', '.join(shown)}")


def _seconds_of(plan: Estimate) -> str:
    return ("" if plan.simulated else "about ") + readable_seconds(plan.seconds)


def _print_evaluation(console: Console, evaluation: PlanEvaluation, batch: int) -> None:
    analyzed = evaluation.analysis
    exact = "" if evaluation.whole else " (extrapolated from fewer micro-batches)"
    console.print(
        f"  a step: {readable_seconds(evaluation.seconds)}, {batch / evaluation.seconds:.4g} samples a second{exact}"
    )
    idle = evaluation.prediction.idle_share
    exposed = evaluation.prediction.exposed / evaluation.prediction.seconds if evaluation.prediction.seconds else 0.0
    console.print(f"  ranks wait {exposed:.1%} of it in communication and bubbles, and compute {1 - idle:.1%}")
    if (saves := evaluation.order_saves) is not None and exposed and saves < 0.9995:  # else the bound says nothing
        console.print(f"  no other order of what waits for a link would save more than {saves:.1%} of this")
    console.print(f"  sent: {readable_bytes(evaluation.bytes_sent)} a step by all ranks")
    console.print(
        f"  memory: rank {evaluation.peak_rank} holds most, {readable_bytes(analyzed.peak_bytes)}, at "
        f"{evaluation.peak_step.peak_moment}: "
        + ", ".join(
            f"{kind} {readable_bytes(size)}"
            for kind, size in sorted(evaluation.peak_bytes_by_kind.items(), key=lambda item: -item[1])
            if size
        )
    )
    for note in analyzed.approximate:
        console.print(f"  assumed: {note}")


def _print_conflict(console: Console, result: PlanResult) -> None:
    conflict, request = result.conflict, result.request
    assert conflict is not None
    console.print("Nothing fits.\n" if conflict.decided else "Time ran out before anything that fits was found.\n")
    if result.nearest_evaluation is not None:
        closest = result.closest.candidate if result.closest else "the given composition"
        console.print(f"closest: {closest}")
        _print_evaluation(console, result.nearest_evaluation, request.batch_sizes[0])
        peak = result.nearest_evaluation.peak_step.peak
        for kind, name, size in peak.holds[:6]:
            console.print(f"    {readable_bytes(size):>12}  {kind}: {name}")
        console.print()
    if result.closest is not None:
        _print_matrix(console, "the closest plan and the constraints", [result.closest], result)
    if conflict.relaxations:
        console.print("what would help, the smallest change first")
        for text, plan in conflict.relaxations.values():
            price = f"a step {_seconds_of(plan)}, memory {result.limits.shown('memory', plan.memory)}"
            console.print(f"  {text}: {plan.candidate}; {price}")
        if result.late and (others := [name for name in conflict.constraints if name not in conflict.relaxations]):
            named = ", ".join(name.replace("_", " ") for name in others)
            console.print(f"  other {named}: not examined, since {result.ended}")
        console.print()


def _print_matrix(console: Console, title: str, plans: Sequence[Estimate], result: PlanResult) -> None:
    """Print a row for each plan, a column for each constraint: the value, and ! if it breaks the constraint."""
    limits, fixed = result.limits, result.request.fixed
    sends = result.request.goal == "communication"
    columns = ["sent"] * sends
    columns += [f"{name} ({limits.shown(name)})" for name in limits.names]
    columns += [result.request.constraint_text(name, limits) for name in fixed]
    rows = []
    for plan in plans:
        broken = limits.broken(plan) | broken_choices(plan.candidate, fixed)
        cells = [readable_bytes(plan.sent)] * sends
        cells += [limits.shown(name, need) + " !" * (name in broken) for name, need in limits.measured(plan).items()]
        cells += ["no !" if name in broken else "kept" for name in fixed]
        rows.append((str(plan.candidate), _seconds_of(plan), *cells))
    console.print(text_table(["plan", "step", *columns], rows, title))
    console.print()


def _print_certificate(console: Console, result: PlanResult) -> None:
    certificate = result.search
    late = "; some plans near to the chosen one were not simulated, since " + result.ended if result.late else ""
    if result.plan is not None and (how := _found_by_simulations(result.plan.candidate)):
        console.print(
            f"\nof {certificate.candidates:,} candidates with {how} {certificate.estimated:,} were simulated; "
            f"others may be better{late}. Planned in {readable_seconds(result.took)}."
        )
        return
    text = (
        f"certificate: of {certificate.candidates:,} candidates, each with its best division into stages, "
        f"{certificate.excluded:,} cannot keep a constraint, by bounds, and the search estimated "
        f"{certificate.estimated:,}; "
    )
    proven = (
        "none of the others can be better"
        if certificate.gap < 1e-9
        else f"another may be better by {certificate.gap:.1%}"
        if certificate.gap < inf
        else "another may be better"
    )
    if not certificate.complete:
        text += f"then {result.ended}, and for the rest at most bounds are known: "
    console.print(f"\n{text}{proven}, by these estimates{late}. Planned in {readable_seconds(result.took)}.")


def print_fixed(result: PlanResult) -> None:
    """Print the evaluation of a given composition."""
    console = Console(highlight=False, soft_wrap=True)
    assert result.evaluation is not None
    mesh = axes_text(result.evaluation.analysis.axes)
    console.print(f"{result.request.model.name} on {mesh}, machine {result.request.machine.name}")
    _print_evaluation(console, result.evaluation, result.request.batch_sizes[0])
    console.print()
    print_picture(draw_step(result.evaluation.prediction, result.evaluation.analysis.ranks), console)


def print_comparison(comparison: TraceComparison) -> None:
    """Print a measured step compared with the predicted one."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{comparison.run}: a step takes {readable_seconds(comparison.measured.seconds)}, "
        f"{readable_seconds(comparison.predicted.seconds)} was predicted ({comparison.error:+.1%})"
    )
    predicted, measured, whole = comparison.predicted.parts, comparison.measured.parts, comparison.measured.seconds
    rows = [
        (part, *_milliseconds(predicted[part], measured[part]), f"{difference / whole:+.1%} of the step")
        for part, difference in comparison.differences().items()
    ]
    console.print(text_table(["a rank's step, mean", "predicted", "measured", "difference"], rows))
    rows = [(name, *_milliseconds(*seconds)) for name, *seconds in comparison.worst_layers()]
    console.print(text_table(["largest differences, seconds of all ranks", "predicted", "measured"], rows))


def _milliseconds(*seconds: float) -> list[str]:
    return [f"{value * 1e3:.2f} ms" for value in seconds]


def print_explanation(subject: str, answers: Sequence[Mapping[str, Any]]) -> None:
    """Print the plan that is explained, and the questions with their answers."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{subject}\n", markup=False)
    for number, answer in enumerate(answers, 1):
        console.print(f"[bold]{number:2}. {answer['question']}[/bold]")
        for line in answer["answer"]:
            console.print(f"    {line}")
