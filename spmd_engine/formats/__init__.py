"""Files of other programs (images, arrays, texts, safetensors, GGUF), and files of tokens."""

from typing import TYPE_CHECKING

from spmd_engine.importing import imported_when_asked

if TYPE_CHECKING:
    from spmd_engine.formats.array_files import is_of_arrays, npz_names, read_idx, read_npz
    from spmd_engine.formats.image_files import ImageFiles, images_in_folder, images_in_table
    from spmd_engine.formats.tensor import MappedArray

__all__ = [
    "ImageFiles",
    "MappedArray",
    "images_in_folder",
    "images_in_table",
    "is_of_arrays",
    "npz_names",
    "read_idx",
    "read_npz",
]

__getattr__ = imported_when_asked(__name__)
