"""Lays object code out as it lies in memory, once: a linker takes longer to load than a small job's first step."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

# The tables of object code: Elf64_Shdr, Elf64_Sym and Elf64_Rela of Linux's elf.h.
_SECTION = np.dtype(
    {
        "names": ["type", "flags", "offset", "size", "link", "info", "alignment"],
        "formats": ["u4", "u8", "u8", "u8", "u4", "u4", "u8"],
        "offsets": [4, 8, 24, 32, 40, 44, 48],
        "itemsize": 64,
    }
)
_SYMBOL = np.dtype(
    [("name", "u4"), ("info", "u1"), ("other", "u1"), ("section", "u2"), ("value", "u8"), ("size", "u8")]
)
_RELOCATION = np.dtype([("offset", "u8"), ("kind", "u4"), ("symbol", "u4"), ("addend", "i8")])
_X86_64, _GLOBAL = 62, 1
_SYMBOLS, _RELOCATIONS, _EMPTY = 2, 4, 8  # types of sections
_WRITABLE, _LOADED = 1, 2  # flags of sections
# Relocations of LLVM's large code model, 8 bytes each: the System V ABI's supplement for x86-64 defines them.
_PC64, _GOTOFF64, _GOT64, _GOTPC64 = 24, 25, 27, 29


class Image(NamedTuple):
    """Code that runs at any address.

    ``loops``: the offset of each. ``imports``: by symbol of the process, the offset of the 8 bytes into which its
    address must be written before a loop runs. ``fixed``: the first bytes, whole pages, to which nothing writes; if
    there are none, this is object code, which LLVM links.
    """

    code: bytes
    loops: Mapping[str, int]
    imports: Mapping[str, int]
    fixed: int


def image_of(names: Iterable[str], code: bytes) -> Image:
    """The image of object code with these loops; the object code itself if it is not x86-64's, or has relocations that
    LLVM alone knows."""
    unlinked = Image(code, dict.fromkeys(names, 0), {}, 0)
    if code[:6] != b"\x7fELF\2\1" or int.from_bytes(code[18:20], "little") != _X86_64:
        return unlinked

    def rows(kind: np.dtype, section: np.void) -> list[tuple]:
        return np.frombuffer(code, kind, section["size"] // kind.itemsize, section["offset"]).tolist()

    def text(place: int) -> str:
        return code[texts + place : code.index(0, texts + place)].decode()

    first, count = int.from_bytes(code[40:48], "little"), int.from_bytes(code[60:62], "little")
    sections = np.frombuffer(code, _SECTION, count, first)
    image, places, fixed = bytearray(), dict[int, int](), 0
    for writable in (0, _WRITABLE):
        fixed = len(image)
        for number, (kind, flags, offset, size, _, _, alignment) in enumerate(sections.tolist()):
            if flags & (_LOADED | _WRITABLE) == _LOADED | writable:
                image += bytes(-len(image) % alignment)
                places[number] = len(image)
                image += bytes(size) if kind == _EMPTY else code[offset : offset + size]
        image += bytes(-len(image) % mmap.PAGESIZE)
    table, imports = len(image), dict[str, int]()  # of addresses of the process
    (listed,) = sections[sections["type"] == _SYMBOLS]
    symbols, texts = rows(_SYMBOL, listed), int(sections[listed["link"]]["offset"])
    for section in sections[sections["type"] == _RELOCATIONS]:
        for offset, kind, number, addend in rows(_RELOCATION, section):
            name, _, _, part, value, _ = symbols[number]
            at = places[int(section["info"])] + offset
            if kind == _GOTPC64:
                value = table - at
            elif kind == _GOT64 and not part:
                value = imports.setdefault(text(name), table + 8 * len(imports)) - table
            elif kind in (_GOTOFF64, _PC64) and part:
                value += places[part] - (table if kind == _GOTOFF64 else at)
            else:
                return unlinked
            image[at : at + 8] = (value + addend).to_bytes(8, "little", signed=True)
    loops = {
        text(name): places[part] + value for name, info, _, part, value, _ in symbols if info >> 4 == _GLOBAL and part
    }
    return Image(bytes(image) + bytes(8 * len(imports)), loops, imports, fixed)
