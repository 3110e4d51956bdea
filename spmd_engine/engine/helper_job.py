"""The job of a helper rank, from the first order of rank 0 to its dismissal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import get_backend
from spmd_engine.arrays.precision import dtype_of
from spmd_engine.comm.group import Group
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.mesh import Mesh, ranks_by_position
from spmd_engine.comm.pending import Pending
from spmd_engine.engine.helpers import HelperRank, content_of, helper_stage, owners_of, send_request
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.runtime.signals import StopFlag

_ORDERS = 0  # the channel of orders of rank 0; other messages come in the order in which they are sent
_SIGNALS = 1  # the channel of a helper rank's last message to rank 0: the number of its signal, or 0


def order_to_help(model: ModelConfig, mesh: Mesh, composition: ParallelConfig, device: str) -> dict[str, Any]:
    """The order with which ``Helpers`` start ``serve_as_helper`` for an engine of ``build_engine``, as JSON."""
    composition = composition.changed(mesh=dict(mesh.axes))
    return {"model": model.as_json(), "composition": composition.as_json(), "device": device}


def serve_as_helper(mesh: Mesh, own: ModelConfig) -> int:
    """Compute on this helper rank what its owners request; return the exit code of the job. See ``serve``.

    ``own`` is the model of the job as this rank knows it: its code may run.
    """

    def build(order: Mapping[str, Any]) -> HelperRank:
        model = ModelConfig.from_json(order["model"], "the order").permitted_by(own)
        composition = ParallelConfig.from_json(order["composition"], "the order")
        return build_helper(model, mesh, composition, device=order["device"])

    return serve(mesh, build)


def build_helper(model: ModelConfig, mesh: Mesh, composition: ParallelConfig, *, device: str = "cpu") -> HelperRank:
    """The part of this helper rank, whose mesh is that of ``mesh_without``, for the engine of the composition."""
    assert mesh.outside is not None
    world, axes = mesh.outside.comm, composition.mesh or {"data": len(mesh.members)}
    positions = ranks_by_position([world.hosts[rank] for rank in mesh.members], composition.order)
    engine_model = model.build(composition)
    stage = helper_stage(engine_model, axes, composition, world.rank)
    owners = owners_of(stage, axes, [mesh.members[number] for number in positions])
    backend = get_backend(device, *mesh.process_on_node)
    return HelperRank(engine_model, mesh, owners, composition.recompute, dtype_of(model.dtype), backend)


def serve(mesh: Mesh, build: Callable[[Mapping[str, Any]], HelperRank]) -> int:
    """Do what a helper rank does in a job, and return its exit code. ``build`` makes the HelperRank of the order that
    rank 0 starts it with. Raises UsageError if the other ranks end by one."""
    group, helper = mesh.outside, None
    assert group is not None
    sent = False  # whether rank 0 knows of a signal
    with StopFlag(to_save=False) as stop:
        while True:
            source, channel = (helper.owners[0], None) if helper else (0, _ORDERS)
            with mesh.activity.phase("helper rank, without a request"):
                request = content_of(_awaited(group, group.start_receive(source, channel=channel, label="request")))
            if "exit" in request:
                stop.take(stop.received)
                if helper is not None and not sent:
                    _tell_signal(group, stop.received)
                if request["error"]:
                    raise UsageError(request["error"])
                return request["exit"]
            if helper is None:
                helper, stop.to_save = build(request), True
                continue
            with mesh.activity.phase(
                f"helper rank: {request['do']} of layers {request['layers'][0]} to", request["layers"][1] - 1
            ):
                helper.answer(request)
            if stop.received and not sent:
                _tell_signal(group, stop.received)
                sent = True


def _tell_signal(group: Group, number: int) -> None:
    Group(group.comm, "helper", Ledger()).send(0, np.array([number]), channel=_SIGNALS)


def _awaited(group: Group, pending: Pending) -> Any:
    """The result of a message that may take any time to come: unlike its ``wait``, this is not reported as a hang."""
    comm, idle = group.comm, 0
    while not (pending.done or pending.error):
        comm.prepare_to_pause(idle)
        comm.progress.advance_all()
        if not (pending.done or pending.error):
            comm.pause(idle)
            idle += 1
    return pending.wait()


class Helpers:
    """The helper ranks of a job, on the ranks of its mesh: ``with Helpers(mesh): ...`` dismisses them at the end, with
    the same exit code or error. Without helper ranks it does nothing."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._first_owners: Mapping[int, int] = {}
        self._signals: list[Pending] = []  # on rank 0

    def start(self, order: Mapping[str, Any], first_owners: Mapping[int, int]) -> None:
        """Let the helper ranks begin with an order, which is JSON; ``first_owners`` are those of the engine."""
        self._first_owners = first_owners
        for rank in self._mesh.helpers if self._mesh.rank == 0 else ():
            self._tell(rank, order, _ORDERS)
            assert self._mesh.outside is not None
            aside = Group(self._mesh.outside.comm, "helper", Ledger())  # a signal is no part of the step it comes in
            self._signals.append(aside.start_receive(rank, channel=_SIGNALS))

    def signal(self) -> int:
        """The number of a signal that a helper rank has received, on rank 0; 0 for none."""
        return max((int(each.wait()[0]) for each in self._signals if each.done), default=0)

    def _tell(self, rank: int, order: Mapping[str, Any], channel: int | None) -> None:
        assert self._mesh.outside is not None
        send_request(self._mesh.outside, rank, order, channel)

    def __enter__(self) -> Helpers:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None and not issubclass(kind, (SystemExit, UsageError)):
            return  # it ends all ranks
        code, text = (error.code, "") if isinstance(error, SystemExit) else (0, str(error or ""))
        for rank in () if self._mesh.is_helper else self._mesh.helpers:
            if self._mesh.members[self._mesh.rank] == self._first_owners.get(rank, 0):
                self._tell(rank, {"exit": code, "error": text}, None if self._first_owners else _ORDERS)
        for each in self._signals:  # with a message in flight MPI does not end properly
            each.wait()
