"""``verify --import PATH --reference FILE``: an imported model beside activations of another program."""

from __future__ import annotations

import click
import numpy as np

from spmd_engine.checkpoints.pretrained import open_pretrained
from spmd_engine.comm.agreement import on_all_ranks
from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine.parallel_config import Composition, ModelConfig
from spmd_engine.formats import MappedArray, npz_names, read_npz
from spmd_engine.verify.activations import compare_activations

TOLERANCE = 1e-4  #: of activations in float32, relative to a layer's largest


def verify_import(
    path: str, reference: str, mesh: Mesh, composition: Composition, device: str, tolerance: float | None
) -> bool:
    """Print how far each layer is from its reference, and which is the first that differs; whether none does."""
    tolerance = tolerance or TOLERANCE
    arrays = on_all_ranks(mesh.group(), lambda: _read(reference))
    engine, pretrained = open_pretrained(ModelConfig(path, dtype="float64"), mesh, composition, device=device)
    distances = compare_activations(engine, arrays, tolerance)
    first = next((each for each in distances if each.place is not None), None)
    if mesh.rank > 0:
        return first is None
    click.echo(f"{path} on mesh {mesh}, beside {reference}\n")
    width = max(len(each.layer) for each in distances)
    for each in distances:
        said = "" if each.place is None else f"  off, first at sample {each.place[0]}, position {each.place[1]}"
        click.echo(f"{each.layer:<{width}}  {each.distance:8.1e}{said}")
    if first is None:
        click.echo(f"\nall {len(distances)} agree to {tolerance:g}")
        return True
    tensors = [each.tensor.name for name, each in pretrained.filled.items() if name.startswith(f"{first.layer}/")]
    click.echo(
        f"\n{first.layer} is the first that differs, by {first.distance:.1e} (allowed is {tolerance:g}). It has "
        f"{', '.join(dict.fromkeys(tensors)) or 'no parameters'}"
    )
    return False


def _read(path: str) -> dict[str, np.ndarray]:
    arrays = {name: read_npz(path, name) for name in npz_names(path)}
    return {name: each.open() if isinstance(each, MappedArray) else each for name, each in arrays.items()}
