"""Compositions: how ranks share a model, and the engine that a composition describes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any, Self

from spmd_engine.arrays.backend import get_backend
from spmd_engine.arrays.precision import FLOATS, dtype_of
from spmd_engine.axes import MeshPosition, axes_as_json, axes_text, checked_axes, count_ranks, parse_axes, uneven_axes
from spmd_engine.comm.device_transport import open_device
from spmd_engine.comm.mesh import Mesh, ranks_by_position
from spmd_engine.configuration import Configuration, not_in_json, setting
from spmd_engine.engine import schedules
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.helpers import Assigned, HelperRank, check_assigned, owners_of, parse_assign, serve, stage_of
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.offload.config import TARGETS, Offload
from spmd_engine.engine.pipeline import Recompute
from spmd_engine.engine.state.assignment import (
    PIPE,
    STATE,
    WORK,
    Assignment,
    Division,
    Shares,
    ZeroConfig,
    assign,
    divide,
    misfit,
    overlaps,
    parse_division,
    parse_overlap,
    parse_shares,
)
from spmd_engine.engine.zero.compression import compression
from spmd_engine.errors import UsageError
from spmd_engine.layers.attention.context import CONTEXT_METHODS
from spmd_engine.models import DecoderConfig, ImageShape, Mixture, Model, layout_for
from spmd_engine.models.layouts import attends, note_of_shared_keys
from spmd_engine.models.lora import LoRAOptions, with_adapters
from spmd_engine.models.names import IMAGES, MODELS, build_model, family_of, has_weights, unknown_model
from spmd_engine.models.user_code import call, code_named, digest_of, is_code, own_model
from spmd_engine.sharding.groups import CAP, THRESHOLD
from spmd_engine.sharding.layout import Layout
from spmd_engine.units import BYTES

PIPELINES = tuple(name for name in schedules.SCHEDULES if name != "sequential")
RECOMPUTE = tuple(kind.value for kind in Recompute)


def image_sizes(text: str) -> dict[str, int]:
    """``"28,28,1,10"`` as a dict by the field names of ImageShape; raises UsageError for anything else."""
    sizes = text.split(",")
    names = [field.name for field in fields(ImageShape)]
    if len(sizes) != len(names) or not all(size.strip().isdecimal() and int(size) for size in sizes):
        raise UsageError(f"images {text}: write height,width,channels,classes, each from 1, as in 28,28,1,10")
    return dict(zip(names, map(int, sizes), strict=True))


def _offloaded(text: str) -> str:
    return "" if text == "none" else text


@dataclass(frozen=True)
class ModelConfig(Configuration):
    """A model by name, and the origin of its initial parameters."""

    name: str = setting(
        "gpt-nano",
        option="model",
        old_names=("engine",),
        metavar="NAME|PATH|CODE",
        fixed=True,
        common=True,
        help="A model by name; or weights: a folder in Hugging Face's format, a GGUF file, or org/name in the hub's "
        f"local cache; or code of your own: MODULE:NAME, or FILE.py:NAME. Names are {', '.join(MODELS)}.",
    )
    dropout: float = setting(0.0, least=0, below=1, fixed=True, help="Probability that an activation is set to 0.")
    dtype: str = setting(
        "float32",
        choices=FLOATS,
        option="precision",
        old_names=("dtype",),
        common=True,
        help="Dtype of activations, of the parameters that layers use, and of what is sent. With bfloat16 and float16, "
        "parameters are updated and summed in float32: docs/precision.md.",
    )
    seed: int = setting(0, fixed=True, common=True, help="Seed of parameters, samples and dropout.")
    images: Mapping[str, int] | None = setting(
        None,
        read=image_sizes,
        metavar="H,W,C,CLASSES",
        unset="8,8,1,10, for resnet18 and resnet50 224,224,3,1000; in training, as the data",
        help="For models of images: their height, width and channels, and the number of classes.",
    )
    mixture: Mixture | None = setting(None, unset="as the model has it", help="An object: experts, in models with any.")
    vocabulary: int | None = setting(
        None, least=1, fixed=True, unset="as the data", help="Tokens in the vocabulary of a new model of text."
    )
    shape: DecoderConfig | None = setting(
        None,
        option=None,
        unset="read from the path",
        help="An object: the shape of a model by path. A run's config.json has it, so that the path is not needed.",
    )
    lora: LoRAOptions | None = setting(
        None, prefix="lora_", unset="all parameters are trained", help="An object: adapters, which alone are trained."
    )
    adapter: str | None = setting(
        None, metavar="FOLDER", unset="new adapters", help="Folder of adapters in PEFT's format to begin with."
    )
    code: str | None = setting(
        None,
        option=None,
        unset="no code of your own",
        help="SHA-256 of the file that has the code of a model of your own. It is for people: it lets no code run.",
    )
    #: What named the model, if not the user or a program: a file, whose code may not run; see ``permitted_by``.
    named_in: str = not_in_json("")

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_code(self.name):
            self._check_code()
        elif self.shape is None and self.name not in MODELS and not has_weights(self.name):
            raise unknown_model(self.name)
        if self.images is not None:
            _check_images(self.name, self.images)

    def _check_code(self) -> None:
        """Code that a user names here is what its file has now; that of a file is not looked for."""
        if self.code is None and not self.named_in:
            object.__setattr__(self, "code", digest_of(self.name))
        for option in ("dropout", "images", "mixture", "vocabulary"):
            if value := getattr(self, option):
                raise UsageError(f"{option} {value} does not go with {self.name}: set it in that code, or by --set")

    def changed(self, **values: Any) -> Self:
        """A copy; if it has a ``name``, that is from now on named by the caller, and its code may run."""
        return super().changed(**{"code": None, "named_in": ""} | values if "name" in values else values)

    def permitted_by(self, other: ModelConfig) -> Self:
        """This model; if ``other`` has the same name, its code may run here as that of ``other`` may.

        For a model that ranks or processes of one job send each other as JSON.
        """
        return replace(self, named_in=other.named_in) if self.name == other.name else self

    @classmethod
    def from_json(cls, content: Any, where: str = "", base: Self | None = None) -> Self:
        """As Configuration.from_json; code that the content names may not run."""
        return super().from_json(content, where, replace(base or cls(), named_in=where or "a file"))

    @property
    def path(self) -> str | None:
        """The path of the initial weights; None: they are drawn by the seed."""
        return self.name if has_weights(self.name) else None

    @property
    def engine(self) -> Callable[..., Any] | None:
        """The class or function that makes an engine of the user's own; None if the name is that of a model.

        A function makes an engine if it takes the mesh, or returns an engine without it.
        """
        if not is_code(self.name):
            return None
        make = code_named(self.name, digest=self.code, named_in=self.named_in)
        if {"mesh", "dtype"} & set(signature(make).parameters):
            return make
        return make if isinstance(call(make, "the model or the engine"), ShardedEngine) else None

    def build(self, composition: ParallelConfig) -> Model:
        """The model, with the layers of this composition; raises UsageError if the name is that of an own engine."""
        if is_code(self.name):
            if self.engine is not None:
                raise UsageError(
                    f"{self.name} makes an engine, which shards itself; here a Model is needed, as in docs/layers.md"
                )
            model = own_model(self.name, self.code, self.named_in)
            return model if self.lora is None else with_adapters(model, self.lora, family_of(self.name))
        image = ImageShape(**self.images) if self.images else None
        method = composition.context_method or "ring"
        options = method, image, composition.reshard_after, self.mixture, self.shape, self.vocabulary
        model = build_model(self.name, self.dropout, *options)
        return model if self.lora is None else with_adapters(model, self.lora, family_of(self.name, self.shape))


def _check_images(name: str, images: Mapping[str, int]) -> None:
    sizes = [field.name for field in fields(ImageShape)]
    if name not in IMAGES:
        raise UsageError(f"images: {name} is no model of images; choose {' or '.join(IMAGES)}, or omit images")
    if sorted(images) != sorted(sizes) or min(images.values()) < 1:
        raise UsageError(f"images is {images}: it must have {', '.join(sizes)}, from 1")


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
        read=_offloaded,
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
        compression(self.compress)
        parse_division(self.stages or "even")
        _ = self.work_shares, self.storage, self.order, self.assigned

    def as_json(self) -> dict[str, Any]:
        return super().as_json() | {"mesh": axes_as_json(self.mesh) if self.mesh is not None else None}

    @property
    def work_shares(self) -> Shares:
        """Each rank's share of the work along an axis; axes without shares are sharded evenly."""
        return parse_shares(self.shares, "--shares", WORK)

    @property
    def order(self) -> tuple[int, ...] | None:
        """The rank at each position of the mesh, as ``Mesh`` takes it; None: node by node."""
        if self.rank_order is None:
            return None
        if not all(number.strip().isdecimal() for number in self.rank_order.split(",")):
            raise UsageError(f"--rank-order {self.rank_order}: write the numbers of ranks, as in 2,0,1")
        return tuple(map(int, self.rank_order.split(",")))

    @property
    def assigned(self) -> tuple[Assigned, ...]:
        """The layers that helper ranks compute."""
        return parse_assign(self.assign)

    @property
    def storage(self) -> ZeroConfig:
        """How parameters, gradients and optimizer state are stored."""
        shares = parse_shares(self.state_shares, "--state-shares", STATE)
        offload = Offload.parse(self.offload, self.offload_dir, self.offload_to)
        sizes = self.group_threshold, self.group_cap
        overlap = parse_overlap(self.overlap_layers)
        return ZeroConfig(self.zero, *sizes, self.compress, shares, self.min_tensor_size, offload, overlap)

    @property
    def expert_axes(self) -> tuple[str, ...] | None:
        """The axes that shard the experts; None: the default axis."""
        if self.experts_over is None:
            return None
        return tuple(filter(None, (axis.strip() for axis in self.experts_over.split(","))))

    @property
    def division(self) -> Division:
        return parse_division(self.stages or "even")

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

    def check(self, axes: Mapping[str, int], model: Model | None = None) -> list[str]:
        """Notices of options that have no effect, or little use, on a mesh with these axes.

        Raises UsageError for options that cannot work there, with the nearest that can.
        """
        mesh = axes_text(axes)

        def refuse(option: str, why: str, nearest: str) -> None:
            raise UsageError(f"{option} with --mesh {mesh}: {why}. {nearest}")

        if (uneven := set(uneven_axes(axes))) and (uneven != {"model"} or "queries" in axes):
            why = "only axis model can have other sizes on other stages, on a mesh without queries"
            refuse("uneven stages", why, "Give the other axes one size")
        if uneven and self.storage.overlap:
            refuse(
                f"--overlap-layers {self.overlap_layers}", "it needs stages of equal sizes", "Add --overlap-layers 0"
            )
        if (self.chunks or 1) > 1 and self.schedule != "interleaved":
            refuse(f"--chunks {self.chunks}", "several chunks a stage are interleaved", "Add --schedule interleaved")
        if "replicate" in axes and "shard" not in axes and not self.zero:
            refuse("axis 'replicate'", "it says that state is in parts over another axis", "Name it data, or add shard")
        if not compression(self.compress).in_parts and self.storage.stage(axes):
            refuse(f"--compress {self.compress}", "ZeRO needs parts of sums", "Choose float16 or bfloat16")
        in_parts = self.storage.stage(axes) in (1, 2) and count_ranks(axes) > axes.get(PIPE, 1)
        if in_parts and "parameters" in self.storage.offload.kinds:
            why = f"with --zero {self.zero} every rank holds them whole"
            refuse(f"--offload {self.offload}", why, "Choose --zero 3 or 0")
        advice = {"rank_order": "Name each rank once", "stages": "Omit it"}
        for name, why in self._misfits(axes).items():
            remedy = advice.get(name, "Give a share for each rank of an axis")
            refuse(f"{_flag(name)} {getattr(self, name)}", why, remedy)
        for axis in self.expert_axes or ():
            if axis not in axes:
                refuse(f"--experts-over {self.experts_over}", f"there is no axis {axis!r}", "Name axes of the mesh")
        if model is not None and axes.get(PIPE, 1) > 1:
            chunks = self.schedule_on(axes).chunks
            divided = divide(model, axes[PIPE] * chunks, self.division, chunks)
            if self.storage.overlap and chunks > 1:
                why = "stages of several chunks cannot overlap"
                refuse(
                    f"--overlap-layers {self.overlap_layers}", why, "Add --overlap-layers 0, or choose --schedule 1f1b"
                )
            overlaps(divided, self.storage.overlap)
        notices = self._without_effect(axes, mesh)
        if model is not None:
            for term in self.assigned:
                helper_stage(model, axes, self, term.rank)
            check_assigned(self.assigned, axes, model, ("expert",) if self.expert_axes is None else self.expert_axes)
            sized = "model" in self.work_shares or uneven_axes(axes)
            shared_keys = None if sized else note_of_shared_keys(model, axes)
            more = self._about_images(axes, model), shared_keys
            notices += [*self._about_experts(axes, model), *filter(None, more)]
        return notices

    def _misfits(self, axes: Mapping[str, int]) -> dict[str, str]:
        """The fields of shares, the order of ranks, and the stages that do not fit a mesh, and why."""
        shares_by_field = {"shares": self.work_shares, "state_shares": self.storage.shares}
        misfits = {name: why for name, shares in shares_by_field.items() if (why := misfit(shares, axes))}
        ranks = count_ranks(axes)
        if self.order is not None and sorted(self.order) != list(range(ranks)):
            misfits["rank_order"] = f"the ranks are 0 to {ranks - 1}"
        division = self.division
        if not isinstance(division, str) and axes.get("pipe", 1) == 1 and len(division) != (self.chunks or 1):
            misfits["stages"] = "the mesh has no pipeline"
        return misfits

    def _about_images(self, axes: Mapping[str, int], model: Model) -> str | None:
        if not {"rows", "columns"} & set(axes):
            return None
        from spmd_engine.models.convnet import halo_warning  # here, since it imports the layers of images

        return halo_warning(model, axes, self.work_shares)

    def _about_experts(self, axes: Mapping[str, int], model: Model) -> list[str]:
        """Notices of options for experts without effect, and of ranks without experts."""
        named_axes = self.expert_axes
        over = tuple({"expert"} & set(axes)) if named_axes is None else named_axes
        parts = MeshPosition(axes, {}).axis_size(over)
        fewest = min((layer.sizes["e"] for _, layer in model.layers if "e" in layer.sizes), default=None)
        if fewest is None and self.experts_over is not None:
            return [f"--experts-over {self.experts_over} has no effect: {model.name} has no experts"]
        if fewest is None and parts > 1:
            return [f"axis expert={parts} shards only the batch, as data would: {model.name} has no experts"]
        if self.rebalance_every and (fewest is None or parts == 1):
            return [f"--rebalance-every {self.rebalance_every} has no effect: experts are not in parts here"]
        if fewest is not None and fewest < parts:
            return [f"{fewest} experts over {','.join(over)}={parts}: {parts - fewest} of {parts} parts hold none"]
        return []

    def _without_effect(self, axes: Mapping[str, int], mesh: str) -> list[str]:
        spatial = {"rows", "columns"} & set(axes)
        pipeline, copies = axes.get(PIPE, 1) > 1, {"data", "expert", "shard", "context"} & set(axes)
        needed = {
            f"--zero {self.zero}": (self.zero and not copies, "data, shard or context to store over"),
            "--sequence-parallel": (self.sequence_parallel and "model" not in axes, "model"),
            f"--context-method {self.context_method}": (self.context_method and "context" not in axes, "context"),
            f"--reshard-after {self.reshard_after}": (self.reshard_after and not spatial, "rows or columns"),
            f"--schedule {self.schedule}": (self.schedule and not pipeline, "pipe of 2 or more"),
            f"--chunks {self.chunks}": (self.chunks and not pipeline, "pipe of 2 or more"),
            f"--stages {self.stages}": (self.stages and not pipeline, "pipe of 2 or more"),
            f"--overlap-layers {self.overlap_layers}": (self.overlap_layers and not pipeline, "pipe of 2 or more"),
        }
        in_parts = {
            f"--state-shares {self.state_shares}": self.state_shares,
            f"--min-tensor-size {self.min_tensor_size}": self.min_tensor_size,
        }
        stored = [
            f"{option} has no effect without --zero: nothing is stored in parts"
            for option, value in in_parts.items()
            if value and not self.storage.stage(axes)
        ]
        places = {"--offload-to": self.offload_to, "--offload-dir": self.offload_dir}
        given = [f"{option} {place}" for option, place in places.items() if place and not self.storage.offload.kinds]
        stored += [f"{option} has no effect without --offload" for option in given]
        return stored + [
            f"{option} has no effect with --mesh {mesh}: there is no axis {axis}"
            for option, (missing, axis) in needed.items()
            if missing
        ]

    def fitted(
        self, axes: Mapping[str, int], model: Model | None, given: Collection[str] = ()
    ) -> tuple[ParallelConfig, list[str]]:
        """This composition changed to fit another mesh, and a notice for each field reset because it does not fit
        there. Fields in ``given`` stay. Raises UsageError if no such change fits.
        """
        unfit = {name: why for name, why in self._misfits(axes).items() if name not in given}
        if unfit:
            fitting, notices = self.changed(**dict.fromkeys(unfit)).fitted(axes, model, given)
            left_out = [f"continues without {_flag(name)} {getattr(self, name)} ({why})" for name, why in unfit.items()]
            return fitting, left_out + notices
        try:
            self.check(axes, model)
        except UsageError as error:
            for names in (
                ("overlap_layers",),
                ("stages",),
                ("chunks",),
                ("schedule", "chunks"),
                ("schedule", "chunks", "stages"),
            ):
                left_out = [name for name in names if getattr(self, name) is not None and name not in given]
                fitting = self.changed(**dict.fromkeys(left_out))
                try:
                    fitting.check(axes, model)
                except UsageError:
                    continue
                listed = ", ".join(f"{_flag(name)} {getattr(self, name)}" for name in left_out)
                return fitting, [f"continues without {listed} ({error})"]
            raise
        return self, []


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def build_engine(
    model: ModelConfig,
    mesh: Mesh,
    composition: ParallelConfig = ParallelConfig(),  # noqa: B008 (immutable)
    *,
    device: str = "cpu",
    drawn: bool = True,
    placed: bool = True,
) -> LayeredEngine:
    """The engine that a composition of a model describes, on this mesh; unless ``drawn``, its parameters are zeros.

    Unless ``placed``, this rank is outside the engine's mesh, and the given one may have any size.
    Raises UsageError if the composition cannot work there.
    """
    engine_model = model.build(composition)
    if not placed:
        backend = get_backend(device, *mesh.process_on_node)
        return LayeredEngine(engine_model, mesh, seed=model.seed, dtype=model.dtype, backend=backend, placed=False)
    return LayeredEngine(
        engine_model,
        mesh,
        composed_layout(engine_model, mesh, composition),
        seed=model.seed,
        dtype=dtype_of(model.dtype),
        backend=open_device(mesh, device),
        drawn=drawn,
        **composition.how_on(mesh.axes),
    )


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


def helper_stage(model: Model, axes: Mapping[str, int], composition: ParallelConfig, rank: int) -> int:
    """The stage that a helper rank serves."""
    stages, per_stage = axes.get(PIPE, 1), composition.schedule_on(axes).chunks
    chunks = divide(model, stages * per_stage, composition.division, per_stage)
    return stage_of(rank, composition.assigned, model, chunks, stages)


def composed_layout(model: Model, place: MeshPosition, composition: ParallelConfig) -> Layout:
    """The letters of a model that each mesh axis shards in this composition; raises UsageError if the composition
    cannot work there."""
    composition.check(place.all_axes, model)
    return layout_for(
        model,
        place,
        sequence_parallel=composition.sequence_parallel,
        # balances causal attention between ranks; with ulysses each rank has the whole sequence
        zigzag="context" in place.axes and composition.context_method != "ulysses" and attends(model),
        experts_over=composition.expert_axes,
        shares=composition.work_shares,
    )


def composed_assignment(
    model: Model, place: MeshPosition, layout: Layout, itemsize: int, composition: ParallelConfig
) -> Assignment:
    """The share of the rank at ``place``, as the composition stores parameters and divides layers among stages."""
    return assign(
        model,
        place,
        layout,
        itemsize,
        storage=composition.storage,
        stages=composition.division,
        chunks_per_stage=composition.schedule_on(place.axes).chunks,
    )
