"""The manifest of a checkpoint: every array with the blocks that store it, and the facts of the training.

It is JSON, with a SHA-256 of itself. Only the division of arrays into blocks depends on the mesh; the arrays that are
read are the same for any division.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from math import prod
from operator import gt
from typing import Any

import numpy as np

from spmd_engine.errors import CheckpointError
from spmd_engine.foreign import parse_json, reading
from spmd_engine.formats.safetensors_header import DTYPES, dtype_of
from spmd_engine.sharding.rectangles import Rectangle

FORMAT, VERSION = "spmd_engine checkpoint", 1
#: Sections: parameters and buffers by name; optimizer state by kind/name; residues of single ranks by rank/name.
MODEL, OPTIMIZER, RESIDUES = "model", "optimizer", "residues"
_FILE = re.compile(r"[a-z]+-\d{5,}\.safetensors")
_HASH = re.compile(r"[0-9a-f]{64}")
_TEXT = re.compile(r"[^\x00\ud800-\udfff]*", re.DOTALL)
_LARGEST = 1 << 62


@dataclass(frozen=True)
class StoredBlock:
    """A rectangle of an array, in a file."""

    rectangle: Rectangle
    file: str
    offset: int  #: bytes from the file's beginning
    sha256: str


@dataclass(frozen=True)
class StoredArray:
    """An array in blocks; each element is in one block."""

    shape: tuple[int, ...]
    dtype: str  #: its name in safetensors files
    blocks: tuple[StoredBlock, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * dtype_of(self.dtype).itemsize

    def check(self, name: str) -> None:
        """Raise CheckpointError unless every element is in exactly one block."""
        fault = _wrong_with(self.shape, tuple(block.rectangle for block in self.blocks))
        if fault:
            raise CheckpointError(f"{name}{list(self.shape)}: {fault}")


Arrays = Mapping[str, StoredArray]


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
        content = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "mesh": self.mesh,
            "facts": dict(self.facts),
            "config": self.config,
            "sections": {
                section: {name: _array_as_json(array) for name, array in arrays.items()}
                for section, arrays in self.sections.items()
            },
        }
        return json.dumps(content | {"sha256": _digest(content)}, separators=(",", ":")) + "\n"

    @classmethod
    def parse(cls, text: str | bytes, where: str) -> Manifest:
        """Read and check a manifest. Raises CheckpointError, naming its place ``where``, if it is invalid."""

        def refuse(why: str) -> CheckpointError:
            return CheckpointError(f"{where} is damaged, or none of ours: {why}")

        with reading(f"{where} is damaged, or none of ours: no JSON", kind=CheckpointError):
            content = parse_json(text)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise refuse(f'it does not say "format": "{FORMAT}"')
        if content.get("version") != VERSION:
            raise CheckpointError(
                f"{where} has version {content.get('version')!r}; this program reads version {VERSION}"
            )
        stored_digest = content.pop("sha256", None)
        if stored_digest != _digest(content):
            raise refuse("its SHA-256 of itself differs")
        try:
            manifest = cls(
                step=_whole_number(content["step"]),
                sections={
                    _text(section): {_text(name): _array(array) for name, array in _mapping(arrays).items()}
                    for section, arrays in _mapping(content["sections"]).items()
                },
                facts=_mapping(content["facts"]),
                config=None if content["config"] is None else _mapping(content["config"]),
                mesh=_text(content["mesh"]),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise refuse(f"{type(error).__name__}: {error}") from error
        if MODEL not in manifest.sections:
            raise refuse(f"it has no section {MODEL!r}")
        for section, arrays in manifest.sections.items():
            for name, array in arrays.items():
                array.check(f"{where}: {section} {name}")
                if misplaced := [block.file for block in array.blocks if not block.file.startswith(f"{section}-")]:
                    raise refuse(f"{section} {name} should not be in {misplaced[0]}")
        return manifest

    def file_sizes(self) -> dict[str, int]:
        """The least size of each file in bytes, from the places of its blocks."""
        sizes: dict[str, int] = {}
        for arrays in self.sections.values():
            for array in arrays.values():
                for block in array.blocks:
                    end = block.offset + block.rectangle.size * dtype_of(array.dtype).itemsize
                    sizes[block.file] = max(sizes.get(block.file, 0), end)
        return sizes


def _array_as_json(array: StoredArray) -> dict[str, Any]:
    blocks = [[x.rectangle.start, x.rectangle.stop, x.file, x.offset, x.sha256] for x in array.blocks]
    return {"shape": array.shape, "dtype": array.dtype, "blocks": blocks}


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _array(content: Any) -> StoredArray:
    shape = _whole_numbers(_mapping(content)["shape"])
    if prod(shape) >= _LARGEST:
        raise ValueError(f"an array of shape {shape}")
    if content["dtype"] not in DTYPES:
        raise ValueError(f"a dtype {content['dtype']!r}")
    blocks = []
    for start, stop, file, offset, sha256 in content["blocks"]:
        rectangle = Rectangle(_whole_numbers(start), _whole_numbers(stop))
        if len(rectangle.start) != len(rectangle.stop):
            raise ValueError(f"a block from {start} to {stop}")
        blocks.append(StoredBlock(rectangle, _match(_FILE, file), _whole_number(offset), _match(_HASH, sha256)))
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
    if not isinstance(content, list) or len(content) > 32:
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
