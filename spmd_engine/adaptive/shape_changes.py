"""Changes of a run's shape between its steps, as a file in its folder requests: see ``migrate``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from spmd_engine.adaptive.joining import JoinRequest, JoinRequests, facts_of
from spmd_engine.axes import axes_text
from spmd_engine.comm.agreement.rank_zero import on_all_ranks, text_from_rank_zero
from spmd_engine.comm.communicators.communicator import Communicator
from spmd_engine.comm.world import Port
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.reshape import Reshaper, Shape, ShapeRequest
from spmd_engine.errors import UsageError
from spmd_engine.files import RequestFile
from spmd_engine.foreign import MOST_OF_REQUEST, json_at, reading
from spmd_engine.runtime.activity import ranges
from spmd_engine.training.hooks import Hook
from spmd_engine.training.run import Run
from spmd_engine.training.workload import Workload

if TYPE_CHECKING:
    from spmd_engine.adaptive.migration import LiveMigration


class ShapeChanges(Hook):
    """Lets a run change its shape after any of its steps, and takes in ranks that join it. It is the last hook.

    Rank 0 looks for a ShapeRequest after each step, and ``propose(step)`` may return one, too. All ranks learn of it
    with the step's metrics, check it, and move, or refuse it with one error; the answer is a line of ``events.jsonl``.
    Ranks outside the mesh are woken for it.
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
        self._reshaper: Reshaper | None = None  # of an engine whose shape can change
        self._request_id = ""  # of the request that is followed now
        self._request: ShapeRequest | UsageError | None = None  # on rank 0: see ``_read``
        self._unread_id = ""  # that of a request which cannot be read, if it has one
        self._proposed: ShapeRequest | None = None
        self._joining: JoinRequests | None = None  # on rank 0
        self._port: Port | None = None  # of ranks that are taken in now
        self._live: LiveMigration | None = None  # while one goes on
        self._notices: list[str] = []  # of its shape
        self._last_after, self._step_seconds = (
            perf_counter(),
            0.0,
        )  # the end of the last changes, and the step since then

    def _begin(self, run: Run, steps: int) -> None:
        self._run, self._steps, self._file = run, steps, RequestFile(run.folder / ShapeRequest.FILE)
        job, engine = self._workload.job, self._workload.engine
        if isinstance(engine, LayeredEngine):
            axes = engine.mesh.all_axes if engine.is_placed else job.composition.mesh
            shape = Shape(job.composition.changed(mesh=axes), tuple(engine.mesh.others.on_mesh))
            if joined := self._joined:
                experts = {layer: tuple(parts) for layer, parts in joined["experts"].items()}
                shape = Shape(job.composition, tuple(joined["ranks"]), experts)
            self._reshaper = Reshaper(
                engine,
                run.trainer.optimizer,
                shape,
                job.model.build,
                before=self._before,
                check=job.check,
                timeout=job.timeout,
                deterministic=job.deterministic,
            )
        if engine.device_id == 0:
            refuses = "" if self._reshaper else f"{job.strategy or job.model.name} shards itself: no ranks can join it"
            self._joining = JoinRequests(run.folder, refuses, facts_of(run.config or {}))

    # --- on rank 0

    def has_request(self, step: int) -> bool:
        """Whether a request is due after this step, on rank 0."""
        if self._run.engine.device_id:
            return False
        if step >= self._steps or self._live or self._run.tracing:  # the trace is of one mesh
            return False
        world = self._reshaper.world if self._reshaper else self._run.engine.mesh.comm
        if self._joining and self._joining.is_ready(world):
            self._proposed = self._request = None  # of the next step
            return True
        self._proposed, self._request = self._propose(step), self._read()
        if isinstance(self._request, ShapeRequest) and self._request.at > step:
            self._request = None
        return (self._proposed or self._request) is not None

    def _read(self) -> ShapeRequest | UsageError | None:
        """The request in the folder, or why what is there is none; None if nothing new is there."""
        if not self._file.is_there():
            return None
        content, self._unread_id, path = None, "", self._file.path
        try:
            with reading(str(path)):
                content = json_at(path, most=MOST_OF_REQUEST, pipes=False)
                request = ShapeRequest.from_json(content, str(path))
                if request.at >= self._steps:
                    raise UsageError(f"the run ends after step {self._steps}: a change after step {request.at} is late")
                return request
        except UsageError as error:
            if isinstance(content, Mapping) and isinstance(number := content.get("id"), str):
                self._unread_id = number
            return error

    def _order(self) -> str:
        """The request to follow now, and the ``_training``, as JSON."""
        request, training = self._proposed or self._request, self._training()
        self._request_id = ""
        if self._joining and self._joining.request and request is None:
            return self._order_to_join(self._joining, self._joining.request, training)
        if request is not self._proposed:
            self._file.answered()
        if isinstance(request, UsageError):
            self._request_id = self._unread_id
            raise request
        assert request is not None
        self._request_id = request.id
        with reading("the request"):
            return json.dumps({"request": request.as_json(), **training})

    def _order_to_join(self, joining: JoinRequests, request: JoinRequest, training: dict[str, Any]) -> str:
        """The order to take in the ranks that are connected, which they get, too."""
        assert self._reshaper
        first, shape = self._reshaper.world.size, request.shape and request.shape.as_json()
        order = json.dumps(
            {
                "join": [*range(first, first + request.ranks)],
                "request": shape,
                "config": self._run.config,
                "ranks": self._reshaper.shape.ranks,
                "experts": self._reshaper.shape.experts,
                "steps": self._steps,
                **training,
            }
        )
        self._request_id = request.id
        self._port = joining.take(order, ranges(range(first, first + request.ranks)))
        return order if self._port else json.dumps({"request": None, **training})

    # --- on all ranks

    def between_steps(self, step: int, requested: bool) -> None:
        self._step_seconds = perf_counter() - self._last_after
        stop = self._run.trainer.stop
        if self._live:
            self._migrate()
        elif requested and not (stop and stop.taken):
            self._change_shape()
        self._last_after = perf_counter()

    def enter(self, order: Mapping[str, Any]) -> None:
        """Call this on a rank that joins, after the merge, with the job's order, before its first step."""
        self._change_shape(order)
        self._last_after = perf_counter()

    def _change_shape(self, joined: Mapping[str, Any] | None = None) -> None:
        """Follow a request on all ranks of the world, or refuse it. ``joined``: see the constructor."""
        if not (self._reshaper and self._reshaper.is_idle):
            self._run.finish_saving(must=False)  # on the old mesh; it may fail

        def follow() -> dict[str, Any] | None:
            all_ranks = self._reshaper.all_ranks if self._reshaper else self._run.engine.group()
            order = joined or json.loads(text_from_rank_zero(all_ranks, self._order))
            self._set_training(order)
            if "join" in order:
                self._grow(order["join"], is_merged=bool(joined))
            request = order["request"]
            return None if request is None else self._follow(ShapeRequest.from_json(request, "the request"))

        self._answer(follow)

    def _migrate(self) -> None:
        """Go on with a live migration after a step, on all ranks of the world; at its end change the shape."""
        live, trainer = self._live, self._run.trainer
        assert live
        stops = trainer.steps_done >= self._steps or bool(trainer.stop and trainer.stop.taken)

        def advance() -> dict[str, Any] | None:
            assert self._reshaper
            training = live.advance(self._training(), self._step_seconds, "the run ends" if stops else "")
            if training is None:
                return None
            if not self._reshaper.is_idle:
                self._run.finish_saving(must=False)
            self._set_training(training)
            facts = {"steps": live.steps, "bytes": live.plan.nbytes}
            return self._move(live.shape, self._notices, copies=live.copies()) | facts

        with self._workload.engine.mesh.activity.phase("live migration after step", trainer.steps_done):
            if self._answer(advance):
                self._live, self._run.moving = None, False

    def _answer(self, do: Callable[[], dict[str, Any] | None]) -> bool:
        """Tell the observers what ``do()`` returns about a change of shape, or why it is refused.

        Returns False if ``do()`` returns None, as the change is not made yet. Collective over the world: all
        ranks are awake meanwhile.
        """
        self._began, run, reshaper = perf_counter(), self._run, self._reshaper
        before = reshaper and reshaper.shape
        is_first = run.engine.device_id == 0
        if reshaper and reshaper.others.ranks and is_first:
            reshaper.others.wake({"hook": run.hooks.index(self)})
        change: dict[str, Any] | None = {}
        try:
            change = do()
            answer = "reshaped"
        except UsageError as error:
            if reshaper and reshaper.shape is not before:
                raise  # the arrays have moved: this is no refusal
            change = {"why": str(error)}
            answer = "not_reshaped"
        finally:
            if reshaper:
                reshaper.rest()
        if change is None:
            return False
        if is_first:
            change |= {"request": self._request_id, "seconds": round(perf_counter() - self._began, 4)}
        run.notify(answer, run.steps_done, change)
        return True

    def _grow(self, joins: list[int], is_merged: bool) -> None:
        """Take in ranks that are connected, with these numbers, as idle ranks; ``is_merged`` on these. Collective over
        the new world."""
        run, reshaper, job = self._run, self._reshaper, self._workload.job
        assert reshaper
        with self._workload.engine.mesh.activity.phase("taking in ranks, step", run.steps_done):
            if not is_merged:
                reshaper.grow(self._port)
            run.gather_memory_limits(reshaper.all_ranks)
            notices = [notice for hook in run.hooks for notice in hook.prepare(job, reshaper.all_ranks)]
        if self._port is not None:
            self._port.close()
            self._port = None
        change = {
            "ranks": joins,
            "nodes": [reshaper.world.hosts[rank] for rank in joins],
            "memory": run.memory_limits,
            "notices": notices,
            "seconds": round(perf_counter() - self._began, 4),
        }
        run.notify("joined", run.steps_done, change)
        self._began = perf_counter()

    def _training(self) -> dict[str, Any]:
        """The state of the training that a rank needs which has been idle, as JSON."""
        trainer = self._run.trainer
        scale = trainer.loss_scale.as_json() if trainer.loss_scale else None
        return {"step": trainer.steps_done, "skipped": trainer.skipped_in_a_row, "loss_scale": scale}

    def _set_training(self, training: Mapping[str, Any]) -> None:
        """Take the ``_training`` of rank 0."""
        trainer = self._run.trainer
        trainer.steps_done, trainer.skipped_in_a_row = training["step"], training["skipped"]
        if trainer.loss_scale:
            trainer.loss_scale.restore(training["loss_scale"])

    def _follow(self, request: ShapeRequest) -> dict[str, Any] | None:
        """Change the shape, and return facts for the log; or begin a live migration. Raises UsageError on all ranks for
        what cannot be done."""
        job, reshaper = self._workload.job, self._reshaper
        if reshaper is None:
            raise UsageError(f"{job.strategy or job.model.name} shards itself: its shape cannot change")
        if request.model not in (None, job.model.name):
            raise UsageError(f"this is a shape for {request.model}, and the run trains {job.model.name}")
        shape, notices = reshaper.checked(request, job.data.batch_size, job.data.micro_batches)
        if (moved := reshaper.within_overlap(shape)) != shape:
            facts = self._move(moved, notices)  # which sends nothing
            with suppress(UsageError):  # the overlap stays where it is
                self._begin_live(shape, [])
            return facts
        if request.protocol == "live":
            self._begin_live(shape, notices, request.within)
            return None
        return self._move(shape, notices, fill=self._checkpoint() if request.protocol == "checkpoint-based" else None)

    def _begin_live(self, shape: Shape, notices: list[str], within: float | None = None) -> None:
        """Begin a live migration. Raises UsageError on all ranks if that is impossible."""
        from spmd_engine.adaptive.migration import LiveMigration  # which imports the dry run

        run, reshaper = self._run, self._reshaper
        assert reshaper
        if any(each.composition.storage.places.kinds for each in (shape, reshaper.shape)):
            raise UsageError("a live migration cannot move what is offloaded: use --protocol stop-and-copy")
        self._live = LiveMigration(reshaper, shape, self._step_seconds, within)
        self._notices, plan = notices, {"request": self._request_id, **self._live.plan.as_json()}
        run.moving = True
        run.notify("migrating", run.steps_done, plan)

    def _checkpoint(self) -> Callable[[], Any]:
        """Save the run, and return a function that loads this checkpoint. Collective over the world."""
        from spmd_engine.checkpoints import load_checkpoint  # which few runs need

        run, reshaper = self._run, self._reshaper
        assert reshaper
        on_all_ranks(reshaper.all_ranks, lambda: None if reshaper.is_idle else run.save())
        return lambda: load_checkpoint(run.folder, run.engine, run.trainer.optimizer)

    def _move(self, shape: Shape, notices: list[str], **options: Any) -> dict[str, Any]:
        """Continue in another shape; returns facts for the log. ``options`` are those of ``Reshaper.move``."""
        run, workload, reshaper = self._run, self._workload, self._reshaper
        assert reshaper
        before = str(reshaper.shape)
        with workload.engine.mesh.activity.phase("changing shape, step", run.steps_done):
            reshaper.move(shape, **options)
        self._workload = workload = replace(workload, job=workload.job.changed(composition=shape.composition))
        run.config = {**(run.config or {}), "composition": shape.composition.as_json()}
        if not reshaper.is_idle:
            run.validation = workload.validation
        return {
            "before": before,
            "after": str(shape),
            "mesh": axes_text(shape.axes),
            "ranks": list(shape.ranks),
            "notices": notices,
        }

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
            if self._reshaper:
                self._reshaper.close(together)
            if self._joining:
                self._joining.close()
