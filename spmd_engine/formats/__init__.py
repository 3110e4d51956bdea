"""Files that others write: labelled images as IDX, as .npz, and as folders of pictures."""

from spmd_engine.formats.folder import ImageFiles, image_files
from spmd_engine.formats.idx import read_idx
from spmd_engine.formats.npz import npz_names, read_npz
from spmd_engine.formats.stored import StoredArray

__all__ = ["ImageFiles", "StoredArray", "image_files", "npz_names", "read_idx", "read_npz"]
