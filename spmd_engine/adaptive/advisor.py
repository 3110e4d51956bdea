"""The advisor: observes the steps of a running job, and proposes the change of its shape that the policy decides on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from spmd_engine.adaptive.candidates import Outlook, Proposal, Proposer, kind_of_change, parts, ranks_at
from spmd_engine.adaptive.decision_log import header, record
from spmd_engine.adaptive.monitor import observe
from spmd_engine.adaptive.policy import Policy, PolicyState, PredictedShape
from spmd_engine.engine.reshape import Shape
from spmd_engine.models import Model
from spmd_engine.training.adapt_config import AdaptConfig

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
        """The observation of these lines, and the speeds of all ranks, measured or believed."""
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
