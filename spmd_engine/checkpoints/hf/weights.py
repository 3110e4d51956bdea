"""Pretrained weights and adapters, as mappings from names to arrays that are read only where they are sliced."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from string import ascii_lowercase

import numpy as np

from spmd_engine.arrays import einsum
from spmd_engine.checkpoints.read import Sliceable
from spmd_engine.errors import CheckpointError
from spmd_engine.foreign import reading
from spmd_engine.formats.gguf import read_gguf
from spmd_engine.formats.safetensors_file import CONFIG, folder_tensors, read_json, read_safetensors
from spmd_engine.formats.tensor import FileTensor
from spmd_engine.layers.low_rank import sides
from spmd_engine.models.decoder import DecoderConfig, decoder
from spmd_engine.models.gguf import IGNORED as OF_GGUF
from spmd_engine.models.gguf import config_of_gguf
from spmd_engine.models.hf.read_config import MULTIMODAL, text_tensors
from spmd_engine.models.load_config import load_config, located
from spmd_engine.models.lora import LoRAOptions, adapter_names, options_of_config, with_adapters
from spmd_engine.models.model import Model
from spmd_engine.models.weight_map import HEADS, IGNORED, TensorSlice, WeightMap, gguf_weight_map, weight_map

CHUNK, ROWS = 1 << 15, 16  #: elements, and rows, at least, that are copied at a time


@dataclass(frozen=True)
class StoredView:
    """The letters of a parameter, ``dims`` as "d h r k", and those of the tensor that it is ``stored`` in."""

    dims: str
    sizes: Mapping[str, int]  #: of all letters, whole
    stored: TensorSlice

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        return tuple(self.sizes[letter] for letter in self.dims.split())

    @property
    def split(self) -> list[list[int]]:
        """The sizes of the letters of each dim of the tensor."""
        of_more = {**self.stored.at, **self.stored.among}
        sizes = {**self.sizes, **{letter: count for letter, (_, count) in of_more.items()}}
        return [[sizes[letter] for letter in word] for word in self.stored.dims.split()]

    @property
    def in_file(self) -> str:
        """The letters of the tensor, in its order."""
        return self.stored.dims.replace(" ", "")

    def index(self, spans: tuple[slice, ...]) -> list[slice | int]:
        """For each letter of the tensor, which part of it is this part of the parameter."""
        wanted: dict[str, slice | int] = dict(zip(self.dims.split(), spans, strict=True))
        wanted |= {letter: number for letter, (number, _) in self.stored.at.items()}
        for letter, (first, _) in self.stored.among.items():
            span = wanted[letter]
            assert isinstance(span, slice)
            wanted[letter] = slice(first + span.start, first + span.stop)
        if self.stored.pairs:
            wanted["k"] = slice(0, self.sizes["k"])
        return [wanted[letter] for letter in self.in_file]

    def copy(self, part: np.ndarray, spans: tuple[slice, ...], out: np.ndarray) -> None:
        """Copy what ``index`` has of the tensor into ``out``, that part of the parameter, in its dtype."""
        if self.stored.pairs:
            k = self.dims.split().index("k")
            part = part.take(self._places()[spans[k]], axis=self._left.index("k"))
        _turn(part, out.transpose([self.dims.split().index(letter) for letter in self._left]))
        if self.stored.offset:
            out += self.stored.offset

    def place(self, tensor: np.ndarray, spans: tuple[slice, ...]) -> np.ndarray:
        """What ``index`` has of the whole tensor: a view."""
        if self.stored.rows is not None:
            tensor = tensor[slice(*self.stored.rows[:2])]
        return tensor.reshape([size for sizes in self.split for size in sizes])[(..., *self.index(spans))]

    def fill(self, place: np.ndarray, spans: tuple[slice, ...], part: np.ndarray) -> None:
        """Put a part of the parameter into its ``place``, or an array like that, whose dtype it gets."""
        if self.stored.offset:
            part = part - self.stored.offset
        place = place.transpose([self._left.index(letter) for letter in self.dims.split()])
        if self.stored.pairs:
            k = self.dims.split().index("k")
            np.moveaxis(place, k, 0)[self._places()[spans[k]]] = np.moveaxis(part, k, 0)
        else:
            _turn(part, place)

    @property
    def _left(self) -> list[str]:
        """The letters of the tensor that the parameter has, in the tensor's order."""
        return [letter for letter in self.in_file if letter not in self.stored.at]

    def _places(self) -> np.ndarray:
        """Where in the file each number of a head is."""
        numbers = np.arange(self.sizes["k"])
        if self.stored.pairs == "halves":  # there, and neighbours here
            return numbers.reshape(2, -1).T.reshape(-1)
        return numbers.reshape(-1, 2).T.reshape(-1)


def as_it_is(shape: tuple[int, ...]) -> StoredView:
    """The view of an array that is stored as a tensor of the same dims."""
    dims = " ".join(ascii_lowercase[: len(shape)])
    return StoredView(dims, dict(zip(dims.split(), shape, strict=True)), TensorSlice("", dims))


def _turn(part: np.ndarray, target: np.ndarray) -> None:
    """Copy, some rows at a time: they get their dtype as they lie and are then turned, out of the processor's cache.

    Not fewer than make a line of that cache when they are columns. It takes two thirds of the time, or less.
    """
    part, target = np.atleast_1d(part), np.atleast_1d(target)
    rows = max(ROWS, CHUNK * len(part) // max(1, part.size))
    for first in range(0, len(part), rows):
        target[first : first + rows] = part[first : first + rows].astype(target.dtype)


# --- Weights in Hugging Face's format or a GGUF file


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
        shape = config_of_gguf(file, str(path))
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
    where: str, shape: DecoderConfig, tensors: Mapping[str, FileTensor], filled: Collection[Filled]
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


# --- Adapters in PEFT's format: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``


ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapter_options(folder: str | Path) -> LoRAOptions:
    """What a folder says of its adapters; raises CheckpointError."""
    path = Path(folder) / ADAPTER_CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no adapters: there is no {ADAPTER_CONFIG}")
    with reading(str(path), kind=CheckpointError):
        return options_of_config(read_json(path), str(path))


def read_adapters(folder: str | Path, shape: DecoderConfig) -> Mapping[str, Filled]:
    """The adapters of a folder, for a decoder of this shape, by our names; proven as ``Pretrained`` is."""
    options, path = adapter_options(folder), Path(folder) / ADAPTER_WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"{folder}: there is no {ADAPTER_WEIGHTS}; pickled adapters are not read")
    tensors, model = read_safetensors(path), with_adapters(decoder(shape), options, shape.family)
    filled = fill(str(path), model, tensors, adapter_names(shape, options))
    if left := sorted(tensors.keys() - {each.tensor.name for each in filled.values()}):
        raise CheckpointError(f"{path}: nothing of a {shape.family} with these adapters is called {left[0]}")
    return filled


def merged(arrays: Mapping[str, Sliceable], shape: DecoderConfig, options: LoRAOptions) -> dict[str, Sliceable]:
    """Arrays by name, those that have adapters as w + scale · a · b: only what is sliced is read and multiplied."""
    adapters = {name for name, _ in adapter_names(shape, options)}
    dims = {name: parameter.dims for name, (parameter, _) in decoder(shape).parameters()}
    result = {name: array for name, array in arrays.items() if name not in adapters}
    for name, (a, b) in options.names(shape.family, dims).items():
        into, out = sides(dims[name])
        pattern = f"{into}q,q{out}->{into}{out}"
        read = partial(_sum_of_product, arrays[name], arrays[a], arrays[b], pattern, options.scale)
        result[name] = Sliceable(arrays[name].shape, arrays[name].dtype, read, blocks=arrays[name].blocks)
    return result


def _sum_of_product(
    w: Sliceable, a: Sliceable, b: Sliceable, pattern: str, scale: float, spans: tuple[slice, ...]
) -> np.ndarray:
    inputs = pattern.index("q,")
    product = einsum(pattern, a[(*spans[:inputs], slice(None))], b[(slice(None), *spans[inputs:])])
    return w[spans] + w.dtype.type(scale) * product
