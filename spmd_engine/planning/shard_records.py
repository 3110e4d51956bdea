"""What a rank has of a model, parameter by parameter, as records."""

from __future__ import annotations

from math import prod

from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.planning.step_analysis import ModelShard


def shards_of(engine: LayeredEngine, states: int) -> list[ModelShard]:
    """The records of a rank's parameters; an optimizer keeps so many arrays of state for each."""
    names = [name for name, _ in engine.model.layers]
    users: dict[str, list[str]] = {}
    for layer, uses in engine.assignment.uses.items():
        for full in uses.values():
            users.setdefault(full, []).append(names[layer])
    records, itemsize = [], engine.dtype.itemsize
    for storage in engine.storages:
        owned_rows = storage.group.rows(storage.interval)
        for member in storage.group.members:
            size = prod(member.shape) * itemsize
            rows = _rows(owned_rows[member.name], member)
            owned, stored = rows * itemsize, (rows * itemsize if storage.zero == 3 else size)
            summed = member.summed
            records.append(
                ModelShard(
                    member.name,
                    str(engine.sharding(member.name)),
                    member.shape,
                    engine.global_shape(member.name),
                    str(engine.dtype),
                    size,
                    stored,
                    owned,
                    storage.group.name,
                    tuple(users.get(member.name, ())),
                    {
                        "gradient": owned if storage.zero >= 2 else size,
                        "optimizer_state": states * (owned if storage.zero else size),
                        "gathered": size if storage.zero == 3 else 0,
                    },
                    tuple(dict.fromkeys((*summed.over, *(("pipe",) if len(summed.stages) > 1 else ())))),
                )
            )
    return records


def _rows(rows: slice, member) -> int:
    """Elements of some rows of a parameter."""
    return (rows.stop - rows.start) * member.row if member.shape else int(rows.stop > rows.start)
