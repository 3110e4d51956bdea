"""The model of a job: by name, path or code, with the options that decide its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any, Self

from spmd_engine.arrays.precision import FLOATS
from spmd_engine.configuration import Configuration, not_in_json, setting
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.models import DecoderConfig, ImageShape, Mixture, Model
from spmd_engine.models.lora import LoRAOptions, with_adapters
from spmd_engine.models.names import IMAGES, MODELS, build_model, family_of, has_weights, unknown_model
from spmd_engine.models.user_code import call, code_named, digest_of, is_code, own_model


def image_sizes(text: str) -> dict[str, int]:
    """``"28,28,1,10"`` as a dict by the field names of ImageShape; raises UsageError for anything else."""
    sizes = text.split(",")
    names = [field.name for field in fields(ImageShape)]
    if len(sizes) != len(names) or not all(size.strip().isdecimal() and int(size) for size in sizes):
        raise UsageError(f"images {text}: write height,width,channels,classes, each from 1, as in 28,28,1,10")
    return dict(zip(names, map(int, sizes), strict=True))


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
