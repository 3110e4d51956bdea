"""Models by name, as the command line knows them."""

from spmd_engine.errors import UsageError
from spmd_engine.models.gpt import GPT_SIZES, gpt
from spmd_engine.models.mlp import deep_mlp, mlp, two_layers
from spmd_engine.models.model import Model

DENSE = {"mlp": mlp, "deep-mlp": deep_mlp, "two-layers": two_layers}
MODELS = (*GPT_SIZES, *DENSE)


def build_model(name: str, dropout: float = 0.0, context_method: str = "gather") -> Model:
    """The model called ``name``; raises UsageError naming those there are."""
    if name in GPT_SIZES:
        return gpt(GPT_SIZES[name], name, dropout, context_method)
    if name not in DENSE:
        raise UsageError(f"unknown model {name!r}; choose one of {', '.join(MODELS)}")
    if dropout:
        raise UsageError(f"{name} has no dropout; leave it at 0 instead of {dropout}")
    return DENSE[name]()
