"""``plan``: the best way to train a model on a machine, with reasons; or the reason why nothing fits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from spmd_engine.arguments import checked
from spmd_engine.axes import MeshPosition, checked_axes, count_ranks
from spmd_engine.engine import ModelConfig, ParallelConfig
from spmd_engine.engine.batch import check_batch
from spmd_engine.engine.build import composed_layout
from spmd_engine.errors import UsageError, one_of
from spmd_engine.foreign import parse_toml, read_text, reading
from spmd_engine.formats.safetensors_file import read_json
from spmd_engine.importing import uncollected
from spmd_engine.models import GPTSize, Model, decoder, gpt, names
from spmd_engine.models.hf.read_config import read_config
from spmd_engine.models.lora import LoRAOptions, with_adapters
from spmd_engine.models.user_code import is_code
from spmd_engine.planning.machine.machine import Machine, default_machine
from spmd_engine.planning.plan_result import FALLBACKS, PlanResult, Request
from spmd_engine.planning.search.estimate import Estimate
from spmd_engine.planning.search.neighbours import with_less_memory
from spmd_engine.planning.search.plan_search import PlanSearch
from spmd_engine.planning.search.search import Conflict, Limits, SearchResult
from spmd_engine.planning.search.search_space import Candidate
from spmd_engine.planning.simulator.step_evaluation import PlanEvaluation, evaluate_step, peak_memory

NOTHING_FITS = 1  #: the exit code


@checked(
    {"seconds": 0},
    model="a Model, or its name",
    mesh='axes with their sizes, as {"data": 2}',
    ranks="a number",
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
    numbers, sizes = ([one] if isinstance(one, int) else one for one in (ranks, batch_size))
    for name, given in (("ranks", numbers), ("batch_size", sizes)):
        if not given or min(given) < 1:
            raise UsageError(f"plan: {name} is {', '.join(map(str, given)) or 'empty'}; it must be from 1")
    limits = {"memory": memory, "latency": latency, "bandwidth": bandwidth, "compute": compute}
    searched = fixed, axes, sequence, dtype, optimizer, base, seconds, placement, fallback
    request = Request(built, chosen, numbers, sizes, goal, Limits.from_json(limits, "plan"), *searched)
    return fixed_plan(request) if mesh else find_plan(request)


@uncollected()  # costs of layers live as long as the search; garbage collection took a third of its time
def find_plan(request: Request) -> PlanResult:
    """The best plan, or why there is none. Raises UsageError for given helper ranks, which need a mesh."""
    if request.base.assigned:
        raise UsageError(
            f"--assign {request.base.assign} needs --mesh, the mesh of the other ranks: helper ranks are not searched"
        )
    return PlanSearch(request).run()


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
