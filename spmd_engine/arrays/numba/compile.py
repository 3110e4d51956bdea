"""Compiles loops to object code, which any later process links without Numba (``object_code``).

Each loop has an entry, a C function of its name, which Python calls with array objects. It raises TypeError for
arguments that the loop is not compiled for, before anything is read or written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils, compiler, types
from numba.core.cpu_options import FastMathOptions
from numba.core.registry import cpu_target
from numba.np.arrayobj import populate_array

from spmd_engine.arrays.numba.kernels import Either, Loop

# Offsets of the data pointer, and of the fields behind it, in an array object, PyArrayObject_fields of NumPy's
# ndarraytypes.h; and of the type's number in a PyArray_Descr.
DATA = object.__basicsize__
DIMENSIONS, SHAPE, DESCRIPTION, FLAGS = DATA + 8, DATA + 16, DATA + 40, DATA + 48
TYPE_NUMBER = object.__basicsize__ + 12
CONTIGUOUS_AND_ALIGNED = 0x0001 | 0x0100

BYTE, WORD, LONG = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def compile_loops(module: str, keep: Callable[[str, int, Callable[[], bytes]], bytes]) -> tuple[list[str], bytes]:
    """The names of all loops in a module of this package, and their object code.

    ``keep(name, of, make)`` returns the program of a loop, one ``of`` so many, which ``make`` makes. Raises
    RuntimeError if array objects have another layout than ``_array`` reads.
    """
    _check_layout()
    loops: dict[str, tuple[Loop, list[Any]]] = {}
    for name, loop in vars(import_module(f"spmd_engine.arrays.numba.{module}")).items():
        if isinstance(loop, Loop):
            kinds = loop.function.__annotations__.values()
            for half in (False, True) if any(isinstance(kind, Either) for kind in kinds) else (False,):
                arguments = [kind.of(half) if isinstance(kind, Either) else kind for kind in kinds]
                loops[f"{name}_bfloat16" if half else name] = loop, arguments
    programs = [keep(name, len(loops), partial(_program, name, *loop)) for name, loop in loops.items()]
    return list(loops), object_code_of(program.decode() for program in programs)


def _program(name: str, loop: Loop, arguments: list[Any]) -> bytes:
    """The LLVM program of a loop and its entry, the only name in it that others see: programs of several processes may
    use one name for different functions."""
    result = _compile(loop, arguments)
    program = binding.parse_assembly(result.library.get_llvm_str())
    program.link_in(binding.parse_assembly(str(_entry(name, result))))
    for defined in (*program.functions, *program.global_variables):
        if not defined.is_declaration and defined.name != name:
            defined.linkage = "internal"
    return str(program).encode()


def _compile(loop: Loop, arguments: list[Any]) -> compiler.CompileResult:
    """Compile ``loop`` for arguments of these types, without Numba's wrappers that Python calls."""
    flags: Any = compiler.Flags()
    flags.error_model = "numpy"
    flags.fastmath = FastMathOptions(set(loop.fastmath))
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    target: Any = cpu_target
    target.typing_context.refresh()
    target.target_context.refresh()
    return compiler.compile_extra(
        target.typing_context, target.target_context, loop.function, tuple(arguments), types.none, flags, {}
    )


def object_code_of(programs: Iterable[str]) -> bytes:
    """Position-independent object code of LLVM programs for this processor."""
    target: Any = cpu_target.target_context
    _, cpu, features = target.codegen().magic_tuple()
    machine = binding.Target.from_default_triple().create_target_machine(cpu, features, 3, reloc="pic")
    linked, *others = map(binding.parse_assembly, programs)
    for program in others:
        linked.link_in(program)
    return machine.emit_object(linked)


def _entry(name: str, result: compiler.CompileResult) -> ir.Module:
    """The program of an entry, a METH_FASTCALL function: its arguments are an array of arguments, and their number."""
    context, kinds = result.target_context, result.signature.args
    module, pointer = context.create_module(f"entry of {name}"), ir.PointerType(BYTE)
    entry = ir.Function(module, ir.FunctionType(pointer, [pointer, ir.PointerType(pointer), LONG]), name)
    builder = ir.IRBuilder(entry.append_basic_block())
    python = context.get_python_api(builder)

    def unless(fits: ir.Value, message: str) -> None:
        with builder.if_then(builder.not_(fits), likely=False):
            error = context.get_c_value(builder, python.pyobj, "PyExc_TypeError")
            python.err_set_string(builder.load(error), f"{name}: {message}")
            builder.ret(python.get_null_object())

    count = sum(kind.count if isinstance(kind, types.UniTuple) else 1 for kind in kinds)
    unless(builder.icmp_signed("==", entry.args[2], LONG(count)), f"takes {count} arguments, a tuple's one by one")
    arguments = (builder.load(builder.gep(entry.args[1], [LONG(place)])) for place in range(count))

    def number(kind: types.Type) -> Any:
        if kind == types.float32:
            return builder.fptrunc(python.float_as_double(next(arguments)), ir.FloatType())
        return python.long_as_longlong(next(arguments))

    values = []
    for kind in kinds:
        if isinstance(kind, types.Array):
            values.append(_array(context, builder, kind, next(arguments), unless))
        elif isinstance(kind, types.UniTuple):
            values.append(cgutils.pack_array(builder, [number(kind.dtype) for _ in range(kind.count)]))
        else:
            values.append(number(kind))
    with builder.if_then(cgutils.is_not_null(builder, python.err_occurred()), likely=False):
        builder.ret(python.get_null_object())  # an argument is not a number
    state = python.save_thread()
    loop = context.declare_function(module, result.fndesc)
    context.call_conv.call_function(builder, loop, types.none, kinds, values)
    python.restore_thread(state)
    builder.ret(python.make_none())
    return module


def _array(context, builder: ir.IRBuilder, kind: types.Array, array_object: ir.Value, unless: Callable) -> ir.Value:
    """Numba's array of an array object. If it has more dimensions than the loop's type, the first ones are merged."""

    def field(of: ir.Value, offset: int, type_: ir.Type) -> ir.Value:
        return builder.load(builder.bitcast(builder.gep(of, [LONG(offset)]), type_.as_pointer()))

    dtype, pointer = np.dtype(str(kind.dtype)), ir.PointerType(BYTE)
    dimensions = field(array_object, DIMENSIONS, WORD)
    number = field(field(array_object, DESCRIPTION, pointer), TYPE_NUMBER, WORD)
    flags = builder.and_(field(array_object, FLAGS, WORD), WORD(CONTIGUOUS_AND_ALIGNED))
    fits = builder.and_(
        builder.icmp_signed("==", number, WORD(dtype.num)),
        builder.icmp_signed("==", flags, WORD(CONTIGUOUS_AND_ALIGNED)),
    )
    fits = builder.and_(fits, builder.icmp_signed(">=", dimensions, WORD(kind.ndim)))
    unless(fits, f"wants contiguous arrays of {dtype} with {kind.ndim} dimensions or more")
    sizes = field(array_object, SHAPE, ir.PointerType(LONG))
    merged = builder.sext(builder.sub(dimensions, WORD(kind.ndim - 1)), LONG)
    first = cgutils.alloca_once_value(builder, LONG(1))
    with cgutils.for_range(builder, merged) as dimension:
        size = builder.load(builder.gep(sizes, [dimension.index]))
        builder.store(builder.mul(builder.load(first), size), first)
    shape = [builder.load(first)]
    shape += [builder.load(builder.gep(sizes, [builder.add(merged, LONG(k))])) for k in range(kind.ndim - 1)]
    strides: list[Any] = [LONG(dtype.itemsize)]
    for size in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], size))
    data = builder.bitcast(field(array_object, DATA, pointer), context.get_data_type(kind.dtype).as_pointer())
    array = context.make_array(kind)(context, builder)
    populate_array(array, data=data, shape=shape, strides=strides, itemsize=LONG(dtype.itemsize), meminfo=None)
    return array._getvalue()


def _check_layout() -> None:
    """Raise RuntimeError unless the fields of an array object lie at the offsets above."""

    def word(address: int, type_: type[ctypes.c_int32 | ctypes.c_int64] = ctypes.c_int64) -> int:
        return type_.from_address(address).value

    x = np.zeros((2, 3, 4), np.float32)
    fields = [
        word(id(x) + DATA),
        word(id(x) + DIMENSIONS, ctypes.c_int32),
        [word(word(id(x) + SHAPE) + 8 * k) for k in range(x.ndim)],
        word(id(x) + DESCRIPTION),
        word(id(x.dtype) + TYPE_NUMBER, ctypes.c_int32),
        word(id(x) + FLAGS, ctypes.c_int32),
    ]
    if fields != [x.ctypes.data, x.ndim, list(x.shape), id(x.dtype), x.dtype.num, x.flags.num]:
        raise RuntimeError("the layout of this NumPy's arrays is not the one that compiled loops read")
