"""Compiled loops in this process, without Numba, which takes a second to load.

The first process on a machine compiles (``compile``) and links (``image_of``); the result is cached on disk.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import logging
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spmd_engine.errors import UsageError
from spmd_engine.files import open_private, open_regular
from spmd_engine.runtime.launchers import launcher_rank, launcher_size, terminal

_FASTCALL = 0x0080  # METH_FASTCALL of Python's methodobject.h


class _MethodDef(ctypes.Structure):
    """PyMethodDef of Python's methodobject.h."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


def loaded(module: str) -> Loops:
    """The loops of a module of this package; their image is cached on disk under its name."""

    parts = Parts(module)

    def compile_module() -> bytes:
        from spmd_engine.arrays.numba.compile import compile_loops

        image = image_of(*compile_loops(module, parts.keep))
        return json.dumps(image[1:]).encode() + b"\n" + image.code

    facts, _, code = kept(module, compile_module).partition(b"\n")
    parts.remove()
    return Loops(Image(code, *json.loads(facts)))


class Loops:
    """Functions by name, of an image; raises RuntimeError or ValueError if it cannot be loaded.

    They take arrays and numbers, write to arrays, and return nothing. They raise TypeError for an array that is not
    contiguous, of another type, or with fewer dimensions than the loop has; the caller must ensure that the lengths
    of several arrays fit together.
    """

    def __init__(self, image: Image) -> None:
        self._code, addresses = _mapped(image) if image.fixed else _linked(image)
        self._definitions = [_MethodDef(name.encode(), at, _FASTCALL, None) for name, at in addresses.items()]
        new = ctypes.pythonapi.PyCFunction_NewEx
        new.argtypes, new.restype = [ctypes.c_void_p] * 3, ctypes.py_object
        for name, definition in zip(addresses, self._definitions, strict=True):
            setattr(self, name, new(ctypes.addressof(definition), None, None))


def _mapped(image: Image) -> tuple[Any, dict[str, int]]:
    """The image in memory, and the addresses of its loops while this memory is kept."""
    memory = mmap.mmap(-1, len(image.code), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(image.code)
    process = ctypes.CDLL(None)
    for name, at in image.imports.items():
        memory[at : at + 8] = ctypes.addressof(ctypes.c_char.in_dll(process, name)).to_bytes(8, "little")
    first = ctypes.c_char.from_buffer(memory)
    begin = ctypes.addressof(first)
    if process.mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(image.fixed), mmap.PROT_READ | mmap.PROT_EXEC):
        raise RuntimeError("the system lets no process run code that it has written: mprotect")
    return first, {name: begin + place for name, place in image.loops.items()}


def _linked(image: Image) -> tuple[Any, dict[str, int]]:
    """Object code that LLVM links, and the addresses of its loops while this code is kept."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    library = binding.JITLibraryBuilder().add_object_img(image.code).add_current_process()
    for name in image.loops:
        library.export_symbol(name)
    linker = binding.create_lljit_compiler()
    code = library.link(linker, "loops")
    return (linker, code), {name: code[name] for name in image.loops}


# --- Object code of loops is cached on disk: one process compiles it if it is missing, and the others wait
#
# The lock lies in the folder of the files, so only processes that share the folder wait for each other, and no other
# user can create it first. A process that finds the code takes no lock.


WARN_AFTER = 20.0  # seconds of waiting without progress after which rank 0 logs why it waits
LIMIT = 180.0  # seconds of waiting without progress after which a process compiles without the lock
PERIOD = 0.1  # seconds between attempts to take the lock

_CALLERS = "functions", "images", "places"  # modules of this folder that call loops and have none
#: The lines of /proc/cpuinfo on which compiled code depends, of x86, ARM and POWER.
_KINDS = "vendor_id", "cpu family", "model", "flags", "Features", "CPU ", "cpu\t"

logger = logging.getLogger(__name__)


def kept(name: str, make: Callable[[], bytes]) -> bytes:
    """The result of ``make``, computed by one of the processes that share a folder, and cached there under this name.

    Other sources, versions and processors have other files, since machines may share a home. A file that is damaged or
    another user's is replaced. A process that has waited for too long, or cannot take the lock or write, calls ``make``
    itself: ranks of one job must compute with the same kernels.
    """
    folder = cache_folder()
    if folder is None:
        return make()
    key = _key()
    path = _path(folder, name, key)
    code = _read(path, key)
    if code is None:
        with _locked(folder / f"{path.name}.lock"):
            code = _read(path, key)
            if code is None:
                code = make()
                _write(path, key, code)
    return code


def _path(folder: Path, name: str, key: bytes) -> Path:
    return folder / f"spmd_engine.{name}.{key.hex()[:16]}"


class Parts:
    """The programs of the loops of a module, each kept as it is made, until all are: a process that is stopped leaves
    them to the next one. Says on standard error how far it is, and in the lock, for the processes that wait."""

    def __init__(self, module: str) -> None:
        self._module, self._kept, self._done = module, list[Path](), 0

    @cached_property
    def _place(self) -> tuple[Path | None, bytes]:
        return cache_folder(), _key()

    def keep(self, name: str, of: int, make: Callable[[], bytes]) -> bytes:
        """The program that ``make`` makes, one ``of`` so many."""
        folder, key = self._place
        path = _path(folder, f"{self._module}.{name}", key) if folder else None
        program = _read(path, key) if path else None
        if not self._done:
            once = f", once: later starts find them in {folder}" if folder else ""
            self._say(f"compiles {of} loops for this processor{once}\n")
        if program is None:
            program = make()
            if path:
                _write(path, key, program)
        self._kept += [path] if path else []
        self._done += 1
        if terminal():
            self._say(f"has compiled {self._done} of {of} loops" + ("\r", "\n")[self._done == of])
        if folder:
            _sign(Path(f"{_path(folder, self._module, key)}.lock"), f", {self._done} of {of} loops")
        return program

    @staticmethod
    def _say(text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(f"spmd_engine: {f'rank {launcher_rank()} ' * (launcher_size() > 1)}{text}")
            sys.stderr.flush()

    def remove(self) -> None:
        """Remove the programs that this process has kept: all are linked into one file."""
        for path in self._kept:
            path.unlink(missing_ok=True)


def cache_folder() -> Path | None:
    """The folder for cached files: NUMBA_CACHE_DIR, or else the one of this package's compiled files, or the user's
    cache; None: none can be written."""
    chosen, caches = os.environ.get("NUMBA_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    folders = [chosen] if chosen else [Path(__file__).parent / "__pycache__", Path(caches or "~/.cache", "spmd_engine")]
    for folder in folders:
        with suppress(OSError, RuntimeError):  # RuntimeError: a user without a home
            path = Path(folder).expanduser()
            path.mkdir(parents=True, exist_ok=True)
            if os.access(path, os.W_OK):
                return path
    return None


def _key() -> bytes:
    """A digest of everything that the code depends on."""
    folder = Path(__file__).parent
    sources = [path for path in sorted(folder.glob("*.py")) if path.stem not in _CALLERS]
    sources.append(folder.parent / "factors.py")
    for compiler in ("numba", "llvmlite"):
        if (spec := find_spec(compiler)) is not None and spec.origin:
            sources += Path(spec.origin).parent.glob("_version.py")
    digest = hashlib.sha256()
    for path in sources:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    settings = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_"))
    digest.update(repr((sys.version, np.__version__, _processor(), settings)).encode())
    return digest.digest()


def _processor() -> list[str]:
    """Of this processor, the model and what it can do."""
    with suppress(OSError), open("/proc/cpuinfo") as file:
        first = takewhile(str.strip, file)  # the lines of a core
        return [line for line in first if line.startswith(_KINDS)]
    return []


def _read(path: Path, key: bytes) -> bytes | None:
    """The content of the file; None if there is no file that can be trusted with this key."""
    with suppress(OSError, UsageError), open(path, "rb", opener=open_regular) as file:
        if os.fstat(file.fileno()).st_uid in (os.geteuid(), 0):
            digest, content = file.read(32), file.read()
            return content if digest == hashlib.sha256(key + content).digest() else None
    return None


def _write(path: Path, key: bytes, content: bytes) -> None:
    """Replace the file atomically; if it cannot be written, nothing is cached."""
    import tempfile  # whose import takes longer than to load the loops

    with suppress(OSError):
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with open(descriptor, "wb") as file:
                file.write(hashlib.sha256(key + content).digest() + content)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock, if it can be taken in time."""
    try:
        descriptor = open_private(path, os.O_RDWR | os.O_CREAT)
    except (OSError, UsageError):  # a file of another user
        yield
        return
    try:
        try:
            _wait(descriptor, path)
        except OSError as error:  # a file system without locks
            logger.warning("no lock on %s (%s): this process compiles its loops without", path, error)
        yield
    finally:
        os.close(descriptor)  # which frees the lock


def _wait(descriptor: int, path: Path) -> None:
    """Wait for the lock and take it; ``LIMIT`` after its holder's last progress, log a warning and go on without it."""
    since, warned, holder = time.monotonic(), False, ""
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        before, holder = holder, os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
        since = since if holder == before else time.monotonic()
        waited, rank = time.monotonic() - since, launcher_rank()
        if waited > LIMIT:
            text = "rank %d has waited %.0f s: %s still has the lock %s. It compiles beside it"
            logger.warning(text, rank, waited, holder, path)
            return
        if waited > WARN_AFTER and not warned and rank == 0:
            warned = True
            text = "rank 0 has waited %.0f s for %s, which compiles loops, has the lock %s, and gets no further"
            logger.warning(text, waited, holder, path)
        time.sleep(PERIOD)
    os.ftruncate(descriptor, 0)
    _sign(path)


def _sign(path: Path, progress: str = "") -> None:
    """Write into the lock, which this process holds, which process it is, and its progress, for those that wait."""
    with suppress(OSError, UsageError), open(path, "r+b", opener=open_regular) as file:
        file.write(f"process {os.getpid()} on {os.uname().nodename}{progress}".encode())


# --- Object code laid out as it lies in memory, once: a linker takes longer to load than a small job's first step


# The tables of object code: Elf64_Shdr, Elf64_Sym and Elf64_Rela of Linux's elf.h.
_SECTION = np.dtype(
    [("name", "u4"), ("type", "u4"), ("flags", "u8"), ("address", "u8"), ("offset", "u8"), ("size", "u8")]
    + [("link", "u4"), ("info", "u4"), ("alignment", "u8"), ("entry", "u8")]
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
        for number, (_, kind, flags, _, offset, size, _, _, alignment, _) in enumerate(sections.tolist()):
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
