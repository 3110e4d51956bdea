"""The manifest of a checkpoint: every array with the blocks that store it, and the facts of the training.

It is JSON, with a SHA-256 of itself: that of the same JSON without ``sha256``, with its names in order and no spaces.
Only the division of arrays into blocks depends on the mesh; the arrays that are read are the same for any division.

What grows with the number of ranks is written once: equal arrays share one list of pieces, from which follow the
offsets of blocks; ranks with equal arrays of their own share one list of these; and each file has the hashes of its
blocks (``write.HASHES``), of which the manifest has one hash. A rank reads the lists of pieces one at a time, if each
is a line, as ``Manifest.text`` writes them. Versions 1 and 2 are read: version 1 lists every block of every array,
version 2 every array of every rank.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from spmd_engine.checkpoints.format.blocks import HASH
from spmd_engine.errors import CheckpointError
from spmd_engine.foreign import parse_json, reading
from spmd_engine.formats.safetensors_header import DTYPES, dtype_of
from spmd_engine.sharding.rectangles import Rectangle, covers_once

FORMAT, VERSION = "spmd_engine checkpoint", 3
#: Sections: parameters and buffers by name; optimizer state by kind/name; residues of single ranks by rank/name.
MODEL, OPTIMIZER, RESIDUES = "model", "optimizer", "residues"
_SECTION = re.compile(r"[a-z]+")  # the names of its files begin with it
_HASHES = re.compile(r"[0-9a-f]*")
_TEXT = re.compile(r"[^\x00\ud800-\udfff]*", re.DOTALL)
_LARGEST = 1 << 62
_MOST_DIMS, _MOST = 32, 1 << 26


@dataclass(frozen=True)
class StoredBlock:
    """A rectangle of an array, in a file."""

    rectangle: Rectangle
    file: str
    offset: int  #: bytes from the file's beginning
    row: int = 0  #: the number of its hash in the file


class Pieces:
    """The rectangles in which an array is written, and the rank that writes each; equal arrays share one object.

    ``bounds[pieces 2 dims]`` are starts and stops, ``ranks[pieces]``.
    """

    def __init__(self, bounds: np.ndarray, ranks: np.ndarray) -> None:
        self.bounds, self.ranks = bounds, ranks
        self._in_file: dict[tuple[int, int | None], tuple[int, int]] = {}

    @cached_property
    def sizes(self) -> np.ndarray:
        """The number of elements of each piece."""
        return (self.bounds[:, 1] - self.bounds[:, 0]).prod(axis=1)

    def of(self, rank: int) -> list[Rectangle]:
        """The pieces that a rank writes, in the order in which they are in its file."""
        return [Rectangle(tuple(start), tuple(stop)) for start, stop in self.bounds[self.ranks == rank].tolist()]

    def in_file(self, rank: int, end: int | None = None) -> tuple[int, int]:
        """How many elements, and how many pieces, a rank writes, of all pieces or of those before number ``end``."""
        if (rank, end) not in self._in_file:  # equal arrays ask for the same
            mine = self.ranks[:end] == rank
            self._in_file[rank, end] = int(self.sizes[:end][mine].sum()), int(np.count_nonzero(mine))
        return self._in_file[rank, end]


def file_name(section: str, rank: int) -> str:
    """The file in which a rank writes its blocks of a section."""
    return f"{section}-{rank:05d}.safetensors"


class Files(NamedTuple):
    """The files that ranks have written of a section."""

    ranks: np.ndarray  #: int[files], in order
    firsts: np.ndarray  #: int[files]: the byte at which the first block of each begins
    sha256: str  #: that of the hashes of each file's blocks: 64 digits for each file


class StoredFile(NamedTuple):
    """A file with blocks, and behind them their hashes."""

    name: str
    end: int  #: the byte at which the hashes begin
    blocks: int
    sha256: str  #: that of the hashes
    hashes: bytes | None  #: in version 1, whose files have none

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.end + (HASH * self.blocks if self.hashes is None else 0)


class BlocksInFiles(Sequence[StoredBlock]):
    """The blocks of array number ``number`` of a section, as they follow from its pieces.

    ``rank``: the one that has written them, if not those of the pieces.
    """

    def __init__(self, section: Section, number: int, itemsize: int, pieces: Pieces, rank: int | None) -> None:
        self.section, self.pieces, self._number, self._itemsize, self._rank = section, pieces, number, itemsize, rank

    def __getitem__(self, number: Any) -> Any:
        writer, number = int(self.pieces.ranks[number]), range(len(self))[number]
        rank, (elements, before) = writer if self._rank is None else self._rank, self.pieces.in_file(writer, number)
        offset, row = self.section.places(rank)[self._number].tolist()
        start, stop = self.pieces.bounds[number].tolist()
        rectangle = Rectangle(tuple(start), tuple(stop))
        file = file_name(self.section.name, rank)
        return StoredBlock(rectangle, file, offset + elements * self._itemsize, row=row + before)

    def __len__(self) -> int:
        return len(self.pieces.ranks)


@dataclass(frozen=True)
class StoredArray:
    """An array in blocks; each element is in one block."""

    shape: tuple[int, ...]
    dtype: str  #: its name in safetensors files
    blocks: BlocksInFiles

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * dtype_of(self.dtype).itemsize

    @property
    def bounds(self) -> np.ndarray:
        """int[blocks 2 dims]: their starts and stops; equal arrays share one object."""
        return self.blocks.pieces.bounds


ArrayInPieces = tuple[tuple[int, ...], str, Pieces]  #: shape, dtype in safetensors files, pieces
Arrays = Mapping[str, ArrayInPieces]


class _InOrder:
    """Arrays of which a file has the pieces of one rank, one array after the other."""

    def __init__(self, arrays: Arrays) -> None:
        kinds: dict[int, tuple[int, Pieces]] = {}  # equal arrays share their pieces
        self.arrays = arrays
        self.numbers = [kinds.setdefault(id(one), (len(kinds), one))[0] for *_, one in arrays.values()]
        self.pieces = [one for _, one in kinds.values()]
        self.itemsizes = [dtype_of(dtype).itemsize for _, dtype, _ in arrays.values()]

    def sizes(self, rank: int) -> np.ndarray:
        """int[arrays 2]: the bytes and the number of each array's pieces in a rank's file."""
        of_kinds = np.array([one.in_file(rank) for one in self.pieces], np.int64).reshape(-1, 2)
        sizes = of_kinds[self.numbers]
        sizes[:, 0] *= np.array(self.itemsizes, np.int64)
        return sizes


class Section(Mapping[str, StoredArray]):
    """The arrays of a section. A file has the pieces that one rank has written of all of them, in order, without gaps.

    ``own`` lists ranks with equal arrays of their own, and these: a rank has written all of them, after its pieces of
    ``arrays``, whatever ranks are in their pieces. Their names begin with the rank: ``00012/name``.
    """

    def __init__(
        self,
        name: str,
        arrays: Arrays,
        files: Files,
        own: Sequence[tuple[Sequence[int], Arrays]] = (),
        hashes: Mapping[int, bytes] | None = None,
    ) -> None:
        """``hashes``: those of each file's blocks, by rank, if the files have none."""
        self.name, self.files, self._hashes = name, files, hashes or {}
        self.shared, self.own = _InOrder(arrays), [(ranks, _InOrder(of_rank)) for ranks, of_rank in own]
        self._own = {rank: order for ranks, order in self.own for rank in ranks}
        self._places: dict[int, np.ndarray] = {}
        self._listed = self._stored(self.shared, 0, None)
        self._latest: tuple[int, Mapping[str, StoredArray]] = -1, {}

    def _stored(self, order: _InOrder, first: int, rank: int | None) -> dict[str, StoredArray]:
        """Arrays number ``first`` and further of the files; ``rank``: the one that has them of its own."""
        ordered = zip(order.arrays.items(), order.itemsizes, strict=True)
        return {
            name: StoredArray(shape, dtype, BlocksInFiles(self, number, itemsize, pieces, rank))
            for number, ((name, (shape, dtype, pieces)), itemsize) in enumerate(ordered, first)
        }

    def _own_of(self, rank: int) -> Mapping[str, StoredArray]:
        """The arrays that a rank has of its own."""
        latest = self._latest
        if latest[0] != rank:
            own = self._own.get(rank)
            latest = self._latest = rank, {} if own is None else self._stored(own, len(self._listed), rank)
        return latest[1]

    def of(self, rank: int) -> dict[str, StoredArray]:
        """The arrays whose names begin with a rank, by the rest of their names."""
        prefix = f"{rank:05d}/"
        listed = {name.removeprefix(prefix): one for name, one in self._listed.items() if name.startswith(prefix)}
        return {**listed, **self._own_of(rank)}

    def __getitem__(self, name: str) -> StoredArray:
        if name in self._listed:
            return self._listed[name]
        rank, _, own_name = name.partition("/")
        own = self._own_of(int(rank)) if self._own and rank.isdecimal() else {}
        if own_name not in own:
            raise KeyError(name)
        return own[own_name]

    def __iter__(self) -> Iterator[str]:
        yield from self._listed
        for rank, order in self._own.items():
            yield from (f"{rank:05d}/{name}" for name in order.arrays)

    def __len__(self) -> int:
        return len(self._listed) + sum(len(order.arrays) for order in self._own.values())

    def places(self, rank: int) -> np.ndarray:
        """int[arrays + 1, 2]: the byte and the row of hashes at which each array begins in a rank's file; last, where
        they end."""
        if rank not in self._places:
            own = [self._own[rank].sizes(0)] if rank in self._own else []
            begin = self.files.firsts[np.searchsorted(self.files.ranks, rank)], 0
            self._places[rank] = np.cumsum(np.concatenate([[begin], self.shared.sizes(rank), *own]), axis=0)
        return self._places[rank]

    def file(self, rank: int) -> StoredFile:
        """The file that a rank has written."""
        end, blocks = self.places(rank)[-1].tolist()
        number = int(np.searchsorted(self.files.ranks, rank))
        sha256 = self.files.sha256[64 * number :][:64]
        return StoredFile(file_name(self.name, rank), end, blocks, sha256, self._hashes.get(rank))

    def check(self, where: str, sound: set[tuple[int, tuple[int, ...]]]) -> None:
        """Raise CheckpointError unless each array has each element once, in a file.

        ``sound`` has the pieces, by ``id``, and the shapes that are known to fit each other.
        """
        for ranks, order in ((None, self.shared), *self.own):
            for name, (shape, _, pieces) in order.arrays.items():
                if (id(pieces), shape) not in sound and (fault := _wrong_with(shape, pieces.bounds)):
                    raise CheckpointError(f"{where} {name}{list(shape)}: {fault}")
                sound.add((id(pieces), shape))
            for pieces in order.pieces:
                writers = pieces.ranks if ranks is None else np.array(ranks if len(pieces.ranks) else (), np.int64)
                places = np.searchsorted(self.files.ranks, writers)
                missing = np.append(self.files.ranks, -1)[places] != writers
                if missing.any():
                    raise CheckpointError(f"{where} has arrays on rank {writers[missing][0]}, which has no file")


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint."""

    step: int  #: optimizer steps made
    sections: Mapping[str, Section]
    facts: Mapping[str, Any] = field(default_factory=dict)  #: JSON; the settings with which the training began
    config: Mapping[str, Any] | None = None  #: JSON of the job, if there is one
    mesh: str = ""  #: the mesh of the run that wrote it

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(array.nbytes for arrays in self.sections.values() for array in arrays.values())

    def text(self) -> str:
        """The content of the file, which ``parse`` reads."""
        numbers: dict[tuple[bytes, bytes], int] = {}  # equal pieces have one
        lines: list[str] = []

        def listed(order: _InOrder) -> list[tuple]:
            known = []
            for one in order.pieces:
                known.append(numbers.setdefault((one.bounds.tobytes(), one.ranks.tobytes()), len(lines)))
                if known[-1] == len(lines):
                    columns = one.bounds.transpose(1, 2, 0).reshape(-1)  # all starts of a dim, then of the next
                    lines.append(_json([_as_json(columns), _as_json(one.ranks)]))
            ordered = zip(order.arrays.items(), order.numbers, strict=True)
            return [(name, shape, dtype, known[number]) for (name, (shape, dtype, _)), number in ordered]

        sections = {
            section.name: {
                "arrays": listed(section.shared),
                "files": [*map(_as_json, section.files[:2]), section.files.sha256],
                "own": [[_as_json(np.array(ranks)), listed(order)] for ranks, order in section.own],
            }
            for section in self.sections.values()
        }
        names = {"config": self.config, "facts": dict(self.facts), "format": FORMAT, "mesh": self.mesh}
        head = f'{_json(names)[:-1]},"pieces":['
        before, after = f'],"sections":{_json(sections)}', f',"step":{self.step},"version":{VERSION}}}'
        digest = _digest((head, ",".join(lines), before, after))
        return "".join((head, "\n", ",\n".join(lines), "\n", before, f',"sha256":"{digest}"', after, "\n"))

    @classmethod
    def parse(cls, file: BinaryIO, where: str) -> Manifest:
        """Read and check a manifest. Raises CheckpointError, naming its place ``where``, if it is invalid."""

        def refuse(why: str) -> CheckpointError:
            return CheckpointError(f"{where} is damaged, or none of ours: {why}")

        lines: tuple[Any, list[Pieces]] | None = None
        with suppress(*_INVALID):
            lines = _read_lines(file)
        if lines is None:
            file.seek(0)
            with reading(f"{where} is damaged, or none of ours: no JSON", kind=CheckpointError):
                content = parse_json(file.read())
        else:
            content = lines[0]
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise refuse(f'it does not say "format": "{FORMAT}"')
        if (version := content.get("version")) not in (1, 2, VERSION) or type(version) is not int:
            raise CheckpointError(f"{where} has version {version!r}; this program reads versions 1 to {VERSION}")
        if lines is None and content.pop("sha256", None) != _digest((_json(content),)):
            raise refuse("its SHA-256 of itself differs")
        try:
            pieces = [_pieces(one, version) for one in content.get("pieces", ())] if lines is None else lines[1]
            manifest = cls(
                step=_whole_number(content["step"]),
                sections={
                    _match(_SECTION, name): _section(name, _mapping(section), pieces, version)
                    for name, section in _mapping(content["sections"]).items()
                },
                facts=_mapping(content["facts"]),
                config=None if content["config"] is None else _mapping(content["config"]),
                mesh=_text(content["mesh"]),
            )
        except _INVALID as error:
            raise refuse(f"{type(error).__name__}: {error}") from error
        if MODEL not in manifest.sections:
            raise refuse(f"it has no section {MODEL!r}")
        sound: set[tuple[int, tuple[int, ...]]] = set()  # most arrays share theirs with others
        for section in manifest.sections.values():
            section.check(f"{where}: {section.name}", sound)
        return manifest

    def file_names(self, part: slice = slice(None)) -> list[str]:
        """The names of all files, or of a ``part`` of those of each section."""
        return [file_name(one.name, rank) for one in self.sections.values() for rank in one.files.ranks[part].tolist()]

    def file(self, name: str) -> StoredFile:
        """The file of this name."""
        section, _, number = name.partition("-")
        return self.sections[section].file(int(number.partition(".")[0]))


_INVALID = AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError, RecursionError


def _read_lines(file: BinaryIO) -> tuple[Any, list[Pieces]] | None:
    """The content and the pieces of a manifest as ``Manifest.text`` writes it: each pieces are one line of JSON, so
    that few numbers at a time are objects. None for any other text, which may be a manifest, too."""
    digest, pieces, head = hashlib.sha256(), [], file.readline()
    digest.update(head.rstrip())
    for line in file:
        if line.startswith(b"]"):
            own = line.rfind(b',"sha256":"')
            digest.update(memoryview(line)[:own])
            digest.update(line[own + 76 :].rstrip())
            is_whole = line[own:][11:75] == digest.hexdigest().encode() and not file.read(1)
            head += line
            del line
            content = parse_json(head) if is_whole else {}
            return (content, pieces) if content.get("version") == VERSION else None
        digest.update(line.rstrip())
        pieces.append(_pieces(json.loads(line.rstrip(b",\n")), VERSION))
    return None


def _digest(texts: Iterable[str]) -> str:
    """The SHA-256 of texts, one after the other."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode())
    return digest.hexdigest()


_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def _section(name: str, content: Mapping[str, Any], pieces: Sequence[Pieces], version: int) -> Section:
    """A section from JSON; ``pieces``: those of the manifest."""
    if version == 1:
        return _section_of_blocks(name, content)

    empty: dict[int, Pieces] = {}  # by the number of dims, which pieces of no rank do not show

    def arrays(listed: Any) -> Arrays:
        found = {}
        for array, shape, dtype, number in listed:
            known, one = _shape(shape, dtype), pieces[_whole_number(number)]
            if not len(one.ranks):
                one = empty.setdefault(len(known), Pieces(np.zeros((0, 2, len(known)), np.int64), one.ranks))
            found[_text(array)] = known, dtype, one
        return found

    listed, files = content["arrays"], content["files"]
    if version == 2:  # arrays by name, in the order of files, and a row for each file
        listed = [[array, *facts] for array, facts in _mapping(listed).items()]
        files = [[row[0] for row in files], [row[1] for row in files], "".join(sha256 for *_, sha256 in files)]
    ranks, firsts, sha256 = _numbers(files[0]), _numbers(files[1]), _match(_HASHES, files[2])
    if not len(ranks) == len(firsts) == len(sha256) / 64 or (np.diff(ranks) <= 0).any() or ranks.max(initial=0) > _MOST:
        raise ValueError(f"{len(ranks)} files, which begin at {len(firsts)} bytes and have {len(sha256)} digits")
    own = [(_numbers(ranks).tolist(), arrays(listed)) for ranks, listed in content.get("own", ())]
    return Section(name, arrays(listed), Files(ranks, firsts, sha256), own)


def _section_of_blocks(name: str, content: Mapping[str, Any]) -> Section:
    """A section of version 1, in which each array lists its blocks, with their files, offsets and hashes."""
    arrays, places = {}, []
    files: dict[int, tuple[int, bytes]] = {}  # the first offset, and the hashes, by rank
    for array, listed in content.items():
        shape, ranks = _shape(listed["shape"], listed["dtype"]), []
        for _, _, file, offset, sha256 in listed["blocks"]:
            places.append((file, offset))
            ranks.append(int(file.partition("-")[2].partition(".")[0]))
            first, hashes = files.get(ranks[-1], (offset, b""))
            files[ranks[-1]] = first, hashes + bytes.fromhex(_match(_HASHES, sha256))
        bounds = _numbers([number for start, stop, *_ in listed["blocks"] for number in (*start, *stop)])
        pieces = Pieces(bounds.reshape(len(ranks), 2, len(shape)), _numbers(ranks))
        arrays[_text(array)] = shape, listed["dtype"], pieces
    columns = Files(_numbers(sorted(files)), _numbers([files[rank][0] for rank in sorted(files)]), "")
    section = Section(name, arrays, columns, hashes={rank: hashes for rank, (_, hashes) in files.items()})
    if [(block.file, block.offset) for array in section.values() for block in array.blocks] != places:
        raise ValueError(f"blocks of {name} are not where they should be")
    return section


def _pieces(content: Any, version: int) -> Pieces:
    bounds, ranks = map(_numbers, content)
    columns = len(bounds) // max(1, len(ranks))
    bounds = bounds.reshape(len(ranks), columns) if version == 2 else bounds.reshape(columns, len(ranks)).T
    return Pieces(np.ascontiguousarray(bounds).reshape(len(ranks), 2, columns // 2), ranks)


def _shape(shape: Any, dtype: Any) -> tuple[int, ...]:
    if dtype not in DTYPES:
        raise ValueError(f"a dtype {dtype!r}")
    shape = tuple(map(_whole_number, shape))
    if len(shape) > _MOST_DIMS or prod(shape) >= _LARGEST:
        raise ValueError(f"an array of shape {shape}")
    return shape


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


def _as_json(numbers: np.ndarray) -> Any:
    """A list of numbers for JSON; if that is shorter, as runs with equal steps: their first numbers, steps, lengths."""
    begins = np.append(0, np.flatnonzero(np.diff(numbers, 2)) + 2)
    if 3 * len(begins) >= len(numbers):
        return numbers.tolist()
    steps = np.append(np.diff(numbers), 0)[begins]
    return {"runs": [numbers[begins].tolist(), steps.tolist(), np.diff(begins, append=len(numbers)).tolist()]}


def _numbers(content: Any) -> np.ndarray:
    """A list of whole numbers as an array, also of runs."""
    is_list = isinstance(content, list)
    numbers = np.array(content if is_list else _mapping(content)["runs"])
    fits = numbers.ndim == (1 if is_list else 2) and (numbers.dtype == np.int64 or not numbers.size)
    if fits and not is_list:
        firsts, steps, lengths = numbers
        fits = lengths.min(initial=1) > 0 and lengths.max(initial=0) <= _MOST and lengths.sum() <= _MOST
        if fits:
            places = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            numbers = np.repeat(firsts, lengths) + np.repeat(steps, lengths) * places
    if not fits or not 0 <= numbers.min(initial=0) <= numbers.max(initial=0) < _LARGEST:
        raise ValueError(f"{content!r:.80} where a list of whole numbers should be")
    return numbers.astype(np.int64, copy=False)


def _wrong_with(shape: tuple[int, ...], bounds: np.ndarray) -> str:
    """The reason why the rectangles ``bounds[rectangles 2 dims]`` do not hold each element once, or ""."""
    has_dims, outside = bounds.shape[2] == len(shape), np.ones(len(bounds), bool)
    if has_dims:
        outside = ((bounds[:, 0] > bounds[:, 1]) | (bounds[:, 1] > shape)).any(axis=1)
    if outside.any():
        return f"a block {Rectangle(*map(tuple, bounds[outside][0].tolist()))} is no part of it"
    if covers_once(bounds, shape) if has_dims else not prod(shape):
        return ""
    total = int((bounds[:, 1] - bounds[:, 0]).prod(axis=1).sum())
    fault = "overlap" if total >= prod(shape) else "do not cover it"
    return f"its blocks {fault}: they hold {total} of {prod(shape)} elements"
