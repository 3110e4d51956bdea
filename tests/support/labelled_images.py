"""Small files of labelled images for the tests."""

import gzip
import struct

import numpy as np

N, H, W, CLASSES = 23, 6, 5, 3
PIXELS = np.random.default_rng(0).integers(0, 256, (N, H, W), np.uint8)
LABELS = np.arange(N, dtype=np.uint8) % CLASSES
CODES = {"u1": 8, "i1": 9, ">i2": 11, ">i4": 12, ">f4": 13, ">f8": 14}


def idx(array, dtype="u1"):
    """The bytes of an IDX file, as its specification describes them."""
    array = np.asarray(array)
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, CODES[dtype], array.ndim, *array.shape)
    return header + array.astype(dtype).tobytes()


def write_idx(folder, compressed=False, held_out=0):
    """A folder like MNIST's, with the last ``held_out`` images as its test part."""
    folder.mkdir(exist_ok=True)
    cut = N - held_out
    for name, part in (("train", slice(cut)), ("t10k", slice(cut, N))):
        for file, array in ((f"{name}-images-idx3-ubyte", PIXELS[part]), (f"{name}-labels-idx1-ubyte", LABELS[part])):
            if len(array) and compressed:
                (folder / f"{file}.gz").write_bytes(gzip.compress(idx(array)))
            elif len(array):
                (folder / file).write_bytes(idx(array))
    return folder


def write_npz(file, compressed=False, **arrays):
    (np.savez_compressed if compressed else np.savez)(file, **(arrays or {"x": PIXELS, "y": LABELS}))
    return file


def write_folder(folder, mode="L"):
    """One file per image, in a subfolder per class; within a class in the order of their numbers."""
    from PIL import Image

    for number, (pixels, label) in enumerate(zip(PIXELS, LABELS, strict=True)):
        (folder / f"class{label}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).convert(mode).save(folder / f"class{label}" / f"{number:02}.png")
    return folder
