"""What each rank would hold of a model's parameters, gradients and optimizer state, by the engine's own assignment."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from spmd_engine.comm.mesh_position import MeshPosition
from spmd_engine.engine.assignment import Storage, assign
from spmd_engine.engine.reducer import IN_FLIGHT
from spmd_engine.engine.stages import Division
from spmd_engine.models import Model, layout_for
from spmd_engine.sharding.layout import Layout

CLASSES = ("parameters", "gradients", "optimizer state", "largest groups")


def bytes_per_rank(
    model: Model,
    places: Sequence[MeshPosition],
    storage: Storage,
    itemsize: int,
    states: int,
    stages: Division = "even",
    *,
    layout: Layout | None = None,
    chunks_per_stage: int = 1,
) -> list[tuple[tuple[str, int], ...]]:
    """Pairs of a class (of CLASSES) and bytes, for every rank in order.

    ``states`` is the number of arrays of optimizer state for each parameter. "largest groups" is what is whole only
    for a while of what is stored in parts, at the worst moment of one micro-batch's backward. Activations are not
    counted. Raises UsageError if there are fewer layers than stages.
    """
    layout = layout or layout_for(model, places[0])
    parameters = [parameter for _, (parameter, _) in model.parameters()]
    letters = {letter for each in parameters for letter in each.dims.split()}
    letters |= {each.element[0] for each in parameters if each.element}
    shaping = {"pipe", *(axis for letter in letters for axis in layout.axes(letter))}
    shares: dict[tuple[int, ...], _Share] = {}
    ranks = []
    for place in places:
        where = tuple(place.coordinates[axis] for axis in place.axes if axis in shaping)
        if where not in shares:  # the same for all that differ in the batch alone
            shares[where] = _share(model, place, layout, storage, itemsize, stages, chunks_per_stage)
        share = shares[where]
        owned = sum(parts[place.index(axes)] for axes, parts in share.owned)
        zero = storage.stage(place.axes)
        elements = (
            owned if zero >= 3 else share.whole,
            owned if zero >= 2 else share.whole,
            states * (owned if zero >= 1 else share.whole),
            share.for_a_while,
        )
        ranks.append(tuple((name, count * itemsize) for name, count in zip(CLASSES, elements, strict=True)))
    return ranks


@dataclass(frozen=True)
class _Share:
    """What the ranks of a stage that hold the same blocks have, in elements."""

    whole: int  #: of all parameters
    owned: list[tuple[tuple[str, ...], list[int]]]  #: of each group: the axes that cut its state, and each part
    for_a_while: int  #: whole, of what is stored in parts


def _share(
    model: Model, place: MeshPosition, layout: Layout, storage: Storage, itemsize: int, stages: Division, chunks: int
) -> _Share:
    assignment = assign(model, place, layout, itemsize, storage=storage, stages=stages, chunks_per_stage=chunks)
    owned = []
    for group in assignment.groups:
        intervals = group.intervals(place.axis_size(group.summed.cut))
        owned.append((group.summed.cut, [interval.stop - interval.start for interval in intervals]))
    number = {member.name: i for i, group in enumerate(assignment.groups) for member in group.members}
    uses = [list(dict.fromkeys(number[full] for full in names.values())) for names in assignment.uses.values()]
    in_parts = [group.size if group.summed.cut else 0 for group in assignment.groups]
    for_a_while = whole_for_a_while(uses, in_parts, storage.stage(place.axes))
    return _Share(sum(group.size for group in assignment.groups), owned, for_a_while)


def whole_for_a_while(uses: Sequence[Sequence[int]], sizes: Sequence[int], zero: int) -> int:
    """The most elements of groups that are whole at a time though stored in parts, in a backward.

    ``uses`` are the numbers of the groups that each layer uses, ``sizes`` the groups' elements. Gradients (from
    ZeRO-2 on) are whole from the first layer that adds to them until their owners have them; parameters (ZeRO-3)
    while a layer uses them, and those of the next group are on their way.
    """
    if zero < 2:
        return 0
    still = Counter(group for layer in uses for group in layer)
    adding: set[int] = set()
    under_way: deque[int] = deque(maxlen=IN_FLIGHT)
    most = 0
    for number in reversed(range(len(uses))):
        gathered: list[int] = []
        if zero == 3:
            before = [group for layer in reversed(uses[:number]) for group in layer if group not in uses[number]]
            gathered = [*uses[number], *before[:1]]
        adding.update(uses[number])
        most = max(most, sum(sizes[group] for group in (*gathered, *adding, *under_way)))
        still.subtract(uses[number])
        done = {group for group in adding if not still[group]}
        adding -= done
        under_way.extend(sorted(done))
    return most
