"""Compiled loops in this process: linked from object code by LLVM, without Numba, which takes a second to load.

The first process on a machine compiles (``fast_compile``); object code is kept on disk (``fast_cache``).
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence

from llvmlite import binding

from spmd_engine.arrays.fast_cache import kept

_FASTCALL = 0x0080  # METH_FASTCALL of Python's methodobject.h


class _MethodDef(ctypes.Structure):
    """PyMethodDef of Python's methodobject.h."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


def linked(name: str, modules: Sequence[str]) -> Loops:
    """The loops of some modules of this package, whose object code is kept under a name."""

    def compile_them() -> bytes:
        from spmd_engine.arrays.fast_compile import compile_loops

        names, code = compile_loops(modules)
        return json.dumps(names).encode() + b"\n" + code

    names, _, code = kept(name, compile_them).partition(b"\n")
    return Loops(json.loads(names), code)


class Loops:
    """Functions by name, of object code that ``compile_loops`` has made; RuntimeError if it cannot be linked.

    They take arrays and numbers, write to arrays, and return nothing. They raise TypeError for an array that is not
    contiguous, of another type, or with fewer dimensions than the loop has; that arrays of several arguments have
    lengths that belong together is for the caller to see to.
    """

    def __init__(self, names: Sequence[str], code: bytes) -> None:
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        library = binding.JITLibraryBuilder().add_object_img(code).add_current_process()
        for name in names:
            library.export_symbol(name)
        self._linker = binding.create_lljit_compiler()
        self._code = library.link(self._linker, "loops")
        self._definitions = [_MethodDef(name.encode(), self._code[name], _FASTCALL, None) for name in names]
        new = ctypes.pythonapi.PyCFunction_NewEx
        new.argtypes, new.restype = [ctypes.c_void_p] * 3, ctypes.py_object
        for name, definition in zip(names, self._definitions, strict=True):
            setattr(self, name, new(ctypes.addressof(definition), None, None))
