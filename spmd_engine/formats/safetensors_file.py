"""Safetensors files, and folders in Hugging Face's format: ``config.json``, and weights in one or several files.

A safetensors file consists of the length of its header (eight bytes), the header, and the numbers. The header is JSON:
dtype, shape and place of each tensor. It is checked against the file. The format's own library is not used, because it
reads BF16 tensors whole, and cannot map a tensor that is to be sliced.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from spmd_engine.errors import CheckpointError
from spmd_engine.foreign import distinct, json_at, parse_json, reading, refuse_pointer
from spmd_engine.formats.safetensors_header import DTYPES, dtype_of
from spmd_engine.formats.tensor import FileTensor, PlainTensor

WEIGHTS = ("F64", "F32", "F16", "BF16")  #: dtypes of weights
LARGEST_HEADER = 100_000_000  #: bytes; the limit of the format's library


def read_safetensors(path: str | Path) -> dict[str, PlainTensor]:
    """The tensors of a file by name, from its header alone.

    Raises CheckpointError, naming the tensor, for a header that is truncated or no JSON, and for tensors that have
    unknown dtypes or do not fill the file without gaps.
    """
    described, after, size = read_header(path)
    described.pop("__metadata__", None)
    return tensors_of(Path(path), described, after, size)


def tensors_of(path: Path, described: dict[str, Any], after: int, size: int) -> dict[str, PlainTensor]:
    """The tensors that a header describes, in the order of their places. Raises as ``read_safetensors`` does."""
    tensors, end = {}, 0
    unsorted = [_tensor(path, name, entry, after) for name, entry in described.items()]
    for tensor in sorted(unsorted, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset - after != end:
            raise CheckpointError(f"{path}: {tensor.name} begins at byte {tensor.offset - after}, not where others end")
        end += tensor.nbytes
        tensors[tensor.name] = tensor
    if after + end != size:
        raise CheckpointError(
            f"{path}: its tensors need {after + end} bytes, the file has {size}: it is truncated or damaged"
        )
    return tensors


def read_header(path: str | Path, largest: int = LARGEST_HEADER) -> tuple[dict[str, Any], int, int]:
    """The content of a file's header, the byte after the header, and the file's size.

    Raises CheckpointError for a header that is truncated, has more than ``largest`` bytes, is no JSON object, or has a
    name twice.
    """
    path = Path(path)
    with reading(f"{path} cannot be read as a safetensors file: its header", "", CheckpointError):
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(largest, size - 8):
                refuse_pointer(path, CheckpointError)
                raise CheckpointError(
                    f"{path}: a header of {length} bytes in a file of {size}: it is truncated or damaged"
                )
            described = parse_json(file.read(length), distinct)
    if not isinstance(described, dict):
        raise CheckpointError(f"{path}: its header is no JSON object")
    return described, 8 + length, size


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _tensor(path: Path, name: str, described: Any, after: int) -> PlainTensor:
    if not isinstance(described, dict):
        raise CheckpointError(f"{path}: the header does not describe {name}")
    dtype, shape, offsets = described.get("dtype"), described.get("shape"), described.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{path}: {name} is of dtype {dtype}; weights are read of {', '.join(WEIGHTS)}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{path}: the header says of {name} shape {shape} at {offsets}")
    needed = prod(shape) * dtype_of(dtype).itemsize
    if offsets[1] - offsets[0] != needed:
        size = offsets[1] - offsets[0]
        raise CheckpointError(f"{path}: the header has {size} bytes for {name}, {dtype}{shape}, which needs {needed}")
    return PlainTensor(name, str(path), tuple(shape), dtype, after + offsets[0], DTYPES[dtype])


# --- Folders in Hugging Face's format


CONFIG = "config.json"
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pth", "*.pt", "*.ckpt")
#: Weights of other libraries.
_OTHERS = {"*.h5": "TensorFlow", "*.msgpack": "Flax", "*.onnx": "ONNX"}
_SHARD = re.compile(r".*-\d{5}-of-(\d{5})\.safetensors")


def read_json(path: Path, pairs: Callable[[list], Any] | None = None) -> dict[str, Any]:
    """The JSON object in a file; ``pairs`` as in ``parse_json``. Raises CheckpointError if the file holds none."""
    content = json_at(path, CheckpointError, pairs=pairs)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is no JSON object")
    return content


def folder_tensors(folder: Path) -> dict[str, FileTensor]:
    """The tensors of a folder by name: those of ``model.safetensors`` or, without it, of all files in the index.

    Raises CheckpointError for a missing file, an index that contradicts its files, and weights in other formats.
    """
    if (folder / ONE_FILE).is_file():  # even beside an index, as in transformers
        return dict(read_safetensors(folder / ONE_FILE))
    if (folder / INDEX).is_file():
        return _indexed(folder)
    raise CheckpointError(_without_weights(folder))


def _without_weights(folder: Path) -> str:
    """Why nothing is read of a folder with neither file."""
    if pickles := sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)):
        return (
            f"{folder / pickles[0]} is pickled: reading it would run the code that it holds. Convert it where "
            "you trust it: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER) of transformers "
            f"writes {ONE_FILE}"
        )
    missing = f"{folder}: there is neither {ONE_FILE} nor {INDEX}"
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if files and (shard := _SHARD.fullmatch(files[0])):
        return f"{missing}, but {files[0]}, a part of the weights. Fetch {INDEX}, and all {int(shard[1])} parts"
    if files:
        return f"{missing}, but {files[0]}. If it has the model's weights under the names of transformers, rename it"
    if files := sorted(path.name for path in folder.glob("*.gguf")):
        return f"{missing}, but {files[0]}: name this file itself, {folder / files[0]}"
    for pattern, library in _OTHERS.items():
        if files := sorted(path.name for path in folder.glob(pattern)):
            return f"{missing}, but {files[0]}, weights of {library}, which are not read. Fetch {ONE_FILE}"
    return missing


def _indexed(folder: Path) -> dict[str, FileTensor]:
    index = read_json(folder / INDEX, distinct).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise CheckpointError(f"{folder / INDEX}: it has no weight_map of tensors to files")
    tensors_by_name: dict[str, FileTensor] = {}
    for file in sorted(set(index.values())):
        if Path(file).name != file:
            raise CheckpointError(f"{folder / INDEX}: {file!r} is not a file of the folder")
        if not (folder / file).is_file():
            tensors = sum(name == file for name in index.values())
            raise CheckpointError(f"{folder / file} is missing: {tensors} tensors of the index are in it. Fetch it")
        in_file = read_safetensors(folder / file)
        expected = {name for name, other in index.items() if other == file}
        if differing := sorted(expected ^ set(in_file)):
            where = "is in the index, but not in the file" if differing[0] in expected else "is not in the index for it"
            raise CheckpointError(f"{folder / file}: {differing[0]} {where}")
        tensors_by_name |= in_file
    return tensors_by_name
