"""Files that others write: labelled images as IDX, as .npz, and as folders of pictures."""

from typing import TYPE_CHECKING

from spmd_engine.importing import imported_when_asked

if TYPE_CHECKING:
    from spmd_engine.formats.folder import ImageFiles, image_files
    from spmd_engine.formats.idx import read_idx
    from spmd_engine.formats.npz import npz_names, read_npz
    from spmd_engine.formats.tensor import MappedArray

__all__ = ["ImageFiles", "MappedArray", "image_files", "npz_names", "read_idx", "read_npz"]

_PUBLIC = {
    "folder": (
        "ImageFiles",
        "image_files",
    ),
    "idx": ("read_idx",),
    "npz": (
        "npz_names",
        "read_npz",
    ),
    "tensor": ("MappedArray",),
}
__getattr__ = imported_when_asked(__name__, _PUBLIC)
