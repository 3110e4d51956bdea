"""Parameters written as a folder of Hugging Face's format, block by block, by any number of ranks or none."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from spmd_engine.checkpoints.hf.exported_tensors import TensorToWrite, write_tensors
from spmd_engine.checkpoints.hf.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS, StoredView
from spmd_engine.checkpoints.read import Sliceable
from spmd_engine.comm.group import Group
from spmd_engine.errors import CheckpointError, UsageError
from spmd_engine.formats.gguf import is_gguf, read_gguf
from spmd_engine.formats.safetensors_file import CONFIG, INDEX, ONE_FILE, read_json
from spmd_engine.models.decoder import DecoderConfig, decoder
from spmd_engine.models.hf.write_config import config_json
from spmd_engine.models.load_config import tokenizer_at
from spmd_engine.models.lora import LoRAOptions, adapter_names, config_of_options, with_adapters
from spmd_engine.models.model import Model
from spmd_engine.models.weight_map import WeightMap, weight_map
from spmd_engine.tokens.gguf import gguf_ends
from spmd_engine.tokens.hugging_face import CONFIG as TOKENIZER_CONFIG
from spmd_engine.tokens.hugging_face import TOKENIZER

logger = logging.getLogger(__name__)

LARGEST_FILE = 5_000_000_000  #: bytes of tensors in a file, as transformers has it; one that is larger has its own
NAMES = {"float32": "F32", "float64": "F64", "bfloat16": "BF16", "float16": "F16"}
#: What belongs to a model beside its weights, and is handed on as it is.
BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def export_huggingface(
    arrays: Mapping[str, Sliceable],
    shape: DecoderConfig,
    folder: str | os.PathLike,
    group: Group | None = None,
    *,
    dtype: str = "float32",
    beside: str | Path | None = None,
    largest: int = LARGEST_FILE,
) -> None:
    """Write the parameters of a decoder as ``config.json`` and safetensors files that transformers reads.

    ``arrays`` are those of a Checkpoint, or of several put together. ``beside`` is the folder, or GGUF file, that the
    weights once came from: its tokenizer and its numbers of special tokens are handed on. The ranks of a ``group``, if
    one is given, share the work: collective then. None holds more than a few megabytes. Raises CheckpointError, on all
    of them, where something is damaged or cannot be written, or where a file is there already; files have their names
    only when all are complete.
    """
    tensors = tensors_of(decoder(shape), weight_map(shape), NAMES[dtype])
    files = _lay_out(tensors, largest)

    def describe() -> dict[str, bytes]:
        texts = _handed_on(beside)
        if len(files) > 1:
            total = sum(each.nbytes for each in tensors)
            weight_map = {each.name: file for file, held in files.items() for each in held}
            texts[INDEX] = _as_json({"metadata": {"total_size": total}, "weight_map": weight_map})
        return texts | {CONFIG: _as_json(config_json(shape, dtype) | _special_tokens(beside))}

    _write(arrays, files, Path(folder), group, describe)


def export_adapters(
    arrays: Mapping[str, Sliceable],
    shape: DecoderConfig,
    options: LoRAOptions,
    folder: str | os.PathLike,
    group: Group | None = None,
    *,
    dtype: str = "float32",
    base: str | None = None,
) -> None:
    """Write adapters as ``adapter_config.json`` and a safetensors file that PEFT reads; ``base`` is what they adapt.

    All else is as of ``export``.
    """
    model = with_adapters(decoder(shape), options, shape.family)
    tensors = tensors_of(model, adapter_names(shape, options), NAMES[dtype])

    def describe() -> dict[str, bytes]:
        return {ADAPTER_CONFIG: _as_json(config_of_options(options, shape.family, base))}

    _write(arrays, {ADAPTER_WEIGHTS: tensors}, Path(folder), group, describe)


def _write(
    arrays: Mapping[str, Sliceable],
    files: Mapping[str, Sequence[TensorToWrite]],
    folder: Path,
    group: Group | None,
    describe: Callable[[], Mapping[str, bytes]],
) -> None:
    """The files, by all ranks of the group, beside those that ``describe`` what they are, by the first."""

    def begin() -> Mapping[Path, bytes]:
        if found := next(folder.glob("*.safetensors"), None):
            raise CheckpointError(f"{found} is there already; export into another folder")
        return {folder / file: text for file, text in describe().items()}

    write_tensors(arrays, {folder / file: held for file, held in files.items()}, group, {"format": "pt"}, begin)


def tensors_of(model: Model, names: WeightMap, dtype: str) -> list[TensorToWrite]:
    """What is to be written of a model, in the order of its parameters' names."""
    found: dict[str, TensorToWrite] = {}
    sizes = {f"{name}/{own}": layer.sizes for name, layer in model.layers for own in layer.parameters}
    dims = {name: parameter.dims for name, (parameter, _) in model.parameters()}
    for name, ways in names:
        view = StoredView(dims[name], sizes[name], ways[0])
        whole = tuple(prod(letters) for letters in view.split)
        if view.stored.rows is not None:
            whole = view.stored.rows[2], *whole[1:]
        found.setdefault(ways[0].tensor, TensorToWrite(ways[0].tensor, dtype, whole)).parts[name] = view
    return list(found.values())


def _lay_out(tensors: Sequence[TensorToWrite], largest: int) -> dict[str, list[TensorToWrite]]:
    """The tensors of each file."""
    files: list[list[TensorToWrite]] = [[]]
    size = 0
    for each in tensors:
        size += each.nbytes
        if files[-1] and size > largest:
            files.append([])
            size = each.nbytes
        files[-1].append(each)
    if len(files) == 1:
        return {ONE_FILE: files[0]}
    return {f"model-{n:05}-of-{len(files):05}.safetensors": held for n, held in enumerate(files, 1)}


def _handed_on(source: str | Path | None) -> dict[str, bytes]:
    """By name, the files that belong to a model beside its weights: of its folder, or as its GGUF file says them."""
    if source is not None and is_gguf(source):
        try:
            files = tokenizer_at(source).files
        except UsageError as error:
            logger.warning("its tokenizer is not handed on: %s", error)
            return {}
        as_it_is = {**json.loads(files[TOKENIZER_CONFIG]), "tokenizer_class": "PreTrainedTokenizerFast"}
        return {TOKENIZER: files[TOKENIZER].encode(), TOKENIZER_CONFIG: _as_json(as_it_is)}
    found = [Path(source, name) for name in BESIDE] if source is not None else []
    return {path.name: path.read_bytes() for path in found if path.is_file()}


def _special_tokens(source: str | Path | None) -> dict[str, Any]:
    if source is None:
        return {}
    if is_gguf(source):
        facts = read_gguf(source).facts
        numbers = {name: facts.get(f"tokenizer.ggml.{name.replace('pad_', 'padding_')}") for name in _TOKENS}
        if len(ends := gguf_ends(facts) if facts.get("tokenizer.ggml.tokens") else ()) > 1:
            numbers["eos_token_id"] = list(ends)
        return {name: number for name, number in numbers.items() if number is not None}
    if not Path(source, CONFIG).is_file():
        return {}
    numbers = read_json(Path(source, CONFIG))
    return {name: numbers[name] for name in _TOKENS if name in numbers}


def _as_json(content: Mapping[str, object]) -> bytes:
    """As people read it."""
    return (json.dumps(content, indent=2) + "\n").encode()
