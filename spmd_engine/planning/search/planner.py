"""``plan``: the best way to train a model on a machine, and why; or why there is none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter, process_time
from typing import Any

from spmd_engine.axes import MeshPosition
from spmd_engine.engine.batch import check_batch
from spmd_engine.engine.parallel_config import composed_layout
from spmd_engine.errors import UsageError
from spmd_engine.garbage import uncollected
from spmd_engine.planning.dry_run.layer_cache import PassCache
from spmd_engine.planning.report.plan_result import Answer, Request, rooms_of, within
from spmd_engine.planning.search.estimate import Estimate
from spmd_engine.planning.search.goals import LIMITS, Constraints, Limits, value
from spmd_engine.planning.search.plan_evaluation import Foresight, look, look_at
from spmd_engine.planning.search.profile import with_even_vocabulary
from spmd_engine.planning.search.relaxation import MORE, Conflict, Question, Relaxation, closest, conflict_of, instead
from spmd_engine.planning.search.search import KEPT, Certificate, Found, Planner, pareto, thinned
from spmd_engine.planning.search.search_space import FIXABLE, Candidate, SearchSpace, axes_that_cut, candidates
from spmd_engine.planning.search.uneven_shares import needed, state_shares, work_shares

MISFIT = 1  #: the exit code where nothing fits
MOST_TO_SIMULATE = 20_000  #: layers times micro-batches of a pipeline's filling, beyond which estimates must do
LOOKING = 0.25  #: of the seconds for the search, the share that simulating more than one plan may take
IMPROVED = 4  #: plans at most that are chosen, each since by the simulation it is better than the one before
TIGHTENED = 4  #: searches at most, each within limits that make up for how far the estimates of the last one erred


@dataclass(frozen=True)
class _Seen:
    """A plan as it was estimated, and looked at closely."""

    estimate: Estimate
    foresight: Foresight | None  #: None if its step is too large to be looked at in whole
    rooms: Sequence[float] = ()  #: bytes that each rank may hold, where ranks are unlike

    @property
    def foreseen(self) -> Estimate:
        """The estimate with what the whole step takes, holds and sends, where that is known."""
        seen = self.foresight
        if seen is None:
            return self.estimate
        work = max(seen.prediction.working.values(), default=0.0) if seen.whole else self.estimate.work
        peak = needed(seen.analysis, self.rooms)
        found = {"seconds": seen.seconds, "memory": peak, "sent": seen.bytes_sent, "work": work}
        return replace(self.estimate, **found, simulated=True)


class _Looking:
    """Looks at estimated plans closely, at each once."""

    def __init__(self, request: Request, cache: PassCache) -> None:
        self.request = request
        self._known: dict[tuple[Candidate, bool], Foresight | None] = {}
        self._left = LOOKING * request.seconds
        self._cache = cache  # plans that are near each other have the same layers
        machine = request.machine.with_ranks(max(request.ranks))
        self.rooms = rooms_of(request.limits, machine) if machine.unlike else ()

    def at(self, estimate: Estimate, *, even: bool = False) -> _Seen:
        """Its whole step, if that is small enough.

        ``even``: with a vocabulary that the mesh cuts evenly, whose largest part is none the larger. Then ranks are
        alike, and the step is found many times sooner.
        """
        request, candidate = self.request, estimate.candidate
        model = request.model
        if even:
            model = with_even_vocabulary(model, candidate.mesh, candidate.composition(request.base))
        key = candidate, model.vocabulary != request.model.vocabulary
        if key not in self._known:
            foresight = None
            if self._is_small_enough(candidate):
                machine, options = request.machine.with_ranks(candidate.ranks), request.analyzed
                foresight = look_at(model, machine, candidate, request.base, cache=self._cache, **options)
            self._known[key] = foresight
        return _Seen(estimate, self._known[key], self.rooms[: candidate.ranks])

    def at_each(self, estimates: Sequence[Estimate]) -> list[_Seen]:
        """As many as there is time for, the first anyway."""
        seen = []
        for each in {each.candidate: each for each in estimates}.values():
            began = process_time()
            if seen and self._left <= 0:
                break
            seen += self.with_shares(each)
            self._left -= process_time() - began
        return seen

    def with_shares(self, estimate: Estimate) -> list[_Seen]:
        """A plan; and where ranks are unlike, the same with shares of work, and then of state, that suit them."""
        even = now = self.at(estimate, even=True)
        found = [even]
        for suited in (self._suited_work, self._suited_state) if self.rooms and even.foresight is not None else ():
            if changed := suited(now):
                now = self.at(replace(now.estimate, candidate=replace(now.estimate.candidate, **changed)), even=True)
                found.append(now)
        return found

    def _suited_work(self, seen: _Seen) -> dict[str, str]:
        candidate = seen.estimate.candidate
        machine = self.request.machine.with_ranks(candidate.ranks)
        shares = None if self.request.base.shares else work_shares(candidate, seen.foresight, machine)
        return {"shares": shares} if shares else {}

    def _suited_state(self, seen: _Seen) -> dict[str, str]:
        candidate = seen.estimate.candidate
        fixed = self.request.base.state_shares or not candidate.zero
        shares = None if fixed else state_shares(candidate, seen.foresight, self.rooms[: candidate.ranks])
        return {"state_shares": shares} if shares else {}

    def _is_small_enough(self, candidate: Candidate) -> bool:
        filled = min(candidate.micro_batches, 3 * candidate.pipe)
        return len(self.request.model.layers) * filled <= MOST_TO_SIMULATE // max(candidate.pipe // 4, 1)


@uncollected()  # costs of layers stay as long as the search: to go through them again and again took a third of it
def plan(request: Request) -> Answer:
    """The best plan, or why there is none."""
    began, most = perf_counter(), max(request.ranks)
    limits = within(request.limits, request.machine.with_ranks(most))
    most_ranks = request.machine.ranks or 1 << 20
    choices = SearchSpace(
        request.model,
        request.ranks,
        request.batch_sizes,
        request.machine.nodes[0].ranks,
        axes=request.axes,
        **request.fixed,
    )
    planner = Planner(
        request.model,
        request.machine.with_ranks(min(most * MORE[-1], most_ranks)),
        dtype=request.dtype,
        sequence=request.sequence,
        optimizer=request.analyzed["optimizer"],
        base=request.base,
    )
    looking, held = _Looking(request, planner.profiles.cache), limits
    for _ in range(TIGHTENED):
        found = planner.search(choices, Constraints(held, request.fixed), request.goal, seconds=request.seconds)
        if not found.best:
            _refuse_impossible(choices, found)
            break
        seen = looking.at_each(found.best)
        if any(not limits.broken(each.foreseen) for each in seen):
            return _answer(looking, planner, choices, limits, found, seen, began)
        held = _tightened(held, limits, seen)
    question = Question(choices, Constraints(held, request.fixed), request.goal, most_ranks)
    seen = looking.at_each(closest(planner, question, request.seconds))
    if any(not limits.broken(each.foreseen) for each in seen):  # whose estimates are above what their steps need
        return _answer(looking, planner, choices, limits, replace(found, best=[]), seen, began)
    if found.certificate.complete:
        conflict = conflict_of(planner, question, request.seconds)
    else:  # nothing is known of what was not looked at
        conflict = Conflict(question.constraints.names, [], decided=False)
    asked = replace(question, constraints=Constraints(limits, request.fixed))
    ways = [_as_it_will_be(way, looking, asked, seen) for way in conflict.ways]
    nearest = min(seen, key=lambda each: value("memory", each.foreseen), default=None)
    if nearest is not None:
        nearest = looking.at(nearest.estimate)
        conflict = replace(conflict, nearest=nearest.foreseen)
    return Answer(
        request,
        found,
        conflict=replace(conflict, ways=ways),
        conflict_foresight=nearest.foresight if nearest is not None else None,
        took=perf_counter() - began,
    )


def _answer(
    looking: _Looking,
    planner: Planner,
    choices: SearchSpace,
    limits: Limits,
    found: Found,
    seen: Sequence[_Seen],
    began: float,
) -> Answer:
    """The best of those that were looked at and keep the limits, and of what differs from it in one choice."""
    request, certificate = looking.request, found.certificate
    constraints = Constraints(limits, request.fixed)

    def as_wanted(each: _Seen) -> tuple[float, ...]:
        return value(request.goal, each.foreseen)

    def fitting() -> list[_Seen]:
        kept = (each for each in seen if not constraints.broken(each.estimate.candidate, each.foreseen))
        return sorted(kept, key=as_wanted)

    for _ in range(IMPROVED):
        best = fitting()[0]
        others = list(alternatives(planner, choices, limits, best.estimate, request.goal))
        known = {each.estimate.candidate for each in seen}
        more = [*(each.estimate for each in others if each.estimate), *thinned(found.front)]
        seen = [*seen, *looking.at_each([each for each in more if each.candidate not in known])]
        if fitting()[0] is best:
            break
    chosen = looking.at(best.estimate)
    if not found.best:  # by their estimates nothing that was looked at fits, and so nothing of it is better
        reached = value(request.goal, chosen.estimate)[0]
        bound = reached if certificate.complete else min(reached, certificate.bound)
        certificate = replace(certificate, best=reached, bound=bound)
    rest = [each for each in fitting() if each is not best]
    simulated: dict[Candidate, Estimate] = {}
    for each in sorted(seen, key=as_wanted):
        simulated.setdefault(even(each.estimate.candidate), each.foreseen)
    return Answer(
        request,
        replace(
            found,
            best=[each.foreseen for each in (chosen, *rest)][:KEPT],
            front=pareto([chosen.foreseen, *(each.foreseen for each in rest)]),
            certificate=certificate,
        ),
        chosen.estimate,
        chosen.foresight,
        [*_why_shares(chosen, seen), *reasons(limits, chosen.foreseen, others, simulated)],
        took=perf_counter() - began,
    )


def _why_shares(chosen: _Seen, seen: Sequence[_Seen]) -> Iterator[str]:
    """What shares gain over as much for each rank."""
    candidate, mine = chosen.estimate.candidate, chosen.foreseen
    for name in ("shares", "state_shares"):
        without = replace(candidate, **{name: None, "state_shares": None})
        other = next((each.foreseen for each in seen if each.estimate.candidate == without), None)
        if getattr(candidate, name) and other is not None:
            slower, larger = other.seconds / mine.seconds - 1, other.memory / mine.memory - 1
            what = f"{name.replace('_', ' ')} {getattr(candidate, name)}, not as much each"
            yield f"{what}: that would take {slower:+.1%} time, and {larger:+.1%} of the memory that ranks have"


def fixed_plan(request: Request) -> Answer:
    """A composition that is given, looked at closely: it fits, or what it breaks is the conflict."""
    began = perf_counter()
    axes, fixed = request.fixed["mesh"], dict(request.fixed)
    ranks = max(request.ranks)
    machine = request.machine.with_ranks(ranks)
    stages = fixed.get("stages")
    composition = request.base.changed(
        mesh=dict(axes),
        zero=fixed.get("zero"),
        sequence_parallel=bool(fixed.get("sequence_parallel")),
        schedule=fixed.get("schedule"),
        chunks=fixed.get("chunks"),
        stages=stages if isinstance(stages, str | None) else ",".join(map(str, stages)),
        recompute=fixed.get("recompute", "none"),
    )
    micro_batches = fixed.get("micro_batches", 1)
    place = MeshPosition(dict(axes), dict.fromkeys(axes, 0))
    check_batch(
        request.batch_sizes[0], micro_batches, composed_layout(request.model, place, composition).spec("b"), place
    )
    seen = look(request.model, machine, axes, composition, request.batch_sizes[0], micro_batches, **request.analyzed)
    limits = within(request.limits, machine)
    needs = {
        "memory": needed(seen.analysis, rooms_of(request.limits, machine) if machine.unlike else ()),
        "latency": seen.seconds,
        "bandwidth": seen.bytes_sent / ranks / seen.seconds,
        "compute": max(seen.prediction.working.values(), default=0.0),
    }
    broken = [name for name, need in needs.items() if (getattr(limits, name) or float("inf")) < need]
    nothing = Found([], [], Certificate(0.0, 0.0, 1, 0, 1))
    answer = Answer(
        request,
        nothing,
        foresight=seen,
        took=perf_counter() - began,
        composition=composition,
        micro_batches=micro_batches,
    )
    if broken:
        return replace(answer, conflict=Conflict([*broken, "mesh"], []), conflict_foresight=seen)
    return answer


def _refuse_impossible(choices: SearchSpace, found: Found) -> None:
    if not found.certificate.candidates:
        said = ", ".join(map(str, choices.ranks)), ", ".join(map(str, choices.batch_sizes))
        raise UsageError(
            f"{choices.model.name} cannot be spread over {said[0]} ranks with a batch of {said[1]} and what is fixed: "
            "fewer ranks, or a larger --batch-size"
        )


def _tightened(held: Limits, limits: Limits, seen: Sequence[_Seen]) -> Limits:
    """What estimates have to keep, since all these did and yet their steps do not: the less by as much as these err."""
    tighter = {}
    for name in LIMITS:
        shares = [
            limits.measured(each.estimate)[name] / limits.measured(each.foreseen)[name]
            for each in seen
            if name in limits.broken(each.foreseen)
        ]
        if shares:
            tighter[name] = min(getattr(held, name), getattr(limits, name) * max(shares)) * 0.998
    return replace(held, **tighter)


def _as_it_will_be(way: Relaxation, looking: _Looking, asked: Question, seen: Sequence[_Seen]) -> Relaxation:
    """A way out that gives up a limit, with what its whole step needs of that in the place of what was asked for; or
    what gives up less of it, of plans that were ``seen``."""
    name, limits = way.gives_up, asked.constraints.limits
    if name not in LIMITS:
        return way
    plans = [looking.at(way.plan, even=True).foreseen, *(each.foreseen for each in seen)]
    others_kept = [each for each in plans if limits.broken(each) <= {name}]
    plan = min(others_kept or plans[:1], key=lambda each: limits.measured(each)[name])
    return Relaxation(name, instead(name, plan, asked), plan)


# --- Why a plan is what it is: what each of its choices gains over the nearest others


#: Strategies of one kind alone: their name, mesh axis and stages of ZeRO (None: any).
PLAIN = (
    ("data parallelism", "data", (0,)),
    ("ZeRO", "data", (1, 2, 3)),
    ("tensor parallelism", "model", None),
    ("a pipeline", "pipe", None),
)
SEARCH_SECONDS = 0.5  #: for the best plan of each of these


@dataclass(frozen=True)
class Alternative:
    """A plan that differs in one choice: ``what`` the plan has, and has not; None: it cannot be."""

    what: str
    estimate: Estimate | None


def alternatives(
    planner: Planner, choices: SearchSpace, limits: Limits, chosen: Estimate, goal: str
) -> Iterator[Alternative]:
    """The nearest plans that differ in one choice, by their estimates."""
    candidate = chosen.candidate
    mine = ",".join(f"{axis}={size}" for axis, size in candidate.axes)
    for name, axis, zeros in PLAIN:
        mesh = {axis: candidate.ranks}
        known = axis in axes_that_cut(planner.model) and axis in (choices.axes or [axis])
        if choices.zero is not None:
            zeros = [choices.zero] if zeros is None or choices.zero in zeros else []
        if candidate.ranks == 1 or mesh == candidate.mesh or not known or zeros == []:
            continue
        best = _best_on(planner, replace(choices, mesh=mesh, ranks=[candidate.ranks]), zeros or [None], limits, goal)
        shown = best.candidate if best is not None else f"{axis}={candidate.ranks}"
        yield Alternative(f"mesh {mine}, not {shown} ({name})", best)
    free = {name: None for name in FIXABLE} | {"mesh": candidate.mesh, "batch_sizes": [candidate.batch_size]}
    possible = set(candidates(replace(choices, **free)))
    for name, options in _options(candidate):
        others = []
        for option in options:
            changed = {name: option, "stages": None} | ({"chunks": 1} if name == "schedule" else {})
            other = replace(even(candidate), **changed)
            estimator = planner.estimator(other) if other in possible else None
            estimate = estimator.estimate() if estimator is not None else None
            if estimate is not None:
                others.append((option, estimate))
        if others:
            option, other = min(others, key=lambda pair: value(goal, pair[1]))
            yield Alternative(f"{name.replace('_', ' ')} {getattr(candidate, name)}, not {option}", other)


def _best_on(
    planner: Planner, choices: SearchSpace, zeros: Sequence[int | None], limits: Limits, goal: str
) -> Estimate | None:
    """The best plan on a mesh with one of these stages of ZeRO; if none keeps the limits, what needs least memory."""
    found = []
    for zero in zeros:
        for kept, wanted in ((limits, goal), (Limits(), "memory")):
            space, asked = replace(choices, zero=zero), Constraints(kept)
            seconds = SEARCH_SECONDS / len(zeros)
            best = planner.search(space, asked, wanted, seconds=seconds, front=False, keep=1).best
            if best:
                found.append(best[0])
                break
    fitting = [each for each in found if not limits.broken(each)]
    return min(fitting or found, key=lambda each: value(goal if fitting else "memory", each), default=None)


def even(candidate: Candidate) -> Candidate:
    """The same with as many samples, and as much state, on each rank."""
    return replace(candidate, shares=None, state_shares=None)


def reasons(
    limits: Limits, chosen: Estimate, others: Sequence[Alternative], simulated: Mapping[Candidate, Estimate]
) -> Iterator[str]:
    """What the plan gains over others, as they were ``simulated``, by candidates that are ``even``; an estimate is
    marked."""
    for each in others:
        if each.estimate is None:
            yield f"{each.what}: the model or the batch cannot be cut so"
            continue
        other = simulated.get(even(each.estimate.candidate), each.estimate)
        yield _said(each.what, chosen, other, limits) + ("" if other.simulated else " (an estimate)")


def _options(candidate: Candidate) -> Iterator[tuple[str, Sequence[Any]]]:
    stored = candidate.batch_ranks * candidate.mesh.get("context", 1)
    if stored > 1:
        yield "zero", [zero for zero in range(4) if zero != candidate.zero]
    cut, m = candidate.batch_ranks, candidate.micro_batches
    sizes = [n for n in (m // 2, 2 * m) if n >= 1 and candidate.batch_size // max(n, 1) >= cut]
    if candidate.schedule == "interleaved":
        sizes = [n for n in sizes if n % candidate.pipe == 0]
    if sizes:
        yield "micro_batches", sizes
    yield "recompute", [again for again in ("none", "attention", "block") if again != candidate.recompute][:2]
    if candidate.mesh.get("model", 1) > 1:
        yield "sequence_parallel", [not candidate.sequence_parallel]
    if candidate.pipe > 1:
        yield "schedule", [name for name in ("1f1b", "zero-bubble", "gpipe") if name != candidate.schedule]


def _said(what: str, chosen: Estimate, other: Estimate, limits: Limits) -> str:
    broken = limits.broken(other)
    if broken:
        needs = limits.measured(other)
        return f"{what}: that would need " + " and ".join(
            f"{limits.said(each, needs[each])} of {each}" for each in sorted(broken)
        )
    slower, larger = other.seconds / chosen.seconds - 1, other.memory / chosen.memory - 1
    gains = {part: other.parts[part] - chosen.parts[part] for part in other.parts}
    why = max(gains, key=lambda part: gains[part])
    because = f", most of it {why}" if slower > 0.002 and gains[why] > 0 else ""
    return f"{what}: that would take {slower:+.1%} time{because}, and {larger:+.1%} memory"
