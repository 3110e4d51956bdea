"""Compositions: how ranks share a model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spmd_engine.axes import PIPE, axes_as_json, checked_axes, parse_axes
from spmd_engine.configuration import Configuration, setting
from spmd_engine.engine import helpers, schedules, uneven_stages
from spmd_engine.engine.helpers import Assigned, helper_ranks, parse_assign
from spmd_engine.engine.offload import config as offload
from spmd_engine.engine.offload.config import TARGETS, Offload
from spmd_engine.engine.pipeline import Recompute
from spmd_engine.engine.schedules import orders
from spmd_engine.engine.state import assignment
from spmd_engine.engine.state.assignment import Division, Shares, ZeroConfig
from spmd_engine.engine.zero import compression
from spmd_engine.errors import UsageError
from spmd_engine.layers.attention import context
from spmd_engine.layers.attention.context import CONTEXT_METHODS
from spmd_engine.models import Model, layouts
from spmd_engine.models.convnet import REQUIREMENTS as OF_IMAGES
from spmd_engine.requirements import Case, Requirement, Unmet
from spmd_engine.sharding.groups import CAP, THRESHOLD
from spmd_engine.units import BYTES

PIPELINES = tuple(name for name in schedules.SCHEDULES if name != "sequential")
RECOMPUTE = tuple(kind.value for kind in Recompute)


@dataclass(frozen=True)
class ParallelConfig(Configuration):
    """How ranks share a model. Except for ``compress``, fields control how a step is computed, not its result.

    An optional field of None selects the usual value, which may depend on the mesh.
    """

    mesh: Mapping[str, int] | None = setting(
        None,
        read=parse_axes,
        metavar="AXIS=SIZE,...",
        common=True,
        unset="all ranks on axis data",
        help="Mesh axes and their sizes; the last varies fastest. 'data', 'replicate' and 'shard' split the batch, "
        "'expert' the batch and the experts, 'model' heads, hidden width and vocabulary (for images, channels), "
        "'queries' the heads that share a key head, and otherwise as 'model', 'context' the sequence, 'rows' and "
        "'columns' images, 'pipe' the layers.",
    )
    zero: int | None = setting(
        None,
        least=0,
        most=3,
        common=True,
        unset="3 over an axis shard, else 0",
        help="ZeRO stage: 1 shards the optimizer state, 2 also gradients, 3 also parameters.",
    )
    sequence_parallel: bool = setting(False, help="Split the sequence over axis 'model' between layers.")
    context_method: str | None = setting(
        None, choices=CONTEXT_METHODS, unset="ring", help="How attention communicates over axis 'context'."
    )
    experts_over: str | None = setting(
        None, metavar="AXIS,...", unset="expert", help="Mesh axes that split the experts."
    )
    rebalance_every: int = setting(
        0, least=0, help="Steps after which experts move between ranks to even out their measured load; 0: never."
    )
    reshard_after: int | None = setting(
        None,
        least=1,
        old_names=("recut_after",),
        metavar="BLOCKS",
        unset="never",
        help="For images: after this many blocks, axes 'rows' and 'columns' split samples instead.",
    )
    schedule: str | None = setting(
        None, choices=PIPELINES, unset="1f1b", help="Pipeline schedule: the order of micro-batches along axis 'pipe'."
    )
    chunks: int | None = setting(
        None, least=1, unset="2 if interleaved, else 1", help="Chunks of layers on each pipeline stage."
    )
    stages: str | None = setting(
        None,
        metavar="even|cost|N,N,...",
        unset="even",
        help="How layers are divided into stages: evenly, by cost, or by the number of each chunk's first layer.",
    )
    overlap_layers: str | None = setting(
        None,
        metavar="N|FIRST:END,...",
        unset="none",
        help="Layers on each side of a boundary between stages that both stages hold: one computes, both update them, "
        "and the boundary can move within them without sending weights. Or, for each boundary, the first of them and "
        "the layer after the last.",
    )
    recompute: str = setting(
        "none", choices=RECOMPUTE, help="What the backward recomputes instead of keeping its activations."
    )
    assign: str | None = setting(
        None,
        metavar="LAYERS:rankN,...",
        unset="none",
        help="Layers that ranks outside the mesh compute for those on it, as block3-5:rank2 (helper ranks); none: no "
        "helper ranks.",
    )
    compress: str = setting(
        "none",
        metavar="none|bfloat16|float16|top-k:FRACTION|powersgd:RANK",
        help="Compression of gradients while they are reduced. The last two need ZeRO stage 0; what they omit in a "
        "step is added in later steps, also after --resume on the same mesh.",
    )
    group_threshold: int = setting(
        THRESHOLD, least=0, unit=BYTES, help="Neighbouring parameters share a parameter group up to this size."
    )
    group_cap: int = setting(CAP, least=0, unit=BYTES, help="A parameter group does not grow beyond this size.")
    shares: str | None = setting(
        None,
        metavar="AXIS=N:N...,...",
        unset="equal parts",
        help="Each rank's part of what an axis splits inside layers, for unequal ranks: with data=3:1 the first takes "
        "three quarters of the samples, with model=2:1 two thirds of the key heads, hidden width and vocabulary. "
        "Axes other than those of samples may have shares of 0.",
    )
    state_shares: str | None = setting(
        None,
        metavar="AXIS=N:N...,...",
        unset="equal parts",
        help="Each rank's part of what ZeRO shards: by memory, as --shares is by speed.",
    )
    rank_order: str | None = setting(
        None,
        metavar="N,N,...",
        unset="0,1,2,...",
        help="The rank at each position of the mesh, for unequal nodes; ranks are counted node by node.",
    )
    min_tensor_size: int = setting(
        0, least=0, unit=BYTES, help="ZeRO does not shard parameters smaller than this; every rank holds them."
    )
    offload: str | None = setting(
        None,
        read=lambda text: "" if text == "none" else text,
        metavar="none|optimizer,parameters,activations",
        unset="nothing",
        help="What lives elsewhere while it is not in use: optimizer state, parameters (under ZeRO 3, or if every rank "
        "updates them whole), saved activations, or several of these; none: nothing.",
    )
    offload_to: str | None = setting(
        None,
        choices=tuple(TARGETS),
        unset="disk",
        help="Where that lives: on a disk or, for arrays of a CUDA device, in the host's memory.",
    )
    offload_dir: str | None = setting(
        None, metavar="FOLDER", unset="the current folder", help="Folder, on a disk, of the files of --offload."
    )

    def __post_init__(self) -> None:
        if isinstance(self.mesh, Mapping):
            object.__setattr__(self, "mesh", checked_axes(self.mesh))
        super().__post_init__()
        compression.compression(self.compress)
        _ = self.division, self.work_shares, self.storage, self.order, self.assigned

    def as_json(self) -> dict[str, Any]:
        return super().as_json() | {"mesh": axes_as_json(self.mesh) if self.mesh is not None else None}

    @property
    def work_shares(self) -> Shares:
        """Each rank's share of the work along an axis; axes without shares are sharded evenly."""
        return assignment.parse_shares(self.shares, "--shares", assignment.WORK)

    @property
    def order(self) -> tuple[int, ...] | None:
        """The rank at each position of the mesh, as ``Mesh`` takes it; None: node by node."""
        return assignment.parse_order(self.rank_order)

    @property
    def assigned(self) -> tuple[Assigned, ...]:
        """The layers that helper ranks compute."""
        return parse_assign(self.assign)

    @property
    def ranks_outside(self) -> list[int]:
        """The ranks of a job that are not on its mesh: the helper ranks."""
        return helper_ranks(self.assigned)

    def numbered_from(self, first: int) -> ParallelConfig:
        """This composition with ranks in the order of their positions, and then, from ``first``, those outside."""
        numbers = {rank: number for number, rank in enumerate(self.ranks_outside, first)}
        terms = [f"{term.layers}:rank{numbers[term.rank]}" for term in self.assigned]
        return self.changed(assign=",".join(terms) or None, rank_order=None)

    @property
    def storage(self) -> ZeroConfig:
        """How parameters, gradients and optimizer state are stored."""
        shares = assignment.parse_shares(self.state_shares, "--state-shares", assignment.STATE)
        offload = Offload.parse(self.offload, self.offload_dir, self.offload_to)
        sizes = self.group_threshold, self.group_cap
        overlap = assignment.parse_overlap(self.overlap_layers)
        return ZeroConfig(self.zero, *sizes, self.compress, shares, self.min_tensor_size, offload, overlap)

    @property
    def in_memory(self) -> ParallelConfig:
        """This composition, with all arrays in memory."""
        return self.changed(offload=None)

    @property
    def expert_axes(self) -> tuple[str, ...] | None:
        """The axes that shard the experts; None: the default axis."""
        if self.experts_over is None:
            return None
        return tuple(filter(None, (axis.strip() for axis in self.experts_over.split(","))))

    @property
    def division(self) -> Division:
        return assignment.parse_division(self.stages or "even")

    def schedule_on(self, axes: Mapping[str, int]) -> schedules.Schedule:
        """The order of micro-batches on a mesh with these axes: sequential without a pipeline."""
        if axes.get(PIPE, 1) == 1:
            return schedules.named("sequential")
        return schedules.named(self.schedule or "1f1b", self.chunks)

    def how_on(self, axes: Mapping[str, int]) -> dict[str, Any]:
        """The options of ``LayeredEngine`` and its ``reshard``, on a mesh with these axes."""
        options = {
            "storage": self.storage,
            "schedule": self.schedule_on(axes),
            "stages": self.division,
            "recompute": Recompute(self.recompute),
        }
        return options | ({"assign": self.assign} if self.assigned else {})

    def chunks_on(self, axes: Mapping[str, int], model: Model) -> list[range]:
        """The layers of each chunk on a mesh with these axes. Raises UsageError if the model cannot be divided so."""
        per_stage = self.schedule_on(axes).chunks
        return assignment.divide(model, axes.get(PIPE, 1) * per_stage, self.division, per_stage)

    def unmet(self, axes: Mapping[str, int], model: Model | None = None) -> Iterator[Unmet]:
        """The requirements that this composition does not meet on a mesh with these axes."""
        case = Case(self, axes, model)
        return (unmet for requirement in REQUIREMENTS if (unmet := requirement.on(case)))

    def check(self, axes: Mapping[str, int], model: Model | None = None) -> list[str]:
        """Notices of options that have no effect, or little use, on a mesh with these axes.

        Raises UsageError for options that cannot work there, with the nearest that can.
        """
        notices = []
        for unmet in self.unmet(axes, model):
            if unmet.is_refused:
                raise UsageError(unmet.text)
            notices.append(unmet.text)
        return notices

    def fitted(
        self, axes: Mapping[str, int], model: Model | None, given: Collection[str] = ()
    ) -> tuple[ParallelConfig, list[str]]:
        """This composition changed to fit another mesh, and a notice for each field reset because it does not fit
        there. Fields in ``given`` stay. Raises UsageError if no such change fits.
        """
        fitting, left_out, last = self, dict[Requirement, tuple[str, list[str]]](), None
        while refused := next((unmet for unmet in fitting.unmet(axes, model) if unmet.is_refused), None):
            names = [name for name in refused.requirement.left_out if name not in given and getattr(fitting, name)]
            if not names:
                # Where what was left out last is missing now, the reason to leave it out is the error.
                raise UsageError((last[0] if last and last[1] in refused.requirement.options else refused).text)
            last = refused, names[-1]
            left_out.setdefault(refused.requirement, (refused.why, []))[1].insert(0, names[-1])
            fitting = fitting.changed(**{names[-1]: None})
        saved = Case(self, axes)
        return fitting, [
            f"continues without {', '.join(map(saved.text, names))} ({why})" for why, names in left_out.values()
        ]


#: What options need, in the order in which it is checked.
REQUIREMENTS = (
    *uneven_stages.REQUIREMENTS,
    *orders.REQUIREMENTS,
    *assignment.REQUIREMENTS,
    *compression.REQUIREMENTS,
    *offload.REQUIREMENTS,
    *helpers.REQUIREMENTS,
    *context.REQUIREMENTS,
    *OF_IMAGES,
    *layouts.REQUIREMENTS,
)
