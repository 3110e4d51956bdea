"""How fast libraries of matrix products are, by dtype and size class: measured once a machine, and kept in a file."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from itertools import chain, cycle
from pathlib import Path
from time import thread_time

import numpy as np
from threadpoolctl import threadpool_limits

from spmd_engine.arrays import products
from spmd_engine.arrays.product_libraries.installed import LIBRARIES, load
from spmd_engine.arrays.product_libraries.library import ProductLibrary, blas_threads, numpy_blas
from spmd_engine.arrays.products import DTYPES, NUMPY, SIZES, product_by
from spmd_engine.foreign import parse_json, read_text
from spmd_engine.planning.machine.machine import calibrated_file
from spmd_engine.runtime.environment import processor

logger = logging.getLogger(__name__)

MARGIN = 1.05  #: by which another library must be faster than NumPy
HOPELESS = 4.0  #: times NumPy's seconds in the first call, after which a library is not measured further
TURNS = 7
#: Bytes through which operands rotate, so that they leave the cache as in a step. Measured products were as fast as
#: those in steps; products of cached operands are up to twice as fast, of operands in memory 0.8 times.
POOL = 1 << 24
_MOST = 1 << 16  # bytes of the file
_TURN = 4e-3  # seconds of a turn
_CALL = 1e-3  # seconds that a first call may take in addition
_TOLERANCE = 2.0**-6  # largest error of a library's results, relative to the largest result

#: Operations a second, by dtype, size class and library.
Rates = Mapping[str, Mapping[str, Mapping[str, float]]]


def fastest(names: Sequence[str], again: bool = False) -> list[tuple[str, str, str]]:
    """Dtype, size class and the fastest of these libraries where it is not NumPy, measured now or in an earlier job."""
    rates, several_threads = kept_rates(names, again), blas_threads() > 1
    chosen = []
    for dtype, by_size in rates.items():
        for size, by_library in by_size.items():
            usable = (name for name in names if not (several_threads and LIBRARIES[name].one_thread))
            known = {name: by_library[name] for name in usable if name in by_library}
            best = max(known, key=known.__getitem__, default=NUMPY)
            if best != NUMPY and known[best] > MARGIN * by_library[NUMPY]:
                chosen.append((dtype, size, best))
    return chosen


def rates_file(libraries: Sequence[ProductLibrary]) -> Path | None:
    """Where the rates with these libraries are kept, beside the file of ``calibrate``; None: nowhere.

    Its name depends on all that the rates depend on: other conditions are measured, and have another file.
    """
    blas = {f"{pool['internal_api']} {pool['version']} {pool.get('architecture', '')}" for pool in numpy_blas()}
    versions = {f"{library.name} {library.version}" for library in libraries}
    conditions = [processor(), f"numpy {np.__version__}", *sorted(blas | versions)]
    file = calibrated_file()
    return file and file.with_suffix(f".products-{sha256(repr(conditions).encode()).hexdigest()[:12]}.json")


def kept_rates(names: Sequence[str], again: bool = False) -> Rates:
    """The rates of this machine with these libraries; measured, and kept in a file, if they are not, or ``again``.

    The first of several jobs that measure at the same time decides for all: its file stays.
    """
    with threadpool_limits(1, "blas"):
        libraries = [library for name in names if (library := load(name)) is not None]
        file = rates_file(libraries)
        if not again and file is not None:
            if (kept := _read(file)) is not None:
                return kept
            if again := file.exists():
                logger.warning("%s is damaged: products of matrices are measured again", file)
        rates = measure_products(libraries, SIZES)
    if file is None:
        return rates
    temporary = file.with_name(f".{file.name}.{os.urandom(8).hex()}")
    with suppress(OSError):  # then the next job measures
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(json.dumps(rates, indent=1))
            if again:
                temporary.replace(file)
            else:
                os.link(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)
    return _read(file) or rates


def _read(file: Path) -> Rates | None:
    """The rates in a file; None if it has others than positive numbers, or lacks some of NumPy's."""
    try:
        if not file.is_file():  # reading a pipe might never end
            return None
        content = parse_json(read_text(file, _MOST))
        rates = {dtype: {size: dict(content[dtype][size]) for size in SIZES} for dtype in DTYPES}
        numbers = [(by_library[NUMPY], *by_library.values()) for part in rates.values() for by_library in part.values()]
        fits = all(type(rate) in (int, float) and 0 < rate < np.inf for rate in chain(*numbers))
    except (OSError, KeyError, TypeError, ValueError, RecursionError):
        return None
    return rates if fits else None


def measure_products(libraries: Sequence[ProductLibrary], sizes: Mapping[str, tuple[int, int, int]]) -> Rates:
    """Operations a second of products (m, k, n) by NumPy and by each library in one thread, which is the caller's.

    It is the best of alternating turns, by processor time, so that other programs have little effect. Operands rotate
    through memory, as in a step. A library is left out where it does not take the operands, is far
    slower than NumPy, or computes another result.
    """
    return {
        dtype: {size: _rates_of(libraries, shape, kind) for size, shape in sizes.items()}
        for dtype, kind in DTYPES.items()
    }


def _rates_of(libraries: Sequence[ProductLibrary], shape: tuple[int, int, int], dtype: np.dtype) -> dict[str, float]:
    m, k, n = shape
    count = max(2, POOL // (dtype.itemsize * (m * k + k * n + m * n)))
    random = np.random.default_rng(0)
    one = random.standard_normal((m, k), np.float32).astype(dtype), random.standard_normal((k, n), np.float32)
    operands = cycle([(one[0].copy(), one[1].astype(dtype), np.empty((m, n), dtype)) for _ in range(count)])
    acts: dict[str, Callable[[], np.ndarray]] = {NUMPY: lambda: product_by(None, *next(operands))}
    acts |= {library.name: partial(lambda by: product_by(by, *next(operands)), library) for library in libraries}
    expected = acts[NUMPY]().astype(np.float32)
    many = max(1, round(_TURN / max(_seconds(acts[NUMPY]), 1e-7)))
    limit = HOPELESS * _seconds(acts[NUMPY], many) + _CALL
    for library in libraries:
        unfit = products.unfit.total()
        wrong = np.abs(acts[library.name]().astype(np.float32) - expected).max() > _TOLERANCE * np.abs(expected).max()
        if wrong or products.unfit.total() > unfit or _seconds(acts[library.name]) > limit:
            del acts[library.name]
    best = dict.fromkeys(acts, np.inf)
    for _ in range(TURNS):
        for name, act in acts.items():
            best[name] = min(best[name], _seconds(act, many))
    return {name: 2.0 * m * k * n / seconds for name, seconds in best.items()}


def _seconds(act: Callable[[], object], many: int = 1) -> float:
    """Processor seconds of this thread for one of ``many`` acts in a row."""
    began = thread_time()
    for _ in range(many):
        act()
    return max((thread_time() - began) / many, 1e-9)
