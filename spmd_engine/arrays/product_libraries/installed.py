"""The libraries of matrix products that are installed: oneDNN and MKL."""

from __future__ import annotations

import site
import sys
import sysconfig
from glob import escape, glob
from pathlib import Path
from re import findall

from spmd_engine.arrays.product_libraries.library import ProductLibrary
from spmd_engine.arrays.product_libraries.mkl import MKL
from spmd_engine.arrays.product_libraries.onednn import OneDNN

#: By the name of ``--products``.
LIBRARIES: dict[str, type[ProductLibrary]] = {library.name: library for library in (OneDNN, MKL)}


def load(name: str) -> ProductLibrary | None:
    """The library of this name; None if it is not installed.

    Raises OSError, in one line, if it is installed but cannot be used: it needs another library, or is too old.
    """
    library = LIBRARIES[name]
    path = _installed(library.file)
    return None if path is None else library(path)


def _installed(file: str) -> str | None:
    """The path of the newest library of this name in the environment's ``lib``, where wheels and Conda put them, the
    user's, or the system's."""
    own, system = (sys.prefix, site.getuserbase(), "/usr/local"), sysconfig.get_config_var("MULTIARCH")
    folders = [*(f"{folder}/lib" for folder in own), f"/usr/lib/{system}", "/usr/lib64"]
    paths = [path for folder in folders for path in glob(f"{escape(folder)}/{file}*")]
    return max(paths, key=lambda path: [int(n) for n in findall(r"\d+", Path(path).resolve().name)], default=None)
