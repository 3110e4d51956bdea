"""Changes of a run's shape between its steps, as a file in its folder requests: see ``migrate``."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from spmd_engine.adaptive import change_of_shape as todo
from spmd_engine.adaptive.change_of_shape import Action, ChangeOfShape, Next, Notify
from spmd_engine.adaptive.joining import JoinRequest, JoinRequests, facts_of
from spmd_engine.axes import axes_text
from spmd_engine.comm import Communicator
from spmd_engine.comm.agreement.rank_zero import on_all_ranks, text_from_rank_zero
from spmd_engine.comm.world import Port
from spmd_engine.engine import LayeredEngine
from spmd_engine.engine.reshape import Reshaper, Shape, ShapeRequest
from spmd_engine.errors import UsageError
from spmd_engine.files import RequestFile
from spmd_engine.foreign import MOST_OF_REQUEST, json_at, reading
from spmd_engine.runtime.activity import ranges
from spmd_engine.training import Hook, Run
from spmd_engine.training.trainer import StepReport
from spmd_engine.training.workload import Workload

if TYPE_CHECKING:
    from spmd_engine.adaptive.migration import LiveMigration


class ShapeChanges(Hook):
    """Lets a run change its shape after any of its steps, and takes in ranks that join it. It is the last hook.

    Rank 0 looks for a request after each step, and ``propose(step)`` may return one, too. All ranks learn of it with
    the step's metrics, and do what ``ChangeOfShape`` says next. The answer is a line of ``events.jsonl``. Ranks outside
    the mesh are woken for it.
    """

    def __init__(
        self,
        workload: Workload,
        propose: Callable[[int], ShapeRequest | None] = lambda step: None,
        joined: Mapping[str, Any] | None = None,
        before: Communicator | None = None,
    ) -> None:
        """``joined``: on a rank that joins, the order of the running job; ``before``: its own world."""
        self._workload, self._propose = workload, propose
        self._joined, self._before = joined, before
        self._change = ChangeOfShape()
        self._live: LiveMigration | None = None  # while the change is moving
        self._step_seconds = 0.0  # seconds of the last step

    def _begin(self, run: Run, steps: int) -> None:
        job, engine = self._workload.job, self._workload.engine
        others = engine.mesh.others
        axes = job.composition.mesh if others.have_this else engine.mesh.all_axes
        shape = Shape(job.composition.changed(mesh=axes), tuple(others.on_mesh))
        if self._joined:
            shape = ShapeRequest.from_json(self._joined["shape"], "the order").shape
        reshapable: Any = engine  # else each change is refused
        optimizer, before = run.trainer.optimizer, self._before
        self._run = run
        self._reshaper = Reshaper(reshapable, optimizer, shape, job.model.build, states=[run.trainer], before=before)
        self._requests: _Requests | None = None
        if engine.device_id == 0:
            refuses = f"{job.strategy or job.model.name} shards itself: no ranks can join it"
            refuses = "" if isinstance(engine, LayeredEngine) else refuses
            joining = JoinRequests(run.folder, refuses, facts_of(run.config or {}))
            self._requests = _Requests(run.folder, steps, self._propose, joining)

    # --- of the hook

    def has_request(self, step: int) -> bool:
        """Whether a request is due after this step, on rank 0."""
        requests = self._requests
        if requests is None or step >= requests.steps or self._live or self._run.tracing:  # the trace is of one mesh
            return False
        return requests.look(step, self._reshaper.world)

    def complete(self, report: StepReport) -> StepReport:
        self._step_seconds = report.seconds
        return report

    def between_steps(self, step: int, requested: bool) -> None:
        stop = self._run.trainer.stop
        if self._live or (requested and not (stop and stop.taken)):
            self._act()

    def enter(self, order: Mapping[str, Any]) -> None:
        """Call this on a rank that joins, after the merge, with the job's order, before its first step."""
        self._act(order)

    @contextmanager
    def during(self, run: Run, steps: int) -> Iterator[None]:
        """At the end of the run the ranks outside the mesh end, and then the worlds that have merged."""
        self._begin(run, steps)
        together = False  # whether all ranks end together
        try:
            with run.engine.mesh.others:
                yield
            together = True
        except SystemExit:
            together = True
            raise
        finally:
            self._reshaper.close(together)
            if self._requests:
                self._requests.joining.close()

    # --- on all ranks of the world: what ``ChangeOfShape`` says

    def _act(self, order: Mapping[str, Any] | None = None) -> None:
        """Do and report what is due after a step; ``order``: that of the job, on ranks that join."""
        reshaper, change = self._reshaper, self._change
        if reshaper.placed is not None and (self._live is None or self._live.is_last):
            self._run.finish_saving(must=False)  # on the old mesh; it may fail
        if self._requests and reshaper.others.ranks:
            reshaper.others.wake({"hook": self._run.hooks.index(self)})
        began = perf_counter()
        due = self._requests.due if self._requests else None
        following = deque(change.stepped(self._ends()) if self._live else change.due(due.id if due else ""))
        try:
            while following:
                action, before = following.popleft(), reshaper.shape
                if isinstance(action, Notify):
                    seconds = {} if action.name == "migrating" else {"seconds": round(perf_counter() - began, 4)}
                    self._run.notify(action.name, self._run.steps_done, {**action.facts, **seconds})
                    began = perf_counter()
                    continue
                try:
                    following += self._do(action, order)
                except UsageError as error:
                    if reshaper.shape is not before:
                        raise  # the arrays have moved: this is no refusal
                    following += change.failed(str(error))
        finally:
            reshaper.rest()
        if change.state != "moving":
            self._live = None

    def _ends(self) -> str:
        """Why no step follows, if so, on rank 0."""
        stop, requests = self._run.trainer.stop, self._requests
        ends = requests and (self._run.steps_done >= requests.steps or (stop and stop.taken))
        return "the run ends" if ends else ""

    def _do(self, action: Action, order: Mapping[str, Any] | None) -> Next:
        """What ``ChangeOfShape`` answers after this. Raises UsageError on all ranks if it cannot be done."""
        match action:
            case todo.ReadRequest():
                return self._read(order)
            case todo.CheckShape(request):
                return self._check(request)
            case todo.EstimateChange(shape):
                from spmd_engine.adaptive.migration import estimate_change  # which imports the dry run

                with self._phase("estimating a change of shape after step"):
                    by_protocol = estimate_change(self._reshaper, shape, self._step_seconds, self._run.folder)
                facts = {"from": str(self._reshaper.shape), "to": str(shape), "protocols": by_protocol}
                return self._change.estimated(facts)
            case todo.BeginLive(shape, within):
                from spmd_engine.adaptive.migration import LiveMigration  # which imports the dry run

                self._live = LiveMigration(self._reshaper, shape, self._step_seconds, within)
                return self._change.copying(self._live.plan.as_json())
            case todo.AdvanceLive(ends):
                assert self._live
                with self._phase("live migration after step"):
                    return self._change.advanced(self._live.advance(self._run.steps_done, self._step_seconds, ends))
            case todo.MoveTo(shape, protocol):
                return self._move(shape, protocol)

    def _phase(self, what: str) -> AbstractContextManager[None]:
        return self._workload.engine.mesh.activity.phase(what, self._run.steps_done)

    def _read(self, order: Mapping[str, Any] | None) -> Next:
        now: Any = order or json.loads(text_from_rank_zero(self._reshaper.all_ranks, self._order))
        joined = self._grow(now["join"], merged=bool(order)) if "join" in now else None
        request = now["request"]
        return self._change.read(request and ShapeRequest.from_json(request, "the request"), joined)

    def _order(self) -> str:
        """The request to follow now, on rank 0, as JSON. Raises UsageError if it cannot be read."""
        assert self._requests
        request = self._requests.take()
        if isinstance(request, JoinRequest):
            return self._order_to_join(request, self._requests)
        with reading("the request"):
            return json.dumps({"request": request.as_json()})

    def _order_to_join(self, request: JoinRequest, requests: _Requests) -> str:
        """The order to take in the ranks that are connected, which they get, too."""
        run, reshaper = self._run, self._reshaper
        joins = range(reshaper.world.size, reshaper.world.size + request.ranks)
        shape = request.shape and replace(request.shape, id=request.id).as_json()
        job = {"config": run.config, "shape": reshaper.shape.request.as_json(), "steps": requests.steps}
        order = json.dumps({"join": [*joins], "request": shape, "step": run.steps_done, **job})
        requests.port = requests.joining.take(order, ranges(joins))
        return order if requests.port else json.dumps({"request": None})

    def _grow(self, joins: list[int], merged: bool) -> dict[str, Any]:
        """Take in ranks that are connected, with these numbers, as idle ranks, and return facts; ``merged`` on these.
        Collective over the new world."""
        run, reshaper, port = self._run, self._reshaper, self._requests and self._requests.port
        with self._phase("taking in ranks, step"):
            if not merged:
                reshaper.grow(port)
            run.gather_memory_limits(reshaper.all_ranks)
            notices = [notice for hook in run.hooks for notice in hook.prepare(self._workload.job, reshaper.all_ranks)]
        if port:
            port.close()
        nodes = [reshaper.world.hosts[rank] for rank in joins]
        return {"ranks": joins, "nodes": nodes, "memory": run.memory_limits, "notices": notices}

    def _check(self, request: ShapeRequest) -> Next:
        job, reshaper, engine = self._workload.job, self._reshaper, self._workload.engine
        if not isinstance(engine, LayeredEngine):
            raise UsageError(f"{job.strategy or job.model.name} shards itself: its shape cannot change")
        if request.model not in (None, job.model.name):
            raise UsageError(f"this is a shape for {request.model}, and the run trains {job.model.name}")
        shape, notices = reshaper.checked(request, job.data.batch_size, job.data.micro_batches)
        return self._change.checked(shape, notices, reshaper.at_once(shape))

    def _move(self, shape: Shape, protocol: str) -> Next:
        run, reshaper, before, copied = self._run, self._reshaper, str(self._reshaper.shape), {}
        options: dict[str, Any] = {}
        if protocol == "live" and self._live:
            options = {"copies": self._live.copies()}
            copied = {"steps": self._live.steps, "bytes": self._live.plan.nbytes}
        elif protocol == "checkpoint-based":
            from spmd_engine.checkpoints import load_checkpoint  # which few runs need

            on_all_ranks(reshaper.all_ranks, lambda: run.save() if reshaper.placed else None)
            options = {"fill": lambda: load_checkpoint(run.folder, run.engine, run.trainer.optimizer)}
        with self._phase("changing shape, step"):
            reshaper.move(shape, **options)
        run.continue_as(shape.composition, self._workload.validation)
        facts = {"before": before, "after": str(shape), "mesh": axes_text(shape.axes), "ranks": list(shape.ranks)}
        return self._change.moved(shape, facts, copied)


@dataclass(frozen=True)
class _Unreadable:
    """What is there instead of a request."""

    id: str  #: if it has one
    why: str


class _Requests:
    """What is requested of a run after a step, on its rank 0: by a program, by ``migrate`` or by ``join``."""

    def __init__(
        self, folder: Path, steps: int, propose: Callable[[int], ShapeRequest | None], joining: JoinRequests
    ) -> None:
        self.steps, self._propose, self.joining = steps, propose, joining
        self._file = RequestFile(folder / ShapeRequest.FILE)
        self.due: ShapeRequest | JoinRequest | _Unreadable | None = None  #: the request after the last step
        self._is_filed = False  # whether it is in the file
        self.port: Port | None = None  #: to the ranks that are taken in now

    def look(self, step: int, world: Communicator) -> bool:
        """Whether anything is due after this step."""
        if self.joining.is_ready(world):
            self.due, self._is_filed = self.joining.request, False
            return True
        proposed = self._propose(step)
        self.due, self._is_filed = proposed or self._read(step), proposed is None
        return self.due is not None

    def _read(self, step: int) -> ShapeRequest | _Unreadable | None:
        """The request in the folder, or why what is there is none; None if nothing is due."""
        if not self._file.is_there():
            return None
        content, path = None, self._file.path
        try:
            with reading(str(path)):
                content = json_at(path, most=MOST_OF_REQUEST, pipes=False)
                request = ShapeRequest.from_json(content, str(path))
                if request.at >= self.steps:
                    raise UsageError(f"the run ends after step {self.steps}: a change after step {request.at} is late")
                return request if request.at <= step else None
        except UsageError as error:
            number = content.get("id") if isinstance(content, Mapping) else None
            return _Unreadable(number if isinstance(number, str) else "", str(error))

    def take(self) -> ShapeRequest | JoinRequest:
        """What is due, which is answered from now on. Raises UsageError if it is no request."""
        if self._is_filed:
            self._file.answered()
        if isinstance(self.due, _Unreadable):
            raise UsageError(self.due.why)
        assert self.due
        return self.due
