"""``bench products``: how fast libraries of matrix products are on this machine."""

from __future__ import annotations

from pathlib import Path

import click
from threadpoolctl import threadpool_limits

from spmd_engine.arrays.product_libraries.installed import LIBRARIES, load
from spmd_engine.arrays.products import NUMPY, SIZES
from spmd_engine.cli.bench.measuring import count_option, output_option, report, spread
from spmd_engine.planning.machine.products import Rates, measure_products

#: Products (m, k, n) of a step with 2,048 tokens or 32 images of 64x64 pixels.
OF_MODELS = {
    "gpt-mini: mlp": (2048, 384, 1536),
    "gpt-mini: mlp, back": (2048, 1536, 384),
    "gpt-mini: mlp, dw": (384, 2048, 1536),
    "gpt-mini: qkv": (2048, 384, 1152),
    "gpt-mini: head": (2048, 384, 256),
    "gpt-mini: scores": (256, 64, 64),
    "resnet18: 3x3 of 64": (8192, 576, 64),
    "resnet18: 3x3 of 512": (128, 4608, 512),
}


@click.command(short_help="Speed of matrix products, by library, dtype and size.")
@count_option("rounds", 3)
@output_option
def products(rounds: int, output: Path | None) -> None:
    """Measure products in one thread, by NumPy and by the libraries that are installed, in GFLOP/s.

    The first rows represent the size classes, by which --products auto chooses; the others are products of models.
    bfloat16 is the dtype of operands and results. A library has no figure where it cannot compute a product.

    \b
      python -m spmd_engine bench products
    """
    sizes = SIZES | OF_MODELS
    with threadpool_limits(1, "blas"):
        libraries = [library for name in LIBRARIES if (library := load(name)) is not None]
        measured = [measure_products(libraries, sizes) for _ in range(rounds)]
    names = [NUMPY, *(library.name for library in libraries)]
    rows = [
        (f"{size} {sizes[size]}", dtype, *(_speed(measured, dtype, size, name) for name in names))
        for dtype in measured[0]
        for size in sizes
    ]
    versions = [f"{library.name} {library.version}" for library in libraries]
    report(("product (m, k, n)", "dtype", NUMPY, *versions), rows, measured, output)


def _speed(measured: list[Rates], dtype: str, size: str, name: str) -> str:
    rates = [by_library[name] for rates in measured if name in (by_library := rates[dtype][size])]
    return spread(rates, 1e-9) if rates else "-"
