"""What ``plan`` prints: a page with a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import click
from rich.console import Console
from rich.table import Table

from spmd_engine.cli.show.picture import GREEN, ORANGE, PALE, PURPLE, SKY, YELLOW, Cell, Picture, print_picture, text
from spmd_engine.planning.report.explain import Explanation
from spmd_engine.planning.report.plan_result import Answer
from spmd_engine.planning.search.estimate import Estimate
from spmd_engine.planning.search.goals import Constraints
from spmd_engine.planning.search.plan_evaluation import Foresight
from spmd_engine.planning.search.search import thinned
from spmd_engine.planning.search.search_space import across_nodes
from spmd_engine.planning.simulator.simulation import COMMUNICATION
from spmd_engine.planning.simulator.trace_diff import PARTS, Comparison
from spmd_engine.units import readable_bytes, readable_seconds

BY = "simulated step by step (about: estimated)"  #: how what a table shows was found


def print_answer(answer: Answer) -> None:
    """The best plan with its reasons, or why there is none."""
    console = Console(highlight=False, soft_wrap=True)
    request = answer.request
    ranks = ", ".join(map(str, request.ranks))
    batch = ", ".join(map(str, request.batch_sizes))
    console.print(
        f"{request.model.name}, {request.model.parameter_count:,} parameters in {request.dtype}, on {ranks} ranks of "
        f"machine {request.machine.name}; batch {batch}; goal: {request.goal}"
    )
    constraints = Constraints(answer.limits, request.fixed)
    console.print("constraints: " + "; ".join(constraints.said(name) for name in constraints.names) + "\n")
    if answer.plan is None:
        _print_conflict(console, answer)
        return
    console.print(f"plan: {answer.plan.candidate}")
    console.print(f"  {command_of(answer)}")
    _print_nodes(console, answer)
    if answer.foresight is not None:
        _print_foresight(console, answer.foresight, answer.request.batch_sizes[0])
    else:
        console.print(f"  a step: about {readable_seconds(answer.plan.seconds)} (too large to be simulated in whole)")
        console.print(f"  memory: about {readable_bytes(answer.plan.memory)} on a rank of stage {answer.plan.stage}")
    parts = ", ".join(
        f"{name} {value / answer.plan.seconds:.0%}" for name, value in answer.plan.parts.items() if value > 0.0005
    )
    console.print(f"  where the time goes, as estimated: {parts}\n")
    if answer.reasons:
        console.print("why")
        for reason in answer.reasons:
            console.print(f"  {reason}")
        console.print()
    if answer.foresight is not None:
        print_picture(draw_step(answer.foresight), console)
        console.print()
    _print_matrix(console, f"the best plans and the constraints, {BY}", answer.found.best, constraints)
    front = answer.found.front
    if len(front) > 1:
        title = f"time against memory, {BY}"
        table = Table("step", "memory", "plan", box=None, header_style="bold", title=title, title_justify="left")
        for each in thinned(front):
            table.add_row(_seconds_of(each), readable_bytes(each.memory), str(each.candidate))
        console.print(table)
    _print_certificate(console, answer)


def _print_nodes(console: Console, answer: Answer) -> None:
    """Which axes stay inside a node, where there are several: ranks fill nodes in their order."""
    candidate, node_ranks = answer.plan.candidate, answer.request.machine.nodes[0].ranks
    if candidate.ranks > node_ranks:
        inside, across = across_nodes(candidate.mesh, node_ranks)
        said = [
            f"{' and '.join(axes)} {where} nodes" for axes, where in ((inside, "inside"), (across, "across")) if axes
        ]
        console.print(f"  on nodes of {node_ranks} ranks, which these fill in their order: {', '.join(said)}")


def _seconds_of(plan: Estimate) -> str:
    return ("" if plan.simulated else "about ") + readable_seconds(plan.seconds)


def command_of(answer: Answer) -> str:
    """The command line that trains by the plan."""
    assert answer.plan is not None
    candidate = answer.plan.candidate
    composition = candidate.composition(answer.request.base)
    words = [f"mpiexec -n {candidate.ranks} python -m spmd_engine train --model {answer.request.model.name}"]
    words.append("--mesh " + ",".join(f"{axis}={size}" for axis, size in candidate.axes))
    words.append(f"--batch-size {candidate.batch_size}")
    words += [f"--micro-batches {candidate.micro_batches}"] * (candidate.micro_batches > 1)
    words += [f"--zero {composition.zero}"] * bool(composition.zero)
    words += ["--sequence-parallel"] * composition.sequence_parallel
    words += [f"--schedule {composition.schedule}"] * bool(composition.schedule)
    words += [f"--chunks {composition.chunks}"] * bool(composition.chunks)
    words += [f"--stages {composition.stages}"] * bool(composition.stages)
    words += [f"--recompute {composition.recompute}"] * (composition.recompute != "none")
    words += [f"--shares {composition.shares}"] * bool(composition.shares)
    words += [f"--state-shares {composition.state_shares}"] * bool(composition.state_shares)
    words += [f"--min-tensor-size {composition.min_tensor_size}"] * bool(composition.min_tensor_size)
    return " ".join(words)


def _print_foresight(console: Console, seen: Foresight, batch: int) -> None:
    analyzed = seen.analysis
    exact = "" if seen.whole else " (of a part of its micro-batches, continued)"
    console.print(f"  a step: {readable_seconds(seen.seconds)}, {batch / seen.seconds:.4g} samples a second{exact}")
    idle = seen.prediction.idle_share
    exposed = seen.prediction.exposed / seen.prediction.seconds if seen.prediction.seconds else 0.0
    console.print(f"  ranks wait {exposed:.1%} of it in communication and bubbles, and compute {1 - idle:.1%}")
    console.print(f"  sent: {readable_bytes(seen.bytes_sent)} a step by all ranks")
    console.print(
        f"  memory: rank {seen.peak_rank} holds most, {readable_bytes(analyzed.peak_bytes)}, at {seen.peak_moment}: "
        + ", ".join(
            f"{kind} {readable_bytes(size)}"
            for kind, size in sorted(seen.peak_bytes_by_kind.items(), key=lambda each: -each[1])
            if size
        )
    )
    for note in analyzed.approximate:
        console.print(f"  assumed: {note}")


def _print_conflict(console: Console, answer: Answer) -> None:
    conflict, request = answer.conflict, answer.request
    assert conflict is not None
    constraints = Constraints(answer.limits, request.fixed)
    console.print("Nothing fits.\n" if conflict.decided else "Time ran out before anything that fits was found.\n")
    if answer.conflict_foresight is not None:
        console.print(f"closest: {conflict.nearest.candidate if conflict.nearest else 'the composition that is given'}")
        _print_foresight(console, answer.conflict_foresight, request.batch_sizes[0])
        peak = answer.conflict_foresight.peak_step.peak
        for kind, what, size in peak.holds[:6]:
            console.print(f"    {readable_bytes(size):>12}  {kind}: {what}")
        console.print()
    if conflict.nearest is not None:
        _print_matrix(console, "the closest and the constraints", [conflict.nearest], constraints)
    if conflict.ways:
        console.print("what would help, the nearest first")
        for way in conflict.ways:
            price = f"a step {readable_seconds(way.plan.seconds)}, memory {readable_bytes(way.plan.memory)}"
            console.print(f"  {way.said}: {way.plan.candidate}; {price}")
        console.print()


def _print_matrix(console: Console, title: str, plans: Sequence[Estimate], constraints: Constraints) -> None:
    """A line a plan, a column a constraint: what it needs of what it may have."""
    limits = constraints.limits
    measured = [name for name in constraints.names if name not in constraints.fixed]
    columns = [f"{name} ({limits.said(name)})" for name in measured] + [
        constraints.said(name) for name in constraints.fixed
    ]
    table = Table("plan", "step", *columns, box=None, header_style="bold", title=title, title_justify="left")
    for each in plans:
        broken = constraints.broken(each.candidate, each)
        needs = limits.measured(each)
        cells = [limits.said(name, needs[name]) + (" !" if name in broken else "") for name in measured]
        cells += ["no !" if name in broken else "kept" for name in constraints.fixed]
        table.add_row(str(each.candidate), _seconds_of(each), *cells)
    console.print(table)
    console.print()


def _print_certificate(console: Console, answer: Answer) -> None:
    found = answer.found.certificate
    text = (
        f"certificate: of {found.candidates:,} candidates, each with its best division into stages, {found.excluded:,} "
        f"break a constraint by their bounds and {found.estimated:,} were estimated; "
    )
    proven = "none of the others can be better" if found.gap < 1e-9 else f"another may be better by {found.gap:.1%}"
    if not found.complete:
        text += f"then time ran out (--seconds {answer.request.seconds:g}), and of the rest only bounds are known: "
    console.print(f"\n{text}{proven}, by these estimates. Planned in {readable_seconds(answer.took)}.")


def print_fixed(answer: Answer) -> None:
    """A composition that was given."""
    console = Console(highlight=False, soft_wrap=True)
    assert answer.foresight is not None
    mesh = ",".join(f"{axis}={size}" for axis, size in answer.foresight.analysis.axes.items())
    console.print(f"{answer.request.model.name} on {mesh}, machine {answer.request.machine.name}")
    _print_foresight(console, answer.foresight, answer.request.batch_sizes[0])
    console.print()
    print_picture(draw_step(answer.foresight), console)


def print_comparison(found: Comparison, as_json: bool) -> None:
    """A measured step beside the predicted one."""
    if as_json:
        import json

        click.echo(json.dumps(found.as_json()))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{found.run}: a step takes {readable_seconds(found.measured.seconds)}, "
        f"{readable_seconds(found.predicted.seconds)} was predicted ({found.error:+.1%})"
    )
    table = Table("of a rank's step, the mean", "predicted", "measured", "difference", box=None, header_style="bold")
    for part in PARTS:
        predicted, measured = found.predicted.parts[part], found.measured.parts[part]
        share = (predicted - measured) / found.measured.seconds
        table.add_row(part, f"{predicted * 1e3:.2f} ms", f"{measured * 1e3:.2f} ms", f"{share:+.1%} of the step")
    console.print(table)
    layers = Table("largest differences, seconds of all ranks", "predicted", "measured", box=None, header_style="bold")
    for name, predicted, measured in found.worst_layers():
        layers.add_row(name, f"{predicted * 1e3:.2f} ms", f"{measured * 1e3:.2f} ms")
    console.print(layers)


def print_explanation(subject: str, answers: Sequence[Explanation]) -> None:
    """What is explained, and the fourteen questions, answered."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{subject}\n", markup=False)
    for number, each in enumerate(answers, 1):
        console.print(f"[bold]{number:2}. {each.question}[/bold]")
        for line in each.lines:
            console.print(f"    {line}")


# --- The predicted step, drawn: a row a rank, time from left to right


COLUMNS = 88
MOST_ROWS = 16
#: By the end of a computation's name: its letter, colour, and what it is.
KINDS = (
    ("forward again", "R", PURPLE, "forward again"),
    ("forward", "F", SKY, "forward"),
    ("backward (input)", "B", ORANGE, "backward"),
    ("backward (weights)", "B", ORANGE, "backward"),
    ("", "u", GREEN, "loss, norm and update"),
)


def draw_step(seen: Foresight) -> Picture:
    """What each rank does most of the time in each 1/88 of the step."""
    prediction = seen.prediction
    rows = list(prediction.ranks)[:MOST_ROWS]
    left = max(len(f"rank {rank}") for rank in rows) + 1
    scale = COLUMNS / prediction.seconds
    filled: dict[int, list[Counter]] = {rank: [Counter() for _ in range(COLUMNS)] for rank in rows}
    for span in prediction.spans:
        if span.rank not in filled:
            continue
        letter = "-" if span.kind == COMMUNICATION else _letter(span.name)
        first, last = span.start * scale, span.end * scale
        for column in range(int(first), min(int(last) + 1, COLUMNS)):
            share = min(last, column + 1) - max(first, column)
            if share > 0:
                filled[span.rank][column][letter] += share
    cells = [text(left, 0, "0"), text(left + COLUMNS - 8, 0, readable_seconds(prediction.seconds), 8, "right")]
    used = set()
    for row, rank in enumerate(rows, 1):
        cells.append(text(0, row, f"rank {rank}"))
        letters = [each.most_common(1)[0][0] if each else "." for each in filled[rank]]
        used |= set(letters)
        cells += _runs(left, row, letters)
    legend = [f"{letter} {name}" for _, letter, _, name in dict.fromkeys(KINDS) if letter in used]
    legend = list(dict.fromkeys(legend)) + ["- waits in communication"] * ("-" in used) + [". idle"] * ("." in used)
    notes = [", ".join(legend) + "; what a rank does most in each column."]
    if len(prediction.ranks) > len(rows):
        notes.append(f"{len(prediction.ranks) - len(rows)} further ranks are not drawn.")
    if len(prediction.ranks) < seen.analysis.ranks:
        notes.append(f"{len(prediction.ranks)} ranks, one for each stage, stand for all {seen.analysis.ranks}.")
    return Picture("the step, as predicted", cells, notes=notes)


def _letter(name: str) -> str:
    return next(letter for end, letter, _, _ in KINDS if name.endswith(end))


def _runs(left: int, row: int, letters: list[str]) -> list[Cell]:
    fills = {letter: fill for _, letter, fill, _ in KINDS} | {"-": YELLOW}
    cells, begin = [], 0
    for column in range(1, len(letters) + 1):
        if column == len(letters) or letters[column] != letters[begin]:
            letter = letters[begin]
            fill = fills.get(letter, PALE)
            cells.append(Cell(left + begin, row, column - begin, 1, letter * (column - begin), fill, False, "left"))
            begin = column
    return cells
