"""Models by name, as the command line knows them."""

from spmd_engine.errors import UsageError
from spmd_engine.models.gpt import GPT_SIZES, gpt
from spmd_engine.models.model import Model


def build_model(name: str, dropout: float = 0.0) -> Model:
    """The model called ``name``; raises UsageError naming those there are."""
    if name not in GPT_SIZES:
        raise UsageError(f"unknown model {name!r}; choose one of {', '.join(GPT_SIZES)}")
    return gpt(GPT_SIZES[name], name, dropout)
