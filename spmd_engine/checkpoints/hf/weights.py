"""Pretrained weights, as a mapping of parameter names to arrays that are read only where they are sliced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

from spmd_engine.checkpoints.hf.tensor_view import StoredView
from spmd_engine.checkpoints.read import Sliceable
from spmd_engine.errors import CheckpointError
from spmd_engine.formats.gguf import read_gguf
from spmd_engine.formats.safetensors_file import CONFIG, folder_tensors, read_json
from spmd_engine.formats.tensor import FileTensor
from spmd_engine.models.decoder import DecoderConfig, decoder
from spmd_engine.models.gguf.config import IGNORED as OF_GGUF
from spmd_engine.models.gguf.config import shape_of_gguf
from spmd_engine.models.hf.multimodal import MULTIMODAL, text_tensors
from spmd_engine.models.load_config import load_config, located
from spmd_engine.models.model import Model
from spmd_engine.models.weight_map import HEADS, IGNORED, WeightMap, gguf_weight_map, weight_map

COMPARED = 1 << 22  #: elements at a time


@dataclass(frozen=True)
class Filled:
    """A parameter, and the tensor that it is read from."""

    name: str
    view: StoredView
    tensor: FileTensor

    @property
    def array(self) -> Sliceable:
        """What of the parameter is sliced is read, as float32, or float64 where that holds more of what is stored."""
        dtype = np.dtype(np.float64 if self.tensor.dtype == "F64" or self.view.stored.offset else np.float32)
        return Sliceable(self.view.shape, dtype, partial(self._read, dtype), rows_are_cheap=True)

    def _read(self, dtype: np.dtype, spans: tuple[slice, ...]) -> np.ndarray:
        part = self.tensor.read(self.view.split, self.view.index(spans))
        out = np.empty([span.stop - span.start for span in spans], dtype)
        self.view.copy(part, spans, out)
        if not _finite(out):
            raise CheckpointError(
                f"{self.tensor.path}: {self.tensor.name} has values that are infinite or not a number, so {self.name} "
                "would; fetch it again, or ask its author"
            )
        return out


def _finite(x: np.ndarray) -> bool:
    """Whether all values are; by their sum where that is finite, which one pass without an array tells."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(x.sum())) or bool(np.isfinite(x).all())


class Pretrained(Mapping[str, Sliceable]):
    """The parameters of a decoder by our names, from a folder of Hugging Face's format or a GGUF file.

    ``shape`` is its configuration, ``filled`` the part of a tensor that fills each parameter. When it is opened,
    headers alone prove that every parameter is filled, and that all of every tensor is used exactly once. Raises
    CheckpointError for anything else, naming the tensor or the parameter.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = located(path)
        self.shape, tensors, names = _opened(self.path)
        self.filled = fill(str(self.path), decoder(self.shape), tensors, names)
        self._copy = _check_used(str(self.path), self.shape, tensors, self.filled.values())

    def check_copies(self) -> None:
        """Raise CheckpointError if the head is stored beside the embedding that it is tied to, and differs.

        Reads both, a few megabytes at a time.
        """
        table = self.filled["embedding/table"].tensor
        if self._copy is None:
            return
        rows, width = table.shape
        for first in range(0, rows, step := max(1, COMPARED // width)):
            some = slice(first, min(first + step, rows)), slice(0, width)
            one, other = (each.read([[rows], [width]], some) for each in (table, self._copy))
            if not np.array_equal(one, other):
                raise CheckpointError(
                    f"{self.path}: tie_word_embeddings says that {self._copy.name} is {table.name}, but both are "
                    f"stored and differ (from row {first} on). Set it to false in {CONFIG} to use both"
                )

    @property
    def nbytes(self) -> int:
        """Of all tensors that are used."""
        tensors = (each.tensor for each in self.filled.values())
        return sum({(each.path, each.offset): each.nbytes for each in tensors}.values())

    def __getitem__(self, name: str) -> Sliceable:
        return self.filled[name].array

    def __iter__(self) -> Iterator[str]:
        return iter(self.filled)

    def __len__(self) -> int:
        return len(self.filled)


def _opened(path: Path) -> tuple[DecoderConfig, dict[str, FileTensor], WeightMap]:
    if path.is_file():
        file = read_gguf(path)
        shape = shape_of_gguf(file, str(path))
        return shape, file.tensors, gguf_weight_map(shape)
    shape, tensors = load_config(path), folder_tensors(path)
    if read_json(path / CONFIG).get("model_type") in MULTIMODAL:
        tensors = text_tensors(tensors)
    return shape, tensors, weight_map(shape)


def fill(where: str, model: Model, tensors: Mapping[str, FileTensor], names: WeightMap) -> dict[str, Filled]:
    """Every parameter of a model with the tensor that it is read from, ``where`` these are.

    Raises CheckpointError for one that none fills, and for a tensor of other sizes than the parameter's.
    """
    stored = dict(names)
    sizes = {f"{name}/{own}": layer.sizes for name, layer in model.layers for own in layer.parameters}
    filled, unfilled = {}, []
    for name, (parameter, _) in model.parameters():
        found = next((each for each in stored[name] if each.tensor in tensors), None)
        if found is None:
            unfilled.append((name, stored[name][0].tensor))
            continue
        view, tensor = StoredView(parameter.dims, sizes[name], found), tensors[found.tensor]
        tensor.check_weights()
        if found.rows is not None:
            tensor.check_sizes([[found.rows[2]], *view.split[1:]])
            tensor = tensor.rows(*found.rows[:2])
        tensor.check_sizes(view.split)
        filled[name] = Filled(name, view, tensor)
    if unfilled:
        name, tensor = unfilled[0]
        others = f" (and {len(unfilled) - 1} more)" if unfilled[1:] else ""
        hint = "; if it is the embedding's table, say so by tie_word_embeddings" if name == "head/table" else ""
        raise CheckpointError(f"{where}: no tensor {tensor} to fill {name} with{others}{hint}")
    return filled


def _check_used(
    where: str, shape: DecoderConfig, tensors: Mapping[str, FileTensor], filled: Sequence[Filled]
) -> FileTensor | None:
    """Raise CheckpointError unless all of every tensor is used once; returns a stored copy of a tied head, if any."""
    used: dict[str, list[Filled]] = {}
    for each in filled:
        used.setdefault(each.tensor.name, []).append(each)
    for name, parts in used.items():
        apart = {(each.tensor.offset, *sorted(each.view.stored.at.items())) for each in parts}
        elements = sum(prod(each.view.shape) for each in parts)
        if len(apart) < len(parts) or elements != prod(tensors[name].shape):
            raise CheckpointError(
                f"{where}: of the {prod(tensors[name].shape):,} numbers of {name} {elements:,} would be used"
            )
    copy, left = None, []
    for name in sorted(tensors.keys() - used.keys()):
        if name in HEADS and shape.tied and tensors[name].shape == (shape.vocabulary, shape.width):
            copy = tensors[name]
        elif not name.endswith((*IGNORED, *OF_GGUF)):
            left.append(name)
    if left:
        others = f" (and {len(left) - 1} more)" if left[1:] else ""
        raise CheckpointError(
            f"{where}: nothing of a {shape.family} is called {left[0]}{others}: this would not be the model that was "
            f"trained. Is {CONFIG}, or what the file says of itself, right?"
        )
    return copy
