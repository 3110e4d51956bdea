"""The input of ``plan`` and its result: the plan with its evaluation, or the reason why there is none."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from math import inf
from pathlib import Path
from shlex import quote
from typing import Any, Self

import numpy as np

from spmd_engine.arrays.precision import dtype_of, float_dtype
from spmd_engine.axes import MeshPosition, axes_text, count_ranks
from spmd_engine.configuration import Configuration, setting
from spmd_engine.engine import ModelConfig, ParallelConfig
from spmd_engine.engine.optimizers import OPTIMIZERS
from spmd_engine.errors import UsageError, counted, one_of
from spmd_engine.files import output_file
from spmd_engine.foreign import json_at
from spmd_engine.models import Model
from spmd_engine.models.lora import LoRAOptions
from spmd_engine.models.names import MODELS, has_weights
from spmd_engine.models.user_code import is_code
from spmd_engine.pictures import GREEN, ORANGE, PALE, PURPLE, SKY, YELLOW, Cell, Picture, html_table, text
from spmd_engine.planning.machine.machine import Machine
from spmd_engine.planning.search.cost_model import CostModel
from spmd_engine.planning.search.estimate import Estimate
from spmd_engine.planning.search.placement import PLACEMENTS
from spmd_engine.planning.search.search import GOALS, MORE, Conflict, Limits, SearchResult
from spmd_engine.planning.search.search_space import FIXABLE, axes_that_shard
from spmd_engine.planning.simulator.simulation import COMMUNICATION, Prediction
from spmd_engine.planning.simulator.step_evaluation import PlanEvaluation
from spmd_engine.units import readable_bytes, readable_seconds

FALLBACKS = ("split", "offload", "assign")  #: uneven stages, offloading, and a helper rank


@dataclass(frozen=True)
class Request:
    """The input of ``plan``."""

    model: Model
    machine: Machine
    ranks: Sequence[int]
    batch_sizes: Sequence[int]
    goal: str = "latency"
    limits: Limits = Limits()
    fixed: Mapping[str, Any] = field(default_factory=dict)  #: choices by name, from ``search_space.FIXABLE``
    axes: Sequence[str] | None = None
    sequence: int | None = None
    dtype: Any = np.float32
    optimizer: str = "adamw"
    base: ParallelConfig = ParallelConfig()  #: options that are not searched
    seconds: float = 20.0
    placement: str = "auto"  #: one of PLACEMENTS
    #: what a plan may do where nothing else fits, of FALLBACKS; None: nothing, which no conflict mentions either
    fallback: Collection[str] | None = FALLBACKS
    named: str = ""  #: the model, as ``train --model`` takes it; empty: by its name
    lora: LoRAOptions | None = None  #: the adapters that the model has

    def __post_init__(self) -> None:
        names = ("goal", GOALS), ("placement", PLACEMENTS), ("optimizer", OPTIMIZERS)
        for field_name, choices in names:
            if (chosen := getattr(self, field_name)) not in choices:
                raise UsageError(f"{field_name} {chosen!r}: choose {', '.join(choices)}")
        for name in self.fallback or ():
            if name not in FALLBACKS:
                raise UsageError(f"fallback {name!r}: choose {', '.join(FALLBACKS)}, or none alone")
        for name in self.fixed.keys() - FIXABLE:
            raise UsageError(f"fixed choice {name!r}: {one_of(name, FIXABLE)}")
        self.base.changed(**{name: self.fixed[name] for name in ("zero", "recompute") if name in self.fixed})
        dtype = str(float_dtype("plan", self.dtype))
        for node in self.machine.nodes:
            self.machine.curve(node, dtype)
            self.base.storage.places.check(on_device=node.has_devices)
        model, context = self.model.name, self.model.context
        if self.sequence is not None and self.sequence < 1:
            raise UsageError(f"--length {self.sequence}: it must be from 1")
        if self.sequence is not None and 0 < context < self.sequence:
            raise UsageError(f"--length {self.sequence}: the context of {model} is {context}; give at most that")
        usable = axes_that_shard(self.model)
        for axis in self.axes or ():
            if axis not in usable:
                raise UsageError(f"--axes: {axis} shards nothing of {model}; choose from {', '.join(usable)}")
        if not self.seconds >= 0:
            raise UsageError(f"--seconds {self.seconds:g}: it must be at least 0")
        chunks, schedule = self.fixed.get("chunks"), self.fixed.get("schedule")
        if chunks is not None and chunks < (2 if schedule == "interleaved" else 1):
            least = "2, with interleaved" if schedule == "interleaved" else "1"
            raise UsageError(f"--chunks {chunks}: it must be at least {least}")

    @property
    def analyze_options(self) -> dict[str, Any]:
        """The options of ``analyze``."""
        return {"dtype": self.dtype, "sequence": self.sequence, "optimizer": OPTIMIZERS[self.optimizer]()}

    @property
    def most_ranks(self) -> int:
        """The most ranks that a relaxation of the request may use."""
        most = max(self.ranks) * MORE[-1]
        return min(most, self.machine.ranks or most)

    def constraint_text(self, name: str, limits: Limits) -> str:
        """A limit, a fixed choice, the ranks or the batch, as text."""
        if name in limits.names:
            return f"{name} at most {limits.shown(name)}"
        if name in ("ranks", "batch_size"):
            return counted(max(self.ranks), "rank") if name == "ranks" else f"a batch of {min(self.batch_sizes)}"
        wanted = self.fixed[name]
        if isinstance(wanted, Mapping):
            wanted = axes_text(wanted)
        if isinstance(wanted, tuple | list):
            wanted = " or ".join(map(str, wanted))
        return f"{name.replace('_', ' ')} {wanted}"

    def cost_model(self, sequence: int | None = None) -> CostModel:
        """The costs of the model; ``sequence`` overrides the length of sequences."""
        options = {**self.analyze_options, "sequence": sequence or self.sequence}
        return CostModel(self.model, self.machine.with_ranks(self.most_ranks), base=self.base, **options)


@dataclass(frozen=True)
class PlanResult:
    """The plan with its evaluation, or the conflict."""

    request: Request
    search: SearchResult
    plan: Estimate | None = None  #: None if nothing fits, and for a given composition
    evaluation: PlanEvaluation | None = None  #: None if the step is too large to be simulated
    reasons: Sequence[str] = ()
    conflict: Conflict | None = None
    nearest_evaluation: PlanEvaluation | None = None  #: the evaluation of the closest plan
    took: float = 0.0  #: seconds of planning
    late: bool = False  #: whether time ran out; then it may be another plan another time
    composition: ParallelConfig | None = None  #: that of the plan, or the fixed one
    micro_batches: int = 1
    batch_size: int = 0  #: samples per step

    @property
    def limits(self) -> Limits:
        """The limits, with the memory of the machine."""
        return self.request.limits.with_memory_of(self.request.machine.with_ranks(max(self.request.ranks)))

    @property
    def why_not(self) -> str:
        """Why nothing fits, in one line."""
        conflict, search, request = self.conflict, self.search, self.request
        assert conflict is not None
        constraints = " and ".join(request.constraint_text(name, self.limits) for name in conflict.constraints)
        if not conflict.decided:
            text = (
                f"{self.ended}: of {search.candidates:,} candidates "
                f"{search.excluded:,} cannot keep a constraint, by bounds, the search estimated {search.estimated:,}, "
                f"and none of these keeps {constraints}; whether another does is unknown"
            )
        elif len(conflict.constraints) > 1:
            text = f"nothing fits: {constraints} cannot be kept together"
        else:
            text = f"{constraints} cannot be kept"
        if self.nearest_evaluation is not None:
            closest = f"the closest plan ({self.closest.candidate})" if self.closest else "it"
            text += f"; {closest} needs {self._needed(self.nearest_evaluation)}"
        if conflict.relaxations:
            text += f". It would fit with {next(iter(conflict.relaxations.values()))[0]}"
        if conflict.helps:
            text += f". Its memory would suffice with {conflict.helps}"
        return text

    @property
    def closest(self) -> Estimate | None:
        """The plan closest to the limits, if nothing fits; None if the mesh was given."""
        return self.conflict.nearest if self.conflict and "mesh" not in self.request.fixed else None

    def _needed(self, nearest: PlanEvaluation) -> str:
        """What the closest plan needs of the limits that it breaks, or of memory if that is one of them."""
        limits, plan = self.limits, self.conflict.nearest if self.conflict else None
        broken = limits.broken(plan) if plan is not None else frozenset()
        if plan is not None and broken and "memory" not in broken:
            needs = limits.measured(plan)
            return " and ".join(f"{limits.shown(name, needs[name])} of {name}" for name in sorted(broken))
        if not nearest.machine.heterogeneous:
            where = f"rank {nearest.peak_rank} at {nearest.peak_step.peak_moment}"
            return f"{readable_bytes(nearest.analysis.peak_bytes)} on {where}"
        own, peaks = self.request.limits.memory_by_rank(nearest.machine), nearest.analysis.peak_bytes_by_rank()
        rank = max(range(len(peaks)), key=lambda rank: peaks[rank] / own[rank])
        return f"{readable_bytes(peaks[rank])} of its {readable_bytes(own[rank])} on rank {rank}"

    @property
    def ended(self) -> str:
        """Why the search ended, if it did before all was known."""
        return f"time ran out (--seconds {self.request.seconds:g})" if self.late else "the evaluations were spent"

    @property
    def precision(self) -> str:
        return str(dtype_of(self.request.dtype))

    @property
    def needs(self) -> tuple[float, float, float]:
        """Seconds of a step, bytes that all ranks send in it, and bytes of the rank that holds most, of what fits."""
        evaluation, plan = self.evaluation, self.plan
        if evaluation is not None:
            return evaluation.seconds, evaluation.bytes_sent, evaluation.analysis.peak_bytes
        assert plan is not None
        return plan.seconds, plan.sent, plan.memory

    @property
    def rank(self) -> tuple[float, ...]:
        """The smaller, the better it fulfils the goal of its request, compared with other precisions."""
        if self.conflict is not None:
            return (inf,)
        seconds, sent, memory = self.needs
        of_goal = {"memory": (memory, seconds), "communication": (sent, seconds)}
        return of_goal.get(self.request.goal, (seconds / (self.batch_size or 1), memory))

    @property
    def command(self) -> str:
        """The command line that trains with the plan."""
        assert self.plan is not None
        candidate = self.plan.candidate
        composition = candidate.composition(self.request.base)
        model = quote(self.request.named or self.request.model.name)
        words = [f"mpiexec -n {candidate.ranks} python -m spmd_engine train --model {model}"]
        words.append("--mesh " + quote(axes_text(candidate.mesh)))  # "|" is the shell's
        words.append(f"--batch-size {candidate.batch_size}")
        words += [f"--precision {self.precision}"] * (self.precision != "float32")
        words += [f"--micro-batches {candidate.micro_batches}"] * (candidate.micro_batches > 1)
        words += [f"--optimizer {self.request.optimizer}"] * (self.request.optimizer != "adamw")
        words += [f"--length {self.request.sequence}"] * (self.request.sequence is not None)
        if (lora := self.request.lora) is not None:
            words += [f"--lora-rank {lora.rank}", *_options_of(lora, "lora-", "rank")]
        return " ".join([*words, *_options_of(composition, "", "mesh")])

    def _repr_html_(self) -> str:
        if self.conflict is not None:
            return f"<p>{escape(self.why_not)}</p>"
        request, evaluation = self.request, self.evaluation
        needs = [(plan.candidate, plan.seconds, plan.memory) for plan in self.search.best]
        if self.plan is None and evaluation is not None:
            needs = [(MeshPosition(evaluation.analysis.axes, {}), evaluation.seconds, evaluation.analysis.peak_bytes)]
        rows = [(name, readable_seconds(seconds), readable_bytes(memory)) for name, seconds, memory in needs]
        parts = [
            f"<p>{escape(f'{request.model.name} on machine {request.machine.name}; goal: {request.goal}')}</p>",
            f"<pre>{escape(self.command)}</pre>" if self.plan is not None else "",
            html_table("The best plans, or the given one", ["plan", "step", "memory of a rank"], rows),
            "".join(f"<p>{escape(reason)}</p>" for reason in self.reasons),
            draw_step(evaluation.prediction, evaluation.analysis.ranks)._repr_html_() if evaluation else "",
        ]
        return "".join(parts)

    def as_json(self) -> dict[str, Any]:
        """The result as JSON."""
        if self.conflict is not None:
            relaxations = [
                {"gives_up": name, "with": text, **plan.as_json()}
                for name, (text, plan) in self.conflict.relaxations.items()
            ]
            content: dict[str, Any] = {"fits": False if self.conflict.decided else None}
            content |= {"conflict": list(self.conflict.constraints), "reason": self.why_not, "ways": relaxations}
            return content | ({"nearest": self.nearest_evaluation.as_json()} if self.nearest_evaluation else {})
        request = self.request
        content = {"fits": True, "model": request.model.name, "machine": request.machine.name, "goal": request.goal}
        assert self.composition is not None
        content |= {} if self.plan is None else self.plan.as_json()
        sizes = {"micro_batches": self.micro_batches, "batch_size": self.batch_size}
        content |= {"composition": self.composition.as_json(), **sizes}
        if self.plan is not None:
            content |= {
                "reasons": list(self.reasons),
                "front": [plan.as_json() for plan in self.search.front],
                "certificate": self.search.certificate,
            }
            content |= {"late": True} if self.late else {}
        return content | (self.evaluation.as_json() if self.evaluation is not None else {})

    def plan_file(self, model: str) -> PlanFile:
        """The plan file of this result, for the model of this name or path.

        Raises UsageError for a model that cannot be trained by name.
        """
        if model not in MODELS and not has_weights(model) and not is_code(model):
            raise UsageError(f"--output: {model} cannot be trained by name, so a plan file for it could not be used")
        request, composition, needs = self.request, self.composition, self.needs
        assert composition is not None and composition.mesh is not None
        return PlanFile(
            ranks=count_ranks(composition.mesh) + len(composition.ranks_outside),
            model=ModelConfig(name=model, dtype=self.precision, lora=request.lora),
            batch_size=self.batch_size,
            micro_batches=self.micro_batches,
            length=request.sequence,
            composition=composition,
            optimizer=request.optimizer,
            machine=request.machine.name,
            goal=request.goal,
            seconds=float(needs[0]),
            bytes_sent=int(needs[1]),
            peak_bytes=int(needs[2]),
        )


def _options_of(configuration: Configuration, prefix: str, without: str) -> list[str]:
    """The values of a configuration that are not the defaults, but one, as options of a command line."""
    default = type(configuration)()
    return [
        f"--{prefix}{name.replace('_', '-')}" + ("" if value is True else f" {quote(str(value))}")
        for name, value in vars(configuration).items()
        if name != without and value != getattr(default, name)
    ]


# --- Plan files: a composition and micro-batches for a model on a number of ranks, and the predicted step


VERSION = 1


@dataclass(frozen=True)
class PlanFile(Configuration):
    """The file that ``plan --output`` writes and ``train --plan`` runs."""

    ranks: int = setting(1, least=1)
    version: int = VERSION
    model: ModelConfig = ModelConfig()
    batch_size: int = setting(16, least=1)  #: samples per step
    micro_batches: int = setting(1, least=1)
    length: int | None = setting(None, least=1)  #: tokens of a sequence; None: the context of the model
    composition: ParallelConfig = ParallelConfig()
    optimizer: str = "adamw"
    machine: str = ""  #: the machine that the plan is for
    goal: str = ""
    seconds: float = 0.0  #: predicted seconds of a step
    bytes_sent: int = 0  #: predicted bytes that all ranks send in a step
    peak_bytes: int = 0  #: predicted bytes of the rank that holds most

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The plan of a file; raises UsageError if it cannot be read or is invalid."""
        content = json_at(path)
        if not isinstance(content, Mapping) or content.get("version") != VERSION or "ranks" not in content:
            raise UsageError(f"{path}: not a plan file; 'plan --output FILE' writes one")
        return cls.from_json(content, str(path))

    def write(self, path: str | Path) -> None:
        """Write the file; raises UsageError if that fails."""
        with output_file(path) as file:
            file.write((json.dumps(self.as_json(), indent=2) + "\n").encode())

    def check(self, ranks: int, model: str | None, where: str) -> None:
        """Raise UsageError if the plan is for another number of ranks, or another model."""
        if ranks != self.ranks:
            raise UsageError(
                f"{where} is a plan for {counted(self.ranks, 'rank')}, but the job has {ranks}: start as many, or "
                "plan for the ranks of the job"
            )
        if model is not None and model != self.model.name:
            raise UsageError(f"{where} is a plan for {self.model.name}, not for {model}: run plan --model {model}")


# --- The predicted step as a picture: a row for each rank, time from left to right


COLUMNS = 88
MOST_ROWS = 16
#: The end of a computation's name, with its letter, colour and description.
KINDS = (
    ("forward again", "R", PURPLE, "forward again"),
    ("forward", "F", SKY, "forward"),
    ("backward (input)", "B", ORANGE, "backward"),
    ("backward (weights)", "B", ORANGE, "backward"),
    ("", "u", GREEN, "loss, norm and update"),
)


def draw_step(prediction: Prediction, ranks: int) -> Picture:
    """A row for each simulated rank of ``ranks``: its main work in each of COLUMNS parts of the step."""
    rows = list(prediction.ranks)[:MOST_ROWS]
    left = max(len(f"rank {rank}") for rank in rows) + 1
    scale = COLUMNS / prediction.seconds
    filled: dict[int, list[Any]] = {rank: [Counter() for _ in range(COLUMNS)] for rank in rows}
    for rank in rows:
        for name, kind, start, end in prediction.spans[rank]:
            letter = "-" if kind == COMMUNICATION else next(c for ending, c, *_ in KINDS if name.endswith(ending))
            first, last = start * scale, end * scale
            for column in range(int(first), min(int(last) + 1, COLUMNS)):
                share = min(last, column + 1) - max(first, column)
                if share > 0:
                    filled[rank][column][letter] += share
    cells = [text(left, 0, "0"), text(left + COLUMNS - 8, 0, readable_seconds(prediction.seconds), 8, "right")]
    used = set()
    for row, rank in enumerate(rows, 1):
        cells.append(text(0, row, f"rank {rank}"))
        letters = [shares.most_common(1)[0][0] if shares else "." for shares in filled[rank]]
        used |= set(letters)
        cells += _runs(left, row, letters)
    legend = [f"{letter} {name}" for _, letter, _, name in dict.fromkeys(KINDS) if letter in used]
    legend = list(dict.fromkeys(legend)) + ["- waits in communication"] * ("-" in used) + [". idle"] * ("." in used)
    notes = [", ".join(legend) + "; what a rank does most in each column."]
    if len(prediction.ranks) > len(rows):
        notes.append(f"{len(prediction.ranks) - len(rows)} further ranks are not drawn.")
    if len(prediction.ranks) < ranks:
        notes.append(f"{len(prediction.ranks)} ranks, one for each stage, represent all {ranks}.")
    return Picture("the step, as predicted", cells, notes=notes)


def _runs(left: int, row: int, letters: list[str]) -> list[Cell]:
    fills = {letter: fill for _, letter, fill, _ in KINDS} | {"-": YELLOW}
    cells = []
    for letter, run in groupby(letters):
        label = "".join(run)
        cells.append(Cell(left, row, len(label), 1, label, fills.get(letter, PALE), False, "left"))
        left += len(label)
    return cells
