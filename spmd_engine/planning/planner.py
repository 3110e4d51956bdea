"""``plan``: the best way to train a model on a machine, with reasons; or the reason why nothing fits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from spmd_engine.arguments import checked
from spmd_engine.axes import MeshPosition, checked_axes, count_ranks
from spmd_engine.engine import ModelConfig, ParallelConfig
from spmd_engine.engine.batch import check_batch
from spmd_engine.engine.build import composed_layout
from spmd_engine.engine.state.assignment import divide, parse_division
from spmd_engine.errors import UsageError, counted, one_of
from spmd_engine.foreign import parse_toml, read_text, reading
from spmd_engine.formats.safetensors_file import read_json
from spmd_engine.importing import uncollected
from spmd_engine.models import GPTSize, Model, decoder, gpt, names
from spmd_engine.models.hf.read_config import read_config
from spmd_engine.models.lora import LoRAOptions, with_adapters
from spmd_engine.models.user_code import is_code
from spmd_engine.planning.machine.machine import Machine, default_machine
from spmd_engine.planning.plan_result import FALLBACKS, PlanResult, Request
from spmd_engine.planning.search.cost_model import CostModel
from spmd_engine.planning.search.estimate import Estimate
from spmd_engine.planning.search.neighbours import places_on, with_less_memory
from spmd_engine.planning.search.plan_search import PlanSearch, evaluate_plan
from spmd_engine.planning.search.search import Conflict, Limits, SearchResult
from spmd_engine.planning.search.search_space import Candidate, fields_of
from spmd_engine.planning.simulator.step_evaluation import PlanEvaluation, evaluate_step, peak_memory
from spmd_engine.units import readable_bytes, readable_seconds

NOTHING_FITS = 1  #: the exit code


@checked(
    {"seconds": 0, "ranks": 1, "batch_size": 1},
    model="a Model, or its name",
    mesh='axes with their sizes, as {"data": 2}',
    fixed='choices by name, as {"zero": 3}',
)
def plan(
    model: str | Model,
    *,
    ranks: int | Sequence[int] | None = None,
    machine: str | Path | Machine | None = None,
    goal: str = "latency",
    batch_size: int | Sequence[int] = 16,
    memory: float | str | None = None,
    latency: float | str | None = None,
    bandwidth: float | str | None = None,
    compute: float | str | None = None,
    mesh: Mapping[str, int] | None = None,
    fixed: Mapping[str, Any] | None = None,
    axes: Sequence[str] | None = None,
    sequence: int | None = None,
    dtype: Any = np.float32,
    optimizer: str = "adamw",
    base: ParallelConfig = ParallelConfig(),  # noqa: B008 (immutable)
    seconds: float = 20.0,
    placement: str = "auto",
    fallback: Collection[str] = FALLBACKS,
) -> PlanResult:
    """The best way to train a model on a machine, as the command ``plan`` finds it; or why nothing fits.

    ``model`` is a model, the name of one, or a file that describes one. ``machine`` is a machine, a packaged name such
    as "a100", or a machine file; None: the calibrated one. With several ``ranks`` or batch sizes the best is chosen.
    ``goal`` is "latency", "throughput", "memory", "balance" or "communication". Limits: ``memory`` of a rank in bytes
    ("24GiB"), ``latency`` of a step and ``compute`` of a rank in seconds ("100ms"), ``bandwidth`` in bytes a second of
    a rank.

    ``mesh`` evaluates this mesh only; ``fixed`` has other choices that are not searched: micro_batches, zero,
    sequence_parallel, schedule, chunks, recompute, stages. ``axes`` are the mesh axes to consider, ``sequence`` the
    tokens of a sample (None: the model's context), ``base`` the options that are not searched, and ``seconds`` the
    processor time after which all searches and simulations stop; then the result is ``late``. ``placement`` says how
    ranks of unequal nodes are placed on the mesh: "order" as the machine lists them, "greedy", "assign", "anneal" or
    "genetic" by the costs of single ranks, "auto" by simulations.
    ``fallback`` has what a plan may do where nothing else fits: "split", stages of different sizes, "offload", and
    "assign", a helper rank for a rank that lacks memory.
    In the result ``plan`` is None if nothing fits; then ``why_not`` gives the reason.

    Raises UsageError for an unknown model or machine, and for options that contradict each other.
    """
    fixed = {**(fixed or {}), **({"mesh": checked_axes(mesh)} if mesh else {})}
    if ranks is None:
        if not mesh:
            raise UsageError("plan needs ranks, or a mesh")
        ranks = count_ranks(fixed["mesh"])
    built = planned_model(model, base=base) if isinstance(model, str) else model
    chosen = machine if isinstance(machine, Machine) else default_machine(machine)
    numbers, sizes = (tuple(one) if isinstance(one, Iterable) else (one,) for one in (ranks, batch_size))
    for name, given in (("ranks", numbers), ("batch_size", sizes)):
        if not given or min(given) < 1:
            raise UsageError(
                f"plan: {name} is {', '.join(map(str, given)) or 'empty'}; give a whole number from 1, or several"
            )
    limits = {"memory": memory, "latency": latency, "bandwidth": bandwidth, "compute": compute}
    searched = fixed, axes, sequence, dtype, optimizer, base, seconds, placement, fallback
    request = Request(built, chosen, numbers, sizes, goal, Limits.from_json(limits, "plan"), *searched)
    return fixed_plan(request) if mesh else find_plan(request)


@uncollected()  # costs of layers live as long as the search; garbage collection took a third of its time
def find_plan(request: Request) -> PlanResult:
    """The best plan, or why there is none. Raises UsageError for given helper ranks, which need a mesh, and for fixed
    stages that the model cannot be divided into."""
    if request.base.assigned:
        raise UsageError(
            f"--assign {request.base.assign} needs --mesh, the mesh of the other ranks: helper ranks are not searched"
        )
    return PlanSearch(with_first_layers(request)).run()


def with_first_layers(request: Request) -> Request:
    """The request with the fixed stages, if any, as the first layer of each. Raises UsageError if they are not such."""
    if (given := request.fixed.get("stages")) is None:
        return request
    stages = parse_division(",".join(map(str, given)) if isinstance(given, (list, tuple)) else str(given))
    if isinstance(stages, str):
        raise UsageError(f"--stages {stages}: stages are planned; give --mesh as well, or the first layers")
    divide(request.model, len(stages), stages)
    return replace(request, fixed={**request.fixed, "stages": stages})


def fixed_plan(request: Request) -> PlanResult:
    """The evaluation of a given composition; the constraints that it breaks are the conflict."""
    began = perf_counter()
    fixed = {"zero": None, "schedule": None, "chunks": None, "recompute": "none", **request.fixed}
    axes, micro_batches = dict(fixed.pop("mesh")), fixed.pop("micro_batches", 1)
    stages, parallel = fixed.pop("stages", None), bool(fixed.pop("sequence_parallel", False))
    stages = stages if isinstance(stages, str | None) else ",".join(map(str, stages))
    composition = request.base.changed(mesh=axes, sequence_parallel=parallel, stages=stages, **fixed)
    ranks, batch_size = max(request.ranks) + len(composition.ranks_outside), request.batch_sizes[0]
    machine = request.machine.with_ranks(ranks)
    position = MeshPosition(axes, dict.fromkeys(axes, 0))
    layout = composed_layout(request.model, position, composition)
    check_batch(batch_size, micro_batches, layout.spec("b"), position)
    options = request.analyze_options

    def evaluated(composition: ParallelConfig) -> PlanEvaluation:
        return evaluate_step(request.model, machine, axes, composition, batch_size, micro_batches, **options)

    evaluation = evaluated(composition)
    memory_limits = request.limits.memory_by_rank(evaluation.machine) if machine.heterogeneous else ()
    limits = request.limits.with_memory_of(machine)
    candidate = Candidate(tuple(axes.items()), batch_size, micro_batches, assign=composition.assign)
    needs = Estimate(candidate).evaluated(evaluation, memory_limits)
    broken = [name for name in limits.names if name in limits.broken(needs)]
    tried = with_less_memory(composition, composition.storage.stage(axes), machine) if "memory" in broken else ()
    steps = ((what, evaluated(other)) for what, other in tried)
    helping = (what for what, step in steps if peak_memory(step.analysis, memory_limits) <= (limits.memory or 0))
    helps = next(helping, "")
    return PlanResult(
        request,
        SearchResult(),
        evaluation=evaluation,
        conflict=Conflict([*broken, "mesh"], nearest=needs, helps=helps) if broken else None,
        nearest_evaluation=evaluation if broken else None,
        took=perf_counter() - began,
        composition=composition,
        micro_batches=micro_batches,
        batch_size=batch_size,
    )


# --- Models to plan for, by name or by file: TOML with the sizes of a GPT, ``config.json`` of Hugging Face, or GGUF


def planned_model(
    name: str,
    lora: LoRAOptions | None = None,
    base: ParallelConfig = ParallelConfig(),  # noqa: B008 (immutable)
) -> Model:
    """A model by name, as training builds it for this composition, or by file.

    Files are TOML with the sizes of a GPT (layers, width, heads, context and, optionally, vocabulary, hidden, tied,
    key_value_heads), a ``config.json`` of Hugging Face or its folder, and GGUF. With ``lora`` the model is frozen and
    has adapters. Raises UsageError for unknown names, and for files with unknown or missing fields.
    """
    model, family = _read(name, base)
    return model if lora is None else with_adapters(model, lora, family)


def _read(name: str, base: ParallelConfig) -> tuple[Model, str]:
    """The model as this composition computes it, and the family of its weight names."""
    method = base.context_method or "ring"
    if is_code(name) or name in names.MODELS:
        return ModelConfig(name).build(base), names.family_of(name)
    path = Path(name) if names.is_description(name) or not names.is_path(name) else names.located(name)
    if (path / "config.json").is_file():
        path = path / "config.json"
    if path.suffix == ".json":
        shape, unknown = read_config(read_json(path), f"model {path}")
        names.warn_unknown_fields(str(path), unknown)
        return decoder(shape, names.short_name(str(path.parent.resolve())), context_method=method), shape.family
    if path.suffix == ".gguf":
        shape = names.load_config(path)
        return decoder(shape, path.stem, context_method=method), shape.family
    if path.suffix != ".toml":
        raise UsageError(f"unknown model {name!r}; {one_of(name, names.MODELS)}, or give a .toml file or a config.json")
    with reading(f"model {name}: invalid TOML"):
        content = parse_toml(read_text(name))
    size = GPTSize.from_json(content, f"model {name}")
    try:
        return gpt(size, Path(name).stem, context_method=method), "gpt2"  # a GPT's weights have the names of GPT-2
    except UsageError as error:
        raise UsageError(f"model {name}: {error}") from error


# --- ``plan explain``: answers to common questions about memory and time, from dry runs


MOST_BATCH = 1 << 20
MOST_DOUBLINGS = 12

Answer = tuple[Sequence[str], Any]  #: lines of text, and the same as data


def explain(request: Request) -> tuple[str, list[dict[str, Any]]]:
    """A line about the explained plan, with the requested mesh or data parallelism, and eight answers about it: what
    else would fit, and what it would take. Each has the "question", the "answer" as lines of text, and its "data".
    ``analyze`` and ``inspect`` describe the plan itself."""
    explainer = _Explainer(request if request.fixed.get("mesh") else with_first_layers(request))
    answers = (
        ("What is the peak memory now, where and when?", explainer.peak),
        ("What is the largest batch?", explainer.batch),
        ("What is the longest sequence?", explainer.sequence),
        ("How many data-parallel ranks?", explainer.data_ranks),
        ("What does each ZeRO stage save, and cost?", lambda: explainer.vary("zero", range(4))),
        ("What does recomputation save?", lambda: explainer.vary("recompute", ("none", "attention", "block"))),
        ("How many micro-batches?", explainer.micro_batches),
        ("What does offloading save, and cost?", explainer.places),
    )
    return explainer.subject, [
        dict(zip(("question", "answer", "data"), (question, *answer()), strict=True)) for question, answer in answers
    ]


class _Explainer:
    """Answers questions about a plan, each by one method."""

    def __init__(self, request: Request) -> None:
        self.request, self.model, self.ranks = request, request.model, max(request.ranks)
        machine = request.machine.with_ranks(self.ranks)
        self.memory = request.limits.memory or machine.memory_of(0)
        fixed = {name: wanted for name, wanted in request.fixed.items() if name not in ("mesh", "stages")}
        axes = dict(request.fixed.get("mesh") or {"data": self.ranks})
        fixed.setdefault("micro_batches", 1)
        if axes.get("pipe", 1) > 1:
            fixed.setdefault("schedule", "1f1b")
        self.base = Candidate(tuple(axes.items()), request.batch_sizes[0], **fields_of(request.base), **fixed)
        self.costs = request.cost_model()
        self.evaluation = evaluate_plan(self.model, machine, self.base, request.base, **request.analyze_options)
        self.at_peak = self.evaluation.peak_step.peak

    @property
    def subject(self) -> str:
        """The explained plan, in one line."""
        request = self.request
        note = "" if request.fixed.get("mesh") else " (no --mesh: data parallelism)"
        return (
            f"{self.model.name}, {self.model.parameter_count:,} parameters in {request.dtype}, batch "
            f"{self.base.batch_size}, on {counted(self.ranks, 'rank')} of machine {request.machine.name}: {self.base}"
            f"{note}"
        )

    # --- common parts of answers

    def _estimate(self, costs: CostModel | None = None, **changes: Any) -> Estimate | None:
        """The estimate of the explained plan with these changes; None if the model cannot be sharded by them."""
        estimator = (costs or self.costs).estimator(replace(self.base, stages=None, **changes))
        return estimator.estimate() if estimator is not None else None

    def _fits(self, estimate: Estimate | None) -> bool:
        return estimate is not None and estimate.memory <= self.memory

    def _compare(self, changes: Mapping[Any, tuple[str, Mapping[str, Any]]]) -> tuple[list[str], dict[Any, Any]]:
        """A line for the plan with each of the ``changes``: key -> (name, fields of the candidate)."""
        lines, data = [], {}
        for key, (name, fields) in changes.items():
            estimate = self._estimate(**fields)
            data[key] = None
            text = "not possible"
            if estimate is not None:
                needs = f"{readable_bytes(estimate.memory)}, a step {readable_seconds(estimate.seconds)}"
                text = needs if self._fits(estimate) else f"{needs}, does not fit"
                data[key] = {"bytes": int(estimate.memory), "seconds": float(estimate.seconds)}
            lines.append(f"{name}: {text}")
        return lines, data

    def vary(self, name: str, options: Sequence[Any]) -> Answer:
        """The plan with each of several values of one field."""
        label, current = name.replace("_", " "), getattr(self.base, name)
        changes = {}
        for option in options:
            text = f"{label} {'nothing' if option is None else option}" + " (now)" * (option == current)
            changes[str(option)] = text, {name: option}
        return self._compare(changes)

    def _largest(self, fits: Callable[[int], bool], start: int, most: int) -> int:
        """The largest number from ``start`` on that fits, by doubling and bisection; 0 if none."""
        if not fits(start):
            return 0
        low = start
        while low * 2 <= most and fits(low * 2):
            low *= 2
        numbers = range(low, low * 2, max(start // 2, 1))
        return numbers[bisect_left(numbers, True, key=lambda number: not fits(number)) - 1]

    # --- the answers

    def peak(self) -> Answer:
        size = self.at_peak.bytes
        where = f"rank {self.evaluation.peak_rank}, at {self.evaluation.peak_step.peak_moment}"
        lines = [f"{readable_bytes(size)} on {where}", f"memory of a rank: {readable_bytes(self.memory)}"]
        return lines, {"bytes": size}

    def batch(self) -> Answer:
        parts = self.base.batch_ranks * self.base.micro_batches
        best = self._largest(lambda n: self._fits(self._estimate(batch_size=n * parts)), 1, MOST_BATCH) * parts
        smallest = self._estimate(batch_size=parts)
        needs = f"; that needs {readable_bytes(smallest.memory)}" if smallest is not None else ""
        text = f"{best} samples a step" if best else f"none: one sample per rank does not fit{needs}"
        return [f"{text}, in {readable_bytes(self.memory)} per rank"], best

    def sequence(self) -> Answer:
        most = self.model.context
        if "s" not in self.model.inputs.split() or not most:
            return ["the model has no sequence"], None

        def fits(length: int) -> bool:
            return self._fits(self._estimate(self.request.cost_model(length)))

        if fits(most):
            return [f"{most} tokens: the whole context fits"], most
        best = self._largest(fits, 16, most)
        return [f"{best} tokens of {most}" if best else "not even 16 tokens fit"], best

    def data_ranks(self) -> Answer:
        others = {axis: size for axis, size in self.base.axes if axis != "data"}
        most = min(self.costs.machine.ranks // prod(others.values()), self.base.batch_size // self.base.micro_batches)
        changes = {}
        for n in (1 << power for power in range(MOST_DOUBLINGS) if 1 << power <= most):
            axes = {"data": n} | others if n > 1 or not others else others
            changes[n] = f"data={n}", {"axes": tuple(axes.items())}
        lines, data = self._compare(changes)
        fewest = next((n for n, numbers in data.items() if numbers and numbers["bytes"] <= self.memory), None)
        return [*lines, f"the fewest that fit: {fewest}" if fewest else "none of these fits"], data

    def micro_batches(self) -> Answer:
        batch, ranks = self.base.batch_size, self.base.batch_ranks
        possible = [n for n in range(1, max(batch // ranks, 1) + 1) if batch % n == 0 and batch // n >= ranks]
        lines, data = self.vary("micro_batches", possible[:10])
        seconds = {key: plan["seconds"] for key, plan in data.items() if plan and plan["bytes"] <= self.memory}
        best = f"the quickest that fits: {min(seconds, key=seconds.__getitem__)}" if seconds else "none of these fits"
        return [*lines, best], data

    def places(self) -> Answer:
        node = self.request.machine.nodes[0]
        kinds = (None, "optimizer", "parameters", "activations", "optimizer,activations")
        lines, data = self.vary("offload", places_on(self.request.machine, self.base.zero, kinds))
        state = self.at_peak.bytes_by_kind.get("optimizer state", 0)
        disk = f"{node.disk_read / 1e9:.3g} GB/s read and {node.disk_write / 1e9:.3g} GB/s written on each node"
        return [f"optimizer state is {readable_bytes(state)} of the peak; the disk: {disk}", *lines], data
