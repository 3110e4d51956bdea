"""Whether images are cut so thin that ranks fetch more of their neighbours than they have themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from spmd_engine.axes import MeshPosition, all_positions
from spmd_engine.layers.containers import Chain, ResidualBlock
from spmd_engine.layers.images import ImageWindows
from spmd_engine.layers.layer import Layer
from spmd_engine.models.model import Model
from spmd_engine.sharding.halos import Reach


def note_of_thin_cut(model: Model, axes: Mapping[str, int]) -> str | None:
    """What to say if the halos of a forward have more elements than the images and feature maps that they belong to."""
    cut = {axis: axes[axis] for axis in ("rows", "columns") if axes.get(axis, 1) > 1}
    windows = [each for _, layer in model.layers for each in _windows(layer) if (each.y, each.x) == ("h", "w")]
    if not cut or not windows:
        return None
    halos = owned = 0
    for place in all_positions(cut):
        for each in windows:
            halo, own = _halo_and_own(each, place)
            halos, owned = halos + halo, owned + own
    if halos <= owned:
        return None
    mesh = ",".join(f"{axis}={size}" for axis, size in cut.items())
    return (
        f"--mesh {mesh} cuts the images of {model.name} so thin that ranks fetch more than they have: "
        f"{halos / owned:.1f} times as much in halos; take fewer ranks there, and more on data"
    )


def _windows(layer: Layer) -> Iterator[ImageWindows]:
    """Those of a layer, and of the layers that it is made of."""
    parts = layer.layers if isinstance(layer, Chain) else layer.ways.items() if isinstance(layer, ResidualBlock) else ()
    for _, part in parts:
        yield from _windows(part)
    if isinstance(found := getattr(layer, "windows", None), ImageWindows):
        yield found


def _halo_and_own(windows: ImageWindows, place: MeshPosition) -> tuple[int, int]:
    """How many pixels a rank lacks of those that its outputs read, and how many it has."""
    sides = ((windows.image[0], windows.rows, "rows"), (windows.image[1], windows.columns, "columns"))
    reaches = [Reach.of(length, window, (axis,) if axis in place.axes else (), place) for length, window, axis in sides]
    needed = prod(reach.needed[1] - reach.needed[0] for reach in reaches)
    here = prod(max(0, min(r.needed[1], r.own[1]) - max(r.needed[0], r.own[0])) for r in reaches)
    return needed - here, prod(reach.own[1] - reach.own[0] for reach in reaches)
