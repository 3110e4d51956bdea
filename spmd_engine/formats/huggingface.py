"""A model's folder in Hugging Face's format: ``config.json``, and weights in one safetensors file or in several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spmd_engine.errors import CheckpointError
from spmd_engine.foreign import json_at
from spmd_engine.formats.safetensors_file import read_safetensors
from spmd_engine.formats.tensor import FileTensor

CONFIG = "config.json"
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pth", "*.pt", "*.ckpt")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file; raises CheckpointError if it is none."""
    content = json_at(path, CheckpointError)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is no JSON object")
    return content


def folder_tensors(folder: Path) -> dict[str, FileTensor]:
    """The tensors of a folder by name: of ``model.safetensors`` or, where there is none, of all that the index names.

    Raises CheckpointError for a missing file, for an index that is at odds with its files, and for pickled weights.
    """
    if (folder / ONE_FILE).is_file():  # also where an index of before is left over: transformers takes it first
        return dict(read_safetensors(folder / ONE_FILE))
    if (folder / INDEX).is_file():
        return _indexed(folder)
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder / pickles[0]} is pickled: to read it would run whatever code it holds. Convert it where "
            "you trust it: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER) of transformers "
            f"writes {ONE_FILE}"
        )
    raise CheckpointError(f"{folder}: there is neither {ONE_FILE} nor {INDEX}")


def _indexed(folder: Path) -> dict[str, FileTensor]:
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise CheckpointError(f"{folder / INDEX}: it has no weight_map of tensors to files")
    found: dict[str, FileTensor] = {}
    for file in sorted(set(index.values())):
        if Path(file).name != file:
            raise CheckpointError(f"{folder / INDEX}: {file!r} is not a file of the folder")
        if not (folder / file).is_file():
            tensors = sum(each == file for each in index.values())
            raise CheckpointError(f"{folder / file} is missing: {tensors} tensors of the index are in it. Fetch it")
        held = read_safetensors(folder / file)
        expected = {name for name, where in index.items() if where == file}
        if odd := sorted(expected ^ set(held)):
            where = "is in the index, but not in the file" if odd[0] in expected else "is not in the index for it"
            raise CheckpointError(f"{folder / file}: {odd[0]} {where}")
        found |= held
    return found
