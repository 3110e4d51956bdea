"""Prints the tables of model types in docs/models.md, from the records in spmd_engine/models/families."""

from spmd_engine.models import DECODERS, GPT_SIZES
from spmd_engine.models.families import FAMILIES


def model_types():
    """One line per ``model_type``."""
    yield "| `model_type` | here | also by name, to be trained from nothing |"
    yield "|---|---|---|"
    for name, family in sorted(FAMILIES.items()):
        built_in = [model for model, shape in DECODERS.items() if shape.family == name]
        if name == "gpt2":
            built_in = [model for model, size in GPT_SIZES.items() if not size.mixture and not size.key_value_heads]
        kinds = ", ".join(f"`{kind}`" for kind in (family.model_type, *family.multimodal))
        yield f"| {kinds} | {family.about} | {', '.join(f'`{model}`' for model in built_in)} |"


def architectures():
    """One line per architecture of GGUF files."""
    types = {}
    for family in sorted(FAMILIES.values(), key=lambda family: family.gguf.when is not None):
        if family.gguf.architecture:
            types.setdefault(family.gguf.architecture, []).append(f"`{family.model_type}`")
    yield "| `general.architecture` | `model_type` |"
    yield "|---|---|"
    yield from (f"| `{name}` | {' or '.join(kinds)} |" for name, kinds in sorted(types.items()))


if __name__ == "__main__":
    print("\n".join([*model_types(), "", *architectures()]))
