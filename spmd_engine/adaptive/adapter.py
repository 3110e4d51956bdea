"""Adapts a run to the speeds of its ranks, as the policy decides.

The advisor observes the steps, and proposes the change that the policy decides on. Its log is lines of JSON, from which
the policy makes the same decisions again.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from spmd_engine.adaptive.candidates import (
    BoundariesBySpeed,
    Outlook,
    Proposal,
    Proposer,
    SharesBySpeed,
    kind_of_change,
    parts,
    ranks_at,
)
from spmd_engine.adaptive.monitor import Observation, observe
from spmd_engine.adaptive.planner_process import PlannerProposals
from spmd_engine.adaptive.policy import Decision, Policy, PolicyState, PredictedShape
from spmd_engine.checkpoints.format.folder import replace_file
from spmd_engine.engine import LayeredEngine
from spmd_engine.engine.reshape import Shape, ShapeRequest
from spmd_engine.files import open_regular
from spmd_engine.foreign import reading
from spmd_engine.models import Model
from spmd_engine.training.observers import Observer, lines_up_to
from spmd_engine.training.run import Run, composition_of
from spmd_engine.training.train_config import AdaptConfig
from spmd_engine.training.trainer import StepReport
from spmd_engine.training.workload import Workload

# --- The log of decisions


VERSION = 2


def header(step: int, config: AdaptConfig, costs: Mapping[str, float], home: Shape, shape: Shape) -> dict[str, Any]:
    """The line after each start and each change of shape: the policy's configuration, the measured seconds of each kind
    of change, the shape with which the policy compares others, and the present one."""
    shapes = {"home": home.request.as_json(), "shape": str(shape)}
    return {"version": VERSION, "step": step, "config": config.as_json(), "costs": dict(costs), **shapes}


def record(
    observation: Observation, current: PredictedShape, candidates: Sequence[PredictedShape], decision: Decision
) -> dict[str, Any]:
    """The line of a decision, with all that it depends on."""
    return {
        "step": observation.step,
        "observation": observation.as_json(),
        "current": current.as_json(),
        "candidates": [candidate.as_json() for candidate in candidates],
        "chosen": decision.chosen.label,
        "line": decision.line,
    }


def replay(lines: Iterable[Mapping[str, Any]]) -> Iterator[Decision]:
    """The decisions of a log again, each with the state of the policy after it."""
    return (decision for decision, _ in _replayed(lines) if decision)


def _replayed(lines: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Decision | None, PolicyState]]:
    """The decision of each line (None for a header), and the policy's state after it, which another home resets."""
    policy, state, home = Policy(), PolicyState(), None
    for line in lines:
        if "config" in line:
            policy = Policy(AdaptConfig.from_json(line["config"], "the log's header"))
            state, home = state if line["home"] == home else PolicyState(), line["home"]
            yield None, state
            continue
        observation, current = Observation.from_json(line["observation"]), PredictedShape.from_json(line["current"])
        candidates = [PredictedShape.from_json(candidate) for candidate in line["candidates"]]
        decision = policy.decide(observation, current, candidates, state)
        state = decision.state
        yield decision, state


def resumed(lines: Sequence[Mapping[str, Any]], shape: Shape) -> tuple[Shape, Mapping[str, float], PolicyState]:
    """What a run in this shape knows by its log: its home, the costs of changes, and the state of the policy.

    A run that resumes in another shape than its last one has this shape as its home, and the policy begins anew.
    """
    last, state = {}, PolicyState()
    for line, (decision, after) in zip(lines, _replayed(lines), strict=True):
        last, state = last if decision else line, after
    if last.get("shape") != str(shape):
        return shape, last.get("costs", {}), PolicyState()
    return ShapeRequest.from_json(last["home"], "the log's header").shape, last["costs"], state


# --- The advisor


MOST_LINES = 100  #: lines of an observation; older steps tell less of the present
BELIEVED = 200  #: steps for which a rank without work is taken to be as slow as it was; only work shows its speed


class Advisor:
    """Collects the lines of steps, and says when to change to which shape. For rank 0.

    Candidates are the present shape, the one that the job began with (``home``), and those of ``proposers``. One with a
    factor, whose prediction is less sure, must beat the others by ``least_gain``, unless memory is short. ``costs``
    are the seconds of changes by kind, as far as they are measured; other kinds are taken to cost the most of them.
    ``memory`` is the bytes that each rank of the job may use; None: not known. ``model`` says how stages divide
    the work. ``write`` gets the lines of the log, its header first. ``state`` is that of the policy in a job that
    resumes.
    """

    def __init__(
        self,
        config: AdaptConfig,
        shape: Shape,
        steps: int,
        proposers: Sequence[Proposer],
        costs: Mapping[str, float],
        *,
        memory: Sequence[float] | None = None,
        model: Model | None = None,
        write: Callable[[dict[str, Any]], None] = lambda line: None,
        home: Shape | None = None,
        state: PolicyState = PolicyState(),  # noqa: B008 (immutable)
        step: int = 0,
    ) -> None:
        self.shape, self.steps, self.proposers, self.memory = shape, steps, proposers, memory
        self._config, self._policy, self._state, self._home = config, Policy(config), state, home or shape
        self._model = model
        self._lines: deque[Mapping[str, Any]] = deque(maxlen=MOST_LINES)
        self._costs, self._write, self._since, self._seconds = dict(costs), write, 0, 0.0
        self._seen: dict[int, tuple[int, float]] = {}  # by rank: the step at which it last showed a speed, and that
        self.proposed: Shape | None = None  #: the shape to change to now
        self._refused: set[str] = set()
        self._write_header(step)

    def _write_header(self, step: int) -> None:
        self._write(header(step, self._config, self._costs, self._home, self.shape))

    def add(self, line: Mapping[str, Any]) -> None:
        """Take the line of a step, as in ``metrics.jsonl``.

        If ``proposed`` is a shape after that, call ``changed`` once the job has it, or ``refused``.
        """
        if self.proposed:
            return
        self._lines.append(line)
        self._since, self._seconds = self._since + 1, self._seconds + line["seconds"]
        steps, seconds = self._policy.config.interval
        if self._since < steps or self._seconds < seconds:
            return
        window = list(self._lines)[-self._since :]
        self._since, self._seconds = 0, 0.0
        outlook = self._outlook(window)
        if not max(outlook.observation.computing):  # nothing is known of any rank
            return
        proposals = [Proposal(self.shape), Proposal(self._home)]
        proposals += (proposal for propose in self.proposers for proposal in propose(outlook))
        by_label = {str(proposal.shape): proposal for proposal in reversed(proposals)}  # the first of equal ones
        for label in self._refused & by_label.keys() - {str(self.shape)}:
            del by_label[label]
        seconds = {key: proposal.factor * outlook.step_seconds(proposal.shape) for key, proposal in by_label.items()}
        surest = min(seconds[label] for label, proposal in by_label.items() if proposal.factor == 1.0)
        is_full = outlook.observation.memory_pressure > self._config.memory_pressure
        shapes = [
            PredictedShape(label, seconds[label], self._cost(proposal.shape), proposal.memory_pressure)
            for label, proposal in reversed(by_label.items())
            if proposal.factor == 1.0 or is_full or seconds[label] < (1 - self._config.least_gain) * surest
        ]
        current = next(predicted for predicted in shapes if predicted.label == str(self.shape))
        decision = self._policy.decide(outlook.observation, current, shapes, self._state)
        self._state = decision.state
        self._write(record(outlook.observation, current, shapes, decision))
        if decision.changes:
            self.proposed = by_label[decision.chosen.label].shape

    def _outlook(self, lines: Sequence[Mapping[str, Any]]) -> Outlook:
        """The observation of these lines, and the speed of each rank: measured now, or when it last had work."""
        count = max(len(self.memory or ()), *(1 + rank for rank in (*self.shape.ranks, *self._home.ranks)))
        work = [0.0] * count
        for rank, part in zip(ranks_at(self.shape), parts(self.shape, model=self._model), strict=True):
            work[rank] = part
        memory = self.memory if self.memory and len(self.memory) == count else None
        seen = observe(lines, self.steps, ranks=self.shape.ranks, work=work, memory=memory)
        pairs = zip(work, seen.computing, strict=True)
        measured = [part / seconds if part and seconds else 0.0 for part, seconds in pairs]
        quickest = max(measured)
        for rank, speed in enumerate(measured):
            if speed:
                self._seen[rank] = seen.step, speed / quickest
            else:
                step, relative = self._seen.get(rank, (-BELIEVED, 1.0))
                measured[rank] = quickest * (relative if seen.step - step < BELIEVED else 1.0)
        return Outlook(seen, self.shape, measured, memory, self._model)

    def _cost(self, shape: Shape) -> float:
        if shape == self.shape:
            return 0.0
        return self._costs.get(kind_of_change(self.shape, shape), max(self._costs.values()))

    def changed(self, shape: Shape, seconds: float, step: int) -> None:
        """The job has this shape from the next step on; the change took so many seconds. If it was not proposed here,
        it is the job's new home, and the policy begins anew; but not if only the layers of an overlap have changed."""
        overlap = self.shape.composition.overlap_layers
        present, proposed, home, after = (
            replace(candidate, composition=candidate.composition.changed(overlap_layers=overlap))
            for candidate in (self.shape, self.proposed or self.shape, self._home, shape)
        )
        if after != present:
            self._costs[kind_of_change(present, after)] = seconds
        if after not in (present, proposed, home):
            self._home, self._state = shape, PolicyState()
        self.shape, self.proposed = shape, None
        self._lines.clear()
        self._since, self._seconds = 0, 0.0
        self._write_header(step)

    def refused(self) -> None:
        """The job cannot take the proposed shape, which is not proposed again."""
        self._refused.add(str(self.proposed))
        self.proposed = None


# --- The observer of a run


class Adapter(Observer):
    """Requests another shape where the policy decides so; pass its ``propose`` to ``train``, too.

    Until a change has been measured, it counts as a step. Decisions are lines of ``decisions.jsonl``. A run that
    resumes goes on with the policy's state.
    """

    NAME = "decisions.jsonl"

    def __init__(self, config: AdaptConfig) -> None:
        self._config, self._file = config, None
        self._advisor: Advisor | None = None
        self._planner: PlannerProposals | None = None

    def opened(self, workload: Workload, parameters: int, notices: Sequence[str]) -> None:
        model = workload.job.model
        self._code = "" if model.named_in else model.name  # if it is code, it has run here

    def started(self, run: Run, stop: int) -> None:
        self._run, path = run, run.folder / self.NAME
        self._shape = Shape(composition_of(self._run), tuple(range(run.engine.mesh.size)))
        lines = lines_up_to(path, run.steps_done)
        with reading(f"{path}: this run cannot go on with its decisions", "; move it away"):
            self._home, costs, self._state = resumed([json.loads(line) for line in lines], self._shape)
        self._costs = dict(costs)
        replace_file(path, "".join(line + "\n" for line in lines))
        self._file = open(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", buffering=1)

    def stepped(self, report: StepReport) -> None:
        if self._advisor is None:  # this step may fill caches: it gives a cost, and is not observed
            self._advisor = self._new_advisor(report)
        else:
            self._advisor.add(report.as_dict())

    def propose(self, step: int) -> ShapeRequest | None:
        """The request after this step, if any."""
        proposed = self._advisor.proposed if self._advisor else None
        return proposed.request if proposed else None

    def reshaped(self, step: int, change: Mapping[str, Any]) -> None:
        self._shape = Shape(composition_of(self._run), tuple(change["ranks"]))
        if self._advisor:
            self._advisor.changed(self._shape, change["seconds"], step)
        else:
            self._home = self._shape

    def not_reshaped(self, step: int, change: Mapping[str, Any]) -> None:
        is_own = not change["request"]  # those of 'migrate' and 'join' have a number
        if self._advisor and self._advisor.proposed and is_own:
            self._advisor.refused()

    def joined(self, step: int, change: Mapping[str, Any]) -> None:
        if self._advisor:
            self._advisor.memory = self._run.memory_limits

    def closed(self) -> None:
        if self._planner:
            self._planner.close()
        if self._file:
            self._file.close()

    def _new_advisor(self, report: StepReport) -> Advisor | None:
        """An advisor, after the first step; None for an engine that shards itself."""
        engine, job = self._run.engine, self._run.config or {}
        if not isinstance(engine, LayeredEngine):
            return None
        self._planner = PlannerProposals(self._config, job, self._code)
        samples = job["data"]["batch_size"] // job["data"]["micro_batches"]
        return Advisor(
            self._config,
            self._shape,
            job["training"]["steps"],
            [BoundariesBySpeed(engine.model), SharesBySpeed(engine.model, samples), self._planner],
            {"first step": report.seconds} | self._costs,
            memory=self._run.memory_limits,
            model=engine.model,
            write=self._write,
            home=self._home,
            state=self._state,
            step=report.step,
        )

    def _write(self, line: dict[str, Any]) -> None:
        if self._file:
            self._file.write(json.dumps(line) + "\n")
