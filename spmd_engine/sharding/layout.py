"""Where each letter lives: the one place in which a strategy is chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from spmd_engine.comm.mesh import Mesh
from spmd_engine.errors import MeshError, NotationError
from spmd_engine.sharding.notation import Spec

#: What each mesh axis, by its customary name, cuts: data parallel cuts the batch; tensor parallel the heads,
#: the hidden width and the vocabulary.
CUSTOMARY = {"data": "b", "model": "hfv"}

Axes = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Layout:
    """Letters to mesh axes, ``inside`` a layer and on the ``residual`` stream between layers.

    The two differ under sequence parallelism: the stream's ``s`` is then cut over the axis that cuts the
    heads inside. A letter that is not named is whole on every rank.
    """

    inside: Axes = field(default_factory=dict)
    residual: Axes = field(default_factory=dict)

    @classmethod
    def for_mesh(cls, mesh: Mesh, *, sequence_parallel: bool = False) -> Layout:
        """The customary layout of a mesh whose axes are named ``data`` and ``model``."""
        inside: dict[str, tuple[str, ...]] = {}
        for axis in mesh.axes:
            if axis not in CUSTOMARY:
                known = " or ".join(CUSTOMARY)
                why = f"no customary layout for axis {axis!r}; name it {known}, or pass a Layout"
                raise MeshError(f"mesh {mesh}: {why}")
            for letter in CUSTOMARY[axis]:
                inside[letter] = (*inside.get(letter, ()), axis)
        residual = dict(inside)
        if sequence_parallel and "model" in mesh.axes:
            residual["s"] = (*inside.get("s", ()), "model")
        return cls(inside, residual)

    def axes(self, letter: str, where: str = "inside") -> tuple[str, ...]:
        """The axes that cut a letter ``inside`` a layer or on the ``residual`` stream."""
        return {"inside": self.inside, "residual": self.residual}[where].get(letter, ())

    def check(self, name: str, letters: Iterable[str], may_cut: str, across: str) -> None:
        """Raise NotationError if a layer cannot work under this layout.

        ``letters`` are those of its arrays, ``may_cut`` those that may be cut inside it; ``across`` is the letter
        over whose axes it gathers from the residual stream, which may cut ``s`` further over those axes and no others.
        """
        for letter in letters:
            axes = self.axes(letter)
            if axes and letter not in may_cut:
                raise NotationError(
                    f'{name}: {letter} is cut over mesh axis "{",".join(axes)}" inside, but this layer needs it whole; '
                    f"it can be cut along {', '.join(may_cut)}"
                )
        for letter in "bs":
            inside, stream = self.axes(letter), self.axes(letter, "residual")
            borrowed = stream[len(inside) :]
            if stream[: len(inside)] != inside:
                raise NotationError(
                    f"{name}: the residual stream cuts {letter} over {stream}; it must cut it over {inside} first, "
                    "as inside the layers"
                )
            if across and not set(borrowed) <= set(self.axes(across)):
                raise NotationError(
                    f"{name}: the residual stream cuts {letter} over {borrowed}, which do not cut {across} inside; "
                    f"cut {across} over the same axes, or {letter} over no more than inside"
                )

    def spec(self, dims: str, where: str = "inside") -> Spec:
        """``spec("d f")`` is ``"d f/model"`` where the layout cuts f over model."""
        try:
            return Spec(tuple((letter, self.axes(letter, where)) for letter in dims.split())).checked()
        except NotationError as error:
            raise NotationError(f"{error} (dims {dims!r} {where} a layer)") from None
