"""``Offload``: what lives elsewhere while it is not in use, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmd_engine.arrays import Backend
from spmd_engine.arrays.meta.array import has_shapes_only
from spmd_engine.axes import PIPE, count_ranks
from spmd_engine.engine.offload.array import OffloadedArray
from spmd_engine.engine.offload.file import FileTarget
from spmd_engine.engine.offload.stash import Stash
from spmd_engine.engine.offload.target import HostTarget, OffloadTarget, ShapesTarget
from spmd_engine.errors import UsageError
from spmd_engine.requirements import Case, effect_if, requirement

KINDS = ("optimizer", "parameters", "activations")
#: By the name of ``--offload-to``: what makes the target of a rank, of a folder and the backend of its arrays.
TARGETS: dict[str, type[OffloadTarget]] = {"disk": FileTarget, "host": HostTarget}


@dataclass(frozen=True)
class Offload:
    """What lives elsewhere while it is not in use: some of ``KINDS``, in a file in this ``folder``, or on the host."""

    kinds: tuple[str, ...] = ()
    folder: str = "."
    to: str = "disk"  #: one of ``TARGETS``

    @property
    def by_kind(self) -> Mapping[str, str]:
        """The name of the target of each kind."""
        return dict.fromkeys(self.kinds, self.to)

    def open(self, backend: Backend) -> ArrayPlaces:
        """The places of the arrays of a rank, of this backend. Raises UsageError if there can be none."""
        if not self.kinds:
            return ArrayPlaces(backend)
        keeps = "activations" in self.kinds
        if has_shapes_only(backend):
            return ArrayPlaces(backend, ShapesTarget(holds_buffers=keeps), keeps)
        self.check(on_device=backend.on_device)
        return ArrayPlaces(backend, TARGETS[self.to](self.folder, backend), keeps)

    def check(self, *, on_device: bool) -> None:
        """Raise UsageError if this cannot be offloaded from where arrays are."""
        if on_device and (others := [kind for kind in self.kinds if kind != "optimizer"]):
            raise UsageError(f"--offload {others[0]}: those of a device stay there; choose --offload optimizer")
        if self.kinds and TARGETS[self.to].needs_device and not on_device:
            raise UsageError(
                f"--offload-to {self.to}: without a device everything is on the host; choose --offload-to disk"
            )

    @classmethod
    def parse(cls, text: str | None, folder: str | None = None, to: str | None = None) -> Offload:
        """``"optimizer,activations"`` as an ``Offload``; raises UsageError for unknown kinds."""
        kinds = tuple(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))
        for kind in kinds:
            if kind not in KINDS:
                raise UsageError(f"--offload {text}: there is no {kind!r} to offload; choose among {', '.join(KINDS)}")
        return cls(kinds, folder or ".", to or "disk")


class ArrayPlaces:
    """Where a rank's arrays live that do not live in memory: in a ``target``, perhaps with saved activations."""

    def __init__(self, backend: Backend, target: OffloadTarget | None = None, keeps_activations: bool = False) -> None:
        self._backend, self._target = backend, target
        #: the target of saved activations; None if they stay in memory
        self.stash = Stash(target) if target is not None and keeps_activations else None

    def zeros(self, shape: Sequence[int], dtype: Any) -> OffloadedArray:
        """A new array of zeros in the target."""
        assert self._target is not None
        return OffloadedArray(self._target, shape, dtype, self._backend)


@requirement("offload", "zero", nearest="Choose --zero 3 or 0")
def _parameters_to_offload(case: Case) -> str | None:
    """parameters of ZeRO 3, or those that every rank updates whole"""
    storage, has_replicas = case.options.storage, count_ranks(case.axes) > case.axes.get(PIPE, 1)
    if "parameters" in storage.places.kinds and storage.stage(case.axes) in (1, 2) and has_replicas:
        return f"with --zero {case.options.zero} every rank holds them whole"
    return None


REQUIREMENTS = (
    _parameters_to_offload,
    *(
        effect_if(option, lambda case: case.options.storage.places.kinds, "--offload", "without --offload")
        for option in ("offload_to", "offload_dir")
    ),
)
