"""The planner beside a running job: a process of low priority finds shapes for the speeds that the ranks show.

Its search takes seconds, which rank 0 cannot spend between steps. So it is asked when a threshold is crossed, and its
answer is taken at a later observation.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import log
from typing import Any

import numpy as np

from spmd_engine.adaptive.candidates import Outlook, Proposal
from spmd_engine.adaptive.monitor import crossings
from spmd_engine.arrays.precision import dtype_of
from spmd_engine.engine import ModelConfig, ParallelConfig
from spmd_engine.engine.optimizers import OPTIMIZERS
from spmd_engine.engine.reshape import Shape, ShapeRequest
from spmd_engine.engine.state.assignment import PIPE
from spmd_engine.errors import UsageError
from spmd_engine.foreign import MOST_OF_REQUEST, parse_json, reading
from spmd_engine.planning.machine.machine import Curve, Machine, default_machine, read_machine
from spmd_engine.planning.plan_result import Request
from spmd_engine.planning.planner import find_plan
from spmd_engine.planning.search.search_space import axes_that_shard
from spmd_engine.planning.simulator.step_evaluation import evaluate_step
from spmd_engine.runtime.mpi_job import clean_environment
from spmd_engine.training.train_config import AdaptConfig

logger = logging.getLogger(__name__)

SECONDS = 5.0  #: processor time of a search
MOST = 4  #: shapes of an answer
ALIKE = 1.25  #: the factor by which a speed must change for another question
FREE = (
    "mesh",
    "zero",
    "schedule",
    "chunks",
    "stages",
    "overlap_layers",
    "shares",
    "state_shares",
    "rank_order",
)  #: options that may change
_PR_SET_PDEATHSIG = 1  # prctl(2)


class PlannerProposals:
    """Proposes the shapes that the planner finds, on all ranks of the job, with its predictions of time and memory.

    Pipelines are left out.

    ``job`` has the objects ``model``, ``data`` and ``training`` of a TrainConfig. Predictions are used relative to
    those for the shape in which the job was when the planner was asked. ``code``: the name of the job's code, which may
    run in the planner's process, too; empty: none may.
    """

    def __init__(self, config: AdaptConfig, job: Mapping[str, Any], code: str = "") -> None:
        data = {name: job["data"][name] for name in ("batch_size", "micro_batches", "length")}
        self._code = code
        self._config, self._job = config, {"model": job["model"], "optimizer": job["training"]["optimizer"], **data}
        self._process: subprocess.Popen[bytes] | None = None
        self._about: tuple[str, bool] | None = None  # the last question: the shape, and whether memory was short
        self._logs = np.zeros(0)  # logarithms of the speeds then
        self._found: list[Proposal] = []

    def __call__(self, outlook: Outlook) -> Iterator[Proposal]:
        if self._process and self._process.poll() is not None:
            self._found = self._answer(self._process.returncode)
        if not self._process and crossings(outlook.observation, self._config):
            self._ask(outlook)
        yield from self._found

    def _ask(self, outlook: Outlook) -> None:
        """Start a search, unless the last one was about the same speeds, memory and shape."""
        speeds, seen = np.array(outlook.speeds), outlook.observation
        logs, is_full = np.log(speeds / speeds.max()), seen.memory_pressure > self._config.memory_pressure
        about = str(outlook.shape), is_full
        if about == self._about and np.abs(logs - self._logs).max() < log(ALIKE):
            return
        self._about, self._logs, self._asked = about, logs, outlook
        question = {
            **self._job,
            "shape": outlook.shape.request.as_json(),
            "speeds": (speeds / speeds.mean()).tolist(),
            "used": seen.memory,
            "most": self._config.memory_pressure,
            "limits": outlook.limits,
        }
        self._output = tempfile.TemporaryFile()
        with tempfile.TemporaryFile() as given:
            given.write(json.dumps(question).encode())
            given.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(os.getpid()), self._code],
                stdin=given,
                stdout=self._output,
                stderr=subprocess.DEVNULL,
                env=clean_environment() | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,  # so that it does not receive a terminal's Ctrl-C
            )

    def _answer(self, code: int) -> list[Proposal]:
        """The shapes that the process has found; none if it failed, or its answer cannot be read."""
        self._process, found = None, []
        self._output.seek(0)
        asked, content = self._asked, self._output.read(MOST_OF_REQUEST)
        self._output.close()
        try:
            with reading("the planner's answer cannot be read"):
                for entry in parse_json(content) if code == 0 else ():
                    shape = Shape(ParallelConfig.from_json(entry["composition"]), tuple(range(len(asked.speeds))))
                    by_parts = asked.step_seconds(asked.shape) / asked.step_seconds(shape)
                    pressure = None if entry["pressure"] is None else float(entry["pressure"])
                    found.append(Proposal(shape, float(entry["seconds"]) * by_parts, pressure))
        except UsageError as error:
            logger.warning("%s", error)
        return found

    def close(self) -> None:
        """End a search that goes on."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._output.close()


# --- In the process


def answer(question: Mapping[str, Any], code: str = "") -> list[dict[str, Any]]:
    """Compositions, with their seconds over those of the present shape, and the memory pressure (None: not known).

    ``code``: the name of code that may run.
    """
    present = ShapeRequest.from_json(question["shape"], "the question").shape
    config, composition, limits = ModelConfig.from_json(question["model"]), present.composition, question["limits"]
    if config.name == code:
        config = replace(config, named_in="")  # its digest stays
    model, machine = config.build(composition), machine_of(question["speeds"])
    options = {"sequence": question["length"], "dtype": dtype_of(config.dtype)}
    sizes = question["batch_size"], question["micro_batches"]
    here = replace(machine, nodes=tuple(machine.nodes[rank] for rank in present.ranks), pairs={})
    optimizer = OPTIMIZERS[question["optimizer"]]()
    now = evaluate_step(model, here, present.axes, composition, *sizes, optimizer=optimizer, **options)
    more = 0.0
    if limits:  # a process holds more than the planner counts
        used = max(part * limit for part, limit in zip(question["used"], limits, strict=True))
        more = used - now.analysis.peak_bytes
        rooms = [max(1.0, question["most"] * limit - more) for limit in limits]
        machine = replace(machine, nodes=tuple(replace(n, memory=r) for n, r in zip(machine.nodes, rooms, strict=True)))
    base = composition.changed(**dict.fromkeys(FREE))
    request = Request(
        model,
        machine,
        [machine.ranks],
        sizes[:1],
        fixed={"micro_batches": sizes[1]},
        axes=[axis for axis in axes_that_shard(model) if axis != PIPE],
        optimizer=question["optimizer"],
        base=base,
        seconds=SECONDS,
        fallback=None,  # the user has given no disk for it
        **options,
    )
    result = find_plan(request)
    return [
        {
            "composition": evaluated.candidate.composition(base).as_json(),
            "seconds": evaluated.seconds / now.seconds,
            "pressure": (evaluated.memory + more) / min(limits) if limits else None,
        }
        for evaluated in (result.search.best if result.plan else [])[:MOST]
    ]


def machine_of(speeds: Sequence[float]) -> Machine:
    """The calibrated machine, or the packaged one, with a node for each rank and its speed; links stay as they are."""
    try:
        known = default_machine().with_ranks(len(speeds))
    except UsageError:
        known = read_machine("cpu").with_ranks(len(speeds))
    nodes = []
    for rank, speed in enumerate(speeds):
        node = known.node(rank)
        factor = speed / node.contention
        curves = {name: _scaled(curve, factor) for name, curve in node.speeds.items()}
        changes = {"speeds": curves, "memory_bandwidth": _scaled(node.memory_bandwidth, factor)}
        cores, memory = None if node.has_devices else 1.0, known.memory_of(rank)
        nodes.append(replace(node, name=f"rank {rank}", count=1, ranks=1, cores=cores, memory=memory, **changes))
    pairs = {(a, b): known.link(a, b) for b in range(len(speeds)) for a in range(b)}
    return replace(known, nodes=tuple(nodes), pairs=pairs)


def _scaled(curve: Curve, factor: float) -> Curve:
    return Curve(tuple((size, speed * factor) for size, speed in curve.points))


def main() -> None:
    """Answer the question of the standard input, unless the parent ends before. Arguments: the parent's process number,
    and the name of the code that may run."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent, code = sys.argv[1:]
    if os.getppid() != int(parent):  # it has ended already
        return
    os.nice(19)
    with suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # not only rank 0's core
    with suppress(UsageError):  # a model or a machine that cannot be planned: no shapes
        json.dump(answer(json.load(sys.stdin), code), sys.stdout)
        return
    print("[]")


if __name__ == "__main__":
    main()
