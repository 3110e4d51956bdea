"""Export of parameters to a folder in Hugging Face's format, block by block, by any number of ranks or none."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from spmd_engine.arrays.memory import address_of
from spmd_engine.checkpoints.format.blocks import bytes_of
from spmd_engine.checkpoints.hf.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS, StoredView, as_it_is
from spmd_engine.checkpoints.read import Sliceable
from spmd_engine.comm.agreement.rank_zero import json_from_rank_zero, on_all_ranks, on_rank_zero
from spmd_engine.comm.group import Group
from spmd_engine.comm.shared_memory.cores import cores_here
from spmd_engine.errors import CheckpointError, UsageError, one_of
from spmd_engine.formats.gguf import gguf_header, is_gguf, read_gguf
from spmd_engine.formats.safetensors_file import CONFIG, INDEX, ONE_FILE, read_json
from spmd_engine.formats.safetensors_header import dtype_of, header
from spmd_engine.models import DecoderConfig, Model, decoder
from spmd_engine.models.gguf import FILE_TYPES, check_gguf, gguf_facts
from spmd_engine.models.hf.write_config import config_json
from spmd_engine.models.lora import LoRAOptions, adapter_names, config_of_options, with_adapters
from spmd_engine.models.names import tokenizer_at
from spmd_engine.models.weight_map import WeightMap, gguf_weight_map, weight_map
from spmd_engine.sharding.rectangles import Rectangle
from spmd_engine.tokens.gguf import facts_of_tokenizer, gguf_ends
from spmd_engine.tokens.hugging_face import CONFIG as TOKENIZER_CONFIG
from spmd_engine.tokens.hugging_face import TOKENIZER

logger = logging.getLogger(__name__)

LARGEST_FILE = 5_000_000_000  #: bytes of tensors in a file, as in transformers; a larger tensor has a file of its own
NAMES = {"float32": "F32", "float64": "F64", "bfloat16": "BF16", "float16": "F16"}
#: Files that belong to a model beside its weights, and are copied unchanged.
BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
_NOT_HANDED_ON = "its tokenizer is not handed on: %s"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def export_huggingface(
    arrays: Mapping[str, Sliceable],
    shape: DecoderConfig,
    folder: str | os.PathLike,
    group: Group | None = None,
    *,
    dtype: str = "float32",
    beside: str | Path | None = None,
    tokenizer: Path | None = None,
    largest: int = LARGEST_FILE,
) -> None:
    """Write the parameters of a decoder as ``config.json`` and safetensors files that transformers reads.

    ``arrays`` are those of one Checkpoint or of several merged ones. ``beside`` is the folder or GGUF file that the
    weights were first read from: its tokenizer and its numbers of special tokens are copied, unless the folder
    ``tokenizer`` has another one. If a ``group`` is given, its ranks share the work, and the call is collective. A rank
    holds at most a few megabytes. Raises CheckpointError, on all ranks, if the checkpoint is damaged, or if a file
    cannot be written or exists already. Files get their names only when all are complete.
    """
    tensors = tensors_of(decoder(shape), weight_map(shape), NAMES[dtype])
    files = _lay_out(tensors, largest)

    def describe() -> dict[str, bytes]:
        own = _has_other(tokenizer, beside)
        texts = _companion_files(own or beside)
        if len(files) > 1:
            total = sum(tensor.nbytes for tensor in tensors)
            weight_map = {tensor.name: file for file, in_file in files.items() for tensor in in_file}
            texts[INDEX] = _as_json({"metadata": {"total_size": total}, "weight_map": weight_map})
        return texts | {CONFIG: _as_json(config_json(shape, dtype) | _special_tokens(own or beside))}

    _write(arrays, files, Path(folder), group, describe)


def export_gguf(
    arrays: Mapping[str, Sliceable],
    shape: DecoderConfig,
    file: str | os.PathLike,
    group: Group | None = None,
    *,
    dtype: str = "float32",
    beside: str | Path | None = None,
    tokenizer: Path | None = None,
) -> None:
    """Write the parameters of a decoder as a GGUF file that llama.cpp reads.

    Vectors, routers and learned positions are float32, as that program expects them. The rest is as in
    ``export_huggingface``. Raises UsageError, before anything is written, for a decoder that such files cannot
    represent: one that this package's reader would not read as the same.
    """
    if dtype not in FILE_TYPES:
        raise UsageError(f"--format gguf: dtype {dtype} is not written; {one_of(dtype, FILE_TYPES)}")
    tensors = tensors_of(decoder(shape), gguf_weight_map(shape, written=True), NAMES[dtype])
    for tensor in tensors:
        if len(tensor.shape) == 1 or "ffn_gate_inp" in tensor.name or tensor.name.startswith("position_embd"):
            tensor.dtype = "F32"
    facts, constants = gguf_facts(shape)
    facts |= {"general.file_type": FILE_TYPES[dtype]}
    for name, values in constants.items():
        tensors.append(TensorToWrite(name, "F32", (len(values),), {name: as_it_is((len(values),))}))
        array = np.array(values, np.float32)
        arrays = {**arrays, name: Sliceable(array.shape, array.dtype, array.__getitem__)}
    check_gguf(shape, facts, {tensor.name: tensor.shape for tensor in tensors}, constants)

    def of_tokenizer() -> dict[str, Any]:
        return _tokenizer_facts(_has_other(tokenizer, beside) or beside, shape.vocabulary)

    facts |= json_from_rank_zero(group, of_tokenizer) if group else of_tokenizer()
    write_tensors(arrays, {Path(file): tensors}, group, partial(gguf_header, facts))


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
    """Write adapters as ``adapter_config.json`` and a safetensors file that PEFT reads; ``base`` names the base model.

    The rest is as in ``export_huggingface``.
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
    """Write the tensors, by all ranks of the group, and the files that ``describe`` returns, by the first rank."""

    def begin() -> Mapping[Path, bytes]:
        if existing := next(folder.glob("*.safetensors"), None):
            raise CheckpointError(f"{existing} is there already; export into another folder")
        return {folder / file: text for file, text in describe().items()}

    paths = {folder / file: in_file for file, in_file in files.items()}
    write_tensors(arrays, paths, group, partial(header, facts={"format": "pt"}), begin)


def tensors_of(model: Model, names: WeightMap, dtype: str) -> list[TensorToWrite]:
    """The tensors of a model that are written, in the order of its parameters."""
    tensors: dict[str, TensorToWrite] = {}
    sizes = {f"{name}/{parameter}": layer.sizes for name, layer in model.layers for parameter in layer.parameters}
    dims = {name: parameter.dims for name, (parameter, _) in model.parameters()}
    for name, slices in names:
        view = StoredView(dims[name], sizes[name], slices[0])
        shape = tuple(prod(letters) for letters in view.split)
        if view.stored.rows is not None:
            shape = view.stored.rows[2], *shape[1:]
        tensors.setdefault(slices[0].tensor, TensorToWrite(slices[0].tensor, dtype, shape)).parts[name] = view
    return list(tensors.values())


def _lay_out(tensors: Sequence[TensorToWrite], largest: int) -> dict[str, list[TensorToWrite]]:
    """Assign the tensors to files; returns the tensors of each file."""
    files: list[list[TensorToWrite]] = [[]]
    size = 0
    for tensor in tensors:
        size += tensor.nbytes
        if files[-1] and size > largest:
            files.append([])
            size = tensor.nbytes
        files[-1].append(tensor)
    if len(files) == 1:
        return {ONE_FILE: files[0]}
    return {f"model-{n:05}-of-{len(files):05}.safetensors": in_file for n, in_file in enumerate(files, 1)}


def _has_other(folder: Path | None, beside: str | Path | None) -> Path | None:
    """The folder, if it has a tokenizer which is not that of ``beside``."""
    if folder is None or not (folder / TOKENIZER).is_file():
        return None
    with suppress(UsageError):
        if beside is not None and tokenizer_at(beside).files.get(TOKENIZER) == (folder / TOKENIZER).read_text():
            return None
    return folder


def _tokenizer_facts(source: str | Path | None, vocabulary: int) -> dict[str, Any]:
    """The metadata about the tokenizer of a folder or GGUF file; none, with a warning, if there is none to write."""
    if source is not None and is_gguf(source):
        facts = {name: value for name, value in read_gguf(source).facts.items() if name.startswith("tokenizer.")}
    else:
        try:
            facts = facts_of_tokenizer(tokenizer_at(source), vocabulary) if source is not None else {}
        except UsageError as error:
            logger.warning(_NOT_HANDED_ON, error)
            return {}
    if not facts:
        logger.warning("the file has no tokenizer, which llama.cpp needs: the model has none, or is of bytes")
    return facts


def _companion_files(source: str | Path | None) -> dict[str, bytes]:
    """By name the files that belong to a model beside its weights: from its folder, or derived from its GGUF file."""
    if source is not None and is_gguf(source):
        try:
            files = tokenizer_at(source).files
        except UsageError as error:
            logger.warning(_NOT_HANDED_ON, error)
            return {}
        config = {**json.loads(files[TOKENIZER_CONFIG]), "tokenizer_class": "PreTrainedTokenizerFast"}
        return {TOKENIZER: files[TOKENIZER].encode(), TOKENIZER_CONFIG: _as_json(config)}
    paths = [Path(source, name) for name in BESIDE] if source is not None else []
    files = {path.name: path.read_bytes() for path in paths if path.is_file()}
    if not files.keys() & {TOKENIZER, "tokenizer.model", "vocab.json"}:
        logger.warning("the folder has no tokenizer, which 'generate --model' needs: the run began without one")
    return files


def _special_tokens(source: str | Path | None) -> dict[str, Any]:
    if source is None:
        return {}
    if is_gguf(source):
        facts = read_gguf(source).facts
        numbers = {name: facts.get(f"tokenizer.ggml.{name.replace('pad_', 'padding_')}") for name in _TOKENS}
        if len(ends := gguf_ends(facts) if facts.get("tokenizer.ggml.tokens") else ()) > 1:
            numbers["eos_token_id"] = list(ends)
        return {name: number for name, number in numbers.items() if number is not None}
    numbers = read_json(Path(source, CONFIG)) if Path(source, CONFIG).is_file() else {}
    if "model_type" not in numbers:  # a run's
        with suppress(UsageError):
            return {} if (end := tokenizer_at(source).end) is None else {"eos_token_id": end}
    return {name: numbers[name] for name in _TOKENS if name in numbers}


def _as_json(content: Mapping[str, object]) -> bytes:
    """Indented JSON."""
    return (json.dumps(content, indent=2) + "\n").encode()


# --- Writing whole tensors to new files, block by block, by any number of ranks or none

WRITERS = 4  #: threads of a rank, if it has so many cores
LARGEST_HALF = 65504.0  #: the largest float16
AT_ONCE = 8 << 20  #: bytes; tensors up to this size are assembled in memory


@dataclass
class TensorToWrite:
    """A tensor to be written: its parameters, and its first byte in its file."""

    name: str
    dtype: str  #: its name in files
    shape: tuple[int, ...]
    parts: dict[str, StoredView] = field(default_factory=dict)
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * dtype_of(self.dtype).itemsize


Files = Mapping[Path, Sequence[TensorToWrite]]
#: From names, dtypes and shapes to the header of a file, the first byte of each tensor, and the file's size.
Head = Callable[[Sequence[tuple[str, str, Sequence[int]]]], tuple[bytes, list[int]]]


def write_tensors(
    arrays: Mapping[str, Sliceable],
    files: Files,
    group: Group | None,
    head: Head,
    begin: Callable[[], Mapping[Path, bytes]] = dict,
) -> None:
    """Write new files of tensors, which are assembled from ``arrays``, with headers by ``head``.

    If a ``group`` is given, its ranks share the stored blocks of the arrays, and the call is collective: one rank reads
    each block once and writes it to its place. A rank holds at most a few blocks. ``begin`` runs on the first rank; it
    may raise an error, and returns the other files to write. Raises CheckpointError, on all ranks, if a block is
    damaged, or a file exists already or cannot be written; the latter is an OSError without a group. Files get their
    names only when all are complete.
    """
    rank, ranks, new = group.rank if group else 0, group.size if group else 1, ExportedFiles()
    threads = max(1, min(WRITERS, int(cores_here() // ranks)))
    heads = {path: _header(tensors, head) for path, tensors in files.items()}

    def make() -> None:
        others = begin()
        for path, (content, size) in heads.items():
            with new.open(path) as file:
                file.write(content)
                os.posix_fallocate(file.fileno(), 0, size)
        for path, content in others.items():
            with new.open(path) as file:
                file.write(content)

    def write() -> None:
        with ThreadPoolExecutor(threads, "exporting") as pool:
            list(pool.map(write_blocks, _share(arrays, files, rank, ranks)))

    def write_blocks(work: tuple[Path, TensorToWrite, list[tuple[str, Rectangle]]]) -> None:
        path, tensor, blocks = work
        with unfinished_name(path).open("r+b", buffering=0) as file:
            _write_tensor(file, tensor, [(tensor.parts[name], block, arrays[name]) for name, block in blocks])

    try:
        on_rank_zero(group, make, CheckpointError) if group else make()
        on_all_ranks(group, write, CheckpointError) if group else write()
        on_rank_zero(group, new.commit, CheckpointError) if group else new.commit()
    finally:
        new.discard()


def _header(tensors: Sequence[TensorToWrite], head: Head) -> tuple[bytes, int]:
    """The header of one file, and its size; also sets each tensor's ``offset``."""
    content, offsets = head([(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors])
    for tensor, offset in zip(tensors, offsets, strict=False):
        tensor.offset = offset
    return content, offsets[-1]


def _share(
    arrays: Mapping[str, Sliceable], files: Files, rank: int, ranks: int
) -> Iterator[tuple[Path, TensorToWrite, list[tuple[str, Rectangle]]]]:
    """The tensors of which a rank writes a part, and the blocks of arrays that it writes.

    A rank's blocks are consecutive, and have about as many bytes as those of others. One rank writes a small tensor.
    """
    tensors = [(path, tensor) for path, in_file in files.items() for tensor in in_file]
    total, before = sum(tensor.nbytes for _, tensor in tensors), 0
    for path, tensor in tensors:
        blocks, begin, is_small = [], before, tensor.nbytes <= AT_ONCE
        for name, view in tensor.parts.items():
            if name not in arrays or tuple((array := arrays[name]).shape) != view.shape:
                raise CheckpointError(f"there is no {name} of shape {list(view.shape)}: is this another model?")
            for block in array.blocks:
                if (begin if is_small else before) * ranks // total == rank:
                    blocks.append((name, block))
                before += block.size * dtype_of(tensor.dtype).itemsize
        if blocks:
            yield path, tensor, blocks


def _write_tensor(
    file: BinaryIO, tensor: TensorToWrite, parts: Sequence[tuple[StoredView, Rectangle, Sliceable]]
) -> None:
    """Write parts to their places in a tensor: a small tensor is assembled in memory, and written at once.

    A part of a large tensor that is contiguous in the file is written directly. Other parts are copied into the mapped
    file, which takes more than twice the time.
    """
    dtype, is_small = dtype_of(tensor.dtype), tensor.nbytes <= AT_ONCE
    if is_small:
        target = np.zeros(tensor.shape, dtype)
    else:
        target = np.memmap(file, dtype, "r+", tensor.offset, tensor.shape)
    for view, block, array in parts:
        part, place = np.asarray(array[block.index]), view.place(target, block.index)
        if dtype == np.float16 and part.dtype != dtype and (most := float(np.abs(part).max(initial=0))) > LARGEST_HALF:
            raise CheckpointError(
                f"{tensor.name} has a number of magnitude {most:g}, but the largest of float16 is {LARGEST_HALF:g}: "
                "export bfloat16 or float32"
            )
        if is_small or place.size > part.size or not place.flags.c_contiguous:
            view.fill(place, block.index, part)
        else:
            run = np.empty(place.shape, dtype)
            view.fill(run, block.index, part)
            _write_run(file.fileno(), bytes_of(run), tensor.offset + address_of(place) - address_of(target))
    if is_small:
        _write_run(file.fileno(), bytes_of(target), tensor.offset)


def _write_run(descriptor: int, data: memoryview, offset: int) -> None:
    """Write ``data`` at ``offset``, and let the system begin to write it to the disk now, not at the final fsync."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(descriptor, offset, done, os.POSIX_FADV_DONTNEED)


# --- New files that get their names when all are complete, and replace no existing file


class ExportedFiles:
    """Files that are written under temporary names: ``open`` each, ``commit`` all, and ``discard`` in any case."""

    def __init__(self) -> None:
        self._created: list[Path] = []
        self._paths: list[Path] = []

    def open(self, path: Path) -> BinaryIO:
        """Create the file that is to become ``path``, under its ``unfinished_name``.

        Raises CheckpointError if a file of either name exists already, OSError if it cannot be created.
        """
        self._refuse_existing(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = unfinished_name(path).open("xb")
        except FileExistsError:
            raise CheckpointError(
                f"{unfinished_name(path)} is there already, from an export that is running or failed: remove it, if "
                "none is running"
            ) from None
        self._created.append(unfinished_name(path))
        self._paths.append(path)
        return file

    def commit(self) -> None:
        """Flush the files to the disk and give them their names, in the order of ``open``. Raises as ``open`` does."""
        for path in self._paths:
            self._refuse_existing(path)
            with unfinished_name(path).open("rb") as file:
                os.fsync(file.fileno())
        for path in self._paths:
            os.rename(unfinished_name(path), path)
            self._created.append(path)
        self._created.clear()

    def discard(self) -> None:
        """Remove the created files that are not committed."""
        for path in self._created:
            with suppress(OSError):
                path.unlink()
        self._created.clear()

    def _refuse_existing(self, path: Path) -> None:
        if os.path.lexists(path):
            raise CheckpointError(f"{path} is there already; export to another place, or move it away")


def unfinished_name(path: Path) -> Path:
    """The name of a file until it is complete."""
    return path.with_name(f".{path.name}-unfinished")
