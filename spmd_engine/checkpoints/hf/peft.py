"""Adapters in PEFT's format: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from spmd_engine.arrays import einsum
from spmd_engine.checkpoints.hf.weights import Filled, fill
from spmd_engine.checkpoints.read import Sliceable
from spmd_engine.errors import CheckpointError
from spmd_engine.foreign import reading
from spmd_engine.formats.safetensors_file import read_json, read_safetensors
from spmd_engine.layers.low_rank import sides
from spmd_engine.models.decoder import DecoderConfig, decoder
from spmd_engine.models.lora import LoRAOptions, adapter_names, options_of_config, with_adapters

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapter_options(folder: str | Path) -> LoRAOptions:
    """What a folder says of its adapters; raises CheckpointError."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no adapters: there is no {CONFIG}")
    with reading(str(path), kind=CheckpointError):
        return options_of_config(read_json(path), str(path))


def read_adapters(folder: str | Path, shape: DecoderConfig) -> Mapping[str, Filled]:
    """The adapters of a folder, for a decoder of this shape, by our names; proven as ``Pretrained`` is."""
    options, path = adapter_options(folder), Path(folder) / WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"{folder}: there is no {WEIGHTS}; pickled adapters are not read")
    tensors, model = read_safetensors(path), with_adapters(decoder(shape), options, shape.family)
    filled = fill(str(path), model, tensors, adapter_names(shape, options))
    if left := sorted(tensors.keys() - {each.tensor.name for each in filled.values()}):
        raise CheckpointError(f"{path}: nothing of a {shape.family} with these adapters is called {left[0]}")
    return filled


class Merged(Mapping[str, Sliceable]):
    """Arrays by name, those that have adapters as w + scale · a · b: what is sliced is read and multiplied."""

    def __init__(self, arrays: Mapping[str, Sliceable], shape: DecoderConfig, options: LoRAOptions) -> None:
        self._arrays, self._scale = arrays, options.scale
        names = {name for name, _ in adapter_names(shape, options)}
        dims = {name: parameter.dims for name, (parameter, _) in decoder(shape).parameters()}
        self._products = {}
        for name, (a, b) in options.names(shape.family, dims).items():
            into, out = sides(dims[name])
            self._products[name] = a, b, f"{into}q,q{out}->{into}{out}"
        self._left_out = names

    def __getitem__(self, name: str) -> Sliceable:
        array = self._arrays[name]
        if name not in self._products:
            return array
        of_a, of_b, pattern = self._products[name]
        inputs = pattern.index("q,")

        def read(spans: tuple[slice, ...]) -> np.ndarray:
            a = self._arrays[of_a][(*spans[:inputs], slice(None))]
            b = self._arrays[of_b][(slice(None), *spans[inputs:])]
            return array[spans] + array.dtype.type(self._scale) * einsum(pattern, a, b)

        return Sliceable(array.shape, array.dtype, read, blocks=array.blocks)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._arrays if name not in self._left_out)

    def __len__(self) -> int:
        return sum(1 for _ in self)
