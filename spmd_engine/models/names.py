"""Models by name, as the command line knows them."""

from functools import partial

from spmd_engine.errors import UsageError
from spmd_engine.models.convnet import convnet, resnet
from spmd_engine.models.gpt import GPT_SIZES, gpt
from spmd_engine.models.images import ImageShape
from spmd_engine.models.mlp import deep_mlp, mlp, two_layers
from spmd_engine.models.model import Model

DENSE = {"mlp": mlp, "deep-mlp": deep_mlp, "two-layers": two_layers}
#: Models of images, and the images that they are for unless told otherwise.
IMAGES = {
    "convnet": (convnet, ImageShape()),
    "resnet-nano": (partial(resnet, blocks=(1, 1, 1), width=16, large=False), ImageShape()),
    "resnet18": (partial(resnet, blocks=(2, 2, 2, 2)), ImageShape(224, 224, 3, 1000)),
    "resnet50": (partial(resnet, blocks=(3, 4, 6, 3), bottleneck=True), ImageShape(224, 224, 3, 1000)),
}
MODELS = (*GPT_SIZES, *DENSE, *IMAGES)


def build_model(
    name: str,
    dropout: float = 0.0,
    context_method: str = "gather",
    sample: ImageShape | None = None,
    recut_after: int | None = None,
) -> Model:
    """The model called ``name``, of images of the shape of ``sample``; raises UsageError naming those there are.

    ``context_method`` and ``recut_after`` (so many blocks of a model of images: see there) say how it is computed.
    """
    if name not in MODELS:
        raise UsageError(f"unknown model {name!r}; choose one of {', '.join(MODELS)}")
    if recut_after is not None and name not in IMAGES:
        raise UsageError(f"--recut-after {recut_after}: {name} is no model of images; choose {' or '.join(IMAGES)}")
    if name in GPT_SIZES:
        return gpt(GPT_SIZES[name], name, dropout, context_method)
    if dropout:
        raise UsageError(f"{name} has no dropout; leave it at 0 instead of {dropout}")
    if name in DENSE:
        return DENSE[name]()
    build, shape = IMAGES[name]
    return build(sample or shape, name, recut_after=recut_after)
