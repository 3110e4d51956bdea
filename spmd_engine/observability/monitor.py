"""What ``monitor`` shows: a run in the terminal, by its folder alone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.text import Text

from spmd_engine.axes import all_positions, parse_axes
from spmd_engine.comm.mesh import ranks_by_position
from spmd_engine.engine import ParallelConfig
from spmd_engine.errors import SpmdError, UsageError
from spmd_engine.foreign import parse_json, read_bytes, reading
from spmd_engine.models.user_code import is_code
from spmd_engine.observability.memory import elements_per_rank
from spmd_engine.observability.progress import bar
from spmd_engine.observability.run_record import RunReader, RunRecord
from spmd_engine.pictures import WIDEST
from spmd_engine.runtime.watchdog import FILE as HANG
from spmd_engine.training import TrainConfig
from spmd_engine.training.numbers_by_rank import expanded
from spmd_engine.training.observers import ActivityFile
from spmd_engine.units import clock_time, readable_seconds

SILENT = 90.0  #: seconds without a sign of life: a network file system may show a file a minute late
SLOW = 60.0  #: seconds, and ten times as long as a recent step: then a step is late
MOST_RANKS = 16  #: rows of ranks, where the screen has no end
CURVE_LINES = 8


class Watched:
    """A run's folder, which is read again with each ``look``."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._reader = folder, RunReader(folder)
        self._shards: tuple[Any, list[tuple[str, str]]] = None, []
        self._heard: Any = None  # signs of life of the run
        self._heard_at = 0.0  # by this host's monotonic clock: the clocks of two hosts may differ
        self._seen: Any = None

    def look(self) -> bool:
        """Read the folder; returns whether a step, an event or a trouble is new. Raises UsageError if it has no run."""
        folder = self._folder
        with reading(f"{folder} cannot be read"):
            self._run = run = self._reader.read()
            self._activity = _activity(folder / ActivityFile.NAME)
            if (heard := (run.steps[-1:].tolist(), self._activity)) != self._heard:
                self._heard, self._heard_at = heard, time.monotonic()
            self.state, self.trouble = self._judge()
        seen = len(run.events), run.steps[-1:].tolist(), self.state, bool(self.trouble)
        changed, self._seen = seen != self._seen, seen
        return changed

    @property
    def goes_on(self) -> bool:
        return self.state in ("running", "silent")

    @property
    def failed(self) -> bool:
        return self.state in ("killed", "ended by an error")

    def _judge(self) -> tuple[str, str]:
        """The state of the run, and what is wrong with it in a line, or nothing."""
        state = self._run.state
        if self._run.owner is None:
            return "ended" if state == "unknown" else state, ""
        process, host = self._run.owner
        if state == "killed":
            hint = f"continue with: python -m spmd_engine train --resume --run {self._folder}"
            if not self._run.checkpoint:
                hint = "it has saved no checkpoint"
            return state, f"rank 0 (process {process}) is gone; its last step is {self._step}; {hint}"
        if (quiet := time.monotonic() - self._heard_at) > SILENT:
            return "silent", (
                f"no sign of life for {clock_time(quiet)} from process {process} on {host}: it was killed, its node is "
                "down, or this host sees its files late"
            )
        typical = self._seconds()
        longest = max((_number(rank.get("phase_seconds")) for rank in self._activities.values()), default=0.0)
        if longest > max(SLOW, 10 * typical):
            where = self._folder / HANG
            more = f"; {where} says which ranks wait for which" if where.exists() else ""
            return "running", (
                f"no step for {clock_time(longest)}, and recent ones took {readable_seconds(typical)}{more}"
            )
        return "running", ""

    @property
    def _activities(self) -> dict[int, Mapping[str, Any]]:
        """What ranks do, by rank; only those of rank 0's node."""
        ranks = self._activity.get("ranks")
        return {record["rank"]: record for record in ranks if "rank" in record} if isinstance(ranks, list) else {}

    # --- Numbers

    @property
    def _step(self) -> int:
        return int(self._run.steps[-1]) if len(self._run.steps) else 0

    def _seconds(self) -> float:
        """Seconds of a recent step, the mean; 0 before the first."""
        seconds = self._run.series["seconds"][-len(self._run.recent) :] if self._run.recent else np.zeros(1)
        return float(np.nan_to_num(seconds).mean())

    @property
    def _stop(self) -> int:
        stop = self._run.last("started").get("stop")
        return stop if isinstance(stop, int) and stop > 0 else max(self._step, 1)

    def _left(self) -> float | None:
        """Seconds that the run still takes, if it goes on as lately: the recent steps, with as much between the steps
        as since its start; None before it has made two steps."""
        since = self._run.steps > int(self._run.last("started").get("step", 0))
        if since.sum() < 2:
            return None
        in_steps = np.nansum(self._run.series["seconds"][since])
        between = max(1.0, _number(self._activity.get("seconds")) / in_steps) if in_steps else 1.0
        return self._seconds() * between * max(0, self._stop - self._step)

    # --- The frame

    def frame(self, console: Console, lines: int | None = None) -> Group:
        """Everything, in at most so many lines if there is a limit. Raises UsageError for a folder that is damaged."""
        with reading(f"{self._folder}: what is there cannot be shown"):
            return self._frame(console, lines)

    def _frame(self, console: Console, lines: int | None) -> Group:
        run = self._run
        colour = {"running": "green", "finished": "green", "silent": "yellow", "stopped by a signal": "yellow"}
        started = run.last("started")
        model = run.config.get("strategy") or (run.config.get("model") or {}).get("name")
        facts = [f"{model}, mesh {run.mesh or '-'} on {len(set(run.nodes))} node(s)"]
        if started.get("time"):
            facts.append(f"started {_shown_time(started['time'])}")
        if self.goes_on and run.owner and run.owner[1] != os.uname().nodename:
            facts.append(f"last heard from {run.owner[1]} at {_shown_time(self._activity.get('time'))}")
        parts: list[Any] = [
            Text.assemble((_printable(run.name), "bold"), "  ", (self.state, colour.get(self.state, "bold red"))),
            Text(_printable(", ".join(facts))),
            self._progress(console),
            Text(self._losses()),
        ]
        if self.trouble:
            parts.append(Text(_printable(self.trouble), style="bold red" if self.failed else "yellow"))
        parts += [_line(text, "yellow") for text in self._warnings()]
        ranks = self._ranks()
        shown, height = min(len(ranks), MOST_RANKS), CURVE_LINES
        if lines is not None:
            free = lines - sum(len(console.render_lines(part)) for part in parts) - 2  # heads of curves and of ranks
            shown = max(1, min(len(ranks), free - CURVE_LINES - 1))
            height = min(2 * CURVE_LINES, free - shown - (shown < len(ranks)))
        if height >= 3:
            parts += curves(run, min(console.width, WIDEST), height, console.encoding)
        parts += _table(ranks, console.width, shown)
        return Group(*parts)

    def _progress(self, console: Console) -> Text:
        step, stop = self._step, self._stop
        before, after = f"step {step:,} of {stop:,}  ", f"  {min(100, 100 * step // stop)}%"
        if self.goes_on and (left := self._left()) is not None:
            after += f"  {clock_time(left)} left"
        length = max(0, min(50, console.width - len(before) - len(after)))
        return Text.assemble(before, (bar(step / stop, length, console.encoding), "green"), after)

    def _losses(self) -> str:
        run = self._run
        texts = [f"loss {run.final('loss'):.4g}"]
        if np.isfinite(run.final("validation_loss")):
            at = run.steps[np.isfinite(run.series["validation_loss"])][-1]
            texts.append(f"validation loss {run.final('validation_loss'):.4g} (step {at:,})")
        if run.recent:
            speed = run.series["tokens_per_second"][-len(run.recent) :]
            texts.append(f"{np.nan_to_num(speed).mean():,.0f} targets/s")
            texts.append(f"{readable_seconds(self._seconds())} a step")
        return "  ".join(texts) if len(run.steps) else "no step is done yet"

    def _warnings(self) -> list[str]:
        """The last warnings since the start, a line each."""
        events = self._run.events
        starts = [place for place, event in enumerate(events) if event.get("event") == "started"]
        texts = {"warning": "text", "skipped": "why", "not saved": "why"}
        lines = [
            f"{_shown_time(event.get('time'))} {event['event']}: {event.get(texts[event['event']])}"
            for event in events[starts[-1] if starts else 0 :]
            if event.get("event") in texts
        ]
        return [_printable(line.splitlines()[0]) for line in lines[-3:]]

    # --- Ranks

    def _ranks(self) -> list[dict[str, str]]:
        """A row for each rank; those that wait least, for which others wait, come first if there are many."""
        run, activities = self._run, self._activities
        nodes, on_mesh = run.nodes, run.ranks_on_mesh
        waits, memory = np.full((2, len(nodes)), np.nan)
        waits[on_mesh] = _by_rank(run.recent, "shares", (len(on_mesh), 3))[:, 2]
        memory[on_mesh] = _by_rank(run.recent[-1:], "private_bytes", (len(on_mesh),))
        shards = dict(zip(on_mesh, self._shards_held(len(on_mesh)), strict=True))
        crossed = run.crossings if self.goes_on else []
        rows = []
        for rank, node in enumerate(nodes):
            step, doing = _what_it_does(activities[rank], self._step) if rank in activities else (self._step, "-")
            if not self.goes_on and self.state != "killed":
                doing = "ended"
            elif rank not in on_mesh:
                doing = "idle, outside the mesh"
            elif rank not in activities and node != nodes[0]:
                doing = f"on {node}"
            row = {
                "rank": str(rank),
                "step": f"{step:,}",
                "activity": doing,
                "memory": f"{memory[rank] / (1 << 20):,.0f} MiB" if memory[rank] > 0 else "-",
                "waiting": f"{100 * waits[rank]:.0f}%" if waits[rank] >= 0 else "-",
                "weights": shards[rank][0] if rank in shards else "-",
                "mesh": shards[rank][1] if rank in shards else "-",
            }
            if crossed:
                own = (f"{it.name.replace('_', ' ')} {it.ranks[rank]:.2f}" for it in crossed if rank in it.ranks)
                row["above threshold"] = ", ".join(own)
            rows.append({name: _printable(text) for name, text in row.items()})
        return [rows[rank] for rank in np.argsort(waits, kind="stable")] if len(rows) > MOST_RANKS else rows

    def _shards_held(self, ranks: int) -> list[tuple[str, str]]:
        """The part of all parameters that each rank stores, and its coordinates; found once for each mesh."""
        mesh, start = self._run.mesh, self._run.last("started").get("time")
        if self._shards[0] != (key := (start, mesh, ranks)):
            parts, coordinates, order = ["-"] * ranks, ["-"] * ranks, range(ranks)
            with suppress(SpmdError, ValueError):  # a mesh that cannot be read; a model that is code
                axes = parse_axes(mesh)
                places = all_positions(axes)
                if len(places) == ranks:
                    coordinates = [" ".join(f"{axis}={n}" for axis, n in place.coordinates.items()) for place in places]
                    nodes = [self._run.nodes[rank] for rank in self._run.ranks_on_mesh]
                    composition = ParallelConfig.from_json(self._run.config.get("composition") or {})
                    order = ranks_by_position(nodes, composition.order)
                    parts = _parts_held(self._run, axes)
            by_position = list(zip(parts, coordinates, strict=True))
            self._shards = key, [by_position[position] for position in np.argsort(order)]
        return self._shards[1]


LEFT = ("activity", "mesh", "above threshold")  #: columns that are shortened where there is no room
LEAST = 5  #: characters that such a column keeps


def _table(ranks: Sequence[Mapping[str, str]], width: int, most: int) -> list[Text]:
    """The rows of at most so many ranks."""
    rows = [{name: name for name in ranks[0]}, *ranks[:most]]
    widths = {name: max(len(row[name]) for row in rows) for name in ranks[0]}
    for _ in range(sum(widths.values()) + 2 * (len(widths) - 1) - width):
        longest = max((name for name in LEFT if name in widths), key=lambda name: widths[name])
        widths[longest] = max(widths[longest] - 1, LEAST)

    def cell(name: str, text: str) -> str:
        short = text if len(text) <= widths[name] else text[: widths[name] - 1] + "…"
        return short.ljust(widths[name]) if name in LEFT else short.rjust(widths[name])

    lines = [_line("  ".join(map(cell, row, row.values())).rstrip(), "") for row in rows]
    lines[0].stylize("bold")
    if len(ranks) > most:
        longer = ", which wait longer" if len(ranks) > MOST_RANKS else ""
        lines.append(_line(f"{len(ranks) - most} more ranks{longer}", "dim"))
    return lines


def _parts_held(run: RunRecord, axes: Mapping[str, int]) -> list[str]:
    """The part of all parameters that each rank stores. Raises ValueError if it is not known without running code."""
    job = TrainConfig.from_json(dict(run.config), run.name)
    if job.strategy or is_code(job.model.name):
        raise ValueError
    composition = job.composition.changed(mesh=dict(axes))
    model = job.model.build(composition)
    sharded = composition.storage.stage(axes) >= 3
    counts = [elements.owned if sharded else elements.whole for elements in elements_per_rank(model, axes, composition)]
    return [f"{100 * count / max(1, model.parameter_count):.3g}%" for count in counts]


def _activity(path: Path) -> Mapping[str, Any]:
    """The content of the file; empty if there is none, or it is damaged."""
    with suppress(OSError, UsageError, ValueError, RecursionError):
        if isinstance(content := parse_json(read_bytes(path)), dict):
            return content
    return {}


def _what_it_does(record: Mapping[str, Any], done: int) -> tuple[int, str]:
    """The step in which a rank is, and what it does there."""
    phase, _, number = str(record.get("phase", "")).rpartition(" ")
    phase, step = (phase, int(number)) if number.isdecimal() else (f"{phase} {number}".strip(), done)
    phase = phase.removesuffix("step").removesuffix(" of ").rstrip(", ")
    if record.get("condition"):
        return step, str(record["condition"])
    if not record.get("call"):
        return step, phase or "computing"
    seconds = _number(record.get("call_seconds"))
    return step, f"{record['call']}{f' for {seconds:.0f} s' if seconds >= 1 else ''}"


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _by_rank(lines: Iterable[Mapping[str, Any]], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float64[rank, ...]: the mean of numbers by rank over the lines that have them; NaN if none has."""
    rows = []
    for line in lines:
        with suppress(TypeError, ValueError):
            numbers = np.array(expanded(line.get(name)), float)
            if numbers.shape == shape:
                rows.append(numbers)
    return np.mean(rows, axis=0) if rows else np.full(shape, np.nan)


def _shown_time(text: Any) -> str:
    """A time of the run's files, in this host's time zone."""
    try:
        return f"{datetime.fromisoformat(str(text)).astimezone():%H:%M:%S}"
    except (ValueError, OverflowError):
        return "-"


def _line(text: str, style: str) -> Text:
    """A text that a narrow terminal does not fold."""
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _printable(text: str) -> str:
    """The text without characters that could control the terminal."""
    return "".join(character if character.isprintable() else " " for character in text)


# --- Curves as text


DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])  #: Braille bits, by row and column


def curves(run: RunRecord, width: int, height: int, encoding: str = "utf-8") -> Iterable[Text]:
    """Lines with the curves of loss and validation loss, in ``height`` lines and one of the axis."""
    unicode = encoding.lower().startswith("utf")
    loss, validation = (_finite(run, name) for name in ("loss", "validation_loss"))
    values = np.concatenate([loss[1], validation[1]])
    if not len(loss[0]):
        return
    low, high = float(values.min()), float(values.max())
    labels = [f"{high:.4g}", *[""] * (height - 2), f"{low:.4g}"]
    margin = max(map(len, labels)) + 1
    columns = max(10, width - margin - 1)
    first, last = int(loss[0][0]), int(loss[0][-1])
    span, scale = max(1, last - first), (high - low) or 1.0

    def place(x: np.ndarray, y: np.ndarray, wide: int, high_: int) -> tuple[np.ndarray, np.ndarray]:
        across = ((x - first) / span * (wide - 1)).round().astype(int).clip(0, wide - 1)
        return across, ((high - y) / scale * (high_ - 1)).round().astype(int)

    across, down = place(*loss, 2 * columns, 4 * height)
    x = first + span * np.arange(2 * columns) / (2 * columns - 1)  # a line between the steps ...
    top = place(x, np.interp(x, *loss), 2 * columns, 4 * height)[1]
    bottom = top.copy()
    np.minimum.at(top, across, down)  # ... which touches each of them ...
    np.maximum.at(bottom, across, down)
    bottom[:-1] = np.maximum(bottom[:-1], top[1:] - 1)  # ... and has no gaps
    top[:-1] = np.minimum(top[:-1], bottom[1:] + 1)
    rows = np.arange(4 * height)[:, None]
    cells = (((rows >= top) & (rows <= bottom)).reshape(height, 4, columns, 2) * DOTS[None, :, None, :]).sum(
        axis=(1, 3)
    )
    points = set(zip(*(cells.tolist() for cells in place(*validation, columns, height)), strict=True))
    for row in range(height):
        line = _line(f"{labels[row]:>{margin - 1}} ", "dim")
        for column, cell in enumerate(cells[row].tolist()):
            if (column, row) in points:
                line.append("●" if unicode else "o", "bold magenta")
            else:
                line.append((chr(0x2800 + cell) if unicode else ".") if cell else " ", "cyan")
        line.rstrip()
        yield line
    ends = f"{first:,}", f"{last:,}"
    legend = f"step: loss {'⣿' if unicode else '.'}" + (f", validation {'●' if unicode else 'o'}" if points else "")
    yield _line(" " * margin + ends[0] + legend.center(columns - sum(map(len, ends))) + ends[1], "dim")


def _finite(run: RunRecord, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps at which a series has numbers, and these."""
    seen = np.isfinite(run.series[name])
    return run.steps[seen], run.series[name][seen]
