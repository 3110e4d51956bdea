"""Pretrained weights and adapters, as mappings from names to arrays; only the parts that are sliced are read."""

from __future__ import annotations

import logging
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
from spmd_engine.foreign import first_few, reading
from spmd_engine.formats.gguf import read_gguf
from spmd_engine.formats.safetensors_file import CONFIG, INDEX, ONE_FILE, folder_tensors, read_json, read_safetensors
from spmd_engine.formats.tensor import FileTensor
from spmd_engine.layers.low_rank import sides
from spmd_engine.models import DecoderConfig, Model, decoder
from spmd_engine.models.gguf import IGNORED as OF_GGUF
from spmd_engine.models.gguf import config_of_gguf
from spmd_engine.models.hf.read_config import MULTIMODAL, text_tensors
from spmd_engine.models.lora import LoRAOptions, adapter_names, options_of_config, with_adapters
from spmd_engine.models.names import load_config, located
from spmd_engine.models.weight_map import HEADS, IGNORED, TensorSlice, WeightMap, gguf_weight_map, weight_map

logger = logging.getLogger(__name__)

CHUNK, ROWS = 1 << 15, 16  #: elements that are copied at a time, in at least so many rows


@dataclass(frozen=True)
class StoredView:
    """The letters of a parameter, ``dims`` as "d h r k", and those of the tensor that it is ``stored`` in."""

    dims: str
    sizes: Mapping[str, int]  #: by letter, in the global array
    stored: TensorSlice

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return tuple(self.sizes[letter] for letter in self.dims.split())

    @property
    def split(self) -> list[list[int]]:
        """The sizes of the letters of each dim of the tensor."""
        selected = {**self.stored.at, **self.stored.among}
        sizes = {**self.sizes, **{letter: count for letter, (_, count) in selected.items()}}
        return [[sizes[letter] for letter in word] for word in self.stored.dims.split()]

    @property
    def in_file(self) -> str:
        """The letters of the tensor, in its order."""
        return self.stored.dims.replace(" ", "")

    def index(self, spans: tuple[slice, ...]) -> list[slice | int]:
        """The index, by letter of the tensor, of a part of the parameter."""
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
        """Copy ``part``, the tensor at ``index(spans)``, to ``out``, a part of the parameter, in its dtype."""
        if self.stored.pairs:
            k = self.dims.split().index("k")
            part = part.take(self._places()[spans[k]], axis=self._shared_letters.index("k"))
        _copy_transposed(part, out.transpose([self.dims.split().index(letter) for letter in self._shared_letters]))
        if self.stored.offset:
            out += self.stored.offset

    def place(self, tensor: np.ndarray, spans: tuple[slice, ...]) -> np.ndarray:
        """A view of the whole tensor at ``index(spans)``."""
        if self.stored.rows is not None:
            tensor = tensor[slice(*self.stored.rows[:2])]
        return tensor.reshape([size for sizes in self.split for size in sizes])[(..., *self.index(spans))]

    def fill(self, place: np.ndarray, spans: tuple[slice, ...], part: np.ndarray) -> None:
        """Copy a part of the parameter into its ``place``, or an array of that shape, in the dtype of ``place``."""
        if self.stored.offset:
            part = part - self.stored.offset
        place = place.transpose([self._shared_letters.index(letter) for letter in self.dims.split()])
        if self.stored.pairs:
            k = self.dims.split().index("k")
            np.moveaxis(place, k, 0)[self._places()[spans[k]]] = np.moveaxis(part, k, 0)
        else:
            _copy_transposed(part, place)

    @property
    def _shared_letters(self) -> list[str]:
        """The letters of the tensor that the parameter has too, in the tensor's order."""
        return [letter for letter in self.in_file if letter not in self.stored.at]

    def _places(self) -> np.ndarray:
        """The place in the file of each element of a head."""
        numbers = np.arange(self.sizes["k"])
        if self.stored.pairs == "halves":  # pairs are halves in the file, and neighbours in the parameter
            return numbers.reshape(2, -1).T.reshape(-1)
        return numbers.reshape(-1, 2).T.reshape(-1)


def as_it_is(shape: tuple[int, ...]) -> StoredView:
    """The view of an array that is stored as a tensor of the same dims."""
    dims = " ".join(ascii_lowercase[: len(shape)])
    return StoredView(dims, dict(zip(dims.split(), shape, strict=True)), TensorSlice("", dims))


def _copy_transposed(part: np.ndarray, target: np.ndarray) -> None:
    """Copy some rows at a time: convert their dtype in memory order, then transpose them in the processor's cache.

    At least ``ROWS`` rows, so that they fill cache lines as columns. This takes at most two thirds of the time.
    """
    part, target = np.atleast_1d(part), np.atleast_1d(target)
    rows = max(ROWS, CHUNK * len(part) // max(1, part.size))
    for first in range(0, len(part), rows):
        target[first : first + rows] = part[first : first + rows].astype(target.dtype)


# --- Weights in Hugging Face's format or a GGUF file


COMPARED = 1 << 22  #: elements at a time


@dataclass(frozen=True)
class Filled:
    """A parameter and the tensor that it is read from."""

    name: str
    view: StoredView
    tensor: FileTensor

    @property
    def array(self) -> Sliceable:
        """The parameter as float32, or float64 if that preserves more of the stored values; read when it is sliced."""
        dtype = np.dtype(np.float64 if self.tensor.dtype == "F64" or self.view.stored.offset else np.float32)
        return Sliceable(self.view.shape, dtype, partial(self._read, dtype), rows_are_cheap=True)

    def _read(self, dtype: np.dtype, spans: tuple[slice, ...]) -> np.ndarray:
        part = self.tensor.read(self.view.split, self.view.index(spans))
        out = np.empty([span.stop - span.start for span in spans], dtype)
        self.view.copy(part, spans, out)
        if not _finite(out):
            raise CheckpointError(
                f"{self.tensor.path}: {self.tensor.name} has values that are infinite or not a number, and {self.name} "
                "is read from it; fetch the file again, or ask its author"
            )
        return out


def _finite(x: np.ndarray) -> bool:
    """Whether all values are finite. Tests their sum first, which needs one pass and no temporary array."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(x.sum())) or bool(np.isfinite(x).all())


class Pretrained(Mapping[str, Sliceable]):
    """The parameters of a decoder by this package's names, from a folder in Hugging Face's format or a GGUF file.

    ``shape`` is the configuration; ``filled`` has the part of a tensor that fills each parameter. The constructor reads
    only headers. It raises CheckpointError, naming the tensor or the parameter, unless every parameter is filled and
    each element of every tensor is used exactly once.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = located(path)
        self.shape, tensors, names = _opened(self.path)
        self.filled = fill(str(self.path), decoder(self.shape), tensors, names)
        self._copy = _check_used(str(self.path), self.shape, tensors, self.filled.values())

    def check_files(self) -> None:
        """Warn of weights that are not read; raise CheckpointError if a head differs from the table it is tied to.

        Reads a tied head that is stored, and the table, a few megabytes at a time.
        """
        others = sorted({path.name for path in self.path.glob("*.safetensors")} - {*self.files})
        if (self.path / INDEX).is_file() and self.files == [ONE_FILE]:
            others.append(INDEX)
        if others:
            logger.warning(
                "%s: weights are read from %s, not from %s", self.path, *map(first_few, (self.files, others))
            )
        if self._copy is None:
            return
        table = self.filled["embedding/table"].tensor
        rows, width = table.shape
        for first in range(0, rows, step := max(1, COMPARED // width)):
            part = slice(first, min(first + step, rows)), slice(0, width)
            one, other = (tensor.read([[rows], [width]], part) for tensor in (table, self._copy))
            if not np.array_equal(one, other):
                raise CheckpointError(
                    f"{self.path}: tie_word_embeddings says that {self._copy.name} is {table.name}, but both are "
                    f"stored and differ (from row {first} on). Set it to false in {CONFIG} to use both"
                )

    @property
    def files(self) -> list[str]:
        """The names of the files that the parameters are read from."""
        return sorted({Path(parameter.tensor.path).name for parameter in self.filled.values()})

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors that are used."""
        tensors = (parameter.tensor for parameter in self.filled.values())
        return sum({(tensor.path, tensor.offset): tensor.nbytes for tensor in tensors}.values())

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
    """Assign to every parameter of a model the tensor that it is read from; ``where`` names the file or folder.

    Raises CheckpointError for a parameter without a tensor, and for a tensor that differs from the parameter in size.
    """
    stored = dict(names)
    sizes = {f"{name}/{parameter}": layer.sizes for name, layer in model.layers for parameter in layer.parameters}
    filled, unfilled = {}, []
    for name, (parameter, _) in model.parameters():
        tensor_slice = next((candidate for candidate in stored[name] if candidate.tensor in tensors), None)
        if tensor_slice is None:
            unfilled.append((name, stored[name][0].tensor))
            continue
        view, tensor = StoredView(parameter.dims, sizes[name], tensor_slice), tensors[tensor_slice.tensor]
        tensor.check_weights()
        if tensor_slice.rows is not None:
            tensor.check_sizes([[tensor_slice.rows[2]], *view.split[1:]])
            tensor = tensor.rows(*tensor_slice.rows[:2])
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
    """Raise CheckpointError unless all of each tensor is used once; return the stored copy of a tied head, if any."""
    used: dict[str, list[Filled]] = {}
    for parameter in filled:
        used.setdefault(parameter.tensor.name, []).append(parameter)
    for name, parts in used.items():
        places = {(part.tensor.offset, *sorted(part.view.stored.at.items())) for part in parts}
        elements = sum(prod(part.view.shape) for part in parts)
        if len(places) < len(parts) or elements != prod(tensors[name].shape):
            raise CheckpointError(
                f"{where}: of the {prod(tensors[name].shape):,} numbers of {name}, {elements:,} would be used"
            )
    copy, unused = None, []
    for name in sorted(tensors.keys() - used.keys()):
        if name in HEADS and shape.tied and tensors[name].shape == (shape.vocabulary, shape.width):
            copy = tensors[name]
        elif not name.endswith((*IGNORED, *OF_GGUF)):
            unused.append(name)
    if unused:
        others = f" (and {len(unused) - 1} more)" if unused[1:] else ""
        raise CheckpointError(
            f"{where}: nothing of a {shape.family} is called {unused[0]}{others}: this would not be the model that was "
            f"trained. Is {CONFIG}, or what the file says of itself, right?"
        )
    return copy


# --- Adapters in PEFT's format: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``


ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapter_options(folder: str | Path) -> LoRAOptions:
    """The options of the adapters in a folder, from its configuration; raises CheckpointError."""
    path = Path(folder) / ADAPTER_CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no adapters: there is no {ADAPTER_CONFIG}")
    with reading(str(path), kind=CheckpointError):
        return options_of_config(read_json(path), str(path))


def read_adapters(folder: str | Path, shape: DecoderConfig) -> Mapping[str, Filled]:
    """The adapters of a folder, for a decoder of this shape, by this package's names; checked as in ``Pretrained``."""
    options, path = adapter_options(folder), Path(folder) / ADAPTER_WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"{folder}: there is no {ADAPTER_WEIGHTS}; pickled adapters are not read")
    tensors, model = read_safetensors(path), with_adapters(decoder(shape), options, shape.family)
    filled = fill(str(path), model, tensors, adapter_names(shape, options))
    if unused := sorted(tensors.keys() - {parameter.tensor.name for parameter in filled.values()}):
        raise CheckpointError(f"{path}: nothing of a {shape.family} with these adapters is called {unused[0]}")
    return filled


def merged(arrays: Mapping[str, Sliceable], shape: DecoderConfig, options: LoRAOptions) -> dict[str, Sliceable]:
    """Arrays by name, merged with their adapters as w + scale · a · b: a slice reads and multiplies only its part."""
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
