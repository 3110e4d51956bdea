"""``monitor``: a run in the terminal, by its folder alone."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from spmd_engine.axes import all_positions, parse_axes
from spmd_engine.checkpoints.format.folder import lock_owner
from spmd_engine.cli.progress import bar, clock_time
from spmd_engine.cli.report.run_record import RunReader, RunRecord
from spmd_engine.cli.show.memory import elements_per_rank
from spmd_engine.errors import SpmdError
from spmd_engine.foreign import reading
from spmd_engine.runtime.launchers import launcher_rank
from spmd_engine.runtime.watchdog import FILE as HANG
from spmd_engine.training.run import ActivityFile, MetricsFile
from spmd_engine.training.run_job import run_folder
from spmd_engine.training.train_config import TrainConfig
from spmd_engine.units import readable_seconds

EVERY = 1.0  #: seconds between two looks at the folder
SILENT = 90.0  #: seconds without a sign of life: a network file system may show a file a minute late
SLOW = 10  #: times as long as a recent step, and ``SILENT``: then a step is late
MOST_RANKS = 16  #: rows of ranks, where the screen has no end
CURVE_LINES = 8


@click.command(short_help="A run in the terminal, while it goes on.")
@click.argument("run", metavar="RUN")
@click.option("--once", is_flag=True, help="Print what is known now, and end.")
def monitor(run: str, once: bool) -> None:
    """Show a run until it ends: progress with the time left, curves of loss, and what each rank does and holds.

    RUN is a folder, or its name under runs/. Only files of this folder are read, so the run may be on other nodes.
    Without a terminal, the same is printed whenever a step is done. The exit code is 1 if the run has ended by an error
    or was killed. Ctrl-C ends the monitor, not the run.

    \b
      python -m spmd_engine monitor gpt-nano-1
      python -m spmd_engine monitor runs/gpt-nano-1 --once
    """
    if launcher_rank() > 0:
        return
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names that the terminal cannot show
    folder, console = run_folder(run), Console(highlight=False)
    watched = Watched(folder)
    watched.look()
    if not once and watched.goes_on and console.is_terminal and not console.is_dumb_terminal:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while watched.goes_on:
                live.update(watched.frame(console, console.height), refresh=True)
                time.sleep(EVERY)
                watched.look()
    console.print(watched.frame(console))
    while watched.goes_on and not once:
        time.sleep(EVERY)
        if watched.look():
            console.print()
            console.print(watched.frame(console))
    if watched.failed:
        raise SystemExit(1)


class Watched:
    """A run's folder, which is read again with each ``look``."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._reader = folder, RunReader(folder)
        self._shards: tuple[Any, list[tuple[str, str]]] = None, []
        self._seen: Any = None

    def look(self) -> bool:
        """Read what is new. Returns whether a step or an event is. Raises UsageError for a folder that is no run's."""
        folder = self._folder
        with reading(f"{folder} cannot be read"):
            self._run = run = self._reader.read()
            self._activity = _activity(folder / ActivityFile.NAME)
            self._owner, self._now = lock_owner(folder), time.time()
            self._step_at = os.stat(folder / MetricsFile.NAME).st_mtime
        self._alive = max(self._step_at, self._activity[0])
        self.state, self.trouble = self._judge()
        seen = len(run.events), run.steps[-1:].tolist(), self.state
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
        if self._owner is None:
            state = self._run.state
            return ("ended by an error" if state == "running" else "ended" if state == "unknown" else state), ""
        process, host = self._owner
        if host == os.uname().nodename and not os.path.exists(f"/proc/{process}"):
            folder = self._folder
            hint = f"continue with: python -m spmd_engine train --resume --run {folder}"
            if not self._run.checkpoint:
                hint = "it has saved no checkpoint"
            return "killed", f"rank 0, process {process}, is gone without a word after step {self._step}; {hint}"
        quiet, step_age = self._now - self._alive, self._now - self._step_at
        if quiet > SILENT:
            return "silent", (
                f"no sign of life for {clock_time(quiet)} from process {process} on {host}: it was killed, its node is "
                "down, or this host sees its files late"
            )
        typical = self._seconds()
        if step_age > max(SILENT, SLOW * typical):
            where = self._folder / HANG
            more = f"; {where} says which ranks wait for which" if where.exists() else ""
            return "running", (
                f"no step for {clock_time(step_age)}, and recent ones took {readable_seconds(typical)}{more}"
            )
        return "running", ""

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
        started = self._run.last("started")
        since = self._run.steps > int(started.get("step", 0))
        if since.sum() < 2 or (began := _seconds_of(started.get("time"))) is None:
            return None
        in_steps = np.nansum(self._run.series["seconds"][since])
        between = max(1.0, (self._step_at - began) / in_steps) if in_steps else 1.0
        return self._seconds() * between * (self._stop - self._step)

    # --- The frame

    def frame(self, console: Console, lines: int | None = None) -> Group:
        """Everything, in at most so many lines if there is a limit."""
        run, encoding = self._run, console.encoding
        colour = {"running": "green", "finished": "green", "silent": "yellow", "stopped by a signal": "yellow"}
        started = run.last("started")
        model = run.config.get("strategy") or (run.config.get("model") or {}).get("name")
        facts = [f"{model}, mesh {started.get('mesh', '-')} on {len(set(started.get('nodes') or [0]))} node(s)"]
        if started.get("time"):
            facts.append(f"started {_shown_time(started['time'])}")
        parts: list[Any] = [
            Text.assemble((_printable(run.name), "bold"), "  ", (self.state, colour.get(self.state, "bold red"))),
            Text(_printable(", ".join(facts))),
            self._progress(console),
            Text(self._losses()),
        ]
        if self.trouble:
            parts.append(Text(_printable(self.trouble), style="bold red" if self.failed else "yellow"))
        parts += [Text(line, style="yellow") for line in self._warnings()]
        used = sum(len(console.render_lines(part, pad=False)) for part in parts)
        ranks = self._ranks()
        room = MOST_RANKS if lines is None else max(1, lines - used - 4 - CURVE_LINES - 2)
        height = CURVE_LINES if lines is None else min(16, lines - used - 4 - min(len(ranks), room))
        if height >= 3:
            parts += list(curves(run, console.width, height, encoding))
        parts += _table(ranks, console.width, room)
        return Group(*parts)

    def _progress(self, console: Console) -> Text:
        step, stop = self._step, self._stop
        before, after = f"step {step:,} of {stop:,}  ", f"  {100 * step // stop}%"
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
        told = {"warning": "text", "skipped": "why", "not saved": "why"}
        found = [
            f"{_shown_time(event.get('time'))} {event['event']}: {event.get(told[event['event']])}"
            for event in events[starts[-1] if starts else 0 :]
            if event.get("event") in told
        ]
        return [_printable(line.splitlines()[0]) for line in found[-3:]]

    # --- Ranks

    def _ranks(self) -> list[dict[str, str]]:
        """A row for each rank; those that wait least, for which others wait, come first if there are many."""
        run, (_, activities) = self._run, self._activity
        nodes = list(run.last("started").get("nodes") or [0])
        waits, memory = _recent_waits(run.recent, len(nodes)), _numbers(run.recent, "private_bytes", len(nodes))
        shards = self._shards_held(len(nodes))
        rows = []
        for rank, node in enumerate(nodes):
            step, doing = _what_it_does(activities[rank], self._step) if rank in activities else (self._step, "-")
            if not self.goes_on and self.state != "killed":
                doing = "ended"
            elif rank not in activities and node != nodes[0]:
                doing = f"on {node}"
            row = {
                "rank": str(rank),
                "step": f"{step:,}",
                "activity": doing,
                "memory": f"{memory[rank] / (1 << 20):,.0f} MiB" if memory is not None and memory[rank] else "-",
                "waiting": f"{100 * waits[rank]:.0f}%" if waits is not None else "-",
                "weights": shards[rank][0],
                "mesh": shards[rank][1],
            }
            rows.append({name: _printable(text) for name, text in row.items()})
        return [rows[rank] for rank in np.argsort(waits, kind="stable")] if _many(rows) and waits is not None else rows

    def _shards_held(self, ranks: int) -> list[tuple[str, str]]:
        """The part of all parameters that each rank stores, and its coordinates; found once per start."""
        started = self._run.last("started")
        if self._shards[0] != (key := (started.get("time"), ranks)):
            parts = coordinates = ["-"] * ranks
            with suppress(SpmdError, ValueError):  # a mesh that cannot be read; a model that is code
                axes = parse_axes(str(started.get("mesh", "")))
                coordinates = [
                    " ".join(f"{axis}={n}" for axis, n in place.coordinates.items()) for place in all_positions(axes)
                ]
                parts = _parts_held(self._run, axes)
            self._shards = key, list(zip(parts, coordinates, strict=False))
        return self._shards[1]


def _many(rows: Sequence[Any]) -> bool:
    return len(rows) > MOST_RANKS


def _table(ranks: Sequence[Mapping[str, str]], width: int, room: int) -> list[Text]:
    """The rows of ranks, as far as there is room. A column of what is wrong with a rank belongs at the end."""
    rows = [{name: name for name in ranks[0]}, *ranks[:room]]
    widths = {name: max(len(row[name]) for row in rows) for name in ranks[0]}
    free = width - sum(length + 2 for name, length in widths.items() if name not in ("activity", "mesh")) - 2
    widths["mesh"] = min(widths["mesh"], max(free // 2, free - widths["activity"], 5))
    widths["activity"] = min(widths["activity"], max(free - widths["mesh"], 5))
    lines = []
    for row in rows:
        cells = [
            text[: widths[name] - 1] + "…"
            if len(text) > widths[name]
            else text.ljust(widths[name])
            if name in ("activity", "mesh")
            else text.rjust(widths[name])
            for name, text in row.items()
        ]
        lines.append(Text("  ".join(cells).rstrip(), style="" if lines else "bold"))
    if len(ranks) > room:
        which = "which wait longer" if _many(ranks) else "for which there is no room"
        lines.append(Text(f"{len(ranks) - room} more ranks, {which}", style="dim"))
    return lines


def _parts_held(run: RunRecord, axes: Mapping[str, int]) -> list[str]:
    """The part of all parameters that each rank stores. Raises ValueError if it is not known without running code."""
    job = TrainConfig.from_json(dict(run.config), run.name)
    if job.strategy or job.model.engine is not None or job.model.code is not None:
        raise ValueError
    composition = job.composition.changed(mesh=dict(axes))
    model = job.model.build(composition)
    sharded = composition.storage.stage(axes) >= 3
    counts = [owned if sharded else whole for whole, owned, _ in elements_per_rank(model, axes, composition)]
    return [f"{100 * count / max(1, model.parameter_count):.3g}%" for count in counts]


def _activity(path: Path) -> tuple[float, dict[int, Mapping[str, Any]]]:
    """When the file was written, and what each rank did then; nothing if there is no such file, or it is damaged."""
    try:
        content = json.loads(path.read_bytes())
        ranks = {int(rank["rank"]): rank for rank in content["ranks"]}
        return path.stat().st_mtime, ranks
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return 0.0, {}


def _what_it_does(record: Mapping[str, Any], done: int) -> tuple[int, str]:
    """The step in which a rank is, and what it does there."""
    phase, _, number = str(record.get("phase", "")).rpartition(" ")
    phase, step = (phase, int(number)) if number.isdecimal() else (f"{phase} {number}".strip(), done)
    phase = phase.removesuffix("step").removesuffix(" of ").rstrip(", ")
    if record.get("condition"):
        return step, str(record["condition"])
    if not record.get("call"):
        return step, phase or "computing"
    seconds = record.get("seconds")
    lasts = f" for {seconds:.0f} s" if isinstance(seconds, (int, float)) and seconds >= 1 else ""
    return step, f"{record['call']}{lasts}"


def _recent_waits(lines: Iterable[Mapping[str, Any]], ranks: int) -> np.ndarray | None:
    """float64[rank]: the part of a recent step in which a rank waited for others; None if it is not recorded."""
    parts = []
    for line in lines:
        try:
            shares = np.array(line.get("shares"), float)
        except (TypeError, ValueError):
            continue
        if shares.shape == (ranks, 3):
            parts.append(shares[:, 2])
    return np.mean(parts, axis=0) if parts else None


def _numbers(lines: Sequence[Mapping[str, Any]], name: str, ranks: int) -> np.ndarray | None:
    """float64[rank]: numbers by rank in the last line; None if they are not there."""
    try:
        numbers = np.array(lines[-1].get(name), float) if lines else np.empty(0)
    except (TypeError, ValueError):
        return None
    return numbers if numbers.shape == (ranks,) else None


def _seconds_of(text: Any) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None


def _shown_time(text: Any) -> str:
    """A time of events.jsonl, in this host's time zone."""
    seconds = _seconds_of(text)
    return "-" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC).astimezone():%H:%M:%S}"


def _printable(text: str) -> str:
    """The text without characters that could control the terminal."""
    return "".join(character if character.isprintable() else " " for character in text)


# --- Curves as text


DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])  #: of a Braille character, by row and column


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

    grid = np.zeros((4 * height, 2 * columns), bool)
    across, down = place(*loss, 2 * columns, 4 * height)
    x = first + span * np.arange(2 * columns) / (2 * columns - 1)  # a line between the steps ...
    top = place(x, np.interp(x, *loss), 2 * columns, 4 * height)[1]
    bottom = top.copy()
    np.minimum.at(top, across, down)  # ... which touches each of them ...
    np.maximum.at(bottom, across, down)
    bottom[:-1] = np.maximum(bottom[:-1], top[1:] - 1)  # ... and has no gaps
    top[:-1] = np.minimum(top[:-1], bottom[1:] + 1)
    rows = np.arange(4 * height)[:, None]
    grid[(rows >= top) & (rows <= bottom)] = True
    cells = (grid.reshape(height, 4, columns, 2) * DOTS[None, :, None, :]).sum(axis=(1, 3))
    points = set(zip(*(each.tolist() for each in place(*validation, columns, height)), strict=True))
    for row in range(height):
        line = Text(f"{labels[row]:>{margin - 1}} ", style="dim")
        for column, cell in enumerate(cells[row].tolist()):
            if (column, row) in points:
                line.append("●" if unicode else "o", "bold magenta")
            else:
                line.append((chr(0x2800 + cell) if unicode else ".") if cell else " ", "cyan")
        line.rstrip()
        yield line
    ends = f"{first:,}", f"{last:,}"
    legend = f"step: loss {'⣿' if unicode else '.'}" + (f", validation {'●' if unicode else 'o'}" if points else "")
    yield Text(" " * margin + ends[0] + legend.center(columns - sum(map(len, ends))) + ends[1], style="dim")


def _finite(run: RunRecord, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps at which a series has numbers, and these."""
    seen = np.isfinite(run.series[name])
    return run.steps[seen], run.series[name][seen]
