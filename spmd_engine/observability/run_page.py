"""The page of a report: HTML with its style, its script and its numbers in one file."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from math import isfinite
from signal import Signals
from typing import Any

import numpy as np

from spmd_engine.axes import all_positions, parse_axes
from spmd_engine.comm.views import draw_mesh
from spmd_engine.engine.build import composed_layout
from spmd_engine.errors import SpmdError
from spmd_engine.models import Model
from spmd_engine.models.user_code import is_code
from spmd_engine.observability.run_record import WARM_UP, RunRecord
from spmd_engine.pictures import html_table
from spmd_engine.training import TrainConfig
from spmd_engine.training.numbers_by_rank import expanded
from spmd_engine.units import clock_time, readable_bytes

POINTS = 2400  #: most points of a curve of a single run; of several runs, each has its part of them
SMOOTH = 400  #: most points of a smoothed line
NOISE = 0.02  #: least mean distance of a curve from its smoothed line, of its range, for which the line is drawn
MOST_RANKS, MOST_ROWS = 16, 200  #: rows of tables of ranks and of parameters
TITLES = {
    "loss": "Training loss",
    "validation_loss": "Validation loss",
    "grad_norm": "Norm of the gradient",
    "learning_rate": "Learning rate",
    "tokens_per_second": f"Targets per second, without the first {WARM_UP} steps",
    "seconds": f"Seconds of a step, without the first {WARM_UP}",
}

Cells = Sequence[Any]


def page_of(runs: Sequence[RunRecord], refresh: int = 0) -> str:
    """The page of one run, or of several that are compared; reloaded every ``refresh`` seconds, if that is not 0."""
    title = escape(", ".join(run.name for run in runs))
    charts = list(_charts(runs))
    sections = [_summary(runs)]
    if len(runs) > 1:
        sections.append(_differences(runs))
    sections += [_curves(runs, charts), *(_of_run(run, len(runs) > 1) for run in runs)]
    meta = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    data = json.dumps({"charts": charts}, allow_nan=False).replace("<", "\\u003c")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{meta}'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title>'
        f"<style>{_file('report.css')}</style></head><body><header><h1>{title}</h1></header>"
        f'<main>{"".join(sections)}</main><script type="application/json" id="data">{data}</script>'
        f"<script>{_file('report.js')}</script></body></html>\n"
    )


def _file(name: str) -> str:
    return files("spmd_engine.observability").joinpath(name).read_text()


# --- Parts of a page


def _section(heading: str, *content: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>{''.join(content)}</section>"


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def _note(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _text(number: float) -> str:
    """A number with four digits that count."""
    if not isfinite(number):
        return "-"
    return f"{number:,.0f}" if abs(number) >= 10_000 else f"{number:.4g}"


def _time(event: Mapping[str, Any]) -> str:
    return str(event.get("time", "-"))[:19].replace("T", " ")


# --- What is said of all runs: a summary, what differs, and curves


def _summary(runs: Sequence[RunRecord]) -> str:
    facts: dict[str, Callable[[RunRecord], Any]] = {
        "state": lambda run: run.state,
        "began, UTC": lambda run: _time(next((e for e in run.events if e.get("event") == "started"), {})),
        "took": lambda run: clock_time(run.seconds) if run.seconds else "-",
        "model": lambda run: run.config.get("strategy") or _at(run.config, "model", "name"),
        "parameters": lambda run: f"{run.last('opened').get('parameters', 0):,}",
        "data": lambda run: run.last("opened").get("data", "-"),
        "mesh": lambda run: run.mesh or "-",
        "steps": lambda run: (
            f"{int(run.steps[-1]) if len(run.steps) else 0:,} of {_at(run.config, 'training', 'steps')}"
        ),
        "training loss": lambda run: _text(run.final("loss")),
        "validation loss": lambda run: _text(run.final("validation_loss")),
        "seconds of a step, median": lambda run: _text(run.median("seconds")),
        "targets per second, median": lambda run: _text(run.median("tokens_per_second")),
        "starts": lambda run: sum(event.get("event") == "started" for event in run.events) or "-",
        "steps skipped": lambda run: sum(event.get("event") == "skipped" for event in run.events),
    }
    rows = [(name, *(fact(run) for run in runs)) for name, fact in facts.items()]
    return _section(
        "Summary", html_table("The runs at a glance", ["", *(run.name for run in runs)], rows, numbers=False)
    )


def _at(config: Any, *path: str) -> Any:
    for name in path:
        config = config.get(name) if isinstance(config, Mapping) else None
    return "-" if config is None else config


def _differences(runs: Sequence[RunRecord]) -> str:
    """Speed and where the time went, then options and environments that are not the same."""
    first, *others = runs
    longest = max(float(run.split_seconds.sum(1).max()) for run in runs)
    options = _unequal([dict(_flat(run.config)) for run in runs])
    environments = [dict(run.last("started").get("environment") or {}) for run in runs]
    for environment in environments:
        environment.pop("command", None)  # it names options, which are compared above
    here = _unequal([{**e, **_cores(run), **_nodes(run)} for e, run in zip(environments, runs, strict=True)])
    names = ["", *(run.name for run in runs)]
    return _section(
        "What differs",
        "".join(_note(_change(first, run)) for run in others),
        _LEGEND,
        "".join(f"<h3>{escape(run.name)}</h3>{_bars(run, longest)}" for run in runs),
        html_table("Times and communication of a step", names, _measures(runs)),
        html_table("Options", names, options, numbers=False) if options else _note("All options are equal."),
        html_table("Environment", names, here, numbers=False)
        if here
        else _note("The environments are equal, or unknown."),
    )


def _change(first: RunRecord, run: RunRecord) -> str:
    """How a step of the run differs from one of the first run, in words."""
    before, after = first.quartiles("seconds"), run.quartiles("seconds")
    more = after[2] - before[2]
    changes = run.split_seconds.mean(0) - first.split_seconds.mean(0)
    parts = zip(("computing", "communicating", "waiting for other ranks"), changes, strict=True)
    listed = ", ".join(f"{change:+.3g} s {name}" for name, change in parts)
    text = f"A median step of {run.name} takes {more:+.3g} s ({after[2] / before[2]:.3g} times {first.name}): {listed}."
    text += f" Its fastest step takes {after[0] / before[0]:.3g} times as long."
    if before[1] <= after[3] and after[1] <= before[3]:
        text += " The middle halves of the steps' times overlap: the difference may be noise."
    return text


def _nodes(run: RunRecord) -> dict[str, str]:
    """How many nodes the ranks are on: their names differ from job to job."""
    nodes = run.last("started").get("nodes")
    return {"nodes": f"{len(nodes)} ranks on {len(set(nodes))}"} if isinstance(nodes, list) else {}


def _cores(run: RunRecord) -> dict[str, str]:
    """The cores of each rank, and which ranks share one."""
    ranks = [tuple(cores) for cores in run.predicted.get("cores_by_rank") or ()]
    text = "; ".join(f"rank {rank}: {','.join(map(str, cores))}" for rank, cores in enumerate(ranks[:MOST_RANKS]))
    alone = [cores[0] for cores in ranks if len(cores) == 1]
    shared = sorted({core for core in alone if alone.count(core) > 1})
    return {"cores by rank": text + (f" (several ranks on core {shared[0]})" if shared else "")} if text else {}


def _measures(runs: Sequence[RunRecord]) -> list[Cells]:
    """Numbers of a step, a column a run."""
    spreads = [run.quartiles("seconds") for run in runs]
    rows: list[Cells] = [
        (f"seconds, {name}", *(_text(float(spread[place])) for spread in spreads))
        for place, name in enumerate(("least", "first quartile", "median", "third quartile", "largest"))
    ]
    splits = [run.split_seconds.mean(0) for run in runs]
    for place, name in enumerate(("computing", "communicating", "waiting for other ranks")):
        rows.append((f"seconds {name}, mean over ranks", *(_text(float(split[place])) for split in splits)))
    rows.append(("processor seconds, mean over ranks", *(_text(_mean(run.cpu_seconds)) for run in runs)))
    rows.append(("rank that computes longest", *(_slowest(run) for run in runs)))
    traffic = [run.predicted.get("traffic") or [] for run in runs]
    for key, name in ("calls", "collective calls of all ranks"), ("bytes", "bytes sent by all ranks"):
        rows.append((name, *(f"{sum(line[key] for line in lines):,.0f}" if lines else "-" for lines in traffic)))
    peaks = [run.predicted.get("peak_bytes") for run in runs]
    rows.append(("predicted peak of a rank's arrays", *(readable_bytes(peak) if peak else "-" for peak in peaks)))
    return rows


def _mean(numbers: np.ndarray) -> float:
    return float(numbers.mean()) if len(numbers) else np.nan


def _slowest(run: RunRecord) -> str:
    """The rank that computes longest, if it takes at least a tenth longer than the median of the others."""
    computing = run.split_seconds[:, 0]
    slowest = int(computing.argmax())
    others = np.delete(computing, slowest)
    if not len(others) or computing[slowest] < 1.1 * np.median(others):
        return "all alike"
    return f"rank {slowest}: {computing[slowest] / np.median(others):.2f} times the median of the others"


def _flat(config: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(config, Mapping) and config:
        for key, value in config.items():
            yield from _flat(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, config


def _unequal(runs: Sequence[Mapping[str, Any]]) -> list[Cells]:
    names = dict.fromkeys(name for run in runs for name in run)
    rows = [(name, *(run.get(name, "-") for run in runs)) for name in names]
    return [row for row in rows if any(value != row[1] for value in row[2:])]


def _curves(runs: Sequence[RunRecord], charts: Sequence[Mapping[str, Any]]) -> str:
    most = max((len(run.steps) for run in runs), default=0)
    shown = POINTS // len(runs)
    note = (
        "Drag over a part of a curve to enlarge it in all charts; a double click or Escape shows all. With the keys, "
        "arrows move along the steps, and + and - change the range."
    )
    if most > shown:
        note += f" Of {most:,} steps, the least and the largest value of each of {shown // 2:,} intervals are drawn."
    figures = "".join(
        f'<figure class="chart" data-chart="{number}"><figcaption>{escape(chart["title"])}</figcaption>'
        f'<p class="summary">{escape(_in_words(chart))}</p></figure>'
        for number, chart in enumerate(charts)
    )
    return _section("Curves", _note(note), f'<div class="charts">{figures}</div>')


def _in_words(chart: Mapping[str, Any]) -> str:
    texts = []
    for curve in chart["curves"]:
        x, y = curve["x"], curve["y"]
        least = min(range(len(y)), key=y.__getitem__)
        ends = f"from {_text(y[0])} at step {x[0]} to {_text(y[-1])} at step {x[-1]}"
        texts.append(f"{curve['name']}: {ends}, least {_text(y[least])} at step {x[least]}.")
    return " ".join(texts)


def _charts(runs: Sequence[RunRecord]) -> Iterator[dict[str, Any]]:
    for name in dict.fromkeys(name for run in runs for name in run.series):
        curves = []
        for number, run in enumerate(runs):
            y = run.series.get(name, np.empty(0))
            seen = np.isfinite(y)
            if name in ("seconds", "tokens_per_second") and len(y) > WARM_UP:
                seen[:WARM_UP] = False
            x, y = run.steps[seen], y[seen]
            first = run.last("evaluated").get(name) if name.startswith("validation_") else None
            if isinstance(first, float) and isfinite(first):  # before the first step, which has no line
                x, y = np.append(0, x), np.append(first, y)
            if len(x):
                smooth = _smoothed(x, y)
                curve = {"name": run.name, "run": number, **_points(*_thinned(x, y, POINTS // len(runs)))}
                curves.append(curve | ({"smooth": _points(*smooth)} if smooth else {}))
        if curves:
            yield {"title": TITLES.get(name, name.replace("_", " ").capitalize()), "curves": curves}


def _points(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    return {"x": x.tolist(), "y": [float(f"{value:.6g}") for value in y]}


def _smoothed(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The means over some neighbours, at most ``SMOOTH`` points; None for a curve that is smooth, or short."""
    half = len(x) // 50
    if not half:
        return None
    sums = np.cumsum(np.append(0.0, y))
    first, stop = (np.clip(np.arange(len(x)) + shift, 0, len(x)) for shift in (-half, half + 1))
    means = (sums[stop] - sums[first]) / (stop - first)
    if np.sqrt(np.mean((y - means) ** 2)) < NOISE * np.ptp(y):
        return None
    places = np.unique(np.linspace(0, len(x) - 1, min(len(x), SMOOTH)).astype(int))
    return x[places], means[places]


def _thinned(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """At most ``most`` points: the least and the largest of each of equally many neighbours."""
    if len(x) <= most:
        return x, y
    starts = np.linspace(0, len(x), most // 2, endpoint=False).astype(int)
    parts = np.split(y, starts[1:])
    kept = {
        start + place
        for start, part in zip(starts.tolist(), parts, strict=True)
        for place in (part.argmin(), part.argmax())
    }
    order = np.array(sorted(kept | {0, len(x) - 1}))
    return x[order], y[order]


# --- What is said of one run


def _of_run(run: RunRecord, named: bool) -> str:
    parts = _time_of_step, _memory, _traffic, _sharding, _events, _sample, _data, _facts
    heading = f"<h2>{escape(run.name)}</h2>" if named else ""
    return f"<article>{heading}{''.join(part(run) for part in parts)}</article>"


_PARTS = {"computing": "computing", "communicating": "communicating (not hidden)", "idle": "waiting for other ranks"}
_LEGEND = f'<p class="legend">{"".join(f"<span class={name}></span> {text}" for name, text in _PARTS.items())}</p>'


def _order(run: RunRecord) -> np.ndarray:
    """The ranks that are listed: those that compute longest, first."""
    return np.argsort(-run.split_seconds[:, 0], kind="stable")[:MOST_RANKS]


def _bars(run: RunRecord, longest: float) -> str:
    """A bar a rank, of its seconds by part; ``longest`` seconds fill the width."""
    bars = []
    for rank in _order(run):
        widths = "".join(
            f'<span class="{name}" style="width:{100 * part / (longest or 1):.2f}%"></span>'
            for name, part in zip(_PARTS, run.split_seconds[rank], strict=True)
        )
        bars.append(f'<div class="bar"><b>rank {rank}</b><i>{widths}</i></div>')
    return f'<div aria-hidden="true">{"".join(bars)}</div>'


def _time_of_step(run: RunRecord) -> str:
    split, processor = run.split_seconds, run.cpu_seconds
    rows = [
        (f"rank {rank}", *map(_text, split[rank]), _text(float(processor[rank]) if len(processor) else np.nan))
        for rank in _order(run)
    ]
    head = ["", "computing", "communicating", "waiting", "processor seconds"]
    what = f"Seconds of a median step after the first {WARM_UP}; ranks that compute longest first"
    more = f"; {len(split) - len(rows)} more ranks are not listed" if len(split) > len(rows) else ""
    note = (
        "Computing is all time outside of collectives. If processor seconds are far fewer, another program had the "
        "core, or data were read; a rank that waits may use its core or sleep."
    )
    if crossed := run.crossings:
        note += f" In the last steps: {'; '.join(map(str, crossed))}."
    return _section(
        "Where the time of a step went",
        _LEGEND,
        _bars(run, float(split.sum(1).max())),
        html_table(what + more, head, rows),
        _note(note),
    )


def _memory(run: RunRecord) -> str:
    peaks, resident = run.predicted.get("peak_bytes_by_rank"), run.predicted.get("resident_bytes_by_rank")
    if not peaks or not resident:
        return ""
    arrays, all_of_it = expanded(peaks), expanded(resident)
    ranks = sorted(map(int, resident["of"])) if isinstance(resident, dict) else range(len(resident))
    rows = [
        (f"rank {rank}", *map(readable_bytes, (arrays[rank], all_of_it[rank], all_of_it[rank] - arrays[rank])))
        for rank in ranks
    ]
    head = [
        "",
        "arrays, predicted peak",
        "resident after step 1, measured",
        "difference: Python, libraries, shared memory",
    ]
    return _section(
        "Memory of each rank", html_table("Predicted before step 1, and measured after it", head, rows[:MOST_ROWS])
    )


def _traffic(run: RunRecord) -> str:
    lines = run.predicted.get("traffic")
    if not lines:
        return ""
    rows = [
        (f"{line['operation']} over {line['axes'] or 'all ranks'}",)
        + tuple(f"{line[name]:,.0f}" for name in ("predicted_calls", "calls", "predicted_bytes", "bytes"))
        for line in lines
    ]
    head = ["", "calls, predicted", "calls, measured", "bytes sent, predicted", "bytes sent, measured"]
    count = run.predicted.get("differences", 0)
    verdict = "All calls and bytes are as predicted." if not count else f"{count} lines of the ledger differ."
    return _section("Communication of a step", _note(verdict), html_table("Step 1, all ranks together", head, rows))


def _sharding(run: RunRecord) -> str:
    """The mesh, the schedule, and the shardings of parameters; why not, where they cannot be told."""
    mesh = run.mesh
    try:
        axes = parse_axes(str(mesh)) if mesh else {"data": 1}
        content = [draw_mesh(axes)._repr_html_()]
        if not run.config.get("strategy"):
            job = TrainConfig.from_json(dict(run.config), run.name)
            composition = job.composition.changed(mesh=axes)
            plan, stages = composition.schedule_on(axes), axes.get("pipe", 1)
            if stages > 1:
                content.append(plan.picture(stages, job.data.micro_batches)._repr_html_())
            if is_code(job.model.name):
                content.append(_note("The model is code, which a report does not run: its parameters are not shown."))
            else:
                model = job.model.build(composition)
                content.append(_details("Shardings of parameters", _parameters(model, axes, composition)))
    except (SpmdError, ValueError) as error:
        content = [_note(f"Not shown: {error}")]
    return _section("Mesh and sharding", *content)


def _parameters(model: Model, axes: Mapping[str, int], composition: Any) -> str:
    place = all_positions(axes)[0]
    layout = composed_layout(model, place, composition)
    rows = []
    for name, (parameter, shape) in model.parameters():
        spec = layout.spec(parameter.dims)
        rows.append((name, str(spec), "x".join(map(str, shape)), "x".join(map(str, spec.local_shape(shape, place)))))
    more = f"; {len(rows) - MOST_ROWS} more are not listed" if len(rows) > MOST_ROWS else ""
    head = ["parameter", "sharding", "whole shape", "on the first rank"]
    return html_table(f"Parameters{more}", head, rows[:MOST_ROWS], numbers=False)


def _events(run: RunRecord) -> str:
    rows = []
    for event in run.events:
        kind, step = event.get("event"), event.get("step", "")
        if kind in ("opened", "saved"):
            texts = event.get("notices", [])
        elif kind == "stopped":
            texts = [f"by {_signal(event.get('signal'))}, after a save"]
        elif kind == "started":
            texts = [f"mesh {event.get('mesh')}, on {len(set(event.get('nodes') or [0]))} node(s)"]
        else:
            texts = [event.get(name) for name in ("text", "why", "after") if event.get(name)]
        if kind in ("started", "stopped", "finished", "closed") or texts:
            rows.append((_time(event), kind, step, "; ".join(map(str, texts))))
    if not rows:
        return ""
    saved = sum(event.get("event") == "saved" for event in run.events)
    caption = f"Starts, ends, warnings and skipped steps (UTC); checkpoints saved: {saved}"
    return _section("Events", html_table(caption, ["time", "event", "step", "what"], rows[-MOST_ROWS:], numbers=False))


def _signal(number: Any) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"


def _sample(run: RunRecord) -> str:
    sample = run.last("finished").get("sample")
    return _section("A sample", f"<pre>{escape(str(sample))}</pre>") if sample else ""


def _data(run: RunRecord) -> str:
    if not run.picture:
        return ""
    source = f"data:image/png;base64,{b64encode(run.picture).decode()}"
    text = "The first images of each class, as the model gets them"
    return _section(
        "Data", f'<figure class="wide"><img src="{source}" alt="{text}"><figcaption>{text}</figcaption></figure>'
    )


def _facts(run: RunRecord) -> str:
    environment = run.last("started").get("environment") or {}
    digests = [
        ("data, SHA-256", _at(run.config, "corpus", "sha256")),
        ("model's code, SHA-256", _at(run.config, "model", "code")),
    ]
    digests += [(f"newest checkpoint, {name}", value) for name, value in run.checkpoint.items()]
    options = [(name, value) for name, value in _flat(run.config)]
    parts = [
        html_table("Digests", ["", ""], digests, numbers=False),
        html_table("Environment of rank 0", ["", ""], list(environment.items()), numbers=False) if environment else "",
        _details("All options", html_table("config.json", ["option", "value"], options, numbers=False)),
    ]
    return _section("Configuration and environment", *parts)
