"""Models by their names on the command line."""

from functools import partial
from pathlib import Path

from spmd_engine.errors import UsageError, one_of
from spmd_engine.models.convnet import ImageShape, convnet, resnet
from spmd_engine.models.decoder import DECODERS, GPT_SIZES, DecoderConfig, decoder
from spmd_engine.models.families import FAMILIES
from spmd_engine.models.load_config import is_description, is_path, load_config, snapshot_of
from spmd_engine.models.mixture import Mixture
from spmd_engine.models.mlp import deep_mlp, mlp, two_layers
from spmd_engine.models.model import Model
from spmd_engine.models.user_code import is_code, names_in

DENSE = {"mlp": mlp, "deep-mlp": deep_mlp, "two-layers": two_layers}
#: Models of images, and their default image shapes.
IMAGES = {
    "convnet": (convnet, ImageShape()),
    "resnet-nano": (partial(resnet, blocks=(1, 1, 1), width=16, large=False), ImageShape()),
    "resnet18": (partial(resnet, blocks=(2, 2, 2, 2)), ImageShape(224, 224, 3, 1000)),
    "resnet50": (partial(resnet, blocks=(3, 4, 6, 3), bottleneck=True), ImageShape(224, 224, 3, 1000)),
}
MODELS = (*GPT_SIZES, *DECODERS, *DENSE, *IMAGES)


def shape_named(name: str) -> DecoderConfig:
    """Return the decoder ``name``; raises UsageError for other models, and for those that no family describes."""
    if name in DECODERS:
        return DECODERS[name]
    size = GPT_SIZES.get(name)
    if size is None or size.mixture is not None or size.key_value_heads is not None:
        raise UsageError(f"{name} is of no family of other libraries; {one_of(name, FAMILIES)}")
    return size.config


def has_weights(name: str) -> bool:
    """Whether a model's name is that of weights, and neither a built-in one, nor code, nor a mere description."""
    is_other = name in MODELS or is_code(name) or is_description(name) or name.endswith(".py")
    return not is_other and is_path(name)


def family_of(name: str, shape: DecoderConfig | None = None) -> str:
    """Return the family of a decoder by name, path or shape; "gpt2" for other models, which use its names."""
    if shape is None:
        shape = load_config(name) if name not in MODELS and not is_code(name) and is_path(name) else DECODERS.get(name)
    return "gpt2" if shape is None else shape.family


def unknown_model(name: str) -> UsageError:
    """The error for a name that is neither one of ``MODELS`` nor that of weights, but perhaps of a file of code."""
    if name.endswith(".py"):
        return UsageError(
            f"--model {name}: write what makes the model, as in {name}:NAME; {one_of('', names_in(name))}"
        )
    return UsageError(
        f"unknown model {name!r}; {one_of(name, MODELS)}, the path of a folder with config.json, or "
        "FILE.py:NAME for a model of your own"
    )


def other_meaning(name: str) -> str | None:
    """Return the path of weights with the name of one of ``MODELS``, local or in the hub's cache, or None."""
    if name not in MODELS:
        return None
    from spmd_engine.formats.gguf import is_gguf
    from spmd_engine.formats.safetensors_file import CONFIG

    if is_gguf(name) or Path(name, CONFIG).is_file():
        return f"./{name}"
    return str(snapshot_of(name) or "") or None


def build_model(
    name: str,
    dropout: float = 0.0,
    context_method: str = "gather",
    sample: ImageShape | None = None,
    reshard_after: int | None = None,
    mixture: Mixture | None = None,
    shape: DecoderConfig | None = None,
    vocabulary: int | None = None,
) -> Model:
    """Return the model ``name``, for images of the shape of ``sample``, or with a ``mixture`` of experts.

    If ``name`` is the path of a decoder's weights, its configuration is read. With a ``shape`` the model is that
    decoder, and ``name``, for example the path, is only its name. ``vocabulary`` is the number of tokens of a model of
    text with random weights. ``context_method`` and ``reshard_after`` (for models of images) determine how it is
    computed: see ``decoder`` and ``convnet``. Raises UsageError for an unknown name, with the available names, and for
    options that the model does not have.
    """
    if shape is None and name not in MODELS:
        if not is_path(name):
            raise unknown_model(name)
        shape = load_config(name, warn=True)
    if reshard_after is not None and name not in IMAGES:
        raise UsageError(f"--reshard-after {reshard_after}: {name} is no model of images; choose {' or '.join(IMAGES)}")
    if vocabulary is not None and (shape is not None or name not in (*GPT_SIZES, *DECODERS)):
        why = "its weights say how many tokens it knows" if shape is not None else "it is no model of text"
        raise UsageError(f"--vocabulary {vocabulary}: {name} takes none, {why}; leave it out")
    routed = [model for model, size in (GPT_SIZES | DECODERS).items() if size.mixture]
    if mixture is not None and name not in routed:
        raise UsageError(
            f"{name} has no experts, and no options of experts; choose one of {', '.join(routed)}"
            if shape is None or shape.mixture is None
            else f"{name}: its config.json defines its experts; leave out the options of experts"
        )
    if shape is not None or name in (*GPT_SIZES, *DECODERS):
        shape = shape or (DECODERS[name] if name in DECODERS else GPT_SIZES[name].config)
        options = {"mixture": mixture, "vocabulary": vocabulary}
        shape = shape.changed(**{option: value for option, value in options.items() if value is not None})
        return decoder(shape, name, dropout, context_method)
    if dropout:
        raise UsageError(f"{name} has no dropout; leave it at 0 instead of {dropout}")
    if name in DENSE:
        return DENSE[name]()
    build, image = IMAGES[name]
    return build(sample or image, name, reshard_after=reshard_after)
