"""The training loop, for any ShardedEngine."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, isfinite
from threading import current_thread, main_thread
from time import perf_counter, process_time, thread_time
from typing import Any

import numpy as np

from spmd_engine.arguments import checked
from spmd_engine.arrays.backend import backend_of
from spmd_engine.arrays.updates import sum_of_squares
from spmd_engine.comm.agreement.call_agreement import named
from spmd_engine.comm.agreement.rank_zero import gather_json
from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.batch import Batch, Evaluation
from spmd_engine.engine.contract import check_batch
from spmd_engine.engine.definition import Loss
from spmd_engine.engine.optimizers import Optimizer
from spmd_engine.errors import NotFiniteError, ReplicasDifferError, UsageError
from spmd_engine.runtime.signals import StopFlag
from spmd_engine.training.hooks import Hook
from spmd_engine.training.loss_scale import LossScale
from spmd_engine.training.numbers_by_rank import condensed, expanded

GROWN = 100  #: a loss of this many times the first one is logged as a warning

_BY_RANK = ("shares", "cpu_seconds", "private_bytes")  #: fields of ``StepReport`` with numbers of all ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepReport:
    """One step, as a line of ``metrics.jsonl``."""

    step: int  #: from 1
    loss: float  #: mean over the global batch, before the update
    grad_norm: float  #: norm of the whole gradient, before clipping
    learning_rate: float
    tokens: int  #: targets of the global batch that count
    seconds: float
    tokens_per_second: float
    metrics: Mapping[str, float] | None = None  #: those of the batch, before the update, as ``Evaluation`` has them
    bytes_sent: int | None = None  #: by all ranks, from the ledger
    exposed_communication: float | None = None  #: seconds of a rank in collectives, mean over ranks
    gigabytes_per_second: dict[str, float] | None = None  #: by mesh axis: sent by all, by their seconds
    shares: list[list[float]] | None = None  #: shares of the step, by rank: computing, communicating, and idle
    cpu_seconds: list[float] | None = None  #: by rank: of its process; with the waits for other ranks, which may spin
    private_bytes: list[int] | None = None  #: by rank: memory of its process, without pages that it shares with others
    side_outputs: dict[str, Any] | None = None  #: those of layers, by name: auxiliary losses, counts
    predicted: dict[str, Any] | None = None  #: in the first step: the prediction of ``analyze``, and the measurement
    loss_scale: float | None = None  #: with float16: the factor of the gradients in this step
    skipped: str | None = None  #: why nothing was updated: the value that is not finite, and its ranks
    validation_loss: float | None = None
    validation_metrics: Mapping[str, float] | None = None  #: by name, as ``Evaluation`` has them

    def as_line(self) -> dict[str, Any]:
        """``as_dict``, with the numbers of ranks ``condensed``."""
        fields = self.as_dict()
        return fields | {name: condensed(fields[name]) for name in _BY_RANK if name in fields}

    def as_dict(self) -> dict:
        """The fields that are not None, by name; metrics by their own: ``accuracy``, ``validation_accuracy``."""
        fields = {key: value for key, value in vars(self).items() if value is not None}
        of_batch, metrics = fields.pop("metrics", {}), fields.pop("validation_metrics", {})
        for key in ("loss", "grad_norm"):  # JSON has no numbers that are not finite
            fields[key] = fields[key] if isfinite(fields[key]) else str(fields[key])
        return fields | of_batch | {f"validation_{name}": value for name, value in metrics.items()}

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> StepReport:
        """The report whose ``as_dict``, or ``as_line``, is this; numbers without a field of their own are metrics."""
        own: dict[str, Any] = {name: value for name, value in line.items() if name in cls.__dataclass_fields__}
        own |= {name: expanded(own[name]) for name in _BY_RANK if name in own}
        rest = {name: value for name, value in line.items() if name not in own and isinstance(value, float)}
        validation = {name.removeprefix("validation_"): rest.pop(name) for name in list(rest) if "validation_" in name}
        own |= {name: float(own[name]) for name in ("loss", "grad_norm")}
        return cls(**own, metrics=rest or None, validation_metrics=validation or None)


class Trainer:
    """Trains an engine with an optimizer on batches that are functions of the step's number.

    ``batches(step)`` gives this rank's Batch of step ``step`` (from 0), ``rate(step)`` its learning rate. Gradients
    whose global norm exceeds ``grad_clip`` are scaled down to it; 0: no limit. If the loss or norm is not finite, no
    rank updates anything, and the report gives the reason; after more than ``max_skipped`` such steps in a row,
    NotFiniteError is raised on every rank. If only some ranks find such values in gradients that should be equal,
    ReplicasDifferError is raised. If the engine computes in float16, gradients are scaled (``LossScale``); a step
    whose gradients overflow only because of the scale does not count as such a step. With ``step_metrics``, every
    report has the bytes and waiting times of all ranks, which takes a small collective; it always has the auxiliary
    losses and counts that layers return.
    ``hooks`` act in each step: see ``Hook``; those with a request on any rank are bits of ``requested`` on all of them
    until the next step. ``run`` ends after a step at whose end any rank had a signal in its ``stop`` flag: all ranks'
    flags are then taken.
    """

    @checked(
        {"grad_clip": 0, "first_step": 0, "max_skipped": 0},
        ["optimizer", "batches", "rate", "grad_clip"],  # in a trainer for evaluations only
        optimizer="an Optimizer, as SGD(), not its class",
        batches="a function of the step, as lambda step: batch_of(x, y, engine, step=step)",
        rate="a function of the step, as lambda step: 0.1",
        loss="a function of outputs, targets and count, as mean_squared_error",
        grad_clip="the largest norm of the gradient, or 0 for no limit",
    )
    def __init__(
        self,
        engine: ShardedEngine,
        optimizer: Optimizer,
        batches: Callable[[int], Batch],
        rate: Callable[[int], float],
        *,
        grad_clip: float = 0.0,
        loss: Loss | None = None,
        first_step: int = 0,
        step_metrics: bool = True,
        stop: StopFlag | None = None,
        max_skipped: int = 0,
        hooks: Sequence[Hook] = (),
    ) -> None:
        self.engine, self.optimizer, self.batches, self.rate = engine, optimizer, batches, rate
        self.grad_clip, self.loss, self.steps_done, self.step_metrics = grad_clip, loss, first_step, step_metrics
        self.stop, self.max_skipped, self.hooks = stop, max_skipped, tuple(hooks)
        self.skipped_in_a_row = 0
        self._largest_loss = 0.0  # that is not logged as too large; 0: there was no loss yet
        self.loss_scale = LossScale() if getattr(engine, "dtype", None) == np.float16 else None
        self.requested = 0

    def step(self) -> StepReport:
        """Make one optimizer step. Collective."""
        with self.engine.mesh.activity.phase("step", self.steps_done + 1):
            return self._step()

    def _step(self) -> StepReport:
        engine, step = self.engine, self.steps_done
        metrics = StepMetrics(engine.mesh, brief=not self.step_metrics)
        with engine.mesh.activity.phase("reading data of step", step + 1):
            batch = self.batches(step)
        check_batch(batch, f"batches({step})")
        if batch.count is None:
            batch = replace(batch, count=engine.count(batch))
        for hook in self.hooks:
            hook.before_compute(step + 1)
        loss_scale = engine.loss_scale = self.loss_scale.value if self.loss_scale else 1.0
        with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite are reported below, once
            loss = engine.step(batch, self.loss)
            norm = engine.gradient_norm() / loss_scale
        rate, skips = self.rate(step), not (isfinite(loss) and isfinite(norm))
        if not hasattr(rate, "__float__") or not 0 <= rate < inf:
            raise UsageError(f"rate({step}) returned {rate!r}; a learning rate is a finite number from 0 on")
        if not skips:
            scale = min(1.0, self.grad_clip / (norm + 1e-6)) if self.grad_clip else 1.0
            self.optimizer.update(engine, engine.gradients, step=step + 1, rate=rate, scale=scale / loss_scale)
            self.skipped_in_a_row = 0
            for hook in self.hooks:
                hook.after_update(step + 1)
        else:
            engine.update_skipped()
        # Before ranks agree that the step is done: another rank may report it, and then receive a signal, earlier.
        if self.stop:
            self.stop.to_save = True
        # Only this proves that all ranks skip: each may have taken the norm of its own copy of the summed gradients.
        requests = sum(bool(hook.has_request(step + 1)) << place for place, hook in enumerate(self.hooks))
        seconds, facts, signal, self.requested = metrics.close(skips, self._received() if self.stop else None, requests)
        skipped = self._skip(loss, norm, batch) if skips else None
        if self.loss_scale:
            self.loss_scale.update(overflow=skips)
            facts["loss_scale"] = loss_scale
        self.steps_done += 1
        self._note_growth(loss)
        if self.stop:
            self.stop.take(signal)
        tokens = int(batch.count or 0)
        if engine.side_outputs:
            facts["side_outputs"] = {name: value.tolist() for name, value in engine.side_outputs.items()}
        if engine.training_metrics:
            facts["metrics"] = dict(engine.training_metrics)
        report = StepReport(step + 1, loss, norm, rate, tokens, seconds, tokens / seconds, **facts, skipped=skipped)
        for hook in self.hooks:
            report = hook.complete(report)
        return report

    def _note_growth(self, loss: float) -> None:
        """Log once, on rank 0, that the loss has become a large multiple of the first one."""
        if self._largest_loss and loss > self._largest_loss and isfinite(loss):
            if self.engine.device_id == 0:
                text = "step %d: the loss is %.4g, over %d times the first: lower the learning rate, or clip gradients"
                logger.warning(text, self.steps_done, loss, GROWN)
            self._largest_loss = inf
        self._largest_loss = self._largest_loss or (GROWN * abs(loss) if isfinite(loss) else 0.0)

    def _skip(self, loss: float, norm: float, batch: Batch) -> str:
        """Why this step updates nothing. Collective. Raises NotFiniteError after too many such steps in a row."""
        if self.loss_scale and self.loss_scale.can_fall() and isfinite(loss):
            return f"gradients overflow float16 at loss scale {self.loss_scale.value:g}"
        self.skipped_in_a_row += 1
        problem = f"the loss is {loss}" if not isfinite(loss) else f"the gradient's norm is {norm}"
        gradients = self.engine.named(self.engine.gradients).items()
        mine = [name for name, gradient in gradients if not isfinite(sum_of_squares(gradient.reshape(-1)))]
        names_of_ranks = by_rank(self.engine.mesh, gather_json(self.engine.group(), mine, "not finite"))
        not_finite = [name for name in self.engine.names if any(name in names for names in names_of_ranks)]
        if not_finite:
            ranks = [str(rank) for rank, names in enumerate(names_of_ranks) if not_finite[0] in names]
            more = f" and {len(not_finite) - 1} more" if len(not_finite) > 1 else ""
            problem += f" (gradient of {not_finite[0]}, rank {', '.join(ranks)}{more})"
        cause = self._wrong_data([batch])
        if self.skipped_in_a_row > self.max_skipped:
            times = f" in {self.skipped_in_a_row} steps in a row" if self.max_skipped else ""
            why = f"step {self.steps_done + 1}: {problem}{times}"
            raise NotFiniteError(f"{why}; {cause or 'lower the learning rate, or clip gradients'}")
        return f"{problem}; {cause}" if cause else problem

    def _wrong_data(self, batches: Sequence[Batch]) -> str:
        """The data that are not finite, and their ranks, as text; empty if all are finite. Collective."""
        parts = ("inputs", "targets")
        mine = [
            name
            for name in parts
            if not all(_all_finite(getattr(micro, name)) for batch in batches for micro in batch.micro_batches)
        ]
        names_of_ranks = by_rank(self.engine.mesh, gather_json(self.engine.group(), mine, "not finite"))
        for name in parts:
            if ranks := [str(rank) for rank, names in enumerate(names_of_ranks) if name in names]:
                return f"the {name} on rank {', '.join(ranks)} have values that are not finite: mend the data"
        return ""

    def pack(self, engine: ShardedEngine) -> tuple[Any, dict[str, Any]]:
        """The scalars that move with the engine to another mesh: see ``MovingState``."""
        scale = self.loss_scale.as_json() if self.loss_scale else None
        return {"step": self.steps_done, "skipped": self.skipped_in_a_row, "loss_scale": scale}, {}

    def unpack(self, engine: ShardedEngine | None, facts: Sequence[Any], whole: Any) -> dict[str, Any]:
        """Continue from the scalars of the old mesh, also on a rank that had no place there."""
        self.steps_done, self.skipped_in_a_row = facts[0]["step"], facts[0]["skipped"]
        if self.loss_scale:
            self.loss_scale.restore(facts[0]["loss_scale"])
        return {}

    @checked({"steps": 0}, steps="the number of steps in all")
    def run(self, steps: int) -> Iterator[StepReport]:
        """Make steps until ``steps`` are done in all, or until a signal: each when its report is taken."""
        return _Steps(self, steps)

    def evaluate(self, batches: Sequence[Batch]) -> float:
        """The mean loss over whole batches. Collective."""
        return self.evaluation(batches).loss

    def evaluation(self, batches: Sequence[Batch]) -> Evaluation:
        """The mean loss, and the engine's metrics, over whole batches. Collective.

        If any rank receives a signal meanwhile, they are of the batches before it, and all ranks' flags are taken.
        """
        if isinstance(batches, Batch):
            raise UsageError("Trainer.evaluate: batches is one Batch; give a list of them")
        with self.engine.mesh.activity.phase("evaluating, step", self.steps_done):
            evaluation = self._evaluate(batches)
        if not np.isfinite(evaluation.loss):
            cause = self._wrong_data(batches) or "lower the learning rate"
            raise NotFiniteError(f"the validation loss is {evaluation.loss} after step {self.steps_done}; {cause}")
        return evaluation

    def _evaluate(self, batches: Sequence[Batch]) -> Evaluation:
        engine = self.engine
        if not _is_newer(type(engine), "evaluate", than="evaluation"):
            return engine.evaluation(self._until_signal(batches), self.loss)
        total, counts = 0.0, 0.0
        for batch in self._until_signal(batches):  # the engine has its own loss of a batch
            count = engine.count(batch)
            total, counts = total + count * engine.evaluate(batch, self.loss), counts + count
        return Evaluation(total / (counts or 1.0), {}, counts)

    def _until_signal(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches, until any rank receives a signal: all ranks' flags are then taken. Collective."""
        watches = self.stop is not None and not self.stop.taken
        for batch in batches:
            if watches and self._takes_signal():
                return
            yield batch
        if watches:
            self._takes_signal()  # one that came in the last batch: no step follows

    def _received(self) -> int:
        """The number of a signal that this rank has received or, on rank 0, one that is not on the mesh; 0 for none."""
        assert self.stop
        if self.stop.to_save:
            self.stop.receive(self.engine.mesh.others.signal())
        return self.stop.received

    def _takes_signal(self) -> int:
        assert self.stop
        signal = self.engine.group().all_reduce(np.array(self._received()), "max", label="signal")
        self.stop.take(int(signal))
        return self.stop.taken


class _Steps(Iterator[StepReport]):
    """The reports of the steps of a trainer, each made when it is taken; a warning on rank 0 if none ever is."""

    def __init__(self, trainer: Trainer, steps: int) -> None:
        self._trainer, self._steps, self._idle = trainer, steps, trainer.steps_done < steps

    def __next__(self) -> StepReport:
        trainer, self._idle = self._trainer, False
        if trainer.steps_done >= self._steps or (trainer.stop and trainer.stop.taken):
            raise StopIteration
        return trainer.step()

    def __del__(self) -> None:
        if self._idle and self._trainer.engine.device_id == 0:
            run = f"trainer.run({self._steps})"
            text = f"{run} has made no step; each is made as its report is taken: for report in {run}: ..."
            warnings.warn(text, RuntimeWarning, stacklevel=2)


def _all_finite(x: Any) -> bool:
    """Whether all values of an array are finite; True for an array without floats."""
    if getattr(getattr(x, "dtype", None), "kind", "") not in ("f", "c"):
        return True
    return bool(backend_of(x).xp.isfinite(x).all())


def _is_newer(kind: type, method: str, than: str) -> bool:
    """Whether a class inherits ``method`` from a more derived class than ``than``."""
    order = [next(i for i, base in enumerate(kind.__mro__) if name in vars(base)) for name in (method, than)]
    return order[0] < order[1]


# --- The time and the sent bytes of a step, on every rank


class StepMetrics:
    """Measures a step until ``close``, which returns the increase of the ledger and of waits, unless ``brief``."""

    def __init__(self, mesh: Mesh, brief: bool = False) -> None:
        self._mesh, self._brief, self._began = mesh, brief, perf_counter()
        self._alone = mesh.others.world.size == 1
        self._before = None if self._alone or brief else _state(mesh)

    def close(
        self, skips: bool = False, signal: int | None = None, requests: int = 0
    ) -> tuple[float, dict[str, Any], int, int]:
        """The step's seconds on this rank, facts about all ranks, the largest ``signal`` of any rank, and the bits of
        the ``requests`` of all.

        Raises ReplicasDifferError on all ranks if ``skips``, whether this step has no update, differs among ranks.
        Collective over the world; if brief, only if ranks may have signals.
        A rank is *idle* while it waits in a collective for other ranks or for their messages; it *communicates* for
        the rest of its time in collectives.
        """
        seconds = perf_counter() - self._began
        if self._brief:
            return seconds, {}, *self._largest_signal(skips, signal, requests)
        if self._alone:
            return seconds, {"bytes_sent": 0, "private_bytes": [_private_bytes(_now())]}, signal or 0, requests
        own = [_private_bytes(_now()), seconds, skips, signal or 0, requests]
        mine = np.concatenate([_state(self._mesh) - self._before, own])
        axes = _counted_axes(self._mesh)
        ranks = by_rank(self._mesh, self._mesh.all_gather(mine[None], label="metrics"))
        memory, seconds, skipped, signals, requested = ranks[:, -5:].T
        _check_equal(skipped)
        idle = ranks[:, 0]
        sent, waited, processor = np.split(ranks[:, 1:-5], [len(axes), 2 * len(axes)], axis=1)
        waiting = waited.sum(axis=1)
        idle = np.minimum(idle, waiting)
        parts = np.stack([seconds - waiting, waiting - idle, idle], axis=1) / seconds[:, None]
        speeds = zip(axes, sent.sum(axis=0), waited.sum(axis=0), strict=True)
        facts = {
            "bytes_sent": int(sent.sum()),
            "exposed_communication": float(waiting.mean()),
            "gigabytes_per_second": {axis: round(n / t / 1e9, 3) for axis, n, t in speeds if n and t},
            "shares": parts.round(3).tolist(),
            "cpu_seconds": processor[:, 0].round(4).tolist(),
            "private_bytes": memory.astype(int).tolist(),
        }
        return perf_counter() - self._began, facts, int(signals.max()), _any_bits(requested)

    def _largest_signal(self, skips: bool, signal: int | None, requests: int) -> tuple[int, int]:
        if signal is None or self._mesh.size == 1:
            return signal or 0, requests
        by_position = self._mesh.all_gather(np.array([[skips, signal, requests]]), label="metrics")
        ranks = by_rank(self._mesh, by_position)
        _check_equal(ranks[:, 0])
        return int(ranks[:, 1].max()), _any_bits(ranks[:, 2])


def _any_bits(ranks: np.ndarray) -> int:
    return int(np.bitwise_or.reduce(ranks.astype(np.int64)))


def by_rank(mesh: Mesh, by_position: Any) -> Any:
    """Values by position on the mesh, in the order of the ranks."""
    positions = np.argsort(mesh.ranks_in_order)
    if isinstance(by_position, np.ndarray):
        return by_position[positions]
    return [by_position[position] for position in positions]


def _now() -> int:
    """The present tenth of a second."""
    return int(10 * perf_counter())


@lru_cache(maxsize=1)
def _private_bytes(now: int) -> int:
    """The resident memory of this process without the pages of files and of shared memory; 0 if it is unknown.

    It is read once in the tenth of a second ``now``: a reading takes as long as a small layer.
    """
    try:
        handle = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return 0
    try:
        _, resident, shared, *_ = os.read(handle, 100).split()
    finally:
        os.close(handle)
    return (int(resident) - int(shared)) * _PAGE


_PAGE = os.sysconf("SC_PAGE_SIZE")


def _check_equal(skips: np.ndarray) -> None:
    """Raise ReplicasDifferError unless all ranks skip, or none."""
    if skips.any() and not skips.all():
        ranks = np.flatnonzero(skips).tolist()
        raise ReplicasDifferError(
            f"{named(ranks)} of {len(skips)} found something in the summed gradients that is not finite; the others, "
            "whose gradients should be equal, did not. A flipped bit or another fault made them differ; continue "
            "from the last checkpoint (--resume)"
        )


def _counted_axes(mesh: Mesh) -> list[str]:
    """The axes of the mesh, and that of messages with other ranks."""
    return [*mesh.axes, *(["helper"] if mesh.others.world.size > mesh.size else [])]


def _state(mesh: Mesh) -> np.ndarray:
    """Idle seconds so far; bytes sent over each mesh axis; seconds in collectives over each; processor seconds.

    A call over several axes counts for the first of them.
    """
    places = {axis: place for place, axis in enumerate(_counted_axes(mesh))}
    sent, waited = [0] * len(places), [0.0] * len(places)
    for (_, over, _), entry in mesh.ledger.entries.items():
        place = places.get(over.partition(",")[0])
        if place is not None:
            sent[place] += entry.sent
            waited[place] += entry.seconds
    # A virtual rank is a thread of this process.
    processor = process_time() if current_thread() is main_thread() else thread_time()
    return np.array([mesh.comm.progress.idle_seconds, *sent, *waited, processor])
