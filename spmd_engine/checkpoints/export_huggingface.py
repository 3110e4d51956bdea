"""Parameters written as a folder of Hugging Face's format, block by block, by any number of ranks or none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np

from spmd_engine.checkpoints.dtypes import DTYPES
from spmd_engine.checkpoints.exported_files import ExportedFiles, unfinished_name
from spmd_engine.checkpoints.peft import CONFIG as ADAPTER_CONFIG
from spmd_engine.checkpoints.peft import WEIGHTS
from spmd_engine.checkpoints.read import Sliceable
from spmd_engine.checkpoints.stored_view import StoredView
from spmd_engine.checkpoints.write import header
from spmd_engine.comm.agreement import on_all_ranks, on_rank_zero
from spmd_engine.comm.group import Group
from spmd_engine.errors import CheckpointError
from spmd_engine.formats.huggingface import CONFIG, INDEX, ONE_FILE, read_json
from spmd_engine.models.adapters import LoRAOptions, adapter_names, config_of_options, with_adapters
from spmd_engine.models.decoder import DecoderShape, decoder
from spmd_engine.models.huggingface_written import config_of_shape
from spmd_engine.models.model import Model
from spmd_engine.models.stored import Names
from spmd_engine.models.stored_names import stored_names

LARGEST_FILE = 5_000_000_000  #: bytes of tensors in a file, as transformers has it; one that is larger has its own
BLOCK = 1 << 22  #: bytes that a rank holds at a time
NAMES = {"float32": "F32", "float64": "F64", "bfloat16": "BF16", "float16": "F16"}
#: What belongs to a model beside its weights, and is handed on as it is.
BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass
class TensorToWrite:
    """One to be written: the parameters in it, and where in which file it begins."""

    name: str
    shape: tuple[int, ...]
    parts: dict[str, StoredView] = field(default_factory=dict)
    file: str = ""
    offset: int = 0

    def nbytes(self, dtype: np.dtype) -> int:
        return prod(self.shape) * dtype.itemsize


def export_huggingface(
    arrays: Mapping[str, Sliceable],
    shape: DecoderShape,
    folder: str | os.PathLike,
    group: Group | None = None,
    *,
    dtype: str = "float32",
    beside: str | os.PathLike | None = None,
    largest: int = LARGEST_FILE,
) -> None:
    """Write the parameters of a decoder as ``config.json`` and safetensors files that transformers reads.

    ``arrays`` are those of a Checkpoint, or of several put together. ``beside`` is the folder that the weights once
    came from: its tokenizer and its numbers of special tokens are handed on. The ranks of a ``group``, if one is given,
    share the work: collective then. None holds more than a few megabytes. Raises CheckpointError, on all of them, where
    something is damaged or cannot be written, or where a file is there already; files have their names only when all
    are complete.
    """
    tensors, kind = tensors_of(decoder(shape), stored_names(shape)), DTYPES[NAMES[dtype]]
    heads = _lay_out(tensors, kind, NAMES[dtype], largest)

    def describe() -> dict[str, bytes]:
        texts = _handed_on(beside)
        if len(heads) > 1:
            total = sum(each.nbytes(kind) for each in tensors)
            weight_map = {each.name: each.file for each in tensors}
            texts[INDEX] = _as_json({"metadata": {"total_size": total}, "weight_map": weight_map})
        return texts | {CONFIG: _as_json(config_of_shape(shape, dtype) | _special_tokens(beside))}

    _write(arrays, tensors, heads, kind, Path(folder), group, describe)


def export_adapters(
    arrays: Mapping[str, Sliceable],
    shape: DecoderShape,
    options: LoRAOptions,
    folder: str | os.PathLike,
    group: Group | None = None,
    *,
    dtype: str = "float32",
    base: str | None = None,
) -> None:
    """Write adapters as ``adapter_config.json`` and a safetensors file that PEFT reads; ``base`` is what they adapt.

    All else is as of ``export_huggingface``.
    """
    model = with_adapters(decoder(shape), options, shape.family)
    tensors, kind = tensors_of(model, adapter_names(shape, options)), DTYPES[NAMES[dtype]]
    for each in tensors:
        each.file = WEIGHTS
    heads = {WEIGHTS: _header(tensors, kind, NAMES[dtype])}

    def describe() -> dict[str, bytes]:
        return {ADAPTER_CONFIG: _as_json(config_of_options(options, shape.family, base))}

    _write(arrays, tensors, heads, kind, Path(folder), group, describe)


def _write(
    arrays: Mapping[str, Sliceable],
    tensors: Sequence[TensorToWrite],
    heads: Mapping[str, bytes],
    dtype: np.dtype,
    folder: Path,
    group: Group | None,
    describe: Callable[[], Mapping[str, bytes]],
) -> None:
    """The files, by all ranks of the group, beside those that ``describe`` what they are, by the first."""
    rank, ranks, new = group.rank if group else 0, group.size if group else 1, ExportedFiles()

    def begin() -> None:
        if found := next(folder.glob("*.safetensors"), None):
            raise CheckpointError(f"{found} is there already; export into another folder")
        for file, head in heads.items():
            with new.open(folder / file) as opened:
                opened.write(head)
                size = sum(each.nbytes(dtype) for each in tensors if each.file == file)
                os.posix_fallocate(opened.fileno(), 0, len(head) + size)
        for file, text in describe().items():
            with new.open(folder / file) as opened:
                opened.write(text)

    def write() -> None:
        for number, (tensor, name, spans) in enumerate(_pieces(arrays, tensors)):
            if number % ranks == rank and prod(tensor.shape):
                file = unfinished_name(folder / tensor.file)
                whole = np.memmap(file, dtype, "r+", tensor.offset, tensor.shape)
                tensor.parts[name].write(whole, spans, arrays[name][spans])

    try:
        on_rank_zero(group, begin, CheckpointError) if group else begin()
        on_all_ranks(group, write) if group else write()
        on_rank_zero(group, new.commit, CheckpointError) if group else new.commit()
    finally:
        new.discard()


def tensors_of(model: Model, names: Names) -> list[TensorToWrite]:
    """What is to be written of a model, in the order of its parameters' names."""
    found: dict[str, TensorToWrite] = {}
    sizes = {f"{name}/{own}": layer.sizes for name, layer in model.layers for own in layer.parameters}
    dims = {name: parameter.dims for name, (parameter, _) in model.parameters()}
    for name, ways in names:
        view = StoredView(dims[name], sizes[name], ways[0])
        whole = tuple(prod(letters) for letters in view.split)
        if view.stored.rows is not None:
            whole = view.stored.rows[2], *whole[1:]
        found.setdefault(ways[0].tensor, TensorToWrite(ways[0].tensor, whole)).parts[name] = view
    return list(found.values())


def _lay_out(tensors: list[TensorToWrite], dtype: np.dtype, said: str, largest: int) -> dict[str, bytes]:
    """Give each tensor its file and its place there; the header of each file."""
    files: list[list[TensorToWrite]] = [[]]
    for each in tensors:
        if files[-1] and sum(one.nbytes(dtype) for one in [*files[-1], each]) > largest:
            files.append([])
        files[-1].append(each)
    heads = {}
    for number, held in enumerate(files, 1):
        file = ONE_FILE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        for each in held:
            each.file = file
        heads[file] = _header(held, dtype, said)
    return heads


def _header(held: Sequence[TensorToWrite], dtype: np.dtype, said: str) -> bytes:
    """Of one file; gives each tensor its place there."""
    head = header([(each.name, said, each.shape) for each in held], {"format": "pt"})
    offset = len(head)
    for each in held:
        each.offset = offset
        offset += each.nbytes(dtype)
    return head


def _pieces(
    arrays: Mapping[str, Sliceable], tensors: Sequence[TensorToWrite]
) -> Iterator[tuple[TensorToWrite, str, tuple[slice, ...]]]:
    """All parts that are written at a time: rows of a parameter."""
    for tensor in tensors:
        for name, view in tensor.parts.items():
            if name not in arrays or tuple(arrays[name].shape) != view.shape:
                raise CheckpointError(f"there is no {name} of shape {list(view.shape)}: is this another model?")
            whole = tuple(slice(0, length) for length in view.shape)
            rows = max(1, BLOCK // max(1, prod(view.shape[1:]) * arrays[name].dtype.itemsize))
            for first in range(0, view.shape[0], rows):
                yield tensor, name, (slice(first, min(first + rows, view.shape[0])), *whole[1:])


def _handed_on(source: str | os.PathLike | None) -> dict[str, bytes]:
    """By name, the files of a model's folder that belong to it beside its weights."""
    found = [Path(source, name) for name in BESIDE] if source is not None else []
    return {path.name: path.read_bytes() for path in found if path.is_file()}


def _special_tokens(source: str | os.PathLike | None) -> Mapping[str, object]:
    if source is None or not Path(source, CONFIG).is_file():
        return {}
    said = read_json(Path(source, CONFIG))
    return {name: said[name] for name in _TOKENS if name in said}


def _as_json(content: Mapping[str, object]) -> bytes:
    """As people read it."""
    return (json.dumps(content, indent=2) + "\n").encode()
