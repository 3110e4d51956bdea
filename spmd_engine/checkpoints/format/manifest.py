"""The manifest of a checkpoint: every array with the blocks that store it, and the facts of the training.

It is JSON, with a SHA-256 of itself. Only the division of arrays into blocks depends on the mesh; the arrays that are
read are the same for any division.

What grows with the number of ranks is written once: equal arrays share one list of pieces, from which follow the
offsets of blocks, and each file has the hashes of its blocks (``write.HASHES``), of which the manifest has one hash.
Version 1 lists every block of every array; it is still read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import combinations
from math import prod
from operator import gt
from typing import Any

import numpy as np

from spmd_engine.checkpoints.format.blocks import HASH
from spmd_engine.errors import CheckpointError
from spmd_engine.foreign import parse_json, reading
from spmd_engine.formats.safetensors_header import DTYPES, dtype_of
from spmd_engine.sharding.rectangles import Rectangle, covers_once

FORMAT, VERSION = "spmd_engine checkpoint", 2
#: Sections: parameters and buffers by name; optimizer state by kind/name; residues of single ranks by rank/name.
MODEL, OPTIMIZER, RESIDUES = "model", "optimizer", "residues"
_FILE = re.compile(r"[a-z]+-\d{5,}\.safetensors")
_HASH = re.compile(r"[0-9a-f]{64}")
_TEXT = re.compile(r"[^\x00\ud800-\udfff]*", re.DOTALL)
#: The pieces, before the SHA-256 that ends a manifest; and one of them: its bounds and its ranks.
_LISTED = re.compile(r'"pieces"\s*:\s*(\[[\[\]\d,\s]*\])\s*,\s*"sha256"\s*:\s*"[^"]*"\s*\}\s*\Z', re.ASCII)
_ONE = re.compile(r"\[\s*\[[\d,\s]*\]\s*,\s*\[[\d,\s]*\]\s*\]", re.ASCII)
_LARGEST = 1 << 62
_MOST_DIMS, _MOST_RANKS = 32, 1 << 24


@dataclass(frozen=True)
class StoredBlock:
    """A rectangle of an array, in a file."""

    rectangle: Rectangle
    file: str
    offset: int  #: bytes from the file's beginning
    sha256: str = ""  #: in a manifest of version 1; else row ``row`` of the file's hashes
    row: int = 0


class Pieces:
    """The rectangles in which an array is written, and the rank that writes each; equal arrays share one object.

    ``bounds[pieces 2 dims]`` are starts and stops, ``ranks[pieces]``.
    """

    def __init__(self, bounds: np.ndarray, ranks: np.ndarray) -> None:
        self.bounds, self.ranks = bounds, ranks
        self._faults: dict[tuple[int, ...], str] = {}

    @cached_property
    def sizes(self) -> np.ndarray:
        """The number of elements of each piece."""
        return (self.bounds[:, 1] - self.bounds[:, 0]).prod(axis=1)

    def of(self, rank: int) -> list[Rectangle]:
        """The pieces that a rank writes, in the order in which they are in its file."""
        return [Rectangle(tuple(start), tuple(stop)) for start, stop in self.bounds[self.ranks == rank].tolist()]

    def wrong_in(self, shape: tuple[int, ...]) -> str:
        """As ``_wrong_with``, of these rectangles; the arrays that share them mostly have one shape."""
        if shape not in self._faults:
            fits = self.bounds.shape[2] == len(shape) and covers_once(self.bounds, shape)
            rectangles = () if fits else (Rectangle(*map(tuple, ends)) for ends in self.bounds.tolist())
            self._faults[shape] = "" if fits else _wrong_with(shape, tuple(rectangles))
        return self._faults[shape]

    @cached_property
    def before(self) -> tuple[np.ndarray, np.ndarray]:
        """For each piece, the number of elements, and of pieces, of this array before it in its file."""
        order = np.argsort(self.ranks, kind="stable")
        ranks, sizes, numbers = self.ranks[order], self.sizes[order], np.arange(len(order))
        first = np.searchsorted(ranks, ranks)
        ends = np.cumsum(sizes) - sizes
        elements, rows = np.empty_like(order), np.empty_like(order)
        elements[order], rows[order] = ends - ends[first], numbers - first
        return elements, rows


Files = Mapping[int, tuple[int, str]]  # by rank: the first byte of the first block, the SHA-256 of all their hashes


def file_name(section: str, rank: int) -> str:
    """The file in which a rank writes its blocks of a section."""
    return f"{section}-{rank:05d}.safetensors"


class FilesOfSection:
    """The files of a section, in which ranks have written their pieces of all its arrays in order, without gaps."""

    def __init__(self, section: str, files: Files) -> None:
        self.section, self.files = section, files
        self.arrays: list[tuple[Pieces, int]] = []  #: with the bytes of an element

    @cached_property
    def places(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The offset and the row of each piece of each array; last, by rank: the end of all, and their number."""
        at, rows = np.zeros((2, 1 + max(self.files, default=0)), np.int64)
        at[list(self.files)] = [first for first, _ in self.files.values()]
        places = []
        for pieces, itemsize in self.arrays:
            elements, before = pieces.before
            places.append((at[pieces.ranks] + elements * itemsize, rows[pieces.ranks] + before))
            np.add.at(at, pieces.ranks, pieces.sizes * itemsize)
            np.add.at(rows, pieces.ranks, 1)
        return [*places, (at, rows)]


class BlocksInFiles(Sequence[StoredBlock]):
    """The blocks of array number ``number`` of a section, as they follow from its pieces."""

    def __init__(self, files: FilesOfSection, number: int) -> None:
        self.files, self._number, self.pieces = files, number, files.arrays[number][0]

    def __getitem__(self, number: Any) -> Any:
        offset, row = (int(numbers[number]) for numbers in self.files.places[self._number])
        start, stop = self.pieces.bounds[number].tolist()
        return StoredBlock(Rectangle(tuple(start), tuple(stop)), self.file_of(number), offset, row=row)

    def file_of(self, number: int) -> str:
        """The file that has a block."""
        return file_name(self.files.section, int(self.pieces.ranks[number]))

    def __len__(self) -> int:
        return len(self.pieces.ranks)


@dataclass(frozen=True)
class StoredArray:
    """An array in blocks; each element is in one block."""

    shape: tuple[int, ...]
    dtype: str  #: its name in safetensors files
    blocks: Sequence[StoredBlock]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * dtype_of(self.dtype).itemsize

    @cached_property
    def bounds(self) -> np.ndarray:
        """int[blocks 2 dims]: their starts and stops; equal arrays share one object."""
        if isinstance(self.blocks, BlocksInFiles):
            return self.blocks.pieces.bounds
        rectangles = [block.rectangle for block in self.blocks]
        return np.array(rectangles, np.int64).reshape(len(rectangles), 2, len(self.shape))

    def file_of(self, number: int) -> str:
        """The file that has a block."""
        blocks = self.blocks
        return blocks.file_of(number) if isinstance(blocks, BlocksInFiles) else blocks[number].file

    def check(self, name: str) -> None:
        """Raise CheckpointError unless every element is in exactly one block."""
        blocks = self.blocks
        if isinstance(blocks, BlocksInFiles):
            fault = blocks.pieces.wrong_in(self.shape)
        else:
            fault = _wrong_with(self.shape, tuple(block.rectangle for block in blocks))
        if fault:
            raise CheckpointError(f"{name}{list(self.shape)}: {fault}")


Arrays = Mapping[str, StoredArray]


def stored_arrays(section: str, arrays: Mapping[str, tuple[tuple[int, ...], str, Pieces]], files: Files) -> Arrays:
    """A section of the manifest, from the shape, the dtype and the pieces of each array, and the files of all ranks."""
    of_section = FilesOfSection(section, files)
    of_section.arrays += [(pieces, dtype_of(dtype).itemsize) for _, dtype, pieces in arrays.values()]
    return {
        name: StoredArray(shape, dtype, BlocksInFiles(of_section, number))
        for number, (name, (shape, dtype, _)) in enumerate(arrays.items())
    }


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint."""

    step: int  #: optimizer steps made
    sections: Mapping[str, Arrays]
    facts: Mapping[str, Any] = field(default_factory=dict)  #: JSON; the settings with which the training began
    config: Mapping[str, Any] | None = None  #: JSON of the job, if there is one
    mesh: str = ""  #: the mesh of the run that wrote it

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(array.nbytes for arrays in self.sections.values() for array in arrays.values())

    def text(self) -> str:
        """The content of the file, which ``parse`` reads."""
        pieces: dict[int, tuple[int, Pieces]] = {}  # each object once, with its number
        sections = {}
        for section, arrays in self.sections.items():
            listed, files = {}, {}
            for name, array in arrays.items():
                blocks = array.blocks
                assert isinstance(blocks, BlocksInFiles)  # those of version 1 are read only
                number, _ = pieces.setdefault(id(blocks.pieces), (len(pieces), blocks.pieces))
                listed[name], files = [array.shape, array.dtype, number], blocks.files.files
            sections[section] = {"arrays": listed, "files": [[rank, *files[rank]] for rank in sorted(files)]}
        content = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "mesh": self.mesh,
            "facts": dict(self.facts),
            "config": self.config,
            "sections": sections,
        }
        listed = [_json([one.bounds.reshape(-1).tolist(), one.ranks.tolist()]) for _, one in pieces.values()]
        rest = ',"pieces":[', ",".join(listed), f'],"sha256":"{_digest(content, listed)}"}}\n'
        return "".join((_json(content, sort_keys=False)[:-1], *rest))

    @classmethod
    def parse(cls, text: str | bytes, where: str) -> Manifest:
        """Read and check a manifest. Raises CheckpointError, naming its place ``where``, if it is invalid."""

        def refuse(why: str) -> CheckpointError:
            return CheckpointError(f"{where} is damaged, or none of ours: {why}")

        with reading(f"{where} is damaged, or none of ours: no JSON", kind=CheckpointError):
            text = text if isinstance(text, str) else text.decode()
            # Pieces become arrays one at a time: all at once, as numbers of Python, they take ten times the memory.
            found = _LISTED.search(text)
            content = parse_json(text if found is None else f"{text[: found.start(1)]}0{text[found.end(1) :]}")
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise refuse(f'it does not say "format": "{FORMAT}"')
        if (version := content.get("version")) not in (1, VERSION) or type(version) is not int:
            raise CheckpointError(f"{where} has version {version!r}; this program reads versions 1 and {VERSION}")
        stored_digest = content.pop("sha256", None)
        if stored_digest != _digest(content, None if found is None else _listed(found)):
            raise refuse("its SHA-256 of itself differs")
        if (found is None) is (version > 1):
            raise refuse("it does not end with pieces and its SHA-256")
        try:
            pieces = None if found is None else [_pieces(one) for one in _listed(found)]
            manifest = cls(
                step=_whole_number(content["step"]),
                sections={
                    _text(section): _arrays(section, arrays, pieces)
                    for section, arrays in _mapping(content["sections"]).items()
                },
                facts=_mapping(content["facts"]),
                config=None if content["config"] is None else _mapping(content["config"]),
                mesh=_text(content["mesh"]),
            )
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise refuse(f"{type(error).__name__}: {error}") from error
        if MODEL not in manifest.sections:
            raise refuse(f"it has no section {MODEL!r}")
        for section, arrays in manifest.sections.items():
            for name, array in arrays.items():
                array.check(f"{where}: {section} {name}")
        return manifest

    @cached_property
    def hashes(self) -> dict[str, tuple[int, int, str]]:
        """Where each file has the hashes of its blocks, how many, and the SHA-256 of all; {} of version 1."""
        of_files: dict[str, tuple[int, int, str]] = {}
        for arrays in self.sections.values():
            for blocks in [array.blocks for array in arrays.values()][:1]:
                if isinstance(blocks, BlocksInFiles):
                    ends, counts = (numbers.tolist() for numbers in blocks.files.places[-1])
                    for rank, (_, digest) in blocks.files.files.items():
                        of_files[file_name(blocks.files.section, rank)] = ends[rank], counts[rank], digest
        return of_files

    def file_sizes(self) -> dict[str, int]:
        """The size of each file in bytes, from the places of its blocks."""
        sizes = {file: end + HASH * count for file, (end, count, _) in self.hashes.items()}
        for arrays in () if sizes else self.sections.values():
            for array in arrays.values():
                for block in array.blocks:
                    end = block.offset + block.rectangle.size * dtype_of(array.dtype).itemsize
                    sizes[block.file] = max(sizes.get(block.file, 0), end)
        return sizes


def _listed(found: re.Match[str]) -> Iterator[str]:
    """The text of each piece, without spaces."""
    return ("".join(one[0].split()) for one in _ONE.finditer(found.string, *found.span(1)))


def _digest(content: Mapping[str, Any], listed: Iterable[str] | None) -> str:
    """The SHA-256 of a manifest with its names in order; ``listed``: the text of each of its pieces, if it has them."""
    if listed is None:
        return hashlib.sha256(_json(content).encode()).hexdigest()
    before, after = ({name: content[name] for name in content if (name > "pieces") is late} for late in (False, True))
    before.pop("pieces", None)
    digest = hashlib.sha256(f'{_json(before)[:-1]},"pieces":['.encode())
    for number, one in enumerate(listed):
        digest.update(f"{',' * (number > 0)}{one}".encode())
    digest.update(f"],{_json(after)[1:]}".encode())
    return digest.hexdigest()


def _json(content: Any, *, sort_keys: bool = True) -> str:
    return json.dumps(content, sort_keys=sort_keys, separators=(",", ":"))


def _arrays(section: str, content: Any, pieces: Sequence[Pieces] | None) -> Arrays:
    """The arrays of a section; ``pieces``: of the manifest, None in version 1."""
    content = _mapping(content)
    if pieces is None:
        return {_text(name): _array_of_blocks(array, section) for name, array in content.items()}
    files = {_whole_number(rank): (_whole_number(first), _match(_HASH, sha)) for rank, first, sha in content["files"]}
    arrays = {
        _text(name): (_shape(shape, dtype), dtype, pieces[_whole_number(number)])
        for name, (shape, dtype, number) in _mapping(content["arrays"]).items()
    }
    for name, of_array in {id(of_array): (name, of_array) for name, (*_, of_array) in arrays.items()}.values():
        if missing := set(of_array.ranks.tolist()) - files.keys():
            raise ValueError(f"{section} {name} is on rank {min(missing)}, which has no file")
    if max(files, default=0) > _MOST_RANKS:
        raise ValueError(f"a file of rank {max(files)}")
    return stored_arrays(section, arrays, files)


def _pieces(text: str) -> Pieces:
    bounds, ranks = (np.fromstring(numbers, np.int64, sep=",") for numbers in text[2:-2].split("],["))
    if max(bounds.max(initial=0), ranks.max(initial=0)) >= _LARGEST:
        raise ValueError(f"a number {max(bounds.max(initial=0), ranks.max(initial=0))}")
    return Pieces(bounds.reshape(len(ranks), 2, len(bounds) // (2 * max(1, len(ranks)))), ranks)


def _shape(shape: Any, dtype: Any) -> tuple[int, ...]:
    if dtype not in DTYPES:
        raise ValueError(f"a dtype {dtype!r}")
    shape = _whole_numbers(shape)
    if len(shape) > _MOST_DIMS or prod(shape) >= _LARGEST:
        raise ValueError(f"an array of shape {shape}")
    return shape


def _array_of_blocks(content: Any, section: str) -> StoredArray:
    shape = _shape(_mapping(content)["shape"], content["dtype"])
    blocks = []
    for start, stop, file, offset, sha256 in content["blocks"]:
        rectangle = Rectangle(_whole_numbers(start), _whole_numbers(stop))
        if len(rectangle.start) != len(rectangle.stop):
            raise ValueError(f"a block from {start} to {stop}")
        blocks.append(StoredBlock(rectangle, _match(_FILE, file), _whole_number(offset), _match(_HASH, sha256)))
    if misplaced := [block.file for block in blocks if not block.file.startswith(f"{section}-")]:
        raise ValueError(f"a block of {section} in {misplaced[0]}")
    return StoredArray(shape, content["dtype"], tuple(blocks))


def _mapping(content: Any) -> Mapping[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(f"{type(content).__name__} where an object should be")
    return content


def _text(content: Any) -> str:
    return _match(_TEXT, content)


def _match(pattern: re.Pattern, content: Any) -> str:
    if not isinstance(content, str) or not pattern.fullmatch(content):
        raise ValueError(f"{content!r:.80} where a text like {pattern.pattern} should be")
    return content


def _whole_number(content: Any) -> int:
    if type(content) is not int or not 0 <= content < _LARGEST:
        raise ValueError(f"{content!r:.80} where a whole number should be")
    return content


def _whole_numbers(content: Any) -> tuple[int, ...]:
    if not isinstance(content, list):
        raise ValueError(f"{content!r:.80} where a list of whole numbers should be")
    for number in content:  # no call for each of thousands of numbers
        if type(number) is not int or not 0 <= number < _LARGEST:
            _whole_number(number)
    return tuple(content)


@lru_cache(maxsize=1024)
def _wrong_with(shape: tuple[int, ...], blocks: tuple[Rectangle, ...]) -> str:
    """The reason why these blocks do not hold each element once, or "". Cached, as many layers have equal blocks."""
    full, total = Rectangle.whole(shape), 0
    if blocks == (full,):
        return ""
    for block in blocks:
        is_part = len(block.start) == len(shape) and not any(map(gt, block.start, block.stop))
        if not is_part or any(map(gt, block.stop, shape)):
            return f"a block {block} is no part of it"
        total += block.size
    overlapping = _overlap([block for block in blocks if block.size])
    if overlapping:
        return f"{overlapping[0]} and {overlapping[1]} overlap; each element is once"
    return "" if total == full.size else f"its blocks hold {total} of {full.size} elements"


def _overlap(rectangles: Sequence[Rectangle]) -> tuple[Rectangle, Rectangle] | None:
    """Two rectangles that share an element, if there are any."""
    if len(rectangles) <= 4:  # most arrays with several blocks have so few
        return next(((one, other) for one, other in combinations(rectangles, 2) if (one & other).size), None)
    ordered = sorted(rectangles)
    start = np.array([rectangle.start for rectangle in ordered], np.int64)
    stop = np.array([rectangle.stop for rectangle in ordered], np.int64)
    if not start.shape[1]:  # two scalars are the same element
        return ordered[0], ordered[1]
    behind = np.searchsorted(start[:, 0], stop[:, 0])  # the first rectangle that begins behind the end of this one
    for i in np.flatnonzero(behind > np.arange(1, len(ordered) + 1)).tolist():
        others = slice(i + 1, behind[i])
        shared = (np.maximum(start[i], start[others]) < np.minimum(stop[i], stop[others])).all(axis=1)
        if shared.any():
            return ordered[i], ordered[i + 1 + int(np.argmax(shared))]
    return None
