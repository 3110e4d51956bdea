"""Models by name, as the command line knows them."""

from dataclasses import replace

from spmd_engine.errors import UsageError
from spmd_engine.models.gpt import GPT_SIZES, gpt
from spmd_engine.models.mixture import Mixture
from spmd_engine.models.mlp import deep_mlp, mlp, two_layers
from spmd_engine.models.model import Model

DENSE = {"mlp": mlp, "deep-mlp": deep_mlp, "two-layers": two_layers}
MODELS = (*GPT_SIZES, *DENSE)


def build_model(
    name: str, dropout: float = 0.0, context_method: str = "gather", mixture: Mixture | None = None
) -> Model:
    """The model called ``name``, if it has experts with this ``mixture`` instead of its own.

    Raises UsageError for another name, naming those there are, and for a mixture of a model that has no experts.
    """
    if mixture is not None and (name not in GPT_SIZES or GPT_SIZES[name].mixture is None):
        routed = ", ".join(each for each, size in GPT_SIZES.items() if size.mixture)
        if name in MODELS:
            raise UsageError(f"{name} has no experts, and takes no options about them; choose one of {routed}")
    if name in GPT_SIZES:
        size = GPT_SIZES[name]
        return gpt(replace(size, mixture=mixture or size.mixture), name, dropout, context_method)
    if name not in DENSE:
        raise UsageError(f"unknown model {name!r}; choose one of {', '.join(MODELS)}")
    if dropout:
        raise UsageError(f"{name} has no dropout; leave it at 0 instead of {dropout}")
    return DENSE[name]()
